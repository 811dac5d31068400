"""Turns Ctrl-C, SIGTERM and a closed terminal into a flag, so that training saves before it stops."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .notes import note


@dataclass
class StopFlag:
    """Set by a signal; read between updates and between batches of a validation."""

    is_set: bool = False


@contextmanager
def stop_signals() -> Iterator[StopFlag]:
    """Turn Ctrl-C, SIGTERM and SIGHUP into a flag; a second one interrupts at once."""
    flag = StopFlag()

    def handle(number: int, frame: object) -> None:
        if flag.is_set:
            raise KeyboardInterrupt
        flag.is_set = True
        note("stopping; the work is saved first")

    closing = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []  # as by nohup
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM, *closing)}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
