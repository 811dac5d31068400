"""Programs of `engines/tests`, which answer line by line."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, Self

import pytest

from .cpp_library import built


def program(name: str) -> Path:
    """A program of the C++ build; skips where that cannot be made."""
    path = built() / "tests" / name
    if not path.is_file():
        pytest.skip(f"{path} was not built: make cpp")
    return path


class Talk:
    """A program that reads lines of JSON and writes lines of JSON."""

    def __init__(self, *command: str | Path) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *why: object) -> None:
        self._process.communicate(timeout=60)
        assert why[0] or self._process.returncode == 0, f"the program ended with {self._process.returncode}"

    def send(self, value: Any) -> None:
        """A line, or bytes as they are."""
        assert self._process.stdin
        self._process.stdin.write(value if isinstance(value, bytes) else json.dumps(value).encode() + b"\n")
        self._process.stdin.flush()

    def line(self) -> Any:
        """The next line of the answer."""
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, f"the program ended with {self._process.wait(60)}"
        return json.loads(line)

    def ask(self, value: Any) -> Any:
        """One line for one line."""
        self.send(value)
        return self.line()
