"""tformer corpus"""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..base.errors import Interrupted
from ..base.lines import LINE_BYTES
from ..base.notes import note
from .options import (
    Allowed,
    Backend,
    BatchTokens,
    Beams,
    DecodeSettings,
    DeviceOption,
    EndToken,
    FirstToken,
    Json,
    MaxLineBytes,
    MaxTokens,
    Sample,
    Seed,
    Shortlisted,
    Suppress,
    Variant,
    WorkerThreads,
    translator_options,
)
from .root import app, emit

if TYPE_CHECKING:
    from ..translate.corpus.output import Summary
    from ..translate.corpus.progress import Progress


@app.command(epilog="Example: tformer corpus bundles/numbers --in 'text/*.txt.gz' --out translated --beams 4 --merge")
def corpus(
    context: typer.Context,
    bundle: Annotated[Path, typer.Argument(help="Bundle.")],
    inputs: Annotated[
        list[str],
        typer.Option(
            "--in", metavar="PATH", help="Path, URL or quoted pattern of text, JSON lines or Parquet files; repeatable."
        ),
    ],
    out: Annotated[str, typer.Option(help="Folder or URL for the shards.")],
    column: Annotated[str, typer.Option(help="Field or column that has the text, in JSON lines and Parquet.")] = "text",
    into: Annotated[str, typer.Option(help="Field or column for the translation.")] = "translation",
    details: Annotated[
        bool, typer.Option("--details", help="Add token ids; text inputs give JSON lines, with scores.")
    ] = False,
    shard_lines: Annotated[int, typer.Option(min=1, help="Approximate lines per shard.")] = 20_000,
    merge: Annotated[bool, typer.Option("--merge", help="Also write all shards as one file.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite another job's output.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first line that cannot be translated.")] = False,
    address: Annotated[
        str | None, typer.Option(help="Address of a Ray cluster, or auto. Default: this machine only.")
    ] = None,
    num_cpus: Annotated[int, typer.Option(min=1, help="Cores per worker, on Ray.")] = 1,
    num_gpus: Annotated[float, typer.Option(min=0, help="GPUs per worker, on Ray.")] = 0.0,
    retries: Annotated[int, typer.Option(min=0, help="How often to retry a shard whose worker was lost, on Ray.")] = 5,
    backend: Backend = "ort",
    variant: Variant = None,
    device: DeviceOption = "cpu",
    shortlist: Shortlisted = False,
    beams: Beams = None,
    n_best: Annotated[
        int | None,
        typer.Option(help="Outputs per line; in JSON lines and Parquet, a field with the others."),
    ] = None,
    sample: Sample = False,
    seed: Seed = None,
    max_tokens: MaxTokens = None,
    settings: DecodeSettings = None,
    allowed: Allowed = None,
    first_token: FirstToken = None,
    suppress: Suppress = None,
    end_token: EndToken = None,
    align: Annotated[
        bool,
        typer.Option("--align", help="Add the alignment; in JSON lines and Parquet, a field with source positions."),
    ] = False,
    batch_tokens: BatchTokens = 0,
    max_line_bytes: MaxLineBytes = LINE_BYTES,
    threads: WorkerThreads = 0,
    workers: Annotated[
        int,
        typer.Option(
            min=0, help="Batches decoded in parallel, 0: one per core. On Ray: number of workers, 0: as many as fit."
        ),
    ] = 0,
    json: Json = False,
) -> None:
    """Translate a corpus of any size in shards, here or on a Ray cluster; after a kill, the same command continues.

    Text files become the lines that tformer translate prints; JSON lines and Parquet get added fields or columns. See
    docs/corpus.md.
    """
    from ..bundle.manifest import open_bundle
    from ..translate.corpus.job import CorpusOptions, translate_corpus
    from ..translate.corpus.progress import Progress

    opened = open_bundle(bundle, graphs=False)
    opened.require_decoder()
    options = CorpusOptions(
        inputs=inputs,
        out=out,
        translator=translator_options(opened, context.params),
        column=column,
        into=into,
        details=details,
        shard_lines=shard_lines,
        merge=merge,
        force=force,
        strict=strict,
        address=address,
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        retries=retries,
    )
    progress = Progress()
    try:
        with _shown(progress):
            summary = translate_corpus(options, progress)
    except KeyboardInterrupt:
        done = progress.existing_shards + progress.translated_shards
        raise Interrupted(f"{done} shards are done: run the same command again for the others") from None
    emit(asdict(summary), json, _text(summary))


def _text(summary: Summary) -> str:
    """The result of a job as text."""
    earlier = f", {summary.existing_shards:,} of them by an earlier run" if summary.existing_shards else ""
    lines = [f"{summary.out}: {summary.lines:,} lines in {summary.shards:,} shards{earlier}"]
    if summary.damaged:
        lines.append(f"changed since an earlier run wrote them, so translated again: {', '.join(summary.damaged)}")
    if summary.merged:
        lines.append(f"merged: {summary.merged}")
    if summary.errors:
        lines.append(f"{summary.errors:,} lines could not be translated and are empty: errors.jsonl")
    if summary.cut:
        lines.append(f"{summary.cut:,} outputs were cut off by a limit")
    return "\n".join(lines)


@contextmanager
def _shown(progress: Progress) -> Iterator[None]:
    """Show progress on standard error: a bar on a terminal, else lines of JSON."""
    if not sys.stderr.isatty():
        progress.tell(lambda: note(jsonlib.dumps(progress.state())))
        yield
        note(jsonlib.dumps(progress.state()))
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(progress.line(), total=None)

        def show() -> None:
            done = progress.done
            total = None if done is None else 100.0
            bar.update(task, completed=int(100 * (done or 0)), total=total, description=progress.line())

        progress.changed = show
        yield
