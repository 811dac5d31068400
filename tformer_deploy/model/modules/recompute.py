"""Decoding steps for modules without one: decode the whole prefix again, or the last token over cached inputs.

Both follow `seq2seq.Seq2Seq`, but their caches have one head and hold no keys and values. Cache 0 holds the tokens so
far as floats, which are exact below 2^24. `cross_k_0` and `cross_v_0` are the halves of the encoder's memory, or of the
source's ids if the module has no encoder of its own. `Hooked` has one more cache per layer, whose k and v are the
halves of the inputs of its self-attention.

Sizes: B batch, S source length, K beams, R = B*K rows, T target length so far, d width, D half of it, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...base.errors import ConfigError
from ..config import ModelConfig
from ..seq2seq import Cache, KeysValues, Layers
from .user_model import UserModel

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Recomputed(nn.Module):
    """Every step decodes the whole prefix."""

    notes_attention = False
    """Whether `step` notes attention in `layers`."""

    def __init__(self, user: UserModel, memory_width: int) -> None:
        """memory_width: numbers per token that `encode` returns; 1 without it."""
        super().__init__()
        self.module = user.module
        self.user, self.memory_width, self.output = user, memory_width, nn.Identity()
        self.config: ModelConfig = user.config(1, half(memory_width), memory_width)
        self.unread: frozenset[str] = frozenset()
        """Names of tensors that outputs do not depend on."""
        self.encodes = user.encode is not None
        """Whether memory is an encoder's output, not the source's ids."""

    def encode(self, src_ids: Tensor, src_lengths: Tensor, layers: Layers | None = None) -> Tensor:
        """src_ids (B, S), src_lengths (B) -> memory (B, S, d)."""
        if self.user.encode is None:
            return src_ids[..., None].float()
        with plain_attention():
            return self.user.encode(self.module, src_ids.long(), real(src_lengths, src_ids.shape[1]))

    def cross_keys_values(self, memory: Tensor) -> list[KeysValues]:
        """The halves of memory, and nothing for the other caches: two of (B, 1, S, D) each."""
        first = halves(memory, self.config.head_dim)
        nothing = torch.zeros_like(first[0])
        return [first, *[(nothing, nothing)] * (self.config.decoder_layers - 1)]

    def step(
        self,
        tokens: Tensor,
        position: Tensor,
        src_lengths: Tensor,
        cross: list[KeysValues],
        cache: Cache,
        layers: Layers | None = None,
    ) -> Tensor:
        """Logits of one step, (B, K, V). See `Seq2Seq.step`."""
        batch, beams = tokens.shape
        memory = whole(*cross[0], self.memory_width)  # (B, S, d)
        mask = real(src_lengths, memory.shape[1])
        fresh = halves(tokens.reshape(-1, 1, 1).float(), self.config.head_dim)
        (so_far, _), _ = cache.extend(0, *fresh)
        prefix = so_far[:, 0, :, 0].long()  # (R, T)
        with plain_attention():
            logits = self.decode(rows_of(memory, beams), rows_of(mask, beams), prefix, cache)
        return logits[:, -1].view(batch, beams, self.config.tgt_vocab)

    def decode(self, memory: Tensor, mask: Tensor, prefix: Tensor, cache: Cache) -> Tensor:
        """memory (R, S, d), mask (R, S), prefix (R, T) -> logits (R, T, V), or of the last position (R, 1, V)."""
        if self.user.decode is not None:
            return self.user.decode(self.module, memory, mask, prefix)
        assert self.user.forward is not None
        return self.user.forward(self.module, memory[..., 0].long(), mask, prefix)


class EncoderAlone(Recomputed):
    """An encoder without a decoder: no caches, no steps."""

    def __init__(self, user: UserModel, memory_width: int) -> None:
        super().__init__(user, memory_width)
        self.config = user.config(0, half(memory_width), memory_width)


class Hooked(Recomputed):
    """Embeds the whole prefix, runs the layers on its last position, and self-attention over its cached inputs."""

    def __init__(self, user: UserModel, memory_width: int, layers: Hooks) -> None:
        super().__init__(user, memory_width)
        self.hooks = layers
        self.config = user.config(1 + layers.count, half(max(memory_width, layers.width)), memory_width)

    def decode(self, memory: Tensor, mask: Tensor, prefix: Tensor, cache: Cache) -> Tensor:
        """See `Recomputed.decode`."""
        done = 0

        def extend(x: Tensor) -> Tensor:
            nonlocal done
            done += 1
            (k, v), _ = cache.extend(done, *halves(x, self.config.head_dim))
            return whole(k, v, self.hooks.width)

        with self.hooks.around(self.module, extend):
            return super().decode(memory, mask, prefix, cache)


class Hooks:
    """Where a decoder is taken apart: what enters its first layer, and its self-attentions."""

    def __init__(self, layers: str, self_attention: str, axis: int = 1, width: int = 0, count: int = 0) -> None:
        """axis: of the positions in (B, T, d) or (T, B, d); count: self-attentions that a step calls."""
        self.layers, self.self_attention = layers, self_attention
        self.axis, self.width, self.count = axis, width, count

    def first_layer(self, module: nn.Module) -> nn.Module:
        """The first decoder layer, which the embeddings enter."""
        return next(module.get_submodule(self.layers).children())

    def attentions(self, module: nn.Module) -> list[nn.Module]:
        """The self-attention of every layer; layers that share one have it once."""
        found = [layer.get_submodule(self.self_attention) for layer in module.get_submodule(self.layers).children()]
        return list(dict.fromkeys(found))

    def others(self, module: nn.Module) -> list[nn.Module]:
        """All modules of the layers but the self-attentions."""
        found: dict[nn.Module, None] = {}
        for layer in module.get_submodule(self.layers).children():
            for part in self.self_attention.split("."):
                found |= dict.fromkeys(each for name, each in layer.named_children() if name != part)
                layer = layer.get_submodule(part)
        return list(found)

    @contextmanager
    def around(self, module: nn.Module, extend: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Run the decoder for the last position; `extend` caches an input (R, 1, d), and returns all (R, T, d)."""

        size: Any = 0

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
            nonlocal size
            x = entering(args, kwargs)
            size = x.shape[self.axis]
            return replaced(args, kwargs, x, self.last(x))

        def mask(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
            for each in (*args, *kwargs.values()):  # (B, H or 1, T, S), made for the whole prefix
                if isinstance(each, Tensor) and each.dim() == 4 and each.shape[2] == size:
                    args, kwargs = replaced(args, kwargs, each, each[:, :, -1:])
            return args, kwargs

        def attend(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
            x = entering(args, kwargs)
            so_far = extend(x if self.axis == 1 else x.transpose(0, 1))
            return replaced(args, kwargs, x, so_far if self.axis == 1 else so_far.transpose(0, 1))

        def leave(_: nn.Module, args: tuple[Any, ...], found: Any) -> Any:
            return (self.last(found[0]), *found[1:]) if isinstance(found, tuple) else self.last(found)

        handles = [self.first_layer(module).register_forward_pre_hook(enter, with_kwargs=True)]
        for attention in self.attentions(module):
            handles.append(attention.register_forward_pre_hook(attend, with_kwargs=True))
            handles.append(attention.register_forward_hook(leave))
        for other in self.others(module):
            handles.append(other.register_forward_pre_hook(mask, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def last(self, x: Tensor) -> Tensor:
        """The last position of (B, T, d), or of (T, B, d)."""
        return x[:, -1:] if self.axis == 1 else x[-1:]


def entering(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states that a module is called with: the first tensor of three axes."""
    for each in (*args, *kwargs.values()):
        if isinstance(each, Tensor) and each.dim() == 3:
            return each
    raise ConfigError("a layer or self-attention is called without hidden states (B, T, d): leave out layers")


def replaced(args: tuple[Any, ...], kwargs: dict[str, Any], old: Tensor, new: Tensor) -> Arguments:
    """Arguments with `old` replaced by `new` everywhere, as query, key and value."""
    return (
        tuple(new if each is old else each for each in args),
        {name: new if each is old else each for name, each in kwargs.items()},
    )


_ONE_AT_A_TIME = RLock()
"""The fast path is a setting of the process, and hooks are on a module that several threads may call."""


@contextmanager
def plain_attention() -> Iterator[None]:
    """Keep PyTorch's own encoder layers from their fast path, which no graph has and which cuts padding off.

    One thread at a time.
    """
    with _ONE_AT_A_TIME:
        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(before)


def half(width: int) -> int:
    """Half a width, rounded up."""
    return (width + 1) // 2


def halves(x: Tensor, size: int) -> KeysValues:
    """(B, T, d) -> two of (B, 1, T, size), padded with zeros."""
    missing = 2 * size - x.shape[2]
    filled = F.pad(x, (0, missing)) if missing else x
    return filled[:, None, :, :size], filled[:, None, :, size:]


def whole(first: Tensor, second: Tensor, width: int) -> Tensor:
    """The reverse of `halves`."""
    return torch.cat((first[:, 0], second[:, 0]), 2)[..., :width]


def real(lengths: Tensor, size: int) -> Tensor:
    """(B) -> (B, size), true at tokens."""
    return torch.arange(size, device=lengths.device) < lengths[:, None]


def rows_of(x: Tensor, beams: int) -> Tensor:
    """(B, ...) -> (B*K, ...), each repeated for its beams. `repeat_interleave` is exported wrongly."""
    return x[:, None].expand(-1, beams, *[-1] * (x.dim() - 1)).flatten(0, 1)
