"""tformer translate"""

from __future__ import annotations

import json as jsonlib
import os
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from ..config import LINE_BYTES, MOST_LINE_BYTES
from ..errors import ConfigError, DataError
from ..notes import note
from .lines import utf8_output, windows
from .options import (
    Backend,
    CheckpointOption,
    DecodeSettings,
    DeviceOption,
    Json,
    Shortlisted,
    Threads,
    Variant,
    decode_values,
    piece_ids,
)
from .root import app, progress

if TYPE_CHECKING:
    from ..decoding import DecodeOptions
    from ..translate import Result, Translator

WINDOW_BYTES = 16
"""For each token of a batch that many bytes are read ahead, so that lines of similar length meet in a batch."""
LINES_EACH = 8
"""Lines per core from which a core does best alone with its own."""
Pieces = list[str] | None
Window = tuple[int, list[str], list[str]]
"""Number of the first line, from 0; lines; how their outputs begin, if given."""


@app.command(epilog="Example: echo 'forty-two' | tformer translate bundles/numbers --beams 5 --set length_penalty=0.6")
def translate(
    bundle: Annotated[Path, typer.Argument(help="Bundle.")],
    backend: Backend = "ort",
    variant: Variant = None,
    device: DeviceOption = "cpu",
    checkpoint: CheckpointOption = None,
    shortlist: Shortlisted = False,
    beams: Annotated[int | None, typer.Option(help="Width of the beam; 1: greedy.")] = None,
    n_best: Annotated[int | None, typer.Option(help="Outputs per line, as NUMBER ||| TEXT ||| SCORE.")] = None,
    sample: Annotated[bool, typer.Option("--sample", help="Draw tokens; --n-best is the number of samples.")] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of --sample.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest output in tokens.")] = None,
    settings: DecodeSettings = None,
    prefix: Annotated[Path | None, typer.Option(help="How each output must begin, a line for a line.")] = None,
    allowed: Annotated[Path | None, typer.Option(help="The only outputs allowed, one a line.")] = None,
    first_token: Annotated[Pieces, typer.Option(help="Vocabulary entry that outputs begin with; repeatable.")] = None,
    suppress: Annotated[Pieces, typer.Option(help="Vocabulary entry that is never produced; repeatable.")] = None,
    end_token: Annotated[Pieces, typer.Option(help="Vocabulary entry that ends outputs; repeatable.")] = None,
    align: Annotated[
        bool, typer.Option("--align", help="Add the source position of each token: TEXT ||| 0-0.")
    ] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print tokens as they come, a line at a time.")] = False,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Padded source tokens of a batch, per beam.")] = 4096,
    max_line_bytes: Annotated[
        int, typer.Option(min=1, max=MOST_LINE_BYTES, help="A longer line of the input is refused.")
    ] = LINE_BYTES,
    threads: Threads = 0,
    workers: Annotated[
        int, typer.Option(min=0, help="Batches decoded at a time; 0: one per core if there is text for all.")
    ] = 0,
    json: Json = False,
) -> None:
    """Translate standard input to standard output, a line for a line; --json writes text, ids and score of each.

    The options of --set and what each means are in docs/decoding.md.
    """
    if stream and (json or align):
        raise ConfigError("--stream prints plain text: leave out --json and --align")
    flags = {"beams": beams, "n_best": n_best, "seed": seed, "max_tokens": max_tokens}
    values = decode_values(settings, {**flags, "sampling": sample or None, "align": align or None})
    out = utf8_output()
    from ..bundle import open_bundle
    from ..data import read_lines
    from ..decoding import over_defaults
    from ..engines import engine_name, parse_name, threads_each
    from ..translate import TranslatorOptions, defaults_of, open_translator

    opened = open_bundle(bundle, graphs=False)
    tokenizers = opened.tokenizers()
    for name, pieces in (("first_ids", first_token), ("suppress", suppress), ("end_ids", end_token)):
        if pieces:
            values[name] = piece_ids(tokenizers.target, pieces)
    over_defaults(defaults_of(opened), values)  # refuses what cannot be before it waits for input
    outputs = read_lines(allowed) if allowed else []
    if allowed and not outputs:
        raise DataError(f"{allowed} has no line: give each output that is allowed")
    groups = windows(1 if stream else batch_tokens * WINDOW_BYTES, max_line_bytes)
    requests = _requests(groups, prefix, read_lines(prefix) if prefix else [])
    name = engine_name(backend, variant, opened, device)
    threads_each(threads, workers or 1)  # refuses too many of either before it waits for input
    begin = list(islice(requests, 1))
    on_gpu = parse_name(name).device == "cuda"
    workers = workers or (1 if on_gpu else suitable_workers(sum(len(lines) for _, lines, _ in begin)))
    options = TranslatorOptions(
        bundle=opened,
        backend=backend,
        variant=variant,
        device=device,
        checkpoint=checkpoint,
        threads=threads,
        workers=workers,
        shortlist=shortlist,
        batch_tokens=batch_tokens,
        allowed=outputs,
        max_line_bytes=max_line_bytes,
        decoding=values,
    )
    try:
        translator = open_translator(options)
    except DataError as error:
        raise DataError(f"{allowed}: {error}" if allowed else str(error)) from None
    with translator:
        _print_all(translator, chain(begin, requests), stream, json, out)


def suitable_workers(lines: int) -> int:
    """One worker per core where each gets several batches' worth of lines, else one with all cores."""
    cores = len(os.sched_getaffinity(0))
    return cores if lines >= LINES_EACH * cores else 1


def _requests(groups: Iterator[list[str]], prefix: Path | None, prefixes: list[str]) -> Iterator[Window]:
    """Groups of lines with those of the file `prefix`, if there is one."""
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
    """Translate the windows, each printed before the next is read."""
    cut = 0
    with progress("lines") as advance:
        for first, lines, begins in requests:
            results = (
                _stream(translator, first, lines, begins, out) if stream else translator.results(lines, begins, first)
            )
            for number, result in enumerate(results, first):
                print("" if stream else _line(number, result, translator.options, json), file=out)
                cut += not result.finished
                advance(1, len(result.ids))
            out.flush()
    if cut:
        limit = min(translator.options.max_tokens, translator.engine.limits.tgt_tokens)
        note(f"{cut} outputs were cut off at {limit} tokens or another limit")


def _stream(translator: Translator, first: int, lines: list[str], begins: list[str], out: TextIO) -> Iterator[Result]:
    """Results whose text has been printed as it came."""
    for number, (line, begin) in enumerate(zip_longest(lines, begins, fillvalue=""), first):
        yield translator.stream(line, lambda text: print(text, end="", file=out, flush=True), begin, number)


def _line(number: int, result: Result, options: DecodeOptions, json: bool) -> str:
    """A result for machines, or as Marian writes it."""
    if json:
        return jsonlib.dumps(asdict(result), ensure_ascii=False)
    lines = []
    for each in (result, *result.alternatives):
        fields = [each.text]
        if options.n_best > 1:
            fields = [str(number), each.text, f"{each.score:.6f}"]
        if options.align:
            fields.append(" ".join(f"{source}-{target}" for target, source in enumerate(each.alignment)))
        lines.append(" ||| ".join(fields))
    return "\n".join(lines)
