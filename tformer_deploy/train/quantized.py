"""Quantization-aware training: layers round to 8 bits as recipe `native-int8-trained` does, gradients pass straight.

Weights have a scale per output, which export makes of them again. Inputs have a learned step, whose logarithm is a
parameter: Adam then changes a small and a large one by the same share.
Source: Esser et al. 2020, "Learned Step Size Quantization"; the logarithm: Jain et al. 2020, "Trained Quantization
Thresholds".
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..export.quantizing import LEAST, LEAST_SPAN
from ..model.checkpoint import LEARNED, Steps, load_tensors
from ..model.network import Transformer

MOST = 127
"""The largest integer; the least is its negative."""
FASTER = 10.0
"""Factor of the learning rate for the logarithms of steps, which at that of a fine-tuning would hardly move."""


class RoundedLinear(nn.Linear):
    """A linear layer of 8 bits."""

    log_step: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return F.linear(round_input(x, self.log_step.exp()), round_rows(self.weight), self.bias)


class RoundedEmbedding(nn.Embedding):
    """A table of 8 bits."""

    def forward(self, ids: Tensor) -> Tensor:
        """Only the rows that are read are rounded, each by itself."""
        return round_rows(super().forward(ids))


def round_input(x: Tensor, step: Tensor) -> Tensor:
    """x (..., in) as multiples of a step (), up to `MOST` of them."""
    return _RoundedInput.apply(x, step)  # type: ignore[no-any-return,no-untyped-call]


def round_rows(weight: Tensor) -> Tensor:
    """Each row of a weight (..., in) in 8 bits: the integers and scales of `quantizing.channels`."""
    return _RoundedRows.apply(weight)  # type: ignore[no-any-return,no-untyped-call]


class _RoundedInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor) -> Tensor:
        ctx.save_for_backward(x, step)
        return torch.div(x, step).round_().clamp_(-MOST, MOST).mul_(step)

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, step = ctx.saved_tensors
        shares = x / step
        outside = shares.abs() >= MOST
        of_step = shares.round().clamp_(-MOST, MOST).sub_(shares.masked_fill_(outside, 0)).mul_(grad).sum()
        # The loss is a mean over tokens, so that the paper's number of features is that of one token.
        return grad.masked_fill(outside, 0), of_step / math.sqrt(x.shape[-1] * MOST)


class _RoundedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        scales = weight.abs().amax(-1, keepdim=True).clamp_(min=LEAST).div_(MOST)
        return torch.div(weight, scales).round_().mul_(scales)

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@torch.no_grad()
def quantize(model: Transformer, batch: tuple[Tensor, ...]) -> None:
    """Make a model compute in 8 bits from here on, with steps that span the inputs of its layers in a batch.

    batch: source ids (B, S), lengths (B), target inputs (B, T). Layers that read one tensor share its step, as export
    makes one product of them.
    """
    readers: dict[int, tuple[Tensor, list[nn.Linear]]] = {}

    def note(layer: nn.Module, inputs: tuple[Tensor]) -> None:
        readers.setdefault(id(inputs[0]), (inputs[0], []))[1].append(layer)  # type: ignore[arg-type]

    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    model.eval()(*batch)
    for hook in hooks:
        hook.remove()
    for x, group in readers.values():
        step = (x.abs().max() / MOST).clamp(min=LEAST_SPAN)
        shared = nn.Parameter(step.log())
        for layer in group:
            layer.__class__, layer.log_step = RoundedLinear, shared
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.__class__ = RoundedEmbedding


def learned_steps(model: Transformer, weights: Path) -> Steps | None:
    """The steps in a file of weights of a quantized model, else None. Export finds those of weights itself."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, RoundedLinear)}
    if not layers:
        return None
    tensors, names = load_tensors(weights), {id(parameter): name for name, parameter in model.named_parameters()}
    return Steps({name: float(tensors[names[id(layer.log_step)]].exp()) for name, layer in layers.items()}, {})


def parameter_groups(model: Transformer) -> list[dict[str, Any]]:
    """Parameters for the optimizer, with a factor of their learning rate."""
    steps = [parameter for name, parameter in model.named_parameters() if name.endswith(LEARNED)]
    others = [parameter for name, parameter in model.named_parameters() if not name.endswith(LEARNED)]
    return [{"params": others, "factor": 1.0}, *([{"params": steps, "factor": FASTER}] if steps else [])]
