"""Pass `fold_weights`: weights as a runtime's product reads them, none of them stored twice.

A product of a matrix `(rows, in)` reads the checkpoint's `(out, in)` by `Gemm`, so that an output tied to a table of
embeddings, or gathered for shortlists, stays one array; others get their weights transposed, `(in, out)`.
"""

from __future__ import annotations

import onnx_ir as ir

from .rewriting import Builder, constant_of, linears


def fold_weights(graph: ir.Graph, gemm: bool) -> None:
    """Transpose the weights of every product; `gemm`: but for those of two axes."""
    for linear in list(linears(graph)):
        build = Builder(graph, linear.product)
        if gemm and linear.x.shape is not None and len(linear.x.shape) == 2:
            bias = [] if linear.bias is None else [linear.bias]
            build.replace(linear.out, build.node("Gemm", [linear.x, linear.weight, *bias], transB=1))
            continue
        weight = constant_of(linear.weight)
        assert weight is not None
        out = build.node("MatMul", [linear.x, build.constant(f"{linear.weight.name}^T", weight.T)])
        build.replace(linear.out, out if linear.bias is None else build.node("Add", [out, linear.bias]))
