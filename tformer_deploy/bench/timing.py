"""Repeated runs, turns and peak memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

Item = TypeVar("Item")


def in_turn(items: Sequence[Item], number: int) -> list[Item]:
    """The order of a round, rotated so that no item is always first."""
    turn = number % max(1, len(items))
    return [*items[turn:], *items[:turn]]


def repeat(
    run: Callable[[], Item], warm_up: int = 1, least: int = 1, seconds: float = 0.0, most: int | None = None
) -> list[tuple[float, Item]]:
    """Seconds and result of every run, after `warm_up` runs: at least `least`, more until `seconds`, at most `most`."""
    for _ in range(warm_up):
        run()
    found: list[tuple[float, Item]] = []
    end = time.perf_counter() + seconds
    while len(found) < least or (time.perf_counter() < end and len(found) < (most or sys.maxsize)):
        start = time.perf_counter()
        result = run()
        found.append((time.perf_counter() - start, result))
    return found


def peak_mib() -> float:
    """Peak memory of this process."""
    # Not ru_maxrss: after a fork that also counts what the parent had.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))
