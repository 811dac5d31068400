"""Instructions of the C++ runtime's own engine, over values (rows, width)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ...quantizing import Array


@dataclass(frozen=True)
class View:
    """Columns of a value."""

    value: int
    first: int
    width: int


@dataclass(frozen=True)
class Matrix:
    """Weights (outputs, inputs), a row for each output."""

    name: str
    kind: str
    """`fp32`, `bf16`, which is rounded when it is packed, `int8` or `int4`."""
    weight: Array
    """Numbers, or integers: of 8 bits (out, in), of groups 0 to 15 (out, groups, size)."""
    scales: Array | None = None
    """(out) of 8 bits, (out, groups) of groups."""
    inputs: int = 0
    group: int = 0

    def part(self, first: int, count: int) -> Matrix:
        """Some of its outputs."""
        rows = slice(first, first + count)
        name = f"{self.name}[{first}:{first + count}]"
        scales = None if self.scales is None else self.scales[rows]
        return replace(self, name=name, weight=self.weight[rows], scales=scales)


@dataclass(frozen=True)
class Rounding:
    """How an input becomes 8 bits."""

    step: float
    zero: int
    shrink: tuple[str, Array] | None = None
    """What each channel is multiplied by first, and its name."""


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
    arrays: dict[str, tuple[str, Array]] = field(default_factory=dict)
    """What else it reads of the weights, by role: name and numbers."""
    how: dict[str, Any] = field(default_factory=dict)


@dataclass
class Program:
    """One graph's instructions and the width of each value that they write."""

    widths: list[int]
    code: list[Instruction]
