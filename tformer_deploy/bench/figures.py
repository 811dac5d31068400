"""Plots of the benchmark's page: time by kind of node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib as mpl
from markupsafe import Markup

from ..base.pages.figures import ENGINE_COLOURS, INK, PLOTTED_KINDS, STYLE, WIDE_PX, as_svg, new_axes
from ..base.pages.page import page_text
from .report import NodeKind, figure


def kind_plot(kinds: Mapping[int, Sequence[NodeKind]]) -> Markup:
    """One graph's nodes: a row a kind, a bar an engine; kinds by the engines' numbers."""
    times = {n: {kind.kind: kind.ms for kind in found} for n, found in kinds.items()}
    longest = {name: max(each.get(name, 0.0) for each in times.values()) for each in times.values() for name in each}
    names = sorted(longest, key=lambda name: -longest[name])[:PLOTTED_KINDS]
    with mpl.rc_context({**STYLE, "axes.grid.axis": "x", "ytick.major.size": 0}):
        plot, axes = new_axes(WIDE_PX, 12 * len(names) * (len(times) + 0.5) + 60)
        for place, (n, found) in enumerate(times.items()):
            values = [found.get(name, 0.0) for name in names]
            rows = [row + (place + 0.5) / (len(times) + 0.5) for row in range(len(names))]
            bars = axes.barh(rows, values, 0.9 / (len(times) + 0.5), color=INK[f"c{n % ENGINE_COLOURS}"])
            axes.bar_label(bars, [figure(value) for value in values], padding=4, size=10)
        middle = 0.5 * len(times) / (len(times) + 0.5)
        axes.set_yticks([row + middle for row in range(len(names))], [page_text(name) for name in names])
        axes.set(ylim=(len(names), -0.1), xlabel="ms")
        return as_svg(plot, "Time of each kind of node")
