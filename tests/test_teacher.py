"""Learning from a teacher: the loss is its definition, students get nearer to it, and runs go on exactly."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tformer_deploy.base.errors import ArtifactError, ConfigError
from tformer_deploy.model.checkpoint import open_checkpoint, require_memory
from tformer_deploy.model.config import ModelConfig
from tformer_deploy.train.data import DataConfig
from tformer_deploy.train.loop import Trainer
from tformer_deploy.train.losses import twice
from tformer_deploy.train.run_files import read_state
from tformer_deploy.train.runs import RunSettings, start_run

from .command import failed_line, run_here
from .import_cases import CASES, imported
from .test_train import (  # noqa: F401
    NO_DROPOUT,
    QUICK,
    SMALL,
    TORCHRUN,
    VOCAB,
    arguments,
    assert_same_weights,
    data,
    interrupt,
    launch,
    one_thread_and_no_plots,
    resume,
    rows,
    snapshot,
    start,
)

WIDER = {**NO_DROPOUT, "d_model": 32, "d_ff": 64, "decoder_layers": 2}


@pytest.fixture(scope="module")
def teacher(data: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """A run of a larger model than the students'; smoothed so much that without it none gets near."""
    folder = tmp_path_factory.mktemp("teacher") / "run"
    start(folder, data, model=WIDER, updates=120, valid_every=120, average=1, label_smoothing=0.5).run()
    return folder


def taught(
    folder: Path,
    data: DataConfig,  # noqa: F811
    teacher: Path,
    model: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Trainer:
    """A run of the small model with a teacher."""
    return start_run(
        folder, data, RunSettings("tiny", "", VOCAB, {**SMALL, **(model or {})}, {**QUICK, **settings}, teacher)
    )


def without_padding(trainer: Trainer, batch: Any, model: Any) -> list[np.ndarray]:
    """Log-probabilities of each target position of each row, in doubles."""
    inputs = (torch.from_numpy(each) for each in (batch.src_ids, batch.src_lengths, batch.tgt_in))
    logits, kept = model(*inputs).double().numpy(force=True), batch.tgt_out != trainer.model.config.pad_id
    return [logits[row, position] for row, position in zip(*np.nonzero(kept), strict=True)]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


@pytest.mark.parametrize(("weight", "temperature", "rdrop"), [(0.3, 1.0, 0.0), (0.5, 2.5, 0.0), (1.0, 2.0, 1.5)])
def test_the_loss_is_its_closed_form(
    data: DataConfig,  # noqa: F811
    teacher: Path,
    tmp_path: Path,
    weight: float,
    temperature: float,
    rdrop: float,
) -> None:
    model = {"dropout": 0.3} if rdrop else NO_DROPOUT
    how = {"teacher_weight": weight, "teacher_temperature": temperature}
    trainer = taught(tmp_path, data, teacher, model, **how)
    batch = trainer.batch(trainer.train_set, trainer.train_set.plan(200, 1, 0)[0])
    assert (batch.tgt_out == trainer.model.config.pad_id).any()
    trainer.model.train()
    losses = []
    for each in (None, trainer.teacher):
        torch.manual_seed(5)
        losses.append(trainer.loss(batch, 0.1, rdrop, each).item())
    torch.manual_seed(5)
    read = twice(batch) if rdrop else batch
    students = without_padding(trainer, read, trainer.model)
    teachers = without_padding(trainer, read, open_checkpoint(teacher).load_model())
    assert len(students) == len(teachers) > 20
    expected = 0.0
    for student, one in zip(students, teachers, strict=True):
        expected -= (np.exp(log_softmax(one / temperature)) * log_softmax(student / temperature)).sum()
    expected *= temperature**2 / (2 if rdrop else 1)
    assert losses[1] == pytest.approx((1 - weight) * losses[0] + weight * expected, rel=1e-5)
    assert losses[1] != pytest.approx(losses[0], rel=1e-3)


def test_gradients_reach_the_student_alone(data: DataConfig, teacher: Path, tmp_path: Path) -> None:  # noqa: F811
    trainer = taught(tmp_path, data, teacher, updates=3, teacher_weight=1.0)
    assert trainer.teacher
    before = {name: each.clone() for name, each in trainer.teacher.model.state_dict().items()}
    trainer.run()
    assert not trainer.teacher.model.training and trainer.model.config.d_model != trainer.teacher.model.config.d_model
    assert all(each.grad is None and not each.requires_grad for each in trainer.teacher.model.parameters())
    assert all(torch.equal(before[name], each) for name, each in trainer.teacher.model.state_dict().items())


def divergence(trainer: Trainer, teacher: Path) -> float:
    """KL(teacher, student) per target token of the validation text."""
    trainer.model.eval()
    batch = trainer.batch(trainer.valid_set, np.arange(len(trainer.valid_set.src)))
    students = without_padding(trainer, batch, trainer.model)
    teachers = without_padding(trainer, batch, open_checkpoint(teacher).load_model())
    pairs = [(log_softmax(one), log_softmax(other)) for one, other in zip(teachers, students, strict=True)]
    return float(np.mean([(np.exp(one) * (one - other)).sum() for one, other in pairs]))


def test_a_student_gets_nearer_to_its_teacher(data: DataConfig, teacher: Path, tmp_path: Path) -> None:  # noqa: F811
    settings = {"updates": 60, "valid_every": 60, "average": 1}
    alone = start(tmp_path / "alone", data, model=WIDER, **settings)
    student = taught(tmp_path / "student", data, teacher, WIDER, teacher_weight=1.0, **settings)
    before = divergence(student, teacher)
    alone.run()
    figures = student.run()
    found = divergence(student, teacher), divergence(alone, teacher)
    assert found[0] < 0.7 * found[1] and found[0] < before / 2, (found, before)
    student.teacher = None
    assert student.validate(0)["valid_loss"] == figures["valid_loss"], "validation is that of any run"


def test_without_weight_a_teacher_changes_nothing(data: DataConfig, teacher: Path, tmp_path: Path) -> None:  # noqa: F811
    """The vocabulary is learned from the same text."""
    settings = {"updates": 12, "valid_every": 6, "rdrop": 1.0, "src_sampling": 0.1}
    figures = start(tmp_path / "alone", data, **settings).run()
    assert taught(tmp_path / "taught", data, teacher, teacher_weight=0.0, **settings).run() == figures
    assert_same_weights(tmp_path / "alone", tmp_path / "taught")
    assert rows(tmp_path / "alone") == rows(tmp_path / "taught")


@pytest.mark.parametrize(
    "settings",
    [{}, {"teacher_temperature": 2.0, "accumulate": 2, "src_sampling": 0.2, "rdrop": 1.0, "ema": 0.8, "keep": "loss"}],
    ids=["alone", "with others"],
)
def test_a_resumed_run_is_exact(
    data: DataConfig,  # noqa: F811
    teacher: Path,
    tmp_path: Path,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that is begun with a relative path goes on from another folder."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    settings = {"updates": 30, "valid_every": 12, "average": 2, **settings}
    figures = taught(whole, data, teacher, **settings).run()
    monkeypatch.chdir(teacher.parent)
    interrupt(broken, data, 7, settings, teacher.name)
    monkeypatch.chdir(tmp_path)
    assert resume(broken).run() == figures
    assert rows(broken) == rows(whole)
    assert snapshot(broken / "weights") == snapshot(whole / "weights")
    kept = [open_checkpoint(folder).header["training"] for folder in (whole, broken)]
    state = read_state(whole)
    assert kept[0] == kept[1] and kept[0]["teacher"] == state["teacher"]
    assert state["teacher"] == {"run": str(teacher), "weights_sha256": open_checkpoint(teacher).weights_sha256}


def test_a_teacher_that_has_moved_or_changed(data: DataConfig, teacher: Path, tmp_path: Path) -> None:  # noqa: F811
    first, second, folder = tmp_path / "first", tmp_path / "second", tmp_path / "run"
    shutil.copytree(teacher, first)
    whole = taught(tmp_path / "whole", data, first, updates=4, valid_every=2).run()
    taught(folder, data, first, updates=2, valid_every=2).run()
    first.rename(second)
    again = ["train", "--out", folder, "--resume", "--updates", "4"]
    assert failed_line(run_here(*again)) == (
        f"error: the teacher of {folder} is not at {first}: bring it back, or say where it is by --teacher"
    )
    start(tmp_path / "other", data, model=WIDER, updates=1).run()
    for changed in (["--teacher", tmp_path / "other"], []):
        if not changed:
            shutil.copytree(tmp_path / "other", first)
        line = failed_line(run_here(*again, *changed))
        assert f"has other weights than the teacher of {folder} had: bring them back, or start over" in line
    done = run_here(*again, "--teacher", second, "--json")
    assert done.returncode == 0 and json.loads(done.stdout) == whole, done.stderr
    assert read_state(folder)["teacher"]["run"] == str(second)
    start(tmp_path / "alone", data, updates=1).run()
    line = failed_line(run_here("train", "--out", tmp_path / "alone", "--resume", "--teacher", second))
    assert line.endswith(f"--teacher {second}: the run in {tmp_path / 'alone'} began without one; leave it out")


def test_the_vocabulary_is_the_teachers(data: DataConfig, tmp_path: Path) -> None:  # noqa: F811
    """Words of another text and number than the student would learn."""
    folder = tmp_path / "teacher"
    run = RunSettings("tiny", "words", 14, SMALL, {**QUICK, "updates": 1})
    start_run(folder, DataConfig(task="copy"), run).run()
    taught(tmp_path / "run", data, folder, updates=1, max_tokens=40).run()
    one, other = open_checkpoint(folder), open_checkpoint(tmp_path / "run")
    assert one.tokenizer_hashes == other.tokenizer_hashes and other.config.tgt_vocab == 14


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--vocab-size", "50"], "--teacher gives the model its own vocabulary: leave out --vocab-size"),
        (["--tokenizer", "bpe"], "--teacher gives the model its own vocabulary: leave out --tokenizer"),
        (["--set", "model.tgt_vocab=50"], "model.tgt_vocab is what the model of --teacher has: leave it out"),
        (["--set", "model.start_id=5"], "model.start_id is what the model of --teacher has: leave it out"),
        (["--set", "train.teacher_weight=1.5"], "train.teacher_weight=1.5: must be from 0 to 1"),
        (["--set", "train.teacher_temperature=0"], "train.teacher_temperature=0.0: must be above 0"),
    ],
)
def test_what_the_teacher_decides_is_refused(
    data: DataConfig,  # noqa: F811
    teacher: Path,
    tmp_path: Path,
    options: list[str],
    words: str,
) -> None:
    files = ["--src", data.src, "--tgt", data.tgt, "--valid-src", data.valid_src, "--valid-tgt", data.valid_tgt]
    line = failed_line(run_here("train", "--out", tmp_path / "run", "--teacher", teacher, *files, *options))
    assert line == f"error: {words}" and not (tmp_path / "run").exists()


def test_what_cannot_be_taught_is_refused(data: DataConfig, teacher: Path, tmp_path: Path) -> None:  # noqa: F811
    with pytest.raises(ConfigError, match="teacher_weight needs a model to learn from: add --teacher RUN"):
        start(tmp_path / "run", data, teacher_weight=0.5)
    with pytest.raises(ConfigError, match=r"reads 48 tokens, and lines of 60 .* add --set train\.max_tokens=48"):
        taught(tmp_path / "run", data, teacher, {"max_positions": 60})
    with pytest.raises(ConfigError, match="is the folder that the run writes: name another with --out"):
        start_run(teacher, data, RunSettings("tiny", "", VOCAB, SMALL, QUICK, tmp_path / ".." / teacher), force=True)
    with pytest.raises(ArtifactError):
        taught(tmp_path / "run", data, tmp_path / "nowhere")
    assert not (tmp_path / "run").exists()


def test_an_imported_model_teaches(data: DataConfig, tmp_path: Path) -> None:  # noqa: F811
    """Its special ids are its student's, and two equal lists of words may share a table only if its own do."""
    run, _ = imported(CASES["pytorch-seq2seq"], tmp_path / "imported")
    trainer = taught(tmp_path / "run", data, run, {"max_positions": 20}, updates=2, max_tokens=20)
    config, teacher = trainer.model.config, open_checkpoint(run).config
    names = ("src_vocab", "tgt_vocab", "pad_id", "bos_id", "eos_id", "start_id")
    assert [getattr(config, name) for name in names] == [getattr(teacher, name) for name in names]
    assert config.share_embeddings == "decoder" and trainer.run()["valid_loss"] > 0
    with pytest.raises(ConfigError, match="src_sampling needs pieces of sentencepiece, which the given run has not"):
        taught(tmp_path / "other", data, run, {"max_positions": 20}, src_sampling=0.1)


def test_memory_counts_the_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    config, teacher = (ModelConfig(8, 8, d_model=width, heads=2, d_ff=8) for width in (8, 64))
    both = 4 * (4 * config.parameters + teacher.parameters + (8 + 64) * 512)
    for free in (both, both - 1):
        monkeypatch.setattr("tformer_deploy.base.machine.available_bytes", lambda free=free: free)
        require_memory(config, "training", 4)
        if free == both:
            require_memory(config, "training", 4, teacher)
    with pytest.raises(ConfigError, match=f"for {config.parameters:,} and {teacher.parameters:,} parameters"):
        require_memory(config, "training", 4, teacher)


def test_bf16_is_near_fp32(data: DataConfig, teacher: Path, tmp_path: Path) -> None:  # noqa: F811
    losses = {}
    for precision in ("fp32", "bf16"):
        trainer = taught(tmp_path / precision, data, teacher, NO_DROPOUT, precision=precision, teacher_weight=1.0)
        batch = trainer.batch(trainer.train_set, trainer.train_set.plan(200, 1, 0)[0])
        losses[precision] = trainer.loss(batch, 0.1, 0.0, trainer.teacher).item()
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.02) and losses["bf16"] != losses["fp32"]


@pytest.mark.long
def test_two_processes_give_what_one_gives(data: DataConfig, teacher: Path, tmp_path: Path) -> None:  # noqa: F811
    settings = {"updates": 20, "valid_every": 10, "average": 2, "lr": 0.003}
    process = launch(*arguments(tmp_path / "two", data, NO_DROPOUT, teacher, **settings), module=TORCHRUN)
    taught(tmp_path / "one", data, teacher, NO_DROPOUT, accumulate=2, **settings).run()
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    found = [[row["valid_loss"] for row in rows(tmp_path / name, "valid_loss")] for name in ("one", "two")]
    assert len(found[0]) == 3 and found[1] == pytest.approx(found[0], rel=1e-4)
