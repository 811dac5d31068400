"""Graphs of target `trt` in half precision and with fixed sizes, as a plan is built from them.

The types stand in the graph, because TensorRT 11 has no switch for fp16 and older ones choose for themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import ml_dtypes
import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from ..base.errors import LimitError
from ..bundle.contract import number
from .save import INDICES

Half = Literal["fp16", "bf16"]
HALF_TYPES: dict[str, tuple[int, Any]] = {
    "fp16": (TensorProto.FLOAT16, np.float16),
    "bf16": (TensorProto.BFLOAT16, ml_dtypes.bfloat16),
}
LARGEST = {"fp16": 65504 / 2, "bf16": 1.6e38}
"""Largest absolute value on the calibration text of a tensor in half precision: half of what fp16 can hold."""
EXACT = {"LayerNormalization", "ReduceMean", "Softmax", "LogSoftmax", "TopK"}
"""Reductions over many elements, and what chooses tokens: always fp32."""
PARENTS, NEXT_PARENTS = "parents", "next_parents"
"""The row that each row of a step continues, and for the next step."""


@dataclass(frozen=True)
class Island:
    """A node that stays fp32 because of what it reads or writes."""

    graph: str
    node: str
    """Its name: the layer's, if it is one's product."""
    kind: str
    tensor: str
    """The first tensor of it that is too large."""
    largest: float


def fix_sizes(model: onnx.ModelProto, sizes: Mapping[str, int]) -> None:
    """Give every symbolic size of inputs and outputs its number, and compute what follows from them.

    With one beam a row continues itself, so that no cache is reordered. Raises ArtifactError where a size is not given.
    """
    graph = model.graph
    for value in (*graph.input, *graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_value = number(dim.dim_param, sizes)
    del graph.value_info[:]
    if sizes.get("beams") == 1:
        _keep_rows(graph)
    shapes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in graph.input}
    known = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer if tensor.data_type in INDICES}
    left = []
    for node in graph.node:
        if node.op_type == "Shape" and node.input[0] in shapes:
            found = [np.array(shapes[node.input[0]], np.int64)]
        elif all(name in known for name in node.input):
            evaluator = ReferenceEvaluator(node, opsets={"": model.opset_import[0].version})
            found = cast(list[Any], evaluator.run(None, {name: known[name] for name in node.input}))
        else:
            left.append(node)
            continue
        for name, array in zip(node.output, found, strict=True):
            known[name] = array
            graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    replace_nodes(graph, left)


def _keep_rows(graph: onnx.GraphProto) -> None:
    """Read the caches directly instead of gathering the parents' rows."""
    same: dict[str, str] = {}
    left = []
    for node in graph.node:
        if node.op_type == "Gather" and node.input[0].startswith("past_"):
            same[node.output[0]] = node.input[0]
            continue
        if NEXT_PARENTS in node.output:
            node = helper.make_node("Identity", [PARENTS], [NEXT_PARENTS], NEXT_PARENTS)
        node.input[:] = [same.get(name, name) for name in node.input]
        left.append(node)
    replace_nodes(graph, used_nodes(graph, left))


def used_nodes(graph: onnx.GraphProto, nodes: Iterable[NodeProto]) -> list[NodeProto]:
    """The nodes, in order, that outputs are made of."""
    wanted = {value.name for value in graph.output}
    kept = []
    for node in reversed(list(nodes)):
        if wanted & set(node.output):
            wanted |= set(node.input)
            kept.append(node)
    return kept[::-1]


def to_half(model: onnx.ModelProto, half: Half, largest: Mapping[str, float]) -> list[Island]:
    """Compute products, and what only follows them up to the next sum, in half precision; caches become half as well.

    `largest` is what each tensor reached in absolute value on real text. Returns the nodes that stay fp32 for it.
    Raises LimitError where a cache would overflow.
    """
    return _Half(model, half, largest).rewrite()


class _Half:
    def __init__(self, model: onnx.ModelProto, half: Half, largest: Mapping[str, float]) -> None:
        self.graph, self.limit = model.graph, LARGEST[half]
        self.half, self.dtype = HALF_TYPES[half]
        self.name = half
        self.constants = {tensor.name: tensor for tensor in self.graph.initializer}
        self.largest = dict(largest)
        for name, tensor in self.constants.items():
            if tensor.data_type == TensorProto.FLOAT:
                self.largest[name] = float(np.abs(numpy_helper.to_array(tensor)).max(initial=0))
        inferred = onnx.shape_inference.infer_shapes(without_weights(model)).graph
        values = (*inferred.value_info, *inferred.input, *inferred.output)
        self.floats = {value.name for value in values if value.type.tensor_type.elem_type == TensorProto.FLOAT}
        self.averaged = {node.input[0] for node in self.graph.node if node.op_type == "ReduceMean"}
        self.halves: set[str] = set()
        self.casts: dict[tuple[str, int], str] = {}
        self.nodes: list[NodeProto] = []

    def rewrite(self) -> list[Island]:
        caches = [value for value in (*self.graph.input, *self.graph.output) if _is_cache(value.name)]
        for value in caches:
            if self.too_large(value.name):
                raise LimitError(
                    f"{value.name} reaches {self.largest[value.name]:.3g}, more than half of what {self.name} holds: "
                    f"build with --precision bf16 or fp32"
                )
            value.type.tensor_type.elem_type = self.half
        self.halves |= {value.name for value in self.graph.input if _is_cache(value.name)}
        islands, ids = [], ("src_ids", "tokens")
        for node in list(self.graph.node):
            # Rows of an embedding are stored in half and widened into the fp32 stream.
            if node.op_type == "Gather" and node.input[1] in ids and not self.too_large(node.input[0]):
                self.table(node)
                continue
            island = self.island(node)
            if island and self.wants_half(node):
                islands.append(island)
            self.add(node, self.wants_half(node) and not island)
        replace_nodes(self.graph, self.nodes, self.constants.values())
        del self.graph.value_info[:]  # they have the old types
        return islands

    def too_large(self, name: str) -> bool:
        return self.largest.get(name, 0) > self.limit

    def wants_half(self, node: NodeProto) -> bool:
        squared = node.op_type == "Mul" and node.output[0] in self.averaged  # the square overflows before x does
        if node.op_type in EXACT or squared:
            return False
        made = [name for name in node.input if name in self.floats and name not in self.constants]
        return node.op_type == "MatMul" or (bool(made) and all(name in self.halves for name in made))

    def island(self, node: NodeProto) -> Island | None:
        for name in (*node.input, *node.output):
            if self.too_large(name):
                return Island(self.graph.name, node.name, node.op_type, name, self.largest[name])
        return None

    def table(self, node: NodeProto) -> None:
        """Read rows in half, and widen them."""
        rows = f"{node.output[0]}_{self.name}"
        self.nodes.append(helper.make_node("Gather", [self.constant(node.input[0]), node.input[1]], [rows], node.name))
        self.nodes.append(helper.make_node("Cast", [rows], [node.output[0]], f"{rows}_widened", to=TensorProto.FLOAT))

    def add(self, node: NodeProto, half: bool) -> None:
        """A node whose float inputs all have its type."""
        for i, name in enumerate(node.input):
            if name in self.constants:
                if half and self.constants[name].data_type == TensorProto.FLOAT:
                    node.input[i] = self.constant(name)
            elif name in self.floats and (name in self.halves) != half:
                node.input[i] = self.cast(name, half)
        self.nodes.append(node)
        made = [name for name in node.output if name in self.floats]
        for name in made:
            if half != _is_cache(name) and name in {value.name for value in self.graph.output}:
                inner = f"{name}_made"
                node.output[list(node.output).index(name)] = inner
                to = self.half if _is_cache(name) else TensorProto.FLOAT
                self.nodes.append(helper.make_node("Cast", [inner], [name], f"{name}_cast", to=to))
                if _is_cache(name):
                    self.halves.add(name)
            elif half:
                self.halves.add(name)

    def cast(self, name: str, half: bool) -> str:
        to = self.half if half else TensorProto.FLOAT
        if (name, to) not in self.casts:
            self.casts[name, to] = f"{name}_{self.name if half else 'fp32'}"
            self.nodes.append(
                helper.make_node("Cast", [name], [self.casts[name, to]], f"{self.casts[name, to]}_cast", to=to)
            )
        return self.casts[name, to]

    def constant(self, name: str) -> str:
        """A constant in half precision."""
        new = f"{name}_{self.name}"
        if new not in self.constants:
            array = numpy_helper.to_array(self.constants[name]).astype(self.dtype)
            self.constants[new] = numpy_helper.from_array(array, new)
        return new


def without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy that has no float values, as a message ends at 2 GiB and types do not depend on them."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in copy.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            tensor.ClearField("raw_data")
    return copy


def _is_cache(name: str) -> bool:
    """Of keys and values: states of recurrent cells, to which each step adds, stay fp32."""
    return name.startswith(("cross_", "past_", "present_")) and "_c_" not in name


def replace_nodes(graph: onnx.GraphProto, nodes: Iterable[NodeProto], constants: Iterable[TensorProto] = ()) -> None:
    """Make these the graph's nodes, and keep the constants that they read."""
    copies = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
    read = {name for node in copies for name in node.input}
    kept = [tensor for tensor in (constants or list(graph.initializer)) if tensor.name in read]
    kept = [type(tensor).FromString(tensor.SerializeToString()) for tensor in kept]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(copies)
    graph.initializer.extend(kept)
