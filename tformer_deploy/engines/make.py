"""Makes engines by name, not entered yet; their limits and threads."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import ConfigError, extras
from ..base.machine import cores
from ..base.settings import check_whole
from ..bundle.manifest import Bundle
from .names import EngineName, check_name, recipe_of
from .registry import ENGINES
from .spec import STANDARD, EngineSpec, Opening

if TYPE_CHECKING:
    from ..bundle.shortlist import Shortlist
    from .base import Encoder, Engine, Limits

MOST_ANYWHERE, MOST_PER_CORE = 64, 4
"""The most threads or workers: 64 on any machine, or 4 per core. More only cost memory and switches of threads."""
MOST_BATCH_TOKENS = 1 << 24
"""Tokens of a batch; no memory holds the caches of so many."""


def most_parallel() -> int:
    """The most threads or workers on this machine."""
    return max(MOST_ANYWHERE, MOST_PER_CORE * cores())


def threads_each(threads: int, workers: int) -> int:
    """Threads per worker; 0: the cores divided by the workers. Raises ConfigError for more than `most_parallel`."""
    check_whole("workers", workers, 1, most_parallel())
    check_whole("threads", threads, 0, most_parallel())
    return threads or max(1, cores() // workers)


def limits_of(name: str, bundle: Bundle) -> Limits:
    """An engine's limits, without entering it. Where it has to look at plans, raises what entering it would."""
    from .base import Limits

    spec = EngineName(name).spec
    if spec.plans:
        engine: Any = make_engine(name, bundle)
        return engine.look().limits  # type: ignore[no-any-return]
    return Limits.eager(bundle.config) if spec.reference else Limits.of(recipe_of(name, bundle).axes)


@extras()
def make_engine(
    name: str, bundle: Bundle, checkpoint: Path | None = None, threads: int = 0, shortlist: bool = False
) -> Engine:
    """An engine of `engine_names` that is not entered yet.

    `checkpoint`: for `eager`, the run folder, if it has moved since the export. `threads` 0: as many as this process
    has cores. `shortlist`: score only the tokens that the bundle's shortlist has for a source.
    Raises MissingExtra where the backend's packages are not installed, ConfigError where there are no lists or no
    graphs for them.
    """
    bundle.require_decoder()
    check_name(name, bundle)
    check_whole("threads", threads, 0, most_parallel())
    name = EngineName(name)
    lists = _lists(name, bundle) if shortlist else None
    engine: Engine = _module(name.spec).open_engine(_opening(name, bundle, checkpoint, threads, lists))
    return engine


@extras()
def make_encoder(name: str, bundle: Bundle, checkpoint: Path | None = None, threads: int = 0) -> Encoder:
    """`eager`, or an engine of `encoder_names`, for the encoder alone; not entered yet.

    Raises what `make_engine` does, and ConfigError where there is no graph for it.
    """
    name = EngineName(name)
    if name.spec.no_encoder:
        raise ConfigError(name.spec.no_encoder)
    check_name(name, bundle)
    check_whole("threads", threads, 0, most_parallel())
    opening = _opening(name, bundle, checkpoint, threads, None)
    if not name.spec.reference and (opening.variant or STANDARD) not in (usable := name.spec.encoders(bundle)):
        use = f"use --variant {' or '.join(usable)}" if usable else "export it again with --memory, or use eager"
        what = f"variant {name.variant}" if name.variant else "the standard graphs"
        raise ConfigError(f"{bundle.directory}: {what} cannot run the encoder alone: {use}")
    encoder: Encoder = _module(name.spec).open_encoder(opening)
    return encoder


@extras()
def load_runtime(backend: str) -> None:
    """Import what a backend runs on. Raises MissingExtra, ConfigError or EngineError where it cannot be used."""
    _module(EngineName(backend).spec).load_runtime()


def load_exported(targets: Iterable[str]) -> None:
    """Import what checks an export of recipes of some targets runs on. Raises what `load_runtime` does."""
    exported = set(targets)
    for spec in ENGINES:
        if spec.checked_at_export and exported.intersection(spec.targets):
            load_runtime(spec.name)


def _module(spec: EngineSpec) -> Any:
    return import_module(f".{spec.name}", __package__)


def _opening(
    name: EngineName, bundle: Bundle, checkpoint: Path | None, threads: int, lists: Shortlist | None
) -> Opening:
    """What an engine is opened with: of programs, the one that its name stands for."""
    spec = name.spec
    variant = name.variant or ("" if spec.standard or spec.plans else name.folder(bundle))
    return Opening(bundle, variant, name.device, threads, checkpoint, lists)


def _lists(name: EngineName, bundle: Bundle) -> Shortlist:
    """The bundle's lists. Raises ConfigError where there are none, or no graphs of the engine for them."""
    from ..bundle.shortlist import open_shortlist

    if recipe_of(name, bundle).target not in name.spec.shortlist_targets:
        ways: list[str] = []
        offered: set[str] = set()
        for spec in ENGINES:
            usable = [each for each, recipe in bundle.variants.items() if recipe.target in spec.shortlist_targets]
            if new := [each for each in usable if each not in offered]:
                ways.append(f"--backend {spec.name} --variant {'|'.join(new)}")
                offered.update(new)
        way = f"use {' or '.join(ways)}" if ways else "export again with --recipe int8"
        raise ConfigError(f"--shortlist: {name} has no graphs for it: {way}")
    return open_shortlist(bundle, name.folder(bundle))
