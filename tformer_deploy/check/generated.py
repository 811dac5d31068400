"""Generated sentences beyond the usual ones: as many as there is time for."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from ..engines.base import Engine
from .observe import CheckOptions, by_length
from .recording import Run, record

TRIED, EAGER_SHARE = 32, 0.25
"""Sentences by which the time for more is measured, and the share of the time that eager may take for them."""
USUAL_TOKENS = 24
"""Most source tokens of further generated sentences."""


def affordable(eager: Engine, sources: Sequence[Sequence[int]], options: CheckOptions, longest: int) -> list[list[int]]:
    """As many more generated sources as there is time for, with greedy search by an engine that is entered."""
    wanted, config = max(0, options.sentences - len(sources)), eager.config
    more = more_sources(config.src_vocab, config.eos_id, longest, wanted) if sources else []
    if not more or not options.seconds:
        return []
    decoding, start = options.modes()["greedy"], time.perf_counter()
    for batch, indices in by_length(eager, more, range(min(TRIED, len(more))), options, decoding):
        record(eager, batch, indices, decoding, Run())
    each = 2 * (time.perf_counter() - start) / min(TRIED, len(more))  # decoded and scored
    return more[: int(EAGER_SHARE * options.seconds / each)]


def more_sources(src_vocab: int, eos_id: int, longest: int, count: int) -> list[list[int]]:
    """Further random sources of usual lengths; the same each time."""
    rng, words = np.random.default_rng(2), np.arange(min(4, src_vocab - 1), src_vocab)
    lengths = rng.integers(1, min(longest, USUAL_TOKENS) + 1, count)
    return [[*rng.choice(words, length - 1).tolist(), eos_id] for length in lengths]
