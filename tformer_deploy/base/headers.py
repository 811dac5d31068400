"""Safe reading of files from others: headers against a schema, paths inside their folder, hashes, sizes."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import stat
import struct
import tokenize
import tomllib
import warnings
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .errors import ArtifactError, ConfigError, TformerError
from .files import check_utf8, sha256

HEADER_BYTES, JSON_BYTES, TOKENIZER_BYTES = 16 << 20, 64 << 20, 64 << 20
"""Most bytes of headers, of other JSON and of tokenizers; larger files are refused before they are read."""
DAMAGED = (
    *(OSError, EOFError, LookupError, ValueError, TypeError, AttributeError, RuntimeError, MemoryError, OverflowError),
    *(NotImplementedError, SyntaxError, tokenize.TokenError, struct.error, zipfile.BadZipFile, zlib.error),
)
"""What zipfile, numpy and json raise for a damaged file."""
POINTER, POINTER_BYTES = b"version https://git-lfs.github.com/spec/", 1024
"""How a Git LFS pointer begins, and more bytes than any has."""
MADE_UP = ("/proc/", "/sys/")
"""Files of the kernel, which have no size."""
RATIO = 200
"""Most times that an .npz file may unpack to its size: nothing that tformer packs gets so much smaller."""


def within(directory: Path, name: str | Path) -> Path:
    """A path inside a directory, by its relative name. Raises ArtifactError if links lead out of it."""
    path = directory / name
    real, root = os.path.realpath(path), os.path.realpath(directory)
    if os.path.commonpath((real, root)) != root:
        way = "copy it into the folder, links as the files that they lead to (cp -rL), or make the folder again"
        raise ArtifactError(f"{path} lies outside {directory}: {way}")
    return path


def member(directory: Path, name: str) -> Path:
    """A regular file inside a directory, by its relative name. Raises ArtifactError."""
    path = within(directory, name)
    if not path.exists():
        raise ArtifactError(f"{directory} is incomplete: {name} is missing; copy or make it again")
    return readable(path)


def regular(path: Path) -> Path:
    """A path of a regular file; links are followed. Raises ArtifactError.

    Reading a pipe, a device or a file of the kernel may never end.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise ArtifactError(f"{path} is not there") from None
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(mode) or os.path.realpath(path).startswith(MADE_UP):
        raise ArtifactError(f"{path} is no regular file: copy or make it again")
    return path


def require_here(path: Path) -> None:
    """Raise ArtifactError for a pointer that Git LFS left in the place of a file."""
    if path.is_file() and path.stat().st_size < POINTER_BYTES:
        with path.open("rb") as file:
            if file.read(len(POINTER)) == POINTER:
                raise ArtifactError(
                    f"{path} is a pointer of Git LFS, not the file: run git lfs pull where it was cloned"
                )


def readable(path: Path) -> Path:
    """A path of a regular file that is no Git LFS pointer. Raises ArtifactError."""
    require_here(regular(path))
    return path


def content(path: Path, limit: int) -> bytes:
    """The content of a regular file. Raises ArtifactError, also for more than `limit` bytes."""
    if (size := readable(path).stat().st_size) > limit:
        raise ArtifactError(f"{path} has {size} bytes, more than {limit}: make it again")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}") from None


def read_bytes(directory: Path, name: str, limit: int) -> bytes:
    """The content of a file inside a directory. Raises ArtifactError, also for more than `limit` bytes."""
    return content(member(directory, name), limit)


def read_json(directory: Path, name: str, limit: int = JSON_BYTES) -> Any:
    """A JSON file of a directory. Raises ArtifactError."""
    content = read_bytes(directory, name, limit)
    try:
        return parse_json(content.decode("utf-8"))
    except ValueError as error:
        raise ArtifactError(f"{directory / name} is damaged ({error}): make it again") from None


def parse_json(text: str) -> Any:
    """Parse JSON of others. Raises ValueError, also for JSON that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from None


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file. Raises ConfigError."""
    try:
        if path.stat().st_size > JSON_BYTES:
            raise ConfigError(f"{path} has more than {JSON_BYTES} bytes: name a TOML file")
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: name a TOML file") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from None


def read_arrays(path: Path) -> dict[str, Any]:
    """The arrays of an .npz file, unless they would unpack to more than `RATIO` times its size and more than 1 MiB.

    Raises ArtifactError if it is no regular file, one of `DAMAGED` if it is damaged.
    """
    import numpy as np

    with zipfile.ZipFile(readable(path)) as archive:
        size, packed = (sum(getattr(part, of) for part in archive.infolist()) for of in ("file_size", "compress_size"))
        if size > max(1 << 20, RATIO * packed):
            raise ValueError(f"its {packed} bytes unpack to {size}")
        if damaged := archive.testzip():
            raise ValueError(f"{damaged} does not match its checksum")
    with warnings.catch_warnings(action="ignore"), np.load(path, allow_pickle=False) as file:
        found = {name: file[name] for name in file.files}
    if strange := [name for name, array in found.items() if not isinstance(array, np.ndarray)]:
        raise ValueError(f"{strange[0]} is no array")
    return found


OTHERS = {
    "manifest.json": "a bundle: give the run folder that it was exported from",
    "checkpoint.json": "a run folder: make a bundle of it with tformer export",
    "config.json": "another tool's model: make a run folder of it with tformer import",
}
"""A file in a folder → what the folder is, and what to do with it. engines/src/bundle/header.cpp has the same."""
KINDS = {
    "bundle": "; a bundle is a folder that tformer export writes",
    "checkpoint": "; a checkpoint is a run folder, which tformer train or import writes",
}
"""Kind → how to get one; header.cpp has the same."""


def read_header(directory: Path, name: str, kind: str, version: int, oldest: int = 1) -> dict[str, Any]:
    """Read the header of a directory of a `kind`, with a format version from `oldest` to `version`; check its schema.

    Raises ArtifactError.
    """
    path = directory / name
    check_utf8(directory)
    if not path.exists():
        raise ArtifactError(f"{directory} is not a {kind}: {_instead(directory, name, kind)}")
    header = read_json(directory, name, HEADER_BYTES)
    try:
        found = header["format"], header["version"]
    except (KeyError, TypeError, IndexError) as error:
        raise ArtifactError(f"{path} is damaged ({error}): make the {kind} again") from None
    if found[0] != f"tformer-{kind}":
        raise ArtifactError(f"{path} describes a '{found[0]}', not a {kind}")
    if type(found[1]) is not int or found[1] < 1:
        raise ArtifactError(f"{path} has format version {found[1]}, which never was: make the {kind} again")
    if found[1] < oldest:
        raise ArtifactError(f"{path} has format version {found[1]}, of before the first release: make the {kind} again")
    if found[1] > version:
        raise ArtifactError(f"{path} has format version {found[1]}, this tformer reads up to {version}: update it")
    if "sha256" in header and header["sha256"] != digest(header):
        raise ArtifactError(f"{path} was edited or damaged: it does not match its own SHA-256; make the {kind} again")
    if wrong := schema_error(header, kind):
        raise ArtifactError(f"{path} is damaged: {wrong}; make the {kind} again")
    return dict(header)


def _instead(directory: Path, name: str, kind: str) -> str:
    """What a folder without the header is, and how to get a `kind`."""
    if not directory.is_dir():
        there = "it is a file" if directory.exists() else "there is no such folder"
        return f"{there}{KINDS.get(kind, '')}"
    others = [f"; it is {advice}" for other, advice in OTHERS.items() if (directory / other).is_file()]
    return f"it has no {name}{[*others, KINDS.get(kind, '')][0]}"


def is_of(directory: Path, name: str, kind: str) -> bool:
    """Whether a folder has a header of that kind, in any version."""
    try:
        return bool(read_json(directory, name)["format"] == kind)
    except (TformerError, KeyError, TypeError):
        return False


def digest(header: Mapping[str, Any]) -> str:
    """Hex SHA-256 of a header's values, without `sha256` itself."""
    others = {name: value for name, value in header.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()


def schema_error(value: Any, kind: str) -> str:
    """How a value breaks the schema of its kind; empty: it does not."""
    from fastjsonschema import JsonSchemaValueException

    try:
        _schema(kind)(value)
    except JsonSchemaValueException as error:
        where = ".".join(error.path[1:])
        if error.rule == "propertyNames":
            pattern = error.rule_definition["pattern"].removesuffix("$") + r"\Z"
            bad = next(name for name in error.value if not re.search(pattern, name))
            return f"{where} has the name {bad!r:.80}, which no file or part of it can have"
        return str(error.message).removeprefix("data ").removeprefix("data.")
    return ""


@functools.cache
def _schema(kind: str) -> Callable[[Any], Any]:
    import fastjsonschema

    path = Path(__file__).parent / "schemas" / f"{kind}.json"
    made: Callable[[Any], Any] = fastjsonschema.compile(json.loads(path.read_text(encoding="utf-8")))
    return made


def verify(directory: Path, hashes: Mapping[str, str], kind: str) -> None:
    """Compare every listed file with its SHA-256. Raises ArtifactError for the first that is missing or differs."""
    for name, expected in hashes.items():
        if sha256(member(directory, name)) != expected:
            raise ArtifactError(
                f"{kind} {directory} is damaged: {name} does not match its SHA-256 as recorded; copy or make it again"
            )
