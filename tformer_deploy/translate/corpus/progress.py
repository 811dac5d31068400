"""Progress of a job."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

from .shards import Done, Shard, Work

EVERY_SECONDS = 10.0
"""Between two lines of progress: one shard takes about as long."""
NEARLY = 0.9999
"""The most that is done of a job whose last shard is not written yet."""


@dataclass
class Progress:
    """Counts what is done, and estimates what is left."""

    total_bytes: int = 0
    """Bytes of all inputs; 0: a server does not say how many."""
    bytes: float = 0.0
    lines: int = 0
    tokens: int = 0
    translated_shards: int = 0
    """Of this run."""
    existing_shards: int = 0
    """Shards that were there already."""
    workers: int = 0
    changed: Callable[[], None] = lambda: None
    started: float = field(default_factory=time.perf_counter)
    new_bytes: float = 0.0
    """What this run has done of `bytes`."""
    finished: bool = False

    def advance(self, lines: int, tokens: int, share: float) -> None:
        """Count lines that are translated; `share`: bytes of the input."""
        self.lines, self.tokens = self.lines + lines, self.tokens + tokens
        self.bytes, self.new_bytes = self.bytes + share, self.new_bytes + share
        self.changed()

    def skip(self, shard: Shard) -> None:
        """Count a shard that is there."""
        self.existing_shards, self.bytes = self.existing_shards + 1, self.bytes + shard.bytes
        if not self.new_bytes:
            self.started = time.perf_counter()  # the search for existing shards does not count
        self.changed()

    def finish(self) -> None:
        """Nothing is left to do."""
        self.finished = True
        self.changed()

    def tell(self, say: Callable[[], None]) -> None:
        """Call `say` from now on, at most every `EVERY_SECONDS`."""
        last = time.perf_counter()

        def changed() -> None:
            nonlocal last
            if (now := time.perf_counter()) - last >= EVERY_SECONDS:
                last = now
                say()

        self.changed = changed

    @property
    def tokens_per_second(self) -> float:
        """Of this run."""
        return self.tokens / max(1e-9, time.perf_counter() - self.started)

    @property
    def eta_seconds(self) -> float | None:
        """Remaining seconds, by bytes of the input; None if nothing is done yet, or its size is not known."""
        if self.finished:
            return 0.0
        if not self.new_bytes or not self.total_bytes:
            return None
        left = max(self.total_bytes - self.bytes, (1 - NEARLY) * self.total_bytes)
        return (time.perf_counter() - self.started) * left / self.new_bytes

    @property
    def done(self) -> float | None:
        """Share of the input's bytes; 1 only where nothing is left to write."""
        if self.finished:
            return 1.0
        return min(NEARLY, self.bytes / self.total_bytes) if self.total_bytes else None

    def state(self) -> dict[str, float | None]:
        """All of it, for machines."""
        eta, done = self.eta_seconds, self.done
        return {
            "lines": self.lines,
            "tokens": self.tokens,
            "tokens_per_second": round(self.tokens_per_second, 1),
            "eta_seconds": None if eta is None else round(eta, 1),
            "done": None if done is None else round(done, 4),
            "translated_shards": self.translated_shards,
            "existing_shards": self.existing_shards,
            "workers": self.workers,
        }

    def line(self) -> str:
        """All of it, for people."""
        eta = self.eta_seconds
        left = "?" if eta is None else str(timedelta(seconds=round(eta)))
        rate = f"{self.tokens_per_second:,.0f} tokens/s"
        return f"{self.lines:,} lines, {rate}, {left} left, {self.workers} workers"


class Execute(Protocol):
    """Translates shards: here, or on Ray."""

    def __call__(self, work: Work, shards: Iterator[Shard], progress: Progress) -> Iterator[Done]:
        """Translate shards, in any order; takes the next one when somebody is free for it."""
