"""Checkpoint to bundle: export, check, and only then give it its name."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from .bundle import MANIFEST, add_report, open_bundle, write_manifest
from .check import Gate, Report, make_corpus
from .checkpoint import open_checkpoint
from .errors import ArtifactError, ParityError
from .export.to_onnx import export_graphs
from .files import atomic_directory
from .recipe import load_recipe


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
    corpus = make_corpus(checkpoint.config, recipe, checkpoint.tokenizers, src)
    with atomic_directory(out, force) as directory:
        description = checkpoint.tokenizers.save(directory)
        export_graphs(checkpoint.load_model(), recipe, directory, checkpoint.weights_sha256)
        write_manifest(
            directory,
            checkpoint.config,
            recipe,
            description,
            {"path": os.path.relpath(run, out), "weights_sha256": checkpoint.weights_sha256},
            {name: version(name) for name in ("torch", "onnx", "onnxscript")},
        )
        gate = Gate(open_bundle(directory), checkpoint.directory, progress=progress)
        report = gate.run(["ort"], gate.reference(corpus))
        if not report.passed:
            raise ParityError(f"{out} not written, the check failed: {'; '.join(report.failures)}")
        add_report(directory, report.to_json())
    return report
