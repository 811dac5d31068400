"""Folders to archives in pieces of limited size, with the SHA-256 of every piece."""

from __future__ import annotations

import lzma
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tformer_deploy.base.files import sha256

SUMS = "SHA256SUMS"
BLOCK = 1 << 20
FILTERS: list[dict[str, int]] = [
    {"id": lzma.FILTER_X86},
    {"id": lzma.FILTER_LZMA2, "preset": 6 | lzma.PRESET_EXTREME, "dict_size": 256 << 20, "lc": 4},
]
"""The x86 filter first: most of a kit is x86 code. The dictionary, 256 MiB, spans a whole library."""


class Pieces:
    """A file that is written in pieces of limited size: `core.tar.00`, `core.tar.01` and so on."""

    def __init__(self, stem: Path, limit: int) -> None:
        self.stem, self.limit, self.written = stem, limit, 0
        self.paths: list[Path] = []
        self._file: BinaryIO | None = None

    def write(self, data: bytes) -> int:
        """Append; returns how many bytes."""
        rest = memoryview(data)
        while rest:
            room = self.limit - self.written if self._file else 0
            if not room:
                self.close()
                self.paths.append(self.stem.with_name(f"{self.stem.name}.{len(self.paths):02}"))
                self._file, self.written = self.paths[-1].open("wb"), 0
                room = self.limit
            assert self._file
            self.written += self._file.write(rest[:room])
            rest = rest[room:]
        return len(data)

    def close(self) -> None:
        """The last piece is whole."""
        if self._file:
            self._file.close()
            self._file = None


def pack(folder: Path, out: Path, limit: int, compress: bool = False) -> list[Path]:
    """Write a folder's files as `<name>.tar`, or `.tar.xz`, in pieces of at most `limit` bytes; returns them.

    Owners and times are left out, so that the same files give the same pieces.
    """
    pieces = Pieces(out / f"{folder.name}.tar{'.xz' if compress else ''}", limit)
    compressor = lzma.LZMACompressor(filters=FILTERS) if compress else None
    target = Squeezed(pieces, compressor) if compressor else pieces
    with tarfile.open(fileobj=target, mode="w|", format=tarfile.PAX_FORMAT, bufsize=BLOCK) as archive:  # type: ignore[call-overload]
        for path in files_in(folder):
            entry = archive.gettarinfo(path, path.relative_to(folder.parent).as_posix())
            entry.uid = entry.gid = entry.mtime = 0
            entry.uname = entry.gname = ""
            if entry.isreg():
                with path.open("rb") as file:
                    archive.addfile(entry, file)
            else:
                archive.addfile(entry)
    if compressor:
        pieces.write(compressor.flush())
    pieces.close()
    return pieces.paths


class Squeezed:
    """Compresses what is written to it."""

    def __init__(self, target: Pieces, compressor: lzma.LZMACompressor) -> None:
        self.target, self.compressor = target, compressor

    def write(self, data: bytes) -> int:
        """Append; returns how many bytes."""
        self.target.write(self.compressor.compress(data))
        return len(data)


def files_in(folder: Path) -> Iterator[Path]:
    """Files and links, in order."""
    return (path for path in sorted(folder.rglob("*")) if path.is_symlink() or path.is_file())


def write_sums(folder: Path, pieces: list[Path]) -> None:
    """What `sha256sum --check` reads."""
    (folder / SUMS).write_text("".join(f"{sha256(path)}  {path.name}\n" for path in pieces))
