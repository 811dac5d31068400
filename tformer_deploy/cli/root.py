"""The command itself: its name, its options of every verb, and what verbs print with."""

from __future__ import annotations

import json
import logging
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from typing import Annotated, Any

import typer

from .. import __version__

RUNS_ON = ("torch", "onnx", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx-cu13", "tensorrt-rtx-cu12")
"""Packages whose versions decide what comes out."""

app = typer.Typer(
    name="tformer",
    help="Ship an encoder-decoder Transformer: train, export, translate, and prove every token equal to eager PyTorch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def print_versions(asked: bool) -> None:
    """Print our version and those of what is installed of RUNS_ON, without importing any of it."""
    if not asked:
        return
    print(f"tformer {__version__}\npython {platform.python_version()}")
    for package in RUNS_ON:
        with suppress(metadata.PackageNotFoundError):
            print(f"{package} {metadata.version(package)}")
    raise typer.Exit


@app.callback()
def common(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the whole trace of an error, and what TensorRT logs in this process.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the versions of tformer and of what it runs on.",
            callback=print_versions,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Options of every verb."""
    if debug:
        logging.basicConfig(format="%(name)s: %(message)s")
        logging.getLogger("tformer_deploy").setLevel(logging.DEBUG)


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
