"""The loss of a batch: cross-entropy with labels and with a teacher, R-Drop, and alignments of the attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..model.config import TrainConfig
from ..model.network import Transformer
from ..model.seq2seq import Layers
from ..translate.batches import Ids
from .bf16 import bf16_matmuls
from .data import TrainingBatch
from .losses import alignment_loss, summed_loss, tensors_of, twice
from .projected import projected_loss
from .teacher import Teacher


@dataclass(frozen=True)
class Weighing:
    """How a batch is weighed, beside the settings of the whole run."""

    label_smoothing: float = 0.0
    rdrop: float = 0.0
    teacher: Teacher | None = None
    links: Ids | None = None
    """Of the batch, for `alignment_loss`."""


def batch_loss(
    forward: nn.Module, model: Transformer, settings: TrainConfig, batch: TrainingBatch, how: Weighing
) -> Tensor:
    """The loss summed over the target tokens of a batch; see `summed_loss`, `Teacher.blend` and `alignment_loss`.

    `forward`: the model, or what runs it in several processes.
    """
    device, pad_id = model.output.weight.device, model.config.pad_id
    batch, passes = (twice(batch), 2) if how.rdrop else (batch, 1)
    inputs = tensors_of(batch, device)
    teacher = how.teacher if how.teacher and how.teacher.weight else None
    seen: Layers | None = None if how.links is None else {}
    in_one = not teacher and device.type == "cpu" and settings.quantize == "none"
    with bf16_matmuls(device, settings.precision == "bf16"):
        made = forward(*inputs[:3], project=not in_one, seen=seen)
        if in_one:
            loss = projected_loss(made, model.output, inputs[3], pad_id, how.label_smoothing, how.rdrop)
    if not in_one:
        loss = summed_loss(logits := made.float(), inputs[3], pad_id, how.label_smoothing, how.rdrop)
        loss = teacher.blend(loss, logits, inputs, passes) if teacher else loss
    if seen is None or how.links is None:
        return loss
    links = torch.from_numpy(how.links).to(device)
    aligned = [alignment_loss(each.float(), links) for each in seen["attention"].chunk(passes)]
    return loss + settings.alignment_weight * torch.stack(aligned).mean()
