"""Standard input, line by line, in windows that can be translated together; standard output."""

from __future__ import annotations

import io
import os
import select
import sys
from collections.abc import Iterator
from typing import TextIO

from ..errors import DataError


def windows(budget: int) -> Iterator[list[str]]:
    """Lines of standard input in groups of about `budget` bytes; what has come is not held back for what may come.

    Raises DataError with the number of a line that is not UTF-8, after all lines before it.
    """
    window: list[str] = []
    number = size = 0
    for lines, more in _chunks():
        for raw in lines:
            number += 1
            try:
                window.append(raw.decode("utf-8"))
            except UnicodeDecodeError as error:
                if window:
                    yield window
                raise DataError(f"standard input, line {number}: not UTF-8 ({error.reason}): convert it") from None
            size += len(raw) + 1
            if size >= budget:
                yield window
                window, size = [], 0
        if window and not more:
            yield window
            window, size = [], 0


def utf8_output() -> TextIO:
    """Standard output as UTF-8, whatever the locale is. Raises DataError where the caller closed it."""
    if sys.stdout is None:
        raise DataError("standard output is closed: send it to a file, a pipe or /dev/null")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")
    return sys.stdout


def _chunks() -> Iterator[tuple[list[bytes], bool]]:
    """The lines that have come, and whether more input is there already."""
    if sys.stdin is None:  # closed by the caller
        return
    try:
        source = sys.stdin.fileno()
    except io.UnsupportedOperation:  # not a file of the system
        yield sys.stdin.buffer.readlines(), False
        return
    rest: list[bytes] = []
    while chunk := os.read(source, 1 << 16):
        *full, last = chunk.split(b"\n")
        if full:
            full[0] = b"".join([*rest, full[0]])
            rest = []
        rest.append(last)
        yield full, bool(select.select([source], [], [], 0)[0])
    yield [b"".join(rest)] if any(rest) else [], False
