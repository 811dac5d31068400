"""The report of a benchmark, as data and as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Self

import numpy as np

from .measure import CorpusSample, Sample
from .plan import Point
from .roofline import LARGE_BUFFER, Bound, Ceiling

MIB = 1 << 20
SHOWN_KINDS = 8
"""Kinds of nodes that the text lists; the JSON has all."""


@dataclass(frozen=True)
class Spread:
    """Times of all repetitions of all rounds, in milliseconds."""

    min: float
    median: float
    p95: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """The spread of some times."""
        return cls(*_quantiles(values, (0, 50, 95)))

    def __str__(self) -> str:
        return " / ".join(figure(value) for value in (self.min, self.median, self.p95))


@dataclass(frozen=True)
class Latency:
    """Times of whole requests, in milliseconds."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """The percentiles of some times."""
        return cls(*_quantiles(values, (50, 95, 99)))

    def __str__(self) -> str:
        return " / ".join(figure(value) for value in (self.p50, self.p95, self.p99))


@dataclass(frozen=True)
class NodeKind:
    """Nodes of one kind in one graph: time and number per call of the graph."""

    graph: str
    kind: str
    ms: float
    count: float


@dataclass
class PointReport:
    """One engine at one point."""

    engine: str
    point: Point
    samples: int
    tokens: int
    """Of one decode."""
    encoder_ms: Spread
    first_token_ms: Spread
    """From the call to the end of the first step."""
    step_ms: Spread
    """Mean of all steps but the first, with the reordering after each."""
    latency_ms: Latency
    """Of the whole batch."""
    tokens_per_s: float
    """At the median latency."""
    outside: float
    """Median share of the time that is spent outside the engine, in the search."""
    steps_ms: list[float]
    """Median of every step."""
    encoder_bound: Bound | None = None
    step_bound: Bound | None = None
    kinds: list[NodeKind] = field(default_factory=list)
    device_ms: float | None = None
    """On a GPU: the time that it worked for a batch, by its own clock."""

    @property
    def host_share(self) -> float | None:
        """The share of the median latency in which the GPU does not work."""
        # At least 0, as the two times come from different decodes.
        return None if self.device_ms is None else max(0.0, 1 - self.device_ms / self.latency_ms.p50)

    @classmethod
    def of(cls, engine: str, point: Point, samples: Sequence[Sample]) -> Self:
        """Figures over all samples."""
        latency = Latency.of([sample.latency_ms for sample in samples])
        tokens = samples[0].tokens
        return cls(
            engine=engine,
            point=point,
            samples=len(samples),
            tokens=tokens,
            encoder_ms=Spread.of([sample.encoder_ms for sample in samples]),
            first_token_ms=Spread.of([sample.first_token_ms for sample in samples]),
            step_ms=Spread.of([float(np.mean(sample.steps_ms[1:] or sample.steps_ms)) for sample in samples]),
            latency_ms=latency,
            tokens_per_s=1e3 * tokens / latency.p50,
            outside=float(np.median([sample.outside for sample in samples])),
            steps_ms=np.median([sample.steps_ms for sample in samples], 0).tolist(),
        )


@dataclass
class CorpusReport:
    """One engine on a text."""

    engine: str
    beams: int
    sentences: int
    tokens: int
    """End tokens included."""
    sentences_per_s: float
    """In the median round."""
    tokens_per_s: float
    single_ms: Latency
    """Of sentences that were translated one at a time."""
    singles: int

    @classmethod
    def of(cls, engine: str, beams: int, samples: Sequence[CorpusSample]) -> Self:
        """Figures over all rounds."""
        seconds, first = float(np.median([sample.seconds for sample in samples])), samples[0]
        single = [ms for sample in samples for ms in sample.single_ms]
        rates = first.sentences / seconds, first.tokens / seconds
        return cls(engine, beams, first.sentences, first.tokens, *rates, Latency.of(single), len(first.single_ms))


@dataclass
class EngineFigures:
    """Start-up time, memory and disk size of one engine."""

    engine: str
    precision: str
    import_ms: float
    """To import the runtime."""
    load_ms: float
    peak_mib: float
    """Peak memory of its process."""
    disk_mib: float
    """Size of the files that it reads, tokenizers included."""
    device: dict[str, Any] | None = None
    """The GPU: `name`, `used_mib`, `total_mib`, `not_captured`: why steps are no CUDA graphs, and `read_bytes_per_s` if
    there was memory left to measure it."""


@dataclass
class BenchReport:
    """A whole benchmark."""

    machine: dict[str, str]
    """Machine and versions."""
    threads: int
    """Of each worker."""
    workers: int
    rounds: int
    ceiling: Ceiling | None = None
    notes: list[str] = field(default_factory=list)
    engines: list[EngineFigures] = field(default_factory=list)
    points: list[PointReport] = field(default_factory=list)
    corpus: list[CorpusReport] = field(default_factory=list)
    corpus_name: str = ""
    shortlist: str = ""
    """File of the shortlists; empty: steps score the whole vocabulary."""
    bundle: str = ""
    date: str = ""
    """As in 2026-11-26."""

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = [", ".join(self.about())]
        if self.ceiling:
            lines.append(describe_ceiling(self.ceiling))
        lines += self.notes
        lines += ["", *table(ENGINE_HEAD, [engine_row(engine) for engine in self.engines])]
        lines += [describe_device(engine) for engine in self.engines if engine.device]
        for point, found in groupby(self.points, key=lambda each: each.point):
            reports = list(found)
            lines += ["", str(point), *table(POINT_HEAD, [point_row(each) for each in reports])]
            for each in reports:
                lines += kind_lines(each)
        if self.corpus:
            head = (*CORPUS_HEAD[:-1], f"single sentences of {self.corpus[0].singles}, ms")
            lines += ["", self.corpus_name, *table(head, [corpus_row(each) for each in self.corpus])]
        return "\n".join(lines)

    def headline(self) -> str:
        """How much faster the fastest engine is than the first, or than the second fastest if it is the first."""
        if self.corpus:
            beams = self.corpus[0].beams
            rates = {found.engine: found.tokens_per_s for found in self.corpus if found.beams == beams}
            where = f"{self.corpus_name}, {'greedy' if beams == 1 else f'{beams} beams'}"
        elif self.points:
            point = max((found.point for found in self.points), key=lambda each: (-each.beams, each.batch))
            rates = {found.engine: found.tokens_per_s for found in self.points if found.point == point}
            where = str(point)
        else:
            return ""
        best, *others = sorted(rates, key=lambda name: -rates[name])
        if not others:
            return f"{best}: {rates[best]:,.0f} tokens/s ({where})"
        first = next(iter(rates))
        other = others[0] if best == first else first
        return f"{best} is {rates[best] / rates[other]:.1f} times as fast as {other} ({where})"

    def about(self) -> list[str]:
        """Machine, versions and settings."""
        versions = [f"{name} {value}" for name, value in self.machine.items() if name != "processor"]
        return [
            self.machine["processor"],
            *versions,
            f"workers {self.workers}",
            f"threads of each {self.threads}",
            f"rounds {self.rounds}",
            *([f"with {self.shortlist}"] if self.shortlist else []),
        ]


ENGINE_HEAD = ("engine", "weights", "import ms", "load ms", "peak MiB", "disk MiB")
POINT_HEAD = (
    "  engine",
    "encoder ms min/median/p95",
    "first token ms",
    "ms per step",
    "latency ms p50/p95/p99",
    "tokens/s",
    "outside",
    "GPU ms (host)",
    "step: of the limit",
    "encoder",
)
CORPUS_HEAD = ("  engine", "beams", "sentences", "tokens", "sentences/s", "tokens/s", "single sentences, ms")


def engine_row(found: EngineFigures) -> tuple[str, ...]:
    """Cells under ENGINE_HEAD."""
    sizes = (found.import_ms, found.load_ms, found.peak_mib, found.disk_mib)
    return (found.engine, found.precision, *(figure(size) for size in sizes))


def point_row(found: PointReport) -> tuple[str, ...]:
    """Cells under POINT_HEAD."""
    return (
        f"  {found.engine}",
        *map(str, (found.encoder_ms, found.first_token_ms, found.step_ms, found.latency_ms)),
        f"{found.tokens_per_s:,.0f}",
        f"{100 * found.outside:.0f} %",
        "-" if found.device_ms is None else f"{figure(found.device_ms)} ({100 * (found.host_share or 0):.0f} %)",
        str(found.step_bound or "-"),
        str(found.encoder_bound or "-"),
    )


def corpus_row(found: CorpusReport) -> tuple[str, ...]:
    """Cells under CORPUS_HEAD."""
    rates = (f"{found.sentences_per_s:,.1f}", f"{found.tokens_per_s:,.0f}")
    return (
        f"  {found.engine}",
        str(found.beams),
        f"{found.sentences:,}",
        f"{found.tokens:,}",
        *rates,
        str(found.single_ms),
    )


def kind_lines(found: PointReport) -> list[str]:
    """Each graph's nodes by kind, the longest first."""
    lines = []
    for graph in dict.fromkeys(kind.graph for kind in found.kinds):
        kinds = [kind for kind in found.kinds if kind.graph == graph]
        total = sum(kind.ms for kind in kinds) or 1.0
        named = [f"{kind.kind} {100 * kind.ms / total:.0f} %" for kind in kinds[:SHOWN_KINDS]]
        lines.append(f"  {found.engine}, {graph} of {total:.3g} ms: " + ", ".join(named))
    return lines


def describe_ceiling(ceiling: Ceiling) -> str:
    """The machine's limits, in a line."""
    reads = [(size, speed) for size, speed in sorted(ceiling.read_bytes_per_s.items()) if size != LARGE_BUFFER]
    if len(reads) > 3:
        reads = [reads[0], reads[len(reads) // 2], reads[-1]]
    reads.append((LARGE_BUFFER, ceiling.read_bytes_per_s[LARGE_BUFFER]))
    speeds = ", ".join(f"{speed / 1e9:.1f} GB/s from {figure(size / MIB)} MiB" for size, speed in reads)
    rates = ", ".join(f"{rate / 1e9:,.0f} G/s {name}" for name, rate in ceiling.operations_per_s.items())
    return f"limits with {ceiling.threads} threads: reads {speeds}; matrix operations {rates}"


def describe_device(found: EngineFigures) -> str:
    """The GPU of an engine, in a line."""
    device = found.device or {}
    return (
        f"{found.engine} on {device['name']}: {device['used_mib']:,} of {device['total_mib']:,} MiB in use"
        + (f", {device['read_bytes_per_s'] / 1e9:,.0f} GB/s" if "read_bytes_per_s" in device else "")
        + (f"; NOT replayed as CUDA graphs: {device['not_captured']}" if device["not_captured"] else "")
    )


def without_empty(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[tuple[str, ...]]:
    """Head and rows, without empty columns."""
    columns = [column for column in zip(head, *rows, strict=True) if set(column[1:]) - {"-", ""} or not rows]
    yield from zip(*columns, strict=True)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines with aligned columns: the first to the left, the others to the right."""
    every = [tuple(head), *map(tuple, rows)]
    every = [*without_empty(every[0], every[1:])]
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]
    lines = []
    for name, *cells in every:
        rest = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join((name.ljust(widths[0]), *rest)))
    return lines


def figure(value: float) -> str:
    """A number with three significant digits, or all that stand before the point."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


def _quantiles(values: Sequence[float], at: tuple[int, ...]) -> list[float]:
    return [float(value) for value in np.percentile(values, at)]
