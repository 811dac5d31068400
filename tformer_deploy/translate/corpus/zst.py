"""Zstandard, of one frame or several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import zstandard

_PIECE = 1 << 9
"""Compressed bytes that are read at a time; they may decompress to 30,000 times as many."""


def unpacked(file: BinaryIO) -> Iterator[bytes]:
    """The content of a file, in pieces. Raises OSError or EOFError where it is damaged."""
    frame, begun = zstandard.ZstdDecompressor().decompressobj(), False
    while piece := file.read(_PIECE):
        while piece:
            try:
                chunk = frame.decompress(piece)
            except zstandard.ZstdError as error:
                raise OSError(f"damaged ({error})") from None
            piece, begun = b"", True
            if chunk:
                yield chunk
            if frame.eof:
                piece, begun = frame.unused_data, False
                frame = zstandard.ZstdDecompressor().decompressobj()
    if begun:
        raise EOFError("it ends in the middle")


def packed(content: bytes) -> bytes:
    """One frame."""
    return bytes(zstandard.ZstdCompressor().compress(content))
