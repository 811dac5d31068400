"""The usual searches under rules that a caller gives: another start, or log-probabilities that a function changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..base.errors import ConfigError
from ..engines.base import Batch, Engine, Floats, Hypothesis, Ints
from .options import DecodeOptions
from .rules import Rules
from .running import ContinuousBatch

Allowed = Callable[[int, Any], Sequence[int]]
"""A sentence's number and its output so far, start token first -> the tokens that may follow."""


@dataclass(frozen=True)
class HfRules:
    """What `generate` of transformers does to log-probabilities, in its order; the start token counts as produced."""

    options: DecodeOptions
    end_ids: Ints
    longest: int
    begin_suppress: tuple[int, ...] = ()
    allowed: Allowed | None = None
    as_given: Callable[[Ints], Any] = field(default=lambda ids: ids)
    """Makes of an output what `allowed` takes."""
    never_ends: bool = False
    """No end token before the longest length, nor at it."""

    def __call__(self, log_probs: Floats, outputs: Ints, sentences: Ints) -> Floats:
        """log_probs (B, K, V) after the rules, given outputs (B, K, t) that begin with the start token."""
        options, length = self.options, outputs.shape[2]
        scores = log_probs.copy()
        if options.repetition_penalty != 1:
            repeated = np.take_along_axis(log_probs, outputs, 2)
            np.put_along_axis(scores, outputs, repeated * np.float32(options.repetition_penalty), 2)
        if options.no_repeat_ngram or options.bad_words:
            for rows, each in zip(scores, outputs.tolist(), strict=True):
                for row, output in zip(rows, each, strict=True):
                    self._restrict(row, output)
        if length < options.min_tokens or self.never_ends:
            scores[..., self.end_ids] = -np.inf
        if self.allowed:
            self._keep_allowed(scores, outputs, sentences)
        if length <= len(options.first_ids):
            self._force(scores, options.first_ids[length - 1 : length])
        if options.forced_end and length == self.longest:
            self._force(scores, self.end_ids)
        scores[..., list(options.suppress)] = -np.inf
        if self.begin_suppress and length == 1 + len(options.first_ids):
            scores[..., list(self.begin_suppress)] = -np.inf
        return scores

    def _force(self, scores: Floats, tokens: Any) -> None:
        scores[:] = -np.inf
        scores[..., list(tokens)] = 0

    def _restrict(self, row: Floats, output: list[int]) -> None:
        if size := self.options.no_repeat_ngram:
            last = output[len(output) - size + 1 :] if len(output) >= size - 1 else None
            row[
                [output[i + size - 1] for i in range(len(output) - size + 1) if output[i : i + size - 1] == last]
            ] = -np.inf
        for *before, bad in self.options.bad_words:
            if not before or output[-len(before) :] == before:
                row[bad] = -np.inf

    def _keep_allowed(self, scores: Floats, outputs: Ints, sentences: Ints) -> None:
        assert self.allowed
        for b, sentence in enumerate(sentences.tolist()):
            for row, output in zip(scores[b], outputs[b], strict=True):
                tokens = list(self.allowed(sentence, self.as_given(output)))
                if not tokens:
                    raise ConfigError(
                        f"prefix_allowed_tokens_fn gave no token after {output.tolist()!s:.60} of sentence {sentence}: "
                        "return one at least"
                    )
                kept = row[tokens]
                row[:] = -np.inf
                row[tokens] = kept


class _Guided(Rules):
    """Rules of the caller in place of those of the options."""

    def __init__(self, own: Rules, rules: HfRules, start_id: int) -> None:
        vars(self).update(vars(own))
        self.hf, self.start_id = rules, start_id

    def needs_all(self, step: int) -> bool:
        """See `Rules.needs_all`."""
        return True

    def apply(self, log_probs: Floats, outputs: Ints, sentences: Ints) -> Floats:
        """See `Rules.apply`."""
        start = np.full((*outputs.shape[:2], 1), self.start_id, np.int32)
        return self.hf(log_probs, np.concatenate((start, outputs), 2), sentences)


def decode_guided(engine: Engine, batch: Batch, rules: HfRules, start_id: int) -> list[list[Hypothesis]]:
    """As `decode`, by our own loop, from another start token and under rules of the caller. Raises what `decode` does,
    and what the rules raise."""
    running = ContinuousBatch(engine)
    search = running.join(batch, rules.options)
    search.rules, search.plain = _Guided(search.rules, rules, start_id), False
    search.tokens = np.full_like(search.tokens, start_id)
    while running.searches:
        running.step()
    return search.outputs()
