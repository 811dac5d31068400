"""Metrics of several workers: each writes its own where all can read them, so that any can answer for all."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

END = "# EOF\n"
"""After a whole page; one whose writer was killed has none."""


class Pages:
    """A file in memory for each worker, which has no name; workers inherit them."""

    def __init__(self, files: Sequence[int], number: int = 0) -> None:
        """`number`: of the worker that writes."""
        self.files, self.number = tuple(files), number

    @classmethod
    def make(cls, workers: int) -> Self:
        """New ones."""
        return cls([os.memfd_create(f"metrics of worker {number}") for number in range(workers)])

    def of(self, number: int) -> Pages:
        """The same, for another writer."""
        return Pages(self.files, number)

    def write(self, text: str) -> None:
        """Replace the worker's own page."""
        file = self.files[self.number]
        with _locked(file, fcntl.LOCK_EX):
            os.ftruncate(file, 0)
            os.pwrite(file, f"{text}{END}".encode(), 0)

    def written(self, number: int) -> int:
        """When a worker has last written its page, in nanoseconds."""
        return os.fstat(self.files[number]).st_mtime_ns

    def read(self) -> str:
        """The metrics of all workers, with a label `worker`."""
        pages = {str(number): _page(file) for number, file in enumerate(self.files)}
        registry = CollectorRegistry()
        registry.register(_Merged({number: page for number, page in pages.items() if page}))
        return generate_latest(registry).decode()


@dataclass(frozen=True)
class Member:
    """What a worker shares with the others."""

    pages: Pages
    parent: int
    """Process that has started it."""

    def tell_reload(self) -> None:
        """Let all workers reload; one that has done so finds nothing changed."""
        os.kill(self.parent, signal.SIGHUP)


def _page(file: int) -> str:
    """What a worker has written; empty if it was killed meanwhile."""
    with _locked(file, fcntl.LOCK_SH):
        text = os.pread(file, os.fstat(file).st_size, 0).decode()
    return text.removesuffix(END) if text.endswith(END) else ""


@contextmanager
def _locked(file: int, how: int) -> Iterator[None]:
    fcntl.lockf(file, how)  # of this process: the system gives it back if it dies
    try:
        yield
    finally:
        fcntl.lockf(file, fcntl.LOCK_UN)


class _Merged(Collector):
    """The families of several pages as one."""

    def __init__(self, pages: dict[str, str]) -> None:
        self.pages = pages

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for worker, page in self.pages.items():
            for found in text_string_to_metric_families(page):
                family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
                for sample in found.samples:
                    family.add_sample(sample.name, {**sample.labels, "worker": worker}, sample.value)
        return families.values()
