"""Programs of target `native` to files: `program.json`, and the weights that it names, packed for the kernels."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..bundle.contract import PROGRAM, WEIGHTS
from .packing import LANES, column_sums, pack_bf16, pack_fp32, pack_int4, pack_int8, pack_vector
from .passes.native import Constant, Instruction, Matrix, Program, Rounding, View
from .save import PAGE

FORMAT, VERSION = "tformer-program", 1
FLOATS = {"fp32": pack_fp32, "bf16": pack_bf16}
LINE = 64
"""Bytes: alignment of arrays that are smaller than a page, a cache line."""


def save_program(programs: Mapping[str, Program], metadata: Mapping[str, str], directory: Path) -> None:
    """Write the programs of both graphs, by their names, and their weights; of equal arrays one is written."""
    with (directory / WEIGHTS).open("wb") as file:
        weights = _Weights(file)
        graphs = {
            name: {"widths": program.widths, "code": [_instruction(each, weights) for each in program.code]}
            for name, program in programs.items()
        }
    made = {
        "format": FORMAT,
        "version": VERSION,
        "metadata": dict(metadata),
        "arrays": weights.arrays,
        "graphs": graphs,
    }
    (directory / PROGRAM).write_text(json.dumps(made, allow_nan=False) + "\n", encoding="utf-8")


class _Weights:
    """Writes arrays and numbers them."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.arrays = file, list[dict[str, Any]]()
        self._seen: dict[tuple[str, tuple[int, ...], bytes], int] = {}

    def add(self, constant: Constant) -> int:
        """The index of an array; equal arrays are written once."""
        raw = np.ascontiguousarray(constant.array)
        data = raw.tobytes()
        key = raw.dtype.name, raw.shape, hashlib.sha256(data).digest()
        if key not in self._seen:
            self.file.write(bytes(-self.file.tell() % (PAGE if len(data) >= PAGE else LINE)))
            self._seen[key] = len(self.arrays)
            about = {
                "name": constant.name,
                "dtype": raw.dtype.name,
                "shape": list(raw.shape),
                "offset": self.file.tell(),
            }
            self.arrays.append({**about, "origin": constant.origin.described()} if constant.origin else about)
            self.file.write(data)
        return self._seen[key]


def _instruction(each: Instruction, weights: _Weights) -> dict[str, Any]:
    made: dict[str, Any] = {"op": each.op, **{role: _view(view) for role, view in each.reads.items()}}
    made |= {key: value for key, value in (("out", each.out), ("rounded", each.rounded)) if value is not None}
    made |= each.how
    for role, constant in each.arrays.items():
        array = constant.array
        if each.op == "self":  # what scores gain, of which kernels read a line more than they use
            array = np.pad(array, ((0, 0), (0, LANES)))
        elif each.matrix is not None:
            array = pack_vector(array)
        made[role] = weights.add(constant._replace(array=array))
    if each.rounding is not None:
        made["rounding"] = _rounding(each.rounding, weights)
    if each.matrix is not None:
        made["matrix"] = _matrix(each.matrix, weights)
    return made


def _view(view: View) -> list[int]:
    return [view.value, view.first, view.width]


def _rounding(rounding: Rounding, weights: _Weights) -> dict[str, Any]:
    made: dict[str, Any] = {"step": rounding.step, "zero": rounding.zero}
    made |= {"most": rounding.most} if rounding.most < 255 else {}
    return made if rounding.shrink is None else {**made, "shrink": weights.add(rounding.shrink)}


def _matrix(matrix: Matrix, weights: _Weights) -> dict[str, Any]:
    """A matrix as the kernels read it, see `packing`."""
    about = {"kind": matrix.kind, "outputs": len(matrix.weight), "inputs": matrix.inputs}
    if matrix.kind in FLOATS:
        return {**about, "data": weights.add(Constant(matrix.name, FLOATS[matrix.kind](matrix.weight), matrix.origin))}
    assert matrix.scales is not None
    if matrix.kind == "int4":
        packed, scales = pack_int4(matrix.weight), pack_fp32(matrix.scales)
        about["group"] = matrix.group
    else:
        packed, scales = pack_int8(matrix.weight), pack_vector(matrix.scales)
        about["sums"] = weights.add(Constant(f"{matrix.name}.sums", column_sums(matrix.weight)))
    own = replace(matrix.origin, form="scales")
    data, factors = Constant(matrix.name, packed, matrix.origin), Constant(own.name, scales, own)
    return {**about, "data": weights.add(data), "scales": weights.add(factors)}
