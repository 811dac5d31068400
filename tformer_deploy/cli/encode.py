"""tformer encode"""

from __future__ import annotations

import json as jsonlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from ..base.lines import LINE_BYTES
from ..base.notes import note
from ..model.config import BATCH_TOKENS, WINDOW_BYTES
from ..translate.pooling import NO_POOL
from .lines import utf8_output, windows
from .options import ENCODERS, ENCODING, CheckpointOption, Json, MaxLineBytes, Threads, variants
from .root import app, emit, progress

if TYPE_CHECKING:
    from ..translate.encode import Encoded, TextEncoder

Requests = Iterator[list[str]]


@app.command(epilog="Example: echo 'forty-two' | tformer encode bundles/numbers-memory --pool mean --json")
def encode(
    bundle: Annotated[Path, typer.Argument(help="Bundle exported with --memory; with --backend eager, any.")],
    backend: Annotated[str, typer.Option(help=f"Backend: {ENCODING}.")] = "ort",
    variant: Annotated[str | None, typer.Option(help=f"{variants(ENCODERS)} Default: the bundle's default.")] = None,
    checkpoint: CheckpointOption = None,
    pool: Annotated[
        str,
        typer.Option(
            help="One vector per line: mean, first or last of its tokens' vectors; none: one vector per token."
        ),
    ] = "mean",
    out: Annotated[
        Path | None, typer.Option(help="Write a NumPy file instead of text: .npy, or .npz with --pool none.")
    ] = None,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Batch size in padded source tokens.")] = BATCH_TOKENS,
    max_line_bytes: MaxLineBytes = LINE_BYTES,
    threads: Threads = 0,
    json: Json = False,
) -> None:
    """Run the encoder alone: one vector per line of text, or with --pool none one per token.

    Text output: spaces between numbers; with --pool none, tabs between vectors. An empty line stays empty; in a .npy
    file it is a row of zeros. --json also prints the source's ids. See docs/encode.md.
    """
    stdout = utf8_output()
    from ..translate.encode import EncoderOptions, TextEncoder
    from .vectors import check_name, vector_file

    options = EncoderOptions(bundle, backend, variant, checkpoint, threads, pool, batch_tokens, max_line_bytes)
    encoder = TextEncoder(options)
    requests = windows(batch_tokens * WINDOW_BYTES, max_line_bytes)
    if not out:
        with encoder:
            _run(encoder, requests, lambda found: print(line_of(found, pool, json), file=stdout), stdout)
        return
    check_name(out, pool)
    with encoder, vector_file(out, pool, encoder.width) as add:
        lines, tokens, empty = _run(encoder, requests, add, None)
    if empty:
        note(f"{empty} empty lines have {'no row' if pool == NO_POOL else 'zeros'}")
    result = {"out": str(out), "lines": lines, "tokens": tokens, "width": encoder.width}
    emit(result, json, f"{out}: {lines:,} lines of {tokens:,} tokens, {encoder.width} numbers a vector")


def _run(
    encoder: TextEncoder, requests: Requests, write: Callable[[Encoded], None], flushed: TextIO | None
) -> tuple[int, int, int]:
    """Encode windows of lines, each written before the next is read. Returns numbers of lines, tokens, empty lines."""
    lines = tokens = empty = 0
    with progress("lines", printing=flushed is not None) as advance:
        for window in requests:
            for found in encoder.results(window, lines):
                write(found)
                lines, tokens, empty = lines + 1, tokens + len(found.ids), empty + (not found.ids)
                advance(1, len(found.ids))
            if flushed:
                flushed.flush()
    return lines, tokens, empty


def line_of(found: Encoded, pool: str, json: bool) -> str:
    """A line's vectors as text, with as many digits as float32 needs."""
    rows = [list(map(str, row)) for row in found.vectors.reshape(-1, found.vectors.shape[-1])]
    if json:
        numbers = [list(map(float, row)) for row in rows]
        values = {"memory": numbers} if pool == NO_POOL else {"vector": numbers[0] if found.ids else []}
        return jsonlib.dumps({"ids": found.ids, **values})
    return "\t".join(" ".join(row) for row in rows) if found.ids else ""
