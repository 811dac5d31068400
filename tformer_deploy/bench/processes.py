"""The parent's side of the workers: a process each, of which one at most runs at any time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from types import TracebackType
from typing import Any, Self

from .. import errors
from ..errors import EngineError, TformerError

PATIENCE_SECONDS = 5
"""How long a worker that is told to end may take before it is killed."""


class Process:
    """A worker that runs only while it is asked something, so that no thread of it disturbs another."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - until `end`
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tformer_deploy.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )

    def ask(self, call: str, **arguments: Any) -> Any:
        """The reply to a request. Raises the worker's TformerError, and EngineError where the worker died."""
        assert self._process.stdin and self._process.stdout
        os.kill(self._process.pid, signal.SIGCONT)
        try:
            print(json.dumps({"call": call, **arguments}), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise EngineError(f"{self.name}: its process {self._ending()}")
        os.kill(self._process.pid, signal.SIGSTOP)
        reply = json.loads(line)
        if "error" in reply:
            kind = getattr(errors, reply["error"], TformerError)
            raise kind(f"{self.name}: {reply['message']}")
        return reply["value"]

    def _ending(self) -> str:
        """How it died, and its last words."""
        code = self._process.wait()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self._stderr.seek(0)
        words = self._stderr.read().decode(errors="replace").strip().splitlines()
        if code == -signal.SIGKILL:
            words.append("there may be too little memory for this point")
        return f"{how}: {words[-1]}" if words else how

    def end(self, kill: bool) -> None:
        """Let it finish, or kill it; returns when it is gone."""
        if kill:
            self._process.kill()
        elif self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGCONT)
        try:
            self._process.communicate(timeout=PATIENCE_SECONDS)  # closes its standard input first
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.wait()
        self._stderr.close()


class Processes:
    """Workers by name; leaving kills those that an error or Ctrl-C interrupts."""

    def __init__(self) -> None:
        self.all: list[Process] = []

    def start(self, name: str) -> Process:
        """A new worker."""
        self.all.append(Process(name))
        return self.all[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.all:
            process.end(kill=kind is not None)
