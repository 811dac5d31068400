"""The `tformer` command: one file a verb."""

from __future__ import annotations

import errno
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from ..errors import Interrupted, ParityError, TformerError, missing_extra

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


def main() -> None:
    """Run the command. Exit codes: 1 a user's mistake, 2 wrong usage, 3 a check that failed, 130 stopped."""
    try:
        app()
    except (TformerError, OSError, ModuleNotFoundError) as error:
        if "--debug" in sys.argv:
            raise
        kind = "stopped" if isinstance(error, Interrupted) else "error"
        print(f"{kind}: {_one_line(error)}", file=sys.stderr)
        sys.exit(_exit_code(error))


def _one_line(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return str(missing_extra(error))
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        full = error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
        return f"{where}{error.strerror}: {'make room or ' if full else ''}choose another folder"
    return " ".join(str(error).split())


def _exit_code(error: BaseException) -> int:
    if isinstance(error, Interrupted):
        return 130
    return 3 if isinstance(error, ParityError) else 1


def emit(value: Any, as_json: bool, text: str) -> None:
    """Print a result on stdout, for machines or for people."""
    print(json.dumps(value, ensure_ascii=False) if as_json else text)


@contextmanager
def progress(label: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr, nothing where that is no terminal; yields `advance(count, tokens)`."""
    if not sys.stderr.isatty():
        yield lambda count, tokens=0: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn(label),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[rate]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total, rate="")
        start, produced = time.perf_counter(), 0

        def advance(count: int, tokens: int = 0) -> None:
            nonlocal produced
            produced += tokens
            rate = f"{produced / (time.perf_counter() - start):,.0f} tokens/s" if produced else ""
            bar.update(task, advance=count, rate=rate)

        yield advance


from . import bench, build, check, export, init, inspect, score, shortlist, train, translate  # noqa: E402, F401
