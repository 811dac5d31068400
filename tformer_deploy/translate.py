"""Requests to batches and back: encode text, sort by length, decode, restore the order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

from .data import pad
from .decoding import DecodeOptions, Hypothesis, greedy
from .engines.base import Engine
from .errors import LimitError, TformerError
from .text import Tokenizers


@dataclass(frozen=True)
class Result:
    """What became of one request."""

    text: str
    ids: list[int]
    """Target tokens without bos and eos."""
    score: float
    """Sum of the tokens' log-probabilities, eos included."""
    finished: bool = True
    """Ended by itself; False where a limit cut the output off."""


class Translator:
    """A model that is ready to translate. Leave it (`with`, or `close`) to free its device."""

    def __init__(
        self,
        engine: Engine,
        tokenizers: Tokenizers,
        options: DecodeOptions | None = None,
        batch_tokens: int = 2048,
    ) -> None:
        self.engine, self.tokenizers, self.options = engine, tokenizers, options or DecodeOptions()
        self.batch_tokens = batch_tokens
        """Padded source tokens of a batch."""

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

    def translate(
        self, lines: Sequence[str], progress: Callable[[int], None] | None = None, first_line: int = 1
    ) -> list[Result]:
        """Translate each line; an empty one gives an empty one. `progress` gets the number of lines just done.

        Raises LimitError, which names the line counted from `first_line`, for a source longer than the model or
        recipe allows.
        """
        texts = [line.strip() for line in lines]
        requests = [self.tokenizers.source_ids(text) if text else [] for text in texts]
        found = self._decode(requests, progress, first_line)
        return [self._result(hypothesis) for hypothesis in found]

    def generate(self, sources: Sequence[Sequence[int]]) -> list[Result]:
        """Like `translate`, for sources given as the ids that the encoder sees (eos included).

        Raises LimitError, which names the source counted from 1, for one that is too long or has an unknown id.
        """
        return [self._result(hypothesis) for hypothesis in self._decode([list(ids) for ids in sources], None, 1)]

    def _decode(
        self, requests: list[list[int]], progress: Callable[[int], None] | None, first_line: int
    ) -> list[Hypothesis]:
        if not self._open:
            raise TformerError("the translator is closed: open it again with load()")
        limit, vocab = self.engine.limits.src_tokens, self.engine.config.src_vocab
        for number, ids in enumerate(requests, first_line):
            if len(ids) > limit:
                raise LimitError(
                    f"line {number}: a source of {len(ids)} tokens exceeds the limit of {limit}: split the line, "
                    f"or export a model with a larger src_len axis and max_positions"
                )
            if bad := next((i for i in ids if not 0 <= i < vocab), None):
                raise LimitError(f"source {number}: token id {bad} is outside the source vocabulary of {vocab}")
        found = [Hypothesis(finished=True) for _ in requests]
        for indices in length_batches([len(ids) for ids in requests], self.batch_tokens, self.engine.limits.batch):
            lengths = np.array([len(requests[i]) for i in indices], np.int32)
            src_ids = pad([np.array(requests[i], np.int32) for i in indices], self.engine.config.pad_id)
            for i, hypothesis in zip(indices, greedy(self.engine, src_ids, lengths, self.options), strict=True):
                found[i] = hypothesis
            if progress:
                progress(len(indices))
        return found

    def _result(self, hypothesis: Hypothesis) -> Result:
        text = self.tokenizers.target_text(hypothesis.ids)
        return Result(text, hypothesis.ids, hypothesis.score, hypothesis.finished)


def length_batches(lengths: Sequence[int], batch_tokens: int, max_batch: int) -> Iterator[list[int]]:
    """Indices of requests of similar length, longest first; empty requests are left out."""
    order = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i])
    start = 0
    while start < len(order):
        rows = max(1, min(max_batch, batch_tokens // lengths[order[start]]))
        yield order[start : start + rows]
        start += rows
