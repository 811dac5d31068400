"""`tformer import`: a source becomes a run folder, compared with the original code where that is installed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from ..base.errors import ArtifactError, ConfigError, ParityError, unknown
from ..base.files import atomic_directory, sha256
from ..base.headers import is_of, regular
from ..base.notes import note
from ..base.settings import from_dict
from ..bundle.text import require_fit
from ..decoding import DecodeOptions
from ..model.checkpoint import HEADER, Checkpoint, open_checkpoint, save_checkpoint
from .base import Imported, ImportOptions
from .compare import Comparison, compare, errors_of
from .formats import FORMATS, OPTIONS
from .seen import Seen
from .weights import writing

STRANGE = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError)
"""Errors that a malformed file can raise where no importer checks for the very fault."""


def module_of(name: str) -> ModuleType:
    """The importer of a format. Raises ConfigError."""
    if name not in FORMATS:
        raise unknown("format", name, FORMATS)
    return import_module(f".{name.replace('-', '_')}", __package__)


def require_known(name: str, options: ImportOptions) -> None:
    """Raise ConfigError for options that a format does not read, alone or beside others."""
    if strange := [_flag(each) for each in options.to_json(str) if each not in OPTIONS[name]]:
        known = ", ".join(map(_flag, OPTIONS[name]))
        raise ConfigError(f"{', '.join(strange)}: not used by format {name}, which takes {known}")
    if options.vocab and options.src_vocab and options.tgt_vocab:
        raise ConfigError("--vocab is not used where --src-vocab and --tgt-vocab are both given: leave it out")


def _flag(field: str) -> str:
    """The command's option for a field of ImportOptions."""
    return {"parts": "--part", "model": "--set"}.get(field, f"--{field.replace('_', '-')}")


def recognised(path: Path) -> str:
    """The format of a path. Raises ConfigError if none, or several, recognise it."""
    require_regular(path)
    seen = Seen.of(path)
    found, unreadable = [], [seen.error] if seen.error else []
    for name in FORMATS:
        try:
            found += [name] if module_of(name).recognises(seen) else []
        except ArtifactError as error:  # one format's file may be what another one refuses
            unreadable.append(error)
    if len(found) == 1:
        return found[0]
    if unreadable and not found:
        raise unreadable[0]
    formats = ", ".join(found or FORMATS)
    like = f"could be of several formats, {formats}" if found else f"looks like none of {formats}"
    raise ConfigError(f"{path} {like}: name one, as in tformer import {(found or [*FORMATS])[0]} {path}")


def require_regular(path: Path) -> None:
    """Raise ArtifactError where a source, or a file of its folder, is a pipe, a device or made up by the kernel.

    Importers open regular files alone; this is for the originals, which open what is there.
    """
    if not path.exists():
        raise ArtifactError(f"{path} is not there")
    for each in path.rglob("*") if path.is_dir() else [path]:
        if each.exists() and not each.is_dir():
            regular(each)


def import_checkpoint(
    name: str,
    path: Path,
    out: Path,
    options: ImportOptions | None = None,
    lines: Sequence[str] = (),
    comparing: bool = True,
    force: bool = False,
) -> tuple[Imported, Comparison]:
    """Make a run folder of a source. Raises ParityError, and leaves nothing, where it differs from the original.

    Raises ConfigError for options that the format does not read.
    """
    options = options or ImportOptions()
    module = module_of(name)
    require_known(name, options)
    require_regular(path)
    with _understood(path, name):
        imported: Imported = module.read(path, options)
    require_fit(imported.config, imported.tokenizers, f"{path}: ")
    from_dict(DecodeOptions, imported.decoding, "decoding")
    with atomic_directory(out, force, "run", lambda folder: is_of(folder, HEADER, "tformer-checkpoint")) as directory:
        weights = directory / "weights" / "imported.safetensors"
        weights.parent.mkdir()
        with writing(weights, imported.tensors.shapes) as write:
            for parameter, tensor in _tensors(imported, path, name):
                write(parameter, tensor)
        checkpoint = _save(directory, imported, weights, {})
        comparison = _compared(imported, checkpoint, lines, comparing)
        if not comparison.passed:
            for line in imported.notes:  # what was left out may be why
                note(line)
            shown = "; ".join(comparison.failures[:3])
            raise ParityError(f"{out} not written, it differs from {comparison.original}: {shown}")
        source = {"format": name, "path": _from(out, path), "options": options.to_json(partial(_from, out))}
        if path.is_file():
            source["sha256"] = sha256(path)
        _save(directory, imported, weights, {**source, "compared": comparison.to_json()})
    return imported, comparison


@contextmanager
def _understood(path: Path, name: str) -> Iterator[None]:
    """Turns errors of a reader on a malformed source into one line. Raises ArtifactError."""
    try:
        yield
    except STRANGE as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
        raise ArtifactError(
            f"{path} is not as {name} is known ({said}): copy it again, or report what tformer --debug shows"
        ) from error


def _tensors(imported: Imported, path: Path, name: str) -> Iterator[tuple[str, Any]]:
    parameters = iter(imported.tensors)
    while True:
        with _understood(path, name):
            if (found := next(parameters, None)) is None:
                return
        yield found


def source_of(checkpoint: Checkpoint) -> tuple[str, Path, ImportOptions]:
    """Format, path and options of a checkpoint's import. Raises ConfigError, and ArtifactError if the path is gone."""
    source = checkpoint.header["training"].get("imported")
    if not isinstance(source, Mapping) or "options" not in source:
        raise ConfigError(f"{checkpoint.directory} was not imported: there is no original to compare with")
    path = checkpoint.directory / str(source["path"])
    if not path.exists():
        raise ArtifactError(f"{path}, from which {checkpoint.directory} was imported, is not there: put it back")
    require_regular(path)
    return str(source["format"]), path, ImportOptions.of(source["options"], checkpoint.directory)


def compare_again(checkpoint: Checkpoint, lines: Sequence[str] = ()) -> Comparison:
    """Compare an imported checkpoint with the original, where that was at import. Raises ConfigError, ArtifactError."""
    name, path, options = source_of(checkpoint)
    module = module_of(name)
    with _understood(path, name):
        imported: Imported = module.read(path, options)
    found = _compared(imported, checkpoint, lines, comparing=True)
    if not found.original:
        raise ConfigError(f"{checkpoint.directory} cannot be compared with the original: {found.reason}")
    return found


def _from(folder: Path, path: Path) -> str:
    """A path relative to a folder."""
    return os.path.relpath(os.path.realpath(path), os.path.realpath(folder))


def _save(directory: Path, imported: Imported, weights: Path, source: dict[str, Any]) -> Checkpoint:
    origin = {"imported": source}
    save_checkpoint(directory, imported.config, imported.tokenizers, weights, origin, imported.decoding, imported.steps)
    return open_checkpoint(directory)


def _compared(imported: Imported, checkpoint: Checkpoint, lines: Sequence[str], comparing: bool) -> Comparison:
    if not comparing:
        return Comparison("", "--no-compare was given")
    if imported.original is None:
        return Comparison("", imported.not_compared)
    try:
        with errors_of("the original code"):
            original = imported.original()
    except ModuleNotFoundError as error:
        return Comparison("", f"{error.name} is not installed: pip install {error.name}, and import again")
    lines = [line for line in lines if not any(text in line for text in imported.other_ids)]
    return compare(original, checkpoint.load_model(), checkpoint.tokenizers, imported.decoding, lines)
