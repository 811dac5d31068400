"""Pass `fold_weights`: weights as a runtime's product reads them, none of them stored twice.

A product of a matrix `(rows, in)` reads the checkpoint's `(out, in)` by `Gemm`, so that an output tied to a table of
embeddings, or gathered for shortlists, stays one array; others get their weights transposed, `(in, out)`. A product and
what it gives get the layer's name, by which ranges, profiles and plans call it.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from .rewriting import Builder, linears, origin_of


def fold_weights(graph: ir.Graph, gemm: bool) -> None:
    """Transpose the weights of every product; `gemm`: but for those of two axes."""
    values = (*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs))
    taken = {str(value.name) for value in values}
    for linear in list(linears(graph)):
        build = Builder(graph, linear.product)
        bias = [] if linear.bias is None else [linear.bias]
        if gemm and linear.x.shape is not None and len(linear.x.shape) == 2:
            out = whole = build.node("Gemm", [linear.x, linear.weight, *bias], transB=1)
        else:
            weight, _ = linear.arrays()
            origin = replace(origin_of(linear.weight), transposed=True)
            out = build.node("MatMul", [linear.x, build.derived(origin, weight.T)])
            whole = build.node("Add", [out, *bias]) if bias else out
        build.replace(linear.out, whole)
        _name(out, linear.name, taken)


def _name(out: ir.Value, name: str, taken: set[str]) -> None:
    """Call a product by its layer; where something else is called so, as when a layer runs twice, not."""
    node = out.producer()
    if node is None or name in taken:
        return
    taken.add(name)
    node.name = name
    if not out.is_graph_output():
        out.name = name
