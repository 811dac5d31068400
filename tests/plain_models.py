"""What the code of tutorials computes, straight from a state dict with their names, and an engine that runs such code.

None of our model is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tformer_deploy.engines.base import Ints, Limits, Scores

State = Mapping[str, Tensor]


@dataclass
class PlainModel:
    """An encoder-decoder over a state dict; names have `{i}` where a layer's number is."""

    state: State
    heads: int
    names: Mapping[str, str]
    """Of `src`, `tgt` (embeddings), `output`, `self`, `cross`, `up`, `down`, `encoder_norms`, `decoder_norms`,
    `encoder_norm`, `decoder_norm` (empty: none), `layer`."""
    projections: tuple[str, str, str, str]
    """Of an attention; one name with a comma: packed."""
    layers: int
    pre: bool = True
    scaled: bool = True
    annotated: bool = False
    eps: float = 1e-5
    positions: tuple[Tensor, Tensor] | None = None
    activation: Callable[[Tensor], Tensor] = torch.relu

    def linear(self, x: Tensor, name: str) -> Tensor:
        bias = self.state.get(f"{name}.bias")
        return x @ self.state[f"{name}.weight"].T + (0 if bias is None else bias)

    def norm(self, x: Tensor, name: str) -> Tensor:
        if not name:
            return x
        if self.annotated:
            mean, deviation = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
            return self.state[f"{name}.a_2"] * (x - mean) / (deviation + self.eps) + self.state[f"{name}.b_2"]
        return F.layer_norm(x, x.shape[-1:], self.state[f"{name}.weight"], self.state.get(f"{name}.bias"), self.eps)

    def attend(self, x: Tensor, source: Tensor, mask: Tensor, name: str) -> Tensor:
        if "in_proj" in self.projections[0]:
            weights = self.state[f"{name}.in_proj_weight"].chunk(3)
            bias = self.state.get(f"{name}.in_proj_bias", torch.zeros(3 * x.shape[-1])).chunk(3)
            q, k, v = (F.linear(y, w, b) for y, w, b in zip((x, source, source), weights, bias, strict=True))
        else:
            inputs = zip((x, source, source), self.projections[:3], strict=True)
            q, k, v = (self.linear(y, f"{name}.{part}") for y, part in inputs)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
        mixed = scores.masked_fill(~mask, -math.inf).softmax(-1) @ v
        return self.linear(mixed.transpose(1, 2).flatten(2), f"{name}.{self.projections[3]}")

    def around(self, x: Tensor, norm: str, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        return x + sublayer(self.norm(x, norm)) if self.pre else self.norm(x + sublayer(x), norm)

    def feed_forward(self, x: Tensor, layer: str) -> Tensor:
        return self.linear(
            self.activation(self.linear(x, f"{layer}.{self.names['up']}")), f"{layer}.{self.names['down']}"
        )

    def embed(self, ids: Tensor, side: int) -> Tensor:
        table = self.state[self.names[("src", "tgt")[side]]]
        x = table[ids] * (math.sqrt(table.shape[1]) if self.scaled else 1)
        positions = sines(ids.shape[1], table.shape[1]) if self.positions is None else self.positions[side]
        return x + positions[: ids.shape[1]]

    def memory(self, src: Tensor, lengths: Tensor) -> Tensor:
        mask = (torch.arange(src.shape[1]) < lengths[:, None])[:, None, None]
        x = self.embed(src, 0)
        for i in range(self.layers):
            layer, norms = self.names["layer"].format(side="encoder", i=i), self.names["encoder_norms"].split()
            own = f"{layer}.{self.names['self']}"
            x = self.around(x, f"{layer}.{norms[0]}", lambda y, own=own: self.attend(y, y, mask, own))
            x = self.around(x, f"{layer}.{norms[1]}", lambda y, layer=layer: self.feed_forward(y, layer))
        return self.norm(x, self.names["encoder_norm"])

    def log_probs(self, src: Tensor, lengths: Tensor, tgt: Tensor) -> Tensor:
        memory = self.memory(src, lengths)
        mask = (torch.arange(src.shape[1]) < lengths[:, None])[:, None, None]
        causal = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).tril()
        x = self.embed(tgt, 1)
        for i in range(self.layers):
            layer, norms = self.names["layer"].format(side="decoder", i=i), self.names["decoder_norms"].split()
            own, cross = f"{layer}.{self.names['self']}", f"{layer}.{self.names['cross']}"
            x = self.around(x, f"{layer}.{norms[0]}", lambda y, own=own: self.attend(y, y, causal, own))
            x = self.around(x, f"{layer}.{norms[1]}", lambda y, cross=cross: self.attend(y, memory, mask, cross))
            x = self.around(x, f"{layer}.{norms[2]}", lambda y, layer=layer: self.feed_forward(y, layer))
        return self.linear(self.norm(x, self.names["decoder_norm"]), self.names["output"]).log_softmax(-1)

    def greedy(self, source: list[int], start: int, end: int, most: int) -> list[int]:
        """The most likely tokens one by one, the whole prefix anew at each."""
        src, output = torch.tensor([source]), [start]
        while len(output) <= most:
            token = int(self.log_probs(src, torch.tensor([len(source)]), torch.tensor([output]))[0, -1].argmax())
            if token == end:
                break
            output.append(token)
        return output[1:]


def sines(count: int, width: int, base: float = 10000.0) -> Tensor:
    """Interleaved sines and cosines, number by number."""
    return torch.tensor(
        [
            [(math.cos if j % 2 else math.sin)(p / base ** ((j - j % 2) / width)) for j in range(width)]
            for p in range(count)
        ]
    )


ANNOTATED = {
    "src": "src_embed.0.lut.weight",
    "tgt": "tgt_embed.0.lut.weight",
    "output": "generator.proj",
    "layer": "{side}.layers.{i}",
    "self": "self_attn",
    "cross": "src_attn",
    "up": "feed_forward.w_1",
    "down": "feed_forward.w_2",
    "encoder_norms": "sublayer.0.norm sublayer.1.norm",
    "decoder_norms": "sublayer.0.norm sublayer.1.norm sublayer.2.norm",
    "encoder_norm": "encoder.norm",
    "decoder_norm": "decoder.norm",
}
MULTI30K = ANNOTATED | {
    "src": "encoder.emb.tok_emb.weight",
    "tgt": "decoder.emb.tok_emb.weight",
    "cross": "cross_attn",
    "up": "feed_forward.linear_1",
    "down": "feed_forward.linear_2",
}
SEQ2SEQ = {
    "src": "encoder.tok_embedding.weight",
    "tgt": "decoder.tok_embedding.weight",
    "output": "decoder.fc_out",
    "layer": "{side}.layers.{i}",
    "self": "self_attention",
    "cross": "encoder_attention",
    "up": "positionwise_feedforward.fc_1",
    "down": "positionwise_feedforward.fc_2",
    "encoder_norms": "self_attn_layer_norm ff_layer_norm",
    "decoder_norms": "self_attn_layer_norm enc_attn_layer_norm ff_layer_norm",
    "encoder_norm": "",
    "decoder_norm": "",
}
TORCH = {
    "src": "src_tok_emb.embedding.weight",
    "tgt": "tgt_tok_emb.embedding.weight",
    "output": "generator",
    "layer": "transformer.{side}.layers.{i}",
    "self": "self_attn",
    "cross": "multihead_attn",
    "up": "linear1",
    "down": "linear2",
    "encoder_norms": "norm1 norm2",
    "decoder_norms": "norm1 norm2 norm3",
    "encoder_norm": "transformer.encoder.norm",
    "decoder_norm": "transformer.decoder.norm",
}
LINEARS = ("linears.0", "linears.1", "linears.2", "linears.3")
FC = ("fc_q", "fc_k", "fc_v", "fc_o")
PACKED = ("in_proj", "", "", "out_proj")


def random_state(
    names: Mapping[str, str],
    projections: tuple[str, str, str, str],
    norm: tuple[str, str] = ("weight", "bias"),
    biases: bool = True,
    sizes: tuple[int, int, int, int, int] = (32, 48, 2, 40, 44),
    embeddings: float = 1.0,
    seed: int = 1,
) -> dict[str, Tensor]:
    """A state dict with these names; sizes: width, feed-forward, layers, source and target vocabulary."""
    width, ff, layers, src_vocab, tgt_vocab = sizes
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}

    def linear(name: str, out: int, into: int) -> None:
        state[f"{name}.weight"] = torch.randn(out, into, generator=generator) / math.sqrt(into)
        if biases:
            state[f"{name}.bias"] = 0.1 * torch.randn(out, generator=generator)

    def norms(name: str) -> None:
        state[f"{name}.{norm[0]}"] = 1 + 0.1 * torch.randn(width, generator=generator)
        if biases:
            state[f"{name}.{norm[1]}"] = 0.1 * torch.randn(width, generator=generator)

    def attention(name: str) -> None:
        if projections == PACKED:
            linear(f"{name}.packed", 3 * width, width)
            for kind in ("weight", "bias") if biases else ("weight",):
                state[f"{name}.in_proj_{kind}"] = state.pop(f"{name}.packed.{kind}")
            linear(f"{name}.out_proj", width, width)
        else:
            for projection in projections:
                linear(f"{name}.{projection}", width, width)

    state[names["src"]] = embeddings * torch.randn(src_vocab, width, generator=generator) / math.sqrt(width)
    state[names["tgt"]] = embeddings * torch.randn(tgt_vocab, width, generator=generator) / math.sqrt(width)
    for side in ("encoder", "decoder"):
        for i in range(layers):
            layer = names["layer"].format(side=side, i=i)
            for part in ("self", "cross") if side == "decoder" else ("self",):
                attention(f"{layer}.{names[part]}")
            linear(f"{layer}.{names['up']}", ff, width)
            linear(f"{layer}.{names['down']}", width, ff)
            for name in names[f"{side}_norms"].split():
                norms(f"{layer}.{name}")
        if names[f"{side}_norm"]:
            norms(names[f"{side}_norm"])
    linear(names["output"], tgt_vocab, width)
    state[f"{names['output']}.weight"] *= 3
    return state


@dataclass
class PrefixState:
    memory: Tensor
    lengths: Tensor
    rows: Tensor
    """(B * K) The source of each row."""
    tokens: Tensor
    """(B * K, t)"""


class PrefixEngine:
    """An engine of any code that has memory(src, lengths) and log_probs(memory, lengths, tgt), (R, T, V).

    It runs the whole prefix at each step.
    """

    attention = admits = False
    precision = "fp32"

    def __init__(
        self,
        config: Any,
        memory: Callable[[Tensor, Tensor], Tensor],
        log_probs: Callable[[Tensor, Tensor, Tensor], Tensor],
        most: int,
    ) -> None:
        self.config, self.memory, self.log_probs = config, memory, log_probs
        self.limits = Limits(batch=1 << 10, src_tokens=most, tgt_tokens=most, beams=64)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *why: object) -> None: ...

    def encode(self, src_ids: Ints, src_lengths: Ints, outlook: Any = None) -> PrefixState:
        count = len(src_ids)
        src, lengths = torch.from_numpy(src_ids).long(), torch.from_numpy(src_lengths).long()
        with torch.inference_mode():
            memory = self.memory(src, lengths)
        return PrefixState(memory, lengths, torch.arange(count), torch.empty(count, 0, dtype=torch.long))

    def best(self, beams: int, state: Any = None) -> int:
        return 0

    @torch.inference_mode()
    def step(self, tokens: Ints, state: PrefixState, full: bool = False, attention: bool = False) -> Scores:
        state.tokens = torch.cat((state.tokens, torch.from_numpy(tokens).long().reshape(-1, 1)), 1)
        found = self.log_probs(state.memory[state.rows], state.lengths[state.rows], state.tokens)[:, -1]
        every = found.numpy().reshape(*tokens.shape, -1)
        best = every.argmax(2)[:, :, None].astype(np.int32)
        return Scores(best, np.take_along_axis(every, best, 2), every)

    def reorder(self, state: PrefixState, parents: Ints, sentences: Ints | None = None) -> None:
        rows = torch.from_numpy(parents).long().ravel()
        state.rows, state.tokens = state.rows[rows], state.tokens[rows]
