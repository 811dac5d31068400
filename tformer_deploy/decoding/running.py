"""The one loop: encode, then step, choose and reorder until every sentence has ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from itertools import accumulate

import numpy as np

from ..base.errors import ConfigError
from ..engines.base import Batch, Engine, Hypothesis, Ints, Scores, State, own_search
from .asked import make_search
from .options import DecodeOptions
from .rules import Trie
from .search import Search, Step


def decode(
    engine: Engine,
    batch: Batch,
    options: DecodeOptions,
    allowed: Trie | None = None,
    on_step: Callable[[Step], None] | None = None,
    strict: bool = True,
) -> list[list[Hypothesis]]:
    """The outputs of each source, best first, or its samples. `docs/decoding.md` has the rules.

    Raises LimitError where the options ask for what the engine or its graphs cannot do, NotNumbers for
    NaN or infinite log-probabilities (without `strict` those are never chosen), and EngineError for tokens that do
    not exist.

    A runtime's own search, which finds the same, takes the place of ours where it is faster. Only ours shows its steps.
    """
    own = None if on_step else own_search(engine)
    if own:
        return own.search(batch, asdict(options), allowed, strict)
    running = ContinuousBatch(engine, strict)
    search = running.join(batch, options, allowed, on_step)
    while running.searches:
        running.step()
    return search.outputs()


class ContinuousBatch:
    """Searches that share an engine's steps, each at a token of its own: others join while some are on their way."""

    def __init__(self, engine: Engine, strict: bool = True) -> None:
        """`strict`: as in `decode`."""
        self.engine, self.strict = engine, strict
        self.searches: list[Search] = []
        """Those that go on, in the order in which they joined; the others have their outputs."""
        self._state: State = None
        self._width = 1
        """Rows of a sentence in the next step."""
        self._stepping = False

    @property
    def sentences(self) -> int:
        """How many go on."""
        return sum(len(search.sentences) for search in self.searches)

    def join(
        self,
        batch: Batch,
        options: DecodeOptions,
        allowed: Trie | None = None,
        on_step: Callable[[Step], None] | None = None,
    ) -> Search:
        """Begin a batch with the next step.

        Raises TformerError for what this batch cannot have, also where an engine's running states take no others; those
        before it go on.
        """
        if self._stepping:
            raise ConfigError("a batch joins between steps: not in on_step")
        search = make_search(self.engine, batch, options, allowed, on_step)
        if self.searches:
            self.engine.admit(self._state, batch.src_ids, batch.src_lengths, search.outlook())
        else:
            self._state = self.engine.encode(batch.src_ids, batch.src_lengths, search.outlook())
            self._width = 1
        self.searches.append(search)
        return search

    def step(self) -> None:
        """The next token of every sentence.

        A search that fails, as by NaN or infinite log-probabilities or by its `on_step`, ends alone: its `outputs`
        raise the error. Raises what the engine does; then none can go on, and others may begin.
        """
        if self._stepping:
            raise ConfigError("a step is on its way: not in on_step")
        self._stepping = True
        try:
            if len(self.searches) == 1:
                self._step_alone(self.searches[0])
            elif self.searches:
                self._step_together()
        except BaseException as error:
            for search in self.searches:
                if len(search.sentences):
                    search.fail(error)
            self.searches, self._state = [], None
            raise
        finally:
            self._stepping = False

    def _take(self, search: Search, scores: Scores) -> None:
        try:
            search.take(scores, self.strict)
        except Exception as error:
            search.fail(error)

    def _step_alone(self, search: Search) -> None:
        full = search.needs_all(self._state)
        self._take(search, self.engine.step(search.tokens, self._state, full, search.options.attention))
        self._width = search.tokens.shape[1]
        if not len(search.sentences):
            self.searches = []
        elif search.rows_moved:
            self.engine.reorder(self._state, search.parents, search.kept if search.sentences_left else None)

    def _step_together(self) -> None:
        searches, width = self.searches, self._width
        shapes = [search.tokens.shape for search in searches]
        begins = [0, *accumulate(count for count, _ in shapes)]
        asks = [search.needs_all(self._state) for search in searches]
        tokens = [_widened(search.tokens, width) for search in searches]
        attention = any(search.options.attention for search in searches)
        scores = self.engine.step(np.concatenate(tokens), self._state, any(asks), attention)
        for search, begin, (count, rows), full in zip(searches, begins, shapes, asks, strict=False):
            self._take(search, _part(scores, slice(begin, begin + count), rows, full))
        self.searches = [search for search in searches if len(search.sentences)]
        self._width = max((search.tokens.shape[1] for search in self.searches), default=1)
        left = any(search.sentences_left for search in searches)
        if self.searches and (left or self._width != width or any(search.rows_moved for search in searches)):
            parents, kept = [], []
            for search, begin, (_, rows) in zip(searches, begins, shapes, strict=False):
                parents.append(_widened((begin + search.parents // rows) * width + search.parents % rows, self._width))
                kept.append(begin + search.kept)
            every = np.concatenate(parents).astype(np.int32)
            self.engine.reorder(self._state, every, np.concatenate(kept).astype(np.int32) if left else None)


def _widened(rows: Ints, width: int) -> Ints:
    """(B, K) with its last column repeated."""
    return rows if rows.shape[1] == width else rows[:, np.minimum(np.arange(width), rows.shape[1] - 1)]


def _part(scores: Scores, sentences: slice, rows: int, full: bool) -> Scores:
    """The scores of some sentences' first rows."""
    every, looked = (
        None if array is None else array[sentences, :rows]
        for array in (scores.log_probs if full else None, scores.attention)
    )
    return Scores(scores.ids[sentences, :rows], scores.scores[sentences, :rows], every, looked)
