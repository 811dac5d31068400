"""What a path holds, read once for all formats. The format is decided by content, not by file names."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

from ..base.errors import ArtifactError
from .marian_file import names_of
from .weights import WRAPPERS, kind_of, load_parts, read_weights, state_dict, without

ENDINGS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".npz")
"""Suffixes of checkpoints: a file with one of them and other content is reported as damaged."""


@dataclass(frozen=True)
class Seen:
    """A file's parts and tensors by their names; of a folder, its path alone."""

    path: Path
    parts: frozenset[str] = frozenset()
    """What torch.save was given: its keys."""
    names: frozenset[str] = frozenset()
    """Names of tensors and arrays, without a wrapper's prefix."""
    error: ArtifactError | None = None
    """Why a file cannot be read."""

    @classmethod
    def of(cls, path: Path) -> Seen:
        """Look at a path."""
        if not path.is_file():
            return cls(path)
        try:
            kind = kind_of(path)
            if kind == "npz":
                with zipfile.ZipFile(path) as archive:
                    return cls(path, names=frozenset(name.removesuffix(".npy") for name in archive.namelist()))
            if kind == "marian":
                return cls(path, names=names_of(path))
            if kind == "safetensors":
                return cls(path, names=frozenset(read_weights(path, *WRAPPERS)))
            if not kind and path.suffix not in ENDINGS:
                return cls(path)
            parts = load_parts(path)
            return cls(path, frozenset(parts), frozenset(without(state_dict(path, parts), *WRAPPERS)))
        except ArtifactError as error:
            return cls(path, error=error)
