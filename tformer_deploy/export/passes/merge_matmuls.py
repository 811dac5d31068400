"""Pass `merge_matmuls`: linear layers that read the same input become one product and a split.

For a step, where a product's cost is reading its weights and starting it; with many rows splitting costs more than it
saves. The numbers are the same: every output is the sum of the same products.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ...bundle.origin import concatenated
from .rewriting import Builder, Linear, linears, origin_of


def merge_matmuls(graph: ir.Graph) -> None:
    """Merge the layers of each input that have two or more, and a bias each or none."""
    readers: dict[ir.Value, list[Linear]] = defaultdict(list)
    for linear in linears(graph):
        readers[linear.x].append(linear)
    for group in readers.values():
        if len(group) > 1 and len({linear.bias is None for linear in group}) == 1:
            _merge(graph, group)


def _merge(graph: ir.Graph, group: Sequence[Linear]) -> None:
    build = Builder(graph, group[0].product)
    arrays = [linear.arrays() for linear in group]
    origin = concatenated([origin_of(linear.weight) for linear in group])
    weight = build.derived(origin, np.concatenate([weight for weight, _ in arrays]))
    out = build.node("MatMul", [group[0].x, build.node("Transpose", [weight], perm=[1, 0])])
    if group[0].bias is not None:
        origin = concatenated([origin_of(linear.bias) for linear in group if linear.bias is not None])
        out = build.node("Add", [out, build.derived(origin, np.concatenate([bias for _, bias in arrays]))])  # type: ignore[arg-type]
    sizes = build.ints([len(weight) for weight, _ in arrays])
    for linear, part in zip(group, build.nodes("Split", [out, sizes], len(group), axis=-1), strict=True):
        build.replace(linear.out, part)
