"""Names of engines, and which of them a command's options select."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

from ..base.errors import ConfigError, unknown
from ..bundle.manifest import Bundle
from ..bundle.plans import trt_variant
from ..bundle.recipe import Recipe
from .registry import BACKENDS, DEVICES, ENGINES, find
from .spec import STANDARD, EngineSpec


class EngineName(str):
    """An engine's name, `BACKEND[:VARIANT][@DEVICE]`: a str with its parsed parts."""

    backend: str
    variant: str
    """Of its graphs or program, or the precision of plans; empty: the standard graphs, or the first there is."""
    device: str
    """`cpu` or `cuda`."""

    def __new__(cls, name: str) -> Self:
        """Any text is a name; `check_name` says whether a bundle has that engine."""
        if isinstance(name, cls):
            return name
        self = super().__new__(cls, name)
        front, _, device = name.partition("@")
        self.backend, _, self.variant = front.partition(":")
        self.device = device or (self.spec.devices[0] if self.backend in BACKENDS else DEVICES[0])
        return self

    @property
    def spec(self) -> EngineSpec:
        """Raises ConfigError where there is no such backend."""
        return find(self.backend)

    @property
    def plain(self) -> bool:
        """Whether it names a backend and nothing else."""
        return self == self.backend

    def folder(self, bundle: Bundle) -> str:
        """See `EngineSpec.folder`."""
        return self.spec.folder(self.variant, bundle)


def engine_names(bundle: Bundle) -> list[str]:
    """All engines that can run a bundle: `eager`; `ort` for its standard graphs, `ort:NAME` for a variant; `cpp` alike.

    With graphs for TensorRT also `trt`, `trt:PRECISION` for plans of one precision, and ONNX Runtime on a GPU. With
    programs `native`, which is the first, and `native:NAME`.
    """
    return [name for spec in ENGINES for name in spec.names(bundle)]


def encoder_names(bundle: Bundle) -> list[str]:
    """All engines that can run a bundle's encoder alone."""
    return [
        spec.name if variant == STANDARD else f"{spec.name}:{variant}"
        for spec in ENGINES
        for variant in spec.encoders(bundle)
    ]


def exported_engines(bundle: Bundle) -> list[str]:
    """The backends that an export checks."""
    return [spec.name for spec in ENGINES if spec.checked_at_export and spec.variants(bundle)]


def check_backend(name: str) -> None:
    """Raise ConfigError for an engine that no bundle can have."""
    if EngineName(name).backend not in BACKENDS:
        raise unknown("backend", name, BACKENDS)


def check_name(name: str, bundle: Bundle) -> None:
    """Raise ConfigError for an engine that a bundle does not have."""
    if (name := EngineName(name)).backend in BACKENDS:
        name.spec.require(bundle)
    if name not in engine_names(bundle):
        raise unknown("backend", name, engine_names(bundle))


def recipe_of(name: str, bundle: Bundle) -> Recipe:
    """How the graphs of an engine were made; the standard ones for `eager`."""
    folder = EngineName(name).folder(bundle)
    return bundle.variants[folder] if folder else bundle.recipe


def explain(names: Sequence[str], bundle: Bundle) -> list[str]:
    """A line for each engine whose name does not say what runs."""
    return [
        f"{name}: the graphs that tformer build compiles for TensorRT, here on {name.spec.title}"
        + (", without a GPU" if name.device == "cpu" else "")
        for name in map(EngineName, names)
        if not name.spec.plans and recipe_of(name, bundle).target == "trt"
    ]


def engine_name(backend: str, variant: str | None, bundle: Bundle, device: str = "cpu") -> EngineName:
    """The engine of a backend and a variant; none: the bundle's default. Raises ConfigError for a wrong variant."""
    if device not in DEVICES:
        raise unknown("device", device, DEVICES)
    asked = EngineName(backend)
    if asked.backend not in BACKENDS:
        raise unknown("backend", backend, engine_names(bundle))
    if device not in asked.spec.devices:
        if device != DEVICES[0]:
            raise ConfigError(f"--device {device}: {asked.spec.title} runs on processors: leave it out")
    elif device != asked.spec.devices[0]:
        return _on_gpu(asked, variant, bundle)
    if variant is None:
        default = asked.spec.default(bundle) if asked.plain else ""
        return EngineName(f"{asked}:{default}" if default else asked)
    if asked.spec.reference or not asked.plain:
        raise ConfigError(f"--variant {variant}: {backend} has no variants")
    if variant not in (names := asked.spec.variants(bundle)):
        check_name(backend, bundle)  # a bundle without variants for it
        raise unknown("variant", variant, names)
    return EngineName(asked if asked.spec.standard and variant == STANDARD else f"{asked}:{variant}")


def _on_gpu(name: EngineName, variant: str | None, bundle: Bundle) -> EngineName:
    asked = variant or name.variant
    if name.spec.reference:
        if asked:
            raise ConfigError(f"--variant {asked}: {name.backend} has no variants")
        return EngineName(f"{name.backend}@cuda")
    own = trt_variant(bundle)
    if asked not in ("", own):
        raise ConfigError(f"--device cuda: {name.spec.title} runs --variant {own} on a GPU, not {asked}")
    return EngineName(f"{name.backend}:{own}@cuda")


def expand(backends: Sequence[str], variants: Sequence[str], bundle: Bundle, device: str = "cpu") -> list[EngineName]:
    """The engines of some backends; some stand for all variants that they run, or for those of `variants`.

    Raises ConfigError for a backend or device that does not exist, and for a variant that none of the backends runs.
    """
    for backend in backends:
        check_name(backend, bundle)
    asked = [EngineName(backend) for backend in backends]
    runs = {name: name.spec.choices(bundle) if name.plain else [] for name in asked}
    valid = {variant for name in asked for variant in (runs[name] or [name.variant]) if variant}
    if variants and not valid:
        raise _without_variants(asked, variants[0], bundle)
    for variant in variants:
        if variant not in valid:
            raise unknown("variant", variant, valid)
    engines: list[EngineName] = []
    for name in asked:
        chosen: Sequence[str | None] = [None]
        if runs[name] and variants:
            chosen = [variant for variant in variants if variant in runs[name]]
        elif runs[name] and device == "cpu":
            chosen = name.spec.usual(bundle) or [None]
        engines += [engine_name(name, variant, bundle, device) for variant in chosen]
    return list(dict.fromkeys(engines))


def _without_variants(asked: Sequence[EngineName], variant: str, bundle: Bundle) -> ConfigError:
    """The error for a variant beside backends that have none to choose, and which backend has it."""
    owners = [spec for spec in ENGINES if variant in spec.variants(bundle)]
    if not owners:
        return unknown("variant", variant, [each for spec in ENGINES for each in spec.choices(bundle)])
    names = {spec.name: f"{spec.name}:{variant}" if spec.precisions else spec.name for spec in owners}
    own = [names[each.backend] for each in asked if each.backend in names]
    remedy = f"use --backend {own[0]}" if own else f"add --backend {' or '.join(names.values())}"
    return ConfigError(f"--variant {variant}: --backend {asked[0]} has no variants to choose: {remedy}")


def require_each(backends: Sequence[str], engines: Sequence[str]) -> None:
    """Raise ConfigError for a backend of which `expand` found no engine, as it runs none of the variants."""
    backends_used = {EngineName(engine).backend for engine in engines}
    for backend in backends:
        if EngineName(backend).backend not in backends_used:
            raise ConfigError(f"--backend {backend} runs none of the variants asked for by --variant: leave it out")


def check_checkpoint(checkpoint: str | Path | None, engines: Iterable[str]) -> None:
    """Raise ConfigError for a run folder where none of the engines reads it."""
    if checkpoint is not None and not any(EngineName(engine).spec.reference for engine in engines):
        raise ConfigError(f"--checkpoint {checkpoint}: only eager reads it: add --backend eager, or leave it out")
