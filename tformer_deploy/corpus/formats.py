"""What a corpus' files hold: lines of text, lines of JSON, tables; and what becomes of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

from ..decoding import DecodeOptions
from ..errors import ConfigError, DataError
from ..printed import printed
from ..translate import Result
from .compression import SUFFIXES, packed, split_lines, unpacked
from .cutting import Cutter

JSON_SUFFIXES = (".jsonl", ".ndjson")
PARQUET = ".parquet"
ADDED = ("", "_score", "_ids", "_alignment", "_alternatives")
"""Ends of the names of columns that may be added."""


@dataclass(frozen=True, slots=True)
class Source:
    """A line or a row to translate."""

    text: str
    size: int
    """Bytes that it counts in a window."""
    problem: str = ""
    """Why it cannot be translated, if it cannot."""


@dataclass(frozen=True)
class Columns:
    """Where text stands in rows, and what is added to them."""

    column: str = "text"
    into: str = "translation"
    """Column of the translation; names of others begin with it."""
    details: bool = False
    """Token ids too; text becomes lines of JSON."""
    most: int = 1 << 20
    """Bytes of the longest line."""

    def check_free(self, names: Collection[str]) -> None:
        """Raise ConfigError where rows have a column that may be added."""
        for end in ADDED:
            if (name := f"{self.into}{end}") in names:
                raise ConfigError(f"the input has a column '{name}' already: name another one with --into")

    def added(self, result: Result, options: DecodeOptions) -> dict[str, Any]:
        """The columns that a result adds to its row."""
        found: dict[str, Any] = {self.into: result.text, f"{self.into}_score": float(result.score)}
        if self.details:
            found[f"{self.into}_ids"] = result.ids
        if options.align:
            found[f"{self.into}_alignment"] = result.alignment
        if options.n_best > 1:
            found[f"{self.into}_alternatives"] = [
                {"text": each.text, "score": float(each.score), **({"ids": each.ids} if self.details else {})}
                for each in result.alternatives
            ]
        return found


Part = tuple[bytes, int, int]
"""What `Format.sources` reads, its rows, and the bytes of the file that are read so far."""


class Format(Protocol):
    """How to cut a file into parts, what their rows are, and how they are written."""

    suffix: str
    """Of the files that are written."""

    def parts(self, file: BinaryIO, name: str, cutter: Cutter) -> Iterator[Part]:
        """The parts of a file, in order. Raises DataError where it cannot be read."""

    def sources(self, part: bytes) -> list[Source]:
        """The rows of a part."""

    def written(self, part: bytes, results: Sequence[Result], first: int, options: DecodeOptions) -> bytes:
        """The file of a part whose first row has that number, from 0. The same arguments give the same bytes."""


class Text:
    """A sentence a line, UTF-8; written as `tformer translate` prints it."""

    def __init__(self, suffix: str, packing: str, columns: Columns) -> None:
        self.packing, self.columns = packing, columns
        self.suffix = (".jsonl" if columns.details else suffix) + packing

    def parts(self, file: BinaryIO, name: str, cutter: Cutter) -> Iterator[Part]:
        """See `Format`; a line that is too long has lost what is beyond the limit."""
        return line_parts(file, split_lines(unpacked(file, self.packing, name), self.columns.most), len, cutter)

    def sources(self, part: bytes) -> list[Source]:
        """See `Format`."""
        return [self._source(line) for line in part.split(b"\n")[:-1]]

    def _source(self, line: bytes) -> Source:
        if len(line) > self.columns.most:
            return Source("", len(line), f"longer than {self.columns.most} bytes: split it, or raise --max-line-bytes")
        try:
            return Source(line.decode("utf-8"), len(line))
        except UnicodeDecodeError as error:
            return Source("", len(line), f"not UTF-8 ({error.reason}): convert it")

    def written(self, part: bytes, results: Sequence[Result], first: int, options: DecodeOptions) -> bytes:
        """See `Format`."""
        lines = (printed(number, result, options, self.columns.details) for number, result in enumerate(results, first))
        return packed("".join(f"{line}\n" for line in lines).encode(), self.packing)


class JsonLines:
    """An object a line; what is added stands behind its own members, which stay as they are."""

    def __init__(self, suffix: str, packing: str, columns: Columns) -> None:
        self.packing, self.columns = packing, columns
        self.suffix = suffix + packing

    def parts(self, file: BinaryIO, name: str, cutter: Cutter) -> Iterator[Part]:
        """See `Format`. A line is an object around its text, so that it may be longer than that by as much again."""
        lines = split_lines(unpacked(file, self.packing, name), 2 * self.columns.most)
        return line_parts(file, lines, lambda line: self._source(line).size, cutter)

    def sources(self, part: bytes) -> list[Source]:
        """See `Format`. Raises ConfigError where rows have the column that would be added."""
        return [self._source(line) for line in part.split(b"\n")[:-1]]

    def _source(self, line: bytes) -> Source:
        if len(line) > 2 * self.columns.most:
            return Source("", 0, f"longer than {2 * self.columns.most} bytes: split it, or raise --max-line-bytes")
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            return Source("", 0, f"not JSON ({error}): write an object a line")
        if not isinstance(row, dict):
            return Source("", 0, "no JSON object: write an object a line")
        self.columns.check_free(row)
        if self.columns.column not in row:
            return Source("", 0, f"no column '{self.columns.column}': it has {', '.join(map(str, row)) or 'none'}")
        text = row[self.columns.column]
        if text is not None and not isinstance(text, str):
            return Source("", 0, f"column '{self.columns.column}' is no text: write a string or null")
        return Source(text or "", len((text or "").encode("utf-8", "surrogatepass")))

    def written(self, part: bytes, results: Sequence[Result], first: int, options: DecodeOptions) -> bytes:
        """See `Format`. A line that was no object becomes one of what is added."""
        lines = zip(part.split(b"\n")[:-1], results, strict=True)
        return packed(b"".join(self._row(*each, options) + b"\n" for each in lines), self.packing)

    def _row(self, line: bytes, result: Result, options: DecodeOptions) -> bytes:
        added = json.dumps(self.columns.added(result, options), ensure_ascii=False).encode()
        if not _is_object(line):
            return added
        head = line.strip()[:-1].rstrip()
        return head + (b"" if head == b"{" else b", ") + added[1:]


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def line_parts(file: BinaryIO, lines: Iterator[bytes], size: Callable[[bytes], int], cutter: Cutter) -> Iterator[Part]:
    """Lines in parts, each line ended."""
    held: list[bytes] = []
    for line in lines:
        held.append(line)
        if cutter.ends(size(line)):
            yield b"\n".join(held) + b"\n", len(held), file.tell()
            held = []
    if held:
        yield b"\n".join(held) + b"\n", len(held), file.tell()


def format_of(names: Sequence[str], columns: Columns) -> Format:
    """The one format of some files, by their names. Raises DataError where there are several."""
    suffixes = {_suffixes(name) for name in names}
    if len(suffixes) > 1:
        shown = ", ".join(sorted("".join(each) or "(no suffix)" for each in suffixes))
        raise DataError(f"--in: files of several formats ({shown}): translate those of each into a folder of its own")
    ((suffix, packing),) = suffixes
    if suffix == PARQUET:
        from .tables import Parquet

        return Parquet(columns)
    return (JsonLines if suffix in JSON_SUFFIXES else Text)(suffix, packing, columns)


def _suffixes(name: str) -> tuple[str, str]:
    """What a file holds and how it is packed, by the end of its name, as in `.txt` and `.gz`."""
    last = name.rsplit("/", 1)[-1]
    packing = next((suffix for suffix in SUFFIXES if last.endswith(suffix)), "")
    last = last.removesuffix(packing)
    return (f".{last.rsplit('.', 1)[1]}" if "." in last[1:] else ""), packing
