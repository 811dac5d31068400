"""Measures a bundle's engines: time, memory and disk, and how near they are to the machine's limit.

In: a bundle and the engines to measure, each in a process of its own, in turns. Out: a report, as text, JSON or a page.
`cli` uses it.
"""

from .plan import BenchPlan, Point, make_points, usual_points
from .report import BenchReport
from .turns import run_benchmark

__all__ = ["BenchPlan", "BenchReport", "Point", "make_points", "run_benchmark", "usual_points"]
