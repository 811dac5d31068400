"""The plots of a parity report's page, as inline SVG.

Positions across are percentages of the width, so that a plot fits a phone and its letters stay readable.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..recipe import Tolerance
from .markup import Html, limit_text, note, number, tag
from .report import EngineReport, Layer, StepDifference

MAX_TICKS = 7
ROW_PX, PLOT_PX, COUNTS_PX = 18, 220, 44


@dataclass(frozen=True)
class LogScale:
    """Whole decades, with a place for 0 below and one for NaN and infinity above where they occur."""

    low: int
    high: int
    """Exponents of the first and the last decade."""
    zero: bool
    endless: str
    """How that place is labelled."""

    @classmethod
    def over(cls, values: Iterable[float]) -> LogScale:
        """The scale that shows all of the values."""
        every = list(values)
        logs = [math.log10(value) for value in every if math.isfinite(value) and value > 0] or [-8.0, -4.0]
        low, high = math.floor(min(logs)), math.ceil(max(logs))
        endless = "NaN" if any(map(math.isnan, every)) else "∞" if any(map(math.isinf, every)) else ""
        return cls(low, max(high, low + 1), any(value <= 0 for value in every), endless)

    @property
    def stride(self) -> int:
        """Decades between two labels."""
        return math.ceil((self.high - self.low) / (MAX_TICKS - 1))

    def at(self, value: float) -> float:
        """Where a value lies, from 0 to 1."""
        edge = 0.8 * self.stride
        size = self.high - self.low + edge * (self.zero + bool(self.endless))
        if not math.isfinite(value):
            return 1.0
        return (edge * self.zero + math.log10(value) - self.low) / size if value > 0 else 0.0

    def ticks(self) -> list[tuple[float, str]]:
        """Places and labels."""
        found = [(self.at(10.0**n), f"1e{n}") for n in range(self.low, self.high + 1, self.stride)]
        return [*[(0.0, "0")] * self.zero, *found, *[(1.0, self.endless)] * bool(self.endless)]


def percent(part: float) -> str:
    """For a position across."""
    return f"{100 * part:.2f}%"


def layer_plot(engine: EngineReport, tolerance: Tolerance) -> Html:
    """A row a layer, in the order of computation, encoder and decoder apart."""
    if not engine.layers:
        return note("No layer was compared.")
    limits = {"Encoder": tolerance.encoder, "Decoder": tolerance.scores}
    scale = LogScale.over([*(layer.difference for layer in engine.layers), *limits.values()])
    ticks = [
        # Every second label is left out on a phone.
        tag("text", label, x=percent(x), y=13, text_anchor="middle", class_="odd" if n % 2 else "")
        for n, (x, label) in enumerate(scale.ticks())
    ]
    axis = tag("svg", *ticks, width="100%", height=ROW_PX, role="img", aria_label="logarithmic axis")
    names = (("Layer", ""), (axis, "plot"), ("Difference", ""), ("Eager's largest", "wide"))
    head = tag("thead", tag("tr", *(tag("th", name, class_=mark, scope="col") for name, mark in names)))
    rows, part, blamed = [], "", engine.blame.rsplit(", ", 1)[-1]
    for layer in engine.layers:
        here = "Encoder" if layer.name.startswith(("encoder", "memory", "cross_")) else "Decoder"
        if here != part:
            rows.append(tag("tr", tag("th", here, colspan=4, scope="rowgroup", class_=here.lower())))
        part, first = here, layer.name == blamed
        # Only what leaves a graph is held to a limit, so a layer on the way is no alarm where the engine passed.
        over = not engine.passed and not layer.difference <= limits[here]
        cells = (
            tag("th", "▸ " if first else "", layer.name, scope="row", class_="bad" if first else ""),
            tag("td", _layer_row(layer, limits[here], scale, "over" if over else here.lower()), class_="plot"),
            tag("td", number(layer.difference), class_="bad" if over else ""),
            tag("td", number(layer.largest), class_="wide"),
        )
        rows.append(tag("tr", *cells))
    told = "Largest absolute difference of one sentence, eager's tokens fed, in the order of computation."
    encoder, scores = map(limit_text, limits.values())
    keys = [("limit", f"limit of what leaves the graphs: cross_k, cross_v {encoder}, log_probs {scores}")]
    keys += [("over", "beyond"), ("first", "▸ first difference")] if not engine.passed else []
    return tag("figure", note(told), _legend(keys), tag("table", head, tag("tbody", *rows), class_="layers"))


def _layer_row(layer: Layer, limit: float, scale: LogScale, mark: str) -> Html:
    """Dot and stem over the grid, all of one height, so that rows make one plot."""
    relative = layer.difference / layer.largest if layer.largest else math.nan
    told = (
        f"{layer.name}: difference {number(layer.difference)}, limit {limit_text(limit)}, "
        f"eager's largest value {number(layer.largest)}, ratio {number(relative)}"
    )
    x, y = percent(scale.at(layer.difference)), ROW_PX / 2
    grid = [tag("line", x1=percent(g), x2=percent(g), y1=0, y2=ROW_PX, class_="grid") for g, _ in scale.ticks()]
    bound = percent(scale.at(limit))
    drawn = (
        tag("title", told),
        tag("rect", width="100%", height=ROW_PX, class_="hit"),
        *grid,
        tag("line", x1=bound, x2=bound, y1=0, y2=ROW_PX, class_="limit"),
        tag("line", x1=0, x2=x, y1=y, y2=y, class_=f"stem {mark}"),
        tag("circle", cx=x, cy=y, r=4.5, class_=f"dot {mark}" + " hollow" * (layer.difference == 0)),
    )
    return tag("svg", *drawn, width="100%", height=ROW_PX, role="img", aria_label=told)


def step_plot(steps: Sequence[StepDifference], limit: float) -> Html:
    """Largest and mean difference of every position, and below how many sentences reach it."""
    if not steps:
        return note("No step was compared.")
    scale = LogScale.over([value for step in steps for value in (step.largest, step.mean, limit)])
    labels, grid = [], []
    for part, label in scale.ticks():
        y = _height(part)
        labels.append(tag("text", label, x="100%", y=f"{y + 4:.1f}", text_anchor="end"))
        grid.append(tag("line", x1=0, x2="100%", y1=f"{y:.1f}", y2=f"{y:.1f}", class_="grid"))
    most, bottom = max(1, *(step.sentences for step in steps)), PLOT_PX + COUNTS_PX
    labels += [
        tag("text", f"{most:,}", x="100%", y=PLOT_PX + 10, text_anchor="end"),
        tag("text", "0", x="100%", y=bottom, text_anchor="end"),
    ]
    size = {"height": bottom + 20, "class_": "axis"}
    y = _height(scale.at(limit))
    line = tag("line", x1=0, x2="100%", y1=f"{y:.1f}", y2=f"{y:.1f}", class_="limit")
    drawn = [*grid, line, *_curve(steps, scale, limit, "mean"), *_curve(steps, scale, limit, "largest")]
    columns = [_column(steps, n, most, limit) for n in range(len(steps))]
    plot = tag("svg", *drawn, *columns, width="100%", role="img", aria_label="Difference of each step", **size)
    keys = (("largest", "largest"), ("mean", "mean"), ("limit", f"limit {limit_text(limit)}"), ("counts", "sentences"))
    told = "Absolute difference of the log-probabilities at each position of the target, eager's tokens fed."
    left = tag("svg", *labels, width="100%", aria_hidden="true", **size)
    return tag("figure", note(told), _legend(keys), tag("div", left, plot, class_="steps"))


def _height(part: float) -> float:
    """From the top, with room for dots at the edges."""
    return 8 + (PLOT_PX - 24) * (1 - part)


def _across(n: float, count: int) -> str:
    return percent((n + 0.5) / count)


def _curve(steps: Sequence[StepDifference], scale: LogScale, limit: float, name: str) -> list[Html]:
    """Lines between finite neighbours, and dots."""
    values: list[float] = [getattr(step, name) for step in steps]
    heights = [f"{_height(scale.at(value)):.1f}" for value in values]
    count, radius = len(steps), (3.5 if name == "largest" else 2.5) if len(steps) <= 60 else 1.5
    drawn = [
        tag("line", x1=_across(n - 1, count), x2=_across(n, count), y1=heights[n - 1], y2=heights[n], class_=name)
        for n in range(1, count)
        if math.isfinite(values[n - 1]) and math.isfinite(values[n])
    ]
    for n, value in enumerate(values):
        mark = f"dot {name}" + " hollow" * (value == 0) + " over" * (not value <= limit)
        drawn.append(tag("circle", cx=_across(n, count), cy=heights[n], r=radius, class_=mark))
    return drawn


def _column(steps: Sequence[StepDifference], n: int, most: int, limit: float) -> Html:
    """All of a step that is not a curve: bar, label, tooltip."""
    step, count, bottom = steps[n], len(steps), PLOT_PX + COUNTS_PX
    told = (
        f"step {n + 1}: largest {number(step.largest)}, mean {number(step.mean)}, limit {limit_text(limit)}, "
        f"{step.sentences:,} sentences"
    )
    tall = max(1.0, (COUNTS_PX - 4) * step.sentences / most) if step.sentences else 0.0
    every = next(size * 10**power for power in range(9) for size in (1, 2, 5) if count / (size * 10**power) <= 10)
    label = (n + 1) % every == 0 or n == 0
    bar, width = percent((n + 0.15) / count), percent(1 / count)
    return tag(
        "g",
        tag("title", told),
        tag("rect", x=bar, width=percent(0.7 / count), y=f"{bottom - tall:.1f}", height=f"{tall:.1f}", class_="counts"),
        tag("text", n + 1, x=_across(n, count), y=bottom + 15, text_anchor="middle") if label else "",
        tag("rect", x=percent(n / count), width=width, height=bottom, class_="hit"),
    )


def _legend(keys: Iterable[tuple[str, str]]) -> Html:
    return tag("p", *(tag("span", tag("i", class_=mark), text) for mark, text in keys), class_="legend")
