"""Graphs with the inputs and outputs of Hugging Face's runtimes: an encoder, and decoders without and with a cache.

The decoder for both (`decoder_model_merged`) has no `If`: where `use_cache_branch` is false it drops what the caches
hold, and where it is true it drops the encoder's output, so that keys and values of no position at all are made of it.

B batch, S source length, T tokens of this call, P those before it, L layers, H heads, D head size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import onnx
import onnx_ir as ir
import torch
from torch import Tensor
from torch.nn import functional as F

from ...model.config import ModelConfig
from ...model.network import Transformer
from ...model.seq2seq import GrowingCache, KeysValues, Seq2Seq, length_mask
from ..passes.rewriting import Builder
from ..to_onnx import label, own_outputs
from ..trace import Named, traced

ENCODER, DECODER, WITH_PAST, MERGED = (
    "encoder_model",
    "decoder_model",
    "decoder_with_past_model",
    "decoder_model_merged",
)
TRACED_AT = 23
"""The opset of traces, whose attention is one operator; see `hf_precisions.lowered`."""
MOST_BYTES = 1_900_000_000
"""A larger graph has its weights beside it, as NAME.onnx_data: one message of protobuf holds no 2 GiB."""
SIZES = {"batch_size": 2, "encoder_sequence_length": 5, "past_encoder_length": 6, "new_encoder_length": 7}
SIZES |= {"decoder_sequence_length": 3, "past_decoder_sequence_length": 4}
"""To trace with: no two alike."""
SHOWN: dict[int | str, str] = {"new_encoder_length": "encoder_sequence_length"}
SHOWN |= {"past_encoder_length": "encoder_sequence_length_out"}
"""What the merged decoder calls lengths that a trace must tell apart. transformers.js reads `batch_size` alone."""

Shapes = dict[str, tuple[int | str, ...]]


class EncoderModel(Named):
    """`encoder_model`."""

    name = ENCODER

    def __init__(self, model: Seq2Seq) -> None:
        super().__init__()
        self.model = model

    def shapes(self) -> Shapes:
        """Of the inputs."""
        return dict.fromkeys(("input_ids", "attention_mask"), ("batch_size", "encoder_sequence_length"))

    def outputs(self) -> Shapes:
        """Of the outputs."""
        return {"last_hidden_state": ("batch_size", "encoder_sequence_length", self.model.config.encoder.width)}

    def forward(self, *inputs: Tensor) -> Tensor:
        """See `shapes` -> (B, S, d). The mask is 1 at tokens, which stand before the padding."""
        input_ids, attention_mask = inputs
        return self.model.encode(input_ids, attention_mask.sum(1))


class DecoderModel(Named):
    """The decoder over `encoder_hidden_states`, over caches, or over both, of which a runtime fills one."""

    def __init__(self, name: str, model: Seq2Seq) -> None:
        super().__init__()
        self.model, self.name = model, name
        self.fresh, self.past = name != WITH_PAST, name != DECODER

    def shapes(self) -> Shapes:
        """Of the inputs. A module of the user's own takes one token a call."""
        config, several = self.model.config, isinstance(self.model, Transformer)
        source = "encoder_sequence_length"
        found: Shapes = {
            "input_ids": ("batch_size", "decoder_sequence_length" if several else 1),
            "encoder_attention_mask": ("batch_size", source),
        }
        if self.fresh:
            length = "new_encoder_length" if self.past else source
            found["encoder_hidden_states"] = ("batch_size", length, config.encoder.width)
        if self.past:
            lengths = {"decoder": "past_decoder_sequence_length", "encoder": "past_encoder_length"}
            heads = config.decoder
            found |= {
                name: ("batch_size", heads.heads, lengths[name.split(".")[2]], heads.head_dim)
                for name in cache_names("past_key_values", config, ("decoder", "encoder"))
            }
        return found

    def outputs(self) -> Shapes:
        """Of the outputs. Over caches alone, the encoder's are not returned again."""
        config, heads = self.model.config, self.model.config.decoder
        lengths = {"decoder": "present_decoder_sequence_length", "encoder": "encoder_sequence_length_out"}
        tokens = self.shapes()["input_ids"]
        return {"logits": (*tokens, config.tgt_vocab)} | {
            name: ("batch_size", heads.heads, lengths[name.split(".")[2]], heads.head_dim)
            for name in cache_names("present", config, ("decoder", "encoder") if self.fresh else ("decoder",))
        }

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """See `shapes` -> logits (B, T, V), and of each layer the caches."""
        given = dict(zip(self.shapes(), inputs, strict=True))
        tokens, config = given["input_ids"], self.model.config
        fresh = self.model.cross_keys_values(given["encoder_hidden_states"]) if self.fresh else []
        cross = kept = pairs(given, "encoder")
        if self.fresh:
            cross = [joined(*both) for both in zip(kept, fresh, strict=True)] if self.past else fresh
        heads = config.decoder
        empty = cross[0][0].new_empty(tokens.shape[0], heads.heads, 0, heads.head_dim)
        past = pairs(given, "decoder") if self.past else [(empty, empty)] * config.decoder_layers
        hidden, present = self.extended(tokens, given["encoder_attention_mask"].sum(1), cross, past)
        # As one row a token, the product reads the table of embeddings that it may be tied to.
        logits = self.model.output(hidden.flatten(0, 1)).view(tokens.shape[0], -1, config.tgt_vocab)
        sides = zip(present, fresh, strict=True) if self.fresh else ((each,) for each in present)
        return logits, *(tensor for layer in sides for pair in layer for tensor in pair)

    def extended(
        self, tokens: Tensor, lengths: Tensor, cross: list[KeysValues], past: list[KeysValues]
    ) -> tuple[Tensor, list[KeysValues]]:
        """Hidden states (B, T, d) of tokens (B, T) behind a cache, and the longer cache."""
        position = torch.arange(tokens.shape[1]) + past[0][0].shape[2]
        if isinstance(self.model, Transformer):
            return several_positions(self.model, tokens, position, lengths, cross, past)
        cache = GrowingCache(past)
        return self.model.step(tokens, position, lengths, cross, cache), [(k, v) for k, v in cache.present]


def several_positions(
    model: Transformer,
    tokens: Tensor,
    position: Tensor,
    lengths: Tensor,
    cross: list[KeysValues],
    past: list[KeysValues],
) -> tuple[Tensor, list[KeysValues]]:
    """`Transformer.decode` for tokens behind a cache: position (T), cross and past as in `Seq2Seq.step`."""
    count, before = tokens.shape[1], past[0][0].shape[2]
    source = length_mask(lengths, cross[0][0].shape[2], count)
    table = model.tgt_positions
    rows = None if table is None else F.embedding(position, table)
    x = model.embed(tokens, model.tgt_embedding, rows, model.tgt_embedding_norm)
    places = torch.arange(before + count)
    distances, causal = position[:, None] - places, places <= position[:, None]  # (T, P + T)
    present = []
    for layer, layer_cross, own, mask in zip(
        model.decoder, cross, past, model.decoder_relative(distances[None], causal[None, None]), strict=True
    ):
        y = layer.attention_residual.before(x)  # type: ignore[union-attr,operator]
        present.append(joined(own, layer.attention.keys_values(y)))  # type: ignore[union-attr,operator]
        y = layer.attention(y, present[-1], mask)  # type: ignore[operator]
        x = layer.rest(layer.attention_residual.after(x, y), layer_cross, source)  # type: ignore[union-attr,operator]
    return model.decoder_norm(x), present


def joined(first: KeysValues, second: KeysValues) -> KeysValues:
    """Keys and values of positions behind others."""
    return torch.cat((first[0], second[0]), 2), torch.cat((first[1], second[1]), 2)


def cache_names(kind: str, config: ModelConfig, sides: Sequence[str]) -> Iterator[str]:
    """Of a decoder's caches, in the order of Hugging Face's exports."""
    for i in range(config.decoder_layers):
        yield from (f"{kind}.{i}.{side}.{part}" for side in sides for part in ("key", "value"))


def pairs(given: Mapping[str, Tensor], side: str) -> list[KeysValues]:
    """The cached keys and values of every layer."""
    values = [value for name, value in given.items() if f".{side}." in name]
    return list(zip(values[0::2], values[1::2], strict=True))


def make_graph(name: str, model: Seq2Seq) -> ir.Model:
    """One graph of a model as it is traced; weights have their names in the checkpoint."""
    module = EncoderModel(model) if name == ENCODER else DecoderModel(name, model)
    shapes = module.shapes()
    given = {each: (example(each, shape), shape) for each, shape in shapes.items()}
    made = traced(module.eval(), given, [*module.outputs()], TRACED_AT)
    own_outputs(made.graph, [*module.outputs()])
    if name == MERGED:
        choose_by_branch(made.graph)
    shapes |= module.outputs()
    for value in (*made.graph.inputs, *made.graph.outputs):
        if value.name in shapes:
            value.shape = ir.Shape([SHOWN.get(size, size) for size in shapes[value.name]])  # type: ignore[call-overload]
    return made


def example(name: str, shape: Sequence[int | str]) -> Tensor:
    """An input to trace with."""
    sizes = [size if isinstance(size, int) else SIZES[size] for size in shape]
    if name.endswith("_mask"):
        return torch.ones(sizes, dtype=torch.int64)
    return torch.zeros(sizes, dtype=torch.int64 if name.endswith("_ids") else torch.float32)


def choose_by_branch(graph: ir.Graph) -> None:
    """Give the merged decoder its input `use_cache_branch`, and cut what it does not choose to no position."""
    branch = ir.Value(name="use_cache_branch", shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.BOOL))
    build = Builder(graph, graph[0])
    cached = build.node("Cast", [branch], to=ir.DataType.INT64.value)
    ends = {True: build.node("Mul", [cached, build.ints([1 << 31])])}
    ends[False] = build.node("Sub", [build.ints([1 << 31]), ends[True]])
    for value in list(graph.inputs):
        is_past = str(value.name).startswith("past_key_values")
        if not is_past and value.name != "encoder_hidden_states":
            continue
        users = list(value.uses())
        axis = build.ints([2 if is_past else 1])
        cut = build.node("Slice", [value, build.ints([0]), ends[is_past], axis])
        cut.shape, cut.type = value.shape, value.type
        for use in users:
            use.node.replace_input_with(use.idx, cut)
    graph.inputs.append(branch)


def save_graph(model: ir.Model, path: Path, weights_sha256: str) -> None:
    """Write a graph: one file, or beside its weights where these are too large. Raises what onnx.checker does."""
    proto = ir.to_proto(model)
    label(proto, {"tformer.graph": path.stem, "tformer.weights_sha256": weights_sha256})
    del proto.graph.value_info[:]  # in the merged decoder some sizes differ from the trace's
    beside = sum(math.prod(each.dims) * 4 for each in proto.graph.initializer) > MOST_BYTES
    onnx.save_model(proto, path, save_as_external_data=beside, location=f"{path.name}_data")
    onnx.checker.check_model(path)
