"""Greedy search, beam search and sampling: from the scores of a step to the rows of the next one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..base.errors import EngineError
from ..engines.base import Batch, Engine, Hypothesis, Ints, Outlook, Scores, State
from .options import DecodeOptions
from .rules import LEAST, Rules, Trie, are_among, best_tokens, require_numbers
from .sampling import Doubles, draw, uniforms

Number = TypeVar("Number", bound=np.generic)


@dataclass(frozen=True)
class Step:
    """The decision of one step. Greedy search and sampling: one token a row; a beam: its candidates, best first."""

    sentences: Ints
    """(B) Index in the batch of each sentence that had not ended before the step."""
    parents: Ints
    """(B, N) The row of its sentence that each token continues."""
    tokens: Ints
    """(B, N); -1: the row has ended."""
    values: Doubles
    """(B, N) Sum of log-probabilities after the rules, by which the search ranks; -inf: forbidden. For samples the same
    as `scores`."""
    scores: Doubles
    """(B, N) Sum of plain log-probabilities."""
    margins: Doubles | None = None
    """(B, N) Sampling: the draw stays the same as long as no two log-probabilities of its row, after the rules, change
    by amounts that differ by this or more."""
    samples: Ints | None = None
    """(B, N) Sampling: the number of each row's sample; -1: it has ended."""


@dataclass(frozen=True)
class Reorder:
    """How the rows of the next step follow from those of the last one, for `Engine.reorder`."""

    parents: Ints
    """(B', K') The row that each row continues, counted over all B*K rows of the last step."""
    sentences: Ints
    """(B') The sentences of the last step that go on."""
    ended: bool
    """Whether a sentence has ended."""
    moved: bool
    """Whether any row continues a row other than its own; False: the engine has nothing to do."""


class Search(ABC):
    """The live rows of all sentences that have not ended. Arrays are (B, K): a sentence has K rows side by side."""

    def __init__(
        self,
        engine: Engine,
        batch: Batch,
        options: DecodeOptions,
        allowed: Trie | None,
        on_step: Callable[[Step], None] | None,
    ) -> None:
        self.engine, self.options, self.on_step, self.numbers = engine, options, on_step, batch.numbers
        self.end_ids = np.array(options.ends(engine.config.eos_id), np.int32)
        self.rules = Rules(options, self.end_ids, engine.limits.tgt_tokens, batch.src_lengths, batch.prefixes, allowed)
        count = len(batch.src_lengths)
        self.sentences = np.arange(count, dtype=np.int32)
        """(B) Index in the batch."""
        self.hypotheses: list[list[Hypothesis]] = [[] for _ in range(count)]
        """Outputs that have ended, of every sentence of the batch."""
        self.tokens = np.full((count, 1), engine.config.start_id, np.int32)
        """(B, K) What the next step is fed."""
        self.values = np.zeros((count, 1))
        """(B, K) Sum after rules."""
        self.scores = self.values
        """(B, K) Sum of plain log-probabilities."""
        self.plain = options.plain
        """Whether both sums are the same."""
        self.written = np.empty((count, 1, 0), np.int32)
        """(B, K, t) Outputs so far."""
        self.attention = np.empty((count, 1, 0, batch.src_ids.shape[1] if options.attention else 0), np.float32)
        """(B, K, t, S) Attention of each token of an output."""
        self.src_lengths = batch.src_lengths
        self.error: BaseException | None = None
        """Why the search has stopped early."""

    @property
    def running(self) -> bool:
        """Whether a sentence has not ended."""
        return len(self.sentences) > 0

    @abstractmethod
    def _advance(self, scores: Scores) -> tuple[Step, Reorder]:
        """Choose the next rows by the scores of a step."""

    @abstractmethod
    def _results(self) -> list[list[Hypothesis]]:
        """The outputs of each sentence, best first, or its samples."""

    def outputs(self) -> list[list[Hypothesis]]:
        """The same. Raises the error that stopped the search, and EngineError for a token that does not exist."""
        if self.error:
            raise self.error
        outputs, vocab = self._results(), self.engine.config.tgt_vocab
        for hypothesis in chain.from_iterable(outputs):
            if hypothesis.ids and not 0 <= min(hypothesis.ids) <= max(hypothesis.ids) < vocab:
                raise EngineError(f"the engine gave a token outside the vocabulary of {vocab}: export the bundle again")
        return outputs

    def take(self, scores: Scores, strict: bool) -> Reorder:
        """Advance by the scores of a step. Raises NotNumbers, if `strict`."""
        if strict and not scores.scores[:, :, 0].min() > LEAST:
            require_numbers(scores, self.numbers, self.sentences, self._alive(), self.written.shape[2])
        step, reorder = self._advance(scores)
        if self.on_step:
            self.on_step(step)
        return reorder

    def fail(self, error: BaseException) -> Reorder:
        """Stop: no sentence goes on."""
        self.error, self.sentences = error, self.sentences[:0]
        self.tokens = np.empty((0, 1), np.int32)
        return Reorder(self.tokens, self.sentences, ended=True, moved=True)

    def outlook(self) -> Outlook:
        """What the engine should prepare for."""
        end_id = int(self.end_ids[0]) if len(self.end_ids) else -1
        tokens, named = int(self.rules.longest.max()), self.rules.named()
        return Outlook(self.options.rows, tokens, end_id, named, drawn=self.options.sampling)

    def needs_all(self, state: State) -> bool:
        """Whether the next step must return every log-probability."""
        step = self.written.shape[2]
        options = self.options
        # For sampling one more than may be drawn: a draw's margin is measured to it.
        wanted = options.top_k + 1 if options.sampling else 1 if options.greedy else options.beams + len(self.end_ids)
        wanted = min(wanted + self.rules.spare(step), self.engine.config.tgt_vocab)
        return self.rules.needs_all(step) or wanted > self.engine.best(self.tokens.shape[1], state)

    def _alive(self) -> NDArray[np.bool_]:
        """Which rows (B, K) of the next step have a hypothesis; the others are padding."""
        return self.values > -np.inf

    def _are_ends(self, tokens: Ints) -> NDArray[np.bool_]:
        """Which tokens end an output."""
        return are_among(tokens, self.end_ids)

    def _select_rows(self, chosen: Step, going: NDArray[np.bool_], feed: Ints) -> Reorder:
        """Make `chosen` (B, K) the live rows of the sentences that go on, and feed (B, K) their tokens."""
        sentences = np.flatnonzero(going).astype(np.int32)
        rows, width = chosen.parents[sentences], self.tokens.shape[1]
        where = sentences[:, None], rows
        self.written = np.concatenate((self.written[where], chosen.tokens[sentences][:, :, None]), 2)
        if self.options.attention:
            self.attention = self.attention[where]
        self.sentences = self.sentences[sentences]
        self.values, self.scores = chosen.values[sentences], chosen.scores[sentences]
        self.tokens = np.ascontiguousarray(feed[sentences])
        ended = len(sentences) < len(going)
        moved = ended or rows.shape[1] != width or bool((rows != np.arange(width)).any())
        return Reorder((sentences[:, None] * width + rows).astype(np.int32), sentences, ended, moved)

    def _add_attention(self, scores: Scores) -> None:
        """Append this step's attention."""
        if self.options.attention:
            assert scores.attention is not None
            latest = scores.attention[:, :, None, : self.attention.shape[3]]
            self.attention = np.concatenate((self.attention, latest), 2)

    def _finish(self, b: int, chosen: Step, n: int, ends: bool) -> Hypothesis:
        """The output of sentence b whose last token is candidate n, an end token or cut off by a limit."""
        token, row = int(chosen.tokens[b, n]), int(chosen.parents[b, n])
        ids = [*self.written[b, row].tolist(), *([] if ends else [token])]
        output = Hypothesis(ids, token if ends else None, float(chosen.scores[b, n]))
        return self._describe(output, b, row, float(chosen.values[b, n]))

    def _finish_stuck(self, b: int, row: int) -> Hypothesis:
        """The output of a row that no token may follow."""
        output = Hypothesis(self.written[b, row].tolist(), score=float(self.scores[b, row]))
        return self._describe(output, b, row, float(self.values[b, row]))

    def _describe(self, output: Hypothesis, b: int, row: int, value: float) -> Hypothesis:
        """Fill in the value by which an output is ranked, and its alignment."""
        options, length = self.options, len(output.ids) + output.finished
        output.value = value if options.sampling else value / length_norm(max(1, length), options)
        if options.attention:
            attention = self.attention[b, row, :length, : self.src_lengths[self.sentences[b]]]
            if options.coverage_penalty and not options.sampling:
                # A position without attention would give every output -inf.
                covered = np.clip(attention.sum(0, dtype=np.float64), 1e-10, 1)
                logs = np.cumsum([math.log(c) for c in covered.tolist()])  # unlike a sum, in order
                output.value += options.coverage_penalty * float(logs[-1])
            if options.align:
                output.alignment = attention[: len(output.ids)].argmax(1).tolist()
        return output


class Beam(Search):
    """The best K hypotheses of each sentence; greedy search is a beam of one."""

    def __init__(self, engine: Engine, batch: Batch, options: DecodeOptions, *others: Any) -> None:
        super().__init__(engine, batch, options, *others)
        self.ended = np.zeros(len(self.sentences), np.int64)
        """How many outputs have ended, of every sentence of the batch; `hypotheses` has the best of them."""
        self.soonest = int(self.rules.longest.min())
        """The shortest length at which a sentence is cut off."""
        self.may_stop = False
        """Whether a sentence has an output for every beam, so that the stop rule may end it at any step."""
        self.ranks = options.beams * (1 if options.greedy else 1 + len(self.end_ids))

    def _advance(self, scores: Scores) -> tuple[Step, Reorder]:
        """Rank the candidates, collect the outputs that end, keep the best others."""
        self._add_attention(scores)
        candidates = self._candidates(scores)
        beams, length = self.options.beams, self.written.shape[2] + 1
        if length < self.soonest and not self.may_stop:
            tokens, values = candidates.tokens[:, :beams], candidates.values[:, :beams]
            if values.min() > -np.inf and not self._are_ends(tokens).any():
                parents, sums = candidates.parents[:, :beams], candidates.scores[:, :beams]
                live = Step(self.sentences, parents, tokens, values, sums)
                return candidates, self._select_rows(live, np.ones(len(live.tokens), np.bool_), tokens)
        possible, ends = candidates.values > -np.inf, self._are_ends(candidates.tokens)
        last = self.rules.longest[self.sentences] <= length
        top = np.arange(ends.shape[1]) < beams
        for b, n in np.argwhere(possible & top & (ends | last[:, None])).tolist():
            self._collect(b, self._finish(b, candidates, n, bool(ends[b, n])))
        goes_on = possible & ~ends
        stuck = ~goes_on.any(1)
        for b in np.flatnonzero(stuck).tolist():
            if not self.hypotheses[self.sentences[b]]:
                for row in np.flatnonzero(self.values[b] > -np.inf).tolist():
                    self._collect(b, self._finish_stuck(b, row))
        going = ~(last | stuck | self._stopped(np.where(goes_on, candidates.values, -np.inf), length))
        order = _live_first(goes_on & going[:, None], beams)
        # A sentence with fewer hypotheses than another has rows of value -inf, which are fed any token.
        alive, tokens = _pick(goes_on, order), _pick(candidates.tokens, order)
        values = np.where(alive, _pick(candidates.values, order), -np.inf)
        sums = values if self.plain else _pick(candidates.scores, order)
        live = Step(self.sentences, _pick(candidates.parents, order), tokens, values, sums)
        return candidates, self._select_rows(live, going, np.where(alive, tokens, np.int32(self.engine.config.pad_id)))

    def _candidates(self, scores: Scores) -> Step:
        """The best continuations of each sentence; of equal values the lower row's, then in the order of the row."""
        if scores.log_probs is None:
            ids, plain = scores.ids, scores.scores
            ruled = self.rules.mask(ids, plain, self.sentences, self.written.shape[2])
        else:
            every = self.rules.apply(scores.log_probs, self.written, self.sentences)
            ids = best_tokens(every, min(self.ranks, every.shape[2]))
            ruled, plain = (np.take_along_axis(x, ids, 2) for x in (every, scores.log_probs))
        count, width = len(ids), ids.shape[2]
        values = (self.values[:, :, None] + ruled).reshape(count, -1)
        order = np.argsort(-values, axis=1, kind="stable")[:, : self.ranks]
        best = _pick(values, order)
        summed = best if self.plain else _pick((self.scores[:, :, None] + plain).reshape(count, -1), order)
        tokens = _pick(ids.reshape(count, -1), order)
        return Step(self.sentences, (order // width).astype(np.int32), tokens, best, summed)

    def _collect(self, b: int, output: Hypothesis) -> None:
        """Count an output, and keep it if it is among the best; of equal ones the earlier."""
        sentence = self.sentences[b]
        self.ended[sentence] += 1
        best = self.hypotheses[sentence]
        best.append(output)
        best.sort(key=lambda hypothesis: -hypothesis.value)
        del best[self.options.beams :]
        self.may_stop |= len(best) == self.options.beams

    def _stopped(self, live: Doubles, length: int) -> NDArray[np.bool_]:
        """Which sentences the stop rule ends, after a step that left live values (B, N) and outputs of `length`."""
        options = self.options
        if options.stop == "count":
            return self.ended[self.sentences] >= self.options.outputs_wanted
        lengths = np.full(len(live), length)
        if options.stop == "exact":
            # Sums only fall, so a hypothesis can become at most its present sum at the length with the best norm.
            lengths = self.rules.longest[self.sentences] if options.length_penalty > 0 else lengths + 1
        ended = [self.hypotheses[sentence] for sentence in self.sentences]
        worst = np.array([best[-1].value if len(best) == options.beams else -np.inf for best in ended])
        norms = np.array([length_norm(n, options) for n in lengths.tolist()])
        beaten: NDArray[np.bool_] = live.max(1) / norms <= worst
        return beaten & (worst > -np.inf)

    def _results(self) -> list[list[Hypothesis]]:
        """The n best of each sentence, best first."""
        return [best[: self.options.n_best] for best in self.hypotheses]


class Greedy(Beam):
    """A beam of one; a step at which nothing ends needs no ranking."""

    def _advance(self, scores: Scores) -> tuple[Step, Reorder]:
        """Take every row's best token."""
        length, width = self.written.shape[2] + 1, scores.ids.shape[2]
        if scores.log_probs is not None or length >= self.soonest or self.options.attention:
            return super()._advance(scores)
        ids, plain = scores.ids, scores.scores
        ruled = self.rules.mask(ids, plain, self.sentences, length - 1)
        if ruled is not plain and width > 1:
            best = ruled.argmax(2)[:, :, None]  # the first of several
            ids, ruled = np.take_along_axis(ids, best, 2), np.take_along_axis(ruled, best, 2)
        tokens, added = ids[:, :, 0], ruled[:, :, 0]
        if self._are_ends(tokens).any() or not added.min() > -np.inf:
            return super()._advance(scores)
        self.values = self.values + added
        # `added` is plain too: `mask` changes only what it forbids; rules that change other values need log_probs.
        self.scores = self.values if self.plain else self.scores + added
        self.written = np.concatenate((self.written, tokens[:, :, None]), 2)
        self.tokens = np.ascontiguousarray(tokens)
        same = np.arange(len(tokens), dtype=np.int32)
        step = Step(self.sentences, np.zeros_like(tokens), tokens, self.values, self.scores)
        return step, Reorder(same[:, None], same, ended=False, moved=False)


class Sampling(Search):
    """Independent samples, one a row."""

    def __init__(self, engine: Engine, batch: Batch, options: DecodeOptions, *others: Any) -> None:
        super().__init__(engine, batch, options, *others)
        self.seeds = np.array(batch.numbers if len(batch.numbers) else self.sentences, np.int64)
        self.hypotheses = [[Hypothesis() for _ in range(options.n_best)] for _ in self.sentences]
        self.samples = np.tile(np.arange(options.n_best, dtype=np.int32), (len(self.sentences), 1))
        """(B, K) Number of each row's sample; -1: the row is padding."""

    def _alive(self) -> NDArray[np.bool_]:
        """See `Search._alive`."""
        return self.samples[:, : self.tokens.shape[1]] >= 0

    def _advance(self, scores: Scores) -> tuple[Step, Reorder]:
        """Draw a token for every row."""
        self._add_attention(scores)
        samples, step = self.samples, self.written.shape[2]
        ids, plain = None, scores.log_probs
        if plain is None:
            ids, plain = scores.ids, scores.scores
            ruled = self.rules.mask(ids, plain, self.sentences, step)
        else:
            ruled = self.rules.apply(plain, self.written, self.sentences)
        # At the first step all samples continue the one row.
        parents = np.broadcast_to(np.arange(samples.shape[1], dtype=np.int32) % plain.shape[1], samples.shape)
        if plain.shape[1] < samples.shape[1]:
            ruled = np.repeat(ruled, samples.shape[1], 1)
            ids = None if ids is None else np.repeat(ids, samples.shape[1], 1)
        uniform = uniforms(self.options.seed, self.seeds[self.sentences], samples, step)
        tokens, margins = draw(ruled, uniform, self.options, self.on_step is not None, ids)
        for b, n in np.argwhere((tokens < 0) & (samples >= 0)).tolist():
            self.hypotheses[self.sentences[b]][samples[b, n]] = self._finish_stuck(b, int(parents[b, n]))
        tokens = np.where(samples < 0, np.int32(-1), tokens)
        places = np.maximum(tokens, 0) if ids is None else (ids == tokens[:, :, None]).argmax(2)
        drawn = plain[np.arange(len(tokens))[:, None], parents, places]
        summed = np.take_along_axis(self.scores, parents, 1) + np.where(tokens < 0, 0, drawn)
        margins = np.where(tokens < 0, np.inf, margins)
        chosen = Step(self.sentences, parents, tokens, summed, summed, margins, samples)
        ends, last = self._are_ends(tokens), (self.rules.longest[self.sentences] <= step + 1)[:, None]
        for b, n in np.argwhere((ends | last) & (tokens >= 0)).tolist():
            self.hypotheses[self.sentences[b]][samples[b, n]] = self._finish(b, chosen, n, bool(ends[b, n]))
        goes_on = (tokens >= 0) & ~ends & ~last
        going = np.asarray(goes_on.any(1))
        order = _live_first(goes_on, samples.shape[1])
        alive, tokens, summed = _pick(goes_on, order), _pick(tokens, order), _pick(summed, order)
        self.samples = np.where(alive, _pick(samples, order), np.int32(-1))[going]
        live = Step(self.sentences, _pick(parents, order), tokens, summed, summed)
        return chosen, self._select_rows(live, going, np.where(alive, tokens, np.int32(self.engine.config.pad_id)))

    def _results(self) -> list[list[Hypothesis]]:
        """The samples of each sentence, in their order."""
        return self.hypotheses


def length_norm(length: int, options: DecodeOptions) -> float:
    """The divisor of the sum of `length` tokens. Not numpy's power, which differs between processors."""
    base = float(length) if options.length_norm == "power" else (5 + length) / 6
    return float(base**options.length_penalty)


def _live_first(live: NDArray[np.bool_], most: int) -> NDArray[np.int64]:
    """Of each sentence (B, N), the indices of the first `most` live ones, then of others up to the longest row."""
    width = int(np.clip(live.sum(1).max(), 1, most))
    return np.argsort(~live, axis=1, kind="stable")[:, :width]


def _pick(array: NDArray[Number], order: NDArray[np.int64]) -> NDArray[Number]:
    """Elements of each sentence, (B, N)."""
    return array[np.arange(len(order))[:, None], order]
