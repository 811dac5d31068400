"""The `tformer` command for tests: as a process of its own, or in this one, which is faster."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile

import pytest

from tformer_deploy.cli import main

os.environ.pop("PYTHONUNBUFFERED", None)  # it would hide a flush that is missing
COMMAND = [sys.executable, "-m", "tformer_deploy"]
Done = subprocess.CompletedProcess[bytes]


def run_process(*arguments: object, stdin: bytes = b"") -> Done:
    """Run the real command."""
    return subprocess.run([*COMMAND, *map(str, arguments)], input=stdin, capture_output=True, timeout=300)


def run_here(*arguments: object, stdin: bytes = b"", out: io.BytesIO | None = None, encoding: str = "utf-8") -> Done:
    """Run the command in this process; `encoding` is what standard output has at first."""
    out, err = out or io.BytesIO(), io.BytesIO()
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryFile() as file:
        file.write(stdin)
        file.seek(0)
        patch.setattr(sys, "argv", ["tformer", *map(str, arguments)])
        patch.setattr(sys, "stdin", io.TextIOWrapper(file))
        patch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding))
        patch.setattr(sys, "stderr", io.TextIOWrapper(err, "utf-8"))
        code: object = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
        return Done(sys.argv, int(str(code or 0)), out.getvalue(), err.getvalue())


def without_progress(err: str) -> list[str]:
    """Lines on stderr, without those that say what `train` does first."""
    return [line for line in err.splitlines() if not re.match(r"splitting |[\d,]+ pairs read", line)]


def failed_line(done: Done, code: int = 1) -> str:
    """The one line on stderr of a command that failed."""
    lines = without_progress(done.stderr.decode())
    assert done.returncode == code and len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    return lines[0]


def printed(done: Done) -> list[str]:
    """The lines on stdout of a command that succeeded."""
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode("utf-8")
    assert text == "" or text.endswith("\n")
    return text.split("\n")[:-1]
