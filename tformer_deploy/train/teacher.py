"""Word-level distillation: a student learns a trained model's probabilities of each token (Kim and Rush 2016)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..base.errors import ArtifactError, ConfigError
from ..bundle.text import SentencePiece, Tokenizers
from ..model.checkpoint import HEADER, Checkpoint, open_checkpoint
from ..model.config import ModelConfig, TrainConfig
from .bf16 import bf16_matmuls
from .losses import taught_loss

TAKEN_OVER = ("src_vocab", "tgt_vocab", "pad_id", "bos_id", "eos_id", "start_id")
"""Fields of a model that a student has from its teacher: both read and produce the same ids."""
OF_TEACHERS = ("teacher_weight", "teacher_temperature")
"""Settings of training that need a teacher."""


class Teacher:
    """A trained model that does not change, and its share of a student's loss."""

    def __init__(self, checkpoint: Checkpoint, settings: TrainConfig, device: torch.device) -> None:
        self.model = checkpoint.load_model().requires_grad_(False).to(device)
        self._pad_id, self._device = checkpoint.config.pad_id, device
        self.weight, self._temperature = settings.teacher_weight, settings.teacher_temperature
        self._bf16 = settings.precision == "bf16"

    def blend(self, own: Tensor, logits: Tensor, batch: tuple[Tensor, ...], passes: int) -> Tensor:
        """The student's own loss and the cross-entropy with this model's probabilities, by `teacher_weight`.

        `batch`: source ids, lengths, target inputs and outputs. With two passes the second half of its rows repeats
        the first; this model, which has no dropout, reads one half.
        """
        src_ids, lengths, tgt_in, tgt_out = (each.chunk(passes)[0] for each in batch)
        with torch.no_grad(), bf16_matmuls(self._device, self._bf16):
            expected = self.model(src_ids, lengths, tgt_in).float()
        taught = [
            taught_loss(each, expected, tgt_out, self._pad_id, self._temperature) for each in logits.chunk(passes)
        ]
        return (1 - self.weight) * own + self.weight / passes * torch.stack(taught).sum()


def record_of(checkpoint: Checkpoint) -> dict[str, str]:
    """Where a checkpoint is and which weights it has, as stored in headers."""
    return {"run": str(checkpoint.directory.resolve()), "weights_sha256": checkpoint.weights_sha256}


def open_other(option: str, run: Path, folder: Path) -> Checkpoint:
    """The run that an option of a new run in `folder` names. Raises TformerError."""
    if run.resolve() == folder.resolve():
        raise ConfigError(f"--{option} {run} is the folder that the run writes: name another with --out")
    return open_checkpoint(run)


def find_teacher(record: Mapping[str, str], folder: Path, moved: Path | None = None) -> Checkpoint:
    """The teacher of a run that goes on: at its recorded path or at `moved`, with the same weights.

    Raises ArtifactError.
    """
    where = moved or Path(record["run"])
    if not (where / HEADER).is_file():
        raise ArtifactError(
            f"the teacher of {folder} is not at {where}: bring it back, or say where it is by --teacher"
        )
    checkpoint = open_checkpoint(where)
    if checkpoint.weights_sha256 != record["weights_sha256"]:
        raise ArtifactError(
            f"{where} has other weights than the teacher of {folder} had: bring them back, or start over with --force"
        )
    return checkpoint


def require_taught(longest: int, teacher: ModelConfig) -> None:
    """Raise ConfigError where a teacher cannot read what a student learns from."""
    if longest > teacher.max_positions:
        raise ConfigError(
            f"the teacher reads {teacher.max_positions} tokens, and lines of {longest} are learned from: "
            f"add --set train.max_tokens={teacher.max_positions}"
        )


def require_pieces(settings: TrainConfig, tokenizers: Tokenizers) -> None:
    """Raise ConfigError for settings that the vocabulary of another run does not support."""
    for name, tokenizer in (("src_sampling", tokenizers.source), ("tgt_sampling", tokenizers.target)):
        if getattr(settings, name) and not isinstance(tokenizer, SentencePiece):
            raise ConfigError(f"train.{name} needs pieces of sentencepiece, which the given run has not: leave it out")
