"""Checkpoint to bundle: export, lower, check, and only then give it its name."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from .bundle import MANIFEST, add_report, open_bundle, write_manifest
from .check import Gate, Report, make_corpus
from .checkpoint import open_checkpoint
from .config import ModelConfig
from .engines import STANDARD, expand
from .errors import ConfigError, ParityError
from .export.calibrate import input_ranges, layer_noise
from .export.to_onnx import export_graphs
from .files import atomic_directory
from .recipe import Recipe, load_recipe, narrowest


def ship(
    run: Path,
    out: Path,
    recipes: Sequence[str] = (STANDARD,),
    src: Path | None = None,
    force: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Report:
    """Make a bundle of a checkpoint and check every engine of it against eager PyTorch.

    It always has the standard graphs; recipes of another target add variants. What runs where no variant is named is
    the first recipe. Raises ParityError, and leaves nothing, where the check fails; ArtifactError where `out` exists
    without `force`.
    """
    checkpoint = open_checkpoint(run)
    chosen = choose(recipes, checkpoint.config)
    corpus = make_corpus(checkpoint.config, narrowest(chosen.values()), checkpoint.tokenizers, src)
    with atomic_directory(out, force, "bundle", lambda folder: (folder / MANIFEST).is_file()) as directory:
        description = checkpoint.tokenizers.save(directory)
        model = checkpoint.load_model()
        ranges = input_ranges(model, corpus.sources) if len(chosen) > 1 else {}
        lossy = {name: recipe for name, recipe in chosen.items() if recipe.precision != "fp32"}
        limits = {name: layer_noise(model, recipe, ranges, corpus.sources) for name, recipe in lossy.items()}
        for name, recipe in chosen.items():
            identity = checkpoint.weights_sha256, ranges, checkpoint.tokenizer_hashes
            export_graphs(model, recipe, directory / name, *identity)
        place = os.path.relpath(os.path.realpath(run), os.path.realpath(out))
        write_manifest(
            directory,
            checkpoint.config,
            chosen,
            description,
            {"path": place, "weights_sha256": checkpoint.weights_sha256},
            {name: version(name) for name in ("torch", "onnx", "onnxscript")},
            limits,
        )
        bundle = open_bundle(directory)
        gate = Gate(bundle, checkpoint.directory, progress=progress)
        report = gate.run(expand(["ort"], [], bundle), gate.reference(corpus))
        if not report.passed:
            raise ParityError(f"{out} not written, the check failed: {'; '.join(report.failures)}")
        add_report(directory, report.to_json())
    return report


def choose(names: Sequence[str], config: ModelConfig) -> dict[str, Recipe]:
    """Recipes by the folder that their graphs get: "" for the standard ones, else the recipe's name.

    The first of `names` comes first. Raises ConfigError where two recipes want the same folder.
    """
    chosen: dict[str, Recipe] = {}
    for name in names:
        recipe, stem = load_recipe(name).for_model(config), Path(name).stem
        folder = "" if recipe.target == "onnx" else stem
        if folder in chosen:
            taken = f"variant {folder}" if folder else "standard graphs"
            raise ConfigError(f"recipe {name}: the bundle has {taken} already: leave one out or rename its file")
        if folder and (stem == STANDARD or not re.fullmatch(r"[A-Za-z0-9][\w-]*", stem)):
            raise ConfigError(f"recipe {name}: a variant cannot be called '{stem}': rename the file")
        chosen[folder] = recipe
    return chosen if "" in chosen else {**chosen, "": load_recipe(STANDARD).for_model(config)}
