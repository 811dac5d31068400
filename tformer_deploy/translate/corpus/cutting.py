"""Cuts a corpus into shards of whole windows; the lines of a window are sorted into batches together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class Windows:
    """Decides where windows end, by the rule of `tformer translate`, so that batches are the same."""

    def __init__(self, budget: int) -> None:
        self.budget, self.held = budget, 0

    def ends(self, size: int) -> bool:
        """Whether a window ends after the next line, of `size` bytes."""
        self.held += size + 1
        if self.held < self.budget:
            return False
        self.held = 0
        return True


class Cutter:
    """Decides where shards end: with the first window that reaches `lines` lines. One for each file."""

    def __init__(self, lines: int, budget: int) -> None:
        self.lines, self.windows, self.held = lines, Windows(budget), 0

    def ends(self, size: int) -> bool:
        """Whether a shard ends after the next line, of `size` bytes."""
        self.held += 1
        if not self.windows.ends(size) or self.held < self.lines:
            return False
        self.held = 0
        return True


def windows(sizes: Iterable[int], budget: int) -> Iterator[slice]:
    """The lines of each window."""
    ends, start, stop = Windows(budget), 0, 0
    for stop, size in enumerate(sizes, 1):
        if ends.ends(size):
            yield slice(start, stop)
            start = stop
    if start < stop:
        yield slice(start, stop)
