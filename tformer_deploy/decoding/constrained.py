"""Constrained beam search over the Engine protocol: every output contains given phrases.

It finds the tokens that transformers 4 finds. Sums are float32 as there, since banks and scores are added up and
compared. Python only: the `generate` of `pipelines` uses it, C++ does not have it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..base.errors import ConfigError
from ..engines.base import Batch, Engine, Floats, Hypothesis, Ints, Outlook
from .checks import check_batch, check_tokens
from .constraints import Constraint, Progress
from .options import DecodeOptions
from .search import length_norm

Processor = Callable[[Floats, Ints, Ints], Floats]
"""Log-probabilities (B, K, V), outputs (B, K, t) with the start token, sentences (B) -> changed log-probabilities."""
NEVER = np.float32(-1e9)
"""The sum of rows that no hypothesis has at the first step, as transformers has it."""
BANK = 100
"""By how much a bank is worth more than the next: more than any sum of log-probabilities of usual outputs."""


@dataclass(frozen=True)
class Asked:
    """What a constrained search is to find."""

    constraints: Sequence[Constraint]
    options: DecodeOptions
    start_id: int
    processor: Processor
    """The rules for tokens."""


@dataclass
class _Row:
    """A candidate: the row that it continues, its token, its sum."""

    parent: int
    token: int
    value: np.float32


class _Sentence:
    """The kept outputs of one sentence."""

    def __init__(self, asked: Asked, longest: int) -> None:
        self.asked, self.options, self.longest = asked, asked.options, longest
        self.kept: list[Hypothesis] = []
        self.worst = 1e9
        self.done = False

    def add(self, output: list[int], end_id: int | None, value: float, length: int) -> None:
        """Keep an output if it is among the best."""
        value /= length_norm(length, self.options)
        if len(self.kept) < self.options.beams or value > self.worst:
            self.kept.append(Hypothesis(output, end_id, value, value))
            if len(self.kept) > self.options.beams:
                lowest = min(range(len(self.kept)), key=lambda i: (self.kept[i].value, i))
                del self.kept[lowest]
                self.worst = min(each.value for each in self.kept)
            else:
                self.worst = min(value, self.worst)

    def check_done(self, best: float, length: int) -> None:
        """The stop rule, after a step whose best candidate has the sum `best`."""
        if len(self.kept) < self.options.beams or self.done:
            return
        if self.options.stop == "exact" and self.options.length_penalty > 0:
            length = self.longest
        self.done = self.options.stop == "count" or self.worst >= best / length_norm(length, self.options)

    def best(self) -> list[Hypothesis]:
        """The n best, best first; of equal ones the later."""
        ranked = sorted(self.kept, key=lambda each: each.value)
        return ranked[::-1][: self.options.n_best]


def decode_constrained(engine: Engine, batch: Batch, asked: Asked) -> list[list[Hypothesis]]:
    """The best outputs of each source that contain what `asked` wants, where such are found by the longest length.

    Raises ConfigError, DataError, LimitError and the engine's errors.
    """
    options, count = asked.options, len(batch.src_lengths)
    _check(engine, batch, asked)
    longest = min(options.max_tokens, engine.limits.tgt_tokens)
    outputs = np.full((count, options.beams, 1), asked.start_id, np.int32)
    sums = np.full((count, options.beams), NEVER, np.float32)
    sums[:, 0] = 0
    sentences = [_Sentence(asked, longest) for _ in range(count)]
    ends = options.ends(engine.config.eos_id)
    state = engine.encode(batch.src_ids, batch.src_lengths, Outlook(options.beams, longest, ends[0]))
    width, going = 1, np.arange(count, dtype=np.int32)
    while True:
        found = engine.step(np.ascontiguousarray(outputs[going, :width, -1]), state, full=True).log_probs
        assert found is not None
        log_probs = np.repeat(found, options.beams, 1) if width == 1 and options.beams > 1 else found
        ruled = asked.processor(log_probs, outputs[going], going)
        rows = [_advance(sentences[b], outputs[b], sums[b], ruled[i], ends) for i, b in enumerate(going.tolist())]
        parents = np.zeros((count, options.beams), np.int32)
        tokens = np.full((count, options.beams), engine.config.pad_id, np.int32)
        for b, chosen in zip(going.tolist(), rows, strict=True):
            parents[b], tokens[b] = [row.parent for row in chosen], [row.token for row in chosen]
            sums[b] = [row.value for row in chosen]
        outputs = np.concatenate((np.take_along_axis(outputs, parents[:, :, None], 1), tokens[:, :, None]), 2)
        stay = np.array([i for i, b in enumerate(going) if not sentences[b].done], np.int32)
        if not len(stay) or outputs.shape[2] > longest:
            break
        # At the first step there was one row of each sentence.
        continued = stay[:, None] * width + (parents[going[stay]] if width > 1 else 0 * parents[going[stay]])
        left = len(stay) < len(going)
        engine.reorder(state, continued.astype(np.int32), stay if left else None)
        going, width = going[stay], options.beams
    for b, sentence in enumerate(sentences):
        _finish(sentence, outputs[b], sums[b])
    return [sentence.best() for sentence in sentences]


def _check(engine: Engine, batch: Batch, asked: Asked) -> None:
    check_batch(batch)
    check_tokens(engine, [phrase for each in asked.constraints for phrase in each.phrases])
    if asked.options.beams < 2:
        raise ConfigError("constraints need a beam: give num_beams=2 or more")
    if asked.options.endless:
        raise ConfigError("constraints need outputs that end: leave endless out")


def _advance(sentence: _Sentence, outputs: Ints, sums: Any, log_probs: Floats, ends: Sequence[int]) -> list[_Row]:
    """Collect what ends in outputs (K, t) with log_probs (K, V), and choose the K rows that go on."""
    beams, constraints = len(outputs), sentence.asked.constraints
    values = log_probs + sums[:, None]
    flat, vocab = values.ravel(), values.shape[1]
    wanted = min(max(2, 1 + len(ends)) * beams, flat.size)
    order = np.argsort(-flat, kind="stable")[:wanted]
    chosen: list[_Row] = []
    length = outputs.shape[1]
    for rank, place in enumerate(order.tolist()):
        parent, token = divmod(place, vocab)
        if token not in ends:
            chosen.append(_Row(parent, token, flat[place]))
        elif rank < beams:
            output = outputs[parent].tolist()
            if Progress.of(constraints, output).done:
                sentence.add(output[1:], token, float(flat[place]), length)
        if len(chosen) == beams:
            break
    chosen = _by_banks(constraints, outputs, values, chosen)
    sentence.check_done(float(flat[order[0]]), length)
    return chosen


def _by_banks(constraints: Sequence[Constraint], outputs: Ints, values: Floats, chosen: list[_Row]) -> list[_Row]:
    """The K rows to go on with: of the best ones and of those that make progress, in turns from every bank."""
    seen = [(*outputs[row.parent].tolist(), row.token) for row in chosen]
    states = [Progress.of(constraints, ids) for ids in seen]
    added: list[_Row] = []
    for number, output in enumerate(outputs.tolist()):
        state = Progress.of(constraints, output)
        for token in [] if state.done else state.following():
            after = state.with_token(token)
            if (ids := (*output, token)) not in seen:
                seen.append(ids)
                states.append(after)
                added.append(_Row(number, token, values[number, token]))
    if not added:
        return chosen
    candidates = [*chosen, *added]
    banks = np.array([state.bank for state in states])
    worth = (banks * BANK).astype(np.float32) + np.array([row.value for row in candidates], np.float32)
    order = np.argsort(-worth, kind="stable")
    places, rank, before = [], -1, banks[order[0]]
    for bank in banks[order].tolist():
        rank = rank + 1 if bank == before else 0
        before = bank
        places.append(rank)
    turns = order[np.argsort(places, kind="stable")][: len(chosen)]
    return [candidates[i] for i in turns.tolist()]


def _finish(sentence: _Sentence, outputs: Ints, sums: Any) -> None:
    """Take the live rows as unfinished outputs; those without all that was asked only where there are too few."""
    if sentence.done:
        return
    length = outputs.shape[1] - 1
    complete = [Progress.of(sentence.asked.constraints, output).done for output in outputs.tolist()]
    for wanted in (True, False):
        if not wanted and sum(complete) >= sentence.options.n_best:
            return
        for output, is_complete, value in zip(outputs.tolist(), complete, sums.tolist(), strict=True):
            if is_complete == wanted:
                sentence.add(output[1:], None, value, length)
