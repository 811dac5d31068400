"""A second, real environment without torch and onnx: our wheel, ONNX Runtime, a bundle."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh virtual environment with `tformer-deploy[cpu]` installed from a built wheel."""
    folder = tmp_path_factory.mktemp("machine")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True, timeout=300)
    python = folder / "venv/bin/python"
    (wheel,) = folder.glob("*.whl")
    install = [python, "-m", "pip", "install", "-q", f"{wheel}[cpu]", "-c", ROOT / "constraints.txt"]
    subprocess.run(install, check=True, timeout=600)
    return python


def run_there(machine: Path, *arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [machine.parent / "tformer", *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=300, cwd=machine.parent)


def test_no_training_packages_are_there(machine: Path) -> None:
    code = "import importlib.util as u; print([m for m in ('torch', 'onnx', 'safetensors') if u.find_spec(m)])"
    assert subprocess.run([machine, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_translates_the_same_without_torch(machine: Path, bundle: Path) -> None:
    lines = "w5 w6 w7\n\nw8 w9\n"
    there = run_there(machine, "translate", bundle, "--max-tokens", 8, stdin=lines)
    here = subprocess.run(
        [sys.executable, "-m", "tformer_deploy", "translate", bundle, "--max-tokens", "8"],
        input=lines,
        capture_output=True,
        text=True,
    )
    assert there.returncode == 0, there.stderr
    assert there.stdout == here.stdout != ""
    assert "every hash verified" in run_there(machine, "inspect", bundle).stdout


def test_named_recipes_are_in_the_wheel(machine: Path) -> None:
    code = "from tformer_deploy import recipe; print(recipe.load_recipe('fp32').opset, recipe.recipe_folder())"
    done = subprocess.run([machine, "-c", code], capture_output=True, text=True, check=True, cwd=machine.parent)
    assert done.stdout.startswith("23 ") and "site-packages" in done.stdout


@pytest.mark.parametrize("verb", ["init", "train", "export", "translate", "check", "inspect"])
def test_every_help_works_there(machine: Path, verb: str) -> None:
    assert "Example: " in run_there(machine, verb, "--help").stdout


def test_missing_extras_are_named(machine: Path, bundle: Path, tmp_path: Path) -> None:
    for arguments in (
        ["train", "--task", "copy", "--out", tmp_path / "run"],
        ["translate", bundle, "--backend", "eager"],
        ["check", bundle],
    ):
        done = run_there(machine, *arguments)
        assert done.returncode == 1
        assert done.stderr.startswith("error: the package '") and "tformer-deploy[train]" in done.stderr, done.stderr
        assert len(done.stderr.splitlines()) == 1
