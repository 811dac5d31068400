"""Compares the constants of graphs and programs with the checkpoint's tensors that they are made of.

Outputs show a wrong constant only if the corpus uses it and its effect exceeds the tolerance. Needs onnx.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import NodeProto, TensorProto, numpy_helper

from ..bundle.contract import PROGRAM, made_of
from ..bundle.manifest import Bundle
from ..bundle.origin import Origin
from ..bundle.recipe import Recipe
from ..export.save import load_graph, origins_of, reading
from .origins import (
    CLOSE,
    Array,
    Bounds,
    Checkpoint,
    Compared,
    Comparisons,
    Made,
    describe,
    elements_off,
    integers_off,
    named_tensors,
    rounding_off,
)
from .programs import ProgramConstants
from .results import Constants

if TYPE_CHECKING:
    from ..model.checkpoint import Steps
    from ..model.seq2seq import Seq2Seq

SHOWN = 3
"""Wrong constants of an engine that are named; the others are counted."""
NO_WEIGHTS = (TensorProto.INT32, TensorProto.INT64, TensorProto.BOOL)
"""Types of sizes, indices and masks, which no checkpoint has; arrays of every other type are compared or reported."""
# Operators, and the input that is their bias or their scales.
BIAS = {"Gemm": 2, "MatMulIntegerToFloat": 6, "MatMulNBits": 5, "LayerNormalization": 2}
SCALES = {"MatMulIntegerToFloat": 3, "MatMulNBits": 2}
LEFT_OUT = {"MatMulIntegerToFloat": (5,), "MatMulNBits": (3, 4), "GatherBlockQuantized": (3,)}
"""Inputs that export leaves empty: zero points of weights, and the order of their groups."""
OUTPUT = Origin(("output.weight",))
"""Of the graph input `listed_rows`: rows of it, which the graph `short_rows` has gathered."""
LISTED = ("listed_rows", "listed_scales")
"""Graph inputs of `short_step` that are weights and their scales."""


def compare_constants(bundle: Bundle, variant: str, recipe: Recipe, model: Seq2Seq) -> Constants:
    """Compare every constant of a variant's graphs (empty: the standard ones). Raises ArtifactError."""
    from ..model.network import Transformer

    result = Constants()
    weights = named_tensors(model)
    checkpoint, seen = Checkpoint(weights, model.config, bundle.measured(variant).get("scales", {})), set[str]()
    own_code = type(model) is not Transformer  # which may have arrays that are in no checkpoint
    bounds = bundle.measured(variant).get("ranges", {})
    constants: GraphConstants | ProgramConstants
    for graph in made_of(recipe, bundle.config):
        path = bundle.directory / variant / PROGRAM if recipe.target == "native" else bundle.graph(graph, variant)
        if not path.is_file():  # not every model has graphs for shortlists
            continue
        where = f"{variant}/{path.name}" if variant else path.name
        if recipe.target == "native":
            where, constants = f"{where} ({graph})", ProgramConstants(path, graph, checkpoint, bounds, model)
        else:
            constants = GraphConstants(path, checkpoint, bounds, own_code)
            result.wrong += constants.not_left_out(where)
        unknown = _add(result, seen, where, constants)
        result.unknown += [f"{graph}: {name}" for name in unknown]
        unknown = [] if own_code else [name for name in unknown if name in constants.arrays]
        result.wrong += [f"constant {name} of {where} has no origin: export the bundle again" for name in unknown]
    seen &= weights.keys()
    if recipe.quantized and not bounds:
        result.wrong.append("manifest.json has no ranges of calibration: nothing bounds the rounding of inputs")
    needed = [name for name in weights if name not in getattr(model, "unread", ())]
    absent = [name for name in needed if name not in seen and not _repeated(name, seen, weights)]
    result.wrong += [f"the graphs have no constant for the checkpoint's {name}" for name in absent]
    return result


def trained_scales_off(measured: Mapping[str, Any], steps: Steps | None) -> list[str]:
    """Compare what a variant says of the scales that the model was trained with, with the checkpoint's."""
    if steps is None:
        return ["the checkpoint has no scales of training: nothing allows this variant its wide limits"]
    ranges, scales = measured.get("ranges", {}), measured.get("scales", {})
    expected = {name: (-127 * step, 128 * step, 254) for name, step in steps.inputs.items()}
    wrong = [name for name, each in expected.items() if not np.allclose(ranges.get(name, np.nan), each, CLOSE, 0)]
    wrong += [name for name, each in steps.weights.items() if not np.isclose(scales.get(name, np.nan), each, CLOSE, 0)]
    wrong += sorted(scales.keys() - steps.weights.keys())
    return [f"manifest.json has other scales of {name} than the checkpoint: export the bundle again" for name in wrong]


def failures(result: Constants) -> list[str]:
    """One line for each of the first wrong constants, and one for the others."""
    others = len(result.wrong) - SHOWN
    return [*result.wrong[:SHOWN], *([f"{others} more constants differ from the checkpoint's"] if others > 0 else [])]


def _add(result: Constants, seen: set[str], where: str, constants: GraphConstants | ProgramConstants) -> list[str]:
    """Add the result of one graph, and to `seen` the checkpoint's tensors that its constants are made of.

    Returns the constants that are made of none.
    """
    known, wrong = set[str](), set[str]()
    for each in constants.compared():
        if each.off.any():  # NaN is true
            result.wrong.append(describe(each, where))
            wrong.update(each.names)
        seen.update(each.origins)
        known.update(each.names)
    known &= constants.names
    result.compared += len(known)
    result.equal += len(known - wrong)
    return sorted(constants.names - known)


def _repeated(name: str, seen: set[str], weights: Mapping[str, Array]) -> bool:
    """Whether a tensor that is in no graph equals one that is: of equal tensors, exporters keep one."""
    return any(np.array_equal(weights[name], weights[other]) for other in seen)


class GraphConstants:
    """Compares the constants of one graph."""

    def __init__(self, path: Path, checkpoint: Checkpoint, bounds: Bounds, own_code: bool) -> None:
        """`own_code`: of a module of the user's own."""
        self.path, self.checkpoint, self.bounds, self.own_code = path, checkpoint, bounds, own_code
        model = load_graph(path, weights=False)
        self.model, self.origins = model.graph, origins_of(model, path)
        self.tensors = {tensor.name: tensor for tensor in self.model.initializer}
        self.makers = {value: node for node in self.model.node for value in node.output}
        weights = [tensor for tensor in self.model.initializer if tensor.data_type not in NO_WEIGHTS]
        nodes = {node.output[0] for node in self.model.node if node.op_type == "Constant"}  # export makes none
        self.names = nodes | {tensor.name for tensor in weights}
        self.arrays = nodes | {tensor.name for tensor in weights if math.prod(tensor.dims) > 1}
        """Those of more than one number."""

    def array(self, name: str) -> Array:
        """The values of a constant, which may lie in a file beside the graph."""
        with reading(self.path):
            array: Array = numpy_helper.to_array(self.tensors[name], str(self.path.parent))
        return array

    def made(self, name: str) -> Made | None:
        """What a constant is made from; None for one that is made of no tensor of the checkpoint."""
        return self.checkpoint.made(self.origins.get(name))

    def compared(self) -> Comparisons:
        """Every constant that has an origin, and those that belong together."""
        yield from self.layers()
        for name, tensor in self.tensors.items():
            made = None if tensor.data_type in NO_WEIGHTS else self.made(name)
            if made is None or self.origins[name].form == "scales":
                continue
            if self.origins[name].form:
                yield self.rounded(name, made)
            else:
                off = elements_off(self.array(name), made.array.T if self.origins[name].transposed else made.array)
                yield Compared([name], made.names, off)

    def not_left_out(self, where: str) -> list[str]:
        """A line for each input that export leaves empty, and this graph does not."""
        inputs = ((node, self.input(node, i)) for node in self.model.node for i in LEFT_OUT.get(node.op_type, ()))
        return [
            f"{node.op_type} of {where} reads {name} where export leaves the input empty: export the bundle again"
            for node, name in inputs
            if name
        ]

    def layers(self) -> Comparisons:
        """What belongs to the weight of each matmul and norm: bias, scales, and the quantization of its input."""
        for node in self.model.node:
            if node.op_type == "GatherBlockQuantized":
                yield from self.scaled(self.input(node, 0), self.input(node, 2))
            weight = self.input(node, 1)
            made = self.checkpoint.made(OUTPUT) if weight in LISTED else self.made(weight)
            if weight not in self.names and weight not in LISTED:
                continue
            if made is None or node.op_type not in (*BIAS, "MatMul"):
                continue
            yield from self.biased(node, weight, made)
            if node.op_type in SCALES:
                yield from self.scaled(weight, self.input(node, SCALES[node.op_type]))
            if node.op_type == "MatMulIntegerToFloat":
                yield from self.quantized_input(node, made.names)

    def biased(self, node: NodeProto, weight: str, made: Made) -> Comparisons:
        """The bias of a matmul or norm, zeros where it has none. That of a shortlist's rows is gathered with them."""
        if node.op_type in BIAS:
            bias = self.input(node, BIAS[node.op_type])
        else:
            adds = [each for each in self.model.node if each.op_type == "Add" and node.output[0] in each.input]
            bias = next((name for each in adds for name in each.input if name in self.tensors), "")
        elsewhere = weight in LISTED or (self.own_code and not bias)  # as behind a reshape
        if elsewhere and bias not in self.tensors:
            return
        name = bias or f"{made.names[0].removesuffix('weight')}bias"
        if bias and bias not in self.tensors:
            yield Compared([name], made.names, np.array([np.nan]), "a constant")
            return
        array = self.array(bias) if bias else None
        compared = self.checkpoint.bias(name, made, array, scaled=node.op_type != "LayerNormalization")
        if compared is not None:
            yield compared

    def scaled(self, weight: str, scales: str) -> Comparisons:
        """The scales that quantized weights are read with."""
        if weight not in self.origins or scales in LISTED:
            return
        factors, tensors = self.origins[weight].factors, list(self.origins[weight].tensors)
        own = [name for name in self.scales(weight) if self.origins[name].factors == factors]
        if scales in own:
            return
        same = scales in self.tensors and own
        off = elements_off(self.array(scales), self.array(own[0])) if same else np.array([np.nan])
        yield Compared([scales], tensors, off, "the weight's own scales")

    def quantized_input(self, node: NodeProto, origins: list[str]) -> Comparisons:
        """The quantization of a matmul's input; MatMulNBits quantizes each row itself."""
        rounding = self.makers.get(node.input[0])
        if rounding is None or rounding.op_type != "QuantizeLinear":
            yield Compared([node.input[0]], origins, np.array([np.nan]), "what QuantizeLinear gives")
            return
        for each, *places in ((node, 2, 4), (rounding, 1, 2)):
            names = [self.input(each, place) for place in places]
            off: Array | None = np.array([np.nan])
            if all(name in self.tensors for name in names):
                step, zero = (self.array(name) for name in names)
                off = rounding_off(float(step), int(zero), self.most(rounding, step, zero), origins, self.bounds)
            if off is not None:
                yield Compared(names, origins, off, "what calibration measured")

    def most(self, rounding: NodeProto, step: Array, zero: Array) -> int:
        """The largest integer that a quantization gives."""
        limit = self.makers.get(rounding.input[0])
        if limit is None or limit.op_type != "Min" or limit.input[1] not in self.tensors:
            return 255
        return min(int(zero) + int(np.rint(self.array(limit.input[1]) / step)), 255)

    def form(self, name: str) -> str:
        """The form of a constant; empty for floats, and for one without an origin."""
        return self.origins[name].form if name in self.origins else ""

    @staticmethod
    def input(node: NodeProto, place: int) -> str:
        """The name of an input; empty: it has none."""
        return node.input[place] if place < len(node.input) else ""

    def scales(self, weight: str) -> list[str]:
        """The scales of quantized weights, those that include a factor of the whole tensor among them."""
        own = self.origins.get(weight)
        return [
            name
            for name, origin in self.origins.items()
            if own is not None
            and origin.form == "scales"
            and (origin.tensors, origin.groups) == (own.tensors, own.groups)
            and (origin.factors == own.factors or not own.factors)
            and name in self.tensors
        ]

    def rounded(self, name: str, made: Made) -> Compared:
        """Quantized weights and their scales: differences from the checkpoint's that rounding does not explain."""
        expected, rows, group = made.array, len(made.array), [name, *self.shrink(name)]
        for shrink in group[1:]:
            expected = expected / self.array(shrink)
        group += (scales := self.scales(name))
        if not scales or self.tensors[name].data_type not in (TensorProto.INT8, TensorProto.UINT8):
            return Compared(group, made.names, np.full(expected.shape, np.nan))
        own = self.origins[name].factors
        factors = [1 if self.origins[each].factors == own else self.made(each).factors[0] for each in scales]  # type: ignore[union-attr]
        arrays = [self.array(each).reshape(rows, -1) / factor for each, factor in zip(scales, factors, strict=True)]
        integers, least = self.integers(name, rows, arrays[0].shape[1])
        off = np.maximum.reduce([integers_off(integers, each, expected, least, made.scales) for each in arrays])
        return Compared(group, made.names, off)

    def integers(self, name: str, rows: int, groups: int) -> tuple[Array, int]:
        """Weights as integers around 0 (out, groups, size), and the least that there may be."""
        stored = self.array(name).T if self.origins[name].transposed else self.array(name)
        if stored.dtype == np.int8:
            return stored[:, None], -127
        middle = 128 if self.origins[name].form == "int8" else 8
        if middle == 8:  # two in a byte
            stored = np.stack((stored & 15, stored >> 4), -1)
        return stored.reshape(rows, groups, -1).astype(np.int16) - middle, -middle

    def shrink(self, weight: str) -> list[str]:
        """The factors that a matmul's input is multiplied by, if any; its weight's columns were divided by them."""
        read = next((self.makers.get(node.input[0]) for node in self.model.node if weight in node.input), None)
        product = self.makers.get(read.input[0]) if read is not None and read.op_type == "QuantizeLinear" else None
        names = product.input if product is not None and product.op_type == "Mul" else ()
        return [name for name in names if name in self.tensors and self.form(name) == "shrink"]
