"""Lines on standard error, which no work depends on."""

from __future__ import annotations

import os
import sys
from typing import Protocol, TextIO


class Progress(Protocol):
    """Is told what has been done."""

    def __call__(self, count: int = 0, tokens: int = 0, stage: str = "") -> None:
        """`count` more of what is counted, with so many tokens; `stage`: what begins now, for people."""


def unseen(count: int = 0, tokens: int = 0, stage: str = "") -> None:
    """A `Progress` that nobody sees."""


def note(line: str, end: str = "\n") -> None:
    """Print a line on standard error; one that cannot be written, and all that follow, are lost."""
    try:
        print(line, end=end, file=sys.stderr, flush=True)
    except OSError:
        sys.stderr = nowhere()


def nowhere() -> TextIO:
    """A stream that keeps nothing."""
    return os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", errors="backslashreplace")


def shortened(text: str, most: int) -> str:
    """The beginning and the end of a text of more than `most` characters."""
    half = most // 2 - 1
    return text if len(text) <= most else f"{text[:half]}… {text[-half:]}"


def printable(text: str) -> str:
    """A text without what a terminal obeys, as it may come from a stranger's file."""
    half = range(0xD800, 0xE000)  # of a character, which the stream shows as an escape
    return "".join(each if each.isprintable() or ord(each) in half else "?" for each in text)
