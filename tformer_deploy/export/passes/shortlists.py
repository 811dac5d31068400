"""Passes `quantize_listed` and `gather_quantized`: the graphs of vocabulary shortlists in the precision of their step.

`short_rows` gathers the weights of a list's tokens, and `short_step` multiplies with what it gathered.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from ..quantizing import Range, Ranges, channels, group_size, packed_groups
from .quantize import round_input
from .rewriting import MICROSOFT, Builder, constant_of, origin_of

ROWS, SCALES = "listed_rows", "listed_scales"


def quantize_listed(graph: ir.Graph, ranges: Ranges) -> None:
    """A list's rows as int8 with a scale each: what `short_rows` returns, and what `short_step` reads."""
    rows = next((value for value in graph.inputs if value.name == ROWS), None)
    if rows is None:
        _gather_channels(graph, ranges["output"])
        return
    (product,) = (use.node for use in rows.uses() if use.node.op_type == "MatMul")
    build = Builder(graph, product)
    rows.type = ir.TensorType(ir.DataType.INT8)
    scales = ir.Value(name=SCALES, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([rows.shape[1]]))  # type: ignore[index]
    graph.inputs.insert(list(graph.inputs).index(rows) + 1, scales)
    x, step, zero = round_input(build, product.inputs[0], ranges["output"])  # type: ignore[arg-type]
    build.replace(product.outputs[0], build.node("MatMulIntegerToFloat", [x, rows, step, scales, zero], MICROSOFT))


def _gather_channels(graph: ir.Graph, over: Range | None) -> None:
    gather, weight = _gather(graph)
    build = Builder(graph, gather)
    integers, scales = channels(constant_of(weight), over and over.scales)  # type: ignore[arg-type]
    origin = origin_of(weight)
    rows = build.node("Gather", [build.derived(replace(origin, form="int8"), integers), gather.inputs[1]])
    rows.type = ir.TensorType(ir.DataType.INT8)
    build.replace(gather.outputs[0], rows)
    found = build.node("Gather", [build.derived(replace(origin, form="scales"), scales), gather.inputs[1]])
    found.name, found.shape, found.type = SCALES, ir.Shape(["listed"]), ir.TensorType(ir.DataType.FLOAT)
    (listed,) = (value for value in graph.outputs if value.name == ROWS)
    listed.type = ir.TensorType(ir.DataType.INT8)
    graph.outputs.insert(list(graph.outputs).index(listed) + 1, found)


def gather_quantized(graph: ir.Graph, bits: int, largest_group: int) -> None:
    """`short_rows` of weights in groups, in fp32: `MatMulNBits` needs weights that are constant."""
    gather, weight = _gather(graph)
    array, build = constant_of(weight), Builder(graph, gather)
    assert array is not None
    size = group_size(largest_group, array.shape[1])
    packed, scales = packed_groups(array, bits, size)
    origin = replace(origin_of(weight), groups=True)
    inputs = [
        build.derived(replace(origin, form=f"int{bits}"), packed.reshape(len(packed), -1)),
        gather.inputs[1],
        build.derived(replace(origin, form="scales"), scales),
    ]
    how: dict[str, Any] = {"bits": bits, "block_size": size, "gather_axis": 0, "quantize_axis": 1}
    rows = build.node("GatherBlockQuantized", inputs, MICROSOFT, **how)
    if array.shape[1] % size:  # the last group is filled up
        rows = build.node("Slice", [rows, build.ints([0]), build.ints([array.shape[1]]), build.ints([1])])
    build.replace(gather.outputs[0], rows)


def _gather(graph: ir.Graph) -> tuple[ir.Node, ir.Value]:
    """The node of `short_rows` that takes rows of the output's weights, and those."""
    for node in graph:
        array = constant_of(node.inputs[0]) if node.op_type == "Gather" else None
        if array is not None and array.ndim == 2 and array.dtype == np.float32:
            return node, node.inputs[0]  # type: ignore[return-value]
    raise AssertionError("short_rows gathers no weights")
