"""tformer translate"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from ..base.errors import ConfigError, DataError
from ..base.lines import LINE_BYTES
from ..base.notes import note
from ..model.config import BATCH_TOKENS, WINDOW_BYTES
from .lines import utf8_output, windows
from .options import (
    Align,
    Allowed,
    Backend,
    BatchTokens,
    Beams,
    CheckpointOption,
    DecodeSettings,
    DeviceOption,
    EndToken,
    FirstToken,
    Json,
    MaxLineBytes,
    MaxTokens,
    NBest,
    Sample,
    Seed,
    Shortlisted,
    Suppress,
    Variant,
    WorkerThreads,
    translator_options,
)
from .root import app, progress

if TYPE_CHECKING:
    from ..translate.translator import Result, Translator

Window = tuple[int, list[str], list[str]]
"""Index of the first line; lines; prefixes of their outputs, if there are any."""


@app.command(epilog="Example: echo 'forty-two' | tformer translate bundles/numbers --beams 5 --set length_penalty=0.6")
def translate(
    context: typer.Context,
    bundle: Annotated[Path, typer.Argument(help="Bundle.")],
    backend: Backend = "ort",
    variant: Variant = None,
    device: DeviceOption = "cpu",
    checkpoint: CheckpointOption = None,
    shortlist: Shortlisted = False,
    beams: Beams = None,
    n_best: NBest = None,
    sample: Sample = False,
    seed: Seed = None,
    max_tokens: MaxTokens = None,
    settings: DecodeSettings = None,
    prefix: Annotated[
        Path | None,
        typer.Option(help="File with the beginning of each output, line by line; an empty line forces nothing."),
    ] = None,
    allowed: Allowed = None,
    first_token: FirstToken = None,
    suppress: Suppress = None,
    end_token: EndToken = None,
    align: Align = False,
    stream: Annotated[
        bool, typer.Option("--stream", help="Print text as it is generated, one line at a time.")
    ] = False,
    batch_tokens: BatchTokens = 0,
    max_line_bytes: MaxLineBytes = LINE_BYTES,
    threads: WorkerThreads = 0,
    workers: Annotated[
        int, typer.Option(min=0, help="Batches decoded in parallel; 0: one per core, if there is enough text.")
    ] = 0,
    json: Json = False,
) -> None:
    """Translate standard input to standard output, line by line. --json prints text, ids and score of each output.

    docs/decoding.md explains the options of --set.
    """
    if stream and (json or align):
        raise ConfigError("--stream prints plain text: leave out --json and --align")
    out = utf8_output()
    from ..base.lines import read_lines
    from ..bundle.manifest import open_bundle
    from ..engines import check_checkpoint, engine_name, threads_each
    from ..translate.batches import suitable_workers
    from ..translate.opening import open_translator

    opened = open_bundle(bundle, graphs=False)
    options = translator_options(opened, context.params)  # checked before waiting for input
    groups = windows(1 if stream else (batch_tokens or BATCH_TOKENS) * WINDOW_BYTES, max_line_bytes)
    requests = _requests(groups, prefix, read_lines(prefix) if prefix else [])
    name = engine_name(backend, variant, opened, device)
    check_checkpoint(checkpoint, [name])
    threads_each(threads, workers or 1)  # refuses too many of either before waiting for input
    begin = list(islice(requests, 1))
    on_gpu = name.device == "cuda"
    workers = workers or (1 if on_gpu else suitable_workers(sum(len(lines) for _, lines, _ in begin)))
    try:
        translator = open_translator(replace(options, workers=workers))
    except DataError as error:
        raise DataError(f"{allowed}: {error}" if allowed else str(error)) from None
    with translator:
        _print_all(translator, chain(begin, requests), stream, json, out)


def _requests(groups: Iterator[list[str]], prefix: Path | None, prefixes: list[str]) -> Iterator[Window]:
    """Groups of lines, with the lines of the file `prefix`, if there is one."""
    first = 0
    for lines in groups:
        begins = prefixes[first : first + len(lines)]
        if prefix and len(begins) < len(lines):
            raise ConfigError(f"{prefix} has {len(prefixes)} lines, the input more: give one a line, empty for none")
        yield first, lines, begins
        first += len(lines)
    if prefix and first != len(prefixes):
        raise ConfigError(f"{prefix} has {len(prefixes)} lines, the input {first}: give one a line")


def _print_all(translator: Translator, requests: Iterator[Window], stream: bool, json: bool, out: TextIO) -> None:
    """Translate windows of lines, each printed before the next is read."""
    from ..translate.printed import printed

    cut = 0
    with progress("lines", printing=True) as advance:
        for first, lines, begins in requests:
            results = (
                _stream(translator, first, lines, begins, out) if stream else translator.results(lines, begins, first)
            )
            for number, result in enumerate(results, first):
                print("" if stream else printed(number, result, translator.options, json), file=out)
                cut += not result.finished
                advance(1, len(result.ids))
            out.flush()
    if cut:
        limit = min(translator.options.max_tokens, translator.engine.limits.tgt_tokens)
        note(f"{cut} outputs were cut off at {limit} tokens or another limit")


def _stream(translator: Translator, first: int, lines: list[str], begins: list[str], out: TextIO) -> Iterator[Result]:
    """Results whose text is printed as it is generated."""
    from ..translate.printed import one_line

    for number, (line, begin) in enumerate(zip_longest(lines, begins, fillvalue=""), first):
        yield translator.stream(line, lambda text: print(one_line(text), end="", file=out, flush=True), begin, number)
