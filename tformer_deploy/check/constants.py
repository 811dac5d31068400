"""The constants inside a bundle's graphs, compared with the checkpoint's tensors that they are functions of.

Outputs show a wrong constant only where a corpus meets it and where the tolerance is narrower than what it does.
Needs onnx. The functions are written anew here, so that a mistake of the export does not excuse itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from ..bundle import Bundle
from ..config import ModelConfig
from ..contract import graphs_of
from ..export.save import load_graph, reading
from ..recipe import Recipe
from .report import Constants

if TYPE_CHECKING:
    from ..model import Transformer

Array = NDArray[Any]
CLOSE = 1e-6
"""Relative difference that an element may have: that of another order of a few multiplications in fp32."""
HALF_STEP = 0.5 * 1.001
"""Of a quantized weight's own scale; the share above a half is what fp32 rounds."""
SHOWN = 3
"""Wrong constants of an engine that are named; the others are counted."""
COMPARED = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.INT8, TensorProto.UINT8)
"""What weights are; arrays of other types are sizes and places, which no checkpoint has."""
Origins = Iterator[tuple[list[str], list[str], Array]]
"""Constants that are one tensor together, the checkpoint's tensors behind them, and how far each element is off."""


def compare_constants(bundle: Bundle, variant: str, recipe: Recipe, model: Transformer) -> Constants:
    """Every constant of a variant's graphs; empty: the standard ones."""
    found = Constants()
    weights = tensors_of(model)
    seen: set[str] = set()
    for graph in graphs_of(recipe):
        path = bundle.graph(graph, variant)
        if path.is_file():  # older bundles have no graphs for shortlists
            seen |= Comparison(path, graph, recipe, weights, model.config).run(found)
    absent = [name for name in weights if name not in seen and not _repeated(name, seen, weights)]
    if recipe.target == "onnx":  # an exporter may fold what it names as it likes
        found.absent = absent
    else:
        found.wrong += [f"no constant of the graphs is the checkpoint's {name}" for name in absent]
    return found


def tensors_of(model: Transformer) -> dict[str, Array]:
    """The tensors of a checkpoint by name, position tables that are not trained among them."""
    tables = {"src_positions": model.src_positions, "tgt_positions": model.tgt_positions}
    return {name: t.detach().cpu().numpy() for name, t in (model.state_dict() | tables).items()}


def failures(found: Constants) -> list[str]:
    """One line for each of the first wrong constants, and one for the others."""
    others = len(found.wrong) - SHOWN
    return [*found.wrong[:SHOWN], *([f"{others} more constants differ from the checkpoint's"] if others > 0 else [])]


def _repeated(name: str, seen: set[str], weights: Mapping[str, Array]) -> bool:
    """Whether a tensor that no graph carries equals one that it does: of equal ones, exporters keep one."""
    return any(np.array_equal(weights[name], weights[other]) for other in seen)


class Comparison:
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
        for names, origins, off in self.standard() if self.recipe.target == "onnx" else self.lowered():
            if (off == 0).all():
                found.equal += len(names)
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

    # Standard graphs: the exporter's names

    def standard(self) -> Origins:
        """Arrays that carry a parameter's name, and matrices, which are known by the bias that is added behind them."""
        for name in self.tensors:
            origin = name.removeprefix("model.")
            if origin in self.weights:
                yield [name], [origin], apart(self.array(name), self.weights[origin])
        readers = {value: node for node in self.model.node for value in node.input}
        for node in self.model.node:
            if node.op_type != "MatMul" or node.input[1] not in self.tensors:
                continue
            matrix, reader = self.array(node.input[1]), readers[node.output[0]]
            names = [name.removeprefix("model.").removesuffix(".bias") for name in reader.input]
            if "log_probs" in reader.output:
                names = ["output"]
            layers = [name for name in names if f"{name}.weight" in self.weights]
            if layers:
                nearest, off = self.nearest(matrix, self.alike(layers[0], matrix.shape))
                yield [node.input[1]], [f"{nearest}.weight"], off

    def alike(self, layer: str, shape: tuple[int, ...]) -> list[str]:
        """Layers of that size whose bias is the same: of equal arrays an exporter keeps one, under any name."""
        bias = self.weights.get(f"{layer}.bias", np.zeros(0))
        names = [name.removesuffix(".bias") for name in self.weights if name.endswith(".bias")]
        same = [name for name in names if np.array_equal(self.weights[f"{name}.bias"], bias)]
        return [name for name in same if self.weights[f"{name}.weight"].T.shape == shape] or [layer]

    def nearest(self, matrix: Array, layers: Sequence[str]) -> tuple[str, Array]:
        """The layer whose weights a matrix (in, out) is, or is nearest to, and how far it is off."""
        # By a few elements first: untrained layers all have the same bias.
        near = {layer: float(apart(matrix[:1], self.weights[f"{layer}.weight"].T[:1]).max()) for layer in layers}
        layer = min(near, key=lambda name: np.nan_to_num(near[name], nan=np.inf))
        return layer, apart(matrix, self.weights[f"{layer}.weight"].T)

    # Lowered graphs: our own names

    def lowered(self) -> Origins:
        """Every constant whose name says what it is made of."""
        for name, tensor in self.tensors.items():
            origins = self.origins(name)
            if not origins or tensor.data_type not in COMPARED:
                continue
            expected = np.concatenate([self.factor(each) * self.weights[each] for each in origins])
            if tensor.data_type in (TensorProto.INT8, TensorProto.UINT8):
                group = [each for each in (name, f"{name}.scales", f"{name}.zeros") if each in self.tensors]
                yield group, origins, self.rounded(name, expected)
            else:
                yield [name], origins, apart(self.array(name), expected if self.as_table(name) else expected.T)

    def origins(self, name: str) -> list[str]:
        """The checkpoint's tensors that a constant is made of, side by side; none: it is made of something else."""
        side = "src" if self.graph == "encoder" else "tgt"
        tables = {"positions": f"{side}_positions", "embedding": f"{side}_embedding.weight"}
        stem, kind = (name.removesuffix(".bias"), "bias") if name.endswith(".bias") else (name, "weight")
        stem = stem.removesuffix(".gain")
        names = [tables.get(name, f"{stem}.{kind}")]
        if stem.endswith(".attention.query") and 3 * self.config.d_model in self.tensors[name].dims:
            names = [f"{stem.removesuffix('query')}{part}.{kind}" for part in ("query", "key", "value")]
        return names if all(each in self.weights for each in names) else []

    def factor(self, origin: str) -> np.float32:
        """What a tensor is multiplied by before it becomes a constant."""
        config, factor = self.config, 1.0
        if origin.endswith("_embedding.weight") and config.scale_embeddings:
            factor = math.sqrt(config.d_model)
        elif "norm.weight" in origin and config.norm == "annotated":  # whose deviation is over d - 1
            factor = math.sqrt((config.d_model - 1) / config.d_model)
        elif ".query." in origin and self.recipe.target == "trt":  # where attention does not scale
            factor = 1 / math.sqrt(config.head_dim)
        return np.float32(factor)

    def as_table(self, name: str) -> bool:
        """Whether a matrix lies as in the checkpoint, (out, in), and not as products read it."""
        return name in ("embedding", "positions") or (name == "output" and self.recipe.target != "trt")

    def rounded(self, name: str, expected: Array) -> Array:
        """How far quantized weights are from `expected` (out, in), where that is more than rounding may do."""
        scales = self.array(f"{name}.scales").reshape(len(expected), -1)  # (out, blocks)
        stored, count = self.array(name), scales.shape[1]
        if stored.dtype == np.int8:
            least, last = -127, 127
            parts = (stored if self.as_table(name) else stored.T)[:, None]
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
        step = np.where(furthest == 0, scales, right)
        off = np.abs(parts * scales[:, :, None] - filled)
        # On the other side of zero the range ends one integer earlier, which is then the nearest there is.
        allowed = np.abs(step)[:, :, None] * np.where(parts == last, 2 * HALF_STEP, HALF_STEP)
        wrong = ~(off <= allowed) | ~(np.abs(scales - step) <= CLOSE * np.abs(step))[:, :, None]
        if f"{name}.zeros" in self.tensors:
            wrong |= (self.array(f"{name}.zeros") != 0)[:, None, None]
        return np.where(wrong, np.where(off == 0, CLOSE, off), 0)


def apart(ours: Array, expected: Array) -> Array:
    """How far elements are apart, 0 where that is within CLOSE; one that is not a number is."""
    if ours.shape != expected.shape:
        return np.array(np.nan)
    with np.errstate(invalid="ignore"):
        off: Array = np.abs(ours.astype(np.float32) - expected.astype(np.float32))
        return np.where(off <= CLOSE * np.abs(expected), 0, off)
