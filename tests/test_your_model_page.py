"""docs/your-model.md as it is written: its file, its commands; and the third way, the protocol, through a file."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tformer_deploy.bundle import open_bundle

from .command import COMMAND, printed, run_here

pytestmark = pytest.mark.long

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/your-model.md").read_text(encoding="utf-8")
FILES = re.findall(r"```python (\S+)\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [line for text in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in text.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the page's commands run."""
    made = tmp_path_factory.mktemp("page")
    assert {name for name, _ in FILES} == {"my_model.py"}
    (made / "my_model.py").write_text("\n\n".join(text for _, text in FILES))
    return made


@pytest.mark.parametrize("command", COMMANDS)
def test_command_runs(command: str, folder: Path) -> None:
    """In order: later ones use what earlier ones made."""
    script = f'tformer() {{ {shlex.join(COMMAND)} "$@"; }}; {command}'
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert done.stderr.startswith("running my_model.py") == ("my_model.py" in command)


def test_a_module_that_follows_the_protocol_has_every_recipe(tmp_path: Path) -> None:
    (tmp_path / "my_file.py").write_text(
        "from tests.conftest import small_config\nfrom tests.test_seq2seq import make_parallel\n\n\n"
        "def make():\n    return make_parallel(small_config(output_bias=True))\n"
    )
    done = run_here(
        "export", tmp_path / "my_file.py:make", "--out", tmp_path / "bundle", "--recipe", "int8", "--recipe", "fp32"
    )
    assert printed(done)[-1] == f"{tmp_path / 'bundle'}: bundle written"
    assert done.stderr.decode() == f"running {tmp_path}/my_file.py\n" * 2
    opened = open_bundle(tmp_path / "bundle")
    assert opened.default == "int8" and not opened.config.module_parameters
    assert printed(run_here("translate", tmp_path / "bundle", stdin=b"w7 w9\n")) != [""]
