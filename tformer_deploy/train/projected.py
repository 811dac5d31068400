"""Output projection and loss in one, for training on a CPU.

The logits of some positions at a time, which stay in the cache. Their gradient is made at once, in their place. All
logits of a batch would be the largest tensors by far: of 4,096 positions and 10,000 tokens, 164 MB each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

ROWS = 512
"""Positions at a time, of all passes together: of 5,000 logits each, 10 MB."""


def projected_loss(
    hidden: Tensor, output: nn.Linear, targets: Tensor, pad_id: int, label_smoothing: float, rdrop: float
) -> Tensor:
    """Hidden states (B, T, d), targets (B, T) -> what `summed_loss` makes of their logits."""
    passes = 2 if rdrop else 1
    targets = targets.reshape(passes, -1).long()
    share = (targets != pad_id).to(hidden.dtype) / passes
    return _ProjectedLoss.apply(hidden, output.weight, output.bias, targets, share, (label_smoothing, rdrop))  # type: ignore[no-any-return,no-untyped-call]


class _ProjectedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        kept: Tensor,
        weights: tuple[float, float],
    ) -> Tensor:
        own, even, half = 1 - weights[0], weights[0] / len(weight), weights[1] / 2
        passes = len(targets)
        states = hidden.reshape(passes, -1, hidden.shape[-1])
        of_states, of_weight = torch.empty_like(states), torch.zeros_like(weight)
        of_bias = None if bias is None else torch.zeros_like(bias)
        total = hidden.new_zeros(())
        for start in range(0, states.shape[1], ROWS // passes):
            part = slice(start, start + ROWS // passes)
            rows, chosen, share = (each[:, part].flatten(0, 1) for each in (states, targets, kept))
            x = F.linear(rows, weight, bias)  # by F.linear, here and below, because `bf16_matmuls` looks for it
            p, picked = x.softmax(1), chosen[:, None]
            # The highest probability is 1 / sum(exp(x - max)), however small the target's is.
            losses = x.amax(1) - p.amax(1).log() - own * x.gather(1, picked)[:, 0] - even * x.sum(1)
            total += losses @ share
            if half:
                total += half * (_disagreement(x, p, half) @ share[: len(share) // 2])
            if not any(ctx.needs_input_grad):
                continue
            gradient = x if half else p
            gradient.scatter_add_(1, picked, x.new_full(picked.shape, -own)).sub_(even).mul_(share[:, None])
            of_states[:, part] = F.linear(gradient, weight.t()).view(passes, -1, weight.shape[1])
            of_weight += F.linear(gradient.t(), rows.t())
            if of_bias is not None:
                of_bias += gradient.sum(0)
        ctx.save_for_backward(of_states.view(hidden.shape), of_weight, of_bias)
        return total

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (*(None if each is None else each * grad for each in ctx.saved_tensors), None, None, None)


def _disagreement(x: Tensor, p: Tensor, weight: float) -> Tensor:
    """KL(one, other) + KL(other, one) of two passes, whose logits x and probabilities p follow one another in rows.

    x becomes the gradient of both passes' log sums of exponentials and of `weight` times the result.
    """
    (one, other), (p_one, p_other) = x.chunk(2), p.chunk(2)
    gap = torch.sub(one, other, out=other)
    means = [torch.mul(each, gap, out=one).sum(1, keepdim=True) for each in (p_one, p_other)]
    torch.sub(gap, means[0] - 1, out=one).mul_(p_one).sub_(p_other).mul_(weight).add_(p_one)
    gap.sub_(means[1] + 1).mul_(p_other).add_(p_one).mul_(-weight).add_(p_other)
    return (means[0] - means[1])[:, 0]
