"""Python in docs/: the program of python.md on what the demo leaves, its tables, and the imports of every block."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import pytest

import tformer_deploy
from tformer_deploy.translate.translator import Result, Translator

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCKS = [
    (path.name, program)
    for path in PAGES
    for program in re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
]
PYTHON = (ROOT / "docs/python.md").read_text(encoding="utf-8")


@pytest.mark.skipif(not (ROOT / ".demo/bundle").is_dir(), reason="`make demo` has not run: the program uses its bundle")
def test_the_program_prints_what_is_shown() -> None:
    [program] = re.findall(r"```python\n(.*?)```", PYTHON, re.DOTALL)
    [shown] = re.findall(r"```text\n(.*?)```", PYTHON, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert re.fullmatch(re.escape(shown).replace("…", ".*"), done.stdout), done.stdout + done.stderr


@pytest.mark.parametrize(("page", "program"), BLOCKS)
def test_a_block_can_be_parsed_and_imports_what_there_is(page: str, program: str) -> None:
    tree = ast.parse(program)
    lines = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name for node in lines}
    if missing := {name.split(".")[0] for name in names if not find_spec(name.split(".")[0])}:
        pytest.skip(f"{page} is for clients that have {', '.join(missing)}")
    exec(compile(ast.Module([*lines], []), page, "exec"), {})


def test_the_python_page_has_every_option_method_field_and_error() -> None:
    options = {field.name for field in fields(tformer_deploy.TranslatorOptions)}
    assert options == set(re.findall(r"^\| `(\w+)` \|", PYTHON.split("## `Translator`")[0], re.MULTILINE))
    for name in ("translate", "results", "stream", "generate", "score"):
        [arguments] = re.findall(rf"^\| `{name}\((.*?)\)` ", PYTHON, re.MULTILINE)
        _, *own = inspect.signature(getattr(Translator, name)).parameters
        shown = [each.split("=")[0] for each in arguments.split(", ")]
        assert own[: len(shown)] == shown
    result = PYTHON[PYTHON.index("A `Result` has") : PYTHON.index("**Threads.**")]
    assert all(f"`{field.name}`" in result for field in fields(Result))
    errors = [name for name in dir(tformer_deploy) if name.endswith(("Error", "Extra", "NotNumbers"))]
    assert all(f"`{name}`" in PYTHON or f"tformer_deploy.{name}" in PYTHON for name in errors)
