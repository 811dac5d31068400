"""Ways to break a program of target `native`, each as a wrong pass or packing would, and what the check must name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tformer_deploy.bundle.manifest import hashes

from .mutations import RARE, Change, plus, row, times

ENCODER, STEP = "encoder", "decoder_step"


class Program:
    """A program that is changed: its instructions, and the arrays that they read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.about = json.loads((folder / "program.json").read_text())
        self.weights = bytearray((folder / "weights.data").read_bytes())

    def save(self) -> None:
        (self.folder / "program.json").write_text(json.dumps(self.about))
        (self.folder / "weights.data").write_bytes(bytes(self.weights))

    def find(self, graph: str, part: str, op: str = "") -> dict[str, Any]:
        """The first instruction of which an array's name has a part, or of that op and layer."""
        for each in self.about["graphs"][graph]["code"]:
            numbers = [each[key] for key in ("gain", "table") if key in each]
            numbers += [each["matrix"]["data"]] if "matrix" in each else []
            if not op and any(part in self.about["arrays"][number]["name"] for number in numbers):
                return each
            if op and each["op"] == op and each.get("layer", -1) == int(part):
                return each
        raise AssertionError(f"{graph} has no {part}")

    def array(self, number: int) -> np.ndarray:
        about = self.about["arrays"][number]
        dtype, shape = np.dtype(about["dtype"]), about["shape"]
        count = int(np.prod(shape))
        return np.frombuffer(self.weights, dtype, count, about["offset"]).reshape(shape).copy()

    def own(self, of: dict[str, Any], key: str, change: Change) -> None:
        """An array of one instruction changed, and not for others that read it."""
        about, array = self.about["arrays"][of[key]], change(self.array(of[key]))
        self.weights += bytes(-len(self.weights) % 4096)
        of[key] = len(self.about["arrays"])
        self.about["arrays"].append({**about, "offset": len(self.weights)})
        self.weights += np.ascontiguousarray(array, np.dtype(about["dtype"])).tobytes()


ProgramMutation = Callable[[Program], None]


def break_program(bundle: Path, out: Path, variant: str, mutate: ProgramMutation) -> Path:
    """A copy of a bundle with one program changed and the hashes made to fit."""
    shutil.copytree(bundle, out)
    program = Program(out / variant)
    before = json.dumps(program.about)
    mutate(program)
    assert json.dumps(program.about) != before
    program.save()
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps({**manifest, "files": hashes(out)}))
    return out


def array(graph: str, part: str, key: str, change: Change) -> ProgramMutation:
    """An array of an instruction, its matrix or its rounding."""

    def mutate(program: Program) -> None:
        each = program.find(graph, part)
        holder = next(of for of in (each, each.get("matrix", {}), each.get("rounding", {})) if key in of)
        program.own(holder, key, change)

    return mutate


def number(graph: str, part: str, key: str, change: Callable[[Any], Any], op: str = "") -> ProgramMutation:
    """A number of an instruction."""

    def mutate(program: Program) -> None:
        each = program.find(graph, part, op)
        each[key] = change(each[key])

    return mutate


def exchange(graph: str, first: str, second: str, *keys: str) -> ProgramMutation:
    """Numbers of arrays of two instructions, or of their matrices, exchanged."""

    def mutate(program: Program) -> None:
        a, b = program.find(graph, first), program.find(graph, second)
        for key in keys:
            one, other = (of if key in of else of["matrix"] for of in (a, b))
            one[key], other[key] = other[key], one[key]

    return mutate


def rounding(graph: str, part: str, side: str, key: str, change: Callable[[Any], Any]) -> ProgramMutation:
    """The step or zero of what a product reads: of what `writes` it, `reads` it, or both."""

    def mutate(program: Program) -> None:
        each = program.find(graph, part)
        code = program.about["graphs"][graph]["code"]
        writer = next(other for other in code if other.get("rounded") == each["x"][0])
        if side in ("writes", "both"):
            writer["rounding"][key] = change(writer["rounding"][key])
        for reader in code if side in ("reads", "both") else ():
            if "step" in reader and reader["x"][0] == each["x"][0]:
                reader[key] = change(reader[key])

    return mutate


def swap(first: int, second: int, axis: int = 0) -> Change:
    """Two places of an axis exchanged."""

    def change(of: np.ndarray) -> np.ndarray:
        moved = np.moveaxis(of, axis, 0)
        moved[[first, second]] = moved[[second, first]]
        return of

    return change


def scaled(factor: float) -> Callable[[float], float]:
    return lambda value: value * factor


def lane(panel: int, place: int, change: Change) -> Change:
    """One output of packed weights (panels, in / together, 16, together)."""

    def mutate(packed: np.ndarray) -> np.ndarray:
        packed[panel, :, place] = change(packed[panel, :, place])
        return packed

    return mutate


_NORM, _FF, _OUT = "encoder.0.attention_residual.norm", "decoder.1.ff.up", "output.weight"
PROGRAM_CONSTANTS: dict[str, tuple[str, ProgramMutation, str]] = {
    "int8, output scales exchanged": ("native-int8", array(STEP, _OUT + ".int8", "scales", swap(40, 41)), _OUT),
    "int8, embedding row": ("native-int8", array(STEP, _OUT, "scales", row(RARE, times(1.1))), _OUT),
    "int8, bias": ("native-int8", array(ENCODER, "encoder.0.ff.up", "bias", row(5, plus(0.3))), "encoder.0.ff.up.bias"),
    "int8, gain": ("native-int8", array(ENCODER, _NORM, "gain", row(5, times(1.05))), f"{_NORM}.weight"),
    "int8, zero": ("native-int8", rounding(STEP, _FF, "both", "zero", lambda z: z + 1), "calibration measured"),
    "int8, step": ("native-int8", rounding(STEP, _FF, "both", "step", scaled(1.05)), "calibration measured"),
    "int8, step of a reader": ("native-int8", rounding(STEP, _FF, "reads", "step", scaled(1.05)), "calibration"),
    "int8, sums": ("native-int8", array(STEP, _FF, "sums", row(7, lambda n: n + 1)), f"{_FF}.weight"),
    "int8, a row": ("native-int8", array(STEP, _FF, "data", lane(0, 7, lambda w: -w)), f"{_FF}.weight"),
    "int8, filled up": ("native-int8", array(STEP, _OUT + ".int8", "scales", times(1.01)), _OUT),
    "int8, biases exchanged": (
        "native-int8",
        exchange(STEP, "decoder.0.ff.down", "decoder.1.ff.down", "bias"),
        "ff.down.bias",
    ),
    "int4, scale": ("native-int4", array(STEP, _FF, "scales", lane(0, 7, times(1.1))), f"{_FF}.weight"),
    "int4, halves": ("native-int4", array(STEP, _FF, "data", lambda w: w << 4 | w >> 4), f"{_FF}.weight"),
    "fp32, a row": ("native-fp32", array(STEP, _OUT, "table", row(RARE, times(1.0001))), _OUT),
    "fp32, an output": ("native-fp32", array(STEP, "decoder.1.ff.up", "data", lane(0, 7, times(1.0001))), _FF),
    "fp32, position": ("native-fp32", array(ENCODER, _OUT, "positions", row(20, plus(1e-4))), "tgt_positions"),
    "bf16, an output": ("native-bf16", array(STEP, _FF, "data", lane(0, 7, lambda b: b ^ 1)), f"{_FF}.weight"),
}
"""Variant, mutation, and what the check must name."""


def read_from(graph: str, part: str, role: str, other: str, their: str) -> ProgramMutation:
    """An operand of one instruction in the place of another's."""

    def mutate(program: Program) -> None:
        program.find(graph, part)[role] = program.find(graph, other)[their]

    return mutate


# What no array says, and rounding hides: the check sees it without.
PROGRAM_NUMBERS: dict[str, tuple[str, ProgramMutation]] = {
    "cross scale": ("native-int8", number(STEP, "0", "scale", scaled(1.02), "cross")),
    "self scale": ("native-int8", number(ENCODER, "-1", "scale", scaled(0.9), "self")),
    "factor of embeddings": ("native-int8", number(STEP, _OUT, "factor", scaled(1.05))),
    "eps": ("native-int8", number(STEP, _NORM, "eps", lambda _: 0.1)),
    "eps, int4": ("native-int4", number(STEP, _NORM, "eps", lambda _: 0.1)),
    "an older residual": (
        "native-int8",
        read_from(STEP, "decoder.1.ff.down", "residual", "decoder.1.cross.out", "residual"),
    ),
    "layers exchanged, bf16": ("native-bf16", exchange(STEP, "decoder.0.ff.down", "decoder.1.ff.down", "bias", "data")),
    "activation": ("native-int4", number(STEP, "decoder.1.ff.up", "activation", lambda _: "gelu")),
}
"""Variant and mutation."""
