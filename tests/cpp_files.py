"""Files of bundles that the library asks a test for, and what it lists of them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_size_t, c_void_p
from pathlib import Path
from typing import Any

from .cpp_library import CLOSE, READ, RELEASE, CFiles, Content, CppError, library

MISSING = 7
Read = Callable[[str], bytes | int | None]
"""The bytes of a file; a status of tformer.h; or None, for there is no such file."""


class Memory:
    """Files of a bundle that a callback gives, and what the library did with them."""

    def __init__(self, read: Read, name: str | None = None, offset: int = 64) -> None:
        """`offset`: bytes begin at an address that is no multiple of twice that."""
        self.reads: list[str] = []
        self.released = self.closed = 0
        self._read, self._offset, self._given = read, offset, dict[int, Any]()
        self._calls = READ(self._give), RELEASE(self._release), CLOSE(self._close)
        self.files = CFiles(name.encode() if name else None, *self._calls, None)

    def _give(self, _: Any, name: bytes, content: Any) -> int:
        self.reads.append(name.decode())
        found = self._read(name.decode())
        if found is None or isinstance(found, int):
            self.reads.pop()
            return MISSING if found is None else found
        room = ctypes.create_string_buffer(len(found) + 4 * self._offset)
        start = -(-ctypes.addressof(room) // (2 * self._offset)) * 2 * self._offset + self._offset
        ctypes.memmove(start, found, len(found))
        self._given[len(self.reads)] = room
        content[0] = Content(start, len(found), len(self.reads))
        return 0

    def _release(self, _: Any, content: Any) -> None:
        room = self._given.pop(content[0].handle)
        ctypes.memset(room, 0xEE, len(room))  # who reads it from now on finds no weights
        self.released += 1

    def _close(self, _: Any) -> None:
        self.closed += 1

    def require_closed(self) -> None:
        """All that was given is released, and the files are closed once."""
        assert (self.released, self.closed, self._given) == (len(self.reads), 1, {})


def folder_read(folder: Path) -> Read:
    """Reads a folder's files."""

    def read(name: str) -> bytes | None:
        path = folder / name
        return path.read_bytes() if path.is_file() else None

    return read


def listed(folder: Path | Memory) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Variants and options of a bundle."""
    bundle = c_void_p()
    none = CFiles(str(folder).encode(), READ(), RELEASE(), CLOSE(), None)
    files = folder.files if isinstance(folder, Memory) else none
    if status := library().tformer_bundle_open(byref(files), byref(bundle)):
        raise CppError(status, library().tformer_error().decode(), [])
    try:
        return items(library().tformer_bundle_variant, bundle), items(library().tformer_bundle_option, bundle)
    finally:
        library().tformer_bundle_close(bundle)


def items(function: Any, bundle: c_void_p | None) -> list[dict[str, Any]]:
    all_: list[dict[str, Any]] = []
    while item := function(bundle, c_size_t(len(all_))):
        values = {name: getattr(item.contents, name) for name, *_ in item.contents._fields_}
        all_.append({name: each.decode() if isinstance(each, bytes) else each for name, each in values.items()})
    return all_
