"""The README's commands and its Python example, run on the demo's bundle."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .params import long_but

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```(sh|python)\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
# `make demo` and `make test` are what runs this test; installing is what it needs to run.
COMMANDS = [
    line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines() if line.startswith(("tformer", "echo"))
]
assert len([line for kind, text in BLOCKS for line in text.splitlines() if line.startswith("tformer ")]) >= 3
PROGRAMS = [text for kind, text in BLOCKS if kind == "python"]

pytestmark = pytest.mark.skipif(
    not (ROOT / ".demo/bundle").is_dir(), reason="`make demo` has not run: the README's commands use its bundle"
)


@pytest.mark.parametrize("command", long_but(COMMANDS, *(line for line in COMMANDS if "molecules" not in line)))
def test_command_runs(command: str) -> None:
    shutil.rmtree(ROOT / ".demo/random", ignore_errors=True)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        command, shell=True, cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    if "four hundred and two" in command:
        assert "vierhundertzwei" in done.stdout


def test_demo_learned_its_task() -> None:
    last = json.loads((ROOT / ".demo/run/metrics.jsonl").read_text().splitlines()[-1])
    assert last["averaged"] and last["exact_match"] >= 0.95


@pytest.mark.parametrize("program", PROGRAMS)
def test_program_runs(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.stdout.strip() == "siebenhundertzwölf", done.stderr
