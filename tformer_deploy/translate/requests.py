"""Text to token ids, checked against what a model takes. Errors name the line."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import index
from typing import Any, TypeVar

import numpy as np

from ..base.errors import ConfigError, DataError, LimitError, TformerError
from ..base.lines import check_line
from ..base.messages import EMPTY_SOURCE, END_IS_FORCED, LONGER_SOURCES
from ..base.settings import check_whole
from ..bundle.text import Tokenizers
from ..decoding import DecodeOptions, check_forced, longest_outputs
from ..engines.base import Limits
from ..model.config import MAX_SEED, ModelConfig

Item = TypeVar("Item")
Refused = Callable[[int, TformerError], None]
"""Called with the number of a bad line, from 0, and its error."""


@dataclass
class Requests:
    """Token ids of all sources before the first bad one, and the error of that one."""

    sources: list[list[int]] = field(default_factory=list)
    prefixes: list[list[int]] = field(default_factory=list)
    """How each output begins; empty where no prefix is given."""
    error: TformerError | None = None


@dataclass(frozen=True)
class SourceReader:
    """Tokenizes what the encoder reads."""

    tokenizers: Tokenizers
    config: ModelConfig
    limits: Limits
    max_line_bytes: int

    def source(self, text: str, number: int) -> list[int]:
        """Ids of a line."""
        check_line(text, f"line {number}", self.max_line_bytes)
        return self.checked(self.tokenizers.source_ids(text.strip()), number)

    def line(self, text: str, number: int) -> list[int]:
        """Ids of a line; none for an empty one."""
        ids = self.source(text, number)
        return ids if text.strip() else []

    def checked(self, ids: Iterable[Any], number: int) -> list[int]:
        """Ids as a source. Raises DataError for other values than whole numbers, LimitError for what is too long."""
        tokens = whole_numbers(ids, number)
        limit = self.limits.src_tokens
        if len(tokens) > limit:
            raise LimitError(
                f"line {number}: a source of {len(tokens)} tokens exceeds the limit of {limit}: split the line, "
                f"or {self.limits.hint or LONGER_SOURCES}"
            )
        check_vocabulary(tokens, number, "source", self.config.src_vocab)
        return tokens


@dataclass(frozen=True)
class Reader(SourceReader):
    """Tokenizes the lines of one call."""

    options: DecodeOptions

    def requests(
        self, lines: Iterable[str], prefixes: Iterable[str], first: int, refused: Refused | None = None
    ) -> Requests:
        """Lines and prefixes as ids, up to the first bad line; with `refused`, all, bad ones as empty ones."""
        requests = Requests()
        check_whole("first", first, 0, MAX_SEED)
        texts, begins = as_list("lines", lines), as_list("prefixes", prefixes)
        if begins and len(begins) != len(texts):
            raise ConfigError(f"{len(texts)} sources, {len(begins)} prefixes: give one a line, empty for none")
        for number, text in enumerate(texts, first + 1):
            try:
                begin = self._prefix(begins[number - first - 1], f"line {number}, prefix") if begins else []
                source = self.line(text, number)
                self._check_forced(begin, source, number)
            except TformerError as error:
                if not refused:
                    requests.error = error
                    return requests
                refused(number - 1, error)
                begin, source = [], []
            requests.sources.append(source)
            if begins:
                requests.prefixes.append(begin)
        return requests

    def pairs(self, sources: Iterable[str], targets: Iterable[str], first: int) -> list[tuple[list[int], list[int]]]:
        """Ids of sources and of the outputs to score."""
        both = as_list("sources", sources), as_list("targets", targets)
        if len(both[0]) != len(both[1]):
            raise ConfigError(f"{len(both[0])} sources, {len(both[1])} targets: give one a line")
        return [
            (self._scored(source, number), self._target(target, number))
            for number, (source, target) in enumerate(zip(*both, strict=True), first + 1)
        ]

    def _scored(self, text: str, number: int) -> list[int]:
        ids = self.source(text, number)
        if not ids:  # where sources get no end
            raise DataError(f"line {number}: {EMPTY_SOURCE}")
        return ids

    def _target(self, text: str, number: int) -> list[int]:
        check_line(text, f"line {number}", self.max_line_bytes)
        ids, limits = output_ids(text.strip(), self.tokenizers, self.options), self.limits
        if len(ids) > limits.tgt_tokens:
            raise LimitError(
                f"line {number}: a target of {len(ids)} tokens exceeds the limit of {limits.tgt_tokens}: "
                f"split the line{f', or {limits.hint}' if limits.hint else ''}"
            )
        check_vocabulary(ids, number, "target", self.config.tgt_vocab)
        return ids

    def _prefix(self, text: str, where: str) -> list[int]:
        """Ids that an output must begin with."""
        ids = known_ids(self.tokenizers, text, where, self.max_line_bytes)
        if set(ids) & set(self.options.ends(self.config.eos_id)):
            raise LimitError(f"{where}: {END_IS_FORCED}")
        return ids

    def _check_forced(self, prefix: list[int], source: list[int], number: int) -> None:
        """Raise LimitError where more tokens are forced than the output may have."""
        if source and (forced := len(self.options.first_ids) + len(prefix)):
            [longest] = longest_outputs(self.options, self.limits.tgt_tokens, np.array([len(source)])).tolist()
            check_forced(forced, longest, self.options, f"line {number}: ")


def check_vocabulary(ids: list[int], number: int, side: str, size: int) -> None:
    """Raise LimitError for ids of line `number` that the model's vocabulary of `size` does not have."""
    if ids and not 0 <= min(ids) <= max(ids) < size:
        bad = next(token for token in ids if not 0 <= token < size)
        raise LimitError(f"line {number}: token id {bad} is outside the {side} vocabulary of {size}")


def output_ids(text: str, tokenizers: Tokenizers, options: DecodeOptions) -> list[int]:
    """The tokens that the decoder must produce for a text: `first_ids`, the text's ids, eos."""
    return [*options.first_ids, *tokenizers.target_ids(text)]


def known_ids(tokenizers: Tokenizers, text: str, where: str, max_line_bytes: int) -> list[int]:
    """Ids of a text that outputs must contain. Raises DataError for a word that is not in the vocabulary."""
    check_line(text, where, max_line_bytes)
    encode, unk = tokenizers.target.encode, tokenizers.target.specials.unk
    ids = encode(text)
    if unk in ids:
        unknown = next((word for word in text.split() if unk in encode(word)), text)
        raise DataError(
            f"{where}: '{unknown:.40}' is not in the vocabulary, so that no output can have it: write it otherwise"
        )
    return ids


def as_list(name: str, values: Iterable[Item]) -> list[Item]:
    """Several values as a list. Raises DataError for a single text, whose values would be its characters."""
    if isinstance(values, (str, bytes, bytearray)) or not isinstance(values, Iterable):
        raise DataError(f"{name}: a single {type(values).__name__}, not several: put it into a list, as in ['A dog.']")
    return list(values)


def whole_numbers(ids: Iterable[Any], number: int) -> list[int]:
    """Token ids as ints. Raises DataError for anything but a list of whole numbers."""
    try:
        tokens = list(ids)
        if any(isinstance(token, bool) for token in tokens):
            raise TypeError
        return [index(token) for token in tokens]
    except TypeError:
        raise DataError(f"line {number}: {ids!r:.60} is no list of token ids: give whole numbers") from None
