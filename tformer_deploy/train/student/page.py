"""The report of a student as an HTML page."""

from __future__ import annotations

from ...base.pages.figures import line_plot
from ...base.pages.page import Table, render_page
from ...bench.report import without_empty
from ..metrics import FINAL
from .report import StudentReport

CURVES = {
    "loss per target token": {"training": ("loss", 1.0), "validation": ("valid_loss", 1.0)},
    "validation outputs, 0 to 100": {"BLEU": ("bleu", 1.0), "chrF": ("chrf", 1.0), "exact": ("exact_match", 100.0)},
}


def student_page(report: StudentReport) -> str:
    """The whole page."""
    plots = []
    shown = [row for row in report.metrics if not row.keys() & FINAL]
    for title, curves in CURVES.items():
        found = {
            label: [(row["update"], scale * row[name]) for row in shown if name in row]
            for label, (name, scale) in curves.items()
        }
        lines = {label: points for label, points in found.items() if points}
        if lines:
            legend = [(f"c{n}", label) for n, label in enumerate(lines)]
            plots.append((legend, line_plot(title, "update", lines, False)))
    distilled = report.distillation
    counts = [(reason, f"{count:,}") for reason, count in distilled["left_out"].items()]
    tables = []
    for title, head, rows in report.tables():
        first, *others = without_empty(head, rows)
        tables.append(Table(title, first, others))
    return render_page(
        "student.html",
        report=report,
        tables=tables,
        distillation=Table("", ("left out", "lines"), counts),
        plots=plots,
        machine=Table("", ("", ""), [*report.machine.items()]),
    )
