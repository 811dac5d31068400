"""Where a corpus is cut: windows, whose lines are sorted into batches together, and shards of whole windows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class Windows:
    """Where windows end. The rule is that of `tformer translate` for a file, so that its batches are the same."""

    def __init__(self, budget: int) -> None:
        self.budget, self.held = budget, 0

    def ends(self, size: int) -> bool:
        """Whether a window ends behind the next line, of `size` bytes."""
        self.held += size + 1
        if self.held < self.budget:
            return False
        self.held = 0
        return True


class Cutter:
    """Where shards end: with the first window that ends after `lines` lines. Begin anew with each file."""

    def __init__(self, lines: int, budget: int) -> None:
        self.lines, self.windows, self.held = lines, Windows(budget), 0

    def ends(self, size: int) -> bool:
        """Whether a shard ends behind the next line, of `size` bytes."""
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
