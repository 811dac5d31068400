"""What a bundle's engines cost: time per point, memory, disk, and how near they come to what the machine can do."""

from .plan import Plan, Point, make_points, usual_points
from .report import Report
from .turns import run

__all__ = ["Plan", "Point", "Report", "make_points", "run", "usual_points"]
