"""Lines of many threads share steps, and each gets what it gets alone, whatever joins, leaves or fails meanwhile."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest

from tformer_deploy.base.errors import ConfigError, EngineError, LimitError, NoRoom, NotNumbers, TformerError
from tformer_deploy.bundle.text import SPECIALS, Tokenizers, Words
from tformer_deploy.decoding import DecodeOptions
from tformer_deploy.engines.eager import EagerEngine
from tformer_deploy.translate.scheduler import Busy, Cancelled, Late, Line, Scheduler
from tformer_deploy.translate.settings import TranslatorSettings
from tformer_deploy.translate.translator import Result, Translator

from .conftest import ending_model
from .params import long_but
from .plain_decoding import TableState
from .serving import BROKEN, REFUSED, SOURCE_WORDS, TARGET_WORDS, Watched, translator_of, wait_for

WAYS: list[dict[str, Any]] = [
    {},
    {"max_tokens": 3},
    {"beams": 4, "n_best": 2},
    {"beams": 3, "length_penalty": 0.6},
    {"sampling": True, "seed": 5},
    {"sampling": True, "n_best": 3, "top_k": 4},
    {"repetition_penalty": 1.3},
]


@pytest.fixture
def scheduler(engine: Watched) -> Iterator[Scheduler]:
    with translator_of(engine) as translator, Scheduler(translator, slots=8, join_tokens=24) as scheduler:
        yield scheduler
        engine.open.set()


WORDS = [f"w{i}" for i in range(4, 58)]


def caller(
    scheduler: Scheduler, alone: Translator, seed: int, count: int, tolerance: float, words: Sequence[str] = WORDS
) -> int:
    """Submit lines, good and bad; cancel some; compare each result with the line's alone. Returns how many."""
    rng, compared = random.Random(seed), 0
    for _ in range(count):
        line = " ".join(rng.choice(words) for _ in range(rng.randrange(0, 9)))
        way, bad = rng.choice(WAYS), rng.random()
        if bad < 0.05:
            with pytest.raises(ConfigError):
                scheduler.submit(line, beams=-1)
            continue
        if bad < 0.1 and tolerance == 0:
            word, error = rng.choice([(BROKEN, NotNumbers), (REFUSED, LimitError)])
            with pytest.raises(error):
                scheduler.submit(f"w{word} w5", **{**way, "min_tokens": 2}).result(60)
            continue
        pieces: list[str] = []
        waiting = scheduler.submit(line, write=pieces.append, **way)
        if rng.random() < 0.2:
            time.sleep(rng.random() * 0.004)
            waiting.cancel()
        try:
            found = waiting.result(60)
        except Cancelled:
            continue
        [expected] = alone.translate([line], **way)
        assert_same(found, expected, tolerance)
        assert "".join(pieces) == expected.text
        compared += 1
    return compared


def assert_same(found: Result, expected: Result, tolerance: float) -> None:
    for ours, theirs in zip([found, *found.alternatives], [expected, *expected.alternatives], strict=True):
        assert (ours.text, ours.ids, ours.finished) == (theirs.text, theirs.ids, theirs.finished)
        assert abs(ours.score - theirs.score) <= tolerance


@pytest.mark.parametrize("count", long_but((15, 250), "15"))
def test_lines_of_eight_threads_get_what_they_get_alone(count: int, scheduler: Scheduler) -> None:
    with ThreadPoolExecutor(8) as pool, translator_of(Watched()) as alone:
        calls = [pool.submit(caller, scheduler, alone, seed, count, 0.0) for seed in range(8)]
        assert sum(call.result(300) for call in calls) > 5 * count
    assert scheduler.running == scheduler.waiting == 0


def test_an_engine_that_admits_nobody_takes_them_batch_by_batch() -> None:
    engine = EagerEngine(ending_model(24))
    words = Words([*SPECIALS, *(f"w{i}" for i in range(4, engine.config.src_vocab))], None)
    translator = Translator(engine, Tokenizers(words, words), DecodeOptions(max_tokens=12)).open()
    with translator, Scheduler(translator, slots=8) as scheduler, ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(caller, scheduler, translator, seed, 8, 1e-4) for seed in range(4)]
        assert sum(call.result(300) for call in calls) > 10


def held(scheduler: Scheduler, engine: Watched, count: int = 1, **decoding: Any) -> list[Line]:
    """Lines, of which the first at least is in its first step, where it waits until the engine is opened."""
    engine.open.clear()
    with scheduler._wake:  # all at once: what joins later waits for the first one's step
        lines = [scheduler.submit("w4 w5", min_tokens=6, **decoding) for _ in range(count)]
    deadline = time.monotonic() + 20
    while not scheduler.running and time.monotonic() < deadline:
        time.sleep(0.001)
    return lines


def test_a_full_queue_refuses_at_once(engine: Watched) -> None:
    with translator_of(engine) as translator, Scheduler(translator, slots=2, max_queue=1) as scheduler:
        held(scheduler, engine)
        for _ in range(2):
            scheduler.submit("w6")
        with pytest.raises(Busy, match="2 lines are waiting"):
            scheduler.submit("w7")
        engine.open.set()


def test_a_burst_fills_the_slots_before_the_queue(engine: Watched) -> None:
    """However quick the scheduler's thread is."""
    with translator_of(engine) as translator, Scheduler(translator, slots=32, max_queue=0) as scheduler:
        for _ in range(20):
            lines = [scheduler.submit("w4 w5") for _ in range(32)]
            assert all(line.result(20).ids for line in lines)


def test_a_line_that_is_late_leaves_and_so_does_one_that_waits(scheduler: Scheduler, engine: Watched) -> None:
    [running] = held(scheduler, engine)
    late = scheduler.submit("w6", seconds=0.01)
    time.sleep(0.02)
    engine.open.set()
    with pytest.raises(Late, match=r"did not end within 0.01 s"):
        late.result(20)
    assert running.result(20).ids


def test_wide_beams_widen_nobody_elses_rows(scheduler: Scheduler, engine: Watched) -> None:
    lines = held(scheduler, engine) + [scheduler.submit("w4 w6", beams=beams) for beams in (16, 1, 3)]
    engine.open.set()
    for line in lines:
        line.result(20)
    assert {width for _, width in engine.rows} <= {1, 3, 16}
    assert all(count == 1 for count, width in engine.rows if width > 1)


def test_the_encoder_takes_few_lines_between_steps_and_in_order(scheduler: Scheduler, engine: Watched) -> None:
    held(scheduler, engine)
    ended: list[int] = []
    engine.encoded.clear()
    for i in range(6):
        line = scheduler.submit("w4 w5 w6 w7 w8 w9 w10 w11 w12", max_tokens=2)  # 10 tokens, the end among them
        line.future.add_done_callback(lambda _, i=i: ended.append(i))
    engine.open.set()
    scheduler.close()
    assert engine.encoded == [20, 20, 20] and ended == [0, 1, 2, 3, 4, 5]


def test_an_engine_that_fails_ends_its_lines_and_the_next_ones_run(scheduler: Scheduler, engine: Watched) -> None:
    lines = held(scheduler, engine, 3)
    engine.broken = True
    engine.open.set()
    for line in lines:
        with pytest.raises(EngineError, match="the device is lost"):
            line.result(20)
    engine.broken = False
    assert scheduler.submit("w4").result(20).ids


@pytest.mark.parametrize(
    ("error", "shown", "others_go_on"),
    [
        (NoRoom("the memory is full"), "the memory is full", False),
        (MemoryError("no more"), "MemoryError: no more", False),
        (LimitError("refused"), "refused", True),
    ],
)
def test_an_engine_that_fails_while_lines_join_leaves_nobody_waiting(
    error: Exception, shown: str, others_go_on: bool, scheduler: Scheduler, engine: Watched
) -> None:
    [running] = held(scheduler, engine)
    with mock.patch.object(engine, "admit", side_effect=error):
        joining = [scheduler.submit("w6", min_tokens=2) for _ in range(2)]
        engine.open.set()
        for line in joining:
            with pytest.raises(TformerError, match=shown):
                line.result(20)
    if others_go_on:
        assert running.result(20).ids
    else:
        with pytest.raises(TformerError, match=shown):
            running.result(20)
    assert scheduler.submit("w4").result(20).ids


def test_a_removal_that_fails_ends_the_lines_that_shared_its_steps(scheduler: Scheduler, engine: Watched) -> None:
    engine.open.clear()
    with scheduler._wake:  # so that all join together
        lines = [scheduler.submit("w4 w5", min_tokens=6) for _ in range(3)]
    wait_for(lambda: scheduler.running == 3)
    with mock.patch.object(engine, "reorder", side_effect=EngineError("the device is lost")):
        lines[0].cancel()
        engine.open.set()
        for line, error in zip(lines, (Cancelled, EngineError, EngineError), strict=True):
            with pytest.raises(error):
                line.result(20)
    assert scheduler.submit("w4").result(20).ids


def test_lines_have_the_outputs_that_the_translator_allows(engine: Watched) -> None:
    allowed = TranslatorSettings(allowed=["w5 w6", "w7"])
    tokenizers = Tokenizers(SOURCE_WORDS, TARGET_WORDS)
    translator = Translator(engine, tokenizers, DecodeOptions(max_tokens=20), allowed)
    with translator, Scheduler(translator) as scheduler:
        lines = [scheduler.submit("w4 w5", beams=beams) for beams in (1, 1, 2)]
        assert {line.result(20).text for line in lines} <= {"w5 w6", "w7"}


def test_lines_that_come_while_all_fail_are_answered(scheduler: Scheduler, engine: Watched) -> None:
    """The scheduler's own thread fails again and again, while others submit."""

    def submit(_: int) -> bool:
        try:
            return bool(scheduler.submit("w4 w5").result(20).ids)
        except EngineError:
            return False

    fault = mock.patch.object(scheduler, "_drop", side_effect=RuntimeError("a fault of its own"))
    with fault, ThreadPoolExecutor(8) as pool:
        assert not any(pool.map(submit, range(200)))
    assert submit(0)


def test_a_caller_whose_write_fails_harms_nobody(scheduler: Scheduler, engine: Watched) -> None:
    def fail(_: str) -> None:
        raise OSError("the client is gone")

    [running] = held(scheduler, engine)
    lines = [scheduler.submit("w7 w8", write=fail, beams=beams, min_tokens=2) for beams in (1, 4)]
    engine.open.set()
    for line in lines:
        with pytest.raises(Exception, match="the client is gone"):
            line.result(20)
    assert running.result(20).ids


def test_a_task_that_is_cancelled_harms_nobody(scheduler: Scheduler, engine: Watched) -> None:
    lines = held(scheduler, engine, 2)

    async def wait() -> None:
        await asyncio.wait_for(asyncio.wrap_future(lines[0].future), 0.05)

    with pytest.raises(TimeoutError):
        asyncio.run(wait())
    engine.open.set()
    assert all(line.result(20).ids for line in lines)


def test_closing_waits_for_lines_or_cancels_them(engine: Watched) -> None:
    with translator_of(engine) as translator:
        scheduler = Scheduler(translator)
        lines = held(scheduler, engine, 2)
        engine.open.set()
        scheduler.close()
        assert all(line.result(0).ids for line in lines)
        with pytest.raises(ConfigError, match="is closed"):
            scheduler.submit("w4")
        scheduler = Scheduler(translator)
        lines = held(scheduler, engine, 2)
        threading.Timer(0.1, engine.open.set).start()
        scheduler.close(drain=False)
        for line in lines:
            with pytest.raises(Cancelled):
                line.result(0)


def test_closing_cancels_lines_that_the_encoder_has(engine: Watched) -> None:
    encoding, encode = threading.Event(), engine.encode

    def slow(*request: Any) -> TableState:
        encoding.set()
        engine.open.wait(20)
        return encode(*request)

    engine.open.clear()
    with translator_of(engine) as translator, mock.patch.object(engine, "encode", slow):
        scheduler = Scheduler(translator)
        line = scheduler.submit("w4 w5", min_tokens=20)
        assert encoding.wait(20)
        threading.Timer(0.1, engine.open.set).start()
        scheduler.close(drain=False)
        with pytest.raises(Cancelled):
            line.result(0)
