"""Object stores and other places that fsspec knows by a URL."""

from __future__ import annotations

import errno
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

import fsspec

from ...base.errors import ConfigError, DataError, TformerError
from .storage import Input

WHOLE = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"}
"""Protocols of stores where an object appears once it is complete."""
_PASSWORD = re.compile(r"(?<=://)[^/?#\s]*:[^/?#\s]*@")
_SIGNATURE = re.compile(r"(https?://[^\s?#'\"]*)[?#][^\s'\"]*")
_HOW = "check the address, the network and your keys"


def without_secrets(text: str) -> str:
    """URLs without passwords and, over HTTP, without their queries, which may be signatures."""
    return _SIGNATURE.sub(r"\1", _PASSWORD.sub("", text))


class _WithUrl:
    """A file system, or a file of one, whose errors say where; see `_errors_naming`."""

    def __init__(self, of: Any, url: str) -> None:
        self._of, self._url = of, url

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._of, name)
        if not callable(found):
            return found

        def call(*arguments: Any, **options: Any) -> Any:
            with _errors_naming(self._url):
                return found(*arguments, **options)

        return call

    def __enter__(self) -> _WithUrl:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def _errors_naming(url: str) -> Iterator[None]:
    """Around calls of a store, whose library has errors of its own. Raises FileNotFoundError, or TformerError."""
    try:
        yield
    except TformerError:
        raise
    except FileNotFoundError as error:
        error.errno, error.strerror = errno.ENOENT, without_secrets(error.strerror or str(error))
        error.filename = without_secrets(str(error.filename or url))
        raise
    except Exception as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise DataError(f"{without_secrets(url)}: {without_secrets(reason)}: {_HOW}") from error


class Bucket:
    """A `Store` behind a URL."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.fs, self.root = _open(self.url)
        self.whole = not WHOLE.isdisjoint([self.fs.protocol] if isinstance(self.fs.protocol, str) else self.fs.protocol)

    def names(self) -> set[str]:
        """See `Store`."""
        try:
            self.fs.invalidate_cache()
            return {path.rsplit("/", 1)[-1] for path in self.fs.ls(self.root, detail=False)}
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
            file = _WithUrl(self.fs.open(path, "wb", autocommit=False), self.url)
            try:
                yield cast(BinaryIO, file)
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
            with _WithUrl(self.fs.open(temporary, "wb"), self.url) as file:
                yield cast(BinaryIO, file)
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
    """The files of a URL or pattern, in order. Raises TformerError."""
    fs, path = _open(pattern)
    magic = "*[" if path.startswith(("http://", "https://")) else "*?["  # a query is no pattern
    names = sorted(fs.glob(path)) if any(c in path for c in magic) else [path]
    found = [(name, _info(fs, name, pattern)) for name in names]
    files = [(str(fs.unstrip_protocol(name)), info["size"]) for name, info in found if info["type"] == "file"]
    # Some servers do not say the size.
    return [Input(shown := without_secrets(url), int(size or 0), url if url != shown else "") for url, size in files]


def _info(fs: Any, name: str, url: str) -> dict[str, Any]:
    """A store's metadata of a name, which need not exist. Raises TformerError."""
    try:
        return dict(fs.info(name))
    except FileNotFoundError as error:
        reason = error.__cause__  # over HTTP any failure is a missing file
        if isinstance(reason, OSError) or getattr(reason, "status", 404) != 404:
            raise DataError(f"{without_secrets(url)}: {without_secrets(str(reason))}: {_HOW}") from None
        return {"type": "none"}


def open_url(url: str) -> BinaryIO:
    """A file to read from its beginning. Raises DataError."""
    fs, path = _open(url)
    try:
        return cast(BinaryIO, _WithUrl(fs.open(path, "rb"), url))
    except FileNotFoundError:
        raise DataError(f"{without_secrets(url)}: no such file") from None


def canonical_url(url: str) -> str:
    """A URL as its store spells it, such as `s3://` for `s3a://`. Raises TformerError."""
    fs, path = _open(url)
    return str(fs.unstrip_protocol(path))


def _open(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it. Raises ConfigError for one that is not known."""
    with _errors_naming(url):
        try:
            fs, path = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:  # a package that is not installed, or no such protocol
            raise ConfigError(f"{without_secrets(url)}: {error}") from None
    return _WithUrl(fs, url), str(path)
