"""The protocol of a model that can be exported, and the caches that its step uses.

`network.Transformer` is one implementation; engines, export and check use this protocol only. Sizes: B batch, S source
length, K beams, R = B*K rows, H heads, D head size, T target length so far, M capacity, d width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import ModelConfig

KeysValues = tuple[Tensor, Tensor]
Carried = tuple[Tensor, ...]
"""What a decoder layer keeps between steps: keys and values, or the state (R, d) of a recurrent cell."""
Layers = dict[str, Tensor]
"""Layer outputs by the names of `contract.layer_names`, in order of computation."""


class Cache(Protocol):
    """Self-attention keys and values of a decode."""

    present: list[Carried]
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

    def replace(self, layer: int, update: Callable[[Tensor], Tensor]) -> Tensor:
        """Replace the state (R, d) of a recurrent cell by what `update` makes of it, which is returned.

        Instead of `extend`, in models with `decoder_cell = "ssru"`.
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
    """Keys and values that grow by one position per step: two of (R, H, T, D) per layer.

    States of recurrent cells, (R, d), do not grow: each step replaces them.
    """

    def __init__(self, past: Sequence[Carried]) -> None:
        self.past, self.present = past, list[Carried]()

    @property
    def distances(self) -> Tensor:
        """See `Cache.distances`."""
        k = self.past[0][0]
        return torch.arange(k.shape[2], -1, -1, device=k.device)[None]

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[KeysValues, Tensor | None]:
        """See `Cache.extend`."""
        past_k, past_v = self.past[layer]
        extended = torch.cat((past_k, k), 2), torch.cat((past_v, v), 2)
        self.present.append(extended)
        return extended, None

    def replace(self, layer: int, update: Callable[[Tensor], Tensor]) -> Tensor:
        """See `Cache.replace`."""
        state = update(self.past[layer][0])
        self.present.append((state,))
        return state


class StaticCache:
    """Buffers with room for M positions, two of (R, H, M, D) per layer; a step writes at `position`.

    Later positions are masked. They are overwritten as well, so that no NaN or infinity is left there.

    position: (1), or (R) if rows write at different positions; first (R, 1): where each row's target begins, if not at
    0. With `written_by` (B, K, M), rows are not reordered: it holds, for each position of a beam's target, the beam of
    the same sentence that wrote it; (B, K, any) with states of recurrent cells, (R, d), of which a buffer has one.
    """

    def __init__(
        self,
        past: Sequence[Carried],
        position: Tensor,
        first: Tensor | None = None,
        written_by: Tensor | None = None,
    ) -> None:
        self.past, self.present, self.written_by = past, list[Carried](), written_by
        self.position, self.first = position, first

    @cached_property
    def places(self) -> Tensor:
        """(M)"""
        return torch.arange(self.past[0][0].shape[2], dtype=self.position.dtype, device=self.position.device)

    @cached_property
    def before(self) -> Tensor:
        """True at places written by earlier steps: (1 or R, 1, M, 1)."""
        return (self.places < self.position[:, None])[:, None, :, None]

    @cached_property
    def mask(self) -> Tensor:
        """True at the places of each target, with this step's: (1 or R, 1, 1, M)."""
        mask = self.places <= self.position[:, None]
        if self.first is not None:
            mask = mask & (self.places >= self.first)
        return mask[:, None, None, :]

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

    def replace(self, layer: int, update: Callable[[Tensor], Tensor]) -> Tensor:
        """See `Cache.replace`."""
        (state,) = self.past[layer]
        if self.written_by is not None:
            batch, beams, _ = self.written_by.shape
            last = self.written_by.index_select(2, (self.position - 1).clamp(min=0))[:, :, 0]  # (B, K)
            sentences = torch.arange(batch, dtype=last.dtype, device=last.device)[:, None]
            state = state.index_select(0, (sentences * beams + last).flatten())
        state = update(state)
        self.present.append((state,))
        return state

    def of_beams(self, buffer: Tensor) -> Tensor:
        """(R, H, M, D) as written -> the same gathered for the rows that read it, by `written_by`."""
        if self.written_by is None:
            return buffer
        batch, beams, capacity = self.written_by.shape
        _, heads, _, size = buffer.shape
        rows = self.written_by.long()[:, :, None, :, None].expand(batch, beams, heads, capacity, size)
        return buffer.view(batch, beams, heads, capacity, size).gather(1, rows).view_as(buffer)


def first_past(config: ModelConfig, like: Tensor, rows: int, positions: int = 0) -> list[Carried]:
    """The `past` of a first step, on the device of `like` and of its type; zeros for some `positions`."""
    side = config.decoder
    if config.decoder_cell == "ssru":
        return [(like.new_zeros(rows, side.width),)] * side.layers
    empty = like.new_zeros(rows, side.heads, positions, side.head_dim)
    return [(empty, empty)] * side.layers


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
