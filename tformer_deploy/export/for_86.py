"""What TensorRT 8.6 computes wrongly in a decoder step, or does not compile, written otherwise.

Seen with 8.6.0 on an H200, docs/tensorrt.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from .half import replace_nodes, used_nodes, without_weights


def write_for_86(model: onnx.ModelProto) -> None:
    """Rewrite a decoder step of fixed sizes, in fp32 or fp16. Other graphs stay as they are.

    Attention with one query becomes products and sums, in fp32: as matmuls, later layers were wrong from the second row
    on. In an fp16 graph a norm becomes its parts, as TensorRT "could not infer output types" of one in fp32.
    """
    if any(node.op_type == "TopK" for node in model.graph.node):
        _Step(model).rewrite()


class _Step:
    """A graph, the types and shapes of its tensors, and its new nodes."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.graph = model.graph
        inferred = onnx.shape_inference.infer_shapes(without_weights(model)).graph
        values = (*inferred.value_info, *inferred.input, *inferred.output)
        self.types = {value.name: value.type.tensor_type.elem_type for value in values}
        self.shapes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in values}
        self.made_by = {name: node for node in self.graph.node for name in node.output}
        self.nodes: list[NodeProto] = []

    def rewrite(self) -> None:
        half = TensorProto.FLOAT16 in self.types.values()
        for node in self.graph.node:
            if node.op_type == "MatMul" and self.one_query(node):
                self.products(node)
            elif node.op_type == "LayerNormalization" and half:
                self.norm(node)
            else:
                self.nodes.append(node)
        replace_nodes(self.graph, used_nodes(self.graph, self.nodes))
        del self.graph.value_info[:]

    def one_query(self, node: NodeProto) -> bool:
        left, right = (self.shapes.get(name, []) for name in node.input)
        return len(right) == 4 and left[2] == 1

    def products(self, node: NodeProto) -> None:
        """A MatMul of (R, H, 1, a) and (R, H, a, b)."""
        (left, right), name = node.input, node.output[0]
        if keys := self.keys(right):  # both end in the axis that is summed
            product = self.add("Mul", [self.wide(left), self.wide(keys)], f"{name}_products")
            total = self.add("ReduceSum", [product, self.constant([-1])], f"{name}_sums", keepdims=1)
            self.result("Reshape", [total, self.constant(self.shapes[name])], name)
        else:
            rows, heads, one, size = self.shapes[left]
            column = self.add("Reshape", [self.wide(left), self.constant([rows, heads, size, one])], f"{name}_column")
            product = self.add("Mul", [column, self.wide(right)], f"{name}_products")
            self.result("ReduceSum", [product, self.constant([2])], name, keepdims=1)

    def keys(self, name: str) -> str:
        """What was transposed for a product with queries; empty: nothing."""
        made = self.made_by.get(name)
        turned = made is not None and made.op_type == "Transpose" and list(made.attribute[0].ints) == [0, 1, 3, 2]
        return made.input[0] if made is not None and turned else ""

    def norm(self, node: NodeProto) -> None:
        """A LayerNormalization over the last axis."""
        name, epsilon = node.output[0], next(each.f for each in node.attribute if each.name == "epsilon")
        x, *scales = node.input
        mean = self.add("ReduceMean", [x], f"{name}_mean", axes=[-1], keepdims=1)
        off = self.add("Sub", [x, mean], f"{name}_off")
        squares = self.add("Mul", [off, off], f"{name}_squares")
        variance = self.add("ReduceMean", [squares], f"{name}_variance", axes=[-1], keepdims=1)
        root = self.add("Sqrt", [self.add("Add", [variance, self.constant(epsilon)], f"{name}_safe")], f"{name}_root")
        found = self.add("Div", [off, root], f"{name}_scaled")
        for kind, scale in zip(("Mul", "Add"), scales, strict=False):  # there may be no bias
            found = self.add(kind, [found, scale], name if scale == scales[-1] else f"{name}_gained")

    def add(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [output], f"node_{output}", **attributes))
        return output

    def wide(self, name: str) -> str:
        """The tensor in fp32."""
        if self.types[name] == TensorProto.FLOAT:
            return name
        return self.add("Cast", [name], f"{name}_wide_{len(self.nodes)}", to=TensorProto.FLOAT)

    def result(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> None:
        """What is computed in fp32, as an output of the type that it had."""
        if self.types[output] == TensorProto.FLOAT:
            self.add(kind, inputs, output, **attributes)
        else:
            self.add("Cast", [self.add(kind, inputs, f"{output}_wide", **attributes)], output, to=self.types[output])

    def constant(self, value: list[int] | float) -> str:
        array: NDArray[Any] = np.array(value, np.float32 if isinstance(value, float) else np.int64)
        name = f"for_86_{len(self.graph.initializer)}"
        self.graph.initializer.append(numpy_helper.from_array(array, name))
        return name
