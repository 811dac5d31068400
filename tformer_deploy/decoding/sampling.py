"""Draws tokens from log-probabilities: the same on every backend for the same seed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..engines.base import Floats, Ints
from .options import DecodeOptions
from .rules import best_tokens

Doubles = NDArray[np.float64]

_SLICE = 64
"""Rows that are drawn at a time, which bounds the memory of float64 copies."""
_BEST = 1024
"""Tokens that are ranked for `top_p`; all tokens only where these do not reach it."""
_MOVES = 16 * 0.8 ** np.arange(100)
"""Sizes of changes of log-probabilities for which a nucleus is tested: 16 down to 4e-9, by factors of 0.8."""
_GROWTH = np.exp(_MOVES)


def uniforms(seed: int, numbers: NDArray[np.int64], samples: Ints, step: int) -> Doubles:
    """Random numbers in [0, 1) for requests (B) and their samples (B, K).

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


def draw(
    scores: Floats, uniform: Doubles, options: DecodeOptions, with_margins: bool = True, ids: Ints | None = None
) -> tuple[Ints, Doubles]:
    """Tokens (B, K) drawn from scores (B, K, V) with uniform (B, K); -1 where no token is allowed.

    With `ids` (B, K, N), scores (B, K, N) are those of these tokens alone. They must contain more than `top_k` allowed
    tokens, or all allowed ones; no other token can be drawn then.

    Also the margin (B, K) of each draw: it stays the same as long as no two scores of its row change by amounts that
    differ by the margin or more. Without `with_margins` they are NaN, which saves time.
    """
    rows, numbers = scores.reshape(-1, scores.shape[-1]), uniform.reshape(-1, 1)
    listed = None if ids is None else ids.reshape(rows.shape)
    tokens, margins = np.empty(len(rows), np.int32), np.empty(len(rows))
    for start in range(0, len(rows), _SLICE):
        part = slice(start, start + _SLICE)
        own = None if listed is None else listed[part]
        tokens[part], margins[part] = _draw(rows[part], own, numbers[part], options, with_margins)
    return tokens.reshape(uniform.shape), margins.reshape(uniform.shape)


def _draw(
    scores: Floats, ids: Ints | None, uniform: Doubles, options: DecodeOptions, with_margins: bool
) -> tuple[Ints, Doubles]:
    """`draw` for scores (N, V) and uniform (N, 1); no ids: the vocabulary."""
    margins = np.full(len(scores), np.inf)
    if ids is not None:
        order = np.argsort(ids, 1)
        ids, scores = np.take_along_axis(ids, order, 1), np.take_along_axis(scores, order, 1)
    if 0 < options.top_k < scores.shape[1]:
        best = best_tokens(scores, options.top_k + 1)
        margins = _gap(*np.take_along_axis(scores, best[:, -2:], 1).T)
        top = np.sort(best[:, :-1], 1)
        scores = np.take_along_axis(scores, top, 1)
        ids = top if ids is None else np.take_along_axis(ids, top, 1)
    x = scores.astype(np.float64) / options.temperature
    highest = x.max(1, keepdims=True)
    usable = np.isfinite(highest[:, 0])
    x = np.where(usable[:, None], x, 0.0) - np.where(usable[:, None], highest, 0.0)
    weights = np.exp(x)
    nuclei = []
    if options.top_p < 1:
        ranked = best_tokens(scores, min(_BEST, scores.shape[1]))
        for one, x_one, weights_one, best in zip(scores, x, weights, ranked, strict=True):
            nucleus, inside = _nucleus(one, x_one, weights_one, best, options.top_p)
            truncated = np.zeros_like(weights_one)
            truncated[inside] = weights_one[inside]
            weights_one[:] = truncated
            nuclei.append(nucleus)
    if options.min_p:
        least = math.log(options.min_p)
        weights = np.where(x >= least, weights, 0.0)
        margins = np.minimum(margins, options.temperature * np.abs(x - least).min(1))
    reached = np.cumsum(weights, 1)
    total = reached[:, -1:]
    # Below the end even where the product rounds up to it.
    target = np.minimum(uniform * total, np.nextafter(total, 0))
    chosen = (reached > target).argmax(1)[:, None]
    tokens = np.where(usable, (chosen if ids is None else np.take_along_axis(ids, chosen, 1))[:, 0], -1).astype(
        np.int32
    )
    if not with_margins:
        return tokens, np.full(len(tokens), np.nan)
    upper = np.take_along_axis(reached, chosen, 1)
    above, below = upper - target, target - (upper - np.take_along_axis(weights, chosen, 1))
    off = np.minimum(above, below) / total
    # No token lies beyond the first and the last one.
    above = np.where(upper < total, above, np.inf)
    below = np.where(chosen > (weights > 0).argmax(1)[:, None], below, np.inf)
    free = np.minimum(above, below) / total
    if nuclei:
        values = zip(total.flat, off.flat, free.flat, strict=True)
        moves = [nucleus.stays(*value) for nucleus, value in zip(nuclei, values, strict=True)]
        margins = np.minimum(margins, options.temperature * np.array(moves))
    else:
        margins = np.minimum(margins, 4 * options.temperature * free[:, 0])
    return tokens, margins


@dataclass(frozen=True)
class _Nucleus:
    """The ranked tokens of a row for `top_p`, of which the first `size` are drawn from."""

    top_p: float
    x: Doubles
    """Best first."""
    reached: Doubles
    """Cumulative weights, from 0: before the first token to after the last one."""
    total: float
    """Weight of the whole row."""
    size: int
    whole: bool
    """Whether `x` has all tokens of the row."""

    def stays(self, kept: float, off: float, free: float) -> float:
        """By how much values of x may change, relative to each other, without altering a draw.

        The draw is from tokens of the weight `kept`, and by `off` of it away from the next token; by `free` where none
        can enter or leave the nucleus. Where the drawn token itself can leave, that moves more than `off`.

        Changes that differ by less than d multiply the odds of any set of tokens by less than exp(d), which moves its
        probability by less than d / 4, and exchange only tokens that are less than d apart.
        """
        odds, count = (1 - self.top_p) / self.top_p, len(self.x)
        falling = -self.x
        # The last tokens of a sum that is certainly below `top_p`, and of one that certainly reaches it.
        earliest, latest = (
            np.minimum(np.searchsorted(self.reached[1:], self.total / (1 + odds * change)), count - 1)
            for change in (_GROWTH, 1 / _GROWTH)
        )
        # Tokens before `first` are always inside, those from `end` on never.
        first = np.searchsorted(falling, falling[earliest] - _MOVES)
        apart = np.searchsorted(falling, falling[earliest] + _MOVES, "right") == earliest + 1
        first = np.where(apart & (self.whole | (earliest < count - 1)), earliest + 1, first)
        end = np.searchsorted(falling, falling[latest] + _MOVES, "right")
        enter = np.where(end < count, self.reached[end], self.total) - self.reached[self.size]
        leave = self.reached[self.size] - self.reached[first]
        # Half the sum of the changes of all probabilities, by which a cumulative one moves at most.
        moved = np.maximum(enter, leave) / kept
        safe = np.where(first >= end, free, off - moved)
        return float(np.max(_MOVES, where=safe >= _MOVES / 4, initial=0.0))


def _nucleus(scores: Floats, x: Doubles, weights: Doubles, best: Ints, top_p: float) -> tuple[_Nucleus, Ints]:
    """The nucleus of scores (V), of which `best` are ranked, and its tokens, best first."""
    total = float(np.cumsum(weights)[-1])
    reached = np.cumsum(weights[best])
    if reached[-1] < top_p * total:
        best = best_tokens(scores, len(scores))
        reached = np.cumsum(weights[best])
    size = min(int(np.searchsorted(reached, top_p * total)) + 1, len(best))
    sums = np.concatenate(([0.0], reached))
    return _Nucleus(top_p, x[best], sums, total, size, len(best) == len(scores)), best[:size]


def _gap(higher: Floats, lower: Floats) -> Doubles:
    """Gaps between scores; infinite below a score that is allowed, and where nothing is."""
    allowed = np.isfinite(lower)
    return np.where(allowed, higher.astype(np.float64) - np.where(allowed, lower, 0), np.inf)
