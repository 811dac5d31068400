"""The library's continuous batching in Python: whatever joins, leaves or fails, each search gets what it gets alone."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tformer_deploy import load
from tformer_deploy.base.errors import ConfigError, EngineError, LimitError, TformerError
from tformer_deploy.bundle.manifest import open_bundle
from tformer_deploy.decoding import (
    ContinuousBatch,
    DecodeOptions,
    Hypothesis,
    Request,
    Trie,
    check_search,
    continuous,
    decode,
)
from tformer_deploy.engines import make_engine
from tformer_deploy.engines.base import Joined, Running
from tformer_deploy.translate.scheduler import Scheduler

from .params import long_but
from .test_continuous import CLOSE, bad_requests
from .test_native_python import BUNDLE, OPTIONS, PROGRAMS, batch_of
from .test_scheduler import caller

pytest.importorskip("tformer_native", reason="tformer-native is not installed: make native")
from tformer_deploy.engines.native import NativeBatch, NativeEngine

WORDS = [str(digit) for digit in range(10)]
NAMES = (*(f"native:{name}" for name in PROGRAMS), "cpp:fp32-cpu", "cpp")


@pytest.fixture(scope="module", params=long_but(NAMES, "native:native-int8", "cpp:fp32-cpu"))
def engine(request: pytest.FixtureRequest) -> Iterator[NativeEngine]:
    with make_engine(request.param, open_bundle(BUNDLE), threads=2) as engine:
        assert isinstance(engine, NativeEngine)
        yield engine


def requests_of(engine: NativeEngine, seed: int = 0) -> list[Request]:
    """One batch for each way of decoding, of other sizes."""
    made = []
    for i, changes in enumerate(OPTIONS.values()):
        options = DecodeOptions(**{"max_tokens": 12, **changes})
        if options.attention and not engine.attention:
            continue
        prefixes = [(5, 6), ()] if i % 3 == 1 else ()
        made.append(Request(batch_of(engine, 2, 3 + (i + seed) % 6, prefixes), options))
    return made


def alone(engine: NativeEngine, asked: Request) -> list[list[Hypothesis]]:
    assert isinstance(asked.options, DecodeOptions) and (asked.allowed is None or isinstance(asked.allowed, Trie))
    return decode(engine, asked.batch, asked.options, asked.allowed)


def assert_same(found: list[list[Hypothesis]], expected: list[list[Hypothesis]], tolerance: float) -> None:
    """The CPU engine's numbers do not depend on the batch; in ONNX Runtime the order of sums does."""
    for ours, theirs in zip(found, expected, strict=True):
        assert [(h.ids, h.end_id, h.alignment) for h in ours] == [(h.ids, h.end_id, h.alignment) for h in theirs]
        for name in ("score", "value"):
            assert np.allclose([getattr(h, name) for h in ours], [getattr(h, name) for h in theirs], atol=tolerance)


def tolerance_of(engine: NativeEngine) -> float:
    return CLOSE if engine.onnxruntime() else 0.0


def run(running: Running, joining: Sequence[tuple[int, Request]]) -> list[Joined]:
    """Searches of requests, each of which joins before a step."""
    searches: dict[int, Joined] = {}
    step = 0
    while len(searches) < len(joining) or any(search.running for search in searches.values()):
        now = [i for i, (begin, _) in enumerate(joining) if begin == step]
        searches.update(zip(now, running.add([joining[i][1] for i in now]), strict=True) if now else [])
        running.step()
        step += 1
    return [searches[i] for i in range(len(joining))]


@pytest.mark.parametrize("seed", long_but(range(6), "0"))
def test_searches_of_every_kind_share_steps(seed: int, engine: NativeEngine) -> None:
    rng = random.Random(seed)
    asked = requests_of(engine, seed)
    asked.append(Request(asked[0].batch, DecodeOptions(beams=2), Trie([(5, 6), (5, 7, 8), ()])))
    begins = [rng.choice((0, 0, 1, 2, 5, 9)) if engine.admits else 0 for _ in asked]
    running = continuous(engine)
    assert isinstance(running, NativeBatch)
    for search, request in zip(run(running, list(zip(begins, asked, strict=True))), asked, strict=True):
        assert_same(search.outputs(), alone(engine, request), tolerance_of(engine))
    assert running._batch is None  # its engine, threads and memory are free


def test_steps_are_those_of_python(engine: NativeEngine) -> None:
    """To the last bit, where both share the same steps."""
    asked = [request for request in requests_of(engine) if not request.options.to_json().count('"align":true')]
    ours, reference = continuous(engine), ContinuousBatch(engine)
    begins = [i % 4 if engine.admits else 0 for i in range(len(asked))]
    joining = list(zip(begins, asked, strict=True))
    for mine, theirs in zip(run(ours, joining), run(reference, joining), strict=True):
        assert mine.outputs() == theirs.outputs()


def test_bad_requests_end_alone(engine: NativeEngine) -> None:
    good = Request(batch_of(engine, 2, 7), DecodeOptions(max_tokens=12, min_tokens=8))
    running = continuous(engine)
    [search] = running.add([good])
    for name, (batch, options, allowed) in bad_requests(engine).items():
        if options.attention and engine.attention:
            continue
        with pytest.raises(TformerError) as refused:
            check_search(engine, batch, options, allowed)
            running.add([Request(batch, options, allowed)])
        assert "\n" not in str(refused.value), name
    while search.running:
        running.step()
    assert_same(search.outputs(), alone(engine, good), tolerance_of(engine))


def test_tokens_are_told_as_they_come(engine: NativeEngine) -> None:
    told: list[int] = []
    batch = batch_of(engine, 1, 6)
    for options in (DecodeOptions(max_tokens=9), DecodeOptions(max_tokens=9, sampling=True)):
        told.clear()
        running = continuous(engine)
        [search] = running.add([Request(batch, options, on_token=told.append)])
        for step in range(9):
            running.step()
            assert len(told) == min(step + 1, len(told))
        [[output]] = search.outputs()
        assert told == [*output.ids, *([output.end_id] if output.finished else [])]


class CallerError(Exception):
    """Of the program around us."""


@pytest.mark.parametrize("what", ["raises", "steps", "joins", "removes"])
def test_a_callback_that_fails_ends_its_search_alone(what: str, engine: NativeEngine) -> None:
    running = continuous(engine)
    options = DecodeOptions(max_tokens=12, min_tokens=8)
    good = Request(batch_of(engine, 2, 7), options)

    def on_token(_: int) -> None:
        if what == "raises":
            raise CallerError
        if what == "steps":
            running.step()
        if what == "joins":
            running.add([good])
        running.remove(searches[0])

    searches = running.add([good, Request(batch_of(engine, 1, 4), options, on_token=on_token)])
    while any(search.running for search in searches):
        running.step()
    for _ in range(2):
        with pytest.raises(CallerError if what == "raises" else TformerError, match=r"^$|in a call"):
            searches[1].outputs()
    assert_same(searches[0].outputs(), alone(engine, good), tolerance_of(engine))


@pytest.mark.parametrize("what", ["ends", "raises", "is removed"])
def test_what_has_ended_is_freed(what: str, engine: NativeEngine) -> None:
    """Though its callback owns it: at once, or by the collector where the callback's error does."""

    class Owner:
        def on_token(self, _: int) -> None:
            if what == "raises":
                raise CallerError

    owner: Any = Owner()
    running = continuous(engine)
    asked = Request(batch_of(engine, 1, 4), DecodeOptions(max_tokens=5), on_token=owner.on_token)
    [owner.search] = running.add([asked])
    if what == "is removed":
        running.remove(owner.search)
    while owner.search.running:
        running.step()
    if what == "raises":
        with pytest.raises(CallerError):
            owner.search.outputs()
    freed = weakref.ref(owner)
    gc.disable()
    try:
        del owner, asked
        if what == "raises":
            gc.collect()
        assert freed() is None
    finally:
        gc.enable()


def test_what_is_removed_leaves_the_others_as_they_are(engine: NativeEngine) -> None:
    asked = [
        Request(batch_of(engine, 2, 7), DecodeOptions(max_tokens=12, min_tokens=8, beams=beams)) for beams in (1, 3, 1)
    ]
    running = continuous(engine)
    searches = running.add(asked)
    for _ in range(3):
        running.step()
    with pytest.raises(ConfigError, match="is on its way"):
        searches[0].outputs()
    for _ in range(2):
        running.remove(searches[1])
    assert [search.running for search in searches] == [True, False, True]
    with pytest.raises(EngineError, match="was removed"):
        searches[1].outputs()
    while searches[0].running or searches[2].running:
        running.step()
    for i in (0, 2):
        assert_same(searches[i].outputs(), alone(engine, asked[i]), tolerance_of(engine))


def test_what_cannot_join_is_refused_and_the_others_go_on() -> None:
    with make_engine("cpp", open_bundle(BUNDLE), threads=1) as engine:
        assert isinstance(engine, NativeEngine) and not engine.admits
        asked = Request(batch_of(engine, 2, 7), DecodeOptions(max_tokens=6))
        running = continuous(engine)
        [search] = running.add([asked])
        running.step()
        with pytest.raises(LimitError, match="cannot add sentences to a running batch"):
            running.add([asked])
        while search.running:
            running.step()
        assert_same(search.outputs(), alone(engine, asked), CLOSE)


def test_batches_of_several_threads(engine: NativeEngine) -> None:
    """Each has an engine of its own."""
    asked = requests_of(engine)

    def work(seed: int) -> None:
        begins = [(i * seed) % 5 if engine.admits else 0 for i in range(len(asked))]
        for search, request in zip(run(continuous(engine), list(zip(begins, asked, strict=True))), asked, strict=True):
            assert_same(search.outputs(), alone(engine, request), tolerance_of(engine))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(8)))


@pytest.mark.parametrize("name", ["native:native-int8", "cpp:fp32-cpu", "cpp"])
@pytest.mark.parametrize("count", long_but((6, 250), "6"))
def test_lines_of_eight_threads_get_what_they_get_alone(count: int, name: str) -> None:
    """Good and bad ones, cancelled ones, streams: by the scheduler, which the server is over."""
    backend, _, variant = name.partition(":")
    with load(BUNDLE, backend, variant=variant or "fp32", threads=1, max_tokens=20) as translator:
        with Scheduler(translator, slots=8, join_tokens=24) as scheduler, ThreadPoolExecutor(8) as pool:
            calls = [pool.submit(caller, scheduler, translator, seed, count, CLOSE, WORDS) for seed in range(8)]
            assert sum(call.result(300) for call in calls) > 4 * count
        assert scheduler.running == scheduler.waiting == 0
