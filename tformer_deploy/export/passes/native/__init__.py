"""Pass `native_program`: a rewritten graph as a list of instructions for the C++ runtime's own engine.

It comes last, after what `ort-cpu` has, so that every stored integer is ONNX Runtime's. Each node becomes an
instruction, and then instructions are fused into the one before them.
"""

from __future__ import annotations

import onnx_ir as ir

from .fusions import fuse
from .instructions import Constant, Instruction, Matrix, Program, Rounding, View
from .lowering import Lowering

__all__ = ["Constant", "Instruction", "Matrix", "Program", "Rounding", "View", "native_program"]


def native_program(graph: ir.Graph, positions: int, floats: str = "fp32") -> Program:
    """The instructions of `encoder`, `memory` or a step (`slots_step`); `positions`: the most on either side.

    `floats`: how matrices are stored that are not of integers, `fp32` or `bf16`.

    Raises ArtifactError.
    """
    found = Lowering(graph, positions, floats).run()
    fuse(found)
    return found
