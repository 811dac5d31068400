"""Pass `fold_scales`: attention's factor 1/sqrt(D) inside the weights of the queries, so that no step multiplies.

Every score changes by the rounding of one multiplication in fp32.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from .rewriting import Builder, linears, made_by, origin_of


def fold_scales(graph: ir.Graph) -> None:
    """Scale the linear layer behind each query that has one of its own; others stay as they are."""
    layers = {linear.out: linear for linear in linears(graph)}
    for node in list(graph):
        if node.op_type != "Attention" or "scale" in node.attributes:
            continue
        q = node.inputs[0]
        assert q is not None and q.shape is not None
        value: ir.Value = q
        while len(value.uses()) == 1 and (view := made_by(value, "Transpose", "Reshape")) is not None:
            value = view.inputs[0]  # type: ignore[assignment]
        linear = layers.get(value)
        if linear is None or len(value.uses()) != 1:
            continue
        factor = np.float32(1 / math.sqrt(int(q.shape[3])))  # type: ignore[arg-type]
        build, (weight, bias) = Builder(graph, linear.product), linear.arrays()
        scaled = build.derived(origin_of(linear.weight).scaled(float(factor)), weight * factor)
        gemm = linear.product.op_type == "Gemm"
        linear.product.replace_input_with(1, scaled if gemm else build.node("Transpose", [scaled], perm=[1, 0]))
        if linear.bias is not None and bias is not None:
            add = linear.out.producer()
            assert add is not None
            place = list(add.inputs).index(linear.bias)
            add.replace_input_with(place, build.derived(origin_of(linear.bias).scaled(float(factor)), bias * factor))
        node.attributes["scale"] = ir.AttrFloat32("scale", 1.0)
