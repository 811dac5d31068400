"""Object stores and other places that fsspec knows by a URL."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

import fsspec

from ..errors import ConfigError, DataError
from .storage import Input

WHOLE = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"}
"""Where an object appears when all of it has been sent."""


class Bucket:
    """A `Store` behind a URL."""

    def __init__(self, url: str) -> None:
        self.fs, self.root = _open(url.rstrip("/"))
        self.whole = not WHOLE.isdisjoint([self.fs.protocol] if isinstance(self.fs.protocol, str) else self.fs.protocol)

    def names(self) -> set[str]:
        """See `Store`."""
        try:
            return {path.rsplit("/", 1)[-1] for path in self.fs.ls(self.root, detail=False, refresh=True)}
        except FileNotFoundError:
            return set()

    def read(self, name: str) -> bytes:
        """See `Store`."""
        return bytes(self.fs.cat_file(f"{self.root}/{name}"))

    def write(self, name: str, content: bytes) -> None:
        """See `Store`."""
        if self.whole:
            self.fs.pipe_file(f"{self.root}/{name}", content)
            return
        with self.writing(name) as file:
            file.write(content)

    @contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        """See `Store`."""
        path = f"{self.root}/{name}"
        if self.whole:
            # An upload in parts ends with `commit`; one that is not ended is no object.
            file = self.fs.open(path, "wb", autocommit=False)
            try:
                yield file
                file.close()
            except BaseException:
                file.discard()
                raise
            file.commit()
            self.fs.invalidate_cache()
            return
        folder, _, last = path.rpartition("/")
        self.fs.makedirs(folder, exist_ok=True)
        temporary = f"{folder}/.{last}.{secrets.token_hex(4)}.tformer.tmp"
        try:
            with self.fs.open(temporary, "wb") as file:
                yield file
            self.fs.mv(temporary, path)
        except BaseException:
            if self.fs.exists(temporary):
                self.fs.rm_file(temporary)
            raise

    def remove(self, name: str) -> None:
        """See `Store`."""
        if self.fs.exists(f"{self.root}/{name}"):
            self.fs.rm_file(f"{self.root}/{name}")

    @contextmanager
    def held(self) -> Iterator[None]:
        """See `Store`. There are no locks: two runs write the same files, or see in the end that they differ."""
        yield


def find(pattern: str) -> list[Input]:
    """The files of a URL or pattern, in order."""
    fs, path = _open(pattern)
    names = sorted(fs.glob(path)) if any(c in path for c in "*?[") else [path] if fs.isfile(path) else []
    return [Input(str(fs.unstrip_protocol(name)), int(fs.info(name)["size"])) for name in names if fs.isfile(name)]


def open_url(url: str) -> BinaryIO:
    """A file to read from its beginning. Raises DataError."""
    fs, path = _open(url)
    try:
        return cast(BinaryIO, fs.open(path, "rb"))
    except FileNotFoundError:
        raise DataError(f"{url}: no such file") from None


def _open(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it. Raises ConfigError for one that is not known."""
    try:
        fs, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:  # a package that is not installed, or no such protocol
        raise ConfigError(f"{url}: {error}") from None
    return fs, str(path)
