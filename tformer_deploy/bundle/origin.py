"""What the constants of a graph are made of: stored in the graph by export, read by the check (docs/bundle.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..base.headers import parse_json

ORIGINS = "tformer.origins"
"""Key of a graph's metadata."""
FORMS = ("", "int8", "int4", "scales", "shrink")


@dataclass(frozen=True)
class Origin:
    """Tensors of the checkpoint, concatenated along their first axis, and what was done to them."""

    tensors: tuple[str, ...]
    """Names in the checkpoint."""
    factors: tuple[float, ...] = ()
    """What each was multiplied by; empty: none was."""
    form: str = ""
    """`int8` or `int4`: quantized weights. `scales`: those of quantized weights. `shrink`: what calibration made the
    input of the layer with this weight be multiplied by. Empty: floats."""
    groups: bool = False
    """Quantized per group of inputs, not per channel."""
    transposed: bool = False
    rows: tuple[int, ...] = ()
    """The first row and the one after the last; empty: all."""

    @property
    def name(self) -> str:
        """A name for the constant, for people to read."""
        done = {"scaled": self.factors, self.form: self.form, "groups": self.groups, "transposed": self.transposed}
        rows = ["{}-{}".format(*self.rows)] if self.rows else []
        return ".".join([",".join(self.tensors), *(word for word, holds in done.items() if holds), *rows])

    def scaled(self, factor: float) -> Origin:
        """The same, multiplied by a number."""
        own = self.factors or (1.0,) * len(self.tensors)
        return self if factor == 1 else replace(self, factors=tuple(float(factor) * each for each in own))

    def part(self, first: int, end: int) -> Origin:
        """Some of its rows."""
        start = self.rows[0] if self.rows else 0
        return replace(self, rows=(start + first, start + end))

    def described(self) -> dict[str, Any]:
        """As JSON has it, without what is as usual."""
        return {key: value for key, value in asdict(self).items() if value}


def concatenated(origins: Sequence[Origin]) -> Origin:
    """The origin of arrays that were concatenated."""
    factors = [factor for each in origins for factor in each.factors or (1.0,) * len(each.tensors)]
    tensors = tuple(name for each in origins for name in each.tensors)
    return Origin(tensors, tuple(factors) if set(factors) != {1.0} else ())


def write_origins(origins: Mapping[str, Origin]) -> str:
    """The value of `ORIGINS`, by the names of constants."""
    return json.dumps({name: origin.described() for name, origin in origins.items()})


def read_origins(text: str) -> dict[str, Origin]:
    """The origin of each constant. Raises ValueError."""
    found = parse_json(text)
    if not isinstance(found, dict):
        raise ValueError(f"{ORIGINS} is no object")
    return {name: read_origin(described) for name, described in found.items()}


def read_origin(described: Any) -> Origin:
    """One constant's. Raises ValueError."""
    try:
        lists = {key: described.get(key, []) for key in ("tensors", "factors", "rows")}
        found = Origin(**{**described, **{key: tuple(each) for key, each in lists.items()}})
        fits = (
            all(type(each) is list for each in lists.values())
            and bool(found.tensors)
            and all(type(name) is str for name in found.tensors)
            and all(type(factor) in (int, float) for factor in found.factors)
            and len(found.factors) in (0, len(found.tensors))
            and all(type(row) is int and row >= 0 for row in found.rows)
            and (not found.rows or (len(found.rows) == 2 and found.rows[0] < found.rows[1]))
            and found.form in FORMS
            and type(found.groups) is type(found.transposed) is bool
        )
    except (AttributeError, TypeError):
        fits = False
    if not fits:
        raise ValueError(f"{described!s:.60} is no origin of a constant")
    return found
