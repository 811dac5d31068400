"""tformer check"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import app, emit, progress
from .options import Checkpoint, Json, Threads


@app.command(epilog="Example: tformer check bundles/numbers --backend ort --src lines.txt")
def check(
    bundle: Annotated[Path, typer.Argument(help="Bundle.")],
    backend: Annotated[str, typer.Option(help="Engine to compare with eager PyTorch.")] = "ort",
    checkpoint: Checkpoint = None,
    src: Annotated[Path | None, typer.Option(help="Text, one sentence a line; without it, generated ids.")] = None,
    threads: Threads = 0,
    json: Json = False,
) -> None:
    """Compare an engine with eager PyTorch: encoder, scores of every step, tokens. Exit code 3 if they differ."""
    from ..bundle import open_bundle
    from ..checkpoint import open_reference
    from ..ship import check_bundle, encode_file

    opened = open_bundle(bundle)
    reference = open_reference(opened, checkpoint)
    sources = encode_file(src, reference.tokenizers, opened.recipe.axes.src_len.max) if src else None
    with progress("check", None) as advance:
        report = check_bundle(opened, backend, reference, sources, advance, threads)
    emit(report.to_json(), json, str(report))
    if not report.passed:
        raise typer.Exit(3)
