"""The plots of a benchmark's page, as inline SVG. Positions across are percentages, so that a plot fits a phone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..check.markup import Html, note, tag
from ..check.plots import percent
from .report import NodeKind, figure

PLOT_PX, EDGE_PX, LABEL_PX, BAR_PX = 200, 8, 18, 9
COLOURS = 6
"""Classes c0, c1 and so on of the style sheet; further engines begin again."""
TICKS = 5
SHOWN_KINDS = 12
CSS = """
:root { --c0: #2262c6; --c1: #c25a00; --c2: #13702f; --c3: #8339c2; --c4: #b3206f; --c5: #57606a; }
@media screen and (prefers-color-scheme: dark) { :root {
  --c0: #6ea8fe; --c1: #ffa657; --c2: #5fd07f; --c3: #cc9dff; --c4: #ff8cc6; --c5: #a0a9b4; } }
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); }
.c3 { color: var(--c3); } .c4 { color: var(--c4); } .c5 { color: var(--c5); }
line.curve { stroke: currentColor; stroke-width: 2; }
circle.curve, rect.bar { fill: currentColor; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 20px 36px; }
.plots h4 { margin: 0; font-size: 14px; }
.kinds { width: 100%; margin: 6px 0 20px; }
.kinds .plot { width: 60%; }
.kinds td, .kinds th { padding: 3px 10px 3px 0; white-space: nowrap; }
"""


@dataclass(frozen=True)
class Line:
    """The values of one engine."""

    name: str
    colour: int
    points: Sequence[tuple[float, float]]


def colour(number: int) -> str:
    """The class of an engine's colour."""
    return f"c{number % COLOURS}"


def legend(names: Sequence[str]) -> Html:
    """Engines and their colours."""
    return tag("p", *(tag("span", tag("i", class_=colour(n)), name) for n, name in enumerate(names)), class_="legend")


def ticks(top: float) -> list[float]:
    """Round numbers from 0 to at least `top`."""
    top = top or 1.0
    unit = 10.0 ** math.floor(math.log10(top))
    step = next(step for part in (0.1, 0.2, 0.5, 1, 2, 5) if (step := unit * part) * TICKS >= top)
    return [n * step for n in range(math.ceil(top / step - 1e-9) + 1)]


def line_plot(title: str, across: str, lines: Sequence[Line], log: bool = False) -> Html:
    """Values over a linear axis from 0, or over a logarithmic one."""
    values = [value for line in lines for value in line.points]
    left, right = min(x for x, _ in values), max(x for x, _ in values)
    heights = ticks(max(y for _, y in values))

    def place(x: float, y: float) -> tuple[str, str]:
        low, high, here = (math.log2(v) if log else v for v in (left if log else 0, right, x))
        part = (here - low) / (high - low) if high > low else 0.5
        return percent(0.02 + 0.95 * part), f"{EDGE_PX + PLOT_PX * (1 - y / heights[-1]):.1f}"

    size = {"width": "100%", "height": PLOT_PX + EDGE_PX + LABEL_PX}
    named = sorted({x for x, _ in values}) if log else [x for x in ticks(right) if x <= right]
    labels, drawn = [], []
    for y in heights:
        at = place(right, y)[1]
        labels.append(tag("text", f"{y:g}", x="100%", y=f"{float(at) + 4:.1f}", text_anchor="end"))
        drawn.append(tag("line", x1=0, x2="100%", y1=at, y2=at, class_="grid"))
    bottom = PLOT_PX + EDGE_PX + LABEL_PX - 2
    drawn += [tag("text", f"{x:g}", x=place(x, 0)[0], y=bottom, text_anchor="middle") for x in named]
    for line in lines:
        places = [place(x, y) for x, y in line.points]
        mark = f"curve {colour(line.colour)}"
        for (x1, y1), (x2, y2) in pairwise(places):
            drawn.append(tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=mark))
        for (x, y), (at, height) in zip(line.points, places, strict=True):
            told = tag("title", f"{line.name}, {across} {x:g}: {figure(y)}")
            drawn.append(tag("circle", told, cx=at, cy=height, r=3 if len(places) <= 40 else 1.5, class_=mark))
    plot = tag("svg", *drawn, role="img", aria_label=f"{title} over {across}", **size)
    axis = tag("svg", *labels, aria_hidden="true", **size)
    return tag("figure", tag("h4", title), tag("div", axis, plot, class_="steps"), note(f"over {across}"))


def kind_plot(engines: Sequence[tuple[int, str, Sequence[NodeKind]]]) -> Html:
    """One graph's nodes: a row a kind, a bar an engine; engines as (number, name, kinds)."""
    times = {name: {kind.kind: kind.ms for kind in kinds} for _, name, kinds in engines}
    kinds = sorted(
        {kind for each in times.values() for kind in each}, key=lambda k: -max(t.get(k, 0) for t in times.values())
    )
    longest = max((ms for each in times.values() for ms in each.values()), default=0) or 1.0
    rows = []
    for kind in kinds[:SHOWN_KINDS]:
        bars = []
        for row, (number, name, _) in enumerate(engines):
            width = percent(times[name].get(kind, 0) / longest)
            bars.append(
                tag("rect", x=0, y=row * BAR_PX, width=width, height=BAR_PX - 1, class_=f"bar {colour(number)}")
            )
        plot = tag("svg", *bars, width="100%", height=BAR_PX * len(engines), role="img", aria_label=kind)
        cells = (tag("td", figure(times[name].get(kind, 0.0))) for _, name, _ in engines)
        rows.append(tag("tr", tag("th", kind, scope="row"), tag("td", plot, class_="plot"), *cells))
    names = ("Node", "", *(f"{name}, ms" for _, name, _ in engines))
    head = tag("thead", tag("tr", *(tag("th", name, scope="col") for name in names)))
    return tag("table", head, tag("tbody", *rows), class_="kinds")
