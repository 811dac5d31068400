"""The training loop: Adam, inverse square root schedule, validation on real translations, exact resume.

Every random choice is a function of (seed, update, process), so a resumed run needs no generator state.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import json
import math
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from .checkpoint import HEADER, load_tensors, load_weights, model_tensors, require_like, save_checkpoint, save_tensors
from .checkpoint import VERSION as CHECKPOINT_VERSION
from .config import ModelConfig, TrainConfig
from .data import BatchStream, DataConfig, EncodedPairs, Parallel, TrainingBatch
from .engines.eager import EagerEngine
from .errors import ArtifactError, Interrupted, TrainingError
from .files import sha256, write_json
from .headers import digest, read_header, verify
from .metrics import Metrics, corpus_bleu, corpus_chrf
from .model import Transformer
from .notes import note
from .text import Tokenizers
from .translate import Translator

STATE, STATE_VERSION, METRICS = "train/state.json", 1, "metrics.jsonl"
AVERAGE = "weights/average.safetensors"
NUMBER = "[0-9]" * 7
OWN_FILES = (
    *(AVERAGE, "weights/random.safetensors", f"weights/step-{NUMBER}*.safetensors"),
    *(f"weights/interrupted-{NUMBER}*.safetensors", f"train/state-{NUMBER}*.safetensors", "train/state.safetensors"),
)
"""Patterns of the weights and states that a run writes."""
LOG_EVERY = 50
PORTION = 100
"""Lines of a validation that are translated before it says how far it is."""


@dataclass
class Progress:
    """How far a run is; stored with the optimizer."""

    update: int = 0
    epoch: int = 0
    index: int = 0
    best_loss: float = float("inf")
    worse: int = 0
    """Validations since the best one."""


class Trainer:
    """One training run in a folder; every process of a `torchrun` makes one."""

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        settings: TrainConfig,
        data: DataConfig,
        tokenizers: Tokenizers,
        text: tuple[Parallel, Parallel],
    ) -> None:
        self.folder, self.settings, self.data, self.tokenizers = folder, settings, data, tokenizers
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        longest = min(settings.max_tokens, config.max_positions)
        self.metrics = Metrics(folder / METRICS if self.rank == 0 else None)
        self.metrics.say(f"splitting {sum(len(part.src) for part in text):,} pairs into tokens", transient=True)
        self.train_set, self.valid_set = (EncodedPairs(part, tokenizers, longest) for part in text)
        self.valid_text = self.valid_set.text
        self.model = Transformer(config).init_weights(settings.seed).to(self.device)
        self.parallel = DistributedDataParallel(self.model) if self.world > 1 else self.model
        self.optimizer = torch.optim.Adam(self.model.parameters(), betas=(0.9, 0.98), eps=1e-9, fused=True)
        self.progress = Progress()
        self.data_sha256 = fingerprint(text)
        self.hashes: dict[str, str] = {}
        """Of the saved steps that will be averaged, by their names, oldest first."""
        if left_out := self.train_set.left_out + self.valid_set.left_out:
            self.metrics.say(f"{left_out} pairs longer than {longest} tokens are left out")

    def run(self) -> dict[str, Any]:
        """Train to the end or to Ctrl-C (raises Interrupted); returns the final validation's figures."""
        keep_freed_memory()
        if self.progress.update < self.settings.updates:
            self.announce()
        stream = BatchStream(
            self.train_set, self.settings.batch_tokens, self.settings.seed, self.progress.epoch, self.progress.index
        )
        batches = iter(stream)
        with stop_signals() as stop:
            while self.progress.update < self.settings.updates and not self.out_of_patience:
                self.progress.update += 1
                self.metrics.train(self.train_update(batches), LOG_EVERY, self.settings.updates)
                self.progress.epoch, self.progress.index = stream.epoch, stream.index
                last = self.progress.update == self.settings.updates
                if last or self.progress.update % self.settings.valid_every == 0:
                    self.validate(self.settings.bleu_sentences)
                    self.save()
                if self.agree(stop.is_set):
                    self.save_interrupted()
                    raise Interrupted(
                        f"update {self.progress.update} saved; go on with: tformer train --out {self.folder} --resume"
                    )
        # An interrupt has saved the last update out of the average, where `--updates` makes it the last one later.
        if self.agree(not self.rank and self.progress.update == self.settings.updates and self.step not in self.hashes):
            self.validate(self.settings.bleu_sentences)
            self.save()
        return self.finish()

    def announce(self) -> None:
        """Say what begins, and what of the settings cannot be meant."""
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
        """Name of the weights that a validation saves now."""
        return f"weights/step-{self.progress.update:07d}.safetensors"

    @property
    def out_of_patience(self) -> bool:
        """Early stopping: too many validations without a better loss."""
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
            group["lr"] = rate
        self.parallel.train()
        total = torch.zeros((), device=self.device)
        for number, chosen in enumerate(mine, 1):
            accumulating = self.world > 1 and number < len(mine)
            with self.parallel.no_sync() if accumulating else nullcontext():  # type: ignore[operator]
                loss = self.loss(self.batch(self.train_set, chosen), settings.label_smoothing) / tokens
                (loss * self.world).backward()  # type: ignore[no-untyped-call]  # DDP averages over processes
            total += loss.detach()
        if self.world > 1:
            dist.all_reduce(total)
        if not math.isfinite(total.item()):
            raise TrainingError(f"the loss is {total.item()} at update {update}: lower train.lr, then start again")
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip_norm or float("inf"))
        if not math.isfinite(norm.item()):
            raise TrainingError(f"the gradient is {norm.item()} at update {update}: lower train.lr, then start again")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
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
        config = self.model.config
        return corpus.batch(indices, config.pad_id, config.start_id)

    def loss(self, batch: TrainingBatch, label_smoothing: float) -> Tensor:
        """Cross-entropy summed over the target tokens of a batch."""
        src_ids, lengths, tgt_in, tgt_out = (
            torch.from_numpy(array).to(self.device)
            for array in (batch.src_ids, batch.src_lengths, batch.tgt_in, batch.tgt_out)
        )
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.precision == "bf16"):
            logits = self.parallel(src_ids, lengths, tgt_in)
        return F.cross_entropy(
            logits.flatten(0, 1).float(),
            tgt_out.flatten().long(),
            ignore_index=self.model.config.pad_id,
            label_smoothing=label_smoothing,
            reduction="sum",
        )

    def validate(self, sentences: int, **notes: int) -> dict[str, Any]:
        """Loss per token (without smoothing), BLEU and exact matches of really decoded text. Process 0 only."""
        if self.rank:
            return {}
        self.model.eval()
        parallel, self.parallel = self.parallel, self.model
        with torch.inference_mode():
            plan = self.valid_set.plan(self.settings.batch_tokens, 0, 0)
            total = 0.0
            for indices in plan:
                total += self.loss(self.batch(self.valid_set, indices), 0.0).item()
                self.metrics.tell(
                    f"update {self.progress.update}  validation loss of {len(self.valid_set.src):,} pairs"
                )
        self.parallel = parallel
        loss = total / sum(map(self.valid_set.target_tokens, plan))
        if not math.isfinite(loss):  # before such weights take the place of what was saved
            raise TrainingError(
                f"the validation loss is {loss} at update {self.progress.update}: lower train.lr, then start again"
            )
        figures: dict[str, Any] = {"update": self.progress.update, **notes, "valid_loss": loss}
        if sentences:
            src, tgt = self.valid_text.src[:sentences], self.valid_text.tgt[:sentences]
            made = self.translated(src)
            figures["bleu"], figures["chrf"] = corpus_bleu(made, tgt), corpus_chrf(made, tgt)
            figures["exact_match"] = sum(a == b for a, b in zip(made, tgt, strict=True)) / len(tgt)
        self.metrics.valid(figures)
        better = loss < self.progress.best_loss
        self.progress.best_loss = min(loss, self.progress.best_loss)
        self.progress.worse = 0 if better else self.progress.worse + 1
        return figures

    def translated(self, lines: list[str]) -> list[str]:
        """What the model makes of some text."""
        made: list[str] = []
        with Translator(EagerEngine(self.model), self.tokenizers) as translator:
            for first in range(0, len(lines), PORTION):
                made += [result.text for result in translator.translate(lines[first : first + PORTION])]
                self.metrics.tell(f"update {self.progress.update}  {len(made):,} of {len(lines):,} lines translated")
        return made

    def save(self) -> None:
        """Keep this step's weights for averaging, point the checkpoint at them, and save the state to resume from."""
        if self.world > 1:
            shared = torch.tensor([self.progress.best_loss, self.progress.worse], dtype=torch.float64)
            shared = shared.to(self.device)
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
        """Save between two validations: the weights stay out of the final average, as in an uninterrupted run."""
        if self.rank == 0 and self.step not in self.hashes:
            name = f"weights/interrupted-{self.progress.update:07d}.safetensors"
            save_tensors(self.folder / name, model_tensors(self.model))
            self.save_header(name)
            self.save_state()

    def save_state(self) -> None:
        """Everything that a resumed run needs: a file of tensors, then the header that makes it count."""
        tensors = {f"model.{name}": tensor for name, tensor in model_tensors(self.model).items()}
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for parameter, slots in self.optimizer.state.items():
            for slot, value in slots.items():
                tensors[f"{slot}.{names[id(parameter)]}"] = value
        state = f"train/state-{self.progress.update:07d}.safetensors"
        save_tensors(self.folder / state, tensors)
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
        if self.rank == 0 and before != self.world:  # each has batches of its own in an update
            note(f"processes: {before} so far, now {self.world}: an update has {self.world}/{before} of the sentences")
        verify(self.folder, header["files"], "run")
        state = self.folder / header["state"]
        tensors = load_tensors(state)
        weights = {name[len("model.") :]: t for name, t in tensors.items() if name.startswith("model.")}
        load_weights(self.model, weights, state)
        count = torch.zeros(())
        for name, parameter in self.model.named_parameters():
            slots = {"step": count, "exp_avg": parameter, "exp_avg_sq": parameter}
            for slot, like in slots.items():
                key = f"{slot}.{name}"
                if key not in tensors:
                    raise ArtifactError(f"{state} is incomplete: '{key}' is missing; start over with --force")
                require_like(tensors[key], like, key, state)  # what runs over them does not look
                slots[slot] = tensors[key].to(parameter.device)
            self.optimizer.state[parameter] = slots
        self.progress = Progress(**header["progress"])
        self.hashes = {name: sha for name, sha in header["files"].items() if name != header["state"]}
        self.metrics.cut(self.progress.update)
        self.metrics.sums = header["metrics"]
        if self.rank == 0:
            if self.hashes:
                self.save_header([*self.hashes][-1])
            remove_superseded(self.folder)

    def finish(self) -> dict[str, Any]:
        """Average the last saved steps, make the result the checkpoint's weights, and validate it."""
        if self.rank:
            return {}
        verify(self.folder, self.hashes, "run")
        mean: dict[str, Tensor] = {}
        for step in self.hashes:
            tensors = load_tensors(self.folder / step)
            load_weights(self.model, tensors, self.folder / step)
            for name, tensor in tensors.items():
                share = tensor / len(self.hashes)
                mean[name] = mean[name] + share if name in mean else share
        load_weights(self.model, mean, self.folder)
        save_tensors(self.folder / AVERAGE, mean)
        self.save_header(AVERAGE)
        remove_superseded(self.folder)
        return self.validate(len(self.valid_text.src), averaged=len(self.hashes))

    def save_header(self, weights: str) -> None:
        """Make some weights the checkpoint's."""
        training = {"update": self.progress.update, **self.description()}
        save_checkpoint(self.folder, self.model.config, self.tokenizers, self.folder / weights, training)

    def description(self) -> dict[str, Any]:
        """The settings of this run, as they are stored."""
        return {"settings": dataclasses.asdict(self.settings), "data": dataclasses.asdict(self.data)}

    def agree(self, own: bool) -> bool:
        """Whether any process says so; each must ask."""
        if self.world == 1:
            return own
        flag = torch.tensor(int(own), device=self.device)
        dist.all_reduce(flag)
        return bool(flag.item())


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
    """Remove the weights and states that neither header of a run names any more."""
    kept = {*read_state(folder)["files"]} if (folder / STATE).exists() else set()
    kept.add(read_header(folder, HEADER, "checkpoint", CHECKPOINT_VERSION)["weights"])
    for path in [path for pattern in OWN_FILES for path in folder.glob(pattern)]:
        if path.relative_to(folder).as_posix() not in kept:
            path.unlink()


def fingerprint(text: tuple[Parallel, Parallel]) -> str:
    """Hex SHA-256 of training and validation text."""
    found = hashlib.sha256()
    for part in text:
        for side in (part.src, part.tgt):
            found.update(json.dumps(side).encode())
    return found.hexdigest()


def learning_rate(update: int, settings: TrainConfig) -> float:
    """Linear warm-up, then the inverse square root of the update (Vaswani et al. 2017, 5.3); a cooldown at the end."""
    rate = settings.lr * min(update / settings.warmup, math.sqrt(settings.warmup / update))
    left = settings.updates - update + 1
    return rate * left / settings.cooldown if 0 <= left < settings.cooldown else rate


def never_at_full_rate(settings: TrainConfig) -> str:
    """What to say of settings whose learning rate does not reach `lr` before the end; empty: it does."""
    updates, warmup, cooldown = settings.updates, settings.warmup, settings.cooldown
    if warmup > 1 and warmup >= updates:
        what, mend = f"train.warmup={warmup} of {updates} updates", f"train.warmup={max(1, updates // 4)}"
    elif warmup + cooldown > updates + 1:
        what = f"train.cooldown={cooldown} of {updates} updates begins before train.warmup={warmup} ends"
        mend = f"train.cooldown={updates - warmup}"
    else:
        return ""
    return f"{what}: the learning rate does not reach train.lr={settings.lr:g} before the end: start with --set {mend}"


@dataclass
class StopFlag:
    """Set by a signal, looked at between updates."""

    is_set: bool = False


@contextmanager
def stop_signals() -> Iterator[StopFlag]:
    """Turn Ctrl-C and SIGTERM into a flag; a second one interrupts at once."""
    flag = StopFlag()

    def handle(number: int, frame: object) -> None:
        if flag.is_set:
            raise KeyboardInterrupt
        flag.is_set = True
        note("stopping after this update")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def keep_freed_memory() -> None:
    """Tell glibc to keep large freed blocks: handing each one back to the kernel halves the speed of CPU training."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt:
        m_trim_threshold, m_mmap_threshold, one_gib = -1, -3, 1 << 30
        mallopt(m_mmap_threshold, one_gib)
        mallopt(m_trim_threshold, 2 * one_gib - 1)
