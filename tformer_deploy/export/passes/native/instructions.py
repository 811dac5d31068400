"""Instructions of the C++ runtime's own engine, over values (rows, width)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ....bundle.origin import Origin
from ...quantizing import Array


@dataclass(frozen=True)
class View:
    """Columns of a value."""

    value: int
    first: int
    width: int


class Constant(NamedTuple):
    """An array of the weights."""

    name: str
    array: Array
    origin: Origin | None = None

    def part(self, first: int, count: int) -> Constant:
        """Some of its rows."""
        origin = self.origin and self.origin.part(first, first + count)
        name = origin.name if origin else f"{self.name}.{first}-{first + count}"
        return Constant(name, self.array[first : first + count], origin)


@dataclass(frozen=True)
class Matrix:
    """Weights (outputs, inputs), a row for each output."""

    origin: Origin
    kind: str
    """`fp32`, `bf16`, which is rounded when it is packed, `int8` or `int4`."""
    weight: Array
    """Numbers, or integers: of 8 bits (out, in), of groups 0 to 15 (out, groups, size)."""
    scales: Array | None = None
    """(out) of 8 bits, (out, groups) of groups."""
    inputs: int = 0
    group: int = 0

    @property
    def name(self) -> str:
        """Of its weights."""
        return self.origin.name

    def part(self, first: int, count: int) -> Matrix:
        """Some of its outputs."""
        rows = slice(first, first + count)
        scales = None if self.scales is None else self.scales[rows]
        return replace(self, origin=self.origin.part(first, rows.stop), weight=self.weight[rows], scales=scales)


@dataclass(frozen=True)
class Rounding:
    """How an input becomes 8 bits."""

    step: float
    zero: int
    shrink: Constant | None = None
    """What each channel is multiplied by first."""
    most: int = 255
    """The largest integer."""


@dataclass
class Instruction:
    """What the engine does at once."""

    op: str
    reads: dict[str, View] = field(default_factory=dict)
    out: int | None = None
    """The value that it writes, in fp32."""
    rounded: int | None = None
    """The value that it writes in 8 bits."""
    rounding: Rounding | None = None
    matrix: Matrix | None = None
    arrays: dict[str, Constant] = field(default_factory=dict)
    """What else it reads of the weights, by role."""
    how: dict[str, Any] = field(default_factory=dict)


@dataclass
class Program:
    """One graph's instructions and the width of each value that they write."""

    widths: list[int]
    code: list[Instruction]
