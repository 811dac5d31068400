"""Measure the training step: what batches, optimizer, bfloat16, torch.compile and our own operators change, in turns.

Trains the model of benchmarks/README.md's command on Multi30K. A slice of each variant after the other, over and over,
so that other work on the machine meets all of them. Prints JSON: target tokens per second of wall-clock and of
processor time, lowest, median and highest of the slices; the first slice, with its compilation, is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from tformer_deploy.base.machine import keep_freed_memory
from tformer_deploy.bundle.text import train_tokenizers
from tformer_deploy.model import cpu_training
from tformer_deploy.model.config import TrainConfig, preset
from tformer_deploy.model.network import Transformer
from tformer_deploy.train import objective
from tformer_deploy.train.data import BatchStream, DataConfig, load_data
from tformer_deploy.train.loop import Trainer
from tformer_deploy.train.losses import summed_loss

MODEL = {"dropout": 0.25, "attention_dropout": 0.0, "activation_dropout": 0.0}
TRAIN = {"batch_tokens": 2560, "updates": 6600, "lr": 0.003, "warmup": 1200, "cooldown": 1000}


def usual(trainer: Trainer) -> None:
    """As `tformer train` does it."""


def unsorted(trainer: Trainer) -> None:
    """Batches of as many padded tokens whose lines are of any length."""
    corpus = trainer.train_set

    def plan(batch_tokens: int, seed: int, epoch: int) -> list[Any]:
        order = np.random.default_rng([seed, epoch]).permutation(len(corpus.src))
        longest = np.maximum([len(ids) for ids in corpus.src], [len(ids) for ids in corpus.tgt])[order]
        batches, start = [], 0
        for end in range(1, len(order) + 1):
            if end == len(order) or longest[start : end + 1].max() * (end + 1 - start) > batch_tokens:
                batches.append(order[start:end])
                start = end
        return batches

    corpus.plan = plan  # type: ignore[method-assign]


def optimizer(kind: type[torch.optim.Optimizer], **options: bool) -> Callable[[Trainer], None]:
    """Another optimizer, or another implementation of it."""

    def change(trainer: Trainer) -> None:
        trainer.optimizer = kind(trainer.model.parameters(), betas=(0.9, 0.98), eps=1e-9, **options)  # type: ignore

    return change


def compiled(trainer: Trainer) -> None:
    """The network by torch.compile, for any shape."""
    trainer.parallel = torch.compile(trainer.model, dynamic=True)  # type: ignore[assignment]


def by_pytorch(trainer: Trainer) -> None:
    """Attention, dropout, bf16 and loss by PyTorch's own operators."""
    train_update = trainer.train_update

    def update(batches: Iterator[Any]) -> dict[str, float]:
        with (
            patch.object(cpu_training, "usable", lambda x: False),
            patch.object(objective, "bf16_matmuls", autocast),
            patch.object(objective, "projected_loss", loss_of_logits),
        ):
            return train_update(batches)

    trainer.train_update = update  # type: ignore[method-assign]


def autocast(device: torch.device, enabled: bool) -> torch.autocast:
    """PyTorch's own bf16."""
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled)


def loss_of_logits(hidden: Tensor, output: torch.nn.Linear, targets: Tensor, *objective: Any) -> Tensor:
    """All logits at once, then the loss."""
    return summed_loss(output(hidden).float(), targets, *objective)


VARIANTS: dict[str, tuple[Callable[[Trainer], None], dict[str, Any]]] = {
    "usual (by length, Adam fused, fp32)": (usual, {}),
    "batches not by length": (unsorted, {}),
    "Adam, not fused": (optimizer(torch.optim.Adam, foreach=True), {}),
    "AdamW fused": (optimizer(torch.optim.AdamW, fused=True), {}),
    "bf16 in linear layers": (usual, {"precision": "bf16"}),
    "as PyTorch does it": (by_pytorch, {}),
    "as PyTorch does it, bf16 autocast": (by_pytorch, {"precision": "bf16"}),
    "as PyTorch does it, R-Drop": (by_pytorch, {"rdrop": 5.0}),
    "torch.compile": (compiled, {}),
    "R-Drop": (usual, {"rdrop": 5.0}),
    "ema": (usual, {"ema": 0.999}),
}


def main() -> None:
    """Train every variant in turns."""
    parser = argparse.ArgumentParser(prog="benchmarks.training", description=__doc__)
    parser.add_argument("--data", required=True, help="folder with train.en.gz and so on")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--updates", type=int, default=3, help="of a slice; each variant has the same batches")
    parser.add_argument("--slices", type=int, default=7, help="of each variant; the first is not counted")
    parser.add_argument("--only", action="append", help="variants that begin with this text")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    chosen = {
        name: variant
        for name, variant in VARIANTS.items()
        if not options.only or any(name.startswith(each) for each in options.only)
    }
    data, found = DataConfig(multi30k=options.data), {name: list[dict[str, float]]() for name in chosen}
    text, runs = load_data(data), dict[str, tuple[Trainer, Iterator[Any]]]()
    tokenizers = train_tokenizers("bpe", text[0].src, text[0].tgt, 5000, ("en", "de"))
    config = preset("tiny", tokenizers.source.size, tokenizers.target.size, MODEL)
    for name, (change, settings) in chosen.items():
        model = Transformer(config).init_weights(1)
        trainer = Trainer(Path("nowhere"), model, TrainConfig(**{**TRAIN, **settings}), data, tokenizers, text)
        change(trainer)
        runs[name] = trainer, iter(BatchStream(trainer.train_set, trainer.settings.batch_tokens, 1))
    for _ in range(options.slices):
        for name, (trainer, batches) in runs.items():
            found[name].append(measure(trainer, batches, options.updates))
            print(name, found[name][-1], file=sys.stderr)
    print(json.dumps({name: summary(slices) for name, slices in found.items()}, indent=2))


def measure(trainer: Trainer, batches: Iterator[Any], updates: int) -> dict[str, float]:
    """Make so many updates."""
    tokens, start, used = 0.0, time.perf_counter(), time.process_time()
    for _ in range(updates):
        trainer.progress.update += 1
        tokens += trainer.train_update(batches)["tokens"]
    wall, cpu = time.perf_counter() - start, time.process_time() - used
    return {"tokens_per_second": tokens / wall, "tokens_per_cpu_second": tokens / cpu}


def summary(slices: list[dict[str, float]]) -> dict[str, list[float]]:
    """Lowest, median and highest of all slices but the first."""
    counted = slices[1:] or slices
    found = {key: sorted(each[key] for each in counted) for key in counted[0]}
    return {key: [round(each) for each in (rows[0], statistics.median(rows), rows[-1])] for key, rows in found.items()}


if __name__ == "__main__":
    main()
