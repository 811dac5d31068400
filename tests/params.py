"""Parameters of tests that take long."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def long_but(values: Mapping[str, Any] | Iterable[Any], *quick: str, unpack: bool = False) -> list[Any]:
    """Every value, by its name; all but those named are marked `long`. `unpack`: each is a tuple of several."""
    named = values if isinstance(values, Mapping) else {str(value): value for value in values}
    assert set(quick) <= set(named), f"{set(quick) - set(named)} is none of {set(named)}"
    return [
        pytest.param(
            *(value if unpack else (value,)),
            id=name,
            marks=() if name in quick else (pytest.mark.long,),
        )
        for name, value in named.items()
    ]
