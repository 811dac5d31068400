"""A student of a teacher, in one call: distilled text, training, a checked bundle, and a report of both.

In: a teacher and text. Out: a folder with what each step made, which the same call continues.
`cli` uses it.
"""

from .report import StudentReport
from .steps import StudentOptions, make_student

__all__ = ["StudentOptions", "StudentReport", "make_student"]
