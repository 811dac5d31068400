"""tformer export"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import app, emit, progress
from .options import Json


@app.command(epilog="Example: tformer export runs/numbers --out bundles/numbers --recipe fp32 --recipe int8")
def export(
    run: Annotated[Path, typer.Argument(help="Run folder or checkpoint.")],
    out: Annotated[Path, typer.Option(help="Folder for the bundle.")],
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            help="A recipe's name or TOML file; repeatable, the first (but trt) is what runs. Without it: fp32."
        ),
    ] = None,
    src: Annotated[
        Path | None, typer.Option(help="Text to check and calibrate with; without it, generated ids.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the bundle in --out.")] = False,
    json: Json = False,
) -> None:
    """Export a checkpoint to a bundle and check it against eager PyTorch; a failed check leaves no bundle."""
    from ..ship import ship

    with progress("check") as advance:
        report = ship(run, out, recipe or ["fp32"], src, force, advance)
    emit({"bundle": str(out), "check": report.to_json()}, json, f"{report}\n{out}: bundle written")
