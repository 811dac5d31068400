"""Worker process that measures one engine: JSON requests on standard input, replies on standard output."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ..base.errors import NoRoom
from ..base.lines import read_lines
from ..base.processes import peak_mib, serve
from ..bundle.manifest import MANIFEST, Bundle, open_bundle
from ..bundle.text import tokenizer_files
from ..engines import STANDARD, EngineName, load_runtime
from ..engines.base import Engine
from ..translate.opening import TranslatorOptions, open_translator
from .measure import Bench, CorpusSample, Sample
from .plan import Point
from .report import MIB


class Worker:
    """One method for each request."""

    bundle: Bundle
    bench: Bench
    buffer = np.empty(0, np.int32)

    def open(
        self, bundle: str, engine: str, checkpoint: str | None, threads: int, workers: int, shortlist: bool = False
    ) -> dict[str, Any]:
        """Import an engine's runtime and load it. Returns precision, both times, and the size of its files."""
        self.bundle, self.name = open_bundle(Path(bundle)), EngineName(engine)
        self.threads, self.shortlist = threads, shortlist
        start = time.perf_counter()
        load_runtime(self.name.backend)
        imported = time.perf_counter()
        variant = STANDARD if self.name.plain and self.name.spec.standard else None  # not the bundle's default
        options = TranslatorOptions(
            self.bundle,
            engine,
            variant,
            checkpoint=checkpoint,
            threads=threads,
            workers=workers,
            shortlist=shortlist,
        )
        translator = open_translator(options)
        loaded, made = time.perf_counter(), translator.engine
        self.bench = Bench(translator, workers)
        files = needed_files(self.bundle, made, self.name, checkpoint)
        if shortlist:
            files.append(self.bundle.directory / self.bundle.shortlist_file)
        size = sum(path.stat().st_size for path in files) / MIB
        return {
            "precision": made.precision,
            "import_ms": 1e3 * (imported - start),
            "load_ms": 1e3 * (loaded - imported),
            "disk_mib": size,
        }

    def point(self, point: dict[str, int], seconds: float) -> list[Sample]:
        """See `Bench.point`."""
        return self.bench.point(Point(**point), seconds)

    def corpus(self, src: str, beams: int, max_tokens: int) -> CorpusSample:
        """See `Bench.corpus`."""
        return self.bench.corpus(read_lines(Path(src)), beams, max_tokens)

    def peak_mib(self) -> float:
        """Peak memory of this process."""
        return peak_mib()

    def profile(self, point: dict[str, int]) -> list[dict[str, Any]]:
        """See `profile.node_kinds`."""
        from .profile import node_kinds

        found = node_kinds(self.bundle, self.name, self.threads, Point(**point), self.shortlist)
        return [asdict(kind) for kind in found]

    def device_ms(self, point: dict[str, int]) -> float | None:
        """See `Bench.device_ms`."""
        return self.bench.device_ms(Point(**point))

    def device(self) -> dict[str, Any] | None:
        """The GPU that the engine runs on, if it does; without its bandwidth where its memory is full."""
        if self.name.device == "cpu":
            return None
        try:
            from ..engines.trt.cuda import copy_rate, gpu_in_use
        except ModuleNotFoundError:  # eager and ort do without cuda-python
            return None

        found = {**gpu_in_use(), "not_captured": getattr(self.bench.engine, "not_captured", "")}
        try:
            return {**found, "read_bytes_per_s": copy_rate()}
        except NoRoom:  # the engine's plans fill it
            return found

    def bandwidth(self, sizes: list[int], threads: int) -> list[float]:
        """See `ceiling.bandwidth`, for each of `sizes`, which are the same in every round."""
        from .ceiling import bandwidth

        if not len(self.buffer):
            self.buffer = np.ones(max(sizes) // 4, np.int32)
        return [bandwidth(self.buffer, size, threads) for size in sizes]

    def matrix_rates(self, threads: int) -> dict[str, float]:
        """See `ceiling.matrix_rates`."""
        from .ceiling import matrix_rates

        return matrix_rates(threads)


def needed_files(bundle: Bundle, engine: Engine, name: str, checkpoint: str | None) -> list[Path]:
    """The files that an engine reads: manifest, tokenizers, and graphs, plans or the checkpoint's weights."""
    if EngineName(name).spec.reference:
        from ..model.checkpoint import open_reference

        return open_reference(bundle, Path(checkpoint) if checkpoint else None).paths
    common = [bundle.directory / file for file in (MANIFEST, *tokenizer_files(bundle.manifest["tokenizer"]))]
    if plans := getattr(engine, "plans", None):
        return [*common, *plans.directory.iterdir()]
    return [*common, *(bundle.directory / file for file in bundle.graph_files(EngineName(name).folder(bundle)))]


if __name__ == "__main__":
    serve(Worker())
