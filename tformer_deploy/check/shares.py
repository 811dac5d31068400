"""Shares of sentences or steps: how many of a small sample may differ if a share of all may."""

from __future__ import annotations

from math import exp, lgamma, log, log1p, sqrt

ERROR = 1e-3
"""Probability that an engine that is exactly at the limit fails by chance; see docs/check.md."""
FAR = 10
"""Standard deviations above the mean after which probabilities are negligible."""


def allowed(share: float, count: int) -> int:
    """How many of `count` may differ if a `share` of all may: more than that have a probability of at most `ERROR`.

    Binomial distribution.
    """
    if not 0 < share < 1:
        return count if share >= 1 else 0
    mean = share * count
    most, tail = min(count, int(mean + FAR * sqrt(mean) + 10 * FAR)), 0.0
    while most > 0 and (tail := tail + exp(_log_chance(most, share, count))) <= ERROR:
        most -= 1
    return most


def _log_chance(hits: int, share: float, count: int) -> float:
    """Logarithm of the probability that exactly so many differ."""
    ways = lgamma(count + 1) - lgamma(hits + 1) - lgamma(count - hits + 1)
    return ways + hits * log(share) + (count - hits) * log1p(-share)
