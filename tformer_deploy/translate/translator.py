"""Requests to batches and back: encode text, sort by length, decode, restore the order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import chain
from operator import index
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from ..base.errors import ConfigError, DataError, LimitError, NotNumbers, TformerError
from ..base.lines import LINE_BYTES, check_line
from ..base.settings import check_whole
from ..bundle.text import Tokenizers
from ..decoding import (
    END_IS_FORCED,
    DecodeOptions,
    Hypothesis,
    Step,
    Trie,
    check_forced,
    check_options,
    decode,
    longest_outputs,
    over_defaults,
    score,
)
from ..engines import MOST_BATCH_TOKENS, most_parallel
from ..engines.base import Engine, Limits, own_search
from ..engines.opened import Opened
from ..model.config import BATCH_TOKENS, MAX_SEED
from .batches import length_batches, make_batch, side_by_side

Item = TypeVar("Item")
Refused = Callable[[int, TformerError], None]
"""Is told the number of a line, from 0, and what is wrong with it."""


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


@dataclass
class Requests:
    """Ids of all sources before the first bad one, how each output begins, and what is wrong with the bad one."""

    sources: list[list[int]] = field(default_factory=list)
    prefixes: list[list[int]] = field(default_factory=list)
    """Empty where none is given."""
    error: TformerError | None = None


class Translator:
    """A model that is ready to translate. Leave it (`with`, or `close`) to free its device.

    Any number of threads may call one translator at the same time. Each call gives what it gives alone; `workers` says
    how many batches of one call are decoded at a time.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizers: Tokenizers,
        options: DecodeOptions | None = None,
        batch_tokens: int = 0,
        allowed: Iterable[str] = (),
        workers: int = 1,
    ) -> None:
        check_whole("batch_tokens", batch_tokens, 0, MOST_BATCH_TOKENS)
        check_whole("workers", workers, 1, most_parallel())
        self.engine, self.tokenizers, self.options = engine, tokenizers, options or DecodeOptions()
        self.batch_tokens = batch_tokens
        """Padded source tokens of a batch, counted once for every beam or sample; 0: what suits the engine."""
        self.workers = workers
        """Batches that are decoded at a time, each in a thread of its own, on the one engine."""
        self.least_batches = 0
        """Into how many batches requests are split at least; 0: as many as there are workers."""
        self.max_line_bytes = LINE_BYTES
        """Longer lines are refused before they are split into tokens."""
        outputs = as_list("allowed", allowed)
        found = [self._wanted(text, f"allowed, line {number}") for number, text in enumerate(outputs, 1)]
        self.allowed = Trie(found) if found else None
        """The only outputs that may be produced, if any are given."""
        self.name = type(engine).__name__
        """What it translates with, for people."""
        self.asked: Mapping[str, Any] = {}
        """Decoding options that were asked for, over those of `defaults`."""
        self.defaults: Mapping[str, Any] = dataclasses.asdict(self.options)
        self._opened = Opened(engine)

    def __repr__(self) -> str:
        usual = vars(DecodeOptions())
        options = [f"{name}={value!r}" for name, value in vars(self.options).items() if value != usual[name]]
        return f"<Translator {', '.join([self.name, *options, 'open' if self._opened.open else 'closed'])}>"

    def open(self) -> Self:
        """Take the engine's device. Raises LimitError for options that were asked for and it cannot follow."""
        self._opened.enter()
        try:
            self._check(self.asked, self.options)
        except TformerError:
            self.close()
            raise
        return self

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        self._opened.close(kind, error, trace)

    def close(self) -> None:
        """Free the engine's device, at once or as soon as no other thread decodes a batch on it; none begins then."""
        self._opened.close()

    def asking(self, **decoding: Any) -> Translator:
        """The same open model with other decoding options, which hold over its own. Raises ConfigError, LimitError."""
        if not decoding:
            return self
        asked = {**self.asked, **decoding}
        options = over_defaults(self.defaults, asked)
        self._check(asked, options)
        other = copy(self)
        other.asked, other.options = asked, options
        return other

    def _check(self, asked: Mapping[str, Any], options: DecodeOptions) -> None:
        """Refuse what somebody asked for and no request can have; what is usual waits for one. Raises LimitError."""
        self._opened.limits().check_asked(asked)
        if asked:
            check_options(self.engine, options)

    def translate(self, lines: Iterable[str], prefixes: Iterable[str] = (), **decoding: Any) -> list[Result]:
        """Translate each line; an empty one gives an empty one. `prefixes`: how each output begins, if given.

        `decoding`: options for this call, such as `beams=4`, over those that the translator was opened with.
        Raises what names the line: LimitError for a source longer than the model or recipe allows, DataError for what
        is no text and for a prefix that the vocabulary lacks, NotNumbers where log-probabilities are not numbers.
        """
        asking = self.asking(**decoding)
        return asking._all(asking._requests(lines, prefixes, 0))

    def results(
        self,
        lines: Iterable[str],
        prefixes: Iterable[str] = (),
        first: int = 0,
        refused: Refused | None = None,
        **decoding: Any,
    ) -> Iterator[Result]:
        """Like `translate`, each result as soon as it and all before it are known. Lines count from `first`.

        What is wrong with a line is raised after the results of all before it; or it is told to `refused`, and the line
        counts as an empty one.
        """
        asking = self.asking(**decoding)
        return asking._in_order(asking._requests(lines, prefixes, first, refused), first, refused=refused)

    def generate(self, sources: Iterable[Sequence[int]], **decoding: Any) -> list[Result]:
        """Like `translate`, for sources given as the ids that the encoder sees (eos included)."""
        limits, numbered = self._opened.limits(), enumerate(as_list("sources", sources), 1)
        requests = [self._checked(whole_numbers(ids, number), number, limits) for number, ids in numbered]
        return self.asking(**decoding)._all(Requests(requests))

    def stream(
        self, line: str, write: Callable[[str], None], prefix: str = "", number: int = 0, **decoding: Any
    ) -> Result:
        """Translate one line; `write` gets the text piece by piece as it becomes certain. Lines count from 0."""
        if decoding:
            return self.asking(**decoding).stream(line, write, prefix, number)
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
                text = self.tokenizers.settled_text(ids)
                if not text.endswith("\ufffd"):  # half of a character of several bytes
                    show(text)

        result = next(self._in_order(self._requests([line], [prefix], number), number, on_step))
        show(result.text)
        return result

    def score(self, sources: Iterable[str], targets: Iterable[str], first: int = 0) -> list[list[float]]:
        """The log-probability of every token of each target, eos included, given its source.

        Lines count from `first`. Raises what names the line: LimitError for a text that is too long, DataError for
        what is no text.
        """
        limits = self._opened.limits()
        check_whole("first", first, 0, MAX_SEED)
        both = as_list("sources", sources), as_list("targets", targets)
        if len(both[0]) != len(both[1]):
            raise ConfigError(f"{len(both[0])} sources, {len(both[1])} targets: give one a line")
        pairs = [
            (self._source(source, number, limits), self._target(target, number, limits))
            for number, (source, target) in enumerate(zip(*both, strict=True), first + 1)
        ]
        found: list[list[float]] = [[] for _ in pairs]
        sizes = [max(len(source), len(target)) for source, target in pairs]
        for indices in length_batches(sizes, self._batch_tokens(), lambda size: limits.sentences(1, size, size)):
            numbers = [first + i for i in indices]
            batch = make_batch([pairs[i][0] for i in indices], self.engine.config.pad_id, numbers)
            with self._opened.in_use():
                scores = score(self.engine, batch, [pairs[i][1] for i in indices])
            for i, values in zip(indices, scores, strict=True):
                found[i] = values.tolist()
        return found

    def output_ids(self, text: str) -> list[int]:
        """What the decoder must produce for a text: first tokens, its ids, eos."""
        return [*self.options.first_ids, *self.tokenizers.target_ids(text)]

    def _requests(
        self, lines: Iterable[str], prefixes: Iterable[str], first: int, refused: Refused | None = None
    ) -> Requests:
        """What lines and prefixes ask for; nothing behind a bad line is split into tokens, unless it is `refused`."""
        limits, asked = self._opened.limits(), Requests()
        check_whole("first", first, 0, MAX_SEED)
        texts, begins = as_list("lines", lines), as_list("prefixes", prefixes)
        if begins and len(begins) != len(texts):
            raise ConfigError(f"{len(texts)} sources, {len(begins)} prefixes: give one a line, empty for none")
        for number, text in enumerate(texts, first + 1):
            try:
                begin = self._prefix(begins[number - first - 1], f"line {number}, prefix") if begins else []
                source = self._source(text, number, limits)
                source = source if text.strip() else []
                self._check_forced(begin, source, number, limits)
            except TformerError as error:
                if not refused:
                    asked.error = error
                    return asked
                refused(number - 1, error)
                begin, source = [], []
            asked.sources.append(source)
            if begins:
                asked.prefixes.append(begin)
        return asked

    def _prefix(self, text: str, where: str) -> list[int]:
        """Ids that an output must begin with. Raises DataError or LimitError, which name its line."""
        ids = self._wanted(text, where)
        if set(ids) & set(self.options.ends(self.engine.config.eos_id)):
            raise LimitError(f"{where}: {END_IS_FORCED}")
        return ids

    def _check_forced(self, begin: list[int], source: list[int], number: int, limits: Limits) -> None:
        """Raise LimitError, which names its line, where more is forced than the output may have."""
        if source and (forced := len(self.options.first_ids) + len(begin)):
            [longest] = longest_outputs(self.options, limits.tgt_tokens, np.array([len(source)])).tolist()
            check_forced(forced, longest, self.options, f"line {number}: ")

    def _source(self, text: str, number: int, limits: Limits) -> list[int]:
        """Ids of a source. Raises DataError or LimitError, which name its line."""
        check_line(text, f"line {number}", self.max_line_bytes, "max_line_bytes")
        return self._checked(self.tokenizers.source_ids(text.strip()), number, limits)

    def _target(self, text: str, number: int, limits: Limits) -> list[int]:
        """Ids of an output to score. Raises DataError or LimitError, which name its line."""
        check_line(text, f"line {number}", self.max_line_bytes, "max_line_bytes")
        ids = self.output_ids(text.strip())
        if len(ids) > limits.tgt_tokens:
            raise LimitError(
                f"line {number}: a target of {len(ids)} tokens exceeds the limit of {limits.tgt_tokens}: "
                f"split the line{f', or {limits.hint}' if limits.hint else ''}"
            )
        return ids

    def _wanted(self, text: str, where: str) -> list[int]:
        """Ids of what an output must have. Raises DataError for what the vocabulary lacks."""
        check_line(text, where, self.max_line_bytes, "max_line_bytes")
        encode, unk = self.tokenizers.target.encode, self.tokenizers.target.specials.unk
        ids = encode(text)
        if unk in ids:
            lacking = next((word for word in text.split() if unk in encode(word)), text)
            raise DataError(
                f"{where}: '{lacking:.40}' is not in the vocabulary, so that no output can have it: write it otherwise"
            )
        return ids

    def _checked(self, ids: list[int], number: int, limits: Limits) -> list[int]:
        """Ids that the model takes as a source. Raises LimitError for others."""
        limit, vocab = limits.src_tokens, self.engine.config.src_vocab
        if len(ids) > limit:
            raise LimitError(
                f"line {number}: a source of {len(ids)} tokens exceeds the limit of {limit}: split the line, "
                f"or {limits.hint or 'export a model with a larger src_len axis and max_positions'}"
            )
        if ids and not 0 <= min(ids) <= max(ids) < vocab:
            bad = next(i for i in ids if not 0 <= i < vocab)
            raise LimitError(f"source {number}: token id {bad} is outside the source vocabulary of {vocab}")
        return ids

    def _all(self, asked: Requests) -> list[Result]:
        """The results of all requests; none is decoded where one is bad."""
        if asked.error:
            raise asked.error
        return list(self._in_order(asked, 0))

    def _batch_tokens(self) -> int:
        """Of an engine that is open."""
        own = own_search(self.engine)
        return self.batch_tokens or (own.batch_tokens if own else BATCH_TOKENS)

    def _in_order(
        self,
        asked: Requests,
        first: int,
        on_step: Callable[[Step], None] | None = None,
        refused: Refused | None = None,
    ) -> Iterator[Result]:
        """Results of all requests before the first bad one; then its error, if there is one."""
        limits, requests, prefixes = self._opened.limits(), asked.sources, asked.prefixes
        known: dict[int, Result | NotNumbers] = {i: Result("", [], 0.0) for i, ids in enumerate(requests) if not ids}
        sent = 0
        budget = self._batch_tokens() // self.options.rows
        share = max(1, -(-len(requests) // (self.least_batches or self.workers)))
        rows, tokens = self.options.rows, min(self.options.max_tokens, limits.tgt_tokens)

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
                    with self._opened.in_use():
                        found = decode(self.engine, batch, self.options, self.allowed, on_step)
                    return {**failed, **dict(zip(indices, map(self._result, found), strict=True))}
                except NotNumbers as error:
                    bad = error.request - first
                    failed[bad] = error
                    # Unless it is refused, nobody gets to see those behind it.
                    indices = [i for i in indices if i < bad or (refused and i > bad)]
            return failed

        batches = length_batches(
            [len(ids) for ids in requests], budget, lambda longest: min(limits.sentences(rows, longest, tokens), share)
        )
        for results in chain([{}], side_by_side(run, batches, self.workers)):
            known.update(results)
            while sent in known:
                result = known.pop(sent)
                if isinstance(result, NotNumbers):
                    if not refused:
                        raise result
                    refused(first + sent, result)
                    result = Result("", [], 0.0)
                yield result
                sent += 1
        if asked.error:
            raise asked.error

    def _result(self, hypotheses: list[Hypothesis]) -> Result:
        best, *others = [
            Result(self.tokenizers.target_text(h.ids), h.ids, h.score, h.finished, h.alignment) for h in hypotheses
        ]
        best.alternatives.extend(others)
        return best


def as_list(name: str, values: Iterable[Item]) -> list[Item]:
    """Several values as a list. Raises DataError for one text, whose values would be its characters."""
    if isinstance(values, (str, bytes, bytearray)) or not isinstance(values, Iterable):
        raise DataError(f"{name}: a single {type(values).__name__}, not several: put it into a list, as in ['A dog.']")
    return list(values)


def whole_numbers(ids: Iterable[Any], number: int) -> list[int]:
    """Token ids as they are. Raises DataError for what is no list of whole numbers."""
    try:
        tokens = list(ids)
        if any(isinstance(token, bool) for token in tokens):
            raise TypeError
        return [index(token) for token in tokens]
    except TypeError:
        raise DataError(f"source {number}: {ids!r:.60} is no list of token ids: give whole numbers") from None
