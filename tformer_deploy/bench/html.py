"""The page of a benchmark: one HTML file that needs no network, no script and no other file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

from ..check.markup import CSS, Html, note, tag
from . import plots
from .plots import Line, kind_plot, legend, line_plot
from .report import (
    CORPUS_HEAD,
    ENGINE_HEAD,
    POINT_HEAD,
    PointReport,
    Report,
    corpus_row,
    describe_ceiling,
    engine_row,
    point_row,
)

POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def render(report: Report) -> str:
    """The whole page."""
    names = [engine.engine for engine in report.engines]
    body = [_head(report, names), *_growth(report, names), _points(report), *_kinds(report, names), _about(report)]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"{tag('title', 'Benchmark: ' + ', '.join(names))}\n<style>{CSS}{plots.CSS}</style>\n</head>\n"
        f"{tag('body', tag('main', *body))}\n</html>\n"
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Html:
    """The first column holds the rows' names."""
    lines = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    top = tag("thead", tag("tr", *(tag("th", name, scope="col") for name in head)))
    return tag("div", tag("table", top, tag("tbody", *lines), class_="figures"), class_="scroll")


def _head(report: Report, names: Sequence[str]) -> Html:
    """Machine, engines, text."""
    parts = [
        tag("p", "Benchmark", class_="eyebrow"),
        tag("h1", report.machine["processor"]),
        note(
            f"Workers: {report.workers}, threads of each: {report.threads}. The engines took turns in {report.rounds} "
            f"rounds, each in a process of its own while the others stood still."
        ),
        note(describe_ceiling(report.ceiling)) if report.ceiling else "",
        *map(note, report.notes),
        tag("h3", "Engines"),
        _table(ENGINE_HEAD, map(engine_row, report.engines)),
        legend(names),
    ]
    if report.corpus:
        parts += [tag("h3", report.corpus_name), _table(CORPUS_HEAD, map(corpus_row, report.corpus))]
        parts.append(note(f"One at a time: {report.corpus[0].singles} lines from all parts of the text."))
    return tag("header", *parts)


def _growth(report: Report, names: Sequence[str]) -> list[Html]:
    """How costs grow with the cache, the output and the batch."""
    longest = max(found.point.new_tokens for found in report.points)
    drawn = []
    for where, group in _groups(report.points, "batch", "beams", "src_len"):
        lines = [_steps(found, names) for found in group if found.point.new_tokens == longest > 1]
        if lines:
            drawn.append(line_plot(f"ms per step, {where}", "cache length", lines))
    grown: list[tuple[str, str, Callable[[PointReport], float], str]] = [
        ("new_tokens", "output tokens", lambda found: found.latency_ms.p50, "latency ms"),
        ("batch", "sentences of a batch", lambda found: found.tokens_per_s, "tokens/s"),
    ]
    for axis, across, value, title in grown:
        fixed = [name for name in ("batch", "beams", "src_len", "new_tokens") if name != axis]
        for where, group in _groups(report.points, *fixed):
            lines = [
                Line(name, n, sorted((getattr(f.point, axis), value(f)) for f in group if f.engine == name))
                for n, name in enumerate(names)
            ]
            if len(lines[0].points) > 1:
                drawn.append(line_plot(f"{title}, {where}", across, lines, log=True))
    return (
        [tag("section", tag("h2", "Costs of growth"), legend(names), tag("div", *drawn, class_="plots"))]
        if drawn
        else []
    )


def _groups(points: Sequence[PointReport], *fields: str) -> list[tuple[str, list[PointReport]]]:
    """Points that agree in some sizes, with a title."""

    def key(found: PointReport) -> tuple[int, ...]:
        return tuple(getattr(found.point, field) for field in fields)

    return [
        (", ".join(f"{field.replace('_', ' ')} {size}" for field, size in zip(fields, sizes, strict=True)), list(group))
        for sizes, group in groupby(sorted(points, key=key), key)
    ]


def _steps(found: PointReport, names: Sequence[str]) -> Line:
    """The first step is left out: it has a row a sentence, whatever the beam."""
    return Line(found.engine, names.index(found.engine), list(enumerate(found.steps_ms))[1:])


def _points(report: Report) -> Html:
    parts: list[Any] = [tag("h2", "Points")]
    for point, group in groupby(report.points, key=lambda found: found.point):
        parts += [tag("h3", str(point)), _table(POINT_HEAD, map(point_row, group))]
    return tag("section", *parts)


def _kinds(report: Report, names: Sequence[str]) -> list[Html]:
    """Where the time inside the graphs goes."""
    parts: list[Html] = []
    for point, group in groupby(report.points, key=lambda found: found.point):
        profiled = [found for found in group if found.kinds]
        for graph in dict.fromkeys(kind.graph for found in profiled for kind in found.kinds):
            bars = [
                (names.index(found.engine), found.engine, [kind for kind in found.kinds if kind.graph == graph])
                for found in profiled
            ]
            parts += [tag("h3", f"{graph}, {point}"), kind_plot(bars)]
    if not parts:
        return []
    told = note("Milliseconds of one call, from ONNX Runtime's profiler, which itself takes time.")
    return [tag("section", tag("h2", "Time per kind of node"), told, legend(names), *parts)]


def _about(report: Report) -> Html:
    return tag("section", tag("h2", "Machine and versions"), _table(("", ""), list(report.machine.items())))
