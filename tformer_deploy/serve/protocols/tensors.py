"""Tensors of KServe v2: values in JSON, or as Triton's binary extension has them, after the JSON.

A binary BYTES element is 4 bytes of its length, little-endian, then the element; numbers are little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

from ...base.errors import ConfigError, unknown

CODES = {
    "BOOL": "?",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
}
"""Types of numbers, as `struct` names them."""
KINDS = {"BYTES": str, "BOOL": bool, "FP16": float, "FP32": float, "FP64": float}
"""Types of their values in Python; of all others, int."""
AXES, MOST = 8, 1 << 31
"""An input has at most so many axes; each is shorter than that."""
REFUSED = {
    "classification": "there are no classes",
    "shared_memory_region": "send tensors in the body",
}
"""Parameters of tensors that would change what is asked."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a request or an answer."""

    name: str
    datatype: str
    shape: Sequence[int]
    values: Sequence[Any]
    """All elements, the last axis running fastest; of BYTES, texts."""

    def described(self) -> dict[str, Any]:
        """Its header in JSON, without values."""
        return {"name": self.name, "datatype": self.datatype, "shape": list(self.shape)}

    def packed(self) -> bytes:
        """Its values, binary."""
        if self.datatype != "BYTES":
            return struct.pack(f"<{len(self.values)}{CODES[self.datatype]}", *self.values)
        elements = [text.encode() for text in self.values]
        return b"".join(struct.pack("<I", len(element)) + element for element in elements)


def read_tensors(described: Any, binary: bytes) -> dict[str, Tensor]:
    """The inputs of a request by name; `binary`: what follows the JSON. Raises ConfigError."""
    tensors: dict[str, Tensor] = {}
    start = 0
    for header in as_objects("inputs", described):
        size = parameters_of(header).get("binary_data_size")
        if size is not None and (type(size) is not int or not 0 <= size <= len(binary) - start):
            raise ConfigError(
                f"input '{_name(header):.40}': binary_data_size={size!r:.40} is not what follows the JSON"
            )
        tensor = read_tensor(header, None if size is None else binary[start : start + size])
        if tensor.name in tensors:
            raise ConfigError(f"input '{tensor.name:.40}' stands twice")
        tensors[tensor.name] = tensor
        start += size or 0
    if start < len(binary):
        raise ConfigError(f"{len(binary) - start} bytes follow the last binary input: send what binary_data_size says")
    return tensors


def as_objects(name: str, value: Any) -> list[dict[str, Any]]:
    """Tensors of a request, each described by an object with a name. Raises ConfigError."""
    if not isinstance(value, list) or not all(isinstance(each, dict) and _name(each) for each in value):
        raise ConfigError(f'{name}: must be a list of objects with a name, as in {{"name": "text", …}}')
    return value


def parameters_of(header: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a request or a tensor. Raises ConfigError for what is not supported."""
    found = header.get("parameters", {})
    if not isinstance(found, dict):
        raise ConfigError("parameters: must be an object")
    for name, reason in REFUSED.items():
        if name in found:
            raise ConfigError(f"parameter '{name}' is not supported: {reason}")
    return found


def _name(header: Mapping[str, Any]) -> str:
    name = header.get("name")
    return name if isinstance(name, str) else ""


def read_tensor(header: Mapping[str, Any], binary: bytes | None) -> Tensor:
    """A tensor from its header; `binary`: its values, if they are not in `data`. Raises ConfigError."""
    name, datatype, shape = f"{_name(header):.40}", header.get("datatype"), header.get("shape")
    if not isinstance(datatype, str) or datatype not in (*CODES, "BYTES"):
        raise unknown(f"datatype of input '{name}'", f"{datatype!s:.40}", [*CODES, "BYTES"])
    if not isinstance(shape, list) or len(shape) > AXES or not all(type(n) is int and 0 <= n < MOST for n in shape):
        raise ConfigError(f"input '{name}': shape must be a list of at most {AXES} whole numbers, as in [2]")
    if binary is not None:
        values = _unpacked(name, datatype, prod(shape), binary)
    elif "data" in header:
        values = _flat(header["data"])
        kind = KINDS.get(datatype, int)
        if not all(type(value) is kind or (kind is float and type(value) is int) for value in values):
            raise ConfigError(f"input '{name}': data must be a list of values of type {datatype}")
    else:
        raise ConfigError(f"input '{name}' has no data")
    if len(values) != prod(shape):
        raise ConfigError(f"input '{name}': {len(values)} values do not fill the shape {shape!s:.60}")
    return Tensor(_name(header), datatype, shape, values)


def _flat(data: Any) -> list[Any]:
    """Values that may be nested as the shape is."""
    values = data if isinstance(data, list) else [data]
    while values and all(isinstance(each, list) for each in values):
        values = list(chain.from_iterable(values))
    return values


def _unpacked(name: str, datatype: str, count: int, binary: bytes) -> list[Any]:
    """Binary values."""
    if datatype != "BYTES":
        if len(binary) != count * struct.calcsize(f"<{CODES[datatype]}"):
            raise ConfigError(f"input '{name}': {len(binary)} bytes are not {count} values of type {datatype}")
        return list(struct.unpack(f"<{count}{CODES[datatype]}", binary))
    elements, start = [], 0
    try:
        while start < len(binary):
            [size] = struct.unpack_from("<I", binary, start)
            start += 4 + size
            if start > len(binary):
                raise struct.error
            elements.append(binary[start - size : start])
    except struct.error:
        raise ConfigError(f"input '{name}': its binary data ends within an element") from None
    return texts_of(name, elements)


def texts_of(name: str, elements: Iterable[bytes]) -> list[str]:
    """Elements of a BYTES input. Raises ConfigError for one that is not UTF-8."""
    texts: list[str] = []
    for element in elements:
        try:
            texts.append(element.decode())
        except UnicodeDecodeError:
            raise ConfigError(f"input '{name:.40}': element {len(texts)} is not UTF-8") from None
    return texts
