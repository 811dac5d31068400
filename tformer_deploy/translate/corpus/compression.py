"""Reads compressed files in pieces, and writes files of independently compressed pieces."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from ...base.errors import DataError

SUFFIXES = (".gz", ".zst")
OTHERS = (".bz2", ".xz", ".lz4", ".lzma", ".br", ".zip", ".7z")
"""Compressions that are refused; such a file must not be read as text."""
_CHUNK, _PIECE = 1 << 20, 1 << 14
"""Bytes that are decompressed, and read, at a time."""


class Counted:
    """A file that counts the bytes read so far."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.read_bytes = file, 0

    def read(self, size: int = -1) -> bytes:
        """At most a small piece at a time."""
        content = self._file.read(min(size, _PIECE) if size >= 0 else _PIECE)
        self.read_bytes += len(content)
        return content


def unpacked(file: BinaryIO, suffix: str, name: str) -> Iterator[tuple[bytes, int]]:
    """What a file holds, in pieces, and the bytes of the file that are read by then; `suffix`: of SUFFIXES, or empty.

    Raises DataError where it is damaged.
    """
    counted: Any = Counted(file)
    try:
        if suffix == ".zst":
            from . import zst

            for chunk in zst.unpacked(counted):
                yield chunk, counted.read_bytes
            return
        plain = gzip.GzipFile(fileobj=counted) if suffix == ".gz" else counted
        while chunk := plain.read(_CHUNK):
            yield chunk, counted.read_bytes
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{name}: cannot be read: {reason}: copy it again, or name another file") from None


def packed(content: bytes, suffix: str) -> bytes:
    """The same bytes for the same content, whenever; several behind each other unpack to all their contents."""
    if suffix == ".gz":
        return gzip.compress(content, 6, mtime=0)
    if suffix == ".zst":
        from . import zst

        return zst.packed(content)
    return content


def split_lines(chunks: Iterator[tuple[bytes, int]], most: int) -> Iterator[tuple[bytes, int]]:
    """Lines without their ends, and the bytes of the file up to there; of one that is longer than `most` bytes the
    first `most` + 1. Within a piece that was unpacked, bytes of the file count evenly.
    """
    rest, before = b"", 0
    for chunk, after in chunks:
        *full, last = chunk.split(b"\n")
        place, each = 0, (after - before) / max(1, len(chunk))
        for line in full:
            place += len(line) + 1
            whole, rest = rest + line if rest else line, b""
            yield whole if len(whole) <= most else whole[: most + 1], before + round(place * each)
        rest, before = (rest + last)[: most + 1], after
    if rest:
        yield rest, before
