"""tformer distill"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..base.errors import Interrupted
from ..base.lines import LINE_BYTES
from .options import (
    Backend,
    BatchTokens,
    Beams,
    Candidates,
    Choose,
    DecodeSettings,
    FilterOption,
    Json,
    MaxTokens,
    Sample,
    Seed,
    Variant,
    WorkerThreads,
    named_values,
    translator_options,
)
from .root import app, emit


@app.command(
    epilog="Example: tformer distill bundles/numbers --src train.en --tgt train.de --beams 4 --n-best 4 --choose chrf "
    "--out distilled"
)
def distill(
    context: typer.Context,
    bundle: Annotated[Path, typer.Argument(help="The teacher.")],
    src: Annotated[list[Path], typer.Option(help="Text to translate, one sentence per line; repeatable.")],
    out: Annotated[Path, typer.Option(help="Folder for train.src, train.tgt and report.json.")],
    tgt: Annotated[
        list[Path] | None, typer.Option(help="Reference translation of each --src, for --choose and the report.")
    ] = None,
    choose: Choose = "score",
    filter_: FilterOption = None,
    backend: Backend = "ort",
    variant: Variant = None,
    beams: Beams = None,
    n_best: Candidates = None,
    sample: Sample = False,
    seed: Seed = None,
    max_tokens: MaxTokens = None,
    settings: DecodeSettings = None,
    batch_tokens: BatchTokens = 0,
    threads: WorkerThreads = 0,
    workers: Annotated[int, typer.Option(min=0, help="Batches decoded in parallel, 0: one per core.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace what another text or other options made.")] = False,
    json: Json = False,
) -> None:
    """Make training data for a student of a teacher's translations; after a kill, the same command continues.

    Lines that a student should not learn are left out and counted by reason. docs/distill.md says how.
    """
    from ..base.settings import parse_settings
    from ..bundle.manifest import open_bundle
    from ..translate.distill import DistillOptions, Filters
    from ..translate.distill import distill as make

    filters = Filters(**parse_settings(Filters, "filter", named_values("--filter", filter_)))
    opened = open_bundle(bundle, graphs=False)
    opened.require_decoder()
    fixed = {"align": False, "allowed": None, "first_token": None, "suppress": None, "end_token": None}
    given = {**context.params, **fixed, "device": "cpu", "shortlist": False, "max_line_bytes": LINE_BYTES}
    options = DistillOptions(translator_options(opened, given), src, out, tgt or [], choose, filters, force)
    try:
        report = make(options)
    except KeyboardInterrupt:
        raise Interrupted("what is translated stays: run the same command again for the rest") from None
    emit(asdict(report), json, str(report))
