"""Points at which a kill can meet a writer: every rename, every unlink, every file that is opened for writing.

As a command, `python -m tests.kills N FOLDER VERB …` runs `tformer VERB …` and kills it at point N below a folder.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tformer_deploy.base import files

_EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink")
_watched: tuple[Path, Callable[[str], None]] | None = None


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    global _watched
    if _watched is None or event not in _EVENTS:
        return
    folder, reached = _watched
    path, flags = arguments[0], arguments[2] if event == "open" else os.O_WRONLY
    if (
        not isinstance(path, (str, bytes, os.PathLike))
        or not isinstance(flags, int)
        or not flags & (os.O_WRONLY | os.O_RDWR)
    ):
        return
    name = os.fsdecode(path)
    # A path without a folder is one below an open folder, as shutil.rmtree uses them.
    if Path(name).is_absolute() and not Path(name).is_relative_to(folder):
        return
    _watched = None  # what `reached` does is no point
    try:
        reached(f"{event} {name}")
    finally:
        _watched = folder, reached


sys.addaudithook(_hook)


@contextmanager
def points(folder: Path, reached: Callable[[str], None]) -> Iterator[None]:
    """Call `reached` at every point below a folder, just before what it tells."""
    global _watched
    move = files.rename

    def told(old: Path, new: Path, flag: int) -> None:  # Python does not see it
        _hook("os.rename", (old, new))
        move(old, new, flag)

    files.rename = told
    _watched = folder, reached
    try:
        yield
    finally:
        _watched, files.rename = None, move


@contextmanager
def snapshots(folder: Path, out: Path) -> Iterator[list[Path]]:
    """What a kill at every point would leave of a folder, in copies; each different state once, with the last."""
    found: dict[tuple[tuple[str, bytes], ...], Path] = {}

    def take(what: str) -> None:
        state = contents(folder)
        if state not in found:
            found[state] = out / f"{len(found):03}"
            shutil.copytree(folder, found[state])

    taken: list[Path] = []
    with points(folder, take):
        yield taken
    take("the end")
    taken += found.values()


def contents(folder: Path) -> tuple[tuple[str, bytes], ...]:
    """Every file below a folder, and every folder."""
    paths = sorted(folder.rglob("*"))
    return tuple((str(path.relative_to(folder)), path.read_bytes() if path.is_file() else b"") for path in paths)


def main() -> None:
    """Run a command that is killed."""
    from tformer_deploy.cli import main as tformer

    left = int(sys.argv[1])

    def reached(what: str) -> None:
        nonlocal left
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    folder = Path(sys.argv[2])
    sys.argv[1:] = sys.argv[3:]
    with points(folder, reached):
        tformer()


if __name__ == "__main__":
    main()
