"""Plots of the check's page: differences by layer and by step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import matplotlib as mpl
from markupsafe import Markup

from ..base.pages.figures import INK, MARKED_POINTS, ROW_PX, STYLE, WIDE_PX, Decades, as_svg, new_axes, new_figure
from ..base.pages.page import limit_text, page_text, short_number
from .report import EngineReport
from .results import StepDifference


def layer_plot(engine: EngineReport) -> Markup:
    """A row a layer, in the order of computation."""
    limits = {"encoder": engine.tolerance.encoder, "decoder": engine.tolerance.scores}
    scale = Decades([*(layer.difference for layer in engine.layers), *limits.values()])
    with mpl.rc_context({**STYLE, "axes.grid.axis": "x", "ytick.major.size": 0}):
        plot, axes = new_axes(WIDE_PX, ROW_PX * len(engine.layers) + 80)
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
        return as_svg(plot, "Difference of every layer")


def step_plot(steps: Sequence[StepDifference], limit: float) -> Markup:
    """Largest and mean difference of every position, and below how many sentences reach it."""
    scale = Decades([value for step in steps for value in (step.largest, step.mean, limit)])
    across = range(1, len(steps) + 1)
    with mpl.rc_context({**STYLE, "axes.grid.axis": "y"}):
        plot = new_figure(WIDE_PX, 340)
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
        return as_svg(plot, "Difference of every step")
