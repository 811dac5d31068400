"""The files that a training run writes, and which of them its headers still name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.errors import ArtifactError
from ..base.headers import read_header
from ..model.checkpoint import HEADER, VERSION

STATE, STATE_VERSION, METRICS = "train/state.json", 1, "metrics.jsonl"
AVERAGE, EMA = "weights/average.safetensors", "weights/ema.safetensors"
NUMBER = "[0-9]" * 7
OWN_FILES = (
    *(AVERAGE, EMA, "weights/random.safetensors", "weights/imported.safetensors"),
    f"weights/step-{NUMBER}*.safetensors",
    *(f"weights/interrupted-{NUMBER}*.safetensors", f"train/state-{NUMBER}*.safetensors", "train/state.safetensors"),
)
"""Patterns of the weights and states that train, init and import write."""


@dataclass
class Progress:
    """Where a run stands; stored with the optimizer."""

    update: int = 0
    epoch: int = 0
    index: int = 0
    best_loss: float = float("inf")
    worse: int = 0
    """Validations since the best one."""


def read_state(folder: Path) -> dict[str, Any]:
    """The header of a saved training state. Raises ArtifactError."""
    if not (folder / STATE).exists():
        if (folder / "train/state.safetensors").exists():
            raise ArtifactError(f"{folder} was saved by an older tformer, without hashes: start over with --force")
        begun = any((folder / name).exists() for name in (HEADER, METRICS))
        how = "use --force in place of --resume" if begun else "leave out --resume"
        raise ArtifactError(f"{folder} has nothing saved to continue from: {how}")
    header = read_header(folder, STATE, "training", STATE_VERSION)
    if header["state"] not in header["files"]:
        raise ArtifactError(f"{folder / STATE} is damaged: no hash of {header['state']}; start over with --force")
    return header


def remove_superseded(folder: Path) -> None:
    """Remove weights and states that neither header of a run names."""
    kept = {*read_state(folder)["files"]} if (folder / STATE).exists() else set()
    kept.add(read_header(folder, HEADER, "checkpoint", VERSION)["weights"])
    for path in [path for pattern in OWN_FILES for path in folder.glob(pattern)]:
        if path.relative_to(folder).as_posix() not in kept:
            path.unlink()
