"""Decoding on plans, with a simulated GPU in place of the real one: the loop, the copies, the waits, the commands.

What a real GPU computes, and how fast, no test here can tell.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import onnx
import pytest

from tformer_deploy import build as building
from tformer_deploy.engines.trt_api import TensorRt
from tformer_deploy.engines.trt_build import BuildOptions, Plan
from tformer_deploy.plans import Profile, Stamp
from tformer_deploy.ship import ship

from .command import COMMAND, Done, failed_line, printed

SIMULATED = Path(__file__).parent / "simulated"
PROFILES = [Profile(8, 1, 24, 24), Profile(6, 5, 24, 24)]


def keep_graph(tensorrt: TensorRt, graph: Path, options: BuildOptions, exact: int = 0) -> Plan:
    """In place of a compiler."""
    return Plan(onnx.load(graph).SerializeToString(), 0.0, {}, {})


def run_simulated(*arguments: object, stdin: bytes = b"") -> Done:
    """The command, on a machine with a simulated GPU."""
    path = os.pathsep.join([str(SIMULATED), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": path},
    )


@pytest.fixture(scope="module")
def bundle(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model with plans for the simulated GPU, fp16 and fp32. Read only."""
    out = tmp_path_factory.mktemp("simulated") / "bundle"
    ship(run, out, ["fp32", "trt"])
    text = out.parent / "lines.txt"
    text.write_text("".join(f"{line}\n" for line in lines()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "load_builder", lambda flavor: TensorRt("tensorrt", None, "11.4.0"))
        patch.setattr(building, "compile_plan", keep_graph)
        patch.setattr(
            building,
            "make_stamp",
            lambda tensorrt, options: Stamp("sm90", tensorrt.title, options.precision),
        )
        for precision in ("fp16", "fp32"):
            building.build(out, BuildOptions(precision), PROFILES, text)  # type: ignore[arg-type]
    return out


def lines() -> list[str]:
    return [" ".join(f"w{4 + (7 * i + 3 * j) % 50}" for j in range(1 + i % 11)) for i in range(40)]


def as_input() -> bytes:
    return "".join(f"{line}\n" for line in lines()).encode()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_check_passes(bundle: Path, precision: str, tmp_path: Path) -> None:
    """Greedy, beam and sampling against eager, and invariance."""
    (tmp_path / "text").write_bytes(as_input())
    done = run_simulated(
        "check", bundle, "--backend", f"trt:{precision}", "--src", tmp_path / "text", "--max-tokens", 20, "--json"
    )
    report = json.loads(printed(done)[0])
    assert report["passed"]
    engine = report["engines"][0]
    assert engine["precision"] == precision
    assert [(found["mode"], found["sentences"]) for found in engine["outputs"]] == [
        (mode, 40) for mode in ("greedy", "beam", "sampling")
    ]
    if precision == "fp32":
        assert all(found["equal"] == 40 for found in engine["outputs"])


@pytest.mark.parametrize("options", [[], ["--beams", "5"], ["--beams", "3", "--workers", "2"]])
def test_translates_as_onnx_runtime_does(bundle: Path, options: list[str]) -> None:
    words = ["translate", bundle, "--max-tokens", 24, *options]
    ours = run_simulated(*words, "--backend", "trt:fp32", stdin=as_input())
    theirs = run_simulated(*words, "--backend", "ort", "--variant", "fp32", stdin=as_input())
    assert printed(ours) == printed(theirs)


def test_bench_tells_what_the_gpu_did(bundle: Path) -> None:
    done = run_simulated(
        *("bench", bundle, "--backend", "trt", "--batch", "1,3", "--beam", "1,4", "--src-len", 5, "--new-tokens", 9),
        *("--rounds", 1, "--seconds", 0, "--json"),
    )
    report: dict[str, Any] = json.loads(printed(done)[0])
    assert report["engines"][0]["precision"] == "fp16"
    assert report["engines"][0]["device"]["name"] == "Simulated GPU"
    assert len(report["points"]) == 4
    assert all(point["device_ms"] > 0 and len(point["steps_ms"]) == 9 for point in report["points"])
    assert all(point["step_bound"]["share"] > 0 for point in report["points"])


def test_requests_beyond_the_plans_are_refused(bundle: Path) -> None:
    done = run_simulated("translate", bundle, "--backend", "trt", "--beams", 6, stdin=b"w5\n")
    assert "6 beams exceed the engine's limit of 5" in failed_line(done)
    done = run_simulated("translate", bundle, "--backend", "trt:bf16", stdin=b"w5\n")
    line = failed_line(done)
    assert "no plans for this host (sm90, TensorRT 11.4.0, bf16)" in line and "it has sm90" in line
    assert "tformer build" in line


def test_plans_that_do_not_load(bundle: Path, tmp_path: Path) -> None: ...
