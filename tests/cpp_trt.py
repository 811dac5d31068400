"""libtformer with TensorRT, compiled against NVIDIA's headers, and a simulated GPU to run it on."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from .command import Done
from .cpp_library import ROOT, built, onnxruntime

HEADERS = Path(os.environ.get("TFORMER_TENSORRT_HEADERS", ROOT.parent / "shared" / "tensorrt-headers"))
"""A folder of each version has NvInfer.h; they are no part of the project."""
VERSIONS = ("8.6.1", "10.0.1", "10.16", "11.1")
SIMULATED = ROOT / "tests" / "simulated"
BINDING = ROOT / "engines/build-python"
"""Where `make native` builds the package for Python."""
SOURCES = ROOT / "engines" / "src" / "trt"
OFF = "src/trt/off.cpp"
"""What stands in for all others where there is no TensorRT."""
STUBS = {"VRuntime": "RuntimeStubs", "VCudaEngine": "PlanStubs", "VExecutionContext": "ContextStubs"}


@cache
def headers(version: str) -> Path:
    """A version's folder; skips where it is absent."""
    folder = HEADERS / version
    if not (folder / "NvInfer.h").is_file():
        pytest.skip(f"no headers of TensorRT in {folder}: name the folder above it in TFORMER_TENSORRT_HEADERS")
    return folder


@cache
def commands(target: str = "all", build: Path | None = None) -> list[list[str]]:
    """What the C++ build runs to make a target, one command after the other."""
    made = subprocess.run(
        ["ninja", "-C", build or built(), "-t", "commands", target], capture_output=True, text=True, check=True
    ).stdout
    return [shlex.split(line.removeprefix(": && ").removesuffix(" && :")) for line in made.splitlines()]


def own_command(build: Path | None = None) -> list[str]:
    """What compiles the file that stands in for TensorRT; skips where the build has TensorRT itself."""
    build = build or built()
    if not re.search(r"^TensorRT_ROOT:\w+=$", (build / "CMakeCache.txt").read_text(), re.M):
        pytest.skip(f"{build} was built with TensorRT_ROOT: the tests add TensorRT to a build without it")
    words = next(words for words in commands("libtformer.so", build) if words[-1].endswith(OFF))
    return words[1:] if Path(words[0]).name == "ccache" else words


def run(command: Sequence[str | Path], build: Path | None = None) -> None:
    """Run a compiler in a build's folder; what it says is the failure."""
    done = subprocess.run(list(map(str, command)), cwd=build or built(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


@cache
def object_of(source: Path, version: str, folder: Path, build: Path | None = None) -> Path:
    """One of our files, compiled against some headers with the flags of the build: warnings are errors."""
    own, out = own_command(build), folder / f"{source.stem}-{version}.o"
    includes = ["-isystem", SOURCES / "headers", "-isystem", headers(version)]
    run([*own[: own.index("-MD")], *includes, "-c", source, "-o", out], build)
    return out


def sources(version: str) -> dict[Path, str]:
    """Our files, and the headers that each is compiled with: where nothing of TensorRT is included, the newest do."""
    files = [source for source in sorted(SOURCES.glob("*.cpp")) if source.name != Path(OFF).name]
    return {source: version if "<NvInfer" in source.read_text() else VERSIONS[-1] for source in files}


@cache
def library(version: str, folder: Path) -> Path:
    """A folder with libtformer of these headers: all objects of the build but one, and those in its place."""
    for each in (version, VERSIONS[-1]):
        headers(each)  # skips before there is a folder
    made = folder / f"tformer-{version}"
    made.mkdir()
    objects = [object_of(source, of, folder) for source, of in sources(version).items()]
    link = next(list(words) for words in commands("libtformer.so") if "-shared" in words)
    at = next(i for i, word in enumerate(link) if word.endswith(f"{OFF}.o"))
    link[at : at + 1] = map(str, objects)
    out = link.index("-o") + 1
    link[out] = str(made / Path(link[out]).name)
    run(link)
    for name in ("libtformer.so.0", "libtformer.so"):
        (made / name).symlink_to(Path(link[out]).name)
    return made


@cache
def binding(version: str, folder: Path) -> Path:
    """A folder with the package tformer_native of these headers: the objects of `make native`, and ours of plans."""
    headers(version)
    if not (BINDING / "build.ninja").is_file():
        pytest.skip(f"{BINDING} has no build of tformer-native: make native")
    own_command()
    run(["cmake", "--build", BINDING, "--target", "_native"])
    objects = [object_of(source, of, folder) for source, of in sources(version).items()]
    link = next(list(words) for words in commands("_native", BINDING) if "-shared" in words)
    at = next(i for i, word in enumerate(link) if word.endswith("libtformer-all.a"))
    link[at:at] = map(str, objects)  # before the archive, so that its own is not looked at
    made = folder / f"native-{version}"
    shutil.copytree(ROOT / "engines/python/tformer_native", made / "tformer_native")
    out = link.index("-o") + 1
    link[out] = str(made / "tformer_native" / Path(link[out]).name)
    run(link, BINDING)
    return made


def stubs(version: str) -> str:
    """Functions for all that TensorRT's classes leave to the library."""
    text = (headers(version) / "NvInferImpl.h").read_text()
    made = ['#include "libcuda.hpp"', "namespace nvinfer1 {"]
    for name, stub in STUBS.items():
        body = re.search(rf"^class {name} .*?^}};", text, re.M | re.S)
        assert body
        made.append(f"class {stub} : public apiv::{name} {{ public:")
        for each in re.findall(r"virtual\s+([^;]*?noexcept)\s*=\s*0;", body[0]):
            made.append(f'{each} override {{ simulated_fault("nobody calls this: {" ".join(each.split())}"); }}')
        made.append("};")
    names = "".join(f"using nvinfer1::{stub};\n" for stub in STUBS.values())
    return "\n".join([*made, "}", names])


@cache
def gpu(version: str, folder: Path) -> Path:
    """A folder with a simulated driver and the TensorRT of these headers."""
    text = stubs(version)
    made = folder / f"gpu-{version}"
    made.mkdir()
    (made / "stubs.hpp").write_text(text)
    own = own_command()
    theirs = [word for i, word in enumerate(own) if "-isystem" in own[i - 1 : i + 1]]
    flags = [own[0], "-std=c++17", "-w", "-fPIC", "-shared", "-DORT_API_MANUAL_INIT"]
    flags += [f"-I{made}", f"-I{SIMULATED}", *theirs]
    run([*flags, SIMULATED / "libcuda.cpp", "-Wl,-soname,libcuda.so.1", "-o", made / "libcuda.so.1"])
    includes = [f"-I{SOURCES / 'headers'}", f"-I{headers(version)}"]
    name = made / f"libnvinfer.so.{version.partition('.')[0]}"
    run([*flags, *includes, SIMULATED / "libnvinfer.cpp", made / "libcuda.so.1", "-ldl", "-o", name])
    return made


def translate(
    libraries: Sequence[Path], bundle: Path, *flags: object, stdin: bytes = b"", **environment: object
) -> Done:
    """`tformer-cpp translate`, with other libraries in front."""
    variables = {
        **os.environ,
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries)),
        "TFORMER_ONNXRUNTIME": onnxruntime(),
        **{name: str(value) for name, value in environment.items()},
    }
    command = [built() / "examples" / "tformer-cpp", "translate", bundle, *map(str, flags)]
    return subprocess.run(command, input=stdin, capture_output=True, env=variables, timeout=120)


def as_json(done: Done) -> list[Any]:
    """What `--json` printed, as Python's command prints it: without the sums by which a beam is ranked."""
    assert done.returncode == 0, done.stderr.decode()

    def without_value(found: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in found.items() if name != "value"}

    return [json.loads(line, object_hook=without_value) for line in done.stdout.decode().splitlines()]
