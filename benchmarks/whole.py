"""A process from its start to its end."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tformer_deploy.base.errors import EngineError
from tformer_deploy.base.processes import describe_end


def run_whole(command: Sequence[str], stdin: str = "", cwd: Path | None = None) -> tuple[str, float, float]:
    """Run a process to its end: output, seconds and peak MiB. Raises EngineError."""
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as target, tempfile.TemporaryFile() as said:
        source.write(stdin.encode())
        source.seek(0)
        start = time.perf_counter()
        process = subprocess.Popen(command, stdin=source, stdout=target, stderr=said, cwd=cwd)
        try:
            # The peak includes this process's memory at the fork, so that must be small.
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.kill()
            process.wait()
            raise
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        for file in (target, said):
            file.seek(0)
        if process.returncode:
            words = said.read().decode(errors="replace").strip().splitlines()
            raise EngineError(f"its process {describe_end(process.returncode, words)}")
        return target.read().decode(), seconds, usage.ru_maxrss / 1024
