"""The model.bin of CTranslate2: numbers and tensors one behind the other, and other names of the same tensors.

Source: CTranslate2, python/ctranslate2/specs/model_spec.py, `_serialize`.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..base.errors import ArtifactError
from ..base.headers import readable
from .weights import Weights

DTYPES = (torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16)
"""In the order of their numbers in a file."""
TEXTS = ("unk_token", "bos_token", "eos_token")
"""Of older versions; newer ones have them in config.json."""


@dataclass(frozen=True)
class Binary:
    """What a model.bin holds."""

    weights: Weights
    numbers: dict[str, Any]
    """Settings, and texts of older versions."""
    names: dict[str, str]
    """Of each tensor, the name that it is stored by."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    data: Any
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self) -> Tensor:
        """A copy."""
        return torch.frombuffer(bytearray(self.data), dtype=self.dtype).view(self.shape)


class Reader:
    """Values of a file, one after the other. Raises struct.error behind its end."""

    def __init__(self, data: Any) -> None:
        self.data, self.position = data, 0

    def take(self, kind: str) -> Any:
        """A value of a kind that `struct` knows."""
        (found,) = struct.unpack_from(f"<{kind}", self.data, self.position)
        self.position += struct.calcsize(f"<{kind}")
        return found

    def text(self) -> str:
        """A text that says how long it is and ends with a zero."""
        return str(self.take(f"{self.take('H')}s").rstrip(b"\0").decode())

    def tensor(self) -> Stored:
        """Sizes, type and bytes. Raises ValueError where they do not fit each other."""
        shape = tuple(self.take("I") for _ in range(self.take("B")))
        kind, size = self.take("B"), self.take("I")
        end = self.position + size
        if kind >= len(DTYPES) or math.prod(shape) * DTYPES[kind].itemsize != size or end > len(self.data):
            raise ValueError(f"a tensor of {shape} before byte {end} is longer or shorter than it says")
        stored = Stored(self.data[self.position : end], DTYPES[kind], shape)
        self.position = end
        return stored


def read_binary(path: Path) -> Binary:
    """Read a model.bin of binary version 4 to 6. Raises ArtifactError."""
    try:
        return _parsed(path, Reader(np.memmap(readable(path), np.uint8, "r") if path.stat().st_size else b""))
    except (OSError, struct.error, ValueError) as error:
        raise ArtifactError(f"{path} is damaged: {error}: copy it again") from None


def _parsed(path: Path, file: Reader) -> Binary:
    if not 4 <= (version := file.take("I")) <= 6:
        raise ArtifactError(f"{path} is of binary version {version}, not 4 to 6: convert it with CTranslate2 4")
    if (spec := file.text()) != "TransformerSpec":
        raise ArtifactError(f"{path} holds a {spec}, not a TransformerSpec: only encoder-decoders are supported")
    file.take("I")  # the revision: in any, names that are unknown are refused
    tensors: dict[str, Stored] = {}
    numbers: dict[str, Any] = {}
    for _ in range(file.take("I")):
        name, stored = file.text(), file.tensor()
        if stored.shape and name not in TEXTS:
            tensors[name] = stored
        else:
            numbers[name] = stored.data.tobytes().decode() if stored.shape else stored.read().item()
    names = {name: name for name in tensors if not name.endswith("_scale")}
    aliases = [(file.text(), file.text()) for _ in range(file.take("I"))]
    names |= {alias: name for alias, name in aliases if name in names}

    def read(name: str) -> Tensor:
        """A tensor, divided by what its rows, or it as a whole, were multiplied by."""
        stored, scale = tensors[name], tensors.get(f"{name}_scale")
        if stored.dtype.is_floating_point:
            return stored.read()
        by = numbers.get(f"{name}_scale") if scale is None else scale.read().float()[:, None]
        if by is None:
            raise ArtifactError(f"{path}: tensor '{name}' is quantized without a scale: convert the model again")
        return stored.read().float() / by

    shapes = {name: tensors[own].shape for name, own in names.items()}
    weights = Weights(path, {name: lambda own=own: read(own) for name, own in names.items()}, shapes)  # type: ignore[misc]
    return Binary(weights, numbers, names)
