"""Pooling: one vector for all tokens of a source."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..base.errors import unknown

if TYPE_CHECKING:  # the command's options need no numpy
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

NO_POOL = "none"
POOLS: dict[str, Callable[[Floats], Any]] = {
    "mean": lambda memory: memory.mean(0, dtype="float64").astype("float32"),
    "first": lambda memory: memory[0],
    "last": lambda memory: memory[-1],
}


def check_pool(name: str) -> None:
    """Raise ConfigError for an unknown name."""
    if name not in (*POOLS, NO_POOL):
        raise unknown("pool", name, [*POOLS, NO_POOL])


def pooled(memory: Floats, name: str) -> Floats:
    """(S, d) without padding, S > 0 -> (d); with NO_POOL unchanged."""
    return memory if name == NO_POOL else POOLS[name](memory)  # type: ignore[no-any-return]
