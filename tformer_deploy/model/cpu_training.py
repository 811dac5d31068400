"""What training on a CPU does faster than PyTorch's own operators. Evaluation, GPUs and autocast never come here.

Chosen by measurement, see benchmarks/README.md, "Training".
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

SHORTEST = 16
"""Keys that a softmax should have at least: shorter rows than a vector register are ten times as slow."""


def usable(x: Tensor) -> bool:
    """Whether this tensor of a training step is for the functions below."""
    return x.device.type == "cpu" and not torch.is_autocast_enabled("cpu")


def kept(like: Tensor, dropout: float) -> Tensor:
    """Dropout's factors: 0 or 1 / (1 - p), shaped like a tensor.

    16 random bits of torch's generator for each. `bernoulli_` draws 64, and takes ten times as long.
    """
    threshold = round(dropout * 2**16)
    bits = torch.empty(-(-like.numel() // 4), dtype=torch.int64).random_(-(2**63), None)  # type: ignore[arg-type]
    factors = torch.empty(like.shape, dtype=like.dtype)
    drawn = bits.numpy().view(np.uint16)[: like.numel()]
    np.greater_equal(drawn, threshold, out=factors.view(-1).numpy(), casting="unsafe")
    return factors.mul_(2**16 / (2**16 - threshold)) if threshold < 2**16 else factors


def drop(x: Tensor, dropout: float, training: bool) -> Tensor:
    """`F.dropout`."""
    return x * kept(x, dropout) if training and dropout and usable(x) else F.dropout(x, dropout, training)


def add_dropped(x: Tensor, y: Tensor, dropout: float, training: bool) -> Tensor:
    """x + `F.dropout` of y."""
    if training and dropout and usable(x):
        return torch.addcmul(x, y, kept(y, dropout))
    return x + F.dropout(y, dropout, training)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """Attention of queries (B, H, T, D) to keys and values (B, H, S, D); a mask (B, 1, T, S), or None: causal.

    Three batched matmuls and a softmax: for sentences of 10 to 30 tokens, faster than the kernel made for long ones.
    """
    return _Attention.apply(q, k, v, mask, dropout)  # type: ignore[no-any-return,no-untyped-call]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
        batch, heads, queries, size = q.shape
        keys, more = k.shape[2], max(0, SHORTEST - k.shape[2])
        ctx.keys, ctx.scale = keys, 1 / math.sqrt(size)
        rows = torch.mul(q, ctx.scale, out=q.new_empty(q.shape)).flatten(0, 1)
        k, v = (F.pad(each, (0, 0, 0, more)).flatten(0, 1) if more else each.flatten(0, 1) for each in (k, v))
        scores = torch.bmm(rows, k.transpose(1, 2)).view(batch, heads, queries, keys + more)
        scores += _additive(mask, queries, more, q.dtype)
        weights = scores.softmax(-1).flatten(0, 1)
        factors = kept(weights, dropout) if dropout else None
        ctx.save_for_backward(rows, k, v, weights, factors)
        return torch.bmm(weights if factors is None else weights * factors, v).view(batch, heads, queries, size)

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, k, v, weights, factors = ctx.saved_tensors
        batch, heads = grad.shape[:2]
        grad = grad.flatten(0, 1)
        of_v = torch.bmm((weights if factors is None else weights * factors).transpose(1, 2), grad)
        of_weights = torch.bmm(grad, v.transpose(1, 2))
        if factors is not None:
            of_weights *= factors
        of_scores = torch._softmax_backward_data(of_weights, weights, -1, weights.dtype)
        of_q = torch.bmm(of_scores, k).mul_(ctx.scale)
        of_k = torch.bmm(of_scores.transpose(1, 2), rows)
        found = (of_q, of_k[:, : ctx.keys], of_v[:, : ctx.keys])
        return (*(each.view(batch, heads, *each.shape[1:]) for each in found), None, None)


def _additive(mask: Tensor | None, queries: int, more: int, dtype: torch.dtype) -> Tensor:
    """-inf where a query must not look, with so many more keys than there are."""
    if mask is None:
        return torch.full((queries, queries + more), -math.inf, dtype=dtype).triu_(1)
    mask = mask[:, :, :1] if mask.stride(2) == 0 else mask  # the same for all queries: see `length_mask`
    return F.pad(torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -math.inf), (0, more), value=-math.inf)
