"""tformer shortlist"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .options import Json
from .root import app, emit


@app.command(epilog="Example: tformer shortlist bundles/numbers --src train.en --tgt train.de --best 30")
def shortlist(
    bundle: Annotated[Path, typer.Argument(help="Bundle.")],
    src: Annotated[Path, typer.Option(help="Source text, one sentence per line.")],
    tgt: Annotated[Path, typer.Option(help="Translation of --src, line by line.")],
    best: Annotated[int, typer.Option(min=1, help="Number of target tokens for each source token.")] = 50,
    frequent: Annotated[
        int, typer.Option(min=1, help="Number of most frequent tokens, which are in every list.")
    ] = 100,
    json: Json = False,
) -> None:
    """Learn from parallel text which target tokens are likely for a source, for `translate --shortlist`. Replaces the
    bundle's lists. docs/shortlist.md says what that costs in quality.
    """
    from ..bundle.manifest import changing
    from ..bundle.shortlist import Settings, add_shortlist
    from ..train.data import read_parallel

    settings, text = Settings(best, frequent), read_parallel(src, tgt)
    with changing(bundle) as opened:
        found = add_shortlist(opened, text.src, text.tgt, settings)
    emit({"bundle": str(bundle), **asdict(found)}, json, f"{bundle}: {found}")
