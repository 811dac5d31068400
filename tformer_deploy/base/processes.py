"""Worker processes, asked by lines of JSON: starting, asking, timing and ending them, and the loop inside.

Standard library only, as it runs in the environments of other tools too.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self, TypeVar

from . import errors
from .errors import EngineError, TformerError, missing_extra

PATIENCE_SECONDS = 5
"""Time that a worker has to end before it is killed."""
PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2)."""
Item = TypeVar("Item")


class Process:
    """A worker that is stopped (SIGSTOP) between requests, so that its threads do not disturb other workers."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        limit_seconds: float | None = None,
    ) -> None:
        self.name, self._where = name, f"{name}: " if name else ""
        self.limit_seconds = limit_seconds
        """Longest time for an answer; None: no limit."""
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - until `end`
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            cwd=cwd,
            env={**os.environ, **(env or {})},
        )

    def ask(self, call: str, **arguments: Any) -> Any:
        """Send a request and return the reply. Raises the worker's TformerError, or EngineError if the worker died."""
        assert self._process.stdin and self._process.stdout
        self._process.send_signal(signal.SIGCONT)
        late = threading.Event()

        def stop() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(self.limit_seconds or 0, stop)
        if self.limit_seconds:
            timer.start()
        try:
            print(json.dumps({"call": call, **arguments}), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line.endswith("\n"):  # it died while it wrote
            line = ""
        if not line and late.is_set():
            raise EngineError(f"{self._where}its process gave no answer in {self.limit_seconds:g} s")
        if not line:
            raise EngineError(f"{self._where}its process {self._ending()}")
        self._process.send_signal(signal.SIGSTOP)
        reply = json.loads(line)
        if "error" in reply:
            kind = getattr(errors, reply["error"], EngineError)
            raise kind(f"{self._where}{reply['message']}")
        return reply["value"]

    def _ending(self) -> str:
        """How it died, with the last line that it printed."""
        code = self._process.wait()
        self._stderr.seek(0)
        words = self._stderr.read().decode(errors="replace").strip().splitlines()
        if code == -signal.SIGKILL:
            words.append("the machine may be out of memory")
        return describe_end(code, words)

    def end(self, kill: bool = False) -> None:
        """Let it finish, or kill it, and wait for its end."""
        if kill:
            self._process.kill()
        else:
            self._process.send_signal(signal.SIGCONT)
        try:
            self._process.communicate(timeout=PATIENCE_SECONDS)  # closes its standard input first
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.wait()
        self._stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *why: object) -> None:
        self.end(kill=why[0] is not None)


def describe_end(code: int, words: Sequence[str]) -> str:
    """How a process died, and the last line that it wrote."""
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"{how}: {words[-1]}" if words else how


def in_turn(items: Sequence[Item], number: int) -> list[Item]:
    """The order of a round, rotated so that no item is always first."""
    turn = number % max(1, len(items))
    return [*items[turn:], *items[:turn]]


def serve(worker: Any, expected: type[Exception] = TformerError) -> None:
    """Answer requests by the worker's methods, until standard input ends.

    `expected` errors become replies; others end the process.
    """
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no reply
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    if sys.platform == "linux":
        # Otherwise a stopped worker would outlive a parent that was killed.
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = {"value": getattr(worker, request.pop("call"))(**request)}
        except ModuleNotFoundError as error:
            reply = {"error": "MissingExtra", "message": str(missing_extra(error))}
        except expected as error:
            kind = type(error).__name__
            reply = {"error": kind, "message": str(error) if hasattr(errors, kind) else f"{kind}: {error}"}
        print(json.dumps(reply, default=asdict), file=replies, flush=True)


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
