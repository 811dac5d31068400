"""What to measure: engines and points. Refuses what cannot be measured, before anything starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from ..base.errors import ConfigError, DataError, LimitError
from ..base.settings import check_whole
from ..bundle.manifest import Bundle
from ..check import make_corpus
from ..decoding.options import MOST
from ..engines import EngineName, check_checkpoint, limits_of, make_engine, most_parallel
from ..engines.base import Limits

MOST_ROUNDS, MOST_SECONDS, MOST_ROWS = 10**6, 3600, 1 << 20
"""Larger numbers are typing errors; so many rows would not fit into memory."""
USUAL = {"batch": (1, 8, 32), "beam": (1, 4), "src-len": (20,), "new-tokens": (32,)}
"""Default sizes, by the options of `tformer bench`, in the order of `Point`'s fields."""


@dataclass(frozen=True)
class Point:
    """A synthetic request."""

    batch: int
    """Sentences."""
    beams: int
    src_len: int
    """Tokens of each source, eos included."""
    new_tokens: int
    """Tokens of each output; none ends earlier."""

    def split(self, workers: int) -> Point:
        """The largest part of the batch when it is divided."""
        return replace(self, batch=-(-self.batch // workers))

    def __str__(self) -> str:
        return f"batch {self.batch}, beams {self.beams}, source {self.src_len}, output {self.new_tokens} tokens"


@dataclass(frozen=True)
class BenchPlan:
    """A whole benchmark."""

    bundle: Path
    engines: tuple[str, ...]
    """See `engines.engine_names`."""
    points: tuple[Point, ...]
    threads: int
    """Of each worker."""
    workers: int = 1
    """Parts of a batch that are decoded at the same time."""
    rounds: int = 5
    seconds: float = 0.2
    """Shortest time for which an engine repeats a point in a round."""
    checkpoint: Path | None = None
    src: Path | None = None
    """Text to translate as well."""
    max_tokens: int = 256
    """Longest output of that text."""
    profile: bool = False
    shortlist: bool = False
    """Whether steps score only the tokens of the bundle's shortlists."""

    def __post_init__(self) -> None:
        check_whole("threads", self.threads, 1, most_parallel())
        check_whole("workers", self.workers, 1, most_parallel())
        check_whole("rounds", self.rounds, 1, MOST_ROUNDS)
        check_whole("max_tokens", self.max_tokens, 1, MOST - 1)
        if not 0 <= self.seconds <= MOST_SECONDS:
            raise ConfigError(f"seconds={self.seconds}: must be a number from 0 to {MOST_SECONDS}")
        if self.profile and not any(map(has_profile, self.engines)):
            raise ConfigError("--profile measures ONNX Runtime alone: add --backend ort, or leave it out")

    @property
    def beams(self) -> list[int]:
        """Widths with which the text is translated."""
        return sorted({point.beams for point in self.points})

    @property
    def turns(self) -> int:
        """Number of measurements, for the progress bar."""
        profiles = len(self.points) * sum(map(has_profile, self.engines)) if self.profile else 0
        return self.rounds * len(self.engines) * (len(self.points) + len(self.beams) * bool(self.src)) + profiles

    def check(self, bundle: Bundle) -> None:
        """Raise LimitError, DataError or ConfigError for a point, text or option that an engine does not take."""
        check_checkpoint(self.checkpoint, self.engines)
        limits_by_engine: dict[str, Limits] = {}
        for engine in map(EngineName, self.engines):
            if not engine.spec.measured:
                raise ConfigError(f"--backend {engine}: bench does not measure the C++ runtime: use ort")
            limits = limits_by_engine[engine] = limits_of(engine, bundle)
            if self.shortlist:
                make_engine(engine, bundle, self.checkpoint, self.threads, shortlist=True)
            for point in self.points:
                profiled = self.profile and engine.spec.can_profile  # with one worker
                check_point(engine, limits, point.split(1 if profiled else min(self.workers, point.batch)))
        if self.src and self.src.exists() and not (self.src.is_dir() or self.src.resolve().is_file()):
            raise DataError(f"{self.src}: every engine reads the text again: name a file on disk")
        if self.src:
            sources = make_corpus(bundle.config, bundle.recipe, bundle.tokenizers(), self.src).sources
            for name, limits in limits_by_engine.items():
                self._check_text(name, limits, max(map(len, sources)))

    def _check_text(self, engine: str, limits: Limits, longest: int) -> None:
        """Raise LimitError if an engine does not take the text's longest source with each of the widths."""
        fix = limits.hint or "shorten it, or leave the engine out"
        if longest > limits.src_tokens:
            most = f"{engine} takes at most {limits.src_tokens} in this bundle"
            raise LimitError(f"{self.src}: the longest source has {longest} tokens: {most}: {fix}")
        tokens = min(self.max_tokens, limits.tgt_tokens)
        for beams in self.beams:
            if not limits.have_plan(beams, longest, tokens):
                sizes = f"{beams} beams, a source of {longest} and an output of {tokens} tokens"
                raise LimitError(f"{self.src}: {engine} has no plan for {sizes} in this bundle: {fix}")


def has_profile(engine: str) -> bool:
    """Whether an engine can report its time by kind of node."""
    return EngineName(engine).spec.can_profile


def make_points(sizes: Mapping[str, Sequence[int]]) -> tuple[Point, ...]:
    """Every combination of sizes; `sizes`: by their options, in place of the usual ones."""
    return tuple(Point(*each) for each in product(*{**USUAL, **sizes}.values()))


def usual_points(engines: Sequence[str], bundle: Bundle) -> tuple[Point, ...]:
    """The sizes of the plans if an engine runs plans, else the usual ones."""
    for engine in engines:
        if profiles := limits_of(engine, bundle).profiles:
            return tuple(Point(each.batch, each.beams, each.src_len, each.capacity) for each in profiles)
    return make_points({})


def check_point(engine: str, limits: Limits, point: Point) -> None:
    """Raise LimitError if an engine does not take a point, or one worker's part of it."""
    asked = {
        "batch": (point.batch, limits.batch),
        "beam": (point.beams, limits.beams),
        "src-len": (point.src_len, limits.src_tokens),
        "new-tokens": (point.new_tokens, limits.tgt_tokens),
    }
    for option, (size, most) in asked.items():
        if size > most:
            fix = limits.hint or "ask for less"
            raise LimitError(f"--{option} {size}: {engine} takes at most {most} in this bundle: {fix}")
    if point.batch * point.beams > MOST_ROWS:
        raise LimitError(f"{point}: at most {MOST_ROWS} rows are measured, sentences times beams: ask for less")
    if point.batch > limits.sentences(point.beams, point.src_len, point.new_tokens):
        raise LimitError(f"{point}: {engine} has no plan of that size in this bundle: {limits.hint or 'ask for less'}")
