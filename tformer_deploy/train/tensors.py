"""Tensors of a run's files: weights with Adam's moments, to resume from, and the mean of several steps' weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..base.errors import ArtifactError
from ..model.checkpoint import load_tensors, load_weights, model_tensors, require_like
from ..model.network import Transformer

WEIGHTS = "model."
"""Weights are stored as `model.NAME`, what Adam keeps of them as `step.NAME`, `exp_avg.NAME` and `exp_avg_sq.NAME`."""


def training_tensors(model: Transformer, optimizer: torch.optim.Adam) -> dict[str, Tensor]:
    """All tensors that a resumed run needs."""
    tensors = {f"{WEIGHTS}{name}": tensor for name, tensor in model_tensors(model).items()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter, slots in optimizer.state.items():
        for slot, value in slots.items():
            tensors[f"{slot}.{names[id(parameter)]}"] = value
    return tensors


def load_training(model: Transformer, optimizer: torch.optim.Adam, state: Path) -> None:
    """Put a file's weights into a model, and its moments into the optimizer. Raises ArtifactError."""
    tensors = load_tensors(state)
    weights = {name.removeprefix(WEIGHTS): t for name, t in tensors.items() if name.startswith(WEIGHTS)}
    load_weights(model, weights, state)
    count = torch.zeros(())
    for name, parameter in model.named_parameters():
        slots = {"step": count, "exp_avg": parameter, "exp_avg_sq": parameter}
        for slot, like in slots.items():
            key = f"{slot}.{name}"
            if key not in tensors:
                raise ArtifactError(f"{state} is incomplete: '{key}' is missing; start over with --force")
            require_like(tensors[key], like, key, state)  # Adam's fused kernel does not check shapes
            slots[slot] = tensors[key].to(parameter.device)
        optimizer.state[parameter] = slots


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
