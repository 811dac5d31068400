"""Shards, and the function that translates one, here or on another machine."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ...base.errors import DataError, TformerError
from ..opening import TranslatorOptions
from ..translator import Translator
from .cutting import Cutter, windows
from .formats import format_of
from .places import open_input
from .rows import Columns, Format
from .storage import Input

_PLACE = re.compile(r"^(line|request|source) \d+: ")
"""How a translator's errors name a line; in its own file it has another number."""
Advance = Callable[[int, int, float], None]
"""Called with the numbers of translated lines, of their tokens, and of their bytes of input."""


@dataclass(frozen=True)
class Work:
    """What is done with every shard."""

    translator: TranslatorOptions
    """With the path of the bundle, and its defaults in `decoding`."""
    names: tuple[str, ...]
    """Names of inputs, whose suffixes give the format."""
    columns: Columns
    window_bytes: int
    """Bytes of text that are sorted into batches together."""
    shard_lines: int
    strict: bool = False
    """Stop at the first line that cannot be translated."""

    @property
    def format(self) -> Format:
        """The format of inputs and shards."""
        return format_of(self.names, self.columns)


@dataclass(frozen=True)
class Shard:
    """Some lines of one input."""

    name: str
    """Number of its first line, and its key; the first part of its file's name."""
    input: str
    line: int
    """Number of its first line in the input, from 1."""
    first: int
    """Number of its first line in the whole corpus, from 0."""
    lines: int
    part: bytes
    """What `Format.sources` reads."""
    bytes: int
    """Bytes of the input, compressed as it is."""


@dataclass(frozen=True)
class Done:
    """A translated shard."""

    name: str
    content: bytes
    record: dict[str, Any] = field(default_factory=dict)
    """Its line of the manifest, and `errors`: its lines of errors.jsonl."""


def cut(work: Work, job: str, inputs: Sequence[Input]) -> Iterator[Shard]:
    """The shards of the inputs, in order, one at a time in memory; `job` identifies bundle and options.

    A shard's key tells that its content is of this bundle, these options and these lines. Raises DataError.
    """
    first, layout = 0, work.format
    for each in inputs:
        line, read = 1, 0
        with open_input(each) as file:
            for part, lines, now in layout.parts(file, each.name, Cutter(work.shard_lines, work.window_bytes)):
                key = hashlib.sha256(f"{job} {first} {hashlib.sha256(part).hexdigest()}".encode()).hexdigest()[:16]
                yield Shard(f"{first:012}-{key}", each.name, line, first, lines, part, now - read)
                first, line, read = first + lines, line + lines, now


def translate_shard(translator: Translator, work: Work, shard: Shard, advance: Advance | None = None) -> Done:
    """Translate a shard. Its windows are those of `tformer translate` on the whole input, and so are its batches.

    A line that cannot be translated gives an empty output. Raises DataError for it where the work is strict; raises
    TformerError where it is not the line's fault.
    """
    start, layout = time.perf_counter(), work.format
    sources, results = layout.sources(shard.part), []
    problems = {i: source.problem for i, source in enumerate(sources) if source.problem}

    def refused(number: int, error: TformerError) -> None:
        problems[number - shard.first] = _PLACE.sub("", str(error))

    every = sum(source.size + 1 for source in sources)
    for window in windows((source.size for source in sources), work.window_bytes):
        texts = [source.text for source in sources[window]]
        translated = list(translator.results(texts, first=shard.first + window.start, refused=refused))
        results += translated
        if work.strict and problems and (i := min(problems)) < window.stop:
            raise DataError(f"{shard.input}:{shard.line + i}: {problems[i]}")
        if advance:
            tokens = sum(len(result.ids) for result in translated)
            share = sum(source.size + 1 for source in sources[window]) / every
            advance(len(translated), tokens, shard.bytes * share)
    content = layout.written(shard.part, results, shard.first, translator.options)
    record = {
        "file": f"{shard.name}{layout.suffix}",
        "input": shard.input,
        "line": shard.line,
        "first": shard.first,
        "lines": shard.lines,
        "sha256": hashlib.sha256(content).hexdigest(),
        "tokens": sum(len(result.ids) for result in results),
        "cut": sum(not result.finished for result in results),
        "seconds": round(time.perf_counter() - start, 3),
        "worker": f"{socket.gethostname()}:{os.getpid()}",
        "errors": [
            {"input": shard.input, "line": shard.line + i, "number": shard.first + i, "error": problems[i]}
            for i in sorted(problems)
        ],
    }
    return Done(shard.name, content, record)


def digest(value: Any) -> str:
    """Hex SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def described(work: Work) -> dict[str, Any]:
    """All of the work that determines its output; a change of it makes other shards."""
    identifying = ("backend", "variant", "device", "shortlist", "batch_tokens", "least_batches", "max_line_bytes")
    return {
        **{name: getattr(work.translator, name) for name in identifying},
        "decoding": dict(work.translator.asked),
        "allowed": digest(list(work.translator.allowed)),
        **asdict(work.columns),
        "shard_lines": work.shard_lines,
    }
