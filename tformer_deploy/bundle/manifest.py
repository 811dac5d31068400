"""The manifest of a bundle, the directory that is deployed: graphs, tokenizers, report, each with its hash.

The standard graphs lie in the bundle itself, those of each variant in a folder of its name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import __version__
from ..base.errors import ArtifactError, ConfigError
from ..base.files import hold, remove_leftovers, sha256, write_json
from ..base.headers import member, parse_json, read_header, verify
from ..base.settings import from_dict
from ..model.config import ModelConfig
from .contract import (
    GRAPHS,
    KINDS,
    MEMORY_GRAPH,
    OPTIONAL_FILES,
    PROGRAM,
    SHORT_GRAPHS,
    WEIGHTS,
    described,
    file_of,
    made_of,
)
from .recipe import Recipe, recipe_from_dict
from .text import Tokenizers, load_tokenizers, require_fit, tokenizer_files

MANIFEST, VERSION, REPORT = "manifest.json", 2, "check.json"
"""Version 1 was never released."""


@dataclass(frozen=True)
class Bundle:
    """An opened and verified bundle."""

    directory: Path
    config: ModelConfig
    recipe: Recipe
    """How the standard graphs were made."""
    manifest: dict[str, Any]
    variants: dict[str, Recipe]
    """How the graphs for one runtime were made, by the variant's name."""
    default: str
    """The variant that runs unless another is named; empty: the standard graphs."""
    unverified: set[str] = field(default_factory=set)
    """Graph files whose hashes an engine must verify before it loads them."""

    def graph(self, name: str, variant: str = "") -> Path:
        """The file of a graph of `contract.graphs_of`."""
        return self.directory / variant / file_of(name, self.variants[variant] if variant else self.recipe)

    def graph_files(self, variant: str) -> list[str]:
        """The graphs of a variant and their weights, as the manifest names them."""
        return [name for name in self.manifest["files"] if Path(name).parent == Path(variant) and _of_graphs(name)]

    def measured(self, variant: str) -> dict[str, Any]:
        """A variant as the manifest has it, with what calibration measured; of the standard graphs, nothing."""
        return dict(self.manifest["variants"].get(variant, {}))

    @property
    def shortlist_file(self) -> str:
        """The file of the shortlists; empty: there are none."""
        return str(self.manifest.get("shortlist", {}).get("file", ""))

    def lists(self, graph: str, variant: str) -> bool:
        """Whether a variant has a graph that is optional."""
        return (Path(variant) / f"{graph}.onnx").as_posix() in self.manifest["files"]

    def require_kinds(self, variant: str) -> None:
        """Raise ArtifactError where a variant has graphs that this version cannot run."""
        recipe = self.variants[variant] if variant else self.recipe
        stated = (self.manifest["variants"][variant] if variant else self.manifest)["graphs"]
        where = f"{self.directory / variant}"
        for name in made_of(recipe, self.config):
            if name not in stated:
                continue  # graphs for shortlists are optional
            theirs, ours = stated[name], described(name, self.config, recipe)
            kind = theirs["kind"]
            if kind not in KINDS:
                raise ArtifactError(
                    f"{where} has a graph '{name}' of kind {kind}, this tformer runs {', '.join(KINDS)}: "
                    "update it, or export the bundle again with it"
                )
            if any(theirs[key] != ours[key] for key in ours):
                raise ArtifactError(
                    f"{where} has other graphs than its recipe makes, or {MANIFEST} was edited: export the bundle again"
                )

    def require_decoder(self) -> None:
        """Raise ConfigError where there is an encoder alone."""
        if not self.config.decoder_layers:
            raise ConfigError(f"{self.directory} has an encoder and no decoder: use tformer encode")

    def verify_graphs(self, variant: str) -> None:
        """Compare the graphs of a variant with their hashes, once. Raises ArtifactError."""
        self.require_kinds(variant)
        mine = {name for name in self.unverified if Path(name).parent == Path(variant)}
        verify(self.directory, {name: self.manifest["files"][name] for name in sorted(mine)}, "bundle")
        self.unverified.difference_update(mine)

    def check_metadata(self, name: str, metadata: Mapping[str, str], recipe: Recipe) -> None:
        """Compare the manifest, which has no hash of its own, with a graph's metadata. Raises ArtifactError."""
        try:
            fits = (
                metadata["tformer.graph"] == name
                and metadata["tformer.weights_sha256"] == self.weights_sha256
                and from_dict(ModelConfig, parse_json(metadata["tformer.model"]), "model") == self.config
                and recipe_from_dict(parse_json(metadata["tformer.recipe"])) == recipe
                # Graphs that were exported without tokenizers do not name any.
                and (
                    "tformer.tokenizers" not in metadata
                    or parse_json(metadata["tformer.tokenizers"]) == self.tokenizer_hashes
                )
            )
        except (KeyError, ValueError, TypeError, ConfigError):
            fits = False
        if not fits:
            raise ArtifactError(
                f"{self.directory / MANIFEST} was edited: {name}.onnx is of another model, recipe or tokenizer"
            )

    @property
    def tokenizer_hashes(self) -> dict[str, str]:
        """SHA-256 of each tokenizer's file, by its name."""
        return tokenizer_hashes(self.manifest)

    def tokenizers(self) -> Tokenizers:
        """The tokenizers of both sides. Raises ArtifactError where they do not fit the model."""
        found = load_tokenizers(self.directory, self.manifest["tokenizer"])
        try:
            require_fit(self.config, found)
        except ConfigError as error:
            wrong = f"{self.directory}: {error}, and export it again"
            raise ArtifactError(f"{wrong}; or copy it again, if {MANIFEST} was edited") from None
        return found

    @property
    def decoding(self) -> dict[str, Any]:
        """Default decoding options of the bundle."""
        return dict(self.manifest.get("decoding", {}))

    @property
    def checkpoint(self) -> Path:
        """Path of the checkpoint at export, relative to the bundle."""
        return self.directory / str(self.manifest["checkpoint"]["path"])

    @property
    def weights_sha256(self) -> str:
        """SHA-256 of the exported weights."""
        return str(self.manifest["checkpoint"]["weights_sha256"])


@dataclass(frozen=True)
class Exported:
    """What a manifest says of an export, beside recipes and files."""

    config: ModelConfig
    tokenizer: Mapping[str, Any]
    """What `Tokenizers.save` returns."""
    checkpoint: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of the packages that made it."""
    measured: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Of each variant that rounds, `calibrate.Measured.described`."""
    weights: Mapping[str, Any] = field(default_factory=dict)
    """See `export.save.weights_read`."""
    decoding: Mapping[str, Any] = field(default_factory=dict)
    """The model's own decoding options."""


def write_manifest(directory: Path, recipes: Mapping[str, Recipe], exported: Exported) -> None:
    """Describe and hash every file in `directory`; `recipes`: of the standard graphs ("") and the variants."""
    config, decoding, weights = exported.config, exported.decoding, exported.weights
    write_json(
        directory / MANIFEST,
        {
            "format": "tformer-bundle",
            "version": VERSION,
            "versions": {"tformer_deploy": __version__, **exported.versions},
            "model": dataclasses.asdict(config),
            "recipe": dataclasses.asdict(recipes[""]),
            "tokenizer": dict(exported.tokenizer),
            **({"decoding": dict(decoding)} if decoding else {}),
            "graphs": _graphs(config, recipes[""], directory),
            **({"weights": dict(weights)} if weights else {}),
            # Graphs for TensorRT run on ONNX Runtime as a reference only, programs not at all.
            "default": next(name for name, recipe in recipes.items() if recipe.target not in ("trt", "native")),
            "variants": {
                name: {
                    "recipe": dataclasses.asdict(recipe),
                    "graphs": _graphs(config, recipe, directory / name),
                    **exported.measured.get(name, {}),
                }
                for name, recipe in recipes.items()
                if name
            },
            "checkpoint": dict(exported.checkpoint),
            "files": hashes(directory),
        },
    )


def tokenizer_hashes(header: Mapping[str, Any]) -> dict[str, str]:
    """SHA-256 of the tokenizer files in a bundle's or a checkpoint's header, by name."""
    return {name: header["files"][name] for name in tokenizer_files(header["tokenizer"])}


def _of_graphs(file: str) -> bool:
    return ".onnx" in file or Path(file).name in (WEIGHTS, PROGRAM)


def _graphs(config: ModelConfig, recipe: Recipe, folder: Path) -> dict[str, Any]:
    """The graphs in `folder`; some models have none for shortlists, see `export.graphs.scores_by_product`."""
    graphs = [
        name for name in made_of(recipe, config) if name not in SHORT_GRAPHS or (folder / f"{name}.onnx").is_file()
    ]
    return {name: {**described(name, config, recipe), "passes": list(recipe.passes(name))} for name in graphs}


def hashes(directory: Path) -> dict[str, str]:
    """SHA-256 of every file of a bundle except its manifest."""
    names = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    return {name: sha256(directory / name) for name in names if name != MANIFEST and not name.startswith(".")}


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a bundle. Raises ArtifactError."""
    return read_header(directory, MANIFEST, "bundle", VERSION, oldest=VERSION)


def add_report(directory: Path, report: dict[str, Any]) -> None:
    """Store a parity report in a bundle that is being made."""
    write_json(directory / REPORT, report)
    manifest = read_manifest(directory)
    files = {**manifest["files"], REPORT: sha256(directory / REPORT)}
    write_json(directory / MANIFEST, {**manifest, "files": dict(sorted(files.items()))})


def open_bundle(directory: Path, graphs: bool = True) -> Bundle:
    """Open a bundle and verify its hashes; without `graphs`, those of graphs are left to the engine that loads them.

    Raises ArtifactError.
    """
    manifest = read_manifest(directory)
    try:
        return _open(directory, manifest, graphs)
    except ArtifactError:
        later = read_manifest(directory)
        if later == manifest:
            raise
        return _open(directory, later, graphs)  # `shortlist` or `export --force` changed it meanwhile


def _open(directory: Path, manifest: dict[str, Any], graphs: bool) -> Bundle:
    """See `open_bundle`."""
    try:
        variants = {name: recipe_from_dict(variant["recipe"]) for name, variant in manifest["variants"].items()}
        config = from_dict(ModelConfig, manifest["model"], "model")
        recipe, default = recipe_from_dict(manifest["recipe"]), manifest["default"]
    except ConfigError as error:
        raise ArtifactError(f"{directory / MANIFEST} is damaged: {error}") from None
    if default not in ("", *variants):
        raise ArtifactError(f"{directory / MANIFEST} is damaged: it has no variant '{default}'")
    if missing := files_in_use(directory, manifest) - set(manifest["files"]):
        raise ArtifactError(f"{directory / MANIFEST} is damaged: no hash of {min(missing)}")
    later = set() if graphs else {name for name in manifest["files"] if _of_graphs(name)}
    for name in later:
        member(directory, name)
    verify(directory, {name: sha for name, sha in manifest["files"].items() if name not in later}, "bundle")
    return Bundle(directory, config, recipe, manifest, variants, default, later)


def files_in_use(directory: Path, manifest: Mapping[str, Any]) -> set[str]:
    """Files that a manifest must have hashes of."""
    variants = ("", *manifest["variants"])
    own = {name: variant["recipe"].get("target") for name, variant in manifest["variants"].items()}
    needed = {
        (Path(variant) / (PROGRAM if own.get(variant) == "native" else f"{name}.onnx")).as_posix()
        for name in ([MEMORY_GRAPH] if manifest["model"].get("decoder_layers") == 0 else GRAPHS)
        for variant in variants
    }
    optional = {(Path(variant) / name).as_posix() for name in OPTIONAL_FILES for variant in variants}
    needed |= {name for name in optional if (directory / name).exists()}
    needed |= {*tokenizer_files(manifest["tokenizer"])}
    return needed | ({manifest["shortlist"]["file"]} if "shortlist" in manifest else set())


@contextmanager
def changing(directory: Path) -> Iterator[Bundle]:
    """Open a bundle to change it, holding an exclusive lock. Raises ArtifactError."""
    read_manifest(directory)
    with hold(directory):
        remove_leftovers(directory)
        yield open_bundle(directory)
