"""Training: it learns, and every way to the same number of updates gives the same weights."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from tformer_deploy.base.errors import ArtifactError, ConfigError, DataError, Interrupted, TrainingError
from tformer_deploy.cli import main
from tformer_deploy.engines.eager import EagerEngine
from tformer_deploy.model.checkpoint import load_tensors, open_checkpoint
from tformer_deploy.model.config import ModelConfig, TrainConfig
from tformer_deploy.model.network import Transformer
from tformer_deploy.train.data import DataConfig
from tformer_deploy.train.loop import Trainer
from tformer_deploy.train.metrics import Metrics, corpus_bleu, corpus_chrf, plot, read_metrics, text_figures
from tformer_deploy.train.run_files import AVERAGE, METRICS, STATE
from tformer_deploy.train.runs import RunSettings, group_of_processes, init_checkpoint, resume_run, start_run
from tformer_deploy.train.schedule import learning_rate, never_at_full_rate
from tformer_deploy.translate.translator import Result, Translator

from .import_cases import CASES, imported
from .params import long_but

VOCAB = 40
SMALL = {"d_model": 16, "d_ff": 32, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "max_positions": 48}
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
LOCAL = ("--standalone", "--local-addr", "127.0.0.1")  # the name of a machine may lead nowhere
TORCHRUN = ("torch.distributed.run", *LOCAL, "--nproc-per-node", "2", "-m", "tformer_deploy")
QUICK = {"batch_tokens": 128, "lr": 0.01, "warmup": 10, "bleu_sentences": 0}


@pytest.fixture(autouse=True)
def one_thread_and_no_plots(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("tformer_deploy.train.metrics.plot", lambda metrics, image: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    """Files of 200 and 8 lines; a translation is its source backwards."""
    folder, rng = tmp_path_factory.mktemp("data"), random.Random(1)
    words = ["".join(rng.choices("abcdef", k=rng.randint(1, 4))) for _ in range(30)]
    for part, count in (("train", 200), ("valid", 8)):
        lines = [rng.choices(words, k=rng.randint(2, 6)) for _ in range(count)]
        (folder / f"{part}.src").write_text("".join(" ".join(line) + "\n" for line in lines))
        (folder / f"{part}.tgt").write_text("".join(" ".join(line[::-1]) + "\n" for line in lines))
    src, tgt, valid_src, valid_tgt = (str(folder / f"{part}.{side}") for part in ("train", "valid") for side in SIDES)
    return DataConfig(src, tgt, valid_src, valid_tgt)


SIDES = ("src", "tgt")


def start(
    folder: Path, data: DataConfig, model: Mapping[str, Any] | None = None, force: bool = False, **settings: Any
) -> Trainer:
    """A run of the small model."""
    run = RunSettings("tiny", "bpe", VOCAB, {**SMALL, **(model or {})}, {**QUICK, **settings})
    return start_run(folder, data, run, force)


def resume(folder: Path, **settings: Any) -> Trainer:
    return resume_run(folder, **settings)


def arguments(
    folder: Path,
    data: DataConfig,
    model: Mapping[str, Any] | None = None,
    teacher: str | Path = "",
    **settings: Any,
) -> list[str | Path]:
    """The command line of the run that `start` makes; with a teacher, whose vocabulary it has."""
    sections = {"model": {**SMALL, **(model or {})}, "train": {**QUICK, **settings}}
    sets = [f"{section}.{key}={value}" for section, values in sections.items() for key, value in values.items()]
    files = ["--src", data.src, "--tgt", data.tgt, "--valid-src", data.valid_src, "--valid-tgt", data.valid_tgt]
    vocabulary = ["--teacher", teacher] if teacher else ["--vocab-size", str(VOCAB)]
    return ["train", "--out", folder, *vocabulary, *files, *(x for s in sets for x in ("--set", s))]


def launch(*arguments: str | Path, module: tuple[str, ...] = ("tformer_deploy",)) -> subprocess.Popen[str]:
    """`tformer` in a process of its own, with one thread."""
    return subprocess.Popen(
        [sys.executable, "-m", *module, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_save(folder: Path, process: subprocess.Popen[str]) -> None:
    """Wait for the first training state of a run."""
    while not (folder / STATE).exists():
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.01)


def rows(folder: Path, kind: str = "") -> list[dict[str, Any]]:
    """Metrics with the key `kind`, without those that tell the time."""
    found = [row for row in read_metrics(folder / METRICS) if not kind or kind in row]
    return [{key: value for key, value in row.items() if key != "tokens_per_s"} for row in found]


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_tensors(open_checkpoint(folder).weights)


def assert_same_weights(one: Path, other: Path) -> None:
    a, b = final_weights(one), final_weights(other)
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.long
@pytest.mark.parametrize("cell", ["attention", "ssru"])
def test_learns_to_copy(cell: str, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    model = {**NO_DROPOUT, "d_model": 64, "d_ff": 64, "heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    model["decoder_cell"] = cell
    sets = [f"model.{key}={value}" for key, value in model.items()]
    sets += ["train.lr=0.005", "train.warmup=60", "train.valid_every=70", "train.average=3", "train.bleu_sentences=20"]
    options = ["--task", "copy", "--batch-tokens", "384", "--updates", "350", "--seed", "1", "--json"]
    process = launch("train", "--out", folder, *options, *(x for s in sets for x in ("--set", s)))
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    figures = json.loads(out)
    assert figures["exact_match"] >= 0.9
    assert figures["update"] == 350 and figures["averaged"] == 3
    assert [row["update"] for row in rows(folder, "loss")] == [50, 100, 150, 200, 250, 300, 350]
    assert [row["update"] for row in rows(folder, "chrf")] == [70, 140, 210, 280, 350, 350]
    assert np.std(imread(folder / "metrics.png")) > 0
    checkpoint = open_checkpoint(folder)
    assert checkpoint.weights.name == "average.safetensors"
    assert checkpoint.load_model().config.d_model == 64


@pytest.mark.long
def test_a_killed_and_resumed_run_gives_the_weights_of_an_uninterrupted_one(data: DataConfig, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    settings = {"updates": 150, "valid_every": 10, "average": 3}
    start(whole, data, **settings).run()

    process = launch(*arguments(broken, data, **settings))
    wait_for_save(broken, process)
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    resume(broken).run()
    assert_same_weights(whole, broken)
    assert rows(broken, "valid_loss") == rows(whole, "valid_loss")
    assert [row["update"] for row in rows(broken)] == [row["update"] for row in rows(whole)]


INTERRUPTED = """
import signal, sys
from tformer_deploy.cli import main
from tformer_deploy.train import metrics
from tformer_deploy.train.loop import Trainer

train_update, update = Trainer.train_update, int(sys.argv.pop(1))

def interrupted(trainer, batches):
    if trainer.progress.update == update:
        signal.raise_signal(signal.SIGINT)
    return train_update(trainer, batches)

Trainer.train_update = interrupted
metrics.plot = lambda metrics, image: None
main()
"""


def interrupt(
    folder: Path, data: DataConfig, update: int, settings: Mapping[str, Any], teacher: str | Path = ""
) -> str:
    """Train by the real command, in a process of its own, with Ctrl-C at an update; returns what it said."""
    words = arguments(folder, data, teacher=teacher, **settings)
    command = [sys.executable, "-c", INTERRUPTED, str(update), *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 130, done.stderr
    assert open_checkpoint(folder).header["training"]["update"] == update
    return done.stderr


@pytest.mark.parametrize("update", [7, 20, 63])
def test_an_interrupt_at_any_update_leaves_no_trace(data: DataConfig, tmp_path: Path, update: int) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    settings = {"updates": 70, "valid_every": 20, "average": 2}
    start(whole, data, **settings).run()
    said = interrupt(broken, data, update, settings)
    resume(broken).run()
    assert f"update {update} saved; go on with: tformer train --out {broken} --resume\n" in said
    assert_same_weights(whole, broken)
    assert rows(broken, "valid_loss") == rows(whole, "valid_loss")
    assert snapshot(broken / "weights") == snapshot(whole / "weights")


@pytest.mark.parametrize(
    ("update", "averaged", "valid_every", "words"),
    [
        (20, False, 20, "update 20 saved; go on with: "),
        (50, False, 20, "all 50 updates are made and saved, not yet validated and averaged; go on with: "),
        (50, False, 60, "all 50 updates are made and saved, not yet validated and averaged; go on with: "),
        (50, True, 20, "only its last validation was stopped; repeat it with: "),
    ],
)
def test_a_validation_is_stopped_between_its_batches_and_made_again(
    update: int,
    averaged: bool,
    valid_every: int,
    words: str,
    data: DataConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The resumed run is stopped in the same validation once more."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    settings = {"updates": 50, "valid_every": valid_every, "average": 2, "bleu_sentences": 8}
    monkeypatch.setattr("tformer_deploy.train.translating.PORTION", 2)
    figures = start(whole, data, **settings).run()
    trainer, translated = start(broken, data, **settings), list[int]()
    translate = Translator.translate

    def interrupted(translator: Translator, lines: list[str]) -> list[Result]:
        if trainer.progress.update == update and averaged is (broken / AVERAGE).exists():
            signal.raise_signal(signal.SIGTERM)
            translated.append(len(lines))
        return translate(translator, lines)

    with monkeypatch.context() as patch:
        patch.setattr(Translator, "translate", interrupted)
        for stops in (1, 2):
            with pytest.raises(Interrupted) as stopped:
                trainer.run()
            assert str(stopped.value).endswith(f"{words}tformer train --out {broken} --resume")
            assert translated == [2] * stops
            validated = [row["update"] for row in rows(broken, "chrf")] if (broken / METRICS).exists() else []
            assert validated == [*range(valid_every, 50, valid_every), 50][: (update - 1) // valid_every + averaged]
            assert "stopping; the work is saved first\n" in capsys.readouterr().err
            if averaged:
                assert_same_weights(whole, broken)
            trainer = resume(broken)
    assert trainer.run() == figures
    assert rows(broken, "valid_loss") == rows(whole, "valid_loss")
    assert snapshot(broken / "weights") == snapshot(whole / "weights")


def test_only_the_last_validation_is_left_out_where_a_signal_comes_before_it(data: DataConfig, tmp_path: Path) -> None:
    """The average is made, which takes no time."""
    trainer = start(tmp_path / "run", data, updates=4, valid_every=4)
    save = trainer.save

    def interrupted() -> None:
        save()
        signal.raise_signal(signal.SIGINT)

    trainer.save = interrupted  # type: ignore[method-assign]
    with pytest.raises(Interrupted, match="run is trained, its weights are saved: only its last validation was"):
        trainer.run()
    assert open_checkpoint(tmp_path / "run").weights == tmp_path / "run" / AVERAGE


@pytest.mark.parametrize("update", [7, 20, 33])
def test_a_run_can_end_where_it_was_interrupted(data: DataConfig, tmp_path: Path, update: int) -> None:
    """Before the first validation, at it, and between two: as a run of so many updates."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    settings = {"valid_every": 20, "average": 2}
    figures = start(whole, data, updates=update, **settings).run()
    interrupt(broken, data, update, {"updates": 70, **settings})
    assert resume(broken, updates=update).run() == figures
    assert rows(broken, "valid_loss") == rows(whole, "valid_loss")
    assert snapshot(broken / "weights") == snapshot(whole / "weights")


@pytest.mark.long
def test_two_processes_end_where_one_was_interrupted(data: DataConfig, tmp_path: Path) -> None:
    interrupt(tmp_path, data, 7, {"updates": 70})
    process = launch("train", "--out", tmp_path, "--resume", "--updates", "7", module=TORCHRUN)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert err.count("processes: 1 so far, now 2: an update has 2/1 of the sentences\n") == 1
    kept = sorted(path.name for path in (tmp_path / "weights").iterdir())
    assert kept == ["average.safetensors", "step-0000007.safetensors"]


def test_logged_losses_survive_an_interrupt(data: DataConfig, tmp_path: Path) -> None:
    """Each is a mean over many updates, of which some were before the interrupt."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    start(whole, data, updates=50).run()
    interrupt(broken, data, 7, {"updates": 50})
    resume(broken).run()
    assert rows(broken, "loss") == rows(whole, "loss")


def test_a_run_killed_twice_can_be_resumed(data: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first kill falls between the weights of update 10 and their state, the second before the next save."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    start(whole, data, updates=10, valid_every=5).run()
    trainer = start(broken, data, updates=10, valid_every=5)
    save_state = trainer.save_state
    monkeypatch.setattr(trainer, "save_state", lambda: save_state() if trainer.progress.update < 10 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run()
    assert resume(broken).progress.update == 5
    resume(broken).run()
    assert_same_weights(whole, broken)


def test_resuming_a_finished_run_changes_nothing(data: DataConfig, tmp_path: Path) -> None:
    figures = start(tmp_path, data, updates=10, valid_every=5).run()
    before, metrics = snapshot(tmp_path / "weights"), rows(tmp_path)
    assert resume(tmp_path).run() == figures
    assert snapshot(tmp_path / "weights") == before
    assert rows(tmp_path) == metrics


def test_a_finished_run_can_be_lengthened(data: DataConfig, tmp_path: Path) -> None:
    start(tmp_path / "whole", data, updates=20, valid_every=5, average=2).run()
    start(tmp_path / "longer", data, updates=10, valid_every=5, average=2).run()
    resume(tmp_path / "longer", updates=20).run()
    assert_same_weights(tmp_path / "whole", tmp_path / "longer")


def test_final_weights_are_the_mean_of_the_last_saved_steps(data: DataConfig, tmp_path: Path) -> None:
    figures = start(tmp_path, data, updates=12, valid_every=3, average=2).run()
    assert figures["averaged"] == 2
    kept = sorted(path.name for path in (tmp_path / "weights").iterdir())
    assert kept == ["average.safetensors", "step-0000009.safetensors", "step-0000012.safetensors"]
    one, other = (load_tensors(tmp_path / "weights" / name) for name in kept[1:])
    assert any(not torch.equal(one[name], other[name]) for name in one)
    for name, mean in final_weights(tmp_path).items():
        torch.testing.assert_close(mean, (one[name] + other[name]) / 2)
    model = open_checkpoint(tmp_path).load_model()
    assert all(torch.equal(parameter, final_weights(tmp_path)[name]) for name, parameter in model.named_parameters())


def test_training_stops_when_validation_grows_worse(data: DataConfig, tmp_path: Path) -> None:
    figures = start(tmp_path, data, updates=200, valid_every=2, patience=3, lr=1.0).run()
    losses = [row["valid_loss"] for row in rows(tmp_path, "valid_loss")][:-1]
    best = losses.index(min(losses))
    assert best == len(losses) - 4
    assert figures["update"] == 2 * len(losses) < 200


def test_the_seed_decides_everything(data: DataConfig, tmp_path: Path) -> None:
    for name, seed in (("one", 1), ("again", 1), ("two", 2)):
        start(tmp_path / name, data, updates=3, seed=seed).run()
    assert_same_weights(tmp_path / "one", tmp_path / "again")
    with pytest.raises(AssertionError):
        assert_same_weights(tmp_path / "one", tmp_path / "two")


def test_learning_rate_grows_linearly_and_decays_with_the_root() -> None:
    settings = TrainConfig(lr=0.002, warmup=100)
    assert learning_rate(1, settings) == pytest.approx(0.00002)
    assert learning_rate(50, settings) == pytest.approx(0.001)
    assert learning_rate(100, settings) == pytest.approx(0.002)
    assert learning_rate(400, settings) == pytest.approx(0.001)
    assert learning_rate(10_000, settings) == pytest.approx(0.0002)
    cooled = TrainConfig(lr=0.002, warmup=100, updates=400, cooldown=100)
    assert learning_rate(300, cooled) == learning_rate(300, settings)
    assert learning_rate(351, cooled) == pytest.approx(learning_rate(351, settings) / 2)
    assert learning_rate(400, cooled) == pytest.approx(0.001 / 100)


def test_bf16_runs_near_fp32(data: DataConfig, tmp_path: Path) -> None:
    losses = {}
    for precision in ("fp32", "bf16"):
        figures = start(tmp_path / precision, data, model=NO_DROPOUT, updates=5, precision=precision).run()
        losses[precision] = figures["valid_loss"]
    assert math.isfinite(losses["bf16"])
    assert losses["bf16"] != losses["fp32"]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.02)
    assert {tensor.dtype for tensor in final_weights(tmp_path / "bf16").values()} == {torch.float32}


def assert_close_weights(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], atol: float) -> None:
    """All but the biases of keys: attention does not depend on them, so Adam moves them by rounding errors alone."""
    for name in one:
        if not name.endswith("key.bias"):
            torch.testing.assert_close(one[name], other[name], rtol=0, atol=atol, msg=lambda m, name=name: name + m)


def test_two_micro_batches_equal_one_batch_of_both(data: DataConfig, tmp_path: Path) -> None:
    two = start(tmp_path, data, model=NO_DROPOUT, accumulate=2)
    one = start(tmp_path, data, model=NO_DROPOUT)
    for update in range(1, 5):
        one.progress.update = two.progress.update = update
        halves = [np.arange(update, update + 7), np.arange(100, 120)]
        a, b = two.train_update(iter(halves)), one.train_update(iter([np.concatenate(halves)]))
        assert a["tokens"] == b["tokens"]
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
    assert_close_weights(dict(two.model.named_parameters()), dict(one.model.named_parameters()), atol=1e-4)


@pytest.mark.long
def test_two_processes_equal_one_that_accumulates(data: DataConfig, tmp_path: Path) -> None:
    settings = {"updates": 50, "valid_every": 25, "average": 2, "lr": 0.003}
    process = launch(*arguments(tmp_path / "two", data, model=NO_DROPOUT, **settings), module=TORCHRUN)
    start(tmp_path / "one", data, model=NO_DROPOUT, accumulate=2, **settings).run()
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert len(out.splitlines()) == 1, "only process 0 reports"
    for kind in ("loss", "valid_loss"):
        one, two = rows(tmp_path / "one", kind), rows(tmp_path / "two", kind)
        assert [row["update"] for row in two] == [row["update"] for row in one]
        assert [row[kind] for row in two] == pytest.approx([row[kind] for row in one], rel=1e-4)
    assert_close_weights(final_weights(tmp_path / "one"), final_weights(tmp_path / "two"), atol=2e-3)


@pytest.mark.parametrize(
    "option", [["--task", "copy"], ["--preset", "tiny"], ["--set", "train.seed=2"], ["--force"], ["--seed", "1"]]
)
def test_resume_refuses_other_data_and_settings(
    data: DataConfig,
    tmp_path: Path,
    option: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    start(tmp_path, data, updates=2).run()
    before = snapshot(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tformer", "train", "--out", str(tmp_path), "--resume", *option])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 1
    assert "--resume takes everything but --updates from the run" in capsys.readouterr().err
    assert snapshot(tmp_path) == before


def test_resume_cannot_undo_updates(data: DataConfig, tmp_path: Path) -> None:
    start(tmp_path, data, updates=4).run()
    with pytest.raises(ConfigError, match="has made 4 already"):
        resume(tmp_path, updates=3)


def test_resume_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="nothing saved to continue from: leave out --resume"):
        resume(tmp_path)


def test_a_run_is_replaced_only_by_force(data: DataConfig, tmp_path: Path) -> None:
    start(tmp_path, data, updates=4, valid_every=2).run()
    before = snapshot(tmp_path)
    with pytest.raises(ArtifactError, match="holds a run already: add --resume to continue it or --force"):
        start(tmp_path, data, updates=3)
    assert snapshot(tmp_path) == before
    start(tmp_path, data, force=True, updates=3).run()
    assert [path.name for path in sorted((tmp_path / "weights").glob("step-*"))] == ["step-0000003.safetensors"]
    assert {row["update"] for row in rows(tmp_path)} == {3}
    assert open_checkpoint(tmp_path).header["training"]["settings"]["updates"] == 3


@pytest.mark.parametrize("wrong", [{"src": "missing.txt"}, {"max_tokens": 1}])
def test_force_with_a_mistake_keeps_the_old_run(data: DataConfig, tmp_path: Path, wrong: dict[str, Any]) -> None:
    start(tmp_path, data, updates=2).run()
    before = snapshot(tmp_path)
    other = DataConfig(wrong["src"], data.tgt, data.valid_src, data.valid_tgt) if "src" in wrong else data
    with pytest.raises(DataError):
        start(tmp_path, other, force=True, **{key: value for key, value in wrong.items() if key != "src"})
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("force", [False, True])
def test_files_that_are_not_of_a_run_stay(data: DataConfig, tmp_path: Path, force: bool) -> None:
    for name in ("train/corpus.txt", "weights/notes.txt", "weights/other.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    before = snapshot(tmp_path)
    start(tmp_path, data, updates=2, force=force)
    assert snapshot(tmp_path) == before


def test_a_vocabulary_padded_beyond_the_tokenizer_trains(data: DataConfig, tmp_path: Path) -> None:
    """Untrained models may produce ids that stand for no text."""
    padded = {"src_vocab": 512, "tgt_vocab": 512}
    assert start(tmp_path, data, model=padded, updates=1, bleu_sentences=8).run()["exact_match"] == 0


def test_a_validation_line_longer_than_the_model_does_not_end_training(data: DataConfig, tmp_path: Path) -> None:
    longer = [str(tmp_path / f"valid.{side}") for side in SIDES]
    for path, short in zip(longer, (data.valid_src, data.valid_tgt), strict=True):
        Path(path).write_text(Path(short).read_text() + "abc " * 60 + "\n")
    figures = start(tmp_path / "run", DataConfig(data.src, data.tgt, *longer), updates=2, bleu_sentences=20).run()
    assert math.isfinite(figures["bleu"])


@pytest.mark.parametrize("redirect", long_but(["2>/dev/full >out", "2>&- >out", "2>&1 >out | head -1"], "2>&- >out"))
def test_nothing_depends_on_standard_error(redirect: str, data: DataConfig, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tformer_deploy", *map(str, arguments(tmp_path / "run", data, updates=4))]
    script = f"set -o pipefail; cd {tmp_path}; {shlex.join(words)} {redirect}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(["bash", "-c", script], capture_output=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert open_checkpoint(tmp_path / "run").weights.name == "average.safetensors"


def test_an_update_is_that_of_plain_pytorch(data: DataConfig, tmp_path: Path) -> None:
    """Sentence by sentence, without padding: loss with smoothing, tokens, gradient and its clipping."""
    smooth, clip = 0.2, 0.05
    trainer = start(tmp_path, data, model=NO_DROPOUT, updates=1, label_smoothing=smooth, clip_norm=clip)
    chosen = trainer.train_set.plan(trainer.settings.batch_tokens, 1, 0)[0]
    plain, tokens, loss = copy.deepcopy(trainer.model), 0, torch.zeros(())
    for i in chosen:
        src, lengths, tgt_in, tgt_out = dataclasses.astuple(trainer.batch(trainer.train_set, [i]))
        scores = plain(*map(torch.from_numpy, (src, lengths, tgt_in)))[0].log_softmax(-1)
        loss = loss - (1 - smooth) * scores[range(tgt_out.size), tgt_out[0]].sum() - smooth * scores.mean(-1).sum()
        tokens += tgt_out.size
    (loss / tokens).backward()
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    norm = math.sqrt(sum(float(each.square().sum()) for each in gradients.values()))
    trainer.progress.update = 1
    found = trainer.train_update(iter([chosen]))
    assert found["tokens"] == tokens and norm > clip
    assert (found["loss"], found["grad_norm"]) == pytest.approx((loss.item() / tokens, norm), rel=1e-5)
    for name, parameter in trainer.model.named_parameters():
        moment = trainer.optimizer.state[parameter]["exp_avg"]  # a tenth of what the optimizer saw
        torch.testing.assert_close(moment, 0.1 * clip / norm * gradients[name], rtol=1e-4, atol=1e-8)


def test_a_validations_figures_are_those_of_the_saved_weights(data: DataConfig, tmp_path: Path) -> None:
    """Its loss without smoothing and dropout; its scores those of the text that the checkpoint gives."""
    (tmp_path / "other.tgt").write_text("abc fed abc fed\n" * 8)  # else as many characters as the sources
    data = dataclasses.replace(data, valid_tgt=str(tmp_path / "other.tgt"))
    trainer = start(tmp_path, data, updates=40, label_smoothing=0.3, average=1)
    figures, saved, loss, tokens = trainer.run(), open_checkpoint(tmp_path), 0.0, 0
    model, text = saved.load_model().eval(), trainer.valid_text
    for i in range(len(text.src)):
        src, lengths, tgt_in, tgt_out = dataclasses.astuple(trainer.batch(trainer.valid_set, [i]))
        with torch.no_grad():
            scores = model(*map(torch.from_numpy, (src, lengths, tgt_in)))[0].log_softmax(-1)
        loss -= float(scores[range(tgt_out.size), tgt_out[0]].sum())
        tokens += tgt_out.size
    with Translator(EagerEngine(model), saved.tokenizers) as translator:
        made = [result.text for result in translator.translate(text.src)]
    assert figures["valid_loss"] == pytest.approx(loss / tokens, rel=1e-5)
    assert (figures["bleu"], figures["chrf"]) == (corpus_bleu(made, text.tgt), corpus_chrf(made, text.tgt))
    assert figures["chrf"] not in (0, corpus_chrf(made, text.src))


def test_speed_is_tokens_per_second(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / METRICS)
    for update, tokens in ((1, 300), (2, 100)):
        figures = {"update": update, "epoch": 0, "loss": 2.0, "lr": 0.1, "grad_norm": 1.0}
        metrics.train({**figures, "tokens": tokens, "seconds": 0.5}, every=2, updates=9, validations={})
    assert [row["tokens_per_s"] for row in read_metrics(tmp_path / METRICS)] == [400]


def test_it_says_what_begins_and_goes_on_from_the_first_update(
    data: DataConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = start(tmp_path, data, updates=7, valid_every=4, bleu_sentences=2, warmup=8)
    trainer.run()
    lines = capsys.readouterr().err.splitlines()
    count = sum(each.numel() for each in trainer.model.parameters())
    assert lines[:5] == [
        "200 pairs read: learning a vocabulary",
        "splitting 208 pairs into tokens",
        f"training on cpu, 1 threads: {count:,} parameters, 200 pairs, updates 1 to 7 of up to 128 padded tokens",
        "train.warmup=8 of 7 updates: the learning rate does not reach train.lr=0.01 before the end: start with "
        "--set train.warmup=1",
        next(line for line in lines if line.startswith("update 1/7  epoch 0  loss ") and line.endswith(" left")),
    ]
    assert sum(line.startswith("update 4") for line in lines) == 1, "only what is slow is said"
    resume(tmp_path).run()
    assert "training on" not in capsys.readouterr().err


def test_updates_that_are_slow_are_said_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(0, 100000, 4))
    monkeypatch.setattr("tformer_deploy.train.metrics.time.perf_counter", lambda: next(clock) / 2)
    metrics = Metrics(Path("nowhere"))
    metrics.begin(0, "begun")
    for update in range(1, 11):
        figures = {"update": update, "epoch": 0, "loss": 2.0, "lr": 0.1, "grad_norm": 1.0, "tokens": 9, "seconds": 0.5}
        metrics.train(figures, every=50, updates=1000, validations={})
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "begun" and [line.split("/")[0] for line in said[1:]] == [
        "update 1",
        "update 4",
        "update 7",
        "update 10",
    ]


def test_the_time_that_is_left_counts_validations(
    data: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a clock on which an update takes 10 s, a pair's loss 1 s and a line's translation 100 s; 8 are translated."""
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)

    def slow(owner: type, name: str, seconds: Callable[..., float]) -> None:
        work = getattr(owner, name)

        def worked(self: Any, *arguments: Any) -> Any:
            nonlocal now
            now += seconds(*arguments)
            return work(self, *arguments)

        monkeypatch.setattr(owner, name, worked)

    slow(Translator, "translate", lambda lines: 100 * len(lines))
    slow(Trainer, "batch", lambda corpus, indices: len(indices) if len(corpus.src) == 8 else 10)
    start(tmp_path, data, updates=7, valid_every=4, bleu_sentences=3).run()
    found = re.findall(r"update (\d)/7 .*  (\S+)( and validation)? left$", capsys.readouterr().err, re.M)
    assert [each[0] for each in found] == [str(update) for update in range(1, 8)]
    for update, left, unknown in found:
        validations = 2 if int(update) <= 4 else 1  # after updates 4 and 7, then that of the average
        seconds = 10 * (7 - int(update))
        if int(update) > 4:
            seconds += validations * 300 + 800 + (validations + 1) * 8
        assert (left, bool(unknown)) == (str(timedelta(seconds=seconds)), int(update) <= 4), update


def test_a_learning_rate_that_is_never_reached_is_said() -> None:
    """Or in the last update only."""
    for updates, warmup, cooldown in product((1, 2, 5, 40), (1, 2, 4, 5, 39, 40, 41), (0, 1, 2, 20, 36, 37, 40)):
        settings = TrainConfig(updates=updates, warmup=warmup, cooldown=cooldown)
        rates = [learning_rate(update, settings) for update in range(1, updates + 1)]
        reached = max(rates[:-1] if warmup == updates > 1 else rates) >= settings.lr
        said = never_at_full_rate(settings)
        assert bool(said) is not reached, settings
        if said and cooldown < 2:
            mended = dataclasses.replace(settings, warmup=int(said.split("=")[-1]))
            assert not never_at_full_rate(mended)


def test_weights_that_are_no_numbers_are_never_saved(data: DataConfig, tmp_path: Path) -> None:
    """A gradient may be too large where the loss before it was not."""
    with pytest.raises(TrainingError, match=r"the gradient is (nan|inf) at update 2: lower train.lr"):
        start(tmp_path, data, updates=8, valid_every=1, average=2, lr=4.3e8, warmup=1000).run()
    for path in tmp_path.glob("*/*.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_tensors(path).values()), path
    with pytest.raises(TrainingError, match=r"the validation loss is nan at update 1: lower train.lr"):
        start(tmp_path / "last", data, updates=1, lr=1e30, warmup=1).run()
    assert not (tmp_path / "last/checkpoint.json").exists()


def test_init_over_a_run_leaves_nothing_to_resume(data: DataConfig, tmp_path: Path) -> None:
    start(tmp_path, data, updates=2).run()
    init_checkpoint(tmp_path, "tiny", VOCAB, 1, SMALL, force=True)
    with pytest.raises(ArtifactError, match="has nothing saved to continue from"):
        resume(tmp_path, updates=4)
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["random.safetensors"]


def test_a_run_over_an_imported_one_leaves_nothing_of_it(tmp_path: Path) -> None:
    run, _ = imported(CASES["pytorch-seq2seq"], tmp_path)
    assert (run / "weights/imported.safetensors").exists()
    init_checkpoint(run, "tiny", VOCAB, 1, SMALL, force=True)
    assert [path.name for path in (run / "weights").iterdir()] == ["random.safetensors"]


def test_the_plot_is_replaced_not_overwritten(tmp_path: Path) -> None:
    metrics, image = tmp_path / "metrics.jsonl", tmp_path / "metrics.png"
    metrics.write_text('{"update": 1, "loss": 2.0}\n')
    image.write_bytes(b"older")
    os.link(image, tmp_path / "read by somebody")
    plot(metrics, image)
    assert imread(image).ndim == 3 and (tmp_path / "read by somebody").read_bytes() == b"older"


def test_more_updates_after_patience_has_ended(data: DataConfig, tmp_path: Path) -> None:
    patient = start(tmp_path, data, updates=200, valid_every=2, patience=3, lr=1.0)
    patient.run()
    ended = patient.progress.update
    assert ended < 200
    longer = resume(tmp_path, updates=300)
    longer.run()
    assert ended < longer.progress.update < 300


@pytest.mark.parametrize(
    ("model", "words"),
    [({"module_parameters": 5}, "is of modules of your own"), ({"src_vocab": 41}, "needs equal vocabularies")],
)
def test_what_no_run_can_have_is_refused(data: DataConfig, model: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        start(tmp_path / "run", data, model=model)
    assert not (tmp_path / "run").exists()


def test_two_vocabularies_share_no_rows(data: DataConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="share_embeddings=all needs one vocabulary for both"):
        start_run(tmp_path, data, RunSettings("tiny", "words", 20, {**SMALL, "share_embeddings": "all"}, QUICK))


def test_any_entry_can_start(data: DataConfig, tmp_path: Path) -> None:
    assert start(tmp_path, data, model={"start_id": 7}).model.config.start_id == 7


def test_relative_sizes_that_nothing_uses_are_not_looked_at() -> None:
    Transformer(ModelConfig(8, 8, d_model=8, heads=2, d_ff=8, relative_buckets=1))


def test_processes_wait_for_a_long_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of process 0, longer than the 30 minutes that are usual."""
    given: dict[str, Any] = {}
    monkeypatch.setattr("torch.distributed.init_process_group", lambda backend, **options: given.update(options))
    for name in ("barrier", "destroy_process_group"):
        monkeypatch.setattr(f"torch.distributed.{name}", lambda: None)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "0")
    with group_of_processes():
        assert given["timeout"].days == 1


def test_bleu_is_left_out_where_it_could_only_be_0() -> None:
    """References shorter than four words have no 4-gram."""
    assert text_figures(["zwei", "drei"], ["zwei", "vier"])["exact_match"] == 0.5
    assert text_figures(["zwei", "drei"], ["zwei", "vier"]).keys() == {"chrf", "exact_match"}
    four = ["ein Hund läuft schnell"]
    assert text_figures(four, four) == {"bleu": pytest.approx(100), "chrf": 100, "exact_match": 1}
