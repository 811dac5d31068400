"""Lines of text, and lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, BinaryIO

from ...base.lines import LINE_BYTES_OPTION, longer_than
from ...decoding import DecodeOptions
from ..printed import printed
from ..translator import Result
from .compression import packed, split_lines, unpacked
from .cutting import Cutter
from .rows import Columns, Part, Source


class Text:
    """A sentence a line, UTF-8; written as `tformer translate` prints it."""

    def __init__(self, suffix: str, packing: str, columns: Columns) -> None:
        self.packing, self.columns = packing, columns
        self.suffix = (".jsonl" if columns.details else suffix) + packing

    def parts(self, file: BinaryIO, name: str, cutter: Cutter) -> Iterator[Part]:
        """See `Format`; a line that is too long has lost what is beyond the limit."""
        return line_parts(split_lines(unpacked(file, self.packing, name), self.columns.most), len, cutter)

    def sources(self, part: bytes) -> list[Source]:
        """See `Format`."""
        return [self._source(line) for line in part.split(b"\n")[:-1]]

    def _source(self, line: bytes) -> Source:
        if len(line) > self.columns.most:
            return Source("", len(line), longer_than(self.columns.most, LINE_BYTES_OPTION))
        return Source.of(line)

    def written(self, part: bytes, results: Sequence[Result], first: int, options: DecodeOptions) -> bytes:
        """See `Format`."""
        lines = (printed(number, result, options, self.columns.details) for number, result in enumerate(results, first))
        return packed("".join(f"{line}\n" for line in lines).encode(), self.packing)


class JsonLines:
    """A JSON object a line; new members are appended, its own stay as they are."""

    def __init__(self, suffix: str, packing: str, columns: Columns) -> None:
        self.packing, self.columns = packing, columns
        self.suffix = suffix + packing

    def parts(self, file: BinaryIO, name: str, cutter: Cutter) -> Iterator[Part]:
        """See `Format`. A line is an object around its text, so that it may be longer than that by as much again.

        Raises ConfigError where rows have the column that would be added.
        """
        lines = split_lines(unpacked(file, self.packing, name), 2 * self.columns.most)
        numbers = count(1)
        return line_parts(lines, lambda line: self._source(line, f"{name}:{next(numbers)}").size, cutter)

    def sources(self, part: bytes) -> list[Source]:
        """See `Format`."""
        return [self._source(line) for line in part.split(b"\n")[:-1]]

    def _source(self, line: bytes, where: str = "the input") -> Source:
        most = 2 * self.columns.most  # as much again as the text may have
        if len(line) > most:
            return Source("", 0, f"an object {longer_than(most, LINE_BYTES_OPTION)}")
        row = _parsed(line)
        if isinstance(row, str):
            return Source("", 0, row)
        self.columns.check_free(row, where)
        if self.columns.column not in row:
            return Source("", 0, f"no column '{self.columns.column}': it has {', '.join(map(str, row)) or 'none'}")
        text = row[self.columns.column]
        if text is not None and not isinstance(text, str):
            return Source("", 0, f"column '{self.columns.column}' is no text: write a string or null")
        text = text or ""
        return Source(text, len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass")))

    def written(self, part: bytes, results: Sequence[Result], first: int, options: DecodeOptions) -> bytes:
        """See `Format`. A line that is not an object becomes one with the new members alone."""
        lines = zip(part.split(b"\n")[:-1], results, strict=True)
        return packed(b"".join(self._row(*each, options) + b"\n" for each in lines), self.packing)

    def _row(self, line: bytes, result: Result, options: DecodeOptions) -> bytes:
        added = json.dumps(self.columns.added(result, options), ensure_ascii=False).encode()
        if isinstance(_parsed(line), str):
            return added
        head = line.strip()[:-1].rstrip()
        return head + (b"" if head == b"{" else b", ") + added[1:]


def _parsed(line: bytes) -> dict[str, Any] | str:
    """The object of a line, or what is wrong with it."""
    source = Source.of(line)
    if source.problem:
        return source.problem
    try:
        row = json.loads(source.text.removeprefix("\ufeff"))  # the mark at the beginning of some files
    except (ValueError, RecursionError) as error:
        return f"not JSON ({error}): write an object a line"
    return row if isinstance(row, dict) else "no JSON object: write an object a line"


def line_parts(lines: Iterator[tuple[bytes, int]], size: Callable[[bytes], int], cutter: Cutter) -> Iterator[Part]:
    """Groups lines into parts; with each line come the bytes of the file read so far."""
    held: list[bytes] = []
    read = 0
    for line, read in lines:
        held.append(line)
        if cutter.ends(size(line)):
            yield b"\n".join(held) + b"\n", len(held), read
            held = []
    if held:
        yield b"\n".join(held) + b"\n", len(held), read
