"""What a resumed run reads back: nothing that was harmed, edited or exchanged gets into the weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tformer_deploy.base.errors import ArtifactError
from tformer_deploy.base.files import sha256, write_json
from tformer_deploy.base.headers import digest
from tformer_deploy.model.checkpoint import load_tensors, open_checkpoint, save_tensors
from tformer_deploy.train.data import DataConfig
from tformer_deploy.train.loop import Trainer
from tformer_deploy.train.run_files import STATE
from tformer_deploy.train.runs import RunSettings, start_run

from .command import Done, failed_line, run_here

MODEL = {"d_model": 16, "d_ff": 16, "heads": 2, "encoder_layers": 1, "decoder_layers": 1}
SETTINGS = {"updates": 4, "valid_every": 2, "average": 2, "bleu_sentences": 0, "batch_tokens": 200}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, and a run on it that can go on. Read only."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "text").write_text("".join(f"w{i} w{i + 1} w{i + 2}\n" for i in range(40)))
    trainer(folder).run()
    return folder


def trainer(folder: Path) -> Trainer:
    sides = [str(folder / "text")] * 4
    run = RunSettings("tiny", "words", 60, MODEL, SETTINGS)
    return start_run(folder / "run", DataConfig(*sides, pair="xx-xx"), run)


@pytest.fixture
def folder(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy, in which paths of the text are the copy's."""
    shutil.copytree(saved, tmp_path / "copy")
    path = tmp_path / "copy/run" / STATE
    header = json.loads(path.read_text())
    header["data"] = {key: value.replace(str(saved), str(tmp_path / "copy")) for key, value in header["data"].items()}
    write_json(path, {**header, "sha256": digest(header)})
    return tmp_path / "copy"


def resume(folder: Path) -> Done:
    return run_here("train", "--out", folder / "run", "--resume", "--updates", 6)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def replace(old: str, new: str) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    return change


def test_it_goes_on(folder: Path) -> None:
    assert resume(folder).returncode == 0
    assert "train/state-0000006.safetensors" in run_here("inspect", folder / "run").stdout.decode()
    assert open_checkpoint(folder / "run").header["training"]["update"] == 6


@pytest.mark.parametrize(
    ("name", "harm", "words"),
    [
        ("run/train/state-0000004.safetensors", flip, "does not match its SHA-256"),
        ("run/train/state-0000004.safetensors", Path.unlink, "state-0000004.safetensors is missing"),
        ("run/weights/step-0000002.safetensors", flip, "does not match its SHA-256"),
        ("run/weights/step-0000004.safetensors", flip, "does not match its SHA-256"),
        ("run/weights/step-0000002.safetensors", Path.unlink, "step-0000002.safetensors is missing"),
        ("run/train/state.json", replace('"update": 4', '"update": 3'), "does not match its own SHA-256"),
        ("run/train/state.json", replace('"lr": 0.001', '"lr": 0.1'), "does not match its own SHA-256"),
        ("run/train/state.json", replace('"sha256"', '"sha257"'), "must contain ['sha256']"),
        ("run/train/state.json", lambda path: path.write_text("{"), "state.json is damaged"),
        ("run/train/state.json", lambda path: path.write_text("[" * 99999), "state.json is damaged"),
        ("text", replace("w7 w8 w9\n", "w7 w8 w8\n"), "the text that"),
        ("text", replace("w7 w8 w9\n", ""), "the text that"),
        ("run/checkpoint.json", replace('"heads": 2', '"heads": 4'), "does not match its own SHA-256"),
        ("run/checkpoint.json", replace('"norm_position": "pre"', '"norm_position": "post"'), "its own SHA-256"),
        ("run/checkpoint.json", replace('"eos_id": 3', '"eos_id": 2'), "does not match its own SHA-256"),
        ("run/tokenizer.words", flip, "tokenizer.words does not match its SHA-256"),
    ],
)
def test_what_was_harmed_is_refused(name: str, harm: Callable[[Path], object], words: str, folder: Path) -> None:
    harm(folder / name)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert words in failed_line(resume(folder))
    if name != "text":
        assert words in failed_line(run_here("inspect", folder / "run"))
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("change", ["shape", "type", "missing"])
@pytest.mark.parametrize("name", ["exp_avg", "step"])
def test_optimizer_states_that_do_not_fit(name: str, change: str, folder: Path) -> None:
    """The optimizer would read and write beyond them."""
    path, header = folder / "run/train/state-0000004.safetensors", folder / "run" / STATE
    tensors = load_tensors(path)
    key = next(each for each in tensors if each.startswith(f"{name}."))
    if change == "missing":
        del tensors[key]
    else:
        tensors[key] = torch.zeros(3) if change == "shape" else tensors[key].double()
    save_tensors(path, tensors)
    stored = json.loads(header.read_text())
    stored["files"]["train/state-0000004.safetensors"] = sha256(path)
    write_json(header, {**stored, "sha256": digest(stored)})
    line = failed_line(resume(folder))
    assert key in line and ("is missing" if change == "missing" else "does not fit its config") in line


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe\n", b'{"update": "x"}\n[1]\n{"loss": 3}\n7\n', b'{"update": 2, "loss": "high"}\n', b"[" * 99999],
)
def test_metrics_that_are_none_are_left_out(content: bytes, folder: Path) -> None:
    path = folder / "run/metrics.jsonl"
    path.write_bytes(content + path.read_bytes())
    assert resume(folder).returncode == 0
    assert [row["update"] for row in map(json.loads, path.read_text().splitlines()) if "averaged" in row] == [6]


def test_files_that_are_no_own_ones_stay(folder: Path) -> None:
    mine = [folder / "run/weights" / name for name in ("step-mine.safetensors", "other.safetensors", "step-1.txt")]
    for path in mine:
        path.write_text("mine")
    assert resume(folder).returncode == 0 and all(path.read_text() == "mine" for path in mine)


def test_steps_are_verified_before_they_are_averaged(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("".join(f"w{i} w{i + 1} w{i + 2}\n" for i in range(40)))
    run = trainer(tmp_path)
    run.run()
    flip(tmp_path / "run/weights/step-0000002.safetensors")
    with pytest.raises(ArtifactError, match=r"step-0000002\.safetensors does not match its SHA-256"):
        run.finish()
