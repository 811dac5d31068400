"""Graphs for TensorRT: standard operators that all of its parsers from 8.6 on take, caches of a fixed capacity.

What those parsers take, and its source, stands in tests/trt_operators.json; a test holds every graph to it.
"""

from __future__ import annotations

import math

import numpy as np
from onnx import TensorProto

from ..model import Transformer
from ..recipe import Recipe
from .half import NEXT_PARENTS, PARENT_ROWS, PARENTS
from .lowering import Lowering

HIDDEN = np.float32(-1e9)
"""Added to scores of what must not be looked at: exp gives 0, and no row is all of it."""


class TrtLowering(Lowering):
    """Recipes of target `trt`. The stream of a step is (R, d)."""

    opsets = (("", 17),)

    def __init__(self, model: Transformer, recipe: Recipe) -> None:
        super().__init__(model, recipe)
        scale = np.float32(1 / math.sqrt(self.config.head_dim))
        for name, value in self.weights.items():
            if ".query." in name:  # so that no step needs to
                self.weights[name] = value * scale
        self.hidden = self.graph.constant("hidden_score", HIDDEN)
        self.shown = self.graph.constant("shown_score", np.float32(0))

    def rows(self) -> str:
        """See `Lowering.rows`."""
        return self.ints("rows", [-1, self.config.d_model])

    def size(self, x: str, axis: int) -> str:
        """See `Lowering.size`. TensorRT 8.6 misreads a Shape with a start or an end."""
        return self.graph.node("Gather", [self.graph.node("Shape", [x]), self.ints(f"axis_{axis}", [axis])])

    def encoder(self) -> None:
        """See `Lowering.encoder`."""
        self.mask_sources("src_ids")
        super().encoder()

    def step(self) -> None:
        """See `Lowering.step`."""
        node = self.graph.node
        self.mask_sources("cross_k_0", axis=2)
        slots = self.slots("past_k_0", axis=2)
        later = node("Where", [node("Greater", [slots, "position"]), self.hidden, self.shown])
        node("Unsqueeze", [later, self.ints("to_scores", [0, 1, 2])], "target_mask")  # (1, 1, 1, M)
        node("Unsqueeze", [node("Equal", [slots, "position"]), self.ints("to_cache", [0, 1, 3])], "is_here")
        node("Reshape", [PARENTS, self.ints("flat", [-1])], PARENT_ROWS)
        heads, size = self.config.heads, self.config.head_dim
        node("Concat", [node("Shape", ["tokens"]), self.ints("head", [heads, size])], "beams_of_sentences", axis=0)
        super().step()

    def mask_sources(self, like: str, axis: int = 1) -> None:
        """What is added to scores over a source: `source_mask` (B, 1, 1, S)."""
        node = self.graph.node
        lengths = node("Unsqueeze", ["src_lengths", self.ints("one", [1])])
        real = node("Less", [self.slots(like, axis), lengths])  # (B, S)
        scores = node("Where", [real, self.shown, self.hidden])
        node("Unsqueeze", [scores, self.ints("one_two", [1, 2])], "source_mask")

    def slots(self, like: str, axis: int) -> str:
        """0, 1, 2 and so on, as many as an axis has."""
        every = self.graph.constant("slots", np.arange(self.config.max_positions, dtype=np.int32))
        return self.graph.node("Slice", [every, self.ints("zero", [0]), self.size(like, axis)])

    def attend_source(self, y: str, name: str) -> str:
        """See `Lowering.attend_source`."""
        parts = self.query_key_value(y, f"{name}.attention")
        mixed = self.attention([self.heads(part) for part in parts], "source_mask")
        merged = self.graph.node("Transpose", [mixed], perm=[0, 2, 1, 3])
        return self.graph.node("Reshape", [merged, self.ints("merged", [0, 0, self.config.d_model])])

    def attend_target(self, y: str, layer: int) -> str:
        """See `Lowering.attend_target`. Beams are reordered, and the new position written, in one copy of the cache."""
        node, shape = self.graph.node, self.ints("row_heads", [-1, self.config.heads, 1, self.config.head_dim])
        q, *new = (node("Reshape", [part, shape]) for part in self.query_key_value(y, f"decoder.{layer}.attention"))
        present = []
        for part, value in zip("kv", new, strict=True):
            past = node("Gather", [f"past_{part}_{layer}", PARENT_ROWS])
            present.append(node("Where", ["is_here", value, past], f"present_{part}_{layer}"))
        return node("Reshape", [self.attention([q, *present], "target_mask"), self.rows()])

    def attend_memory(self, y: str, layer: int) -> str:
        """See `Lowering.attend_memory`."""
        node = self.graph.node
        q = node("Reshape", [self.product(y, f"decoder.{layer}.cross.query"), "beams_of_sentences"])
        q = node("Transpose", [q], perm=[0, 2, 1, 3])
        mixed = self.attention([q, f"cross_k_{layer}", f"cross_v_{layer}"], "source_mask")
        return node("Reshape", [node("Transpose", [mixed], perm=[0, 2, 1, 3]), self.rows()])

    def query_key_value(self, y: str, name: str) -> list[str]:
        """Three of (..., d)."""
        qkv = self.product(y, *(f"{name}.{part}" for part in ("query", "key", "value")))
        parts = [f"{qkv}_{part}" for part in "qkv"]
        self.graph.node("Split", [qkv, self.ints("thirds", [self.config.d_model] * 3)], parts, axis=-1)
        return parts

    def attention(self, query_key_value: list[str], mask: str) -> str:
        """(B, H, T, D) over two of (B, H, S, D) -> (B, H, T, D)."""
        node, (q, k, v) = self.graph.node, query_key_value
        scores = node("MatMul", [q, node("Transpose", [k], perm=[0, 1, 3, 2])])
        return node("MatMul", [node("Softmax", [node("Add", [scores, mask])], axis=-1), v])

    def best(self, log_probs: str) -> None:
        """See `Lowering.best`."""
        if self.recipe.top_k:
            count = self.ints("count", [self.recipe.top_k])
        else:
            count = self.graph.node("Mul", [self.size("tokens", 1), self.ints("two", [2])])
        self.graph.node("TopK", [log_probs, count], ["top_scores", "best"])
        ids = self.graph.node("Cast", ["best"], to=TensorProto.INT32)
        # What TopK makes of NaN is nowhere written, and a place outside of a table would end the process.
        least, last = np.int32(0), np.int32(self.config.tgt_vocab - 1)
        ids = self.graph.node("Max", [ids, self.graph.constant("first_id", least)])
        self.graph.node("Min", [ids, self.graph.constant("last_id", last)], "top_ids")
        self.choose(count)

    def choose(self, count: str) -> None:
        """The next step's inputs, of the `count` best tokens of every row: `contract.CHOICE`."""
        node, number, axes = self.graph.node, self.graph.constant, self.recipe.axes
        sums = node("Add", [node("Reshape", ["values", self.ints("column", [-1, 1])]), "top_scores"])
        going = node("Where", [node("Equal", ["top_ids", "end_id"]), self.hidden, sums])  # (R, k)
        going = node("Where", [node("Greater", [going, number("lowest", 3 * HIDDEN)]), going, self.hidden])  # no NaN
        beams = self.size("tokens", 1)
        by_sentence = node("Concat", [self.size("tokens", 0), self.ints("all", [-1])], axis=0)
        node("TopK", [node("Reshape", [going, by_sentence]), beams], ["best_sums", "chosen"])  # (B, K)
        ranks = number("ranks", np.arange(axes.beams.max, dtype=np.int32))
        lives = node("Less", [node("Slice", [ranks, self.ints("zero", [0]), beams]), "live_beams"])
        node("Where", [lives, "best_sums", self.hidden], "next_values")
        node("GatherElements", [node("Reshape", ["top_ids", by_sentence]), "chosen"], "next_tokens", axis=1)
        every = number("rows_at_most", np.arange(axes.batch.max * axes.beams.max, dtype=np.int32))
        rows = self.size("past_k_0", 0)
        own = node("Unsqueeze", [node("Slice", [every, self.ints("zero", [0]), rows]), self.ints("one", [1])])  # (R, 1)
        owners = node("Expand", [own, node("Concat", [rows, count], axis=0)])
        node("GatherElements", [node("Reshape", [owners, by_sentence]), "chosen"], NEXT_PARENTS, axis=1)
        node("Add", ["position", number("next", np.ones(1, np.int32))], "next_position")

    def gelu(self, x: str) -> str:
        """See `Lowering.gelu`. The operator is younger than TensorRT 8.6."""
        node, number = self.graph.node, self.graph.constant
        error = node("Erf", [node("Mul", [x, number("sqrt_half", np.float32(math.sqrt(0.5)))])])
        half = node("Mul", [x, number("half", np.float32(0.5))])
        return node("Mul", [half, node("Add", [error, number("unit", np.float32(1))])])
