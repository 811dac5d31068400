"""The README's commands, with the output that it shows, and its Python example, run on what the demo leaves."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .demo_folder import write_folder
from .params import long_but

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```(sh|python|console)\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
# `make demo` and `make test` are what runs this test; installing is what it needs to run.
COMMANDS = [
    line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines() if line.startswith(("tformer", "echo"))
]
assert len([line for kind, text in BLOCKS for line in text.splitlines() if line.startswith("tformer ")]) >= 3
assert sum(text.count("\n$ ") + 1 for kind, text in BLOCKS if kind == "console") >= 3
PROGRAMS = [text for kind, text in BLOCKS if kind == "python"]
SESSIONS = [text for kind, text in BLOCKS if kind == "console"]
ANY = "…"
"""What a session leaves out: a part of a line, or as a line of its own any number of lines."""

pytestmark = pytest.mark.skipif(
    not (ROOT / ".demo/bundle").is_dir(), reason="`make demo` has not run: the README's commands use its bundle"
)


SLOW = ("molecules", "student", "tformer check")
QUICK = [line for line in COMMANDS if not any(each in line for each in SLOW)]
"""`make demo` runs the check as well."""


@pytest.mark.parametrize("command", long_but(COMMANDS, *QUICK))
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


@pytest.mark.long
@pytest.mark.parametrize("session", SESSIONS)
def test_session_prints_what_is_shown(session: str, tmp_path: Path) -> None:
    write_folder(ROOT / ".demo/run", tmp_path / ".demo/numbers-en-de")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for step in session.removeprefix("$ ").split("\n$ "):
        command, *shown = step.rstrip("\n").split("\n")
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stderr
        lines = (r"(.*\n)*" if line == ANY else re.escape(line).replace(ANY, ".*") + "\n" for line in shown)
        assert re.fullmatch("".join(lines), done.stdout), done.stdout


def test_demo_learned_its_task() -> None:
    last = json.loads((ROOT / ".demo/run/metrics.jsonl").read_text().splitlines()[-1])
    assert last["averaged"] and last["exact_match"] >= 0.95


@pytest.mark.parametrize("program", PROGRAMS)
def test_program_runs(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.stdout.strip() == "siebenhundertzwölf", done.stderr
