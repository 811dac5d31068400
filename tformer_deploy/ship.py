"""Checkpoint to bundle: export, check, and only then give it its name."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from .bundle import MANIFEST, Bundle, add_report, open_bundle, write_manifest
from .check import Report, check, generated_sources
from .checkpoint import Checkpoint, open_checkpoint
from .data import read_lines
from .decoding import DecodeOptions
from .engines import make_engine
from .engines.eager import EagerEngine
from .errors import ArtifactError, DataError, ParityError
from .export.to_onnx import export_graphs
from .files import atomic_directory
from .recipe import load_recipe
from .text import Tokenizers

GENERATED_TOKENS = 48
"""Decoding steps for generated sources; random ones would else run to the model's last position."""


def ship(
    run: Path,
    out: Path,
    recipe_name: str = "fp32",
    src: Path | None = None,
    force: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Report:
    """Make a bundle of a checkpoint and check it on ONNX Runtime against eager PyTorch.

    Raises ParityError, and leaves nothing, where the check fails; ArtifactError where `out` exists without `force`.
    """
    checkpoint = open_checkpoint(run)
    recipe = load_recipe(recipe_name).for_model(checkpoint.config)
    if out.exists() and not force:
        raise ArtifactError(f"{out} exists already: choose another folder or add --force")
    if out.exists() and not (out / MANIFEST).is_file():
        raise ArtifactError(f"{out} is not a bundle, so --force does not replace it: choose another folder")
    sources = encode_file(src, checkpoint.tokenizers, recipe.axes.src_len.max) if src else None
    with atomic_directory(out, force) as directory:
        description = checkpoint.tokenizers.save(directory)
        model = checkpoint.load_model()
        export_graphs(model, recipe, directory, checkpoint.weights_sha256)
        write_manifest(
            directory,
            checkpoint.config,
            recipe,
            description,
            {"path": os.path.relpath(run, out), "weights_sha256": checkpoint.weights_sha256},
            {name: version(name) for name in ("torch", "onnx", "onnxscript")},
        )
        report = check_bundle(open_bundle(directory), "ort", checkpoint, sources, progress)
        if not report.passed:
            raise ParityError(f"{out} not written, the check failed: {'; '.join(report.failures)}")
        add_report(directory, report.to_json())
    return report


def check_bundle(
    bundle: Bundle,
    backend: str,
    checkpoint: Checkpoint,
    sources: list[list[int]] | None,
    progress: Callable[[int], None] | None = None,
    threads: int = 0,
) -> Report:
    """Compare a bundle's engine with eager PyTorch over sources as the encoder sees them, or generated ones."""
    options = DecodeOptions() if sources else DecodeOptions(GENERATED_TOKENS)
    if not sources:
        longest = bundle.recipe.axes.src_len.max
        sources = generated_sources(bundle.config.src_vocab, bundle.config.eos_id, longest)
    engine = make_engine(backend, bundle, checkpoint.directory, threads)
    with engine, EagerEngine(checkpoint.load_model()) as eager:
        return check(engine, eager, backend, sources, bundle.recipe.tolerance, options, progress)


def encode_file(src: Path, tokenizers: Tokenizers, longest: int) -> list[list[int]]:
    """What the encoder sees of each line that is not empty. Raises DataError where there is none or one is too long."""
    sources = []
    for number, line in enumerate(read_lines(src), 1):
        ids = tokenizers.source_ids(line)
        if len(ids) > longest:
            raise DataError(f"{src}:{number}: a source of {len(ids)} tokens exceeds the limit of {longest}: shorten it")
        if line:
            sources.append(ids)
    if not sources:
        raise DataError(f"{src}: no line with text")
    return sources
