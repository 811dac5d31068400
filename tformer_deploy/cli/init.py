"""tformer init"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..model.config import MOST_OF_MODEL
from .options import Json, ModelSettings, folder, model_settings
from .root import app, emit


@app.command(epilog="Example: tformer init --preset base --vocab-size 32000 --out runs/base-random")
def init(
    out: Annotated[Path, typer.Option(parser=folder, metavar="<path>", help="Folder for the checkpoint.")],
    preset: Annotated[str, typer.Option(help="Model size: tiny, small, base or big.")] = "base",
    vocab_size: Annotated[int, typer.Option(min=5, max=MOST_OF_MODEL["src_vocab"], help="Vocabulary size.")] = 32000,
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 1,
    config: Annotated[Path | None, typer.Option(help="TOML file with [model].")] = None,
    settings: ModelSettings = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the checkpoint in --out.")] = False,
    json: Json = False,
) -> None:
    """Write an untrained checkpoint with random weights, for benchmarks and tests.

    Its vocabulary is the words w4, w5 and so on.
    """
    model_values = model_settings(config, settings)
    from ..train.runs import init_checkpoint

    parameters = init_checkpoint(out, preset, vocab_size, seed, model_values, force)
    emit({"out": str(out), "parameters": parameters}, json, f"{out}: {parameters:,} parameters")
