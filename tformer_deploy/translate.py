"""Requests to batches and back: encode text, sort by length, decode, restore the order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import chain
from types import TracebackType
from typing import Self, TypeVar

import numpy as np

from .data import pad
from .decoding import Batch, DecodeOptions, Hypothesis, Step, Trie, decode, score
from .engines.base import Engine
from .errors import ConfigError, LimitError, NotNumbers, TformerError
from .text import Tokenizers

Item = TypeVar("Item")
Out = TypeVar("Out")


@dataclass(frozen=True)
class Result:
    """What became of one request."""

    text: str
    ids: list[int]
    """Target tokens without bos and end token."""
    score: float
    """Sum of the tokens' log-probabilities, end token included."""
    finished: bool = True
    """Ended by itself; False where a limit cut the output off."""
    alignment: list[int] = field(default_factory=list)
    """The source token, from 0, that each of ids looks at most; only with `align`."""
    alternatives: list[Result] = field(default_factory=list)
    """The other outputs of the n best, or the other samples."""


class Translator:
    """A model that is ready to translate. Leave it (`with`, or `close`) to free its device."""

    def __init__(
        self,
        engine: Engine,
        tokenizers: Tokenizers,
        options: DecodeOptions | None = None,
        batch_tokens: int = 4096,
        allowed: Sequence[str] = (),
        workers: int = 1,
    ) -> None:
        self.engine, self.tokenizers, self.options = engine, tokenizers, options or DecodeOptions()
        self.batch_tokens = batch_tokens
        """Padded source tokens of a batch, counted once for every beam or sample."""
        self.workers = workers
        """Batches that are decoded at a time, each in a thread of its own, on the one engine."""
        self.allowed = Trie(tokenizers.target.encode(text) for text in allowed) if allowed else None
        """The only outputs that may be produced, if any are given."""
        self._open = False

    def open(self) -> Self:
        """Take the engine's device."""
        if not self._open:
            self.engine.__enter__()
            self._open = True
        return self

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        if self._open:
            self._open = False
            self.engine.__exit__(kind, error, trace)

    def close(self) -> None:
        """Free the engine's device."""
        self.__exit__()

    def translate(self, lines: Iterable[str], prefixes: Sequence[str] = ()) -> list[Result]:
        """Translate each line; an empty one gives an empty one. `prefixes`: how each output begins, if given.

        Raises LimitError, which names the line, for a source longer than the model or recipe allows, and NotNumbers
        where log-probabilities are not numbers.
        """
        requests, begins = self._requests(lines, prefixes)
        self._check(requests, 0)
        return list(self._in_order(requests, begins, 0))

    def results(self, lines: Iterable[str], prefixes: Sequence[str] = (), first: int = 0) -> Iterator[Result]:
        """Like `translate`, each result as soon as it and all before it are known. Lines count from `first`.

        A line that is too long raises LimitError after the results of all before it, one whose log-probabilities are
        not numbers NotNumbers.
        """
        return self._in_order(*self._requests(lines, prefixes), first)

    def generate(self, sources: Sequence[Sequence[int]]) -> list[Result]:
        """Like `translate`, for sources given as the ids that the encoder sees (eos included)."""
        requests = [list(ids) for ids in sources]
        self._check(requests, 0)
        return list(self._in_order(requests, [], 0))

    def stream(self, line: str, write: Callable[[str], None], prefix: str = "", number: int = 0) -> Result:
        """Translate one line; `write` gets the text piece by piece as it becomes certain. Lines count from 0."""
        if self.options.rows > 1 or not (self.options.greedy or self.options.sampling):
            raise ConfigError("streaming shows one output as it grows: use beams=1, n_best=1, no stop and no patience")
        end_ids = self.options.ends(self.engine.config.eos_id)
        ids: list[int] = []
        written = ""

        def show(text: str) -> None:
            nonlocal written
            if len(text) > len(written):
                write(text[len(written) :])
                written = text

        def on_step(step: Step) -> None:
            token = int(step.tokens[0, 0])
            if token >= 0 and step.values[0, 0] > -np.inf and token not in end_ids:
                ids.append(token)
                text = self.tokenizers.target_text(ids)
                if not text.endswith("\ufffd"):  # half of a character of several bytes
                    show(text)

        request = self.tokenizers.source_ids(line.strip()) if line.strip() else []
        result = next(self._in_order([request], [self.tokenizers.target.encode(prefix)], number, on_step))
        show(result.text)
        return result

    def score(self, sources: Sequence[str], targets: Sequence[str], first: int = 0) -> list[list[float]]:
        """The log-probability of every token of each target, eos included, given its source.

        Lines count from `first`. Raises LimitError, which names the line, for a text that is too long.
        """
        if len(sources) != len(targets):
            raise ConfigError(f"{len(sources)} sources, {len(targets)} targets: give one a line")
        pairs = [
            (self.tokenizers.source_ids(source.strip()), self.tokenizers.target_ids(target.strip()))
            for source, target in zip(sources, targets, strict=True)
        ]
        found: list[list[float]] = [[] for _ in pairs]
        self._check([source for source, _ in pairs], first)
        limits = self.engine.limits
        limit = limits.tgt_tokens
        for number, (_, target) in enumerate(pairs, first + 1):
            if len(target) > limit:
                raise LimitError(
                    f"line {number}: a target of {len(target)} tokens exceeds the limit of {limit}: split the line"
                    + (f", or {limits.hint}" if limits.hint else "")
                )
        sizes = [max(len(source), len(target)) for source, target in pairs]
        for indices in length_batches(sizes, self.batch_tokens, lambda size: limits.sentences(1, size, size)):
            numbers = [first + i for i in indices]
            batch = make_batch([pairs[i][0] for i in indices], self.engine.config.pad_id, numbers)
            for i, values in zip(indices, score(self.engine, batch, [pairs[i][1] for i in indices]), strict=True):
                found[i] = values.tolist()
        return found

    def _requests(self, lines: Iterable[str], prefixes: Sequence[str]) -> tuple[list[list[int]], list[list[int]]]:
        """Ids of the sources and of the prefixes."""
        requests = [self.tokenizers.source_ids(text) if (text := line.strip()) else [] for line in lines]
        if prefixes and len(prefixes) != len(requests):
            raise ConfigError(f"{len(requests)} sources, {len(prefixes)} prefixes: give one a line, empty for none")
        return requests, [self.tokenizers.target.encode(text) for text in prefixes]

    def _in_order(
        self,
        requests: list[list[int]],
        prefixes: list[list[int]],
        first: int,
        on_step: Callable[[Step], None] | None = None,
    ) -> Iterator[Result]:
        """Results of all requests before the first bad one; then its error, if there is one."""
        good, error = self._good(requests, first)
        requests = requests[:good]
        known: dict[int, Result | NotNumbers] = {i: Result("", [], 0.0) for i, ids in enumerate(requests) if not ids}
        sent = 0
        budget = self.batch_tokens // self.options.rows
        share = max(1, -(-len(requests) // self.workers))
        limits, rows = self.engine.limits, self.options.rows
        tokens = min(self.options.max_tokens, limits.tgt_tokens)

        def run(indices: list[int]) -> dict[int, Result | NotNumbers]:
            failed: dict[int, Result | NotNumbers] = {}
            while indices:
                batch = make_batch(
                    [requests[i] for i in indices],
                    self.engine.config.pad_id,
                    [first + i for i in indices],
                    [prefixes[i] for i in indices] if prefixes else (),
                )
                try:
                    found = decode(self.engine, batch, self.options, self.allowed, on_step)
                    return {**failed, **dict(zip(indices, map(self._result, found), strict=True))}
                except NotNumbers as error:
                    bad = error.request - first
                    failed[bad] = error
                    indices = [i for i in indices if i < bad]  # nobody gets to see those behind it
            return failed

        batches = length_batches(
            [len(ids) for ids in requests], budget, lambda longest: min(limits.sentences(rows, longest, tokens), share)
        )
        for results in chain([{}], side_by_side(run, batches, self.workers)):
            known.update(results)
            while sent in known:
                result = known.pop(sent)
                if isinstance(result, NotNumbers):
                    raise result
                yield result
                sent += 1
        if error:
            raise error

    def _check(self, requests: list[list[int]], first: int) -> None:
        _, error = self._good(requests, first)
        if error:
            raise error

    def _good(self, requests: list[list[int]], first: int) -> tuple[int, LimitError | None]:
        """How many requests there are before the first bad one, and what is wrong with that."""
        if not self._open:
            raise TformerError("the translator is closed: open it again with load()")
        limit, vocab = self.engine.limits.src_tokens, self.engine.config.src_vocab
        for good, ids in enumerate(requests):
            number = first + good + 1
            if len(ids) > limit:
                return good, LimitError(
                    f"line {number}: a source of {len(ids)} tokens exceeds the limit of {limit}: split the line, "
                    f"or {self.engine.limits.hint or 'export a model with a larger src_len axis and max_positions'}"
                )
            if bad := next((i for i in ids if not 0 <= i < vocab), None):
                return good, LimitError(f"source {number}: token id {bad} is outside the source vocabulary of {vocab}")
        return len(requests), None

    def _result(self, hypotheses: list[Hypothesis]) -> Result:
        best, *others = [
            Result(self.tokenizers.target_text(h.ids), h.ids, h.score, h.finished, h.alignment) for h in hypotheses
        ]
        best.alternatives.extend(others)
        return best


def side_by_side(call: Callable[[Item], Out], items: Iterable[Item], workers: int) -> Iterator[Out]:
    """The results of `call` for each item, in the order in which they are ready, `workers` of them at a time."""
    if workers == 1:
        yield from map(call, items)
        return
    pool = ThreadPoolExecutor(workers)
    try:
        for future in as_completed([pool.submit(call, item) for item in items]):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def make_batch(
    sources: Sequence[Sequence[int]],
    pad_id: int,
    numbers: Sequence[int] = (),
    prefixes: Sequence[Sequence[int]] = (),
) -> Batch:
    """Sources to decode together, padded on the right."""
    lengths = np.array([len(source) for source in sources], np.int32)
    return Batch(pad([np.array(source, np.int32) for source in sources], pad_id), lengths, numbers, prefixes)


def length_batches(lengths: Sequence[int], batch_tokens: int, max_batch: Callable[[int], int]) -> Iterator[list[int]]:
    """Indices of requests of similar length, longest first; empty requests are left out.

    `max_batch`: most requests of a batch whose longest has so many tokens.
    """
    order = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i])
    start = 0
    while start < len(order):
        longest = lengths[order[start]]
        rows = max(1, min(max_batch(longest), batch_tokens // longest))
        yield order[start : start + rows]
        start += rows
