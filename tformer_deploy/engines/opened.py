"""An engine that several threads use: entered once, left when it is closed and no thread decodes on it."""

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
        """Free the engine's device, at once or as soon as no other thread uses it; nobody begins then."""
        with self._lock:
            self.open = False
            self._leave(*why)

    def limits(self) -> Limits:
        """What the engine takes. Raises TformerError where it is closed."""
        if not self.open:
            raise TformerError("the translator was closed: open it again with open(), or another one with load()")
        return self.engine.limits

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the device while the block runs. Raises TformerError where it is closed."""
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
        """Free the device if the engine is closed and nobody uses it; the lock is held."""
        if self._entered and not self.open and not self._users:
            self._entered = False
            self.engine.__exit__(*(why or (None, None, None)))
