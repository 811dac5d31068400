"""The learning rate of every update."""

from __future__ import annotations

import math

from ..model.config import TrainConfig


def learning_rate(update: int, settings: TrainConfig) -> float:
    """Linear warm-up, then the inverse square root of the update (Vaswani et al. 2017, 5.3); a cooldown at the end."""
    rate = settings.lr * min(update / settings.warmup, math.sqrt(settings.warmup / update))
    left = settings.updates - update + 1
    return rate * left / settings.cooldown if 0 <= left < settings.cooldown else rate


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
