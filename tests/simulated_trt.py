"""Bundles for target `trt`, and TensorRT simulated by ONNX Runtime."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import onnx
import pytest

from tformer_deploy.bundle.plans import Profile, Stamp
from tformer_deploy.engines.trt.api import TensorRt
from tformer_deploy.export import build as building
from tformer_deploy.export.checked import export_checked
from tformer_deploy.export.trt_builder import BuildOptions, Plan, PlanPrecision

from .command import COMMAND, Done

SIMULATED = Path(__file__).parent / "simulated"
BUNDLES = Path(__file__).parent / "bundles"
PROFILES = [Profile(8, 1, 24, 24), Profile(6, 5, 24, 24)]


def keep_graph(tensorrt: TensorRt, graph: Path, options: BuildOptions, exact: int = 0) -> Plan:
    """In place of a compiler."""
    return Plan(onnx.load(graph).SerializeToString(), 0.0, {}, {})


def run_simulated(*arguments: object, stdin: bytes = b"", path: object = SIMULATED) -> Done:
    """The command, on a machine with a simulated GPU, or with other packages in front."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])},
    )


def make_bundle(run: Path, out: Path) -> Path:
    export_checked(run, out, ["fp32", "trt"])
    text = out.parent / "lines.txt"
    text.write_text("".join(f"{line}\n" for line in lines()))
    for precision in ("fp16", "fp32"):
        simulate_build(out, precision, PROFILES, text)
    return out


def simulate_build(bundle: Path, precision: PlanPrecision, profiles: list[Profile], text: Path | None = None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "load_builder", lambda flavor: TensorRt("tensorrt", None, "11.4.0"))
        patch.setattr(building, "compile_plan", keep_graph)
        patch.setattr(
            building,
            "make_stamp",
            lambda tensorrt, options: Stamp("sm90", tensorrt.title, options.precision),
        )
        building.build(bundle, BuildOptions(precision), profiles, text)


def lines() -> list[str]:
    return [" ".join(f"w{4 + (7 * i + 3 * j) % 50}" for j in range(1 + i % 11)) for i in range(40)]


def as_input() -> bytes:
    return "".join(f"{line}\n" for line in lines()).encode()
