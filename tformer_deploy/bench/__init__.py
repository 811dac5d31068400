"""What a bundle's engines cost: time per point, memory, disk, and how near they come to what the machine can do."""

from .plan import BenchPlan, Point, has_profile, make_points, usual_points
from .report import BenchReport
from .turns import run_benchmark

__all__ = ["BenchPlan", "BenchReport", "Point", "has_profile", "make_points", "run_benchmark", "usual_points"]
