"""tformer shortlist"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..base.errors import ConfigError
from .options import Json
from .root import app, emit


@app.command(epilog="Example: tformer shortlist bundles/numbers --src train.en --tgt train.de --best 30")
def shortlist(
    bundle: Annotated[Path, typer.Argument(help="Bundle.")],
    src: Annotated[Path | None, typer.Option(help="Source text, one sentence per line.")] = None,
    tgt: Annotated[Path | None, typer.Option(help="Translation of --src, line by line.")] = None,
    best: Annotated[int, typer.Option(min=1, help="Number of target tokens for each source token.")] = 50,
    frequent: Annotated[
        int, typer.Option(min=1, help="Number of most frequent tokens, which are in every list.")
    ] = 100,
    marian: Annotated[
        Path | None,
        typer.Option(
            help="Take the lists of this file of Marian or Bergamot, lex.*.bin, as they are; text measures them only."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Learn from parallel text which target tokens are likely for a source, for `translate --shortlist`. Replaces the
    bundle's lists. docs/shortlist.md says what that costs in quality.
    """
    if (src is None) != (tgt is None) or (src is None and marian is None):
        raise ConfigError("lists are learned from parallel text: give --src and --tgt, or --marian FILE")
    from ..bundle.manifest import changing
    from ..bundle.marian_lists import add_marian_lists
    from ..bundle.shortlist import Settings, add_shortlist
    from ..train.data import Parallel, read_parallel

    text = read_parallel(src, tgt) if src and tgt else Parallel([], [])
    with changing(bundle) as opened:
        if marian:
            found = add_marian_lists(opened, marian, text.src, text.tgt)
        else:
            found = add_shortlist(opened, text.src, text.tgt, Settings(best, frequent))
    emit({"bundle": str(bundle), **asdict(found)}, json, f"{bundle}: {found}")
