"""Files of Marian as arrays: .npz, and the binary .bin that marian-conv makes of it, in fp32 and fp16 or in 8 bits.

Of 8-bit kinds, `intgemm8` is read, which is for every processor: numbers, then the factor that made them of values. The
others hold matrices in the order that one processor's product reads.
Source: marian-dev, src/common/binary.cpp, src/common/types.h; what is stored:
src/tensors/cpu/fbgemm/expression_graph_packable.h.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..base.errors import ArtifactError
from ..base.headers import DAMAGED, read_arrays, readable
from .weights import kind_of

INTGEMM8 = 0x4101
KINDS: dict[int, str] = {0x101: "<i1", INTGEMM8: "<i1", 0x402: "<f2", 0x404: "<f4"}
"""Types of tensors that are read → those of numpy."""
RANGE = "_QuantMultA"
"""Ends the name of the factor that an input is multiplied by before it is rounded to 8 bits."""
MOST_AXES = 8


class Entry(NamedTuple):
    """A tensor of a .bin file."""

    name: str
    kind: int
    shape: tuple[int, ...]
    begin: int
    """Of its bytes in the file."""
    size: int


class Model(NamedTuple):
    """What a file holds, by Marian's names."""

    arrays: dict[str, Any]
    """Bytes as int8, all others as floats."""
    inputs: dict[str, float]
    """Products whose input was rounded to 8 bits in training -> the step of its integers."""
    weights: dict[str, float]
    """Matrices of 8 bits -> the step of their integers."""


def read_model(path: Path) -> Model:
    """Raises ArtifactError."""
    kind = kind_of(path)
    try:
        return read_binary(path) if kind == "marian" else Model(read_arrays(path), {}, {})
    except DAMAGED as error:
        if isinstance(error, ArtifactError):
            raise
        raise ArtifactError(f"{path} is damaged: {error}: copy it again") from None


def names_of(path: Path) -> frozenset[str]:
    """The names of a .bin file's tensors. Raises ArtifactError."""
    try:
        return frozenset(entry.name for entry in entries(np.memmap(readable(path), np.uint8, "r")))
    except DAMAGED as error:
        raise ArtifactError(f"{path} is damaged: {error}: copy it again") from None


def read_binary(path: Path) -> Model:
    """A .bin file. Raises ArtifactError, and one of `DAMAGED`."""
    file, found = np.memmap(readable(path), np.uint8, "r"), Model({}, {}, {})
    for entry in entries(file):
        if entry.kind not in KINDS:
            raise ArtifactError(
                f"{path}: tensor '{entry.name}' is of Marian's type {entry.kind:#x}, the order of one processor's "
                "product: convert the .npz with marian-conv --gemm-type intgemm8, or import the .npz"
            )
        array = values(file, entry)
        if entry.name.endswith(RANGE):
            factor = float(array.reshape(-1)[0])
            if not 0 < factor < np.inf:
                raise ValueError(f"tensor '{entry.name}' is no factor above 0")
            found.inputs[entry.name.removesuffix(RANGE)] = 1 / factor
            continue
        found.arrays[entry.name] = array
        if entry.kind == INTGEMM8:
            found.weights[entry.name] = 1 / _factor(file, entry)
    return found


def values(file: Any, entry: Entry) -> Any:
    """The values of a tensor, as they were before `intgemm8` rounded them to 8 bits."""
    kind, count = np.dtype(KINDS[entry.kind]), int(np.prod(entry.shape, dtype=np.int64))
    used = count * kind.itemsize
    if used + 4 * (entry.kind == INTGEMM8) > entry.size:
        raise ValueError(f"tensor '{entry.name}' has {entry.size} bytes, too few for {list(entry.shape)}")
    array = file[entry.begin : entry.begin + used].view(kind)
    if entry.kind != INTGEMM8:
        return array.reshape(entry.shape)
    factor = np.float32(_factor(file, entry))
    if len(entry.shape) != 2 or not 0 < factor < np.inf:
        raise ValueError(f"tensor '{entry.name}' is no matrix with a factor above 0")
    # A matrix of a product is stored as its transpose, whatever its shape says; a table of embeddings is not.
    table = entry.name.endswith("Wemb")
    matrix = array.reshape(entry.shape) if table else array.reshape(entry.shape[::-1]).T
    return matrix.astype(np.float32) / factor


def _factor(file: Any, entry: Entry) -> float:
    """What `intgemm8` multiplied the values of a matrix by, before it rounded them."""
    end = entry.begin + int(np.prod(entry.shape, dtype=np.int64))
    return float(file[end : end + 4].view("<f4")[0])


def entries(file: Any) -> list[Entry]:
    """What a .bin file holds, in order. Raises ValueError."""
    version, count = (int(value) for value in _numbers(file, 0, 2, "<u8"))
    if version != 1 or count > len(file) // 32:
        raise ValueError(f"it has version {version} and {count} tensors: version 1 is known")
    heads = _numbers(file, 16, 4 * count, "<u8").reshape(count, 4).tolist()
    at, names, shapes = 16 + 32 * count, [], []
    for length, *_ in heads:
        names.append(_bytes(file, at, length).rstrip(b"\0").decode())
        at += length
    for _, _, axes, _ in heads:
        if axes > MOST_AXES:
            raise ValueError(f"a tensor has {axes} axes")
        shapes.append(tuple(int(size) for size in _numbers(file, at, axes, "<i4")))
        if min(shapes[-1], default=0) < 0:
            raise ValueError(f"a tensor has shape {list(shapes[-1])}")
        at += 4 * axes
    at += 8 + int(_numbers(file, at, 1, "<u8")[0])  # padding, behind its size
    found = []
    for name, shape, (_, kind, _, size) in zip(names, shapes, heads, strict=True):
        _bytes(file, at, size)
        found.append(Entry(name, kind, shape, at, size))
        at += size
    return found


def _bytes(file: Any, begin: int, size: int) -> bytes:
    if begin + size > len(file):
        raise ValueError(f"it ends after {len(file)} bytes, before what it says it holds")
    return file[begin : begin + size].tobytes() if size < 1 << 20 else b""


def _numbers(file: Any, begin: int, count: int, kind: str) -> Any:
    size = count * np.dtype(kind).itemsize
    if begin + size > len(file):
        raise ValueError(f"it ends after {len(file)} bytes, before what it says it holds")
    return np.frombuffer(file[begin : begin + size].tobytes(), kind)
