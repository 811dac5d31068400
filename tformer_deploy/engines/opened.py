"""An engine that several threads share: entered once, left when it is closed and no thread uses it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from ..base.errors import TformerError
from .base import Engine, Limits


class Opened:
    """Whether an engine is open, and how many threads use it."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.open = engine, False
        self._lock, self._users, self._entered = Lock(), 0, False

    def enter(self) -> None:
        """Take the engine's device."""
        with self._lock:
            if not self._entered:
                self.engine.__enter__()
            self.open = self._entered = True

    def close(self, *why: Any) -> None:
        """Free the engine's device once no other thread uses it; no further use may begin."""
        with self._lock:
            self.open = False
            self._leave(*why)

    def limits(self) -> Limits:
        """The engine's limits. Raises TformerError where it is not open."""
        if not self.open:
            raise TformerError("the translator is not open: call open(), or use it in a with statement")
        return self.engine.limits

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the device while the block runs. Raises TformerError where it is not open."""
        with self._lock:
            self.limits()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                self._leave()

    def _leave(self, *why: Any) -> None:
        """Free the device if the engine is closed and unused; the caller holds the lock."""
        if self._entered and not self.open and not self._users:
            self._entered = False
            self.engine.__exit__(*(why or (None, None, None)))
