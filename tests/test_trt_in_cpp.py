"""Continuous batching of plans in C++, by the package for Python and by the C API, on a simulated GPU.

Lines that join, leave and fail get what they get alone. `tests/trt_programs.py` has what runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import numpy_helper

from tformer_deploy.base.files import sha256
from tformer_deploy.bundle.plans import Profile
from tformer_deploy.engines.trt import api
from tformer_deploy.engines.trt.api import TensorRt, library_of, why_not_in_cpp
from tformer_deploy.export.checked import export_checked

from .configs import SSRU
from .conftest import VOCAB, small_config, write_checkpoint
from .cpp_library import ROOT, onnxruntime
from .cpp_trt import VERSIONS, binding, gpu, headers, library
from .params import long_but
from .simulated_trt import SIMULATED, simulate_build
from .trt_programs import SPOILED

NEWEST = VERSIONS[-1]
PROFILES = [Profile(1, 1, 8, 24), Profile(2, 2, 12, 12), Profile(8, 1, 24, 24), Profile(6, 5, 24, 24)]
"""So that those who join make the others move."""


@pytest.fixture(scope="module")
def bundle(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model with plans of many sizes. Read only."""
    headers(NEWEST)
    out = tmp_path_factory.mktemp("plans") / "bundle"
    export_checked(run, out, ["fp32", "trt"])
    simulate_build(out, "fp32", PROFILES)
    return out


def run_program(name: str, bundle: Path, packages: list[Path], libraries: list[Path], *arguments: object) -> list[str]:
    """What a program of `trt_programs` prints, with other packages and libraries in front."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [*packages, SIMULATED, ROOT])),
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries)),
        "TFORMER_CPP_BUILD": str(libraries[0]),
        "TFORMER_ONNXRUNTIME": onnxruntime(),
        "SIMULATED_TENSORRT": "110400",
    }
    command = [sys.executable, "-m", "tests.trt_programs", name, bundle, *arguments]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=env, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize("count", long_but((6, 60), "6"))
def test_lines_of_eight_threads_get_what_they_get_alone(count: int, bundle: Path, compiled: Path) -> None:
    run_program("scheduler", bundle, [binding(NEWEST, compiled)], [gpu(NEWEST, compiled)], count)


@pytest.mark.parametrize("seeds", long_but((6, 60), "6"))
def test_batches_are_those_of_python(seeds: int, bundle: Path, compiled: Path) -> None:
    run_program("batches", bundle, [binding(NEWEST, compiled)], [gpu(NEWEST, compiled)], seeds)


@pytest.mark.long
def test_states_of_recurrent_cells_move_along(compiled: Path, tmp_path: Path) -> None:
    run = write_checkpoint(tmp_path / "run", small_config(**SSRU))
    export_checked(run, tmp_path / "bundle", ["fp32", "trt"])
    simulate_build(tmp_path / "bundle", "fp32", PROFILES)
    run_program("batches", tmp_path / "bundle", [binding(NEWEST, compiled)], [gpu(NEWEST, compiled)], 12)


def test_a_server_is_warm_and_a_bad_line_fails_alone(bundle: Path, compiled: Path, tmp_path: Path) -> None:
    package = binding(NEWEST, compiled)
    run_program("server", spoiled(bundle, tmp_path / "bundle"), [package], [gpu(NEWEST, compiled)])


def spoiled(bundle: Path, out: Path) -> Path:
    """A copy where a word's embedding is no number."""
    subprocess.run(["cp", "-r", bundle, out], check=True)
    (header,) = (out / "trt/plans").glob("*/plans.json")
    values = json.loads(header.read_text())
    for plan in header.parent.glob("encoder-*.plan"):
        model = onnx.load(plan)
        (table,) = (each for each in model.graph.initializer if list(each.dims) == [VOCAB, small_config().d_model])
        weights = numpy_helper.to_array(table).copy()
        weights[SPOILED] = float("nan")
        table.CopyFrom(numpy_helper.from_array(weights, table.name))
        plan.write_bytes(model.SerializeToString())
        values["files"][plan.name] = sha256(plan)
    header.write_text(json.dumps(values))
    return out


def test_the_c_api_serves_lines_on_plans(bundle: Path, compiled: Path) -> None:
    run_program("serving", bundle, [], [library(NEWEST, compiled), gpu(NEWEST, compiled)])


@pytest.mark.long
def test_headers_of_another_version_leave_the_steps_to_python(bundle: Path, compiled: Path) -> None:
    (said,) = run_program("why_not", bundle, [binding("10.0.1", compiled)], [gpu(NEWEST, compiled)])
    assert said == "tformer-native was built with the headers of TensorRT 10.0.1, not of TensorRT 11.4.0"


def test_it_says_why_python_takes_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    native: Any = pytest.importorskip("tformer_deploy.engines.native", reason="tformer-native is not installed")
    found = {"tensorrt": "11.4.0", "rtx": "1.7.1"}
    for version, flavor, wanted in (
        ("", "tensorrt", "tformer-native was built without TensorRT_ROOT"),
        ("11.1.0", "tensorrt", ""),
        ("11.1.0", "rtx", ""),
        ("10.16.0", "rtx", "built with the headers of TensorRT 10.16.0, not of TensorRT for RTX 1.7.1"),
    ):
        monkeypatch.setattr(native, "tensorrt_headers", lambda version=version: version)
        said = why_not_in_cpp(TensorRt(flavor, None, found[flavor]))
        assert said.endswith(wanted) and bool(said) == bool(wanted)
    monkeypatch.setattr(native, "native_version", "9.9.9")
    assert "tformer-native is of version 9.9.9" in why_not_in_cpp(TensorRt("tensorrt", None, "11.4.0"))
    monkeypatch.setattr(api, "find_spec", lambda _: None)
    assert why_not_in_cpp(TensorRt("tensorrt", None, "11.4.0")) == "tformer-native is not installed"


def test_both_languages_use_one_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "maps").write_text(
        "7f00-7f01 r-xp 00000000 08:01 12  /a b/tensorrt_libs/libnvinfer_plugin.so.11\n"
        "7f01-7f02 r-xp 00000000 08:01 13  /a b/tensorrt_libs/libnvinfer.so.11\n"
        "7f02-7f03 rw-p 00000000 00:00 0\n"
    )
    monkeypatch.setattr(api, "MAPS", tmp_path / "maps")
    assert library_of(TensorRt("tensorrt", None, "11.4.0")) == "/a b/tensorrt_libs/libnvinfer.so.11"
    assert library_of(TensorRt("rtx", None, "1.7.1")) == ""


def test_the_library_of_the_real_package_is_found() -> None:
    if not find_spec("tensorrt_rtx_libs"):
        pytest.skip("tensorrt_rtx is not installed: pip install '.[trt-rtx]'")
    code = "from tformer_deploy.engines.trt.api import *; print(library_of(load_tensorrt('rtx')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert Path(done.stdout.strip()).name.startswith("libtensorrt_rtx.so"), done.stderr
