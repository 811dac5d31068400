"""Shares of sentences or steps: how many of a few may differ where a share of very many may."""

from __future__ import annotations

from math import exp, lgamma, log, log1p, sqrt

ERROR = 1e-3
"""Chance that an engine of which exactly the share differs fails one comparison by bad luck; see docs/check.md."""
FAR = 10
"""Standard deviations above the mean, beyond which nothing counts."""


def allowed(share: float, count: int) -> int:
    """The most of `count` that may differ where a `share` of all may: more do so with a chance of at most `ERROR`.

    By the binomial distribution, as if they were drawn at random.
    """
    if not 0 < share < 1:
        return count if share >= 1 else 0
    mean = share * count
    most, tail = min(count, int(mean + FAR * sqrt(mean) + 10 * FAR)), 0.0
    while most > 0 and (tail := tail + exp(_log_chance(most, share, count))) <= ERROR:
        most -= 1
    return most


def _log_chance(hits: int, share: float, count: int) -> float:
    """That exactly so many differ."""
    ways = lgamma(count + 1) - lgamma(hits + 1) - lgamma(count - hits + 1)
    return ways + hits * log(share) + (count - hits) * log1p(-share)
