"""What attention's scores gain by relative positions, as one number for each head and distance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from ....base.errors import ArtifactError
from ...quantizing import Array

MOST_BIAS = 1 << 27
"""Elements of a bias for all distances, (heads, queries, keys), while it is made."""


def bias_by_distance(
    graph: ir.Graph, bias: ir.Value, heads: int, positions: int, refused: Callable[[str], ArtifactError]
) -> Array:
    """(heads, distances) What scores gain by where a key is, from the furthest behind its query on.

    Of a step there are none ahead. Raises what `refused` makes of the reason where it is not by distance alone.
    """
    in_step = any(value.name == "tokens" for value in graph.inputs)
    tables = []
    for count in (max(1, positions // 2), positions):
        if count * count * heads > MOST_BIAS:
            raise refused(f"whose bias has {count} positions")
        found = _computed(graph, bias, _sizes(graph, count, in_step))[0]
        if in_step:
            tables.append(found[:, 0])
            continue
        table = np.zeros((len(found), 2 * count - 1), np.float32)
        table[:, :count] = found[:, ::-1, 0]
        table[:, count - 1 :] = found[:, 0]
        places = np.arange(count)
        if not np.array_equal(table[:, places - places[:, None] + count - 1], found):
            raise refused("whose bias is not by distance")
        tables.append(table)
    few, all_ = tables
    middle = (all_.shape[1] - few.shape[1]) // (1 if in_step else 2)
    if not np.array_equal(few, all_[:, middle : middle + few.shape[1]]):
        raise refused("whose bias is not by distance")
    return np.ascontiguousarray(all_)


def _sizes(graph: ir.Graph, count: int, in_step: bool) -> dict[str, Array]:
    """Inputs of one sentence with so many positions."""
    by_name = {"batch": 1, "beams": 1, "rows": 1, "src_len": count, "capacity": count}
    feeds: dict[str, Array] = {}
    for value in graph.inputs:
        shape = [size if isinstance(size, int) else by_name[str(size)] for size in value.shape or ()]
        kind = np.int32 if value.dtype is ir.DataType.INT32 else np.float32
        feeds[str(value.name)] = np.zeros(shape, kind)
    for name in ("position", "positions") if in_step else ():
        feeds[name] = feeds[name] + np.int32(count - 1)
    if not in_step:
        feeds["src_lengths"] = feeds["src_lengths"] + np.int32(count)
    return feeds


def _computed(graph: ir.Graph, wanted: ir.Value, feeds: dict[str, Array]) -> Array:
    """A value of a graph for some inputs, by ONNX's own reference."""
    part = ir.Model(ir.convenience.extract(graph, list(graph.inputs), [wanted]), ir_version=10)
    found: Any = ReferenceEvaluator(ir.to_proto(part)).run(None, feeds)
    return np.asarray(found[0])
