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

from .fonts import no_fonts_at_home
from .page import page_text

with no_fonts_at_home():
    import matplotlib as mpl
    from matplotlib.figure import Figure

ENGINE_COLOURS = 6
"""Colours c0, c1 and so on of the style sheet; further engines start again at c0."""
VARIABLES = ("text", "muted", "line", "counts", "mean", "bad", "encoder", "decoder", "bg")
INK = {name: f"#ab{n:04x}" for n, name in enumerate([*VARIABLES, *(f"c{n}" for n in range(ENGINE_COLOURS))])}
"""Variable of the style sheet → the placeholder colour that it replaces in a plot."""
WIDE_PX, HALF_PX, ROW_PX = 1000, 480, 18
"""Width of a plot, of one of two side by side, and height of a row."""
MAX_TICKS, MARKED_POINTS, PLOTTED_KINDS = 7, 60, 12
"""What fits legibly: ticks of an axis, points with a mark each, kinds of nodes."""
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
"""Parts of matplotlib's SVG that the style sheet replaces, or that only take space."""
_salts = count()


class Decades:
    """A logarithmic axis, with a place for 0 below and one for NaN and infinity above if they occur."""

    def __init__(self, values: Iterable[float]) -> None:
        every = list(values)
        logs = [math.log10(value) for value in every if math.isfinite(value) and value > 0] or [-8.0, -4.0]
        self.low, self.high = math.floor(min(logs)), max(math.ceil(max(logs)), math.floor(min(logs)) + 1)
        self.stride = math.ceil((self.high - self.low) / (MAX_TICKS - 1))
        self.zero = any(value <= 0 for value in every)
        self.endless = "NaN" if any(map(math.isnan, every)) else "∞" if any(map(math.isinf, every)) else ""

    def at(self, value: float) -> float:
        """Position of a value, in decades."""
        if not math.isfinite(value):
            return self.high + self.stride
        return math.log10(value) if value > 0 else self.low - self.stride

    def ticks(self) -> dict[str, float]:
        """Label → position."""
        found = {f"1e{n}": float(n) for n in range(self.low, self.high + 1, self.stride)}
        ends = {"0": self.at(0.0)} if self.zero else {}
        return {**ends, **found, **({self.endless: self.at(math.inf)} if self.endless else {})}


def line_plot(title: str, across: str, lines: Mapping[str, Sequence[tuple[float, float]]], log: bool) -> Markup:
    """A line for each engine, in the order of their colours; `log`: the horizontal axis is logarithmic."""
    with mpl.rc_context(STYLE):
        plot, axes = new_axes(HALF_PX, 260)
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
        return as_svg(plot, f"{title} over {across}")


def new_figure(width_px: float, height_px: float) -> Figure:
    """An empty figure of so many pixels."""
    return Figure(figsize=(width_px / 72, height_px / 72), layout="constrained")


def new_axes(width_px: float, height_px: float) -> tuple[Figure, Any]:
    """A figure and its only axes."""
    plot = new_figure(width_px, height_px)
    return plot, plot.subplots()


def as_svg(plot: Figure, label: str) -> Markup:
    """The figure as an SVG element; `label`: for screen readers."""
    file = io.StringIO()
    # A salt makes ids unique on a page. The browser finds letters that the font lacks, so no warnings.
    with mpl.rc_context({"svg.hashsalt": str(next(_salts))}), warnings.catch_warnings(action="ignore"):
        plot.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    inside = file.getvalue().partition("<svg")[2].partition(">")[2]
    box = f"0 0 {72 * plot.get_figwidth():g} {72 * plot.get_figheight():g}"
    start = Markup('<svg viewBox="{}" role="img" aria-label="{}">').format(box, page_text(label))
    inside = re.sub(r' (d|x|y)="[^"]*"', lambda place: re.sub(r"(\.\d\d)\d+", r"\1", place[0]), inside)
    text = start + Markup(_NOISE.sub("", inside))
    for name, colour in INK.items():
        text = text.replace(f": {colour}", f": var(--{name})")
    return Markup(text)
