"""The command itself: its name, common options, and how verbs print results and progress."""

from __future__ import annotations

import json
import logging
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..base.notes import Progress, unseen
from ..engines import PACKAGES


class Verbs(TyperGroup):
    """The list of verbs, each with the whole first sentence of its help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list."""
        verbs = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, verb.get_short_help_str(limit=1000)) for name, verb in verbs if verb])


app = typer.Typer(
    name="tformer",
    cls=Verbs,
    help="Train, import, export and run encoder-decoder Transformers, and compare every token with eager PyTorch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def print_versions(asked: bool) -> None:
    """Print our version and those of installed `engines.PACKAGES`, without importing them."""
    if not asked:
        return
    print(f"tformer {__version__}\npython {platform.python_version()}")
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            print(f"{package} {metadata.version(package)}")
    raise typer.Exit


@app.callback()
def common(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error, and the log of TensorRT.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the versions of tformer and of its runtimes.",
            callback=print_versions,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Options of all verbs."""
    if debug:
        logging.basicConfig(format="%(name)s: %(message)s")
        logging.getLogger("tformer_deploy").setLevel(logging.DEBUG)


def emit(value: Any, as_json: bool, text: str) -> None:
    """Print a result on stdout, as JSON or as text."""
    print(json.dumps(value, ensure_ascii=False) if as_json else text)


@contextmanager
def progress(label: str, total: int | None = None, printing: bool = False) -> Iterator[Progress]:
    """A progress bar on stderr if that is a terminal.

    `printing`: results are printed meanwhile, so there is no bar if they go to a terminal too.
    """
    if not sys.stderr.isatty() or (printing and sys.stdout.isatty()):
        yield unseen
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[rate]}"),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as bar:
        task = bar.add_task(label, total=total, rate="")
        start, produced = time.perf_counter(), 0

        def advance(count: int = 0, tokens: int = 0, stage: str = "") -> None:
            nonlocal produced
            if stage:
                bar.update(task, description=f"{label}: {stage}", completed=0 if total is None else None)
            produced += tokens
            rate = f"{produced / (time.perf_counter() - start):,.0f} tokens/s" if produced else ""
            bar.update(task, advance=count, rate=rate)

        yield advance
