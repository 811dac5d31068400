"""Several batches at a time on one engine: the same results in the same order, errors as they are, nothing left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tformer_deploy import load
from tformer_deploy.base.errors import EngineError, LimitError, TformerError
from tformer_deploy.bundle.text import SPECIALS, Tokenizers, Words
from tformer_deploy.engines.base import Ints, Scores
from tformer_deploy.engines.eager import EagerEngine, EagerState
from tformer_deploy.translate.settings import TranslatorSettings
from tformer_deploy.translate.translator import Result, Translator, side_by_side

from .conftest import VOCAB, pretend_cores, random_model, small_config

WORDS = Words([*SPECIALS, *(f"w{i}" for i in range(4, VOCAB))], None)
LINES = [" ".join(f"w{4 + (i * j) % 50}" for j in range(1, 2 + i % 20)) * bool(i % 7) for i in range(60)]
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beam": {"beams": 4, "n_best": 3},
    "sampling": {"sampling": True, "n_best": 2, "seed": 7, "top_p": 0.9},
}


@pytest.fixture(autouse=True)
def nothing_runs_on() -> Iterator[None]:
    """Every thread that a test starts has ended with it."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def alike(ours: list[Result], theirs: list[Result]) -> bool:
    """The same outputs, their scores but for rounding, which may depend on the batch."""
    pairs = [(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(each(x), each(y), strict=True)]
    return all(a.ids == b.ids and abs(a.score - b.score) <= 1e-4 for a, b in pairs)


def each(result: Result) -> list[Result]:
    return [result, *result.alternatives]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("variant", ["fp32", "fp32-cpu", "int8"])
def test_workers_change_nothing(variants_bundle: Path, variant: str, mode: str) -> None:
    found = []
    for workers in (1, 3):
        options = {"max_tokens": 9, **MODES[mode]}
        with load(variants_bundle, variant=variant, threads=1, workers=workers, **options) as translator:
            translator.settings = replace(translator.settings, batch_tokens=200)
            found.append(translator.translate(LINES))
            assert alike(list(translator.results(LINES)), found[-1])
    assert alike(*found) and [result.ids == [] for result in found[0]] == [not line for line in LINES]


def test_workers_share_the_cores(variants_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cores(monkeypatch, 4)
    for workers, threads in ((1, 4), (3, 1), (2, 2)):
        with load(variants_bundle, variant="int8", workers=workers) as translator:
            assert translator.engine.threads == threads  # type: ignore[attr-defined]


class Watched(EagerEngine):
    """Eager PyTorch that notes who is in it, and what a hook does at each step."""

    def __init__(self, hook: Callable[[EagerState], object] | None = None) -> None:
        super().__init__(random_model(small_config(), seed=3))
        self.hook, self.here, self.most, self.callers = hook, 0, 0, set[str]()
        self.lock = threading.Lock()

    def step(self, tokens: Ints, state: EagerState, full: bool = False, attention: bool = False) -> Scores:
        with self.lock:
            self.here += 1
            self.most = max(self.most, self.here)
            self.callers.add(threading.current_thread().name)
        try:
            time.sleep(0.002)
            if self.hook:
                self.hook(state)
            return super().step(tokens, state, full, attention)
        finally:
            with self.lock:
                self.here -= 1


def translator_of(engine: Watched, workers: int) -> Translator:
    from tformer_deploy.decoding import DecodeOptions

    options = DecodeOptions(max_tokens=6)
    settings = TranslatorSettings(batch_tokens=40, workers=workers)
    return Translator(engine, Tokenizers(WORDS, WORDS), options, settings).open()


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_as_many_batches_run_at_a_time_as_there_are_workers(workers: int) -> None:
    engine = Watched()
    translator_of(engine, workers).translate(LINES)
    assert 1 < engine.most <= workers or workers == engine.most == 1
    assert (threading.current_thread().name in engine.callers) == (workers == 1)


def test_a_few_lines_are_shared_out() -> None:
    """Although one batch would hold them all."""
    engine = Watched()
    translator = translator_of(engine, 3)
    translator.settings = replace(translator.settings, batch_tokens=4096)
    assert len(translator.translate(LINES[1:4])) == 3 and engine.most > 1
    assert translator.translate([]) == [] and translator.translate([""])[0].ids == []


def test_the_error_of_a_worker_arrives_as_itself() -> None:
    def fail(state: EagerState) -> None:
        if state.position == 3 and len(state.src_lengths) > 1:
            raise EngineError("the device is gone")

    engine = Watched(fail)
    with pytest.raises(EngineError, match=r"^the device is gone$"), translator_of(engine, 3) as translator:
        translator.translate(LINES)
    assert engine.here == 0
    again = translator_of(engine, 3)
    assert len(again.translate(LINES[1:2])) == 1, "the translator can be used on"


def test_after_an_error_no_other_batch_begins() -> None:
    begun: list[int] = []

    def fail(state: EagerState) -> None:
        if state.position == 0:
            begun.append(1)
        if len(begun) == 2:
            raise EngineError("gone")

    with pytest.raises(EngineError), translator_of(Watched(fail), 2) as translator:
        translator.settings = replace(translator.settings, batch_tokens=1)
        translator.translate(LINES)
    assert len(begun) < 10


@pytest.mark.parametrize("workers", [1, 2])
def test_who_closes_waits_for_nobody_and_takes_nothing_away(workers: int) -> None:
    """The engine stays until the batches in it have ended; no other begins."""
    closing = threading.Event()

    class Leaving(Watched):
        left_with = -1

        def __exit__(self, *why: Any) -> None:
            self.left_with = self.here
            super().__exit__(*why)

    engine = Leaving()
    translator = translator_of(engine, workers)

    def close(state: EagerState) -> None:
        if state.position == 2 and not closing.is_set():
            closing.set()
            other = threading.Thread(target=translator.close)
            other.start()
            other.join(20)
            assert not other.is_alive()

    engine.hook = close
    with pytest.raises(TformerError, match="the translator is not open"):
        translator.translate(LINES)
    assert closing.is_set() and engine.left_with == 0
    with translator:
        assert translator.translate(LINES[1:3])[0].ids


def test_who_closes_a_stream_from_within_gets_its_end() -> None:
    translator = translator_of(Watched(), 1)
    result = translator.stream("w5 w6", lambda text: translator.close())
    assert len(result.ids) == 6
    with pytest.raises(TformerError, match="the translator is not open"):
        translator.stream("w5 w6", print)


@pytest.mark.parametrize("backend", ["ort", "eager"])
def test_a_closed_engine_is_not_used(bundle: Path, backend: str) -> None:
    """Many times, at any moment."""
    lines = LINES * 3
    for _ in range(8):
        translator = load(bundle, backend, threads=1, workers=2, max_tokens=6, batch_tokens=40)
        timer = threading.Timer(0.02, translator.close)
        timer.start()
        with pytest.raises(TformerError, match="the translator is not open"):
            while True:
                translator.translate(lines)
                translator.score(lines, lines)
        timer.join()


def test_results_that_nobody_waits_for_are_not_made() -> None:
    """A caller that leaves early, such as one whose output is closed."""
    engine = Watched()
    with translator_of(engine, 2) as translator:
        translator.settings = replace(translator.settings, batch_tokens=1)
        results = translator.results(LINES)
        first = [next(results) for _ in range(3)]
        results.close()  # type: ignore[attr-defined]
        assert len(first) == 3 and engine.here == 0


def test_a_line_that_is_too_long_is_named_after_the_results_before_it() -> None:
    with translator_of(Watched(), 3) as translator:
        results = translator.results([*LINES[1:4], "w5 " * 30, "w6"], first=10)
        assert len([next(results) for _ in range(3)]) == 3
        with pytest.raises(LimitError, match="line 14: a source of 31 tokens"):
            next(results)


def test_side_by_side_gives_results_as_they_are_ready() -> None:
    seen = threading.Event()

    def call(item: int) -> int:
        assert item or seen.wait(60)
        return item

    results = side_by_side(call, range(3), 2)
    assert {next(results), next(results)} == {1, 2}
    seen.set()
    assert list(results) == [0]
    assert list(side_by_side(call, range(3), 1)) == [0, 1, 2]
    assert list(side_by_side(call, [], 2)) == []
