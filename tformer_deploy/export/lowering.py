"""The walk through both graphs, built from the weights; how a product or attention is done is each target's own."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np
import onnx
from onnx import TensorProto, helper

from ..contract import Signature, caches, signature
from ..model import Transformer
from ..recipe import Recipe
from .products import Array, Graph, float_product

_DTYPES = {"int32": TensorProto.INT32, "float32": TensorProto.FLOAT, "int8": TensorProto.INT8}


class Lowering(ABC):
    """Builds one graph. B batch, K beams, R = B*K rows, S source length, M capacity, H heads, D head size, d = H*D."""

    opsets: tuple[tuple[str, int], ...]
    """Domain and version of each operator set."""

    def __init__(self, model: Transformer, recipe: Recipe) -> None:
        self.config, self.recipe = model.config, recipe
        self.weights: dict[str, Array] = {name: t.detach().numpy() for name, t in model.state_dict().items()}
        self.positions = model.src_positions, model.tgt_positions
        self.graph = Graph()

    def build(self, name: str) -> onnx.ModelProto:
        """The graph `name` of `contract.graphs_of`."""
        self.encoder() if name == "encoder" else self.step()
        return self.finish(name, signature(name, self.config, self.recipe))

    def encoder(self) -> None:
        """src_ids (B, S), src_lengths (B) -> 2L of (B, H, S, D)."""
        node, config = self.graph.node, self.config
        table = self.graph.constant("positions", self.positions[0].detach().numpy())
        zero = self.ints("zero", [0])
        places = node("Slice", [table, zero, self.size("src_ids", 1), zero])  # TensorRT wants the axis
        x = node("Add", [self.embed("src_ids", "src_embedding"), places], "encoder_embedding")
        for i in range(config.encoder_layers):
            name = f"encoder.{i}"
            mixed = self.attend_source(self.before(x, f"{name}.attention_residual"), name)
            x = self.after(x, self.product(mixed, f"{name}.attention.out"), f"{name}.attention_residual")
            x = self.feed_forward(x, name, f"encoder_layer_{i}")
        memory = self.norm(x, "encoder_norm", "memory") if config.final_norm else x
        parts = [f"decoder.{i}.cross.{part}" for i in range(config.decoder_layers) for part in ("key", "value")]
        for part, spec in zip(parts, caches("cross", config, ()), strict=True):
            self.heads(self.product(memory, part), spec.name)

    def step(self) -> None:
        """See `contract.signature`. The stream is (R, 1, d) or (R, d)."""
        node, config = self.graph.node, self.config
        table = self.graph.constant("positions", self.positions[1].detach().numpy())
        embedded = node("Reshape", [self.embed("tokens", "tgt_embedding"), self.rows()])
        x = node("Add", [embedded, node("Gather", [table, "position"])], "decoder_embedding")
        for i in range(config.decoder_layers):
            name = f"decoder.{i}"
            mixed = self.attend_target(self.before(x, f"{name}.attention_residual"), i)
            x = self.after(x, self.product(mixed, f"{name}.attention.out"), f"{name}.attention_residual")
            mixed = self.attend_memory(self.before(x, f"{name}.cross_residual"), i)
            x = self.after(x, self.product(mixed, f"{name}.cross.out"), f"{name}.cross_residual")
            x = self.feed_forward(x, name, f"decoder_layer_{i}")
        hidden = self.norm(x, "decoder_norm", "hidden") if config.final_norm else x
        self.best(self.log_probs(hidden))

    def log_probs(self, hidden: str) -> str:
        """(R, V), named `log_probs`."""
        shape = self.ints("vocabulary", [-1, self.config.tgt_vocab])
        logits = self.graph.node("Reshape", [self.product(hidden, "output"), shape])
        return self.graph.node("LogSoftmax", [logits], "log_probs", axis=-1)

    @abstractmethod
    def rows(self) -> str:
        """The shape of a step's stream."""

    @abstractmethod
    def size(self, x: str, axis: int) -> str:
        """A dimension of x, (1)."""

    @abstractmethod
    def attend_source(self, y: str, name: str) -> str:
        """Self-attention of the encoder without its last product: (B, S, d) -> (B, S, d)."""

    @abstractmethod
    def attend_target(self, y: str, layer: int) -> str:
        """The same of a step, which also writes `present`."""

    @abstractmethod
    def attend_memory(self, y: str, layer: int) -> str:
        """Cross-attention of a step. Beams are query positions of their sentence, so cross K/V are never repeated."""

    @abstractmethod
    def best(self, log_probs: str) -> None:
        """The k best of log_probs (R, V), equal ones by the lower id."""

    def embed(self, ids: str, table: str) -> str:
        """Rows of an embedding table, scaled."""
        weight = self.weights[f"{table}.weight"]
        scale = np.float32(math.sqrt(self.config.d_model) if self.config.scale_embeddings else 1)
        return self.graph.node("Gather", [self.graph.constant("embedding", weight * scale), ids])

    def product(self, x: str, *names: str) -> str:
        """x times the weights of one or several linear layers side by side."""
        return float_product(self.graph, x, names[0], *self.linear(*names))

    def linear(self, *names: str) -> tuple[Array, Array | None]:
        """Weight (out, in) and bias (out) of linear layers side by side."""
        weight = np.concatenate([self.weights[f"{name}.weight"] for name in names])
        if f"{names[0]}.bias" not in self.weights:
            return weight, None
        return weight, np.concatenate([self.weights[f"{name}.bias"] for name in names])

    def heads(self, x: str, output: str = "") -> str:
        """(B, T, d) -> (B, H, T, D)."""
        shape = self.ints("heads", [0, 0, self.config.heads, self.config.head_dim])
        return self.graph.node("Transpose", [self.graph.node("Reshape", [x, shape])], output, perm=[0, 2, 1, 3])

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
        """The activation, before the product named `reader`."""
        node, kind = self.graph.node, self.config.activation
        if kind == "relu":
            return node("Relu", [x])
        return self.gelu(x) if kind == "gelu" else node("Mul", [x, node("Sigmoid", [x])])

    def gelu(self, x: str) -> str:
        """x times the normal distribution's cumulative function."""
        return self.graph.node("Gelu", [x])

    def finish(self, name: str, expected: Signature) -> onnx.ModelProto:
        """The model with the contract's inputs and outputs."""
        inputs, outputs = (
            [helper.make_tensor_value_info(spec.name, _DTYPES[spec.dtype], spec.shape) for spec in side]
            for side in (expected.inputs, expected.outputs)
        )
        constants = list(self.graph.constants.values())
        graph = helper.make_graph(self.graph.nodes, name, inputs, outputs, constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid(*opset) for opset in self.opsets])

    def ints(self, name: str, values: list[int]) -> str:
        """A constant of int64."""
        return self.graph.constant(name, np.array(values, np.int64))
