"""Local folders, and object stores by URL. Files appear whole."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ...base.errors import DataError
from ...base.files import atomic_file, hold, remove_leftovers
from .storage import RECORDS, Input, Store

_LOCAL = re.compile(r"^(file|local)://", re.IGNORECASE)


class Folder:
    """A `Store` in a local or mounted folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self) -> set[str]:
        """See `Store`."""
        return {path.name for path in self.path.iterdir() if not path.name.startswith(".")}

    def read(self, name: str) -> bytes:
        """See `Store`."""
        return (self.path / name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        """See `Store`."""
        with self.writing(name) as file:
            file.write(content)

    @contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        """See `Store`."""
        with atomic_file(self.path / name, leftovers=False) as temporary, temporary.open("wb") as file:
            yield file
            file.flush()

    def remove(self, name: str) -> None:
        """See `Store`."""
        (self.path / name).unlink(missing_ok=True)

    @contextmanager
    def held(self) -> Iterator[None]:
        """See `Store`. Removes what killed processes have left. Raises ArtifactError where another one writes there."""
        self.path.mkdir(parents=True, exist_ok=True)
        with hold(self.path):
            for folder in (self.path, self.path / RECORDS):
                remove_leftovers(folder)
            yield


def is_url(place: str) -> bool:
    """Whether a place is remote; `file://` and `local://` are local paths."""
    return "://" in place and not _LOCAL.match(place)


def as_path(place: str) -> Path:
    """The path of a local name or URL."""
    return Path(_LOCAL.sub("", place))


def shown_place(place: str) -> str:
    """A path or URL as messages show it, without passwords and signatures."""
    if is_url(place):
        from .remote import without_secrets

        return without_secrets(place)
    return place


def canonical(place: str) -> str:
    """The canonical spelling of a path or URL. Raises TformerError."""
    if is_url(place):
        from .remote import canonical_url

        return canonical_url(place)
    return str(as_path(place).resolve())


def open_store(place: str) -> Store:
    """The folder of that path or URL, which need not exist. Raises TformerError."""
    if is_url(place):
        from .remote import Bucket

        return Bucket(place)
    return Folder(as_path(place))


def find_inputs(patterns: Sequence[str]) -> list[Input]:
    """The files that paths, URLs and patterns name; those of a pattern in order. Raises DataError for none."""
    found: list[Input] = []
    for pattern in patterns:
        if is_url(pattern):
            from .remote import find

            files = find(pattern)
        else:
            path = as_path(pattern)
            names = [str(path)] if path.is_file() else sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207
            files = [Input(name, Path(name).stat().st_size) for name in names if Path(name).is_file()]
        if not files:
            raise DataError(f"{shown_place(pattern)}: no such file: check the path, and quote a pattern")
        found += files
    return found


def open_input(file: Input) -> BinaryIO:
    """A file to read from its beginning. Raises DataError."""
    if is_url(file.place):
        from .remote import open_url

        return open_url(file.place)
    return Path(file.place).open("rb")
