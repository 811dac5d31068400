"""Tensors of a run's files: weights with Adam's moments, to resume from, and the means of several updates' weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..base.errors import ArtifactError
from ..model.checkpoint import load_tensors, load_weights, model_tensors, require_like
from ..model.network import Transformer

WEIGHTS = "model."
"""Weights are stored as `model.NAME`, what Adam keeps of them as `step.NAME`, `exp_avg.NAME` and `exp_avg_sq.NAME`,
their moving mean as `ema.NAME`."""


class MovingMean:
    """The mean of the weights of all updates so far, each weighted by `decay` to the power of its age in updates.

    So the first updates count no more than that: the random weights before them are not part of it.
    """

    def __init__(self, model: Transformer, decay: float) -> None:
        self._weights, self._decay = model_tensors(model), decay
        self.tensors = {name: torch.zeros_like(tensor) for name, tensor in self._weights.items()} if decay else {}

    def add(self, update: int) -> None:
        """Take in the weights after an update, which are counted from 1; nothing without a decay."""
        if self.tensors:
            share = (1 - self._decay) / (1 - self._decay**update)
            torch._foreach_lerp_([*self.tensors.values()], [*self._weights.values()], share)


def training_tensors(model: Transformer, optimizer: torch.optim.Adam, ema: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors that a resumed run needs."""
    tensors = {f"{WEIGHTS}{name}": tensor for name, tensor in model_tensors(model).items()}
    tensors |= {f"ema.{name}": tensor for name, tensor in ema.items()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter, slots in optimizer.state.items():
        for slot, value in slots.items():
            tensors[f"{slot}.{names[id(parameter)]}"] = value
    return tensors


def load_training(model: Transformer, optimizer: torch.optim.Adam, ema: Mapping[str, Tensor], state: Path) -> None:
    """Put a file's weights into a model, its moments into the optimizer, its mean into `ema`. Raises ArtifactError."""
    tensors = load_tensors(state)
    weights = {name.removeprefix(WEIGHTS): t for name, t in tensors.items() if name.startswith(WEIGHTS)}
    load_weights(model, weights, state)
    count = torch.zeros(())
    for name, parameter in model.named_parameters():
        slots = {"step": count, "exp_avg": parameter, "exp_avg_sq": parameter}
        for slot, like in slots.items():
            slots[slot] = _stored(tensors, f"{slot}.{name}", like, state).to(parameter.device)
        optimizer.state[parameter] = slots
    for name, mean in ema.items():
        mean.copy_(_stored(tensors, f"ema.{name}", mean, state))


def _stored(tensors: Mapping[str, Tensor], key: str, like: Tensor, state: Path) -> Tensor:
    """A tensor of a file, with its shape checked: Adam's fused kernel does not check it. Raises ArtifactError."""
    if key not in tensors:
        raise ArtifactError(f"{state} is incomplete: '{key}' is missing; start over with --force")
    require_like(tensors[key], like, key, state)
    return tensors[key]


def load_mean(model: Transformer, files: Sequence[Path]) -> None:
    """Give a model the mean of the weights in some files. Raises ArtifactError where one is not of this model."""
    mean: dict[str, Tensor] = {}
    for path in files:
        tensors = load_tensors(path)
        load_weights(model, tensors, path)
        for name, tensor in tensors.items():
            share = tensor / len(files)
            mean[name] = mean[name] + share if name in mean else share
    load_weights(model, mean, files[-1])
