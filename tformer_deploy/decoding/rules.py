"""Which tokens an output may continue with: lengths, penalties, bans, forced tokens, a set of allowed outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.errors import LimitError, NotNumbers
from ..base.messages import END_IS_FORCED, FORCED_END, NOT_FINITE, TOO_MANY_FORCED
from ..engines.base import Floats, Ints, Scores
from .options import DecodeOptions

_END = -1
_SORTED = 256
"""Rows of up to this many scores are fully sorted, all at once; longer ones are partitioned, one by one."""
LEAST = -1e4
"""A lower best log-probability is an error: the best is at least minus the logarithm of the vocabulary's size."""


class Trie:
    """A set of allowed outputs, given as token ids without end tokens."""

    def __init__(self, outputs: Iterable[Sequence[int]]) -> None:
        self._root: dict[int, Any] = {}
        for output in outputs:
            node = self._root
            for token in output:
                node = node.setdefault(int(token), {})
            node[_END] = {}

    def after(self, ids: Sequence[int]) -> tuple[list[int], bool]:
        """The tokens that may follow, and whether the output may end here."""
        node = self._root
        for token in ids:
            node = node.get(int(token), {})
        return [token for token in node if token != _END], _END in node

    def outputs(self) -> Iterator[tuple[int, ...]]:
        """All allowed outputs."""
        nodes: list[tuple[tuple[int, ...], dict[int, Any]]] = [((), self._root)]
        while nodes:
            ids, node = nodes.pop()
            if _END in node:
                yield ids
            nodes += [((*ids, token), following) for token, following in node.items() if token != _END]

    @cached_property
    def tokens(self) -> set[int]:
        """Every token of every output."""
        found, nodes = set(), [self._root]
        while nodes:
            for token, node in nodes.pop().items():
                found.add(token)
                nodes.append(node)
        return found - {_END}


def longest_outputs(options: DecodeOptions, positions: int, src_lengths: Ints) -> Ints:
    """The maximum length of each output, end token included."""
    longest = np.full(len(src_lengths), min(options.max_tokens, positions))
    if options.max_ratio:
        longest = np.maximum(1, np.minimum(options.max_ratio * src_lengths, longest).astype(np.int64))
    return longest


def check_forced(forced: int, longest: int, options: DecodeOptions, where: str = "") -> None:
    """Raise LimitError where an output is too short for its forced tokens and a forced end after them."""
    ends = options.forced_end and not options.endless
    if forced + ends > longest:
        also = FORCED_END if ends else ""
        raise LimitError(where + TOO_MANY_FORCED.format(forced=forced, also=also, longest=longest))


class Rules:
    """The options of a batch that change scores of tokens. `sentences` are indices in the batch."""

    def __init__(
        self,
        options: DecodeOptions,
        end_ids: Ints,
        positions: int,
        src_lengths: Ints,
        prefixes: Sequence[Sequence[int]],
        allowed: Trie | None,
    ) -> None:
        self.options, self.end_ids, self.allowed = options, end_ids, allowed
        alone = [words[0] for words in options.bad_words if len(words) == 1]
        self._banned = np.unique(np.array([*options.suppress, *alone], np.int32))
        self._bad = [list(words) for words in options.bad_words if len(words) > 1]
        longest = longest_outputs(options, positions, src_lengths)
        shortest = np.minimum(options.min_ratio * src_lengths, longest).astype(np.int64)
        self.longest, self._soonest = longest, int(longest.min())
        self.shortest = np.minimum(np.maximum(shortest, min(options.min_tokens, positions)), longest)
        self.prefixes = [(*options.first_ids, *prefix) for prefix in prefixes or [()] * len(src_lengths)]
        self._forced_steps, self._early_steps = max(map(len, self.prefixes)), int(self.shortest.max()) - 1
        if any(token in end_ids for prefix in self.prefixes for token in prefix):
            raise LimitError(END_IS_FORCED)
        for prefix, most in zip(self.prefixes, longest.tolist(), strict=True):
            check_forced(len(prefix), most, options)

    def needs_all(self, step: int) -> bool:
        """Whether step `step`, from 0, reads the log-probabilities of all tokens, not only of the best."""
        options = self.options
        ngrams = 0 < options.no_repeat_ngram <= step + 1 or any(len(words) <= step + 1 for words in self._bad)
        forced = step < self._forced_steps
        drawn_from_all = options.sampling and not options.top_k
        ending = options.forced_end and step + 1 >= self._soonest
        return (
            drawn_from_all or options.repetition_penalty != 1 or ngrams or forced or ending or self.allowed is not None
        )

    def named(self) -> list[list[int]]:
        """The tokens that each sentence may need: end tokens, forced tokens, tokens of allowed outputs."""
        common = [*self.end_ids.tolist(), *(sorted(self.allowed.tokens) if self.allowed else ())]
        return [[*common, *prefix] for prefix in self.prefixes]

    def spare(self, step: int) -> int:
        """How many of a row's best tokens may be forbidden at a step that reads only the best."""
        return len(self._banned) + len(self.end_ids) * (step < self._early_steps)

    def mask(self, ids: Ints, scores: Floats, sentences: Ints, step: int) -> Floats:
        """Scores (B, K, k) of the best tokens, with -inf for suppressed ones and for early ends."""
        if not self.spare(step):
            return scores
        early = (self.shortest[sentences] > step + 1)[:, None, None]
        forbidden = are_among(ids, self.end_ids) & early
        if len(self._banned):
            forbidden |= are_among(ids, self._banned)
        return np.where(forbidden, np.float32(-np.inf), scores)

    def apply(self, log_probs: Floats, outputs: Ints, sentences: Ints) -> Floats:
        """log_probs (B, K, V) after all rules, given the outputs (B, K, t) so far; -inf: forbidden."""
        step, options = outputs.shape[2], self.options
        scores = log_probs.copy()
        if options.repetition_penalty != 1 and step:
            repeated = np.take_along_axis(log_probs, outputs, 2)
            np.put_along_axis(scores, outputs, repeated * np.float32(options.repetition_penalty), 2)
        scores[..., self._banned] = -np.inf
        early = np.flatnonzero(self.shortest[sentences] > step + 1)
        scores[early[:, None], :, self.end_ids] = -np.inf
        for b, sentence in enumerate(sentences.tolist()):
            prefix = self.prefixes[sentence]
            if step < len(prefix):
                free = options.first_adds_zero and step < len(options.first_ids)
                forced = 0 if free else log_probs[b, :, prefix[step]].copy()
                scores[b] = -np.inf
                scores[b, :, prefix[step]] = forced
            elif options.no_repeat_ngram or self._bad or self.allowed:
                for row, output in zip(scores[b], outputs[b].tolist(), strict=True):
                    self._restrict(row, output, len(prefix))
            if options.forced_end and len(self.end_ids) and step + 1 == self.longest[sentence]:
                scores[b] = -np.inf
                for row, output in zip(scores[b], outputs[b].tolist(), strict=True):
                    if not self.allowed or self.allowed.after(output[len(prefix) :])[1]:
                        row[self.end_ids] = 0
        return scores

    def _restrict(self, row: Floats, output: list[int], prefix_length: int) -> None:
        if size := self.options.no_repeat_ngram:
            last = output[len(output) - size + 1 :] if len(output) >= size - 1 else None
            starts = range(len(output) - size + 1)
            row[[output[i + size - 1] for i in starts if output[i : i + size - 1] == last]] = -np.inf
        for *before, bad in self._bad:
            if output[-len(before) :] == before:
                row[bad] = -np.inf
        if self.allowed:
            following, may_end = self.allowed.after(output[prefix_length:])
            allowed = np.array([*following, *(self.end_ids if may_end else ())], np.int64)
            values = row[allowed]
            row[:] = -np.inf
            row[allowed] = values


def require_numbers(
    scores: Scores, numbers: Sequence[int], sentences: Ints, alive: NDArray[np.bool_], step: int
) -> None:
    """Raise NotNumbers where the best log-probability of a live row is NaN or infinite.

    `numbers`: of all requests of the batch; none: their indices.
    """
    broken = (~(scores.scores[:, :, 0] > LEAST) & alive).any(1)
    if broken.any():
        sentence = int(sentences[broken.argmax()])
        request = numbers[sentence] if len(numbers) else sentence
        raise NotNumbers(f"request {request + 1}: {NOT_FINITE.format(step=step + 1)}", request)


def are_among(ids: Ints, few: Ints) -> NDArray[np.bool_]:
    """Which ids are among a few; one comparison is much faster than numpy's isin."""
    return ids == few[0] if len(few) == 1 else np.isin(ids, few)


def best_tokens(scores: Floats, count: int) -> Ints:
    """Ids (..., count) of the highest of scores (..., V), best first, equal ones by the lower id. NaN is lowest."""
    rows = scores.reshape(-1, scores.shape[-1])
    rows = np.where(np.isnan(rows), -np.inf, rows)
    if rows.shape[1] <= _SORTED:
        return np.argsort(-rows, kind="stable")[:, :count].astype(np.int32).reshape(*scores.shape[:-1], count)
    best = np.empty((len(rows), count), np.int32)
    for value, out in zip(rows, best, strict=True):
        least = np.partition(value, -count)[-count]
        ids = np.flatnonzero(value >= least)
        out[:] = ids[np.argsort(-value[ids], kind="stable")[:count]]
    return best.reshape(*scores.shape[:-1], count)
