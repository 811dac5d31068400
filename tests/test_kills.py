"""A kill at any point of a verb that writes leaves the old or the new, whole, and the next run removes the rest.

What a kill leaves on the disk is what is there at that moment: a copy of the folder at every point is taken in one run.
Some points are met by real kills too.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tformer_deploy.base.files import remove_leftovers
from tformer_deploy.bundle.manifest import MANIFEST, open_bundle
from tformer_deploy.bundle.plans import all_plans
from tformer_deploy.bundle.shortlist import open_shortlist
from tformer_deploy.model.checkpoint import HEADER, load_tensors, open_checkpoint
from tformer_deploy.train import metrics
from tformer_deploy.train.run_files import STATE

from .command import failed_line, run_here, run_process
from .conftest import small_config, write_checkpoint
from .kills import contents, snapshots

MODEL = {"d_model": 16, "d_ff": 16, "heads": 2, "encoder_layers": 1, "decoder_layers": 1}
SETTINGS = {"updates": 6, "valid_every": 2, "average": 2, "bleu_sentences": 0, "batch_tokens": 200}


def succeed(*arguments: object) -> None:
    done = run_here(*arguments)
    assert done.returncode == 0, done.stderr


def killed(number: int, folder: Path, *arguments: object) -> None:
    """Run the command in a process that dies at that point."""
    command = [sys.executable, "-m", "tests.kills", str(number), str(folder), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False, cwd=Path(__file__).parent.parent)
    assert done.returncode == -signal.SIGKILL, done.stderr


def hidden(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob(".*")]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short text of words that the small model knows."""
    path = tmp_path_factory.mktemp("text") / "lines.txt"
    path.write_text("".join(f"w{i} w{i + 1} w{i + 2}\n" for i in range(4, 40)))
    return path


# train


def train(out: Path, text: Path, *more: object) -> list[object]:
    sides = [word for side in ("--src", "--tgt", "--valid-src", "--valid-tgt") for word in (side, text)]
    sections = {"model": MODEL, "train": SETTINGS}
    sets = [f"{section}.{key}={value}" for section, values in sections.items() for key, value in values.items()]
    options = ["--preset", "tiny", "--vocab-size", 60, "--tokenizer", "words", "--pair", "xx-xx"]
    return ["train", "--out", out, *sides, *options, *(word for each in sets for word in ("--set", each)), *more]


def same_weights(one: Path, other: Path) -> bool:
    a, b = (load_tensors(open_checkpoint(folder).weights) for folder in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.long
def test_train(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "here" / "run"
    run.parent.mkdir()
    with snapshots(run.parent, tmp_path / "states") as states:
        succeed(*train(run, text))
    assert len(states) > 30
    monkeypatch.setattr(metrics, "plot", lambda *paths: None)  # it takes as long as all the rest
    for state in states:
        left = state / "run"
        if (left / HEADER).exists():
            open_checkpoint(left).load_model()  # whole
        if (left / STATE).exists():
            succeed("train", "--out", left, "--resume")
        else:
            assert "nothing saved" in failed_line(run_here("train", "--out", left, "--resume"))
            succeed(*train(left, text, "--force"))
        assert same_weights(left, run)
        assert hidden(state) == [] and contents(left / "weights") == contents(run / "weights")
        assert [path.name for path in (left / "train").iterdir()] == [path.name for path in (run / "train").iterdir()]


@pytest.mark.long
def test_train_over_an_old_run(text: Path, tmp_path: Path) -> None:
    """--force gives the old run up: what is left of it can be read or is gone."""
    run = tmp_path / "here" / "run"
    succeed(*train(run, text))
    with snapshots(run.parent, tmp_path / "states") as states:
        succeed(*train(run, text, "--force", "--seed", 4))
    headers = [((state / "run" / HEADER).exists(), (state / "run" / STATE).exists()) for state in states]
    assert headers[0] == headers[-1] == (True, True) and (False, True) not in headers
    for state, (header, _) in zip(states, headers, strict=True):
        if header:
            open_checkpoint(state / "run").load_model()
    emptiest = states[headers.index((False, False))] / "run"
    succeed(*train(emptiest, text, "--force", "--seed", 4))
    assert same_weights(emptiest, run) and hidden(emptiest) == []


@pytest.mark.long
@pytest.mark.parametrize("number", [3, 17, 30])
def test_train_really_killed(number: int, text: Path, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    succeed(*train(whole, text))
    killed(number, broken, *train(broken, text))
    if (broken / STATE).exists():
        succeed("train", "--out", broken, "--resume")
    else:
        succeed(*train(broken, text, "--force"))
    assert same_weights(whole, broken) and hidden(broken) == []


def test_init_over_an_old_one(tmp_path: Path) -> None:
    """--force: what a kill leaves is the old checkpoint, the new one, or none; the next run makes it whole."""
    run = tmp_path / "here" / "run"
    sizes = [word for key, value in MODEL.items() for word in ("--set", f"model.{key}={value}")]
    init = ("init", "--preset", "tiny", "--vocab-size", 60, *sizes)
    succeed(*init, "--out", run)
    with snapshots(run.parent, tmp_path / "states") as states:
        succeed(*init, "--out", run, "--force", "--seed", 4)
    there = [(state / "run" / HEADER).exists() for state in states]
    assert there[0] and there[-1] and False in there
    for state, whole in zip(states, there, strict=True):
        if whole:
            open_checkpoint(state / "run").load_model()
    left = states[there.index(False)]
    succeed(*init, "--out", left / "run", "--force", "--seed", 4)
    assert same_weights(left / "run", run) and hidden(left) == []


# export


@pytest.mark.long
@pytest.mark.parametrize("old", [False, True])
def test_export(old: bool, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    runs = [write_checkpoint(tmp_path / f"run{seed}", small_config(), seed) for seed in (1, 2)]
    if old:
        succeed("export", runs[0], "--out", here / "bundle")
    with snapshots(here, tmp_path / "states") as states:
        succeed("export", runs[1], "--out", here / "bundle", "--force")
    assert len(states) > 10
    weights = [open_checkpoint(run).weights_sha256 for run in runs]
    seen = []
    for state in states:
        if (state / "bundle" / MANIFEST).exists():
            seen.append(weights.index(open_bundle(state / "bundle").weights_sha256))
        else:
            assert not old and not (state / "bundle").exists()
        assert not remove_leftovers(state, "bundle") and hidden(state) == []
    assert seen == sorted(seen) and set(seen) == ({0, 1} if old else {1})


@pytest.mark.long
@pytest.mark.parametrize("number", [3, 9])
def test_export_really_killed(number: int, tmp_path: Path) -> None:
    run = write_checkpoint(tmp_path / "run", small_config())
    killed(number, tmp_path, "export", run, "--out", tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()
    done = run_process("export", run, "--out", tmp_path / "bundle")
    assert done.returncode == 0 and hidden(tmp_path) == []
    lines = done.stderr.decode().splitlines()
    assert len(lines) == 1 and lines[0].endswith("removed: a process that was killed left it")


# build


@pytest.mark.long
def test_build(run: Path, text: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "here" / "bundle"
    succeed("export", run, "--out", bundle, "--recipe", "fp32", "--recipe", "trt")
    options = ["--precision", "fp32", "--fast", "--profile"]
    succeed("build", bundle, *options, "1x1x4x4")
    with snapshots(bundle.parent, tmp_path / "states") as states:
        succeed("build", bundle, *options, "1x1x8x8")
    seen = []
    for state in states:
        (plans,) = all_plans(open_bundle(state / "bundle"), "trt")
        seen.append(str(plans.profiles[0]))
    assert seen == sorted(seen) and set(seen) == {"1x1x4x4", "1x1x8x8"}
    for state in states[:: max(1, len(states) // 3)]:
        succeed("build", state / "bundle", *options, "1x1x8x8")
        assert hidden(state) == []


# shortlist


@pytest.mark.long
def test_shortlist(variants_bundle: Path, text: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "here" / "bundle"
    shutil.copytree(variants_bundle, bundle)
    sides = ["--src", text, "--tgt", text]
    succeed("shortlist", bundle, *sides, "--best", 1)
    with snapshots(bundle.parent, tmp_path / "states") as states:
        succeed("shortlist", bundle, *sides, "--best", 2)
    assert len(states) > 5
    seen = []
    for state in states:
        opened = open_bundle(state / "bundle")
        open_shortlist(opened, "int8")
        seen.append(opened.manifest["shortlist"]["best"])
        succeed("shortlist", state / "bundle", *sides, "--best", 2)
        assert contents(state) == contents(bundle.parent)
    assert seen == sorted(seen) and set(seen) == {1, 2}


# Two at a time


@pytest.mark.long
def test_two_processes_at_one_folder(variants_bundle: Path, text: Path, tmp_path: Path) -> None:
    """Of several that change the same, one does; the others say so, or come when it has ended."""
    bundle, run = tmp_path / "bundle", tmp_path / "run"
    shutil.copytree(variants_bundle, bundle)
    shortlist = ["shortlist", bundle, "--src", text, "--tgt", text]
    for command in (shortlist, train(run, text)):
        started = [
            subprocess.Popen([sys.executable, "-m", "tformer_deploy", *map(str, command)], stderr=subprocess.PIPE)
            for _ in range(3)
        ]
        said = [process.communicate(timeout=120)[1].decode() for process in started]
        codes = [process.returncode for process in started]
        assert 0 in codes and set(codes) <= {0, 1}, said
        for code, err in zip(codes, said, strict=True):
            refused = "is being changed by another process: wait until it has ended", "holds a run already"
            assert code == 0 or any(words in err for words in refused), err
    open_shortlist(open_bundle(bundle), "int8")
    open_checkpoint(run).load_model()
