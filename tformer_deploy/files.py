"""Files that are whole or absent: atomic writes, hashes, versioned JSON headers."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import ArtifactError


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; move it there if the block succeeds, delete it if not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        _sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically, readable by people."""
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def atomic_directory(path: Path, force: bool) -> Iterator[Path]:
    """Yield an empty directory beside `path`; it takes that name if the block succeeds.

    A kill at any moment leaves the old directory or none under the name. Raises ArtifactError where something
    stands at `path` and `force` is off.
    """
    if path.exists() and not force:
        raise ArtifactError(f"{path} exists already: choose another folder or add --force")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        for file in temporary.rglob("*"):
            if file.is_file():
                _sync(file)
        if path.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
            path.replace(old / "replaced")
            try:
                temporary.replace(path)
            except OSError:
                (old / "replaced").replace(path)
                raise
            shutil.rmtree(old, ignore_errors=True)
        else:
            temporary.replace(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def read_header(directory: Path, name: str, kind: str, version: int) -> dict[str, Any]:
    """Read the JSON file that makes a directory a `kind` of at most format `version`. Raises ArtifactError."""
    path = directory / name
    if not path.is_file():
        raise ArtifactError(f"{directory} is not a {kind}: it has no {name}")
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
        found = header["format"], header["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path} is damaged ({error}): make the {kind} again") from None
    if found[0] != f"tformer-{kind}":
        raise ArtifactError(f"{path} describes a '{found[0]}', not a {kind}")
    if not isinstance(found[1], int) or found[1] > version:
        raise ArtifactError(f"{path} has format version {found[1]}, this tformer reads up to {version}: update it")
    return dict(header)


def verify(directory: Path, hashes: dict[str, str], kind: str) -> None:
    """Compare every listed file with its SHA-256. Raises ArtifactError for the first that is missing or differs."""
    for name, expected in hashes.items():
        path = directory / name
        if not path.is_file():
            raise ArtifactError(f"{kind} {directory} is incomplete: {name} is missing; copy or make it again")
        if sha256(path) != expected:
            raise ArtifactError(
                f"{kind} {directory} is damaged: {name} does not match its SHA-256 in the header; copy or make it again"
            )


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
