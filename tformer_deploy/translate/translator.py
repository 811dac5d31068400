"""Requests to batches and back: encode text, sort by length, decode, restore the order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Self

from ..base.errors import ConfigError, NotNumbers
from ..base.settings import check_whole
from ..bundle.text import Tokenizers
from ..decoding import DecodeOptions, Decoding, Hypothesis, Step, Trie, check_options, decode, each_token, score
from ..engines import most_parallel
from ..engines.base import Engine, own_search
from ..engines.opened import Opened
from ..model.config import BATCH_TOKENS, MAX_SEED
from .batches import length_batches, make_batch, side_by_side
from .requests import Reader, Refused, Requests, as_list, known_ids, output_ids
from .settings import TranslatorSettings
from .streaming import TextStream


@dataclass(frozen=True)
class Result:
    """The translation of one line."""

    text: str
    ids: list[int]
    """Target tokens without bos and end token."""
    score: float
    """Sum of the tokens' log-probabilities, end token included."""
    finished: bool = True
    """Whether an end token ended it; False: a limit cut it off."""
    alignment: list[int] = field(default_factory=list)
    """The source position, from 0, with the most attention of each of ids; only with `align`."""
    alternatives: list[Result] = field(default_factory=list)
    """The other outputs of the n best, or the other samples."""


DEFAULTS = TranslatorSettings()


class Translator:
    """A model that is ready to translate. Close it, or use it in a `with` statement, to free its device.

    Safe for any number of threads; a call's results do not depend on other calls.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizers: Tokenizers,
        options: DecodeOptions | Decoding | None = None,
        settings: TranslatorSettings = DEFAULTS,
        name: str = "",
    ) -> None:
        """`name`: bundle and engine, for `repr`."""
        check_whole("workers", settings.workers, 1, most_parallel())
        if not isinstance(options, Decoding):
            options = options or DecodeOptions()
            options = Decoding(options, dataclasses.asdict(options))
        self.engine, self.tokenizers, self.decoding, self.options = engine, tokenizers, options, options.options
        self.settings, self.name = settings, name or type(engine).__name__
        outputs = [
            known_ids(tokenizers, text, f"allowed, line {number}", settings.max_line_bytes)
            for number, text in enumerate(settings.allowed, 1)
        ]
        self.allowed = Trie(outputs) if outputs else None
        """The only outputs that may be produced, if any are given."""
        self._opened = Opened(engine)

    def __repr__(self) -> str:
        usual = vars(DecodeOptions())
        options = [f"{name}={value!r}" for name, value in vars(self.options).items() if value != usual[name]]
        return f"<Translator {', '.join([self.name, *options, 'open' if self._opened.open else 'closed'])}>"

    def open(self) -> Self:
        """Take the engine's device. Raises LimitError for options that the user set and the engine cannot follow."""
        self._opened.enter()
        try:
            self._check(self.decoding)
        except BaseException:
            self.close()
            raise
        return self

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *why: object) -> None:
        self._opened.close(*why)

    def close(self) -> None:
        """Free the engine's device once no other thread decodes a batch on it; no further batch begins."""
        self._opened.close()

    def asking(self, **decoding: Any) -> Translator:
        """A translator over the same engine, with other values for some decoding options.

        Raises ConfigError, LimitError.
        """
        if not decoding:
            return self
        changed = self.decoding.changed(decoding)
        self._check(changed)
        other = copy(self)
        other.decoding, other.options = changed, changed.options
        return other

    def _check(self, decoding: Decoding) -> None:
        """Raise LimitError for options that the user set and no request can have; defaults are checked by request."""
        self._opened.limits().check_asked(decoding.asked)
        if decoding.asked:
            check_options(self.engine, decoding.options)

    def translate(self, lines: Iterable[str], prefixes: Iterable[str] = (), **decoding: Any) -> list[Result]:
        """Translate each line; an empty line gives an empty one. `prefixes`: how each output begins, if given.

        `decoding`: options for this call, such as `beams=4`, over those that the translator was opened with.
        Raises errors that name the line: LimitError for a source longer than the model or recipe allows, DataError for
        a line that is not text or a prefix with unknown words, NotNumbers for NaN or infinite log-probabilities.
        """
        asking = self.asking(**decoding)
        return asking._all(asking._reader().requests(lines, prefixes, 0))

    def results(
        self,
        lines: Iterable[str],
        prefixes: Iterable[str] = (),
        first: int = 0,
        refused: Refused | None = None,
        **decoding: Any,
    ) -> Iterator[Result]:
        """Like `translate`, but yields each result as soon as it and all before it are known.

        The error of a bad line is raised after the results of all lines before it. With `refused`, that is called with
        the error instead, and the line gives an empty result. Lines are numbered from `first`.
        """
        asking = self.asking(**decoding)
        requests = asking._reader().requests(lines, prefixes, first, refused)
        return asking._in_order(requests, first, refused=refused)

    def generate(self, sources: Iterable[Sequence[int]], **decoding: Any) -> list[Result]:
        """Like `translate`, for sources given as the token ids that the encoder reads (eos included)."""
        reader = self._reader()
        requests = [reader.checked(ids, number) for number, ids in enumerate(as_list("sources", sources), 1)]
        return self.asking(**decoding)._all(Requests(requests))

    def stream(
        self, line: str, write: Callable[[str], None], prefix: str = "", number: int = 0, **decoding: Any
    ) -> Result:
        """Translate one line, and call `write` with each further piece of text. Lines are numbered from 0."""
        if decoding:
            return self.asking(**decoding).stream(line, write, prefix, number)
        if not self.options.streamable:
            raise ConfigError("streaming shows one output as it grows: use beams=1, n_best=1, no stop and no patience")
        stream = TextStream(self.tokenizers, self.options.ends(self.engine.config.eos_id), write)
        requests = self._reader().requests([line], [prefix], number)
        result = next(self._in_order(requests, number, each_token(stream.on_token)))
        stream.finish(result.text)
        return result

    def score(self, sources: Iterable[str], targets: Iterable[str], first: int = 0) -> list[list[float]]:
        """The log-probability of every token of each target, eos included, given its source.

        Lines are numbered from `first`. Raises errors that name the line: LimitError for a text that is too long,
        DataError for a line that is not text.
        """
        reader, limits = self._reader(), self._opened.limits()
        check_whole("first", first, 0, MAX_SEED)
        pairs = reader.pairs(sources, targets, first)
        log_probs: list[list[float]] = [[] for _ in pairs]
        sizes = [max(len(source), len(target)) for source, target in pairs]
        for indices in length_batches(sizes, self._batch_tokens(), lambda size: limits.sentences(1, size, size)):
            numbers = [first + i for i in indices]
            batch = make_batch([pairs[i][0] for i in indices], self.engine.config.pad_id, numbers)
            with self._opened.in_use():
                scores = score(self.engine, batch, [pairs[i][1] for i in indices])
            for i, values in zip(indices, scores, strict=True):
                log_probs[i] = values.tolist()
        return log_probs

    def output_ids(self, text: str) -> list[int]:
        """The tokens that the decoder must produce for a text: `first_ids`, the text's ids, eos."""
        return output_ids(text, self.tokenizers, self.options)

    def read(self, lines: Iterable[str], prefixes: Iterable[str] = (), first: int = 0) -> Requests:
        """Token ids of lines and their prefixes. Raises the error of a bad one."""
        requests = self._reader().requests(lines, prefixes, first)
        if requests.error:
            raise requests.error
        return requests

    def in_use(self) -> AbstractContextManager[None]:
        """Keeps the engine's device while a block runs. Raises TformerError where the translator is closed."""
        return self._opened.in_use()

    def _reader(self) -> Reader:
        """For text that the open engine is to translate."""
        limits = self._opened.limits()
        return Reader(self.tokenizers, self.engine.config, limits, self.settings.max_line_bytes, self.options)

    def _all(self, asked: Requests) -> list[Result]:
        """The results of all requests. Raises the error of a bad one before any is decoded."""
        if asked.error:
            raise asked.error
        return list(self._in_order(asked, 0))

    def _batch_tokens(self) -> int:
        """Padded source tokens of a batch; the engine must be open."""
        own = own_search(self.engine)
        return self.settings.batch_tokens or (own.batch_tokens if own else BATCH_TOKENS)

    def _in_order(
        self,
        asked: Requests,
        first: int,
        on_step: Callable[[Step], None] | None = None,
        refused: Refused | None = None,
    ) -> Iterator[Result]:
        """The results of all requests before the first bad one; then raises its error, if there is one."""
        limits, sources, prefixes = self._opened.limits(), asked.sources, asked.prefixes
        known: dict[int, Result | NotNumbers] = {i: Result("", [], 0.0) for i, ids in enumerate(sources) if not ids}
        yielded = 0
        budget = self._batch_tokens() // self.options.rows
        share = max(1, -(-len(sources) // (self.settings.least_batches or self.settings.workers)))
        rows, tokens = self.options.rows, min(self.options.max_tokens, limits.tgt_tokens)

        def run(indices: list[int]) -> dict[int, Result | NotNumbers]:
            failed: dict[int, Result | NotNumbers] = {}
            while indices:
                batch = make_batch(
                    [sources[i] for i in indices],
                    self.engine.config.pad_id,
                    [first + i for i in indices],
                    [prefixes[i] for i in indices] if prefixes else (),
                )
                try:
                    with self._opened.in_use():
                        outputs = decode(self.engine, batch, self.options, self.allowed, on_step)
                    return {**failed, **dict(zip(indices, map(self.result_of, outputs), strict=True))}
                except NotNumbers as error:
                    bad = error.request - first
                    failed[bad] = error
                    # Its error ends the results, unless there is `refused`: then those after it are decoded again.
                    indices = [i for i in indices if i < bad or (refused and i > bad)]
            return failed

        batches = length_batches(
            [len(ids) for ids in sources], budget, lambda longest: min(limits.sentences(rows, longest, tokens), share)
        )
        for results in chain([{}], side_by_side(run, batches, self.settings.workers)):
            known.update(results)
            while yielded in known:
                result = known.pop(yielded)
                if isinstance(result, NotNumbers):
                    if not refused:
                        raise result
                    refused(first + yielded, result)
                    result = Result("", [], 0.0)
                yield result
                yielded += 1
        if asked.error:
            raise asked.error

    def result_of(self, hypotheses: list[Hypothesis]) -> Result:
        """The result of a line from its hypotheses, best first."""
        best, *others = [
            Result(self.tokenizers.target_text(h.ids), h.ids, h.score, h.finished, h.alignment) for h in hypotheses
        ]
        best.alternatives.extend(others)
        return best
