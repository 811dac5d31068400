"""What the lowering knows of a value that is more, or less, than columns of numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .instructions import Constant, View


@dataclass(frozen=True)
class Rows:
    """Rows of a table, not yet looked up, times a number."""

    ids: str
    table: Constant
    scales: Constant | None = None
    factor: float = 1.0

    def scales_of(self, other: Rows) -> bool:
        """Whether these are a number for each row of another table, of integers."""
        return self.ids == other.ids and other.table.array.dtype == np.int8 and self.table.array.shape[1] == 1


@dataclass(frozen=True)
class Positions:
    """Rows of a table by the position of each token."""

    table: Constant


@dataclass(frozen=True)
class Heads:
    """A value seen as (batch, tokens, heads, size), or `turned` as (batch, heads, tokens, size)."""

    view: View
    heads: int
    turned: bool = False


@dataclass(frozen=True)
class Rounded:
    """A value in 8 bits, and what makes it numbers again."""

    view: View
    step: float
    zero: int


@dataclass(frozen=True)
class Activated:
    """The part of an activation that is multiplied with its input."""

    view: View
    slope: float
