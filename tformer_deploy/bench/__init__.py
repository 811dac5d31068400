"""What a bundle's engines cost: time, memory and disk, and how near they come to what the machine can do.

In: a bundle and the engines to measure, each in a process of its own, in turns. Out: a report, as text, JSON or a page.
`cli` uses it.
"""

from .plan import BenchPlan, Point, make_points, usual_points
from .report import BenchReport
from .turns import run_benchmark

__all__ = ["BenchPlan", "BenchReport", "Point", "make_points", "run_benchmark", "usual_points"]
