"""The decoding loop: encode, then step, search and reorder until every sentence has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from itertools import accumulate

import numpy as np

from ..base.errors import ConfigError, DataError, LimitError
from ..engines.base import (
    Batch,
    Engine,
    Hypothesis,
    Ints,
    Outlook,
    Request,
    Running,
    Scores,
    State,
    own_batches,
    own_search,
)
from .checks import check_search
from .options import DecodeOptions
from .rules import Trie
from .search import Beam, Greedy, Reorder, Sampling, Search, Step


def decode(
    engine: Engine,
    batch: Batch,
    options: DecodeOptions,
    allowed: Trie | None = None,
    on_step: Callable[[Step], None] | None = None,
    strict: bool = True,
) -> list[list[Hypothesis]]:
    """The outputs of each source, best first, or its samples. `docs/decoding.md` has the rules.

    Uses the engine's own search where it has one, which gives the same, unless `on_step` is given.

    Raises DataError for a batch of wrong types or counts, LimitError for what the engine or its graphs cannot do,
    NotNumbers for NaN or infinite log-probabilities (without `strict` those are never chosen), and EngineError for
    tokens that do not exist.
    """
    if own := None if on_step else own_search(engine):
        check_search(engine, batch, options, allowed)
        return own.search(batch, options, allowed, strict)
    running = ContinuousBatch(engine, strict)
    search = running.join(batch, options, allowed, on_step)
    while running.searches:
        running.step()
    return search.outputs()


def make_search(
    engine: Engine,
    batch: Batch,
    options: DecodeOptions,
    allowed: Trie | None = None,
    on_step: Callable[[Step], None] | None = None,
) -> Search:
    """The search that the options name. Raises LimitError for what the engine or the model cannot do, and DataError."""
    check_search(engine, batch, options, allowed)
    kind = Sampling if options.sampling else Greedy if options.greedy else Beam
    return kind(engine, batch, options, allowed, on_step)


def continuous(engine: Engine) -> Running:
    """Continuous batching by the engine's own runtime where it has it, which gives the same, else by ours."""
    own = own_batches(engine)
    return own.continuous() if own else ContinuousBatch(engine)


def each_token(on_token: Callable[[int], None]) -> Callable[[Step], None]:
    """What calls a function with the token of each step of one sentence and one row."""

    def on_step(step: Step) -> None:
        if (token := int(step.tokens[0, 0])) >= 0 and step.values[0, 0] > -np.inf:
            on_token(token)

    return on_step


class ContinuousBatch:
    """Continuous batching: searches that share an engine's steps, and join while others are running."""

    def __init__(self, engine: Engine, strict: bool = True) -> None:
        """`strict`: as in `decode`."""
        self.engine, self.strict = engine, strict
        self.searches: list[Search] = []
        """The running ones, in the order in which they joined."""
        self._state: State = None
        self._width = 1
        """Rows of a sentence in the next step."""
        self._stepping = False

    @property
    def sentences(self) -> int:
        """How many are running."""
        return sum(len(search.sentences) for search in self.searches)

    def join(
        self,
        batch: Batch,
        options: DecodeOptions,
        allowed: Trie | None = None,
        on_step: Callable[[Step], None] | None = None,
    ) -> Search:
        """Add a batch, which begins with the next step.

        Raises LimitError or DataError for what this batch cannot have, and where the engine cannot admit it beside
        others; those go on. Any other error of the engine ends them too, as in `step`.
        """
        search = make_search(self.engine, batch, options, allowed, on_step)
        self._begin([search], [batch])
        return search

    def add(self, requests: Sequence[Request]) -> list[Search]:
        """Add several batches in one call of the encoder; `allowed` of each is a Trie. Raises as `join`."""
        made = [_search_of(self.engine, request) for request in requests]
        self._begin(made, [request.batch for request in requests])
        return made

    def _begin(self, searches: Sequence[Search], batches: Sequence[Batch]) -> None:
        if self._stepping:
            raise ConfigError("a batch joins between steps: not in on_step")
        src_ids, src_lengths = _sources(batches, self.engine.config.pad_id)
        outlook = reduce(Outlook.beside, (search.outlook() for search in searches))
        try:
            if self.searches:
                others, required = (search.outlook() for search in self.searches), outlook.required
                outlook = replace(reduce(Outlook.beside, others, outlook), required=required)
                self.engine.admit(self._state, src_ids, src_lengths, outlook)
            else:
                self._state = self.engine.encode(src_ids, src_lengths, outlook)
                self._width = 1
        except (LimitError, DataError):
            raise
        except BaseException as error:
            self.fail(error)
            raise
        self.searches.extend(searches)

    def remove(self, search: Search) -> None:
        """Stop a running search; the others go on. One that does not run is left as it is.

        Raises the engine's errors, which end all, as in `step`.
        """
        if self._stepping:
            raise ConfigError("a search is removed between steps: not in on_step")
        if search not in self.searches:
            return
        owners = [each for each in self.searches for _ in each.sentences]
        going = np.array([owner is not search for owner in owners])
        self.searches.remove(search)
        if not self.searches:
            self._state = None
            return
        sentences = np.flatnonzero(going).astype(np.int32)
        width = max(each.tokens.shape[1] for each in self.searches)
        rows = sentences[:, None] * self._width + np.arange(width)
        self._width = width
        try:
            self.engine.reorder(self._state, rows.astype(np.int32), sentences)
        except BaseException as error:
            self.fail(error)
            raise

    def step(self) -> None:
        """Decode the next token of every sentence.

        A search that fails, by NaN or infinite log-probabilities or in its `on_step`, ends alone: its `outputs` raises
        the error. Raises the engine's errors, which end all running searches; new ones may join.
        """
        if self._stepping:
            raise ConfigError("a step is on its way: not in on_step")
        self._stepping = True
        try:
            if len(self.searches) == 1 and self.searches[0].tokens.shape[1] == self._width:
                self._step_alone(self.searches[0])
            elif self.searches:
                self._step_together()
            if not self.searches:
                self._state = None  # its memory is free before the next batch joins
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self._stepping = False

    def fail(self, error: BaseException) -> None:
        """Stop all running searches."""
        for search in self.searches:
            if len(search.sentences):
                search.fail(error)
        self.searches, self._state = [], None

    def _take(self, search: Search, scores: Scores) -> Reorder:
        try:
            return search.take(scores, self.strict)
        except Exception as error:
            return search.fail(error)

    def _step_alone(self, search: Search) -> None:
        full = search.needs_all(self._state)
        scores = self.engine.step(search.tokens, self._state, full, search.options.attention)
        reorder = self._take(search, scores)
        self._width = search.tokens.shape[1]
        if not len(search.sentences):
            self.searches = []
        elif reorder.moved:
            self.engine.reorder(self._state, reorder.parents, reorder.sentences if reorder.ended else None)

    def _step_together(self) -> None:
        searches, width = self.searches, self._width
        shapes = [search.tokens.shape for search in searches]
        begins = [0, *accumulate(count for count, _ in shapes)]
        fulls = [search.needs_all(self._state) for search in searches]
        tokens = [_widened(search.tokens, width) for search in searches]
        attention = any(search.options.attention for search in searches)
        scores = self.engine.step(np.concatenate(tokens), self._state, any(fulls), attention)
        reorders = [
            self._take(search, _part(scores, slice(begin, begin + count), rows, full))
            for search, begin, (count, rows), full in zip(searches, begins, shapes, fulls, strict=False)
        ]
        self.searches = [search for search in searches if len(search.sentences)]
        self._width = max((search.tokens.shape[1] for search in self.searches), default=1)
        ended = any(reorder.ended for reorder in reorders)
        if self.searches and (ended or self._width != width or any(reorder.moved for reorder in reorders)):
            parents, sentences = [], []
            for own, begin, (_, rows) in zip(reorders, begins, shapes, strict=False):
                parents.append(_widened((begin + own.parents // rows) * width + own.parents % rows, self._width))
                sentences.append(begin + own.sentences)
            every = np.concatenate(parents).astype(np.int32)
            self.engine.reorder(self._state, every, np.concatenate(sentences).astype(np.int32) if ended else None)


def _search_of(engine: Engine, asked: Request) -> Search:
    assert isinstance(asked.options, DecodeOptions)
    assert asked.allowed is None or isinstance(asked.allowed, Trie)
    on_step = each_token(asked.on_token) if asked.on_token else None
    return make_search(engine, asked.batch, asked.options, asked.allowed, on_step)


def _sources(batches: Sequence[Batch], pad_id: int) -> tuple[Ints, Ints]:
    """The sources of several batches as those of one: ids (B, S) and lengths (B)."""
    longest = max(batch.src_ids.shape[1] for batch in batches)
    ids = [
        np.pad(batch.src_ids, ((0, 0), (0, longest - batch.src_ids.shape[1])), constant_values=pad_id)
        for batch in batches
    ]
    return np.concatenate(ids), np.concatenate([batch.src_lengths for batch in batches])


def _widened(rows: Ints, width: int) -> Ints:
    """(B, K) with its last column repeated."""
    return rows if rows.shape[1] == width else rows[:, np.minimum(np.arange(width), rows.shape[1] - 1)]


def _part(scores: Scores, sentences: slice, rows: int, full: bool) -> Scores:
    """The scores of some sentences' first rows."""
    log_probs, attention = (
        None if array is None else array[sentences, :rows]
        for array in (scores.log_probs if full else None, scores.attention)
    )
    return Scores(scores.ids[sentences, :rows], scores.scores[sentences, :rows], log_probs, attention)
