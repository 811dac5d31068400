"""Starting and resuming training runs: from settings to a Trainer."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..base.errors import ArtifactError, ConfigError
from ..base.files import check_utf8, hold, remove_leftovers
from ..base.headers import verify
from ..base.notes import note
from ..base.settings import from_dict
from ..bundle.text import SPECIALS, Tokenizers, Words, require_fit, train_tokenizers
from ..model.checkpoint import (
    HEADER,
    TRAINING_COPIES,
    Checkpoint,
    model_tensors,
    open_checkpoint,
    require_memory,
    save_checkpoint,
    save_tensors,
)
from ..model.config import MAX_SEED, ModelConfig, TrainConfig, preset
from ..model.network import Transformer
from .alignments import require_guidable
from .data import DataConfig, Parallel, load_data, split_pair
from .loop import Trainer
from .run_files import METRICS, OWN_FILES, STATE, read_state
from .teacher import (
    OF_TEACHERS,
    TAKEN_OVER,
    Teacher,
    find_teacher,
    open_other,
    record_of,
    require_pieces,
    require_taught,
)


@dataclass(frozen=True)
class RunSettings:
    """What to train."""

    preset: str
    tokenizer: str
    """`bpe`, `unigram` or `words`; empty: `bpe`, for the copy task `words`."""
    vocab_size: int
    model: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `ModelConfig` over the preset's."""
    train: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `TrainConfig`."""
    teacher: Path | None = None
    """Run folder of a trained model to learn from, whose vocabulary this one gets: see `teacher.Teacher`."""
    start: Path | None = None
    """Run folder of a trained model whose weights this one begins with; it decides model and vocabulary."""


def start_run(folder: Path, data: DataConfig, run: RunSettings, force: bool = False) -> Trainer:
    """A new run. Raises ArtifactError if the folder holds one already and `force` is off."""
    settings = check_settings(run, data)
    existing = [name for name in (HEADER, STATE, METRICS) if (folder / name).exists()]
    if existing and not force:
        if STATE in existing:
            raise ArtifactError(f"{folder} holds a run already: add --resume to continue it or --force to start over")
        raise ArtifactError(f"{folder} holds {existing[0]}, but nothing to continue from: add --force to start over")
    teacher = open_other("teacher", run.teacher, folder) if run.teacher else None
    first = _first(folder, run, teacher)
    text, known = load_data(data), first or teacher
    tokenizers = known.tokenizers if known else _vocabulary(data, run, settings, text[0])
    if not rank() and data.prepare:
        note("the text is lower-cased and Moses-tokenised, and so must be what the model gets: see tformer prepare")
    config = first.config if first else _model(run, tokenizers, teacher.config if teacher else None)
    require_fit(config, tokenizers)
    if known:
        require_pieces(settings, tokenizers)
    if data.alignments:
        require_guidable(tokenizers)
    if teacher:
        require_taught(min(settings.max_tokens, config.max_positions), teacher.config)
    require_room(config, teacher.config if teacher else None)
    if teacher and not rank():
        note(f"the teacher, {run.teacher}, has {teacher.config.parameters:,} parameters; its vocabulary is taken over")
    model = first.load_model() if first else Transformer(config).init_weights(settings.seed)
    trainer = Trainer(folder, model, settings, data, tokenizers, text)
    trainer.teacher = Teacher(teacher, settings, trainer.device) if teacher else None
    trainer.records = {name: record_of(each) for name, each in (("from", first), ("teacher", teacher)) if each}
    trainer.decoding = first.decoding if first else {}
    if rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        if existing:  # without a run, a folder `train` or `weights` is somebody's data
            remove_run(folder)
    return trainer


def check_settings(run: RunSettings, data: DataConfig) -> TrainConfig:
    """The settings of training. Raises ConfigError for what is impossible, before the long work starts."""
    settings = from_dict(TrainConfig, run.train, "train")
    without_start = {name: value for name, value in run.model.items() if name != "start_id"}  # which may be any entry
    if not run.start:
        require_room(preset(run.preset, len(SPECIALS), len(SPECIALS), {"share_embeddings": "decoder", **without_start}))
    if not run.teacher and (alone := [name for name in OF_TEACHERS if name in run.train]):
        raise ConfigError(f"train.{alone[0]} needs a model to learn from: add --teacher RUN")
    if run.teacher and (decided := [name for name in TAKEN_OVER if name in run.model]):
        raise ConfigError(f"model.{decided[0]} is what the model of --teacher has: leave it out")
    if "alignment_weight" in run.train and not data.alignments:
        raise ConfigError("train.alignment_weight needs alignments: add --alignments FILE")
    if data.alignments and (settings.src_sampling or settings.tgt_sampling):
        raise ConfigError("--alignments are of fixed pieces: leave out train.src_sampling and train.tgt_sampling")
    return settings


def _first(folder: Path, run: RunSettings, teacher: Checkpoint | None) -> Checkpoint | None:
    """The model to begin with. Raises ConfigError for settings that it decides, and a teacher of other ids."""
    if not run.start:
        return None
    if run.model:
        raise ConfigError(f"model.{next(iter(run.model))} is what the model of --from has: leave it out")
    first = open_other("from", run.start, folder)
    if teacher:
        same = all(getattr(first.config, name) == getattr(teacher.config, name) for name in TAKEN_OVER)
        if not same or first.tokenizer_hashes != teacher.tokenizer_hashes:
            raise ConfigError(f"--teacher {run.teacher} has another vocabulary than --from {run.start}: leave one out")
    return first


def _vocabulary(data: DataConfig, run: RunSettings, settings: TrainConfig, text: Parallel) -> Tokenizers:
    """Tokenizers learned from the training text."""
    kind = run.tokenizer or ("words" if data.task == "copy" else "bpe")
    if kind == "words" and (settings.src_sampling or settings.tgt_sampling):
        raise ConfigError("train.src_sampling and train.tgt_sampling need pieces: add --tokenizer bpe or unigram")
    languages = (None, None) if data.task == "copy" else split_pair(data.pair)
    if not rank():
        note(f"{len(text.src):,} pairs read: learning a vocabulary")
    return train_tokenizers(kind, text.src, text.tgt, run.vocab_size, languages)


def _model(run: RunSettings, tokenizers: Tokenizers, teacher: ModelConfig | None) -> ModelConfig:
    """Sizes of the model. Tokenizers of a teacher may be two files with one vocabulary, if it shares its tables."""
    one = tokenizers.source is tokenizers.target or bool(teacher and teacher.share_embeddings == "all")
    taken_over = {name: getattr(teacher, name) for name in TAKEN_OVER} if teacher else {}
    sharing = {} if one else {"share_embeddings": "decoder"}
    sizes = tokenizers.source.size, tokenizers.target.size
    config = preset(run.preset, *sizes, {**sharing, **run.model, **taken_over})
    if config.share_embeddings == "all" and not one:
        raise ConfigError(
            "model.share_embeddings=all needs one vocabulary for both languages: use --tokenizer bpe, or decoder"
        )
    return config


def remove_run(folder: Path) -> None:
    """Remove a run's own files. A kill leaves a run that can be read, or none and what tells that there was one."""
    own = [path for pattern in OWN_FILES for path in folder.glob(pattern)]
    for path in (folder / STATE, folder / HEADER, *own, folder / METRICS):
        path.unlink(missing_ok=True)


@contextmanager
def only_process(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on a run folder, and remove temporary files of killed runs. Raises ArtifactError."""
    with group_of_processes():
        if rank():  # process 0 holds the lock for the group
            yield
        else:
            with _only_holder(folder):
                yield


@contextmanager
def _only_holder(folder: Path) -> Iterator[None]:
    check_utf8(folder)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    with hold(folder):
        try:
            for each in (folder, folder / "weights", folder / "train"):
                remove_leftovers(each)
            yield
        finally:
            with suppress(OSError):
                folder.rmdir()  # if it is empty


def resume_run(
    folder: Path, updates: int | None = None, teacher: Path | None = None, data: DataConfig | None = None
) -> Trainer:
    """The run in a folder, from its last save and with its own settings; only `updates` may be raised.

    `teacher`, `data`: where its teacher and its text are now, if they have moved.
    """
    stored = read_state(folder)
    done = stored["progress"]["update"]
    settings = from_dict(TrainConfig, stored["settings"], "train")
    if updates is not None:
        if updates < done:
            raise ConfigError(f"--updates {updates}: the run in {folder} has made {done} already")
        settings = dataclasses.replace(settings, updates=updates)
    # A kill between two saves may have left the header behind its weights; the state has its own.
    checkpoint = open_checkpoint(folder, weights=False)
    data = data or from_dict(DataConfig, stored["data"], "data")
    if teacher and "teacher" not in stored:
        raise ConfigError(f"--teacher {teacher}: the run in {folder} began without one; leave it out")
    taught_by = find_teacher(stored["teacher"], folder, teacher) if "teacher" in stored else None
    require_room(checkpoint.config, taught_by.config if taught_by else None)
    model = Transformer(checkpoint.config).init_weights(settings.seed)
    trainer = Trainer(folder, model, settings, data, checkpoint.tokenizers, load_data(data))
    trainer.records = {"from": stored["from"]} if "from" in stored else {}
    trainer.decoding = checkpoint.decoding
    if taught_by:
        trainer.teacher = Teacher(taught_by, settings, trainer.device)
        trainer.records["teacher"] = record_of(taught_by)
    trainer.resume()
    if updates is not None and updates > done and trainer.out_of_patience:
        trainer.progress.worse = 0  # more updates were asked for: early stopping counts anew
    return trainer


def verify_state(folder: Path) -> dict[str, str]:
    """Files of a run's saved state, if it has one, by their SHA-256, verified. Raises ArtifactError."""
    if not (folder / STATE).exists():
        return {}
    files: dict[str, str] = read_state(folder)["files"]
    verify(folder, files, "run")
    return files


def require_room(config: ModelConfig, teacher: ModelConfig | None = None) -> None:
    """Raise ConfigError if training needs more than the free memory; with a GPU, only the weights are counted."""
    what = "training with a teacher" if teacher else "training"
    require_memory(config, what, 1 if torch.cuda.is_available() else TRAINING_COPIES, teacher)


def init_checkpoint(
    folder: Path, preset_name: str, vocab_size: int, seed: int, model_values: Mapping[str, Any], force: bool = False
) -> int:
    """Write an untrained checkpoint; returns its number of parameters."""
    if (folder / HEADER).exists() and not force:
        raise ArtifactError(f"{folder} holds a checkpoint already: choose another folder or add --force")
    if not 0 <= seed < MAX_SEED:
        raise ConfigError(f"--seed {seed}: must be at least 0 and less than 2^63")
    config = preset(preset_name, vocab_size, vocab_size, model_values)
    require_memory(config, "the model")
    words = Words([*SPECIALS, *(f"w{i}" for i in range(len(SPECIALS), vocab_size))], None)
    require_fit(config, Tokenizers(words, words))
    model = Transformer(config).init_weights(seed)
    weights = folder / "weights/random.safetensors"
    with only_process(folder):
        # A kill leaves no checkpoint whose parts do not fit, and no state that goes on with other tokenizers.
        if (folder / HEADER).exists():
            remove_run(folder)
        save_tensors(weights, model_tensors(model))
        save_checkpoint(folder, config, Tokenizers(words, words), weights, {"seed": seed, "updates": 0})
    return sum(parameter.numel() for parameter in model.parameters())


@contextmanager
def group_of_processes() -> Iterator[None]:
    """Join the process group, if `torchrun` started this process."""
    torchrun = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()
    if not torchrun or dist.is_initialized():
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # The others wait while process 0 validates, however long that takes; if it fails, torchrun ends them.
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(days=1))
    try:
        yield
        dist.barrier()  # process 0 keeps the group's store: it leaves last
    finally:
        # At the interpreter's exit, gloo's threads would still run while they are freed: an occasional SIGABRT.
        dist.destroy_process_group()


def rank() -> int:
    """This process's number; 0 writes the files."""
    return dist.get_rank() if dist.is_initialized() else 0
