"""Every script of benchmarks/ starts, and says what it needs before it measures."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as kit_maker
from tformer_deploy.base.errors import ArtifactError, EngineError

FOLDER = Path(__file__).parent.parent / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "whole")
PROGRAMS = [*SCRIPTS, "gpu.__main__", "gpu.results", "peers.__main__", "serve.__main__"]


def start(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    """Run a script's `main` in this process; returns its exit code."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # which one of them sets for all that follow
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as ended:
        import_module(f"benchmarks.{name}").main()
    return ended.value.code


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_has_its_help(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert start(name, "--help", monkeypatch=monkeypatch) == 0
    command = f"benchmarks.{name.removesuffix('.__main__')}"
    assert capsys.readouterr().out.startswith(f"usage: {command} ")
    assert f"python -m {command} " in (FOLDER / "README.md").read_text(), "the table at its top has each"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["limits", "bundle"], "the following arguments are required: --engine"),
        (["limits", "bundle", "--engine", "ort", "--engine", "bf16"], "--engine bf16 needs the ranges of a text: give"),
        (["peers.__main__", "--engines", "ort", "native"], "--engines native: name its variant, as in native:native-"),
        (["peers.__main__", "--engines", "native:"], "--engines native:: name its variant, as in native:native-int8"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_measured_is_refused_at_once(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(*arguments, monkeypatch=monkeypatch) == 2
    assert said in capsys.readouterr().err


def test_the_package_of_another_environment_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has no tformer, and starts in a folder of its own."""
    (tmp_path / "annalog.py").write_text("raise SystemExit('annalog is found')\n")
    (tmp_path / "torch.py").touch()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    (tmp_path / "molecules").write_text("CCO\n")
    monkeypatch.chdir(tmp_path)
    arguments = ["bundle", "--package", "package", "--molecules", "molecules", "--python", "./python"]
    monkeypatch.setattr(sys, "argv", [str(FOLDER / "molecules.py"), *arguments])
    with pytest.raises(EngineError, match=r"package: .*annalog is found"):
        import_module("benchmarks.molecules").main()


@pytest.mark.parametrize("other", ["results/results.json", "work/models", "notes.txt"])
def test_a_kit_that_holds_more_is_not_replaced(other: str, tmp_path: Path) -> None:
    """A folder of somebody's own may have SHA256SUMS too."""
    folder = tmp_path / "kit"
    command = ["--bundle", "bundle", "--text", "lines.en", "--out", str(folder)]
    folder.mkdir()
    (folder / "SHA256SUMS").touch()
    with pytest.raises(ArtifactError, match="is no kit: choose another folder with --out"):
        kit_maker.main(command)
    for name in ("run.sh", "runner/run.py", "runner/stages.py", "core.tar.xz.00", "python.tar.00", other):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    with pytest.raises(ArtifactError, match=f"holds {other.partition('/')[0]}, which is not part of a kit: move it"):
        kit_maker.main(command)
    assert (folder / other).exists()
    (folder / other).rename(tmp_path / "moved")
    if "/" in other:
        (folder / other).parent.rmdir()
    kit_maker.require_replaceable(folder)


@pytest.mark.long
def test_a_search_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna", reason="optuna is not installed")
    search = import_module("benchmarks.search")
    train = "--task copy --batch-tokens 300 --updates 20 --set model.d_model=16 --set model.d_ff=16 --set model.heads=2"
    train += " --set train.valid_every=10 --set train.bleu_sentences=0 --set train.average=1"

    def made(trials: int) -> list[str]:
        arguments = ["--trials", str(trials), "--measure", "valid_loss", "--try", "train.lr=0.001..0.1"]
        arguments += ["--try", "vocab-size=40,60"]
        monkeypatch.setattr(sys, "argv", ["search", str(tmp_path), *arguments, "--", *train.split()])
        search.main()
        return capfd.readouterr().out.splitlines()

    watched = search.watched
    monkeypatch.setattr(search, "watched", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made(1)
    monkeypatch.setattr(search, "watched", watched)
    begun = [path.name for path in tmp_path.iterdir() if path.is_dir()]
    lines = made(3)
    assert len(begun) == 1 and len(lines) == 3 and any(line.endswith(f"  {begun[0]}") for line in lines)
    losses = [float(line.split()[1]) for line in lines if line.startswith("valid_loss ")]
    assert losses == sorted(losses) and made(3) == lines
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {line.split("  ")[1] for line in lines}
