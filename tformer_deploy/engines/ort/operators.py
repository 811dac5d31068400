"""Reads the operators of a graph's file without onnx, which a deployment machine does not have.

Source: the encoding of Protocol Buffers, and `onnx.proto`.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

from ...base.errors import ArtifactError

FUNCTIONS = "functions of its own"
CONTROL_FLOW = frozenset({"If", "Loop", "Scan", "SequenceMap", FUNCTIONS})
"""Operators that no export writes. A loop may never end, and a running session cannot be interrupted."""
_GRAPH, _FUNCTIONS, _NODE, _OPERATOR = 7, 25, 1, 4
"""Fields of ModelProto, GraphProto and NodeProto."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def require_no_control_flow(graph: Path) -> None:
    """Raise ArtifactError for a graph that branches or loops, ValueError for a file that is no graph."""
    try:
        with graph.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            found = CONTROL_FLOW.intersection(_operators(data))
    except (ValueError, IndexError) as error:
        raise ValueError(f"Protobuf parsing failed: {error}") from None
    if found:
        raise ArtifactError(f"{graph} has {min(found)}, which tformer never exports: get another bundle")


def _operators(data: mmap.mmap) -> Iterator[str]:
    """The type of every node; for a function, which could hold any, `FUNCTIONS`."""
    for field, start, end in _fields(data, 0, len(data)):
        if field == _FUNCTIONS:
            yield FUNCTIONS
        elif field == _GRAPH:
            for part, first, last in _fields(data, start, end):
                if part == _NODE:
                    for name, here, there in _fields(data, first, last):
                        if name == _OPERATOR:
                            yield data[here:there].decode()


def _fields(data: mmap.mmap, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Number, beginning and end of each field of a message."""
    while at < end:
        key, at = _varint(data, at)
        if key >> 32:  # Protobuf would cut it
            raise ValueError("the key of a field has more than 32 bits")
        kind = key & 7
        if kind == _VARINT:
            _, after = _varint(data, at)
        elif kind == _BYTES:
            size, at = _varint(data, at)
            after = at + size
        elif kind in (_FIXED64, _FIXED32):
            after = at + (8 if kind == _FIXED64 else 4)
        else:
            raise ValueError(f"a field of kind {kind}")
        if after > end:
            raise ValueError("it ends within a field")
        yield key >> 3, at, after
        at = after


def _varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    """A number, seven bits a byte, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("a number has too many bytes")
