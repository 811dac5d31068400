"""Engines run a bundle's model; `make_engine` knows them by name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ..bundle import Bundle
from ..errors import ConfigError, missing_extra, unknown
from ..shortlist import open_shortlist
from .base import Engine

BACKENDS = ("eager", "ort")
STANDARD = "fp32"
"""What the standard graphs are called where variants are named."""


def engine_names(bundle: Bundle) -> list[str]:
    """All that can run a bundle: `eager`, `ort` for its standard graphs, `ort:NAME` for each variant."""
    return [*BACKENDS, *(f"ort:{name}" for name in bundle.variants)]


def engine_name(backend: str, variant: str | None, bundle: Bundle) -> str:
    """The engine of a backend and a variant; none: the bundle's default. Raises ConfigError for a wrong variant."""
    if variant is None and backend == "ort" and bundle.default:
        return f"ort:{bundle.default}"
    if variant is None or (variant == STANDARD and backend == "ort"):
        return backend
    if backend != "ort":
        raise ConfigError(f"--variant {variant}: variants are graphs of ort, {backend} has none")
    if variant not in bundle.variants:
        raise unknown("variant", variant, [STANDARD, *bundle.variants])
    return f"ort:{variant}"


def expand(backends: Sequence[str], variants: Sequence[str], bundle: Bundle) -> list[str]:
    """The engines of some backends; `ort` stands for those of `variants`, or for all that the bundle has.

    Raises ConfigError for a backend or variant that does not exist.
    """
    if variants and "ort" not in backends:
        raise ConfigError(f"--variant {variants[0]}: variants are graphs of ort: add --backend ort")
    found: list[str] = []
    for backend in backends:
        if backend not in engine_names(bundle):
            raise unknown("backend", backend, engine_names(bundle))
        if backend == "ort":
            found += [engine_name("ort", variant, bundle) for variant in variants or [STANDARD, *bundle.variants]]
        else:
            found.append(backend)
    return list(dict.fromkeys(found))


def threads_each(threads: int, workers: int) -> int:
    """Threads of an engine's call where `workers` call it at the same time; 0: they share the cores evenly."""
    return threads or max(1, len(os.sched_getaffinity(0)) // workers)


def make_engine(
    name: str, bundle: Bundle, checkpoint: Path | None = None, threads: int = 0, shortlist: bool = False
) -> Engine:
    """An engine of `engine_names` that is not entered yet.

    `checkpoint` is for `eager` alone; without it the place is used where the checkpoint was at export. `threads` 0:
    as many as this process has cores. `shortlist`: score only the tokens that the bundle's lists have for a source.
    Raises MissingExtra where the backend's packages are not installed, ConfigError where there are no lists or no
    graphs for them.
    """
    if name not in engine_names(bundle):
        raise unknown("backend", name, engine_names(bundle))
    variant = name.partition(":")[2]
    if shortlist and (not variant or bundle.variants[variant].target != "ort-cpu"):
        usable = [each for each, recipe in bundle.variants.items() if recipe.target == "ort-cpu"]
        raise ConfigError(f"--shortlist: {name} has no graphs for it: use a variant of {', '.join(usable) or 'int8'}")
    lists = open_shortlist(bundle, variant) if shortlist else None
    try:
        if name == "ort":
            from .ort import OrtEngine

            return OrtEngine(bundle, threads)
        if name.startswith("ort:"):
            if bundle.variants[variant].target == "trt":
                from .ort_static import StaticEngine

                return StaticEngine(bundle, threads, variant)
            from .ort_lowered import LoweredEngine

            return LoweredEngine(bundle, threads, variant, lists)
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
