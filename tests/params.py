"""Parameters of tests that take long."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def long_but(values: Mapping[str, Any] | Iterable[Any], *kept: str) -> list[Any]:
    """Every value, by its name; those whose names are not kept are marked `long`."""
    named = values if isinstance(values, Mapping) else {str(value): value for value in values}
    assert set(kept) <= set(named), f"{set(kept) - set(named)} is none of {set(named)}"
    return [
        pytest.param(value, id=name, marks=() if name in kept else (pytest.mark.long,)) for name, value in named.items()
    ]
