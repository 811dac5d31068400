"""The constants of programs of target `native`, unpacked from the layout of the kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base.errors import ArtifactError
from ..base.headers import DAMAGED, HEADER_BYTES, read_json
from ..bundle.contract import WEIGHTS
from ..bundle.origin import read_origin
from .origins import (
    Array,
    Bounds,
    Checkpoint,
    Compared,
    Comparisons,
    Made,
    elements_off,
    half_of_bf16,
    integers_off,
    rounding_off,
)

if TYPE_CHECKING:
    from ..model.seq2seq import Seq2Seq

LANES = 16
"""Outputs of a panel, and padding columns of a relative position bias."""
SIDES = {"decoder_step": "decoder"}
ARRAYS = ("table", "scales", "positions", "gain", "bias", "shrink", "data", "sums")
"""Keys of instructions, matrices and roundings whose value is the number of an array."""


class ProgramConstants:
    """Compares the constants of one graph of a program."""

    def __init__(self, path: Path, graph: str, checkpoint: Checkpoint, bounds: Bounds, model: Seq2Seq) -> None:
        self.path, self.side, self.checkpoint, self.bounds = path, SIDES.get(graph, "encoder"), checkpoint, bounds
        self.model: Any = model
        program = read_json(path.parent, path.name, HEADER_BYTES)
        try:
            self.about, self.code = program["arrays"], program["graphs"][graph]["code"]
            self.weights = np.memmap(path.parent / WEIGHTS, np.uint8, "r")
            parts = [part for each in self.code for part in (each, each.get("matrix", {}), each.get("rounding", {}))]
            numbers = {part[key] for part in parts for key in ARRAYS if key in part}
            self.names = {self.name(number) for number in numbers}
            self.arrays = {self.name(number) for number in numbers if math.prod(self.about[number]["shape"]) > 1}
            """Those of more than one number."""
        except DAMAGED as error:
            raise self.damaged(error) from None

    def damaged(self, error: Exception) -> ArtifactError:
        """The error for a damaged program."""
        said = " ".join(str(error).split())[:100]
        return ArtifactError(f"{self.path} is damaged ({type(error).__name__}: {said}): export the bundle again")

    def name(self, number: int) -> str:
        """The name of an array; if several have the same, all but the first are numbered."""
        name = str(self.about[number]["name"])
        first = next(i for i, each in enumerate(self.about) if each["name"] == name)
        return name if number == first else f"{name} #{number}"

    def array(self, number: int) -> Array:
        """An array by its number."""
        about = self.about[number]
        dtype, shape, start = np.dtype(about["dtype"]), tuple(about["shape"]), about["offset"]
        end = start + dtype.itemsize * int(np.prod(shape))
        found: Array = self.weights[start:end].view(dtype).reshape(shape)
        return found

    def made(self, number: int) -> Made | None:
        """What an array is made from; None for one that is made of no tensor of the checkpoint."""
        about = self.about[number]
        return self.checkpoint.made(read_origin(about["origin"])) if "origin" in about else None

    def compared(self) -> Comparisons:
        """Every constant, instruction by instruction. Raises ArtifactError."""
        rounds: dict[int, Any] = {}
        layer = 0
        try:
            for each in self.code:
                if each["op"] == "embed":
                    yield from self.embedded(each)
                elif each["op"] == "norm":
                    yield from self.norm(each)
                elif each["op"] == "self":
                    yield from self.relative(each, layer)
                    layer += 1
                elif "matrix" in each:
                    yield from self.product(each, rounds.get(each["x"][0], {}))
                if "rounded" in each:
                    rounds[each["rounded"]] = each["rounding"]
        except DAMAGED as error:
            raise self.damaged(error) from None

    def plain(self, number: int) -> Comparisons:
        """An array of floats."""
        made = self.made(number)
        if made is not None:
            yield Compared([self.name(number)], made.names, elements_off(self.array(number), made.array))

    def embedded(self, each: Mapping[str, Any]) -> Comparisons:
        """A table of embeddings, in 8 bits with a scale for each row or in 32, and positions."""
        if "positions" in each:
            yield from self.plain(each["positions"])
        if "scales" not in each:
            yield from self.plain(each["table"])
            return
        numbers = each["table"], each["scales"]
        made, scaled = map(self.made, numbers)
        if made is not None:
            factor = scaled.factors[0] if scaled is not None else np.float32(1)
            scales = self.array(numbers[1]) / factor
            off = integers_off(self.array(numbers[0])[:, None], scales, made.array, -127, made.scales)
            yield Compared([self.name(number) for number in numbers], made.names, off)

    def norm(self, each: Mapping[str, Any]) -> Comparisons:
        """A gain, and the bias that goes with it."""
        yield from self.plain(each["gain"])
        made = self.made(each["gain"])
        if made is not None:
            bias = self.array(each["bias"]) if "bias" in each else None
            yield from self.biased(each, made, bias, scaled=False)

    def biased(self, each: Mapping[str, Any], made: Made, bias: Array | None, scaled: bool = True) -> Comparisons:
        """The bias of a matmul or norm."""
        name = self.name(each["bias"]) if "bias" in each else f"{made.names[0].removesuffix('weight')}bias"
        found = self.checkpoint.bias(name, made, bias, scaled)
        own = self.made(each["bias"]) if "bias" in each else None
        if found is None and own is not None and bias is not None:  # the checkpoint has other names
            found = Compared([name], own.names, elements_off(bias, own.array))
        if found is not None:
            yield found

    def product(self, each: Mapping[str, Any], read: Mapping[str, Any]) -> Comparisons:
        """A matrix, its bias, and the quantization of its input."""
        about = each["matrix"]
        made = self.made(about["data"])
        if made is None:
            return
        outputs, expected = about["outputs"], made.array
        numbers = [about[key] for key in ("data", "scales", "sums") if key in about]
        if "shrink" in read:
            numbers.append(read["shrink"])
            expected = expected / self.array(read["shrink"])
        off = self.matrix_off(about, expected, made.scales)
        yield Compared([self.name(number) for number in numbers], made.names, off)
        bias = self.array(each["bias"]) if "bias" in each else None
        if bias is not None:
            if bias[outputs:].any():
                yield Compared([self.name(each["bias"])], made.names, bias[outputs:])
            bias = bias[:outputs]
        yield from self.biased(each, made, bias)
        for rounding in (each, read) if about["kind"] == "int8" else ():
            most = rounding.get("most", 255) if rounding is read else None
            rounds = rounding_off(rounding["step"], rounding["zero"], most, made.names, self.bounds)
            if rounds is not None:
                yield Compared(["rounding of the input"], made.names, rounds, "what calibration measured")

    def matrix_off(self, about: Mapping[str, Any], expected: Array, given: Array | None) -> Array:
        """Compare a matrix with the expected one (out, in), by the rules of its kind. `given`: scales (out) of int8."""
        data, kind, outputs, inputs = self.array(about["data"]), about["kind"], about["outputs"], about["inputs"]
        if expected.shape != (outputs, inputs):
            return np.array(np.nan)
        if kind == "int4":
            halves = np.stack((data & 15, data >> 4), 2)  # (panels, in / 8, 2, 16, 4)
            whole = halves.transpose(0, 3, 1, 2, 4).reshape(len(data) * LANES, -1).astype(np.int16) - 8
            scales = self.array(about["scales"]).transpose(0, 2, 1).reshape(len(whole), -1)[:outputs]
            return integers_off(whole[:outputs].reshape(outputs, -1, about["group"]), scales, expected, -8)
        # (panels, in / together, 16, together); without the last axis one at a time
        panels = data[..., None] if data.ndim == 3 else data
        whole = panels.transpose(0, 2, 1, 3).reshape(len(panels) * LANES, -1)
        if kind == "bf16":
            whole = (whole.astype(np.uint32) << 16).view(np.float32)
        if whole[:outputs, inputs:].any():  # what fills it up
            return np.array(np.nan)
        if kind != "int8":
            return elements_off(whole[:outputs, :inputs], expected, *([half_of_bf16] if kind == "bf16" else []))
        scales, sums = self.array(about["scales"])[:outputs, None], self.array(about["sums"])[:outputs]
        off = integers_off(whole[:outputs, None, :inputs], scales, expected, -127, given)
        wrong = sums != whole[:outputs].sum(1, dtype=np.int64)
        return np.where(wrong[:, None, None], np.maximum(off, 1), off)

    def relative(self, each: Mapping[str, Any], layer: int) -> Comparisons:
        """The relative position bias of our own model."""
        tables = [name for name in self.checkpoint.weights if name.startswith(f"{self.side}_relative.tables.")]
        if not tables:
            return
        name = tables[layer % len(tables)]
        if "bias" not in each:
            yield Compared([name], [name], np.abs(self.checkpoint.weights[name]))
            return
        found = self.array(each["bias"])
        relative = getattr(self.model, f"{self.side}_relative")
        count = found.shape[1] - LANES
        places = np.clip(each["zero"] - np.arange(count), -relative.most, relative.most) + relative.most
        expected = self.checkpoint.weights[name][relative.buckets.cpu().numpy()[places]].T
        yield Compared([self.name(each["bias"])], [name], elements_off(found[:, :count], expected))
