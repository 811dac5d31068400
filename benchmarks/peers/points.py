"""What is decoded: synthetic batches for `base`, a whole corpus for a trained model."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

EOS_ID, FIRST_WORD_ID = 3, 4
"""Ids below the first word are special."""
SRC_TOKENS, NEW_TOKENS = 20, 32
CHECKED_SOURCES = 50


@dataclass(frozen=True)
class Point:
    """One decoding task."""

    name: str
    sources: list[list[int]]
    """Ids as the encoder sees them, eos included."""
    beams: int
    max_tokens: int
    exact: bool
    """Every output has max_tokens tokens: random weights do not end a sentence."""

    @property
    def corpus(self) -> bool:
        """Cut into batches by whoever translates it."""
        return not self.exact

    def to_json(self) -> dict[str, Any]:
        """For the processes that decode it."""
        return asdict(self)


def random_sources(vocab: int, lengths: Iterable[int], seed: int) -> list[list[int]]:
    """Random words and eos."""
    rng = random.Random(seed)
    return [[rng.randrange(FIRST_WORD_ID, vocab) for _ in range(length - 1)] + [EOS_ID] for length in lengths]


def base_points(vocab: int) -> list[Point]:
    """Batches of sources of 20 tokens, 32 tokens generated; greedy is beam 1."""
    return [
        Point(f"b{batch}k{beams}", random_sources(vocab, [SRC_TOKENS] * batch, batch), beams, NEW_TOKENS, True)
        for beams in (1, 4)
        for batch in (1, 8, 32)
    ]


def check_point(vocab: int) -> Point:
    """Sources of many lengths, to compare outputs on."""
    lengths = [5 + i % SRC_TOKENS for i in range(CHECKED_SOURCES)]
    return Point("check", random_sources(vocab, lengths, 0), 1, NEW_TOKENS, True)


def corpus_points(sources: list[list[int]]) -> list[Point]:
    """The corpus, greedy and with a beam of 5."""
    return [Point(name, sources, beams, 256, False) for name, beams in (("greedy", 1), ("beam5", 5))]
