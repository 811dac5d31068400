"""The protocol of a model that can be exported, and the caches that its step uses.

`network.Transformer` is one implementation; engines, export and check use this protocol only. Sizes: B batch, S source
length, K beams, R = B*K rows, H heads, D head size, T target length so far, M capacity, d width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import ModelConfig

KeysValues = tuple[Tensor, Tensor]
Layers = dict[str, Tensor]
"""Layer outputs by the names of `contract.layer_names`, in order of computation."""


class Cache(Protocol):
    """Self-attention keys and values of a decode."""

    present: list[KeysValues]
    """The `past` of the next step, for each layer extended so far."""

    @property
    def distances(self) -> Tensor:
        """Query position minus key position, (1 or R, T or M); undefined where the mask is false."""
        ...

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[KeysValues, Tensor | None]:
        """Add this position's keys and values, (R, H, 1, D) each.

        Returns all keys and values to attend to, (R, H, T or M, D) each, and a mask (R or 1, 1, 1, M), true at written
        positions; no mask if all are written. Call it once per layer, in order.
        """
        ...


class Seq2Seq(Protocol):
    """An encoder-decoder model that decodes step by step; also a `torch.nn.Module`.

    Export recognizes matrix products by their `nn.Linear`, and tables by their `nn.Embedding`.
    """

    config: ModelConfig
    """Vocabularies, special ids, positions and cache sizes (`config.decoder`) must be the model's."""
    output: nn.Linear
    """Hidden states to logits: (..., d) -> (..., V)."""

    def encode(self, src_ids: Tensor, src_lengths: Tensor, layers: Layers | None = None) -> Tensor:
        """src_ids (B, S) right-padded, src_lengths (B) -> memory (B, S, d).

        `layers` receives `encoder_embedding`, `encoder_layer_0` and so on, and with `config.final_norm` `memory`.
        """
        ...

    def cross_keys_values(self, memory: Tensor) -> list[KeysValues]:
        """Cross-attention keys and values, projected once: two of (B, H, S, D) per decoder layer."""
        ...

    def step(
        self,
        tokens: Tensor,
        position: Tensor,
        src_lengths: Tensor,
        cross: list[KeysValues],
        cache: Cache,
        layers: Layers | None = None,
    ) -> Tensor:
        """One decoding step: hidden states (B, K, d), the input of `output`.

        tokens (B, K): the last token of each row; position: its index in the target, (1), or (B, K) if sentences are at
        different positions; cross: two of (B, H, S, D) per layer. `layers` receives `decoder_embedding`,
        `decoder_layer_0` and so on, with `config.final_norm` `hidden`, and, for recipes with attention, `attention`
        (B, K, S): the last layer's cross-attention, mean over heads.
        """
        ...

    training: bool

    def parameters(self) -> Iterator[nn.Parameter]:
        """See `nn.Module.parameters`."""
        ...

    def to(self, device: str) -> Self:
        """See `nn.Module.to`."""
        ...

    def train(self, mode: bool = True) -> Self:
        """See `nn.Module.train`."""
        ...

    def eval(self) -> Self:
        """See `nn.Module.eval`."""
        ...


class GrowingCache:
    """Keys and values that grow by one position per step: two of (R, H, T, D) per layer."""

    def __init__(self, past: list[KeysValues]) -> None:
        self.past, self.present = past, list[KeysValues]()

    @property
    def distances(self) -> Tensor:
        """See `Cache.distances`."""
        k = self.past[0][0]
        return torch.arange(k.shape[2], -1, -1, device=k.device)[None]

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[KeysValues, Tensor | None]:
        """See `Cache.extend`."""
        past_k, past_v = self.past[layer]
        self.present.append((torch.cat((past_k, k), 2), torch.cat((past_v, v), 2)))
        return self.present[-1], None


class StaticCache:
    """Buffers with room for M positions, two of (R, H, M, D) per layer; a step writes at `position`.

    Later positions are masked. They are overwritten as well, so that no NaN or infinity is left there.

    position: (1), or (R) if rows write at different positions; first (R, 1): where each row's target begins, if not at
    0. With `written_by` (B, K, M), rows are not reordered: it holds, for each position of a beam's target, the beam of
    the same sentence that wrote it.
    """

    def __init__(
        self,
        past: list[KeysValues],
        position: Tensor,
        first: Tensor | None = None,
        written_by: Tensor | None = None,
    ) -> None:
        self.past, self.present, self.written_by = past, list[KeysValues](), written_by
        self.position = position
        self.places = torch.arange(past[0][0].shape[2], dtype=position.dtype, device=position.device)
        self.before = (self.places < position[:, None])[:, None, :, None]
        mask = self.places <= position[:, None]
        if first is not None:
            mask = mask & (self.places >= first)
        self.mask = mask[:, None, None, :]

    @property
    def distances(self) -> Tensor:
        """See `Cache.distances`."""
        return self.position[:, None] - self.places

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[KeysValues, Tensor | None]:
        """See `Cache.extend`."""
        past_k, past_v = self.past[layer]
        present = torch.where(self.before, past_k, k), torch.where(self.before, past_v, v)
        self.present.append(present)
        return (self.of_beams(present[0]), self.of_beams(present[1])), self.mask

    def of_beams(self, buffer: Tensor) -> Tensor:
        """(R, H, M, D) as written -> the same gathered for the rows that read it, by `written_by`."""
        if self.written_by is None:
            return buffer
        batch, beams, capacity = self.written_by.shape
        _, heads, _, size = buffer.shape
        rows = self.written_by.long()[:, :, None, :, None].expand(batch, beams, heads, capacity, size)
        return buffer.view(batch, beams, heads, capacity, size).gather(1, rows).view_as(buffer)


def log_probs(model: Seq2Seq, hidden: Tensor) -> Tensor:
    """Hidden states (..., d) -> log-probabilities of the next token (..., V)."""
    return F.log_softmax(model.output(hidden), -1)


def keep(layers: Layers | None, name: str, x: Tensor) -> Tensor:
    """Store x in `layers`, if given; returns x."""
    if layers is not None:
        layers[name] = x
    return x


def length_mask(lengths: Tensor, size: int, queries: int) -> Tensor:
    """(B) -> (B, 1, queries, size), true at tokens; ONNX Runtime does not broadcast the third axis."""
    mask = torch.arange(size, device=lengths.device) < lengths[:, None]
    return mask[:, None, None, :].expand(-1, 1, queries, -1)
