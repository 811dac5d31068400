"""The interface of file formats, and the columns that they add."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO, Protocol

from ...base.errors import ConfigError
from ...decoding import DecodeOptions
from ..translator import Result
from .cutting import Cutter

ADDED = ("", "_score", "_ids", "_alignment", "_alternatives")
"""Suffixes of the names of added columns."""


@dataclass(frozen=True, slots=True)
class Source:
    """A line or a row to translate."""

    text: str
    size: int
    """Its bytes, by which windows are cut."""
    problem: str = ""
    """Why it cannot be translated, if it cannot."""

    @classmethod
    def of(cls, content: bytes) -> Source:
        """Of bytes, which may be no text."""
        try:
            return cls(content.decode("utf-8"), len(content))
        except UnicodeDecodeError as error:
            return cls("", len(content), f"not UTF-8 ({error.reason}): convert it")


@dataclass(frozen=True)
class Columns:
    """The column of the text, and the columns that are added."""

    column: str = "text"
    into: str = "translation"
    """Column of the translation; names of others begin with it."""
    details: bool = False
    """Also add token ids; text inputs give lines of JSON."""
    most: int = 1 << 20
    """Bytes of the longest line."""

    @cached_property
    def own(self) -> frozenset[str]:
        """Names of columns that may be added."""
        return frozenset(f"{self.into}{end}" for end in ADDED)

    def check_free(self, names: Iterable[str], where: str) -> None:
        """Raise ConfigError where rows already have a column that would be added; `where`: file and line."""
        if not self.own.isdisjoint(names):
            name = min(self.own.intersection(names))
            raise ConfigError(f"{where} has a column '{name}' already: name another one with --into")

    def added(self, result: Result, options: DecodeOptions) -> dict[str, Any]:
        """The columns that a result adds to its row."""
        added: dict[str, Any] = {self.into: result.text, f"{self.into}_score": float(result.score)}
        if self.details:
            added[f"{self.into}_ids"] = result.ids
        if options.align:
            added[f"{self.into}_alignment"] = result.alignment
        if options.n_best > 1:
            added[f"{self.into}_alternatives"] = [
                {"text": each.text, "score": float(each.score), **({"ids": each.ids} if self.details else {})}
                for each in result.alternatives
            ]
        return added


Part = tuple[bytes, int, int]
"""What `Format.sources` reads, its rows, and the bytes of the file that are read so far."""


class Format(Protocol):
    """Cuts a file into parts, reads their rows, and writes them with translations."""

    suffix: str
    """Of the files that are written."""

    def parts(self, file: BinaryIO, name: str, cutter: Cutter) -> Iterator[Part]:
        """The parts of a file, in order. Raises DataError where it cannot be read."""

    def sources(self, part: bytes) -> list[Source]:
        """The rows of a part."""

    def written(self, part: bytes, results: Sequence[Result], first: int, options: DecodeOptions) -> bytes:
        """The file of a part whose first row has that number, from 0. The same arguments give the same bytes."""
