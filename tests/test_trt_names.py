"""Every name of TensorRT that our code uses, looked up in NVIDIA's own Python bindings. Needs no GPU.

The bindings are small wheels that pip gives without the libraries behind them: stubs stand in for those.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from importlib.util import find_spec
from pathlib import Path
from sysconfig import get_platform
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parent.parent
CACHE = ROOT / ".cache/trt-bindings"
FILES = [ROOT / "tformer_deploy/export/trt_builder.py", *sorted((ROOT / "tformer_deploy/engines/trt").glob("*.py"))]


@dataclass(frozen=True)
class Bindings:
    module: str
    package: str = ""
    """For pip; empty for the ones that are installed, with the libraries behind them."""
    version: str = ""


BINDINGS = {
    "8.6": Bindings("tensorrt_bindings", "tensorrt_bindings", "8.6.1"),
    "10.0": Bindings("tensorrt_bindings", "tensorrt_cu12_bindings", "10.0.1"),
    "11.4": Bindings("tensorrt_bindings", "tensorrt_cu13_bindings", "11.4.0.106"),
    "rtx": Bindings("tensorrt_rtx"),
}

VALUES = {
    "trt": "",
    "module": "",
    "network": "INetworkDefinition",
    "layer": "ILayer",
    "constant": "IConstantLayer",
    "cast": "ICastLayer",
    "output": "ITensor",
    "outputs": "ITensor",
    "_runtime": "Runtime",
    "plan": "ICudaEngine",
    "context": "IExecutionContext",
    "inspector": "EngineInspector",
    "runtime_config": "IRuntimeConfig",
    "_kernels": "IRuntimeCache",
}
"""Variable or attribute of our code -> class of what it holds, one or a list of them; the empty name is TensorRT."""
MEMBERS = {
    "ILayer.type": "LayerType",
    "ILayer.get_output": "ITensor",
    "ITensor.dtype": "DataType",
    "ICudaEngine.get_tensor_dtype": "DataType",
}
"""Member -> class of its value."""
MAKERS = ("network_options", "precision_options", "make_config")
"""Functions of our code that make options for Polygraphy."""
OPTIONS = {
    "strongly_typed": "NetworkDefinitionCreationFlag.STRONGLY_TYPED",
    "tf32": "BuilderFlag.TF32",
    "precision": "BuilderFlag.FP16",
    "precision_constraints": "BuilderFlag.OBEY_PRECISION_CONSTRAINTS",
    "max_aux_streams": "IBuilderConfig.max_aux_streams",
    "builder_optimization_level": "IBuilderConfig.builder_optimization_level",
    "version_compatible": "BuilderFlag.VERSION_COMPATIBLE",
    "hardware_compatibility_level": "IBuilderConfig.hardware_compatibility_level",
    "load_timing_cache": "IBuilderConfig.set_timing_cache",
    "profiling_verbosity": "IBuilderConfig.profiling_verbosity",
    "tactic_sources": "IBuilderConfig.set_tactic_sources",
}
"""Option -> what Polygraphy sets for it."""
TEXTS = {
    "matrix_multiply": "LayerType.MATRIX_MULTIPLY",
    "half": "DataType.HALF",
    "bf16": "DataType.BF16",
    **{name: f"DataType.{name}" for name in ("FLOAT", "HALF", "BF16", "INT32")},
}
"""Text that our code compares with a name, or with one in small letters -> that name."""
ONLY = {
    # TensorRt.typed
    "ILayer.precision": {"8.6"},
    "ILayer.set_output_type": {"8.6"},
    "BuilderFlag.FP16": {"8.6"},
    "BuilderFlag.OBEY_PRECISION_CONSTRAINTS": {"8.6"},
    # TensorRt.network_options
    "NetworkDefinitionCreationFlag.STRONGLY_TYPED": {"10.0"},
    # TensorRt.scratch
    "ICudaEngine.device_memory_size": {"8.6", "10.0"},
    "ICudaEngine.device_memory_size_v2": {"11.4", "rtx"},
    # engines.trt.api.Kernels and trt_builder.make_config
    "ICudaEngine.create_runtime_config": {"rtx"},
    "IExecutionContext.set_device_memory": {"rtx"},
    "ExecutionContextAllocationStrategy": {"rtx"},
    "BuilderFlag.REQUIRE_USER_ALLOCATION": {"rtx"},
    **{f"IRuntimeConfig.{name}": {"rtx"} for name in ("create_runtime_cache", "set_runtime_cache")},
    "IRuntimeConfig.set_execution_context_allocation_strategy": {"rtx"},
    **{f"IRuntimeCache.{name}": {"rtx"} for name in ("serialize", "deserialize")},
    # 8.6 builds nothing in bf16.
    "DataType.BF16": {"10.0", "11.4", "rtx"},
}
"""Name -> the versions that our code uses it with, where these are not all."""

LIBRARIES = ("nvinfer", "nvonnxparser", "nvinfer_plugin", "nvparsers")
SYMBOLS = (
    "createInferBuilder_INTERNAL",
    "createInferRefitter_INTERNAL",
    "createInferRuntime_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL",
    "createNvOnnxParser_INTERNAL",
    "getBuilderPluginRegistry",
    "getNvOnnxParserVersion",
    "getPluginRegistry",
    "initLibNvInferPlugins",
    # 8.6 also reads the formats of Caffe and UFF.
    "_ZN11nvuffparser15createUffParserEv",
    "_ZN11nvuffparser8FieldMapC1EPKcPKvNS_9FieldTypeEi",
    "_ZN14nvcaffeparser117createCaffeParserEv",
    "_ZN14nvcaffeparser123shutdownProtobufLibraryEv",
)
LOOKUP = """
import sys
from functools import reduce
from importlib import import_module

module = import_module(sys.argv[1])
print(module.__version__)
for name in sys.argv[2:]:
    try:
        reduce(getattr, name.split("."), module)
    except AttributeError:
        print(name)
"""


def class_of(node: ast.expr) -> str | None:
    """The class of an expression's value, as far as the tables tell."""
    match node:
        case ast.Name(id=name):
            return VALUES.get(name)
        case ast.Call(func=inner) | ast.Subscript(value=inner):
            return class_of(inner)
        case ast.Attribute(attr=attr):
            if name := member(node):
                return name if attr[0].isupper() else MEMBERS.get(name)
            return VALUES.get(attr)
    return None


def member(node: ast.Attribute) -> str:
    """The name of TensorRT that an attribute stands for, such as `LayerType.SHAPE`, or nothing."""
    owner = class_of(node.value)
    return "" if owner is None else f"{owner}.{node.attr}".removeprefix(".")


def names_at(node: ast.AST) -> Iterator[str]:
    """Names of TensorRT that one node uses."""
    match node:
        case ast.Attribute():
            yield member(node)
        case ast.For(iter=over) | ast.comprehension(iter=over) if class_of(over) == "INetworkDefinition":
            yield "INetworkDefinition.__getitem__"
        case ast.ClassDef(bases=bases, body=body):
            owners = [owner for base in bases if (owner := class_of(base))]
            yield from (f"{owner}.{own.name}" for owner in owners for own in body if isinstance(own, ast.FunctionDef))
        case ast.Constant(value=str(text)):
            yield TEXTS.get(text, "")
        case ast.FunctionDef(name=name) if name in MAKERS:
            yield from (OPTIONS.get(option, option) for option in options_in(node))


def options_in(function: ast.FunctionDef) -> Iterator[str]:
    """Keys of the dictionaries that a function makes or fills."""
    keys: list[ast.expr | None] = []
    for node in ast.walk(function):
        if isinstance(node, ast.Dict):
            keys += node.keys
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            keys.append(node.slice)
    yield from (str(key.value) if isinstance(key, ast.Constant) else ast.unparse(key) for key in keys if key)


def used_names(source: str) -> set[str]:
    """Names of TensorRT that a file uses."""
    return {name for node in ast.walk(ast.parse(source)) for name in names_at(node) if name}


@pytest.fixture(scope="module")
def used() -> set[str]:
    return set().union(*(used_names(file.read_text("utf-8")) for file in FILES))


def download(bindings: Bindings) -> Path:
    """The wheel for this Python, from the cache or through pip."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    wheels = f"{bindings.package}-{bindings.version}-{tag}-*.whl"
    if not list(CACHE.glob(wheels)):
        wanted = f"{bindings.package}=={bindings.version}"
        options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--retries=1", f"--dest={CACHE}"]
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", *options, wanted], capture_output=True, text=True
        )
        if done.returncode:
            reached = re.search(r"from versions: \d", done.stderr)
            assert not (reached and f"{tag}-{get_platform()}" == "cp311-linux-x86_64"), done.stderr  # it has them all
            pytest.skip(f"pip cannot get {wanted} for {tag}: {(done.stderr.splitlines() or ['no reason'])[-1]}")
    return next(CACHE.glob(wheels))


def make_stubs(folder: Path, major: str) -> None:
    """Libraries of functions that return nothing, enough to load the bindings."""
    source = folder / "stubs.c"
    source.write_text("".join(f"void *{symbol}(void) {{ return 0; }}\n" for symbol in SYMBOLS))
    for library in LIBRARIES:
        subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / f"lib{library}.so.{major}", source], check=True)


def look_up(bindings: Bindings, names: set[str], folder: Path) -> tuple[str, list[str]]:
    """The version of the bindings, and which of the names they lack."""
    command, env = [sys.executable], dict(os.environ)
    if bindings.package:
        with ZipFile(download(bindings)) as wheel:
            wheel.extractall(folder)
        make_stubs(folder, bindings.version.split(".")[0])
        command.append("-S")  # an installed TensorRT would bring its own libraries
        env |= {"PYTHONPATH": str(folder), "LD_LIBRARY_PATH": str(folder)}
    elif not find_spec(bindings.module):
        pytest.skip(f"{bindings.module} needs the 'trt-rtx' extra")
    done = subprocess.run(
        [*command, "-c", LOOKUP, bindings.module, *sorted(names)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    version, *missing = done.stdout.split()
    return version, missing


@pytest.mark.parametrize("key", BINDINGS)
def test_the_bindings_have_every_name_that_is_used_with_them(key: str, used: set[str], tmp_path: Path) -> None:
    bindings = BINDINGS[key]
    version, missing = look_up(bindings, {name for name in used if key in ONLY.get(name, BINDINGS)}, tmp_path)
    assert version == bindings.version or not bindings.package
    assert not missing, f"TensorRT {version} lacks {missing}"


def test_the_tables_name_only_what_is_used(used: set[str]) -> None:
    assert not {*ONLY, *MEMBERS, *OPTIONS.values(), *TEXTS.values()} - used
    assert set().union(*ONLY.values()) <= BINDINGS.keys()


def test_every_kind_of_use_is_found() -> None:
    source = """
def make_config(tensorrt):
    how = {"tf32": False, "new": 1}
    how["max_aux_streams"] = tensorrt.module.Sized.SMALL
for layer in self.network:
    layer.precision = layer.get_output(0).dtype.name.lower()
class Log(trt.ILogger):
    def log(self): other.name, self.severity, "half"
"""
    assert used_names(source) == {
        *("BuilderFlag.TF32", "new", "IBuilderConfig.max_aux_streams", "Sized", "Sized.SMALL"),
        *("INetworkDefinition.__getitem__", "ILayer.precision", "ILayer.get_output", "ITensor.dtype", "DataType.name"),
        *("ILogger", "ILogger.log", "DataType.HALF"),
    }


def test_the_names_of_the_cuda_runtime_exist() -> None:
    if not find_spec("cuda.bindings"):
        pytest.skip("cuda.bindings needs the 'trt-rtx' extra")
    from cuda.bindings import runtime

    source = (ROOT / "tformer_deploy/engines/trt/cuda.py").read_text("utf-8")
    names = re.findall(r"\bruntime\.(cuda\w+(?:\.cuda\w+)?)", source)
    assert len(set(names)) > 30
    for name in names:
        reduce(getattr, name.split("."), runtime)
