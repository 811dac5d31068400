"""Graphs for ONNX Runtime's CPU kernels: fused, in 8 or 4 bits, with caches written in place.

What was measured for each choice stands in docs/lowering.md.
"""

from __future__ import annotations

import math

import numpy as np
from onnx import TensorProto

from ..model import Transformer
from ..recipe import Recipe
from .calibrate import Ranges
from .lowering import Lowering
from .products import MICROSOFT, block_product, column_product, columns, table_product


class OrtLowering(Lowering):
    """Recipes of target `ort-cpu`. The stream of a step is (R, 1, d)."""

    opsets = ("", 21), (MICROSOFT, 1)

    def __init__(self, model: Transformer, recipe: Recipe, ranges: Ranges, block: int) -> None:
        super().__init__(model, recipe)
        self.ranges, self.block = ranges, block

    def rows(self) -> str:
        """See `Lowering.rows`."""
        return self.ints("rows", [-1, 1, self.config.d_model])

    def size(self, x: str, axis: int) -> str:
        """See `Lowering.size`."""
        return self.graph.node("Shape", [x], start=axis, end=axis + 1)

    def attend_source(self, y: str, name: str) -> str:
        """See `Lowering.attend_source`."""
        # Not one product as in the step: with this many rows, splitting it would cost more than it saves.
        qkv = [self.product(y, f"{name}.attention.{part}") for part in ("query", "key", "value")]
        return self.attention([*qkv, "", "src_lengths"])

    def attend_target(self, y: str, layer: int) -> str:
        """See `Lowering.attend_target`."""
        names = [f"decoder.{layer}.attention.{part}" for part in ("query", "key", "value")]
        qkv = self.product(y, *names)
        parts = [f"{qkv}_{part}" for part in "qkv"]
        self.graph.node("Split", [qkv], parts, axis=-1, num_outputs=3)
        past = [f"past_k_{layer}", f"past_v_{layer}"]
        outputs = [f"mixed_{layer}", f"present_k_{layer}", f"present_v_{layer}"]
        return self.attention([*parts, "", "", "", *past, "position", "written_by"], outputs, unidirectional=1)

    def attend_memory(self, y: str, layer: int) -> str:
        """See `Lowering.attend_memory`."""
        node, shape = self.graph.node, "beams_of_sentences"
        if layer == 0:
            node("Concat", [node("Shape", ["tokens"]), self.ints("width", [self.config.d_model])], shape, axis=0)
        q = node("Reshape", [self.product(y, f"decoder.{layer}.cross.query"), shape])
        mixed = self.attention([q, f"cross_k_{layer}", f"cross_v_{layer}", "", "src_lengths"])
        return node("Reshape", [mixed, self.rows()])

    def attention(self, inputs: list[str], outputs: str | list[str] = "", **how: int) -> str:
        """ONNX Runtime's fused attention."""
        heads = self.config.heads
        return self.graph.node("MultiHeadAttention", inputs, outputs, MICROSOFT, num_heads=heads, **how)

    def log_probs(self, hidden: str) -> str:
        """See `Lowering.log_probs`. The output's weights lie a token a row, as `short_rows` and embeddings want."""
        node, constant = self.graph.node, self.graph.constant
        x = node("Reshape", [hidden, self.ints("flat_rows", [-1, self.config.d_model])])
        if self.block:
            logits = self.product(x, "output")
        else:
            weight, bias = self.linear("output")
            if self.recipe.integer_step:
                logits = table_product(self.graph, x, "output", weight, self.ranges["output"])
            else:
                logits = node("Gemm", [x, constant("output", weight)], transB=1)
            if bias is not None:
                logits = node("Add", [logits, constant("output.bias", bias)])
        return node("LogSoftmax", [logits], "log_probs", axis=-1)

    def best(self, log_probs: str) -> None:
        """See `Lowering.best`.

        TopK looks at every score several times, ReduceMax once: the k best lie in the k blocks of highest maximum.
        """
        node, vocab, count = self.graph.node, self.config.tgt_vocab, self.count()
        width, most = block_width(vocab), self.recipe.top_k or 2 * self.recipe.axes.beams.max
        if not width or vocab // width < most:
            node("TopK", [log_probs, count], ["top_scores", "best"])
            node("Cast", ["best"], "top_ids", to=TensorProto.INT32)
            return
        parts = node("Reshape", [log_probs, self.ints("parts", [-1, vocab // width, width])])
        highest = node("ReduceMax", [parts, self.ints("last", [2])], keepdims=0)
        node("TopK", [highest, count], ["block_scores", "block_unordered"])
        # In order of their ids, so that of equal scores the lower id comes first below.
        node("TopK", ["block_unordered", count], ["blocks", "block_order"], largest=0)
        chosen = node("GatherND", [parts, node("Unsqueeze", ["blocks", self.ints("last", [2])])], batch_dims=1)
        flat = node("Reshape", [chosen, self.ints("flat", [0, -1])])
        node("TopK", [flat, count], ["top_scores", "place"])
        size = self.graph.constant("block_width", np.array(width))
        block = node("GatherElements", ["blocks", node("Div", ["place", size])], axis=1)
        ids = node("Add", [node("Mul", [block, size]), node("Mod", ["place", size])])
        node("Cast", [ids], "top_ids", to=TensorProto.INT32)

    def count(self) -> str:
        """How many best tokens a row has, (1)."""
        if self.recipe.top_k:
            return self.ints("count", [self.recipe.top_k])
        return self.graph.node("Mul", [self.size("tokens", 1), self.ints("two", [2])])

    def embed(self, ids: str, table: str) -> str:
        """See `Lowering.embed`; in 8 bits with a scale per row unless all is fp32."""
        if self.recipe.precision == "fp32":
            return super().embed(ids, table)
        node, constant = self.graph.node, self.graph.constant
        weight = self.weights[f"{table}.weight"]
        scale = np.float32(math.sqrt(self.config.d_model) if self.config.scale_embeddings else 1)
        integers, scales = columns(weight)
        rows = node("Cast", [node("Gather", [constant("embedding", integers), ids])], to=TensorProto.FLOAT)
        scales_name = constant("embedding.scales", scales[:, None] * scale)
        return node("Mul", [rows, node("Gather", [scales_name, ids])])

    def product(self, x: str, *names: str) -> str:
        """See `Lowering.product`."""
        if self.recipe.precision == "fp32":
            return super().product(x, *names)
        weight, bias = self.linear(*names)
        if self.block:
            return block_product(self.graph, x, names[0], weight, bias, (self.bits, self.block))
        least, largest = self.ranges[names[0]]
        return column_product(self.graph, x, names[0], weight, bias, (least, largest))

    @property
    def bits(self) -> int:
        """Of a weight in blocks."""
        return 8 if self.recipe.precision == "int8" else 4

    def activate(self, x: str, reader: str) -> str:
        """See `Lowering.activate`. Rounding the next product's input does it where no negative number is in range."""
        rounded = self.recipe.precision != "fp32" and not self.block
        if self.config.activation == "relu" and rounded and self.ranges[reader][0] == 0:
            return x
        return super().activate(x, reader)


def block_width(vocab: int) -> int:
    """The divisor of the vocabulary, from 16 to 1024, near which TopK sees least of four blocks; 0: there is none."""
    found = [width for width in range(16, 1025) if vocab % width == 0]
    return min(found, key=lambda width: vocab // width + 4 * width, default=0)
