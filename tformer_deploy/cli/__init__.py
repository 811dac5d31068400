"""The `tformer` command: one file a verb."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="tformer",
    help="Ship an encoder-decoder Transformer: train, export, translate, and prove every token equal to eager PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def common(debug: Annotated[bool, typer.Option("--debug", help="Show the whole trace of an error.")] = False) -> None:
    """Options of every verb."""


def emit(value: Any, as_json: bool, text: str) -> None:
    """Print a result on stdout, for machines or for people."""
    print(json.dumps(value, ensure_ascii=False) if as_json else text)


from . import train  # noqa: E402, F401
