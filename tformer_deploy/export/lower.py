"""The same two graphs for ONNX Runtime's CPU kernels: fused, in 8 or 4 bits, with caches written in place.

Built from the weights, not by rewriting the standard graphs; the gate holds them to the same reference. What was
measured for each choice stands in docs/lowering.md.
"""

from __future__ import annotations

import math

import numpy as np
import onnx
from onnx import TensorProto, helper

from ..contract import Signature, caches, signature
from ..model import Transformer
from ..recipe import Recipe
from .calibrate import Ranges
from .products import MICROSOFT, Array, Graph, block_product, column_product, float_product

OPSET = 21
_DTYPES = {"int32": TensorProto.INT32, "float32": TensorProto.FLOAT}


def lower(name: str, model: Transformer, recipe: Recipe, ranges: Ranges) -> onnx.ModelProto:
    """The graph `name` of `contract.GRAPHS` for a recipe of target `ort-cpu`."""
    builder = Lowering(model, recipe, ranges, block=recipe.block if name == "decoder_step" else 0)
    builder.encoder() if name == "encoder" else builder.step()
    return builder.finish(name, signature(name, model.config, recipe))


class Lowering:
    """Builds one graph. B batch, K beams, R = B*K rows, S source length, M capacity, H heads, D head size, d = H*D."""

    def __init__(self, model: Transformer, recipe: Recipe, ranges: Ranges, block: int) -> None:
        self.config, self.recipe, self.ranges, self.block = model.config, recipe, ranges, block
        self.weights: dict[str, Array] = {name: t.detach().numpy() for name, t in model.state_dict().items()}
        self.positions = model.src_positions, model.tgt_positions
        self.graph = Graph()

    def encoder(self) -> None:
        """src_ids (B, S), src_lengths (B) -> 2L of (B, H, S, D)."""
        node, config = self.graph.node, self.config
        length = node("Shape", ["src_ids"], start=1, end=2)
        table = self.graph.constant("positions", self.positions[0].detach().numpy())
        places = node("Slice", [table, self._ints("zero", [0]), length])
        x = node("Add", [self.embed("src_ids", "src_embedding"), places], "encoder_embedding")
        for i in range(config.encoder_layers):
            name = f"encoder.{i}"
            y = self.before(x, f"{name}.attention_residual")
            # Not one product as in the step: with this many rows, splitting it would cost more than it saves.
            qkv = [self.product(y, f"{name}.attention.{part}") for part in ("query", "key", "value")]
            mixed = node("MultiHeadAttention", [*qkv, "", "src_lengths"], domain=MICROSOFT, num_heads=config.heads)
            x = self.after(x, self.product(mixed, f"{name}.attention.out"), f"{name}.attention_residual")
            x = self.feed_forward(x, name, f"encoder_layer_{i}")
        memory = self.norm(x, "encoder_norm", "memory") if config.final_norm else x
        heads = self._ints("heads", [0, 0, config.heads, config.head_dim])
        parts = [f"decoder.{i}.cross.{part}" for i in range(config.decoder_layers) for part in ("key", "value")]
        for part, spec in zip(parts, caches("cross", config, ()), strict=True):
            node("Transpose", [node("Reshape", [self.product(memory, part), heads])], spec.name, perm=[0, 2, 1, 3])

    def step(self) -> None:
        """See `contract.signature`. The stream is (R, 1, d)."""
        node, config = self.graph.node, self.config
        rows, alone = self._ints("rows", [-1, 1, config.d_model]), self._ints("width", [config.d_model])
        beams = node("Concat", [node("Shape", ["tokens"]), alone], axis=0)  # B, K, d
        table = self.graph.constant("positions", self.positions[1].detach().numpy())
        embedded = node("Reshape", [self.embed("tokens", "tgt_embedding"), rows])
        x = node("Add", [embedded, node("Gather", [table, "position"])], "decoder_embedding")
        for i in range(config.decoder_layers):
            name = f"decoder.{i}"
            y = self.before(x, f"{name}.attention_residual")
            q, k, v = self.split(self.product(y, *(f"{name}.attention.{part}" for part in ("query", "key", "value"))))
            mixed = node(
                "MultiHeadAttention",
                [q, k, v, "", "", "", f"past_k_{i}", f"past_v_{i}", "position", "written_by"],
                [f"mixed_{i}", f"present_k_{i}", f"present_v_{i}"],
                domain=MICROSOFT,
                num_heads=config.heads,
                unidirectional=1,
            )
            x = self.after(x, self.product(mixed, f"{name}.attention.out"), f"{name}.attention_residual")
            # Beams are query positions of their sentence, so that cross K/V are never repeated.
            y = self.before(x, f"{name}.cross_residual")
            q = node("Reshape", [self.product(y, f"{name}.cross.query"), beams])
            inputs = [q, f"cross_k_{i}", f"cross_v_{i}", "", "src_lengths"]
            mixed = node("MultiHeadAttention", inputs, domain=MICROSOFT, num_heads=config.heads)
            mixed = node("Reshape", [mixed, rows])
            x = self.after(x, self.product(mixed, f"{name}.cross.out"), f"{name}.cross_residual")
            x = self.feed_forward(x, name, f"decoder_layer_{i}")
        hidden = self.norm(x, "decoder_norm", "hidden") if config.final_norm else x
        logits = node("Reshape", [self.product(hidden, "output"), self._ints("vocabulary", [-1, config.tgt_vocab])])
        self.best(node("LogSoftmax", [logits], "log_probs", axis=-1))

    def best(self, log_probs: str) -> None:
        """The k best of log_probs (R, V), equal ones by the lower id.

        TopK looks at every score several times, ReduceMax once: the k best lie in the k blocks of highest maximum.
        """
        node, vocab = self.graph.node, self.config.tgt_vocab
        if self.recipe.top_k:
            count = self._ints("count", [self.recipe.top_k])
        else:
            count = node("Mul", [node("Shape", ["tokens"], start=1, end=2), self._ints("two", [2])])
        width, most = block_width(vocab), self.recipe.top_k or 2 * self.recipe.axes.beams.max
        if not width or vocab // width < most:
            node("TopK", [log_probs, count], ["top_scores", "best"])
            node("Cast", ["best"], "top_ids", to=TensorProto.INT32)
            return
        parts = node("Reshape", [log_probs, self._ints("parts", [-1, vocab // width, width])])
        highest = node("ReduceMax", [parts, self._ints("last", [2])], keepdims=0)
        node("TopK", [highest, count], ["block_scores", "block_unordered"])
        # In order of their ids, so that of equal scores the lower id comes first below.
        node("TopK", ["block_unordered", count], ["blocks", "block_order"], largest=0)
        chosen = node("GatherND", [parts, node("Unsqueeze", ["blocks", self._ints("last", [2])])], batch_dims=1)
        flat = node("Reshape", [chosen, self._ints("flat", [0, -1])])
        node("TopK", [flat, count], ["top_scores", "place"])
        size = self.graph.constant("block_width", np.array(width))
        block = node("GatherElements", ["blocks", node("Div", ["place", size])], axis=1)
        ids = node("Add", [node("Mul", [block, size]), node("Mod", ["place", size])])
        node("Cast", [ids], "top_ids", to=TensorProto.INT32)

    def embed(self, ids: str, table: str) -> str:
        """Rows of an embedding table, scaled; in 8 bits with a scale per row unless all is fp32."""
        node, constant = self.graph.node, self.graph.constant
        weight = self.weights[f"{table}.weight"]
        scale = np.float32(math.sqrt(self.config.d_model) if self.config.scale_embeddings else 1)
        if self.recipe.precision == "fp32":
            return node("Gather", [constant("embedding", weight * scale), ids])
        scales = np.maximum(np.abs(weight).max(1, keepdims=True), 1e-9) / np.float32(127)
        integers = constant("embedding", np.rint(weight / scales).astype(np.int8))
        rows = node("Cast", [node("Gather", [integers, ids])], to=TensorProto.FLOAT)
        return node("Mul", [rows, node("Gather", [constant("embedding.scales", scales * scale), ids])])

    def product(self, x: str, *names: str) -> str:
        """x times the weights of one or several linear layers side by side."""
        weight = np.concatenate([self.weights[f"{name}.weight"] for name in names])
        bias = None
        if f"{names[0]}.bias" in self.weights:
            bias = np.concatenate([self.weights[f"{name}.bias"] for name in names])
        if self.recipe.precision == "fp32":
            return float_product(self.graph, x, names[0], weight, bias)
        if self.block:
            bits = 8 if self.recipe.precision == "int8" else 4
            return block_product(self.graph, x, names[0], weight, bias, (bits, self.block))
        least, largest = self.ranges[names[0]]
        return column_product(self.graph, x, names[0], weight, bias, (least, largest))

    def split(self, x: str) -> list[str]:
        """Queries, keys and values of (..., 3d)."""
        names = [f"{x}_{part}" for part in "qkv"]
        self.graph.node("Split", [x], names, axis=-1, num_outputs=3)
        return names

    def before(self, x: str, residual: str) -> str:
        """What a sublayer sees."""
        return self.norm(x, f"{residual}.norm") if self.config.norm_position == "pre" else x

    def after(self, x: str, y: str, residual: str, output: str = "") -> str:
        """Add a sublayer's output y to the stream x."""
        if self.config.norm_position == "pre":
            return self.graph.node("Add", [x, y], output)
        return self.norm(self.graph.node("Add", [x, y]), f"{residual}.norm", output)

    def norm(self, x: str, name: str, output: str = "") -> str:
        """Layer norm. The annotated one becomes the standard one, its gain scaled by sqrt((d-1)/d)."""
        gain, epsilon = self.weights[f"{name}.weight"], self.config.norm_eps
        if self.config.norm == "annotated":
            d = self.config.d_model
            # Its eps is added to the deviation, where it changes next to nothing; this one only guards constant rows.
            gain, epsilon = gain * np.float32(math.sqrt((d - 1) / d)), 1e-12
        inputs = [
            x,
            self.graph.constant(f"{name}.gain", gain),
            self.graph.constant(f"{name}.bias", self.weights[f"{name}.bias"]),
        ]
        return self.graph.node("LayerNormalization", inputs, output, epsilon=epsilon)

    def feed_forward(self, x: str, name: str, output: str) -> str:
        """The last sublayer of a layer."""
        y = self.before(x, f"{name}.ff_residual")
        hidden = self.activate(self.product(y, f"{name}.ff.up"), f"{name}.ff.down")
        return self.after(x, self.product(hidden, f"{name}.ff.down"), f"{name}.ff_residual", output)

    def activate(self, x: str, reader: str) -> str:
        """The activation, unless rounding the next product's input does it: no negative number is in relu's range."""
        node, kind = self.graph.node, self.config.activation
        if kind == "relu":
            rounded = self.recipe.precision != "fp32" and not self.block
            return x if rounded and self.ranges[reader][0] == 0 else node("Relu", [x])
        if kind == "gelu":
            return node("Gelu", [x])
        return node("Mul", [x, node("Sigmoid", [x])])

    def finish(self, name: str, expected: Signature) -> onnx.ModelProto:
        """The model with the contract's inputs and outputs."""
        inputs, outputs = (
            [helper.make_tensor_value_info(spec.name, _DTYPES[spec.dtype], spec.shape) for spec in side]
            for side in (expected.inputs, expected.outputs)
        )
        constants = list(self.graph.constants.values())
        graph = helper.make_graph(self.graph.nodes, name, inputs, outputs, constants)
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=opsets)

    def _ints(self, name: str, values: list[int]) -> str:
        return self.graph.constant(name, np.array(values, np.int64))


def block_width(vocab: int) -> int:
    """The divisor of the vocabulary, from 16 to 1024, near which TopK sees least of four blocks; 0: there is none."""
    found = [width for width in range(16, 1025) if vocab % width == 0]
    return min(found, key=lambda width: vocab // width + 4 * width, default=0)
