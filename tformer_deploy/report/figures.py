"""Plots as inline SVG by matplotlib. Colours are the style sheet's variables, so that they follow light and dark."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

from markupsafe import Markup

from ..bench.report import NodeKind, figure
from ..check.found import StepDifference
from ..check.report import EngineReport
from ..fonts import no_fonts_at_home
from .page import limit_text, page_text, short_number

with no_fonts_at_home():
    import matplotlib as mpl
    from matplotlib.figure import Figure

ENGINE_COLOURS = 6
"""c0, c1 and so on of the style sheet; further engines begin again."""
VARIABLES = ("text", "muted", "line", "counts", "mean", "bad", "encoder", "decoder", "bg")
INK = {name: f"#ab{n:04x}" for n, name in enumerate([*VARIABLES, *(f"c{n}" for n in range(ENGINE_COLOURS))])}
"""Placeholders, by the variable of the style sheet that takes their place."""
WIDE_PX, HALF_PX, ROW_PX = 1000, 480, 18
MAX_TICKS, MARKED_POINTS, PLOTTED_KINDS = 7, 60, 12
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # letters stay text
    "text.parse_math": False,
    "font.size": 12,
    "axes.titlesize": 13,
    "axes.titlelocation": "left",
    "axes.edgecolor": INK["line"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": INK["line"],
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    **dict.fromkeys(("text.color", "axes.titlecolor"), INK["text"]),
    **dict.fromkeys(("xtick.color", "ytick.color", "axes.labelcolor", "legend.labelcolor"), INK["muted"]),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
}
_NOISE = re.compile(
    r'font-family: [^;"]*;? ?|font-size: 12px;? ?|(?<=<g) id="[^"]*"| transform="rotate\(-0 [^"]*"'
    r"|<style.*?</style>|(?<=>)\s+(?=<)",
    re.DOTALL,
)
"""What the style sheet says, or nobody reads."""
_salts = count()


class Decades:
    """A logarithmic axis with a place for 0 below and one for NaN and infinity above, where they occur."""

    def __init__(self, values: Iterable[float]) -> None:
        every = list(values)
        logs = [math.log10(value) for value in every if math.isfinite(value) and value > 0] or [-8.0, -4.0]
        self.low, self.high = math.floor(min(logs)), max(math.ceil(max(logs)), math.floor(min(logs)) + 1)
        self.stride = math.ceil((self.high - self.low) / (MAX_TICKS - 1))
        self.zero = any(value <= 0 for value in every)
        self.endless = "NaN" if any(map(math.isnan, every)) else "∞" if any(map(math.isinf, every)) else ""

    def at(self, value: float) -> float:
        """Where a value lies, in decades."""
        if not math.isfinite(value):
            return self.high + self.stride
        return math.log10(value) if value > 0 else self.low - self.stride

    def ticks(self) -> dict[str, float]:
        """Places by their labels."""
        found = {f"1e{n}": float(n) for n in range(self.low, self.high + 1, self.stride)}
        ends = {"0": self.at(0.0)} if self.zero else {}
        return {**ends, **found, **({self.endless: self.at(math.inf)} if self.endless else {})}


def layer_plot(engine: EngineReport) -> Markup:
    """A row a layer, in the order of computation."""
    limits = {"encoder": engine.tolerance.encoder, "decoder": engine.tolerance.scores}
    scale = Decades([*(layer.difference for layer in engine.layers), *limits.values()])
    with mpl.rc_context({**STYLE, "axes.grid.axis": "x", "ytick.major.size": 0}):
        plot, axes = _axes(WIDE_PX, ROW_PX * len(engine.layers) + 80)
        left, blamed = min(scale.ticks().values()) - 0.1 * scale.stride, engine.blame.rsplit(", ", 1)[-1]
        names = [("▸ " if layer.name == blamed else "") + layer.name for layer in engine.layers]
        axes.set_yticks(range(len(names)), [page_text(name) for name in names])
        axes.set_xticks([*scale.ticks().values()], [*scale.ticks()])
        axes.set(xlim=(left, max(scale.ticks().values()) + 0.1 * scale.stride), ylim=(len(names) - 0.5, -0.5))
        right = axes.secondary_yaxis("right")
        found = [f"{short_number(layer.difference)} of {short_number(layer.largest)}" for layer in engine.layers]
        right.set_yticks(range(len(names)), found)
        figures = right.get_yticklabels()
        for y, (layer, label) in enumerate(zip(engine.layers, axes.get_yticklabels(), strict=True)):
            side = "encoder" if layer.name.startswith(("encoder", "memory", "cross_")) else "decoder"
            # Only what leaves a graph is held to a limit: a layer on the way is no alarm where the engine passed.
            over, x = not engine.passed and not layer.difference <= limits[side], scale.at(layer.difference)
            colour = INK["bad"] if over else INK[side]
            axes.hlines(y, left, x, colour, alpha=0.5)
            axes.plot(x, y, "o", color=colour, mfc=INK["bg"] if layer.difference == 0 else colour, clip_on=False)
            bound = scale.at(limits[side])
            axes.vlines(bound, y - 0.5, y + 0.5, INK["bad"], "dashed")
            figures[y].set(color=INK["bad" if over else "text"])
            if layer.name == blamed:
                label.set(color=INK["bad"], fontweight="bold")
        axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False)
        return _svg(plot, "Difference of every layer")


def step_plot(steps: Sequence[StepDifference], limit: float) -> Markup:
    """Largest and mean difference of every position, and below how many sentences reach it."""
    scale = Decades([value for step in steps for value in (step.largest, step.mean, limit)])
    across = range(1, len(steps) + 1)
    with mpl.rc_context({**STYLE, "axes.grid.axis": "y"}):
        plot = _figure(WIDE_PX, 340)
        axes, counts = plot.subplots(2, 1, sharex=True, height_ratios=(4, 1))
        axes.set_yticks([*scale.ticks().values()], [*scale.ticks()])
        axes.axhline(scale.at(limit), color=INK["bad"], ls="dashed", label=f"limit {limit_text(limit)}")
        for name, ink, size in (("mean", "mean", 3), ("largest", "encoder", 5)):
            values = [getattr(step, name) for step in steps]
            heights = [scale.at(value) for value in values]
            finite = [y if math.isfinite(value) else math.nan for y, value in zip(heights, values, strict=True)]
            marks = {"marker": "o", "ms": size} if len(steps) <= MARKED_POINTS else {}
            axes.plot(across, finite, color=INK[ink], label=name, **marks)
            beyond = [(x, y) for x, y, v in zip(across, heights, values, strict=True) if not v <= limit]
            if beyond:
                axes.plot(*zip(*beyond, strict=True), "o", color=INK["bad"], ms=size + 1)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, reverse=True)
        counts.bar(across, [step.sentences for step in steps], color=INK["counts"], width=0.7)
        counts.set(ylabel="sentences", xlabel="position", yticks=[0, max(1, *(step.sentences for step in steps))])
        counts.set_xlim(0.4, len(steps) + 0.6)
        return _svg(plot, "Difference of every step")


def line_plot(title: str, across: str, lines: Mapping[str, Sequence[tuple[float, float]]], log: bool) -> Markup:
    """Values of each engine over a linear axis, or over a logarithmic one; engines in the order of their colours."""
    with mpl.rc_context(STYLE):
        plot, axes = _axes(HALF_PX, 260)
        for n, points in enumerate(lines.values()):
            mark = "o" if len(points) <= MARKED_POINTS else ""
            axes.plot(
                *zip(*points, strict=True), color=INK[f"c{n % ENGINE_COLOURS}"], marker=mark, ms=4
            ) if points else None
        if log:
            named = sorted({x for points in lines.values() for x, _ in points})
            axes.set_xscale("log", base=2)
            axes.set_xticks(named, [f"{x:g}" for x in named])
        axes.set(title=title, xlabel=across)
        axes.set_ylim(bottom=0)
        return _svg(plot, f"{title} over {across}")


def kind_plot(kinds: Mapping[int, Sequence[NodeKind]]) -> Markup:
    """One graph's nodes: a row a kind, a bar an engine; kinds by the engines' numbers."""
    times = {n: {kind.kind: kind.ms for kind in found} for n, found in kinds.items()}
    longest = {name: max(each.get(name, 0.0) for each in times.values()) for each in times.values() for name in each}
    names = sorted(longest, key=lambda name: -longest[name])[:PLOTTED_KINDS]
    with mpl.rc_context({**STYLE, "axes.grid.axis": "x", "ytick.major.size": 0}):
        plot, axes = _axes(WIDE_PX, 12 * len(names) * (len(times) + 0.5) + 60)
        for place, (n, found) in enumerate(times.items()):
            values = [found.get(name, 0.0) for name in names]
            rows = [row + (place + 0.5) / (len(times) + 0.5) for row in range(len(names))]
            bars = axes.barh(rows, values, 0.9 / (len(times) + 0.5), color=INK[f"c{n % ENGINE_COLOURS}"])
            axes.bar_label(bars, [figure(value) for value in values], padding=4, size=10)
        middle = 0.5 * len(times) / (len(times) + 0.5)
        axes.set_yticks([row + middle for row in range(len(names))], [page_text(name) for name in names])
        axes.set(ylim=(len(names), -0.1), xlabel="ms")
        return _svg(plot, "Time of each kind of node")


def _figure(width_px: float, height_px: float) -> Figure:
    return Figure(figsize=(width_px / 72, height_px / 72), layout="constrained")


def _axes(width_px: float, height_px: float) -> tuple[Figure, Any]:
    plot = _figure(width_px, height_px)
    return plot, plot.subplots()


def _svg(plot: Figure, told: str) -> Markup:
    """The figure as an element of a page."""
    file = io.StringIO()
    # Names are unique on a page; a letter that the font lacks is the browser's to find.
    with mpl.rc_context({"svg.hashsalt": str(next(_salts))}), warnings.catch_warnings(action="ignore"):
        plot.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    inside = file.getvalue().partition("<svg")[2].partition(">")[2]
    box = f"0 0 {72 * plot.get_figwidth():g} {72 * plot.get_figheight():g}"
    start = Markup('<svg viewBox="{}" role="img" aria-label="{}">').format(box, page_text(told))
    inside = re.sub(r' (d|x|y)="[^"]*"', lambda place: re.sub(r"(\.\d\d)\d+", r"\1", place[0]), inside)
    text = start + Markup(_NOISE.sub("", inside))
    for name, colour in INK.items():
        text = text.replace(f": {colour}", f": var(--{name})")
    return Markup(text)
