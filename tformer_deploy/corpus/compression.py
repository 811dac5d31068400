"""Compressed files as they come, in pieces; one file of pieces that each unpack by themselves."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from ..errors import DataError

SUFFIXES = (".gz", ".zst")
OTHERS = (".bz2", ".xz", ".lz4", ".lzma", ".br", ".zip", ".7z")
"""What cannot be read, and must not be taken for text."""
_CHUNK = 1 << 20
"""Bytes that are read at once."""


def unpacked(file: BinaryIO, suffix: str, name: str) -> Iterator[bytes]:
    """What a file holds, in pieces; `suffix`: of SUFFIXES, or empty. Raises DataError where it is damaged."""
    try:
        if suffix == ".zst":
            from . import zst

            yield from zst.unpacked(file)
            return
        plain = gzip.GzipFile(fileobj=file) if suffix == ".gz" else file
        while chunk := plain.read(_CHUNK):
            yield chunk
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


def split_lines(chunks: Iterator[bytes], most: int) -> Iterator[bytes]:
    """Lines without their ends; of one that is longer than `most` bytes the first `most` + 1."""
    rest = b""
    for chunk in chunks:
        *full, last = chunk.split(b"\n")
        if full:
            full[0] = rest + full[0]
            rest = b""
            for line in full:
                yield line if len(line) <= most else line[: most + 1]
        rest = (rest + last)[: most + 1]
    if rest:
        yield rest
