"""Generated sources: a fixed set, and further ones as time allows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from ..bundle.manifest import Bundle
from ..engines.base import Engine
from .observe import CheckOptions, by_length
from .recording import Run, record

if TYPE_CHECKING:
    from ..engines.eager import EagerEngine

TRIED, EAGER_SHARE = 32, 0.25
"""Sentences from which the time of one is estimated; the share of `seconds` that eager may spend on further ones."""
USUAL_TOKENS = 24
"""Longest further source: most sentences of real text are shorter."""
EASY_POSITIONS, POSITIONS_SHARE = 256, 0.25
"""Positions that are scored in any case, and the share of `seconds` that eager may spend on later ones."""


def affordable(eager: Engine, sources: Sequence[Sequence[int]], options: CheckOptions, longest: int) -> list[list[int]]:
    """As many further generated sources as an entered engine can decode greedily in its share of the time."""
    wanted, config = max(0, options.sentences - len(sources)), eager.config
    more = more_sources(config.src_vocab, config.eos_id, longest, wanted) if sources else []
    if not more or not options.seconds:
        return []
    decoding, start = options.modes()["greedy"], time.perf_counter()
    for batch, indices in by_length(eager, more, range(min(TRIED, len(more))), options, decoding):
        record(eager, batch, indices, decoding, Run())
    each = 2 * (time.perf_counter() - start) / min(TRIED, len(more))  # decoded and scored
    return more[: int(EAGER_SHARE * options.seconds / each)]


def reachable(eager: EagerEngine, options: CheckOptions) -> int:
    """The last position that there is time to score, at most `options.positions`.

    Steps of a module that runs the whole prefix again get longer: all of 5,000 positions would take hours.
    """
    most, found = options.positions, min(options.positions, EASY_POSITIONS)
    if not eager.config.module_parameters:
        return most
    while found < most:
        further = min(2 * found, most)
        step = min(eager.step_seconds(further - 1) for _ in range(2))  # the first one warms up
        if further * step / 2 > POSITIONS_SHARE * options.seconds:
            break
        found = further
    return found


def not_scored(options: CheckOptions, bundle: Bundle) -> list[str]:
    """A line for the report if there was no time for all positions of a module of the user's own."""
    positions = bundle.recipe.axes.past_len.max + 1
    if not bundle.config.module_parameters or not EASY_POSITIONS <= options.positions < positions:
        return []
    return [
        f"scores were compared up to position {options.positions:,} of {positions:,}, as there was no time for more: "
        "tformer check --seconds gives it time, a smaller max_positions needs less"
    ]


def generated_sources(src_vocab: int, eos_id: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Up to 48 random sources: lengths 1 to 16, then ever fewer up to `longest`; the same each time.

    Their tokens are random permutations of the vocabulary, one after another, so that a small one is covered.
    """
    lengths = [n for n in range(1, longest + 1) if n <= 16 or n % 16 == 0 or n == longest]
    while len(lengths) > 48:
        lengths = lengths[:16] + lengths[16:-1:2] + lengths[-1:]
    rng, words = np.random.default_rng(seed), np.arange(min(4, src_vocab - 1), src_vocab)
    rounds = -(-sum(lengths) // len(words))
    tokens = iter(np.concatenate([rng.permutation(words) for _ in range(rounds)]).tolist())
    return [[*islice(tokens, n - 1), eos_id] for n in lengths]


def more_sources(src_vocab: int, eos_id: int, longest: int, count: int) -> list[list[int]]:
    """Further random sources of usual lengths; the same each time."""
    rng, words = np.random.default_rng(2), np.arange(min(4, src_vocab - 1), src_vocab)
    lengths = rng.integers(1, min(longest, USUAL_TOKENS) + 1, count)
    return [[*rng.choice(words, length - 1).tolist(), eos_id] for length in lengths]
