"""The constants inside a bundle's graphs, compared with the checkpoint's tensors that they are functions of.

Outputs show a wrong constant only where a corpus meets it and where the tolerance is narrower than what it does.
Needs onnx. The functions are written anew here, so that a mistake of the export does not excuse itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from ..bundle import Bundle
from ..config import ModelConfig
from ..contract import graphs_of
from ..export.quantizing import LEAST
from ..export.save import load_graph, reading
from ..recipe import Recipe
from .report import Constants

if TYPE_CHECKING:
    from ..seq2seq import Seq2Seq

Array = NDArray[Any]
NAMED_SINCE = 2
"""The version of manifests from which on constants are called by what they are made of."""
CLOSE = 1e-6
"""Relative difference that an element may have: that of another order of a few multiplications in fp32."""
HALF_STEP = 0.5 * 1.001
"""Of a quantized weight's own scale; the share above a half is what fp32 rounds."""
SHOWN = 3
"""Wrong constants of an engine that are named; the others are counted."""
ORIGIN = re.compile(r"(?P<name>[^,*^]+)(\*(?P<factor>[0-9.e+-]*[0-9]))?")
NAME = re.compile(
    r"(?P<origins>.+?)(?P<form>\.int8|\.int4|\.scales|\.zeros)?(?P<layout>\.groups)?(\.rows|\.column)?(?P<turned>\^T)?"
)
"""How the passes of export name a constant: tensors side by side, each with a factor, then what was done to them."""
COMPARED = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.INT8, TensorProto.UINT8)
"""What weights are; arrays of other types are sizes and places, which no checkpoint has."""
Origins = Iterator[tuple[list[str], list[str], Array]]
"""Constants that are one tensor together, the checkpoint's tensors behind them, and how far each element is off."""


def compare_constants(bundle: Bundle, variant: str, recipe: Recipe, model: Seq2Seq) -> Constants:
    """Every constant of a variant's graphs; empty: the standard ones."""
    found = Constants()
    if bundle.manifest.get("version", NAMED_SINCE) < NAMED_SINCE:
        found.skipped = "the bundle is of an older version, whose constants have other names: export it again"
        return found
    weights = named_tensors(model)
    if recipe.target == "native":
        found.skipped = "weights of a program are packed for its kernels: outputs alone are compared"
        return found
    seen: set[str] = set()
    for graph in graphs_of(recipe):
        path = bundle.graph(graph, variant)
        if path.is_file():  # older bundles have no graphs for shortlists
            seen |= GraphConstants(path, graph, recipe, weights, model.config).run(found)
    needed = [name for name in weights if name not in getattr(model, "unread", ())]
    absent = [name for name in needed if name not in seen and not _repeated(name, seen, weights)]
    found.wrong += [f"the graphs have no constant for the checkpoint's {name}" for name in absent]
    return found


def named_tensors(model: Seq2Seq) -> dict[str, Array]:
    """The tensors of a model by name, tables that are not trained among them, but none of whole numbers."""
    module: Any = model  # a torch.nn.Module as well
    tensors = {**dict(module.named_buffers(remove_duplicate=False)), **module.state_dict()}
    return {name: t.detach().cpu().numpy() for name, t in tensors.items() if t.is_floating_point()}


def failures(found: Constants) -> list[str]:
    """One line for each of the first wrong constants, and one for the others."""
    others = len(found.wrong) - SHOWN
    return [*found.wrong[:SHOWN], *([f"{others} more constants differ from the checkpoint's"] if others > 0 else [])]


def _repeated(name: str, seen: set[str], weights: Mapping[str, Array]) -> bool:
    """Whether a tensor that no graph carries equals one that it does: of equal ones, exporters keep one."""
    return any(np.array_equal(weights[name], weights[other]) for other in seen)


class GraphConstants:
    """Compares the constants of one graph."""

    def __init__(
        self, path: Path, graph: str, recipe: Recipe, weights: Mapping[str, Array], config: ModelConfig
    ) -> None:
        self.path, self.graph, self.recipe, self.weights, self.config = path, graph, recipe, weights, config
        self.model = load_graph(path, weights=False).graph
        self.tensors = {tensor.name: tensor for tensor in self.model.initializer}

    def run(self, found: Constants) -> set[str]:
        """Add to what was found; returns the checkpoint's tensors that the graph carries."""
        seen: set[str] = set()
        known: set[str] = set()
        for names, origins, off in self.compared():
            if (off == 0).all():
                found.equal += len(set(names) - known)  # layers that read the same input share how it is shrunk
            else:
                found.wrong.append(self.describe(names[0], origins, off))
            seen.update(origins)
            known.update(names)
        values = {name for name, tensor in self.tensors.items() if tensor.data_type in COMPARED}
        values |= {node.output[0] for node in self.model.node if node.op_type == "Constant"}
        found.compared += len(values & known)
        found.unknown += [f"{self.path.stem}: {name}" for name in sorted(values - known)]
        return seen

    def describe(self, name: str, origins: Sequence[str], off: Array) -> str:
        """One line for a constant whose elements are off, each by what `off` says."""
        worst = int(np.where(np.isnan(off), np.inf, off).argmax())
        place = [int(n) for n in np.unravel_index(worst, off.shape)]
        short = name.removeprefix("model.")
        behind = "" if short in origins else f" ({', '.join(origins)})"
        folder = "" if self.recipe.target == "onnx" else f"{self.path.parent.name}/"
        return (
            f"constant {short}{behind} of {folder}{self.path.name} differs from the checkpoint's by "
            f"{float(off.flat[worst]):.2g}{f' at {place}' if place else ''}"
        )

    def array(self, name: str) -> Array:
        """The values of a constant, which may lie in a file beside the graph."""
        with reading(self.path):
            array: Array = numpy_helper.to_array(self.tensors[name], str(self.path.parent))
        return array

    def compared(self) -> Origins:
        """Every constant whose name says what it is made of."""
        yield from self.misplaced()
        for name, tensor in self.tensors.items():
            parsed = NAME.fullmatch(name)
            made = self.made(parsed["origins"]) if parsed and tensor.data_type in COMPARED else None
            if parsed is None or made is None or parsed["form"] in (".scales", ".zeros"):
                continue
            origins, expected = made
            if parsed["form"]:
                group, off = self.rounded(name, parsed["origins"], expected)
                yield group, origins, off
            else:
                yield [name], origins, elements_off(self.array(name), expected.T if parsed["turned"] else expected)

    def misplaced(self) -> Origins:
        """Weights of one layer where another's bias is added."""
        readers = {value: node for node in self.model.node for value in node.input}
        for node in self.model.node:
            added = readers.get(node.output[0]) if node.op_type == "MatMul" else None
            around = (*node.input, *(added.input if added is not None and added.op_type == "Add" else ()))
            found = {kind: self.layers(around, kind) for kind in ("weight", "bias")}
            if found["weight"] and found["bias"] and found["weight"] != found["bias"]:
                name = next(name for name in around if NAME.fullmatch(name) and name in self.tensors)
                yield [name], [f"{found['bias'][0]}.weight"], np.array(np.nan)

    def layers(self, names: Sequence[str], kind: str) -> list[str]:
        """The layers whose weights, or biases, are among a node's constants."""
        for name in names:
            parsed = NAME.fullmatch(name) if name in self.tensors else None
            weights = parsed is not None and parsed["form"] in (None, ".int8", ".int4")
            origins = [ORIGIN.fullmatch(part) for part in parsed["origins"].split(",")] if parsed and weights else []
            found = [part["name"] for part in origins if part is not None and part["name"].endswith(f".{kind}")]
            if found:
                return [each.removesuffix(f".{kind}") for each in found]
        return []

    def made(self, origins: str) -> tuple[list[str], Array] | None:
        """The checkpoint's tensors that a name tells, and what it says becomes of them; nothing for other names."""
        parts = [ORIGIN.fullmatch(part) for part in origins.split(",")]
        names = [part["name"] for part in parts if part is not None]
        if len(names) < len(parts) or not all(name in self.weights for name in names):
            return None
        factors = [self.factor(part["factor"]) for part in parts if part is not None]
        arrays = [f * self.weights[name] for f, name in zip(factors, names, strict=True)]
        return names, np.concatenate(arrays) if len(arrays) > 1 else np.asarray(arrays[0])

    def factor(self, told: str | None) -> np.float32:
        """What a tensor may be multiplied by before it becomes a constant; NaN for any other number."""
        if told is None:
            return np.float32(1)
        sides = self.config.encoder, self.config.decoder
        possible = [math.sqrt(side.width) for side in sides] if self.config.scale_embeddings else []
        possible += [1 / math.sqrt(side.head_dim) for side in sides]
        # The annotated norm, whose deviation is over d - 1.
        possible += [math.sqrt((side.width - 1) / side.width) for side in sides]
        near = [value for value in possible if abs(float(told) - value) <= CLOSE * value]
        return np.float32(near[0] if near else np.nan)

    def rounded(self, name: str, origins: str, expected: Array) -> tuple[list[str], Array]:
        """Quantized weights, and their scales and zeros: how far they are from `expected` (out, in), where that is
        more than rounding may do."""
        rows = len(expected)
        group, scales = [name, *self.shrink(name)], []
        for shrink in group[1:]:
            expected = expected / self.array(shrink)
        layout = NAME.fullmatch(name)["layout"]  # type: ignore[index]
        for other in self.tensors:
            parsed = NAME.fullmatch(other)
            if parsed is None or parsed["form"] != ".scales" or parsed["layout"] != layout:
                continue
            each = ORIGIN.fullmatch(parsed["origins"])
            if parsed["origins"] == origins or (each is not None and each["name"] == origins):
                told = each["factor"] if each is not None and parsed["origins"] != origins else None
                scales.append(self.array(other).reshape(rows, -1) / self.factor(told))
                group.append(other)
        if not scales:
            return group, np.full(expected.shape, np.nan)
        stored = self.array(name).T if name.endswith("^T") else self.array(name)
        if stored.dtype == np.int8 and stored.shape != expected.shape:
            return group, np.full(expected.shape, np.nan)
        off = np.maximum.reduce([self.off(stored, each, expected) for each in scales])
        zeros = f"{origins}.zeros"
        if zeros in self.tensors:
            group.append(zeros)
            off = np.where((self.array(zeros) != 0).reshape(rows, 1, 1), np.maximum(off, CLOSE), off)
        return group, off

    def shrink(self, weight: str) -> list[str]:
        """The constant that shrinks channels of what a weight's product reads, by which its columns were divided."""
        makers = {value: node for node in self.model.node for value in node.output}
        read = next((makers.get(node.input[0]) for node in self.model.node if weight in node.input), None)
        product = makers.get(read.input[0]) if read is not None and read.op_type == "QuantizeLinear" else None
        names = product.input if product is not None and product.op_type == "Mul" else ()
        return [name for name in names if name.endswith(".shrink") and name in self.tensors]

    def off(self, stored: Array, scales: Array, expected: Array) -> Array:
        """How far integers times scales (out, groups) are from `expected` (out, in): (out, groups, in of a group)."""
        count = scales.shape[1]
        if stored.dtype == np.int8:
            least, last = -127, 127
            parts = stored[:, None]
        else:
            middle = 128 if self.recipe.precision == "int8" else 8
            packed = stored.reshape(len(expected), count, -1)
            if middle == 8:  # two in a byte
                packed = np.stack((packed & 15, packed >> 4), -1).reshape(len(expected), count, -1)
            least, last = -middle, middle - 1
            parts = packed.astype(np.int16) - middle
        filled = np.zeros((len(expected), count * parts.shape[2]), np.float32)
        filled[:, : expected.shape[1]] = expected
        filled = filled.reshape(parts.shape)
        # The scale is known: the element furthest from zero is the least or the last integer exactly.
        furthest = np.take_along_axis(filled, np.abs(filled).argmax(2, keepdims=True), 2)[:, :, 0]
        right = np.abs(furthest / np.float32(last)) if stored.dtype == np.int8 else furthest / np.float32(least)
        step = np.where(np.abs(furthest) < LEAST, scales, right)
        off = np.abs(parts * scales[:, :, None] - filled)
        # On the other side of zero the range ends one integer earlier, which is then the nearest there is.
        allowed = np.abs(step)[:, :, None] * np.where(parts == last, 2 * HALF_STEP, HALF_STEP)
        wrong = ~(off <= allowed) | ~(np.abs(scales - step) <= CLOSE * np.abs(step))[:, :, None]
        return np.where(wrong, np.where(off == 0, CLOSE, off), 0)


def elements_off(ours: Array, expected: Array) -> Array:
    """How far elements are apart, 0 where that is within CLOSE; one that is not a number is."""
    if ours.shape != expected.shape:
        return np.array(np.nan)
    with np.errstate(invalid="ignore"):
        off: Array = np.abs(ours.astype(np.float32) - expected.astype(np.float32))
        return np.where((ours == expected) | (off <= CLOSE * np.abs(expected)), 0, off)
