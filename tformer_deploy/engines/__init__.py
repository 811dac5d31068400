"""Engines run a bundle's model; `make_engine` knows them by name."""

from __future__ import annotations

from pathlib import Path

from ..bundle import Bundle
from ..errors import ArtifactError, missing_extra, unknown
from .base import Engine

BACKENDS = ("eager", "ort")


def make_engine(backend: str, bundle: Bundle, checkpoint: Path | None = None, threads: int = 0) -> Engine:
    """An engine that is not entered yet.

    `checkpoint` is for `eager` alone; without it the place is used where the checkpoint was at export. `threads` 0:
    as many as this process has cores. Raises MissingExtra where the backend's packages are not installed.
    """
    if backend not in BACKENDS:
        raise unknown("backend", backend, BACKENDS)
    try:
        if backend == "ort":
            from .ort import OrtEngine

            return OrtEngine(bundle, threads)
        return _eager(bundle, checkpoint, threads)
    except ModuleNotFoundError as error:
        raise missing_extra(error) from None


def _eager(bundle: Bundle, directory: Path | None, threads: int) -> Engine:
    import torch

    from ..checkpoint import open_checkpoint
    from .eager import EagerEngine

    where = directory or bundle.checkpoint
    if not where.is_dir():
        raise ArtifactError(f"eager PyTorch needs the checkpoint, which is not at {where}: name it with --checkpoint")
    checkpoint = open_checkpoint(where)
    if checkpoint.weights_sha256 != bundle.weights_sha256:
        raise ArtifactError(f"{bundle.directory} was not exported from the weights in {where}: export it again")
    if threads:
        torch.set_num_threads(threads)
    return EagerEngine(checkpoint.load_model(), bundle.recipe.top_k)
