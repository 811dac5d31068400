"""tformer translate"""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from . import app, progress
from .options import Checkpoint, Json, Threads

WINDOW = 4000
"""Lines that are read, sorted by length and written together; at a terminal, one."""


@app.command(epilog="Example: echo 'forty-two' | tformer translate bundles/numbers --backend ort")
def translate(
    bundle: Annotated[Path, typer.Argument(help="Bundle.")],
    backend: Annotated[str, typer.Option(help="ort or eager.")] = "ort",
    checkpoint: Checkpoint = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest output in tokens.")] = 256,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Padded source tokens of a batch.")] = 2048,
    threads: Threads = 0,
    json: Json = False,
) -> None:
    """Translate standard input to standard output, a line for a line; --json writes text, ids and score of each.

    4,000 lines are read at a time, so that lines of similar length can be translated together.
    """
    from .. import load

    out = sys.stdout
    if hasattr(out, "reconfigure"):
        out.reconfigure(encoding="utf-8", newline="\n")
    with (
        load(bundle, backend, checkpoint=checkpoint, threads=threads, max_tokens=max_tokens) as translator,
        progress("lines", None) as advance,
    ):
        translator.batch_tokens = batch_tokens
        lines, first, cut = stdin_lines(), 1, 0
        while window := list(islice(lines, 1 if sys.stdin.isatty() else WINDOW)):
            for result in translator.translate(window, advance, first_line=first):
                print(jsonlib.dumps(asdict(result), ensure_ascii=False) if json else result.text, file=out)
                cut += not result.finished
            out.flush()
            first += len(window)
    if cut:
        print(f"{cut} outputs were cut off at {max_tokens} tokens or the model's last position", file=sys.stderr)


def stdin_lines() -> Iterator[str]:
    """Lines of standard input. Raises DataError with the number of a line that is not UTF-8."""
    from ..errors import DataError

    for number, raw in enumerate(sys.stdin.buffer, 1):
        try:
            yield raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"standard input, line {number}: not UTF-8 ({error.reason}): convert it first") from None
