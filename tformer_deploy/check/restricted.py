"""Eager PyTorch with shortlists, the reference for the graphs of a shortlist."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ..base.errors import ConfigError
from ..bundle.manifest import Bundle
from ..bundle.shortlist import Shortlist
from ..decoding.rules import best_tokens
from ..engines import ENGINES, EngineName, expand, require_each
from ..engines.base import ANYTHING, Engine, Floats, Ints, Outlook, SameStep, Scores, State


def with_shortlist(bundle: Bundle, backends: Sequence[str], variants: Sequence[str]) -> list[str]:
    """`variants`, or all variants of the backends that have graphs for a shortlist. Raises ConfigError."""
    asked = [EngineName(name) for name in backends or [spec.name for spec in ENGINES if spec.shortlist_targets]]
    if other := [name for name in asked if not name.spec.shortlist_targets]:
        raise ConfigError(f"--shortlist: {other[0]} has no graphs for it: leave out --backend {other[0]}")
    having = [*variants] or [
        name
        for name, recipe in bundle.variants.items()
        if any(recipe.target in each.spec.shortlist_targets and each.variant in ("", name) for each in asked)
    ]
    if not having:
        raise ConfigError(f"--shortlist: {bundle.directory} has no variant for it: export it again, with --recipe int8")
    return having


def asked_engines(
    bundle: Bundle, backends: Sequence[str], variants: Sequence[str], *, device: str, shortlist: bool
) -> list[EngineName]:
    """The engines of backends and variants; none of the variants: all that there are. Raises ConfigError."""
    chosen = with_shortlist(bundle, backends, variants) if shortlist else variants
    engines = expand(backends, chosen, bundle, device)
    require_each(backends, engines)
    return engines


@dataclass
class RestrictedState:
    """An engine's state, and the tokens that each sentence may use."""

    inner: State
    allowed: NDArray[np.bool_]
    """(B, V)"""


class RestrictedEngine(SameStep):
    """An engine whose log-probabilities are normalised over the tokens that a sentence's shortlist allows."""

    def __init__(self, engine: Engine, shortlist: Shortlist) -> None:
        self.engine, self.shortlist = engine, shortlist
        self.config, self.limits = engine.config, engine.limits
        self.precision, self.attention = engine.precision, engine.attention

    def __enter__(self) -> Self:
        self.engine.__enter__()
        return self

    def __exit__(self, *why: object) -> None:
        self.engine.__exit__(*why)

    def encode(self, src_ids: Ints, src_lengths: Ints, outlook: Outlook = ANYTHING) -> RestrictedState:
        """See `Engine.encode`."""
        allowed = self.shortlist.allowed(src_ids, src_lengths)
        for row, ids in zip(allowed, outlook.required, strict=False):
            row[list(ids)] = True
        return RestrictedState(self.engine.encode(src_ids, src_lengths, outlook), allowed)

    def best(self, beams: int, state: RestrictedState) -> int:
        """See `Engine.best`."""
        return self.engine.best(beams, state.inner)

    def step(self, tokens: Ints, state: RestrictedState, full: bool = False, attention: bool = False) -> Scores:
        """See `Engine.step`."""
        scores = self.engine.step(tokens, state.inner, True, attention)
        assert scores.log_probs is not None
        log_probs = restrict(scores.log_probs, state.allowed)
        ids = best_tokens(log_probs, self.best(tokens.shape[1], state))
        return Scores(ids, np.take_along_axis(log_probs, ids, -1), log_probs if full else None, scores.attention)

    def reorder(self, state: RestrictedState, parents: Ints, sentences: Ints | None = None) -> None:
        """See `Engine.reorder`."""
        self.engine.reorder(state.inner, parents, sentences)
        if sentences is not None:
            state.allowed = state.allowed[sentences]

    def cross_keys_values(self, state: RestrictedState) -> list[Floats]:
        """See `Engine.cross_keys_values`."""
        return self.engine.cross_keys_values(state.inner)

    def layers(self, src_ids: Ints, src_lengths: Ints, tgt_ids: Ints) -> dict[str, Any]:
        """See `Engine.layers`; `log_probs` are of the whole vocabulary."""
        return self.engine.layers(src_ids, src_lengths, tgt_ids)


def restrict(log_probs: Floats, allowed: NDArray[np.bool_]) -> Floats:
    """Log-probabilities (B, K, V) normalised over the allowed tokens (B, V); others have -inf."""
    within = np.where(allowed[:, None], log_probs.astype(np.float64), -np.inf)
    largest = within.max(-1, keepdims=True)
    total: Floats = (within - largest - np.log(np.exp(within - largest).sum(-1, keepdims=True))).astype(np.float32)
    return total
