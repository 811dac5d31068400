"""Python in docs/: the programs that run on what the demo leaves, python.md's tables, and the imports of every block.

And the form of CHANGELOG.md, which a bad merge would change.
"""

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
needs_demo = pytest.mark.skipif(
    not (ROOT / ".demo/bundle").is_dir(), reason="`make demo` has not run: the programs use its bundle"
)


@needs_demo
def test_the_program_prints_what_is_shown() -> None:
    [program] = re.findall(r"```python\n(.*?)```", PYTHON, re.DOTALL)
    [shown] = re.findall(r"```text\n(.*?)```", PYTHON, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert re.fullmatch(re.escape(shown).replace("…", ".*"), done.stdout), done.stdout + done.stderr


@needs_demo
def test_batches_join_as_the_page_on_decoding_shows() -> None:
    page = (ROOT / "docs/decoding.md").read_text(encoding="utf-8")
    [(program, shown)] = re.findall(r"```python\n(.*?)```\n\nIt prints `(.*?)`\.\n", page, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout == f"{shown}\n", done.stderr


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


def test_the_changelog_has_one_section_for_each_version_and_ends_with_its_formats() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## (\S+?)(?:,.*)?$", text, re.MULTILINE)
    assert versions[0] == tformer_deploy.__version__
    assert len(versions) == len(set(versions)) == text.count("\n## ")
    points = [line for line in text.splitlines() if line.startswith("- ")]
    assert len(points) == len(set(points)), "a point is there twice"
    for section in text.split("\n## ")[1:]:
        commands = re.findall(r"^- `tformer (\w+)", section, re.MULTILINE)
        assert len(commands) == len(set(commands)), f"a version has one point for each command, here are {commands}"
    assert text.count("\n| format | version |\n") == 1
    end = r"\nFormats:\n\n\| format \| version \|\n\|---\|---\|\n(\|.*\|\n)+\nLower versions were never released\.\n"
    assert re.search(rf"{end}\Z", text), "it does not end with the table of formats and its sentence"
