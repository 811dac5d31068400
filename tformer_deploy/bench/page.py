"""The report of a benchmark as an HTML page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

from markupsafe import Markup

from ..base.pages.figures import ENGINE_COLOURS, line_plot
from ..base.pages.page import Table, render_page
from .figures import kind_plot
from .report import (
    CORPUS_HEAD,
    ENGINE_HEAD,
    POINT_HEAD,
    BenchReport,
    PointReport,
    corpus_row,
    describe_ceiling,
    describe_device,
    engine_row,
    figure,
    point_row,
    without_empty,
)


def bench_page(report: BenchReport) -> str:
    """The whole page."""
    names = [engine.engine for engine in report.engines]
    devices = [describe_device(engine) for engine in report.engines if engine.device]
    restricted = [f"Steps score only what {report.shortlist} has for a source."] if report.shortlist else []
    singles = [f"One at a time: {found.singles} lines from all parts of the text." for found in report.corpus[:1]]
    return render_page(
        "bench.html",
        report=report,
        legend=[(f"c{n % ENGINE_COLOURS}", name) for n, name in enumerate(names)],
        notes=[*([describe_ceiling(report.ceiling)] if report.ceiling else []), *restricted, *report.notes, *devices],
        engines=Table("Engines", ENGINE_HEAD, [*map(engine_row, report.engines)]),
        corpus=Table(report.corpus_name, CORPUS_HEAD, [*map(corpus_row, report.corpus)], singles),
        growth=[*growth(report.points, names)],
        points=[
            compact(str(point), POINT_HEAD, [*map(point_row, found)])
            for point, found in groupby(report.points, lambda found: found.point)
        ],
        kinds=[*kinds(report.points, names)],
        machine=Table("", ("", ""), [*report.machine.items()]),
    )


def compact(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table without its empty columns."""
    first, *others = without_empty(head, rows)
    return Table(title, first, others)


def growth(points: Sequence[PointReport], names: Sequence[str]) -> Iterator[tuple[Markup, Table]]:
    """Plots and values: how costs grow with the cache, the output and the batch."""
    longest = max(found.point.new_tokens for found in points)
    for where, group in group_points(points, "batch", "beams", "src_len"):
        whole = [found for found in group if found.point.new_tokens == longest > 1]
        # Without the first step, which has one row for each sentence, whatever the beam.
        if lines := {found.engine: [*enumerate(found.steps_ms)][1:] for found in whole}:
            yield drawn(f"ms per step, {where}", "cache length", {name: lines.get(name, []) for name in names})
    grown: list[tuple[str, str, Callable[[PointReport], float], str]] = [
        ("new_tokens", "output tokens", lambda found: found.latency_ms.p50, "latency ms"),
        ("batch", "sentences of a batch", lambda found: found.tokens_per_s, "tokens/s"),
    ]
    for axis, across, value, title in grown:
        fixed = [name for name in ("batch", "beams", "src_len", "new_tokens") if name != axis]
        for where, group in group_points(points, *fixed):
            lines = {n: sorted((getattr(f.point, axis), value(f)) for f in group if f.engine == n) for n in names}
            if len(lines[names[0]]) > 1:
                yield drawn(f"{title}, {where}", across, lines, log=True)


def drawn(
    title: str, across: str, lines: Mapping[str, Sequence[tuple[float, float]]], log: bool = False
) -> tuple[Markup, Table]:
    """A plot with a line for each engine, and its values as a table."""
    values = [dict(points) for points in lines.values()]
    rows = [
        [f"{x:g}", *(figure(each[x]) if x in each else "-" for each in values)]
        for x in sorted({x for each in values for x in each})
    ]
    return line_plot(title, across, lines, log), Table("", (across, *lines), rows, shown=0, folded="Values")


def group_points(points: Sequence[PointReport], *fields: str) -> Iterator[tuple[str, list[PointReport]]]:
    """Groups of points with equal sizes in some fields, each with a title."""

    def key(found: PointReport) -> tuple[int, ...]:
        return tuple(getattr(found.point, field) for field in fields)

    for sizes, group in groupby(sorted(points, key=key), key):
        named = (f"{field.replace('_', ' ')} {size}" for field, size in zip(fields, sizes, strict=True))
        yield ", ".join(named), list(group)


def kinds(points: Sequence[PointReport], names: Sequence[str]) -> Iterator[tuple[str, Markup]]:
    """Where the time inside the graphs goes: a title and a plot for every graph at every point."""
    for point, group in groupby(points, lambda found: found.point):
        own = {names.index(found.engine): found.kinds for found in group if found.kinds}
        for graph in dict.fromkeys(kind.graph for found in own.values() for kind in found):
            of_graph = {n: [kind for kind in found if kind.graph == graph] for n, found in own.items()}
            yield f"{graph}, {point}", kind_plot(of_graph)
