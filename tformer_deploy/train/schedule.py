"""What changes from update to update: the learning rate, label smoothing and dropout."""

from __future__ import annotations

import math

from ..model.config import TrainConfig


def learning_rate(update: int, settings: TrainConfig) -> float:
    """Linear warm-up, then the inverse square root of the update (Vaswani et al. 2017, 5.3); a cooldown at the end."""
    rate = settings.lr * min(update / settings.warmup, math.sqrt(settings.warmup / update))
    left = settings.updates - update + 1
    return rate * left / settings.cooldown if 0 <= left < settings.cooldown else rate


def label_smoothing(update: int, settings: TrainConfig) -> float:
    """Linear from `label_smoothing` to `label_smoothing_end`, if that is set."""
    end = settings.label_smoothing if settings.label_smoothing_end == -1 else settings.label_smoothing_end
    return _linear(settings.label_smoothing, end, update, settings)


def dropout_factor(update: int, settings: TrainConfig) -> float:
    """Factor of the model's dropout probabilities: linear from `dropout_start` to `dropout_end`."""
    return _linear(settings.dropout_start, settings.dropout_end, update, settings)


def _linear(start: float, end: float, update: int, settings: TrainConfig) -> float:
    """`start` in the first update, `end` in the last."""
    return start + (end - start) * (update - 1) / max(1, settings.updates - 1)


def never_at_full_rate(settings: TrainConfig) -> str:
    """A warning if the learning rate does not reach `lr` before the end; else empty."""
    updates, warmup, cooldown = settings.updates, settings.warmup, settings.cooldown
    if warmup > 1 and warmup >= updates:
        what, mend = f"train.warmup={warmup} of {updates} updates", f"train.warmup={max(1, updates // 4)}"
    elif warmup + cooldown > updates + 1:
        what = f"train.cooldown={cooldown} of {updates} updates begins before train.warmup={warmup} ends"
        mend = f"train.cooldown={updates - warmup}"
    else:
        return ""
    return f"{what}: the learning rate does not reach train.lr={settings.lr:g} before the end: start with --set {mend}"
