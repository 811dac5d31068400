"""The child's side of a measurement: what is measured of a library.

Runs in every peer's environment: nothing but the standard library.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Protocol

from tformer_deploy.base import processes


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


class Worker:
    """Answers for a library; `points` is the file of all points."""

    def __init__(self, library: Library, points: str) -> None:
        self.library, self.points = library, json.loads(Path(points).read_text())

    def measure(
        self, point: str, batching: dict[str, Any], warm_up: int, repeats: int, outputs: bool, scores: bool = False
    ) -> dict[str, Any]:
        """Seconds and processor time of `repeats` runs after `warm_up` others. Raises ValueError for a wrong output."""
        library, asked = self.library, self.points[point]
        prepared = library.prepare(asked)

        def once() -> tuple[float, Any]:
            start = time.process_time()
            found = library.run(prepared, batching)
            return time.process_time() - start, found

        runs = processes.repeat(once, warm_up, repeats)
        made = [library.ids(found) for _, (_, found) in runs]
        for each in made:
            check(asked, each)
        answer: dict[str, Any] = {
            "seconds": [seconds for seconds, _ in runs],
            "cpu_seconds": [seconds for _, (seconds, _) in runs],
            # An eos where there is room for one.
            "tokens": sum(min(len(ids) + 1, asked["max_tokens"]) for ids in made[-1]),
            "peak_mib": processes.peak_mib(),
        }
        if outputs:
            answer["outputs"] = made[-1]
        if scores:
            answer["scores"] = library.scores(prepared, batching)
        return answer


def serve(library: Library, points: str) -> None:
    """Answer until standard input ends; whatever a library raises is recorded."""
    processes.serve(Worker(library, points), expected=Exception)


def check(point: dict[str, Any], outputs: list[list[int]]) -> None:
    """As many outputs as sources, of the length that was asked for. Raises ValueError."""
    if len(outputs) != len(point["sources"]):
        raise ValueError(f"{len(outputs)} outputs of {len(point['sources'])} sources")
    lengths = {len(ids) for ids in outputs}
    if point["exact"] and lengths != {point["max_tokens"]}:
        raise ValueError(f"outputs of {min(lengths)} to {max(lengths)} tokens, not {point['max_tokens']}")
    if max(lengths) > point["max_tokens"]:
        raise ValueError(f"an output of {max(lengths)} tokens, limit {point['max_tokens']}")
