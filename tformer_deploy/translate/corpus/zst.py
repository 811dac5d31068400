"""Zstandard, of one frame or several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import zstandard

_PIECE = 1 << 9
"""Bytes that are unpacked at once, which may become 30,000 times as many."""


def unpacked(file: BinaryIO) -> Iterator[bytes]:
    """What a file holds, in pieces. Raises OSError or EOFError where it is damaged."""
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
