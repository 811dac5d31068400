"""Lines of text: reading files, checking a line."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from .errors import DataError

LINE_BYTES, MOST_LINE_BYTES = 1 << 20, 1 << 30
"""Longest line, refused before it costs memory, as it is no sentence; and the most that the limit can be raised to."""


LINE_BYTES_OPTION = "--max-line-bytes"
"""The option of the command line that raises the limit."""


def check_line(text: str, where: str, most: int) -> None:
    """Raise DataError for a line that is no text or has more than `most` bytes; `where`: how the message begins."""
    if not isinstance(text, str):
        raise DataError(f"{where}: {type(text).__name__} is no text: give a str")
    try:
        size = len(text) if text.isascii() or len(text) > most else len(text.encode())
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: character {error.start + 1} is a lone surrogate: give valid Unicode") from None
    if size > most:
        raise DataError(f"{where}: {longer_than(most, 'max_line_bytes')}")


def longer_than(most: int, option: str = "") -> str:
    """What is wrong with a line of more than `most` bytes."""
    return f"longer than {most} bytes: split it{f', or raise {option}' if option else ''}"


def read_lines(path: Path) -> list[str]:
    """Lines of a UTF-8 file, plain or .gz, read one by one.

    Raises DataError with the line number of what is too long or cannot be read.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file: check the path")
    if path.is_dir():
        raise DataError(f"{path} is a folder: name a file")
    lines: list[str] = []
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            while raw := file.readline(LINE_BYTES + 2):  # with its end, and one byte more
                if len(raw) > LINE_BYTES and len(raw.rstrip(b"\n")) > LINE_BYTES:
                    raise DataError(f"{path}:{len(lines) + 1}: {longer_than(LINE_BYTES)}")
                lines.append(raw.decode("utf-8").strip())
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot be read: {reason}: name another file") from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}:{len(lines) + 1}: not UTF-8 ({error.reason}): convert the file, for example with iconv"
        ) from None
    return lines
