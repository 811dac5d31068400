"""What the lowering knows of a value that is more, or less, than columns of numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..rewriting import made_by
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
class Limited:
    """A value whose numbers are at most `highest`."""

    view: View
    highest: float


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


@dataclass(frozen=True)
class Kept:
    """What a cell's gate keeps of the state before; `gate` is before its sigmoid."""

    gate: View
    layer: int


@dataclass(frozen=True)
class Forgotten:
    """One minus a cell's gate, and once known the value that it is multiplied with."""

    gate: View
    x: View | None = None


@dataclass(frozen=True)
class Replaced:
    """The new state of a layer's cell."""

    gate: View
    x: View
    layer: int


def layer_of_state(value: ir.Value | None) -> int | None:
    """The layer whose state a value is, of the rows that each row continues."""
    gathered = made_by(value, "Gather")
    past = gathered.inputs[0] if gathered is not None else None
    name = str(past.name) if past is not None and past.is_graph_input() else ""
    return int(name.removeprefix("past_c_")) if name.startswith("past_c_") else None
