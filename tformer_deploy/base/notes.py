"""Notes on standard error and progress, whose failure never stops the work."""

from __future__ import annotations

import os
import re
import sys
from typing import Protocol, TextIO


class Progress(Protocol):
    """Receives progress."""

    def __call__(self, count: int = 0, tokens: int = 0, stage: str = "") -> None:
        """`count` more items with `tokens` tokens are done; `stage`: name of the part that begins."""


def unseen(count: int = 0, tokens: int = 0, stage: str = "") -> None:
    """A `Progress` that shows nothing."""


def note(line: str, end: str = "\n") -> None:
    """Print a line on standard error; one that cannot be written, and all that follow, are lost."""
    try:
        print(f"{line}{end}", end="", file=sys.stderr, flush=True)  # in one piece, whatever other threads write
    except OSError:
        sys.stderr = nowhere()


def nowhere() -> TextIO:
    """A stream to /dev/null."""
    return os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", errors="backslashreplace")


def shortened(text: str, most: int) -> str:
    """A text, or its beginning and end if it has more than `most` characters."""
    half = most // 2 - 1
    return text if len(text) <= most else f"{text[:half]}… {text[-half:]}"


LONGEST_REASON = 300
"""Characters of a library's message."""


def one_line(error: Exception, dropped: re.Pattern[str]) -> str:
    """A library's message without its `dropped` parts: one line of at most `LONGEST_REASON` printable characters."""
    said = " ".join(dropped.sub(" ", shortened(str(error), 10 * LONGEST_REASON)).split())
    return shortened("".join(letter if letter.isprintable() else "?" for letter in said).rstrip("."), LONGEST_REASON)


def printable(text: str) -> str:
    """A text without control characters, as it may come from a file of others."""
    half = range(0xD800, 0xE000)  # of a character, which the stream shows as an escape
    return "".join(each if each.isprintable() or ord(each) in half else "?" for each in text)
