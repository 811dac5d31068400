"""tformer bench"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..base.errors import ConfigError, Interrupted
from .options import MEASURED, CheckpointOption, DeviceOption, Json, MeasuredVariants, Shortlisted, WorkerThreads
from .root import app, emit, progress


@app.command(
    epilog="Example: tformer bench bundles/numbers --backend ort --backend eager --batch 1,8,32 --html bench.html"
)
def bench(
    bundle: Annotated[Path, typer.Argument(help="Bundle.")],
    backend: Annotated[
        list[str] | None, typer.Option(metavar="BACKEND[:VARIANT]", help=f"{MEASURED}; repeatable. Default: ort.")
    ] = None,
    variant: MeasuredVariants = None,
    device: DeviceOption = "cpu",
    checkpoint: CheckpointOption = None,
    batch: Annotated[str | None, typer.Option(help="Batch sizes. Default: 1,8,32.")] = None,
    beam: Annotated[str | None, typer.Option(help="Beam sizes. Default: 1,4.")] = None,
    src_len: Annotated[str | None, typer.Option(help="Source lengths in tokens. Default: 20.")] = None,
    new_tokens: Annotated[str | None, typer.Option(help="Output lengths in tokens. Default: 32.")] = None,
    src: Annotated[Path | None, typer.Option(help="Text to translate as well, one sentence per line.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest output when translating --src, in tokens.")] = 256,
    rounds: Annotated[
        int, typer.Option(min=1, help="Number of rounds; each backend and variant has one turn in each.")
    ] = 5,
    seconds: Annotated[
        float,
        typer.Option(min=0, help="Time to measure each combination of sizes in each round; at most 50 repetitions."),
    ] = 0.2,
    threads: WorkerThreads = 0,
    workers: Annotated[int, typer.Option(min=1, help="Number of parts of a batch that are decoded in parallel.")] = 1,
    shortlist: Shortlisted = False,
    profile: Annotated[bool, typer.Option("--profile", help="Add the time per kind of graph node (ort only).")] = False,
    html: Annotated[Path | None, typer.Option(help="Also write the report to this HTML file.")] = None,
    json: Json = False,
) -> None:
    """Measure latency, tokens per second, memory and disk size of backends and variants, and how near each is to this
    machine's limit. Each runs in a process of its own, in turns. docs/bench.md explains every figure.

    With --backend trt, the default sizes are those of the plans.
    """
    from ..base.files import check_writable, write_output
    from ..bench import BenchPlan, make_points, run_benchmark, usual_points
    from ..bundle.manifest import open_bundle
    from ..check import asked_engines
    from ..engines import threads_each

    lists = {"batch": batch, "beam": beam, "src-len": src_len, "new-tokens": new_tokens}
    sizes = {option: numbers(option, text) for option, text in lists.items() if text is not None}
    if html:
        from ..bench.page import bench_page

        check_writable(html, [src])
    opened = open_bundle(bundle)
    opened.require_decoder()
    engines = tuple(asked_engines(opened, backend or ["ort"], variant or [], device=device, shortlist=shortlist))
    plan = BenchPlan(
        bundle=bundle,
        engines=engines,
        points=make_points(sizes) if sizes else usual_points(engines, opened),
        threads=threads_each(threads, workers),
        workers=workers,
        rounds=rounds,
        seconds=seconds,
        checkpoint=checkpoint,
        src=src,
        max_tokens=max_tokens,
        profile=profile,
        shortlist=shortlist,
    )
    try:
        with progress("bench", plan.turns) as advance:
            report = run_benchmark(plan, opened, advance)
    except KeyboardInterrupt:
        raise Interrupted("the benchmark did not end, so it has no report") from None
    emit(report.to_json(), json, str(report))
    if html:
        write_output(html, bench_page(report))


def numbers(option: str, text: str) -> list[int]:
    """Whole numbers separated by commas, without repetitions. Raises ConfigError."""
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--{option} {text:.40}: write whole numbers with commas, as in 1,8,32") from None
    if min(sizes) < 1:
        raise ConfigError(f"--{option} {text:.40}: every number must be at least 1")
    return list(dict.fromkeys(sizes))
