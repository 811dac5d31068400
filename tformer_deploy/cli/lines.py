"""Standard input in windows of lines that are translated together; standard output."""

from __future__ import annotations

import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TextIO

from ..base.errors import DataError
from ..base.lines import LINE_BYTES, LINE_BYTES_OPTION, longer_than
from ..base.notes import nowhere


def windows(budget: int, max_line_bytes: int = LINE_BYTES) -> Iterator[list[str]]:
    """Lines of standard input in groups of about `budget` bytes, fewer if no more input is waiting.

    Raises DataError with the number of a line that is too long or not UTF-8, after all earlier lines.
    """
    window: list[str] = []
    number = size = 0
    problem = ""
    try:
        for lines, more in _chunks(max_line_bytes):
            for raw in lines:
                number += 1
                if len(raw) > max_line_bytes:
                    problem = longer_than(max_line_bytes, LINE_BYTES_OPTION)
                    break
                window.append(raw.decode("utf-8"))
                size += len(raw) + 1
                if size >= budget:
                    yield window
                    window, size = [], 0
            if problem:
                break
            if window and not more:
                yield window
                window, size = [], 0
    except UnicodeDecodeError as error:
        problem = f"not UTF-8 ({error.reason}): convert it"
    except OSError as error:
        number += 1
        problem = f"cannot be read: {error.strerror}: give a file or a pipe"
    if window:
        yield window
    if problem:
        raise DataError(f"standard input, line {number}: {problem}")


def open_streams() -> None:
    """Open standard streams that the caller closed, so that no other file gets their number; print UTF-8."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number
    if sys.stderr is None:
        sys.stderr = nowhere()
    with suppress(OSError, AttributeError):
        os.set_blocking(sys.stdout.fileno(), True)  # else a slow reader causes an error
    # Lone surrogates, as in paths that are not UTF-8, are printed as JSON's escapes.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace", newline="\n")
    if hasattr(sys.stderr, "reconfigure"):
        sys.stderr.reconfigure(errors="backslashreplace")


def output_lost() -> bool:
    """Whether standard output cannot be written. If so, its buffer is dropped, not written again at the exit."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
        return False
    except OSError:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True


def utf8_output() -> TextIO:
    """Standard output, in UTF-8 whatever the locale is. Raises DataError if the caller closed it."""
    if sys.stdout is None:
        raise DataError("standard output is closed: send it to a file, a pipe or /dev/null")
    return sys.stdout


def _chunks(max_line_bytes: int) -> Iterator[tuple[list[bytes], bool]]:
    """Lines that have arrived, and whether more input is waiting; ends with the start of a line that is too long."""
    if sys.stdin is None:  # closed by the caller
        return
    try:
        source = sys.stdin.fileno()
    except io.UnsupportedOperation:  # not a file of the system
        yield [line.rstrip(b"\n") for line in sys.stdin.buffer.readlines()], False
        return
    rest: list[bytes] = []
    held = 0
    while chunk := _read(source):
        *full, last = chunk.split(b"\n")
        if full:
            full[0] = b"".join([*rest, full[0]])
            rest, held = [], 0
        rest.append(last)
        held += len(last)
        if held > max_line_bytes:
            yield [*full, b"".join(rest)], False
            return
        yield full, bool(select.select([source], [], [], 0)[0])
    yield [b"".join(rest)] if any(rest) else [], False


def _read(source: int) -> bytes:
    """Input that has arrived, at least one byte; empty at the end."""
    while True:
        try:
            return os.read(source, 1 << 16)
        except BlockingIOError:  # the caller set O_NONBLOCK
            select.select([source], [], [])
