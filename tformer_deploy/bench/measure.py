"""Times one engine, inside its own process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np

from ..base.processes import repeat
from ..decoding import DecodeOptions, decode
from ..engines.base import (
    ANYTHING,
    Batch,
    Calls,
    Engine,
    Hypothesis,
    Ints,
    Outlook,
    Scores,
    Searches,
    State,
    own_search,
)
from ..model.config import ModelConfig
from ..translate.translator import Translator
from .plan import Point

MAX_REPETITIONS = 50
"""Most decodes of a point in a round."""
WARM_UP_LINES, SINGLE_LINES = 50, 100
"""Lines that are translated before the clock starts; most lines that are translated one at a time."""
TIMED = 5
"""Decodes that are timed by events of the GPU; the median counts."""
FIRST_WORD = 4
"""First id of a word; smaller ones are special tokens."""

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Sample:
    """One decode of a batch. With several workers: times of the slowest part, means of steps and shares."""

    latency_ms: float
    encoder_ms: float
    first_token_ms: float
    """From the call to the end of the first step."""
    steps_ms: list[float]
    """Of every step, with the reordering after it."""
    outside: float
    """Share of the time that is spent outside the engine: in the search."""
    tokens: int


@dataclass(frozen=True)
class CorpusSample:
    """One translation of a text."""

    seconds: float
    sentences: int
    tokens: int
    """End tokens included."""
    single_ms: list[float]
    """Latencies of sentences that were translated one at a time."""


class Watched:
    """An engine that records when its calls begin and end."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.config, self.limits, self.attention = engine, engine.config, engine.limits, engine.attention
        self.best = engine.best
        self.calls: Calls = []

    def encode(self, src_ids: Ints, src_lengths: Ints, outlook: Outlook = ANYTHING) -> State:
        """See `Engine.encode`."""
        return self._watch("encode", self.engine.encode, src_ids, src_lengths, outlook)

    def step(self, tokens: Ints, state: State, full: bool = False, attention: bool = False) -> Scores:
        """See `Engine.step`."""
        return self._watch("step", self.engine.step, tokens, state, full, attention)

    def reorder(self, state: State, parents: Ints, sentences: Ints | None = None) -> None:
        """See `Engine.reorder`."""
        self._watch("reorder", self.engine.reorder, state, parents, sentences)

    def _watch(self, name: str, call: Callable[P, R], *arguments: P.args, **names: P.kwargs) -> R:
        start = time.perf_counter()
        found = call(*arguments, **names)
        self.calls.append((name, start, time.perf_counter()))
        return found

    def sample(self, start: float, tokens: int) -> Sample:
        """The sample of a decode that began at `start` and ends now."""
        end = time.perf_counter()
        steps: list[float] = []
        for name, begin, finish in self.calls:
            if name == "step":
                steps.append(1e3 * (finish - begin))
            elif name == "reorder":
                steps[-1] += 1e3 * (finish - begin)
        inside = sum(finish - begin for _, begin, finish in self.calls)
        first = next(finish for name, _, finish in self.calls if name == "step")
        encoder = sum(finish - begin for name, begin, finish in self.calls if name == "encode")
        return Sample(
            1e3 * (end - start), 1e3 * encoder, 1e3 * (first - start), steps, 1 - inside / (end - start), tokens
        )


class WatchedSearch(Watched):
    """An engine with a search of its own, which records the calls."""

    searches = True

    @property
    def batch_tokens(self) -> int:
        """See `Searches.batch_tokens`."""
        return cast(Searches, self.engine).batch_tokens

    def search(self, *asked: Any) -> list[list[Hypothesis]]:
        """See `Searches.search`."""
        engine: Any = self.engine
        found: list[list[Hypothesis]] = engine.search(*asked, calls=self.calls)
        return found


class Bench:
    """Measures an engine that a translator holds open."""

    def __init__(self, translator: Translator, workers: int) -> None:
        self.translator, self.engine, self.workers = translator, translator.engine, workers
        self._pool = ThreadPoolExecutor(workers)

    def point(self, point: Point, seconds: float) -> list[Sample]:
        """Repeat a synthetic request for `seconds`, after one to warm up."""
        src_ids = synthetic_sources(self.engine.config, point)
        options = DecodeOptions(max_tokens=point.new_tokens, beams=point.beams, endless=True)
        runs = repeat(lambda: self._decode(src_ids, options), seconds=seconds, most=MAX_REPETITIONS)
        return [sample for _, sample in runs]

    def device_ms(self, point: Point) -> float | None:
        """Time that the GPU works for a synthetic request, median of `TIMED`; None on a CPU."""
        engine: Any = self.engine
        if not hasattr(engine, "device_ms") or self.workers > 1:
            return None
        options, found = DecodeOptions(max_tokens=point.new_tokens, beams=point.beams, endless=True), []
        engine.timings = []
        for _ in range(TIMED):
            self._decode(synthetic_sources(engine.config, point), options)
            found.append(float(engine.device_ms()))
        engine.timings = None
        return median(found)

    def corpus(self, lines: list[str], beams: int, max_tokens: int) -> CorpusSample:
        """Translate a text as a whole, then some of its lines one at a time, after a part to warm up."""
        most = min(max_tokens, self.engine.limits.tgt_tokens)
        translate = partial(self.translator.translate, beams=beams, max_tokens=most)
        translate(lines[:WARM_UP_LINES])
        ((seconds, results),) = repeat(lambda: translate(lines), warm_up=0)
        single = []
        for line in some([line for line in lines if line], SINGLE_LINES):
            ((seconds_of_line, _),) = repeat(lambda line=line: translate([line]), warm_up=0)  # type: ignore[misc]
            single.append(1e3 * seconds_of_line)
        made = [result for line, result in zip(lines, results, strict=True) if line]  # an empty line costs no step
        return CorpusSample(seconds, len(made), sum(len(each.ids) + each.finished for each in made), single)

    def _decode(self, src_ids: Ints, options: DecodeOptions) -> Sample:
        """Decode a batch in as many parts as there are workers."""
        parts = np.array_split(src_ids, min(self.workers, len(src_ids)))
        if len(parts) == 1:
            return decode_part(self.engine, src_ids, options)
        start = time.perf_counter()
        found = list(self._pool.map(decode_part, *zip(*((self.engine, part, options) for part in parts), strict=True)))
        end = time.perf_counter()
        return Sample(
            1e3 * (end - start),
            max(each.encoder_ms for each in found),
            max(each.first_token_ms for each in found),
            [fmean(steps) for steps in zip(*(each.steps_ms for each in found), strict=True)],
            fmean(each.outside for each in found),
            sum(each.tokens for each in found),
        )


def decode_part(engine: Engine, src_ids: Ints, options: DecodeOptions) -> Sample:
    """Decode a batch and time the engine's calls."""
    batch = Batch(src_ids, np.full(len(src_ids), src_ids.shape[1], np.int32))
    watched = WatchedSearch(engine) if own_search(engine) else Watched(engine)
    start = time.perf_counter()
    outputs = decode(cast(Engine, watched), batch, options)
    return watched.sample(start, sum(len(found[0].ids) for found in outputs))


def synthetic_sources(config: ModelConfig, point: Point) -> Ints:
    """Ids (B, S) of random words, each with eos at its end."""
    low = min(FIRST_WORD, config.src_vocab - 1)
    ids = np.random.default_rng(point.batch).integers(low, config.src_vocab, (point.batch, point.src_len), np.int32)
    ids[:, -1] = config.eos_id
    return ids


def some(lines: Sequence[R], count: int) -> list[R]:
    """At most `count` lines, from all parts of a text."""
    chosen = np.linspace(0, len(lines) - 1, min(count, len(lines))).astype(int)
    return [lines[i] for i in chosen.tolist()]
