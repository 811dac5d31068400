"""What training makes small: cross-entropy with label smoothing or a teacher, R-Drop's disagreement; dropout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..base.errors import TrainingError
from .data import TrainingBatch

LEAST = 1e-9
"""Attention of which the logarithm is taken: smaller is as good as none."""


def twice(batch: TrainingBatch) -> TrainingBatch:
    """Every row a second time, after all rows: dropout differs between the two."""
    sides = (batch.src_ids, batch.src_lengths, batch.tgt_in, batch.tgt_out)
    return TrainingBatch(*(np.concatenate((side, side)) for side in sides))


def tensors_of(batch: TrainingBatch, device: torch.device) -> tuple[Tensor, ...]:
    """Source ids, lengths, target inputs and outputs."""
    return tuple(torch.from_numpy(array).to(device) for array in vars(batch).values())


def summed_loss(logits: Tensor, targets: Tensor, pad_id: int, label_smoothing: float, rdrop: float) -> Tensor:
    """logits (B, T, V), targets (B, T) -> the cross-entropy, summed over all targets but padding.

    With `rdrop` of a batch twice: the mean of both passes, and `rdrop` / 2 of the mean of the two divergences between
    them. This is half the loss of Liang et al. 2021: the loss of one pass where both agree.
    """
    both = F.cross_entropy(
        logits.flatten(0, 1),
        targets.flatten().long(),
        ignore_index=pad_id,
        label_smoothing=label_smoothing,
        reduction="sum",
    )
    if not rdrop:
        return both
    one, other = logits.log_softmax(-1).chunk(2)
    divergences = ((one.exp() - other.exp()) * (one - other)).sum(-1)  # KL(one, other) + KL(other, one)
    kept = divergences.masked_fill(targets.chunk(2)[0] == pad_id, 0.0).sum()
    return both / 2 + rdrop / 4 * kept


def taught_loss(logits: Tensor, teacher: Tensor, targets: Tensor, pad_id: int, temperature: float) -> Tensor:
    """Both logits (B, T, V), targets (B, T) -> cross-entropy with the teacher's probabilities, summed as above.

    The temperature divides both logits; its square keeps the size of the gradients (Hinton et al. 2015, 2.1).
    """
    expected = (teacher / temperature).softmax(-1)
    each = -(expected * (logits / temperature).log_softmax(-1)).sum(-1)
    return temperature**2 * each.masked_fill(targets == pad_id, 0.0).sum()


def alignment_loss(attention: Tensor, links: Tensor) -> Tensor:
    """attention (B, T, S), links (N, 3) -> its cross-entropy, summed over the target positions that have links.

    `links`: row, target and source position; those of a target position have equal shares. Source: Chen et al. 2016.
    """
    rows, targets, sources = links.long().unbind(1)
    counts = attention.new_zeros(attention.shape[:2]).index_put_((rows, targets), attention.new_ones(()), True)
    logs = attention[rows, targets, sources].clamp_min(LEAST).log()
    return -(logs / counts[rows, targets]).sum()


def require_finite(what: str, value: float, update: int) -> None:
    """Raise TrainingError for a figure of an update that is infinite or NaN."""
    if not math.isfinite(value):
        raise TrainingError(f"the {what} is {value} at update {update}: lower train.lr, then start again")


def dropouts(model: nn.Module) -> dict[Any, float]:
    """Modules with a probability of dropout, by which they drop elements in training."""
    found = {module: getattr(module, "dropout", None) for module in model.modules()}
    return {module: value for module, value in found.items() if isinstance(value, float)}


def set_dropout(modules: Mapping[Any, float], factor: float) -> None:
    """Multiply each module's own probability by a factor."""
    for module, probability in modules.items():
        module.dropout = probability * factor
