"""Description of an engine, readable without importing its packages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..bundle.contract import MEMORY_GRAPH
from ..bundle.manifest import Bundle

if TYPE_CHECKING:
    from ..bundle.shortlist import Shortlist

STANDARD = "fp32"
"""What the standard graphs are called where variants are named."""


@dataclass(frozen=True)
class Opening:
    """What an engine is opened with."""

    bundle: Bundle
    variant: str
    """As in the engine's name, or the first where that names none and there are no standard graphs."""
    device: str = "cpu"
    threads: int = 0
    """0: as many as this process has cores."""
    checkpoint: Path | None = None
    """The run folder, if it is not where it was at export."""
    shortlist: Shortlist | None = None
    """The only tokens that are scored."""


@dataclass(frozen=True)
class EngineSpec:
    """An engine: what it runs, where, and what it can do.

    Its module has `open_engine(Opening) -> Engine`, which is not entered yet; `load_runtime()`, which imports its
    packages and raises MissingExtra, ConfigError or EngineError where they cannot be used; and `open_encoder(Opening)
    -> Encoder` unless `no_encoder`.
    """

    name: str
    """The backend, as `--backend` takes it, and the module of this package."""
    title: str
    """What messages call it."""
    packages: tuple[str, ...] = ()
    """Distributions that decide what it computes: reports state their versions."""
    targets: tuple[str, ...] = ()
    """Targets of the recipes that it runs, see `Recipe.target`; none: the checkpoint itself."""
    precisions: tuple[str, ...] = ()
    """What `--variant` may be, where that chooses a precision and not a variant of the bundle."""
    devices: tuple[str, ...] = ("cpu",)
    """The first is where it runs unless another is asked for."""
    shortlist_targets: tuple[str, ...] = ()
    """Targets of which it can score the tokens of a shortlist alone."""
    checked_at_export: bool = False
    """Whether an export checks what it runs."""
    plans: bool = False
    """Whether it runs plans, which say themselves what requests they take."""
    measured: bool = True
    """Whether bench measures it; libtformer with ONNX Runtime is measured by its own programs."""
    can_profile: bool = False
    """Whether its time can be measured by kind of node."""
    no_encoder: str = ""
    """Why it does not run the encoder alone, and what to use; empty: it does."""
    require: Callable[[Bundle], object] = lambda bundle: None
    """Raises ConfigError for a bundle that has nothing for it."""

    @property
    def reference(self) -> bool:
        """Whether it runs the checkpoint itself."""
        return not self.targets

    @property
    def standard(self) -> bool:
        """Whether it runs the standard graphs."""
        return "onnx" in self.targets

    def variants(self, bundle: Bundle) -> list[str]:
        """What `--variant` may be, the standard graphs first."""
        own = [name for name, recipe in bundle.variants.items() if recipe.target in self.targets]
        if self.precisions:
            return list(self.precisions) if self.standard or own else []
        return [STANDARD, *own] if self.standard else sorted(own)

    def default(self, bundle: Bundle) -> str:
        """The variant that a translation runs where none is named; empty: what the backend's name alone stands for."""
        if self.precisions or self.reference:
            return ""
        return bundle.default if self.standard else next(iter(self.variants(bundle)), "")

    def choices(self, bundle: Bundle) -> list[str]:
        """What `--variant` may choose in a check or benchmark, where a backend may stand for several engines."""
        return [] if self.reference or self.plans else self.variants(bundle)

    def usual(self, bundle: Bundle) -> list[str]:
        """The choices that a backend stands for there; none: the engine of its name alone."""
        return [] if self.precisions else self.choices(bundle)

    def names(self, bundle: Bundle) -> list[str]:
        """All engines of it that a bundle has."""
        variants = self.variants(bundle)
        names = [self.name, *(f"{self.name}:{variant}" for variant in variants[self.standard :])]
        if "cuda" in self.devices[1:]:
            own = [f":{name}" for name, recipe in bundle.variants.items() if recipe.target == "trt"]
            names += [f"{self.name}{variant}@cuda" for variant in ([""] if self.reference else own)]
        return names if variants or self.reference else []

    def folder(self, variant: str, bundle: Bundle) -> str:
        """The bundle's variant whose graphs, program or plans run; empty: its standard graphs, or the checkpoint."""
        if self.reference or (self.standard and (self.precisions or not variant)):
            return ""
        if self.plans:
            return next(name for name, recipe in bundle.variants.items() if recipe.target in self.targets)
        return variant or self.variants(bundle)[0]

    def encoders(self, bundle: Bundle) -> list[str]:
        """What `--variant` may be for the encoder alone."""
        own = [] if self.no_encoder else self.choices(bundle)
        return [name for name in own if has_encoder("" if name == STANDARD else name, bundle)]


def has_encoder(folder: str, bundle: Bundle) -> bool:
    """Whether a variant of a bundle, or with "" its standard graphs, has the encoder alone."""
    if folder and bundle.variants[folder].target == "native":
        return bundle.variants[folder].memory
    return bundle.lists(MEMORY_GRAPH, folder)
