"""The child's side of a measurement: requests on standard input, answers on standard output, a line of JSON each.

Runs in every peer's environment: nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Protocol

PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2)."""
KIB = 1024


class Library(Protocol):
    """A translation library with a model loaded."""

    def prepare(self, point: dict[str, Any]) -> Any:
        """Sources and options in the library's own form; not timed."""
        ...

    def run(self, prepared: Any, batching: dict[str, Any]) -> Any:
        """Translate; timed."""
        ...

    def ids(self, found: Any) -> list[list[int]]:
        """The best output of every source, without eos; not timed."""
        ...

    def scores(self, prepared: Any, batching: dict[str, Any]) -> list[float]:
        """The sum of each output's log-probabilities, by another run; not timed."""
        ...


def config() -> dict[str, Any]:
    """What this process was started with."""
    values: dict[str, Any] = json.loads(sys.argv[1])
    return values


def serve(library: Library, points: str) -> None:
    """Answer until standard input ends; `points` is the file of all points."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no reply
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)  # a stopped process would stay for ever
    known = json.loads(Path(points).read_text())
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = measure(library, known[request["point"]], request)
        except Exception as error:  # of any library: the parent records it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=replies, flush=True)


def measure(library: Library, point: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each of `repeats` runs after `warm_up` others. Raises ValueError for outputs of a wrong size."""
    prepared = library.prepare(point)
    seconds = []
    for turn in range(request["warm_up"] + request["repeats"]):
        start = time.perf_counter()
        found = library.run(prepared, request["batching"])
        if turn >= request["warm_up"]:
            seconds.append(time.perf_counter() - start)
        outputs = library.ids(found)
        check(point, outputs)
    answer: dict[str, Any] = {
        "seconds": seconds,
        "tokens": sum(min(len(ids) + 1, point["max_tokens"]) for ids in outputs),  # an eos where there is room for one
        "peak_mib": peak_mib(),
    }
    if request["outputs"]:
        answer["outputs"] = outputs
    if request.get("scores"):
        answer["scores"] = library.scores(prepared, request["batching"])
    return answer


def check(point: dict[str, Any], outputs: list[list[int]]) -> None:
    """As many outputs as sources, of the length that was asked for. Raises ValueError."""
    if len(outputs) != len(point["sources"]):
        raise ValueError(f"{len(outputs)} outputs of {len(point['sources'])} sources")
    lengths = {len(ids) for ids in outputs}
    if point["exact"] and lengths != {point["max_tokens"]}:
        raise ValueError(f"outputs of {min(lengths)} to {max(lengths)} tokens, not {point['max_tokens']}")
    if max(lengths) > point["max_tokens"]:
        raise ValueError(f"an output of {max(lengths)} tokens, limit {point['max_tokens']}")


def peak_mib() -> float:
    """The most memory that this process had."""
    # Not ru_maxrss: after a fork that also counts what the parent had.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / KIB for line in lines if line.startswith("VmHWM"))
