"""The training loop: Adam, inverse square root schedule, validation on real translations, exact resume.

Every random choice is a function of (seed, update, process), so a resumed run needs no generator state.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from shlex import quote
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ..base.errors import ArtifactError, Interrupted
from ..base.files import sha256, write_json
from ..base.headers import digest, verify
from ..base.machine import give_back_freed_memory, keep_freed_memory
from ..base.notes import note
from ..base.stopping import StopFlag, stop_signals
from ..bundle.text import Tokenizers
from ..model.checkpoint import load_weights, model_tensors, save_checkpoint, save_tensors
from ..model.config import TrainConfig
from ..model.network import Transformer
from ..translate.batches import Ids
from .data import BatchStream, DataConfig, EncodedPairs, Parallel, Sampling, TrainingBatch, fingerprint
from .keeping import best_of, candidates, work_left
from .losses import dropouts, require_finite, set_dropout, tensors_of
from .metrics import Metrics, text_figures
from .objective import Weighing, batch_loss
from .quantized import learned_steps, parameter_groups, quantize
from .run_files import AVERAGE, EMA, METRICS, STATE, STATE_VERSION, Progress, read_state, remove_superseded
from .schedule import dropout_factor, label_smoothing, learning_rate, never_at_full_rate
from .teacher import Teacher
from .tensors import MovingMean, load_mean, load_training, training_tensors
from .translating import translated

LOG_EVERY = 50
"""Updates that a row of metrics.jsonl is the mean of: single updates are too noisy to plot."""


class Trainer:
    """One training run in a folder; each process of `torchrun` has one."""

    def __init__(
        self,
        folder: Path,
        model: Transformer,
        settings: TrainConfig,
        data: DataConfig,
        tokenizers: Tokenizers,
        text: tuple[Parallel, Parallel],
    ) -> None:
        self.folder, self.settings, self.data, self.tokenizers = folder, settings, data, tokenizers
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        longest = min(settings.max_tokens, model.config.max_positions)
        self.metrics = Metrics(folder / METRICS if self.rank == 0 else None)
        self.metrics.say(f"splitting {sum(len(part.src) for part in text):,} pairs into tokens", transient=True)
        self.train_set, self.valid_set = (EncodedPairs(part, tokenizers, longest) for part in text)
        self.valid_text = self.valid_set.text
        self.model = model.to(self.device)
        if settings.quantize == "int8":
            first = self.train_set.plan(settings.batch_tokens, settings.seed, 0)[0]  # the same in all processes
            quantize(self.model, tensors_of(self.batch(self.train_set, first), self.device)[:3])
        self.parallel = DistributedDataParallel(self.model) if self.world > 1 else self.model
        self.optimizer = torch.optim.Adam(parameter_groups(model), betas=(0.9, 0.98), eps=1e-9, fused=True)
        self.ema, self.dropouts = MovingMean(self.model, settings.ema), dropouts(self.model)
        self.teacher: Teacher | None = None
        self.records: dict[str, dict[str, str]] = {}
        """Other runs that this one has something from, by `from` and `teacher`; see `teacher.record_of`."""
        self.decoding: dict[str, Any] = {}
        """See `Checkpoint.decoding`."""
        self.progress, self.stop = Progress(), StopFlag()
        self.data_sha256 = fingerprint(text)
        self.hashes: dict[str, str] = {}
        """SHA-256 of the saved steps to average, by file name, oldest first."""
        if left_out := self.train_set.left_out + self.valid_set.left_out:
            self.metrics.say(f"{left_out} pairs longer than {longest} tokens are left out")

    def run(self) -> dict[str, Any]:
        """Train to the end or to Ctrl-C (raises Interrupted); returns the final validation's figures."""
        keep_freed_memory()
        if self.progress.update < self.settings.updates:
            self.announce()
        settings, at = self.settings, self.progress
        sampling = Sampling(settings.src_sampling, settings.tgt_sampling, settings.sampling_nbest)
        stream = BatchStream(self.train_set, settings.batch_tokens, settings.seed, at.epoch, at.index, sampling)
        batches = iter(stream)
        with stop_signals() as self.stop:
            # An interrupt may have saved an update that was due for validation before it could be validated.
            if self.progress.update and self.agree(not self.rank and self.due and self.step not in self.hashes):
                self.validate_and_save()
                self.save_if_stopped()
            while not self.ended:
                self.progress.update += 1
                figures = self.train_update(batches)
                left = work_left(settings, at.update, len(self.valid_set.src), len(self.valid_text.src))
                self.metrics.train(figures, LOG_EVERY, settings.updates, left)
                self.progress.epoch, self.progress.index = stream.epoch, stream.index
                if self.due:
                    self.validate_and_save()
                self.save_if_stopped()
            return self.finish()

    @property
    def due(self) -> bool:
        """Whether this update is followed by a validation."""
        update = self.progress.update
        return update == self.settings.updates or update % self.settings.valid_every == 0

    @property
    def ended(self) -> bool:
        """Whether no update is left to make."""
        return self.progress.update >= self.settings.updates or self.out_of_patience

    def save_if_stopped(self) -> None:
        """After a signal save, and raise Interrupted, unless only the average is left to make."""
        if not self.agree(self.stop.is_set):
            return
        validated = self.agree(not self.rank and self.step in self.hashes)
        if self.ended and validated:
            return
        self.save_interrupted()
        update = self.progress.update
        done = f"all {update} updates are made and saved, not yet validated and averaged" if self.ended else ""
        raise Interrupted(f"{done or f'update {update} saved'}; go on with: {self.again}")

    @property
    def again(self) -> str:
        """The command that resumes this run."""
        start = f"torchrun --nproc-per-node {self.world} -m tformer_deploy" if self.world > 1 else "tformer"
        return f"{start} train --out {quote(str(self.folder))} --resume"

    def announce(self) -> None:
        """Print device, sizes and updates, and a warning if the schedule never reaches the full learning rate."""
        settings, done = self.settings, self.progress.update
        on = torch.cuda.get_device_name() if self.device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
        if self.world > 1:
            on += f", {self.world} processes"
        self.metrics.begin(
            done,
            f"training on {on}: {self.model.config.parameters:,} parameters, {len(self.train_set.src):,} pairs, "
            f"updates {done + 1} to {settings.updates} of up to "
            f"{settings.batch_tokens * settings.accumulate * self.world:,} padded tokens",
        )
        if never := never_at_full_rate(settings):
            self.metrics.say(never)

    @property
    def step(self) -> str:
        """File of the weights that a validation of this update saves."""
        return f"weights/step-{self.progress.update:07d}.safetensors"

    @property
    def out_of_patience(self) -> bool:
        """Early stopping: `patience` validations without a better loss."""
        return 0 < self.settings.patience <= self.progress.worse

    def train_update(self, batches: Iterator[Any]) -> dict[str, float]:
        """One optimizer step over the micro-batches of all processes; the loss is their mean per target token."""
        start = time.perf_counter()
        update, settings = self.progress.update, self.settings
        torch.manual_seed(((settings.seed * 1_000_003 + update) * 1_009 + self.rank) % 2**63)
        indices = [next(batches) for _ in range(settings.accumulate * self.world)]
        tokens = sum(map(self.train_set.target_tokens, indices))
        mine = indices[self.rank :: self.world]
        rate = learning_rate(update, settings)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        set_dropout(self.dropouts, dropout_factor(update, settings))
        smoothing = label_smoothing(update, settings)
        self.parallel.train()
        total = torch.zeros((), device=self.device)
        for number, chosen in enumerate(mine, 1):
            accumulating = self.world > 1 and number < len(mine)
            with self.parallel.no_sync() if accumulating else nullcontext():  # type: ignore[operator]
                batch = self.batch(self.train_set, chosen)
                loss = self.loss(batch, smoothing, settings.rdrop, self.teacher, self.train_set.links(chosen)) / tokens
                (loss * self.world).backward()  # type: ignore[no-untyped-call]  # DDP averages over processes
            total += loss.detach()
        if self.world > 1:
            dist.all_reduce(total)
        require_finite("loss", total.item(), update)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip_norm or float("inf"))
        require_finite("gradient", norm.item(), update)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.ema.add(update)
        return {
            "update": update,
            "epoch": self.progress.epoch,
            "loss": total.item(),
            "lr": rate,
            "grad_norm": norm.item(),
            "tokens": tokens,
            "seconds": time.perf_counter() - start,
        }

    def batch(self, corpus: EncodedPairs, indices: Any) -> TrainingBatch:
        """Some pairs, padded."""
        return corpus.batch(indices, self.model.config.pad_id, self.model.config.start_id)

    def loss(
        self,
        batch: TrainingBatch,
        label_smoothing: float,
        rdrop: float = 0.0,
        teacher: Teacher | None = None,
        links: Ids | None = None,
    ) -> Tensor:
        """See `objective.batch_loss`."""
        how = Weighing(label_smoothing, rdrop, teacher, links)
        return batch_loss(self.parallel, self.model, self.settings, batch, how)

    def validate_and_save(self) -> None:
        """Validate this update and save its weights; a signal meanwhile cancels both."""
        if self.agree(bool(self.validate(self.settings.bleu_sentences))):
            self.save()
        give_back_freed_memory()

    def validate(self, sentences: int, beams: int = 1, **notes: Any) -> dict[str, Any]:
        """Loss per token (without smoothing), and BLEU, chrF and exact matches of decoded text.

        Runs in process 0 only. Returns {} in the others, and if a signal arrives.
        """
        if self.rank:
            return {}
        start = time.perf_counter()
        self.model.eval()
        parallel, self.parallel = self.parallel, self.model
        with torch.inference_mode():
            plan = self.valid_set.plan(self.settings.batch_tokens, 0, 0)
            total = 0.0
            for indices in plan:
                if self.stop.is_set:
                    break
                total += self.loss(self.batch(self.valid_set, indices), 0.0).item()
                self.metrics.tell(
                    f"update {self.progress.update}  validation loss of {len(self.valid_set.src):,} pairs"
                )
        self.parallel = parallel
        if self.stop.is_set:
            return {}
        self.metrics.took("pairs", len(self.valid_set.src), time.perf_counter() - start)
        loss = total / sum(map(self.valid_set.target_tokens, plan))
        require_finite("validation loss", loss, self.progress.update)  # before such weights replace what was saved
        figures: dict[str, Any] = {"update": self.progress.update, **notes, "valid_loss": loss}
        if sentences:
            src, tgt = self.valid_text.src[:sentences], self.valid_text.tgt[:sentences]
            made = self.translated(src, beams)
            if len(made) < len(src):
                return {}
            figures |= text_figures(made, tgt, tokenized=bool(self.data.prepare))
        self.metrics.valid(figures)
        better = loss < self.progress.best_loss
        self.progress.best_loss = min(loss, self.progress.best_loss)
        self.progress.worse = 0 if better else self.progress.worse + 1
        return figures

    def translated(self, lines: list[str], beams: int) -> list[str]:
        """Translations of lines; only the first ones if a signal arrives."""
        start = time.perf_counter()

        def go_on(made: int) -> bool:
            self.metrics.tell(f"update {self.progress.update}  {made:,} of {len(lines):,} lines translated")
            return not self.stop.is_set

        found = translated(self.model, self.tokenizers, lines, beams, go_on)
        if len(found) == len(lines):
            self.metrics.took("lines", len(lines), time.perf_counter() - start)
        return found

    def save(self) -> None:
        """Save this step's weights for averaging, make them the checkpoint's, and save the state to resume from."""
        if self.world > 1:
            shared = torch.tensor([self.progress.best_loss, self.progress.worse], dtype=torch.float64).to(self.device)
            dist.broadcast(shared, 0)
            self.progress.best_loss, self.progress.worse = shared[0].item(), int(shared[1].item())
        if self.rank:
            return
        save_tensors(self.folder / self.step, model_tensors(self.model))
        saved = self.step, sha256(self.folder / self.step)
        self.hashes = dict([*self.hashes.items(), saved][-self.settings.average :])
        self.save_header(self.step)
        self.save_state()

    def save_interrupted(self) -> None:
        """Save between two validations. These weights are not averaged: the result is that of an uninterrupted run."""
        if self.rank == 0 and self.step not in self.hashes:
            name = f"weights/interrupted-{self.progress.update:07d}.safetensors"
            save_tensors(self.folder / name, model_tensors(self.model))
            self.save_header(name)
            self.save_state()

    def save_state(self) -> None:
        """Save what a resumed run needs: a file of tensors, then the header that makes it valid."""
        state = f"train/state-{self.progress.update:07d}.safetensors"
        save_tensors(self.folder / state, training_tensors(self.model, self.optimizer, self.ema.tensors))
        header = {
            "format": "tformer-training",
            "version": STATE_VERSION,
            **self.description(),
            "data_sha256": self.data_sha256,
            "processes": self.world,
            "progress": dataclasses.asdict(self.progress),
            "metrics": self.metrics.sums,
            "state": state,
            "files": {**self.hashes, state: sha256(self.folder / state)},
        }
        write_json(self.folder / STATE, {**header, "sha256": digest(header)})
        remove_superseded(self.folder)

    def resume(self) -> None:
        """Continue from the folder's saved state. Raises ArtifactError."""
        header = read_state(self.folder)
        if header["data_sha256"] != self.data_sha256:
            raise ArtifactError(
                f"the text that {self.folder} was trained on has changed: bring it back, or start over with --force"
            )
        before = header.get("processes", self.world)
        if self.rank == 0 and before != self.world:  # an update has `accumulate` batches of each process
            note(f"processes: {before} so far, now {self.world}: an update has {self.world}/{before} of the sentences")
        verify(self.folder, header["files"], "run")
        load_training(self.model, self.optimizer, self.ema.tensors, self.folder / header["state"])
        self.progress = Progress(**header["progress"])
        self.hashes = {name: sha for name, sha in header["files"].items() if name != header["state"]}
        self.metrics.cut(self.progress.update)
        self.metrics.sums = header["metrics"]
        if self.rank == 0:
            if self.hashes:
                self.save_header([*self.hashes][-1])
            remove_superseded(self.folder)

    def finish(self) -> dict[str, Any]:
        """Make the kept weights the checkpoint's; returns their validation. Raises Interrupted if a signal stops it."""
        figures = {} if self.rank else self.keep()
        if self.agree(not self.rank and not figures):
            raise Interrupted(
                f"{self.folder} is trained, its weights are saved: only its last validation was stopped; "
                f"repeat it with: {self.again}"
            )
        return figures

    def keep(self) -> dict[str, Any]:
        """Validate each candidate as the checkpoint's weights, and keep the best. Returns {} if a signal arrives."""
        found = {}
        for name in candidates(self.settings):
            self.put(name)
            notes = {"averaged": len(self.hashes)} if name == "average" else {"weights": name}
            found[name] = self.validate(len(self.valid_text.src), self.settings.keep_beams, **notes)
            if not found[name]:
                return {}
        if len(found) == 1:
            return found[name]
        best, line, record = best_of(found, self.settings.keep)
        self.put(best, record)
        self.metrics.say(line)
        return {**found[best], "kept": best}

    def put(self, name: str, record: Mapping[str, Any] | None = None) -> None:
        """Make a candidate's weights the model's and the checkpoint's."""
        verify(self.folder, self.hashes, "run")
        steps = [*self.hashes]
        if name == "ema":
            load_weights(self.model, self.ema.tensors, self.folder / STATE)
        else:
            load_mean(self.model, [self.folder / step for step in (steps if name == "average" else steps[-1:])])
        file = {"average": AVERAGE, "ema": EMA}.get(name, steps[-1])
        if name != "last":
            save_tensors(self.folder / file, model_tensors(self.model))
        self.save_header(file, record)
        remove_superseded(self.folder)

    def save_header(self, weights: str, record: Mapping[str, Any] | None = None) -> None:
        """Write checkpoint.json for a file of weights."""
        training = {"update": self.progress.update, **self.description(), **(record or {})}
        parts = self.model.config, self.tokenizers, self.folder / weights, training, self.decoding
        save_checkpoint(self.folder, *parts, learned_steps(self.model, self.folder / weights))

    def description(self) -> dict[str, Any]:
        """The settings of this run, as stored in headers."""
        return {"settings": dataclasses.asdict(self.settings), "data": dataclasses.asdict(self.data), **self.records}

    def agree(self, own: bool) -> bool:
        """Whether `own` is true in any process. A collective operation: every process must call it."""
        if self.world == 1:
            return own
        flag = torch.tensor(int(own), device=self.device)
        dist.all_reduce(flag)
        return bool(flag.item())
