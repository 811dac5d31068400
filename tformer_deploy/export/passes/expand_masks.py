"""Pass `expand_masks`: a mask that is the same for all queries is written out for each, which ONNX Runtime demands.

Over traces of modules that leave it to broadcasting; `seq2seq.length_mask` does not.
"""

from __future__ import annotations

import onnx_ir as ir

from .rewriting import Builder


def expand_masks(graph: ir.Graph) -> None:
    """Expand the queries' axis of every `Attention`'s mask where it is 1 and theirs is not."""
    for node in list(graph):
        q, mask = (*node.inputs, None, None, None, None)[:4:3] if node.op_type == "Attention" else (None, None)
        if q is None or mask is None or q.shape is None or mask.shape is None or len(mask.shape) < 2:
            continue
        if mask.shape[-2] != 1 or q.shape[-2] == 1:
            continue
        build = Builder(graph, node)
        queries = build.nodes("Shape", [q], start=len(q.shape) - 2, end=len(q.shape) - 1)[0]
        before = [build.ints([1] * (len(mask.shape) - 2))] if len(mask.shape) > 2 else []
        wide = build.node("Concat", [*before, queries, build.ints([1])], axis=0)
        expanded = build.node("Expand", [mask, wide])
        expanded.type = mask.type
        expanded.shape = ir.Shape([*mask.shape[:-2], q.shape[-2], mask.shape[-1]])
        node.replace_input_with(3, expanded)
