"""NumPy files of vectors, written row by row."""

from __future__ import annotations

import io
import shutil
import tempfile
import zipfile
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from ..base.errors import ConfigError
from ..base.files import check_writable, output_file
from ..translate.encode import Encoded
from ..translate.pooling import NO_POOL

VERSION = (1, 0)
"""Version of the .npy format."""


def check_name(path: Path, pool: str) -> None:
    """Raise ConfigError for a file of the wrong type, or one that cannot be written."""
    suffix, content = (".npz", "a vector a token") if pool == NO_POOL else (".npy", "a vector a line")
    if path.suffix != suffix and not str(path).startswith("/dev/"):
        raise ConfigError(f"--out {path}: --pool {pool} gives {content}: name a {suffix} file")
    check_writable(path)


@contextmanager
def vector_file(path: Path, pool: str, width: int) -> Iterator[Callable[[Encoded], None]]:
    """Yield a function that adds a line; the file appears when the block succeeds.

    `.npy`: (lines, width) float32. `.npz`, with pool `none`: `memory` (tokens, width) float32 and `ids` (tokens) int32
    of all lines; line i has those from `offsets[i]` to `offsets[i + 1]`, which is (lines + 1) int64.
    """
    ids, offsets = array("i"), array("q", [0])
    with output_file(path) as temporary, tempfile.TemporaryFile(dir=temporary.parent) as rows:

        def add(found: Encoded) -> None:
            rows.write(found.vectors.tobytes())
            ids.extend(found.ids)
            offsets.append(len(ids))

        yield add
        rows.seek(0)
        with temporary.open("wb") as file:
            if pool != NO_POOL:
                _copy(rows, (len(offsets) - 1, width), file)
                return
            with zipfile.ZipFile(file, "w") as archive:
                with archive.open("memory.npy", "w", force_zip64=True) as member:
                    _copy(rows, (len(ids), width), member)
                for name, values in (("ids", np.array(ids, np.int32)), ("offsets", np.array(offsets, np.int64))):
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, values, VERSION, allow_pickle=False)


def _copy(rows: IO[bytes], shape: tuple[int, int], out: IO[bytes]) -> None:
    """Write rows of float32 as an array of a shape."""
    header = io.BytesIO()
    described = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, described)
    out.write(header.getvalue())
    shutil.copyfileobj(rows, out)
