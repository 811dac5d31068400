"""Hugging Face folders as bundles in a cache: exported on first use, opened from then on."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from ..base.errors import ArtifactError, ConfigError, require
from ..base.files import atomic_directory, sha256, write_json
from ..base.headers import JSON_BYTES, read_json
from ..base.notes import note
from ..bundle.manifest import MANIFEST

SETTINGS = "settings.json"
LANGUAGES = (("en", "de"), ("en_XX", "de_DE"), ("eng_Latn", "deu_Latn"), ("java", "python"))
"""Tried where a model has languages and nobody names them: only its text depends on them."""
CONFIG = ("model_type", "prefix", "task_specific_params")


@dataclass(frozen=True)
class Prepared:
    """A folder's bundle, and what the folder says of `generate` and text."""

    bundle: Path
    settings: Mapping[str, Any]
    config: Mapping[str, Any]
    most_tokens: int = 0
    """Of a source, as the tokenizer says; 0: it does not say."""


@dataclass(frozen=True)
class Source:
    """A folder, and how it is to be exported."""

    folder: Path
    recipe: str = "fp32"
    src_lang: str = ""
    tgt_lang: str = ""
    compare: bool = True
    """Whether the import is compared with transformers, where that is installed."""

    def key(self) -> str:
        """Of everything that decides what is exported."""
        files = {path.name: sha256(path) for path in sorted(self.folder.iterdir()) if path.is_file()}
        said = [__version__, files, self.recipe, self.src_lang, self.tgt_lang]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]


def cache_folder() -> Path:
    """Where exported folders are: $XDG_CACHE_HOME/tformer/pipelines."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tformer" / "pipelines"


def is_bundle(path: Path) -> bool:
    """Whether a folder is a bundle. Raises ConfigError where there is no folder."""
    if not path.is_dir():
        raise ConfigError(
            f"model={path}: there is no such folder: give a Hugging Face folder or a bundle; names of "
            "models on the Hub are not fetched"
        )
    return (path / MANIFEST).is_file()


def prepare(source: Source, again: bool = False) -> Prepared:
    """The cached export of a folder, made where it is not there or damaged, or where `again` is set.

    Raises TformerError.
    """
    if not (source.folder / "config.json").is_file():
        raise ConfigError(
            f"model={source.folder} has neither {MANIFEST} nor config.json: give a bundle or a Hugging Face folder"
        )
    entry = cache_folder() / source.key()
    if not again:
        try:
            return _read(entry)
        except ArtifactError:
            pass
    _make(source, entry)
    note(f"{source.folder} was exported to {entry}, which is opened from now on")
    return _read(entry)


def _read(entry: Path) -> Prepared:
    """Raises ArtifactError for an entry that is not there or damaged."""
    found = read_json(entry, SETTINGS, JSON_BYTES)
    names = ("settings", "config")
    if not isinstance(found, dict) or not all(isinstance(found.get(name), dict) for name in names):
        raise ArtifactError(f"{entry / SETTINGS} is damaged: remove the folder")
    return Prepared(entry / "bundle", found["settings"], found["config"], int(found.get("most_tokens", 0)))


def _make(source: Source, entry: Path) -> None:
    """Import and export a folder into the cache."""
    require("export", "torch", "onnx", "onnxscript")
    from ..export.checked import export_checked
    from ..importers.hf_generation import settings_of
    from ..importers.weights import read_json_file

    config = read_json_file(source.folder / "config.json")
    tokenizer = source.folder / "tokenizer_config.json"
    most = read_json_file(tokenizer).get("model_max_length") if tokenizer.is_file() else None
    with atomic_directory(entry, force=True) as folder:
        _import(source, folder / "run")
        note(f"{source.folder}: exported once, as recipe {source.recipe}; this takes a while")
        export_checked(folder / "run", folder / "bundle", [source.recipe])
        shutil.rmtree(folder / "run")
        said = {
            "settings": settings_of(source.folder, config),
            "config": {name: config[name] for name in CONFIG if config.get(name) is not None},
            "most_tokens": int(most) if isinstance(most, int | float) and most < 1e9 else 0,
        }
        write_json(folder / SETTINGS, said)


def _import(source: Source, run: Path) -> None:
    """Make a run folder; a model of languages gets any two where none are named."""
    from ..importers.base import ImportOptions
    from ..importers.run import import_checkpoint

    asked = ((source.src_lang, source.tgt_lang),)
    named = any(map(bool, asked[0]))
    for number, (src, tgt) in enumerate(asked if named else (*asked, *LANGUAGES)):
        try:
            options = ImportOptions(src_lang=src, tgt_lang=tgt)
            imported, _ = import_checkpoint("hf", source.folder, run, options, comparing=source.compare)
        except ConfigError as error:
            wanted = "-lang ''" if not number else "-lang '"
            if named or wanted not in str(error) or (src, tgt) == LANGUAGES[-1]:
                raise
            continue
        for line in imported.notes:
            note(line)
        return
