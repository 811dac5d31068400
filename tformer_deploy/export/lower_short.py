"""Graphs for vocabulary shortlists: a step that scores the tokens of a list, and what it needs of the table."""

from __future__ import annotations

from typing import Any

import onnx

from ..contract import signature
from .lower_ort import OrtLowering
from .products import MICROSOFT, block_size, columns, integer_product, packed_blocks


class ShortLowering(OrtLowering):
    """The graphs of `contract.SHORT_GRAPHS`. n tokens in a list."""

    def build(self, name: str) -> onnx.ModelProto:
        """See `Lowering.build`."""
        self.gather() if name == "short_rows" else self.step()
        return self.finish(name, signature(name, self.config, self.recipe))

    def gather(self) -> None:
        """shortlist (n) -> listed_rows (d, n), and scales and bias (n) where there are some."""
        node, constant = self.graph.node, self.graph.constant
        weight, bias = self.linear("output")
        if self.recipe.integer_step:
            integers, scales = columns(weight)
            rows = node("Gather", [constant("output", integers), "shortlist"])
            node("Gather", [constant("output.scales", scales), "shortlist"], "listed_scales")
        elif self.block:
            rows = self.gather_blocks()
        else:
            rows = node("Gather", [constant("output", weight), "shortlist"])
        node("Transpose", [rows], "listed_rows", perm=[1, 0])
        if bias is not None:
            node("Gather", [constant("output.bias", bias), "shortlist"], "listed_bias")

    def gather_blocks(self) -> str:
        """(n, d) in fp32: `MatMulNBits` needs weights that are constant."""
        weight, _ = self.linear("output")
        inputs = weight.shape[1]
        block = block_size(self.block, inputs)
        packed, scales = packed_blocks(weight, self.bits, block)
        names = [
            self.graph.constant("output", packed.reshape(len(packed), -1)),
            "shortlist",
            self.graph.constant("output.scales", scales),
        ]
        how: dict[str, Any] = {"bits": self.bits, "block_size": block, "gather_axis": 0, "quantize_axis": 1}
        rows = self.graph.node("GatherBlockQuantized", names, domain=MICROSOFT, **how)
        if inputs % block == 0:
            return rows
        ends = [self.ints(name, [value]) for name, value in (("zero", 0), ("inputs", inputs), ("one", 1))]
        return self.graph.node("Slice", [rows, *ends])

    def log_probs(self, hidden: str) -> str:
        """See `Lowering.log_probs`; (R, n)."""
        node = self.graph.node
        x = node("Reshape", [hidden, "beams_of_sentences"])
        if self.recipe.integer_step:
            names = "listed_rows", "listed_scales"
            logits = integer_product(self.graph, x, self.ranges["output"], names)
        else:
            logits = node("MatMul", [x, "listed_rows"])
        if self.config.output_bias:
            logits = node("Add", [logits, "listed_bias"])
        shape = node("Concat", [self.ints("any", [-1]), node("Shape", ["shortlist"])], axis=0)
        masked = node("Reshape", [node("Add", [logits, "listed_mask"]), shape])
        return node("LogSoftmax", [masked], "log_probs", axis=-1)

    def best(self, log_probs: str) -> None:
        """See `Lowering.best`; of n scores, one look is enough."""
        node = self.graph.node
        node("TopK", [log_probs, self.count()], ["top_scores", "places"])
        node("Gather", ["shortlist", "places"], "top_ids")
