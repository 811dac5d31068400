"""The graphs of transformers.js in its precisions: fp16, q8 and q4 as its users know them, from the same trace.

Inputs, outputs and caches stay fp32 in all. fp16: products with weights, and tables of embeddings. q8: int8 weights
with a scale an output, inputs rounded when they come (`DynamicQuantizeLinear`, `MatMulInteger`). q4: 4 bits in groups
of 32 (`MatMulNBits`). Tables of embeddings are int8 in q8 and q4.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir

from ...base.errors import ArtifactError
from ..passes.fold_weights import fold_weights
from ..passes.older_operators import older_operators
from ..passes.quantize import quantize_groups, quantize_tables
from ..passes.rewriting import MICROSOFT, Builder, constant_of, linears, origin_of
from ..passes.simplify import simplify
from ..quantizing import Range, channels

GROUP = 32
"""Weights that share a scale in q4."""
IDS = "input_ids"


def lowered(model: ir.Model, precision: str = "fp32") -> ir.Model:
    """A traced graph in a precision, and in operators of opset 17 where these can say it; the given one is as before.

    All of ours can; a module of the user's own may need those of the trace, which ONNX Runtime has from 1.22 on.
    """
    model, traced = model.clone(), model
    try:
        older_operators(model)
    except ArtifactError:
        model = traced.clone()
    simplify(model, rules=False)
    graph = model.graph
    if precision == "q4":
        quantize_tables(graph, {})
        quantize_groups(graph, 4, GROUP, {linear.name: Range(0, 0) for linear in linears(graph)})
        graph.opset_imports[MICROSOFT] = 1
    elif precision == "q8":
        quantize_tables(graph, {})
        quantize_inputs(graph)
    else:
        fold_weights(graph, gemm=True)
        if precision == "fp16":
            halve(graph)
    simplify(model, rules=False)
    return model


def quantize_inputs(graph: ir.Graph) -> None:
    """int8 weights with a scale per output, and inputs in 8 bits over the range that each call has."""
    for linear in list(linears(graph)):
        build, (weight, _) = Builder(graph, linear.product), linear.arrays()
        integers, scales = channels(weight)
        origin = origin_of(linear.weight)
        matrix = build.derived(replace(origin, form="int8", transposed=True), integers.T)
        x8, step, zero = build.nodes("DynamicQuantizeLinear", [linear.x], 3)
        sums = build.node("Cast", [build.node("MatMulInteger", [x8, matrix, zero])], to=ir.DataType.FLOAT.value)
        scale = build.node("Mul", [step, build.derived(replace(origin, form="scales"), scales)])
        out = build.node("Mul", [sums, scale])
        build.replace(linear.out, build.node("Add", [out, linear.bias]) if linear.bias is not None else out)


def halve(graph: ir.Graph) -> None:
    """Products with weights in fp16, their sums with biases in fp32; tables of embeddings are stored in fp16."""
    for node in list(graph):
        if node.op_type == "Gather" and node.inputs[1] is not None and node.inputs[1].name == IDS:
            _half(graph, node, 0)
        elif node.op_type in ("MatMul", "Gemm"):
            _half(graph, node, 1)


def _half(graph: ir.Graph, node: ir.Node, place: int) -> None:
    """Compute a node that reads a weight there in fp16."""
    weight = node.inputs[place]
    array = constant_of(weight)
    if weight is None or array is None or array.ndim != 2 or array.dtype != np.float32:
        return
    build, out = Builder(graph, node), node.outputs[0]
    inputs = list(node.inputs[:2])
    inputs[place] = build.constant(f"{weight.name}.fp16", array.astype(np.float16))
    if place:
        inputs[0] = build.node("Cast", [inputs[0]], to=ir.DataType.FLOAT16.value)
    how = {name: each.value for name, each in node.attributes.items()}
    made = build.node(node.op_type, inputs, **how)
    wide = build.node("Cast", [made], to=ir.DataType.FLOAT.value)
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    build.replace(out, build.node("Add", [wide, bias]) if bias is not None else wide)
