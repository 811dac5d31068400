"""The parent's side of a measurement: processes of which one at most runs at any time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 5
"""How long a process that is told to end may take."""
LIMIT_SECONDS = 900
"""How long an answer may take; a model that compiles itself takes minutes."""


class PeerError(Exception):
    """A library that failed, in its own words."""


class Process:
    """A measured library. It is stopped while it is not asked, so that no thread of it disturbs another."""

    def __init__(self, python: Path, program: str, setting: dict[str, Any]) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - until `close`
        self._process = subprocess.Popen(
            [str(python), "-m", f"{__package__}.{program}", json.dumps(setting)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            cwd=ROOT,
            env={**os.environ, **setting.get("env", {})},
        )
        try:
            self._answer()
        except PeerError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer of `serve.measure`. Raises PeerError."""
        assert self._process.stdin
        self._process.send_signal(signal.SIGCONT)
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise PeerError(self._ending()) from None
        return self._answer()

    def close(self) -> None:
        """Let it end, or kill it."""
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.communicate(timeout=PATIENCE_SECONDS)  # closes its standard input first
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.wait()
        self._stderr.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        timer = threading.Timer(LIMIT_SECONDS, self._process.kill)
        timer.start()
        line = self._process.stdout.readline()
        timer.cancel()
        if not line:
            raise PeerError(self._ending())
        self._process.send_signal(signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def _ending(self) -> str:
        code = self._process.wait()
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self._stderr.seek(0)
        words = self._stderr.read().decode(errors="replace").strip().splitlines()
        return f"{how}: {words[-1]}" if words else how


def timed(command: Sequence[str], stdin: str) -> tuple[str, float, float]:
    """Output, seconds from start to end and peak MiB of a whole process. Raises PeerError."""
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as target, tempfile.TemporaryFile() as errors:
        source.write(stdin.encode())
        source.seek(0)
        start = time.perf_counter()
        process = subprocess.Popen(command, stdin=source, stdout=target, stderr=errors, cwd=ROOT)
        # The peak counts what this process had at the fork too: keep its own memory small.
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        for file in (target, errors):
            file.seek(0)
        if process.returncode:
            words = errors.read().decode(errors="replace").strip().splitlines()
            raise PeerError(f"exit code {process.returncode}: {words[-1] if words else 'no message'}")
        return target.read().decode(), seconds, usage.ru_maxrss / 1024
