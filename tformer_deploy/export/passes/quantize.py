"""Passes `quantize_channels`, `quantize_groups`, `quantize_tables`: weights in 8 or 4 bits for ONNX Runtime.

What an output may be off is the recipe's tolerance; every stored integer is within half a step of its weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from ...base.errors import ArtifactError
from ...bundle.origin import Origin
from ..quantizing import TABLES, Array, Range, Ranges, channels, group_size, packed_groups
from .rewriting import MICROSOFT, Builder, Linear, constant_of, linears, made_by, origin_of

IDS = ("src_ids", "tokens", "shortlist", "input_ids")
"""Inputs that name rows of a table."""


def quantize_channels(graph: ir.Graph, ranges: Ranges) -> None:
    """int8 weights with a scale per output, inputs in 8 bits over ranges that calibration measured.

    The sums are exact, so that a row's result does not depend on the rows beside it. Raises ArtifactError for a layer
    that calibration has not seen.
    """
    for linear, over in rounded_linears(graph, ranges):
        x, build, shrink = linear.x, Builder(graph, linear.product), over.shrink
        relu = made_by(x, "Relu")
        if relu is not None and over.least == 0:
            x = relu.inputs[0]  # type: ignore[assignment]  # rounding does it where no negative number is in range
        weight, _ = linear.arrays()
        if shrink is not None:
            factors = build.derived(Origin((f"{over.name}.weight",), form="shrink"), shrink)
            x, weight = build.node("Mul", [x, factors]), weight / shrink
        x8, step, zero = round_input(build, x, over)
        integers, scales = channels(weight, over.scales)
        origin = origin_of(linear.weight)
        # (in, out), as ONNX Runtime packs it: of (out, in) a session keeps a turned copy for good.
        matrix = build.derived(replace(origin, form="int8", transposed=True), integers.T)
        scale = build.derived(replace(origin, form="scales"), scales)
        out = build.node("MatMulIntegerToFloat", [x8, matrix, step, scale, zero, None, linear.bias], MICROSOFT)
        build.replace(linear.out, out)


def rounded_linears(graph: ir.Graph, ranges: Ranges) -> Iterator[tuple[Linear, Range]]:
    """The layers that do not stay fp32, and the range of their input, which layers side by side share.

    Where one of those stays fp32, all do. Raises ArtifactError.
    """
    for linear in list(linears(graph)):
        found = [ranges[name] for name in linear.name.split(",") if name in ranges]
        if not found:
            raise ArtifactError(f"quantize: calibration has seen no input of {linear.name}: is it an nn.Linear?")
        known = [each for each in found if each is not None]
        if len(known) == len(found):
            scales = [each.scales for each in known if each.scales is not None]
            yield linear, known[0]._replace(scales=np.concatenate(scales)) if scales else known[0]


def round_input(build: Builder, x: ir.Value, over: Range) -> tuple[ir.Value, ir.Value, ir.Value]:
    """x in 8 bits over its range, the step between two integers, and the integer that stands for 0."""
    step, zero = over.step_and_zero
    if over.most < 255:
        x = build.node("Min", [x, build.number(over.highest)])
    names = build.constant(f"step_{step!s}", step), build.constant(f"zero_{zero}", zero)
    return build.node("QuantizeLinear", [x, *names]), *names


def quantize_groups(graph: ir.Graph, bits: int, largest_group: int, ranges: Ranges) -> None:
    """Weights in 8 or 4 bits with a scale per group of inputs; the kernel rounds each row of the input itself."""
    for linear, _ in rounded_linears(graph, ranges):
        build, (weight, _) = Builder(graph, linear.product), linear.arrays()
        size = group_size(largest_group, weight.shape[1])
        integers, scales = packed_groups(weight, bits, size)
        origin = replace(origin_of(linear.weight), groups=True)
        matrix = build.derived(replace(origin, form=f"int{bits}"), integers)
        inputs: list[ir.Value | None] = [linear.x, matrix, build.derived(replace(origin, form="scales"), scales)]
        inputs += [] if linear.bias is None else [None, None, linear.bias]
        how = {"K": weight.shape[1], "N": weight.shape[0], "bits": bits, "block_size": size, "accuracy_level": 4}
        build.replace(linear.out, build.node("MatMulNBits", inputs, MICROSOFT, **how))


def quantize_tables(graph: ir.Graph, ranges: Ranges) -> None:
    """int8 tables of embeddings with a scale per row; a number that rows are multiplied by becomes the scales'."""
    for node in list(graph) if TABLES not in ranges else ():
        table, array = node.inputs[0] if node.op_type == "Gather" else None, None
        ids = node.inputs[1] if table is not None else None
        if table is None or ids is None or ids.name not in IDS or not ids.is_graph_input():
            continue
        array = constant_of(table)
        if array is None or array.ndim != 2 or array.dtype != np.float32:
            continue
        out, factor = _multiplied(node.outputs[0])
        build, origin = Builder(graph, out.producer() or node), origin_of(table)
        own = ranges.get(origin.tensors[0].removesuffix(".weight"))
        integers, scales = channels(array, own and own.scales)
        rows = build.node("Gather", [build.derived(replace(origin, form="int8"), integers), ids])
        column = build.derived(replace(origin.scaled(float(factor)), form="scales"), scales[:, None] * factor)
        scale = build.node("Gather", [column, ids])
        wide = build.node("Cast", [rows], to=ir.DataType.FLOAT.value)
        build.replace(out, build.node("Mul", [wide, scale]))


def _multiplied(rows: ir.Value) -> tuple[ir.Value, np.float32]:
    """What rows become by the number that they are multiplied by at once, and the number."""
    readers = [use.node for use in rows.uses()]
    if len(readers) == 1 and readers[0].op_type == "Mul" and not rows.is_graph_output():
        for value in readers[0].inputs:
            array: Array | None = constant_of(value)
            if array is not None and array.size == 1:
                return readers[0].outputs[0], np.float32(array.reshape(()))
    return rows, np.float32(1)
