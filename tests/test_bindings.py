"""libtformer from other languages: the programs of examples/bindings, compiled and run as they are."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

import tformer_deploy

from .cpp_library import built, onnxruntime

ROOT = Path(__file__).parent.parent
BINDINGS, BUNDLE = ROOT / "examples/bindings", ROOT / ".demo/bundle"
LINES = ["forty-two", "nine hundred and two", "", "fünf £7"]
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not BUNDLE.is_dir(), reason="`make demo` has not run: examples use its bundle"),
]


def needs(*tools: str) -> None:
    """Skip where a language is missing."""
    if missing := next((tool for tool in tools if not shutil.which(tool)), ""):
        pytest.skip(f"{missing} is not installed")


def translates(command: Sequence[str | Path], folder: Path) -> None:
    """Texts and scores are those of Python; errors are the library's own line."""
    environment = {**os.environ, "TFORMER_ONNXRUNTIME": onnxruntime(), "LD_LIBRARY_PATH": str(built())}

    def run(*given: str | Path) -> subprocess.CompletedProcess[str]:
        line = [*command, *given]
        return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)

    with tformer_deploy.load(BUNDLE, beams=4) as translator:
        wanted = [f"{result.score:.4f}\t{result.text}" for result in translator.translate(LINES)]
    done = run(BUNDLE, *LINES)
    assert done.stdout.splitlines() == wanted, done.stderr
    failed = run(folder / "none", "forty-two")
    assert failed.returncode == 1 and failed.stdout == ""
    assert failed.stderr.startswith(f"{folder / 'none'} is not a bundle:")


def test_every_binding_is_short() -> None:
    files = [path for path in BINDINGS.iterdir() if path.is_file()]
    assert {path.name for path in files} == {"translate.mjs", "Translate.cs"}
    assert max(len(path.read_text(encoding="utf-8").splitlines()) for path in files) <= 80


def test_node(tmp_path: Path) -> None:
    needs("node", "npm")
    shutil.copy(BINDINGS / "translate.mjs", tmp_path)
    (tmp_path / "package.json").write_text("{}")
    install = ["npm", "install", "--silent", "--no-audit", "koffi@3.3.4"]
    done = subprocess.run(install, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"koffi cannot be installed: {done.stderr[-200:]}")
    translates(["node", "translate.mjs", built() / "libtformer.so"], tmp_path)


def test_c_sharp(tmp_path: Path) -> None:
    needs("mcs", "mono")
    subprocess.run(["mcs", f"-out:{tmp_path / 'Translate.exe'}", BINDINGS / "Translate.cs"], check=True, timeout=120)
    translates(["mono", "Translate.exe"], tmp_path)
