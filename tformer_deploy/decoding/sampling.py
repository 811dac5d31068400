"""Draws tokens from log-probabilities: the same on every backend for the same seed."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ..engines.base import Floats, Ints
from .options import DecodeOptions
from .rules import best_tokens

Doubles = NDArray[np.float64]


def uniforms(seed: int, numbers: NDArray[np.int64], samples: Ints, step: int) -> Doubles:
    """Numbers in [0, 1) for requests (B) and their samples (B, K).

    A function of its arguments alone, so that neither batching nor the order of requests changes a draw.
    """
    mixed = _mix(np.full(len(numbers), seed, np.uint64))
    mixed = _mix(mixed ^ numbers.astype(np.uint64))
    mixed = _mix(mixed[:, None] ^ np.maximum(samples, 0).astype(np.uint64))
    return (_mix(mixed ^ np.uint64(step)) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One output of SplitMix64. Source: Steele et al. 2014, "Fast splittable pseudorandom number generators"."""
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def draw(scores: Floats, uniform: Doubles, options: DecodeOptions) -> tuple[Ints, Doubles]:
    """Tokens (B, K) drawn from scores (B, K, V) with uniform (B, K); -1 where no token is allowed.

    Also the margin (B, K) of each draw: it stays the same as long as no two scores of its row change by amounts that
    differ by the margin or more.
    """
    rows = scores.reshape(-1, scores.shape[-1])
    margins = np.full(len(rows), np.inf)
    ids = None  # in the order of the vocabulary
    if 0 < options.top_k < rows.shape[1]:
        ids = best_tokens(rows, options.top_k + 1)
        margins = _gap(*np.take_along_axis(rows, ids[:, -2:], 1).T)
        ids = ids[:, :-1]
    elif options.top_p < 1:
        ids = best_tokens(rows, rows.shape[1])
    kept = rows if ids is None else np.take_along_axis(rows, ids, 1)
    x = kept.astype(np.float64) / options.temperature
    highest = x.max(1, keepdims=True)
    usable = np.isfinite(highest[:, 0])
    x = np.where(usable[:, None], x, 0.0) - np.where(usable[:, None], highest, 0.0)
    weights = np.exp(x)
    if options.top_p < 1:
        weights, nucleus = _nucleus(kept, weights, options)
        margins = np.minimum(margins, nucleus)
    if options.min_p:
        least = math.log(options.min_p)
        weights = np.where(x >= least, weights, 0.0)
        margins = np.minimum(margins, options.temperature * np.abs(x - least).min(1))
    if ids is not None:
        order = np.argsort(ids, 1)
        ids, weights = np.take_along_axis(ids, order, 1), np.take_along_axis(weights, order, 1)
    reached = np.cumsum(weights, 1)
    # Below the end even where the product rounds up to it.
    target = np.minimum(uniform.reshape(-1, 1) * reached[:, -1:], np.nextafter(reached[:, -1:], 0))
    chosen = (reached > target).argmax(1)[:, None]
    upper = np.take_along_axis(reached, chosen, 1)
    lower = upper - np.take_along_axis(weights, chosen, 1)
    # No token lies beyond the first and the last one.
    above = np.where(upper < reached[:, -1:], upper - target, np.inf)
    below = np.where(chosen > (weights > 0).argmax(1)[:, None], target - lower, np.inf)
    margins = np.minimum(margins, _slack(np.minimum(above, below) / reached[:, -1:], options)[:, 0])
    tokens = (chosen if ids is None else np.take_along_axis(ids, chosen, 1))[:, 0]
    tokens = np.where(usable, tokens, -1).astype(np.int32)
    return tokens.reshape(uniform.shape), margins.reshape(uniform.shape)


def _nucleus(scores: Floats, weights: Doubles, options: DecodeOptions) -> tuple[Doubles, Doubles]:
    """The weights that `top_p` leaves of those of scores (N, V), best first, and their margins (N)."""
    reached = np.cumsum(weights, 1)
    enough = options.top_p * reached[:, -1:]
    before = np.concatenate((np.zeros_like(enough), reached[:, :-1]), 1)
    inside = before < enough
    if scores.shape[1] == 1:
        return weights, np.full(len(scores), np.inf)
    off = np.abs(before[:, 1:] - enough).min(1) / reached[:, -1]
    # Of two tokens of nearly equal scores at the edge, either might be the last one inside.
    edge = np.minimum(np.count_nonzero(inside, 1), scores.shape[1] - 1)[:, None]
    gap = _gap(*np.take_along_axis(scores, np.concatenate((edge - 1, edge), 1), 1).T)
    gap = np.where(inside.all(1), np.inf, gap)
    return np.where(inside, weights, 0.0), np.minimum(_slack(off, options), gap)


def _slack(off: Doubles, options: DecodeOptions) -> Doubles:
    """By how much changes of scores must differ to move a cumulative probability by `off`."""
    return 4 * options.temperature * off


def _gap(higher: Floats, lower: Floats) -> Doubles:
    """Gaps between scores; infinite below a score that is allowed, and where nothing is."""
    allowed = np.isfinite(lower)
    return np.where(allowed, higher.astype(np.float64) - np.where(allowed, lower, 0), np.inf)
