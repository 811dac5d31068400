"""Engines run a bundle's model; `make_engine` knows them by name."""

from __future__ import annotations

from pathlib import Path

from ..bundle import Bundle
from ..errors import missing_extra, unknown
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

    from ..checkpoint import open_reference
    from .eager import EagerEngine

    model = open_reference(bundle, directory).load_model()
    if threads:
        torch.set_num_threads(threads)
    return EagerEngine(model, bundle.recipe.top_k)
