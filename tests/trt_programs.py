"""Programs that batch lines on plans in C++, each in a process of its own that sees a simulated GPU.

    python -m tests.trt_programs scheduler BUNDLE COUNT

`tests/test_trt_in_cpp.py` runs them. Each fails with an exception.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tformer_deploy import load
from tformer_deploy.base.errors import NotNumbers
from tformer_deploy.bundle.manifest import open_bundle
from tformer_deploy.decoding import Batch, ContinuousBatch, DecodeOptions, Hypothesis, Request, continuous, decode
from tformer_deploy.engines import make_engine
from tformer_deploy.engines.base import Joined, Limits, Running
from tformer_deploy.engines.trt.engine import TrtEngine
from tformer_deploy.serve.cards import card
from tformer_deploy.serve.models import Caps, Model
from tformer_deploy.serve.served import warm_up
from tformer_deploy.translate.scheduler import Scheduler

from .conftest import VOCAB, random_sources
from .test_scheduler import assert_same as assert_same_result
from .test_scheduler import caller

CLOSE = 1e-4
"""Between batches the order of sums differs."""
LONGEST = 20
WAYS: list[dict[str, Any]] = [
    {},
    {"beams": 5, "n_best": 5},
    {"beams": 2, "length_penalty": 0.6, "max_tokens": 9},
    {"beams": 3, "repetition_penalty": 1.2},
    {"sampling": True, "n_best": 3, "seed": 7},
    {"suppress": (9, 20, 41), "max_tokens": 14},
    {"endless": True, "max_tokens": 12},
]


def scheduler(bundle: Path, count: int) -> None:
    """Lines of eight threads, good and bad ones, cancelled ones and streams, get what Python gives each alone."""
    asked: dict[str, Any] = {"variant": "fp32", "max_tokens": LONGEST}
    with load(bundle, "trt", **asked) as translator, load(bundle, "trt", **asked) as alone:
        with Scheduler(translator, slots=8, join_tokens=24) as running, ThreadPoolExecutor(8) as pool:
            calls = [pool.submit(caller, running, alone, seed, count, CLOSE) for seed in range(8)]
            assert sum(call.result(300) for call in calls) > 4 * count
        assert in_cpp(translator.engine)


def in_cpp(engine: Any) -> bool:
    """Whether an engine has run all of its steps in C++."""
    assert isinstance(engine, TrtEngine)
    return bool(engine._in_cpp) and not engine._devices


def server(bundle: Path) -> None:
    """A model is warm before it is served; a line whose numbers are none fails alone."""
    with load(bundle, "trt", variant="fp32", max_tokens=LONGEST) as translator:
        model = Model("m", translator, Caps(max_tokens=LONGEST, beams=5), slots=4)
        warm_up(model)
        assert in_cpp(translator.engine) and model.scheduler.steps and card(model)["steps"] == "C++"
        texts = ["w5 w6", f"w7 w{SPOILED}", "w8 w9 w10", "w11"]
        bad = texts[1]
        lines = [model.submit(text, "", {"beams": 1 + i % 2}) for i, text in enumerate([*texts, *texts])]
        for i, (line, text) in enumerate(zip(lines, [*texts, *texts], strict=True)):
            if text == bad:
                with pytest.raises(NotNumbers):
                    line.result(60)
            else:
                [expected] = translator.translate([text], beams=1 + i % 2)
                assert_same_result(line.result(60), expected, CLOSE)
        model.close()


SPOILED = 20
"""The word of a bundle for `server` whose embedding is no number."""


def batches(bundle: Path, seeds: int) -> None:
    """Requests of every kind join at random steps, some are removed: as in Python's batches, and as alone."""
    with make_engine("trt:fp32", open_bundle(bundle)) as engine:
        assert isinstance(engine, TrtEngine)
        for seed in range(seeds):
            rng = random.Random(seed)
            asked = [request_of(rng, i) for i in range(9)]
            begins = [rng.choice((0, 0, 1, 2, 3, 5, 8, 13)) for _ in asked]
            leaving = {i: begins[i] + rng.randrange(4) for i in rng.sample(range(9), 2)}
            ours, theirs = (
                run(each, engine.limits, asked, begins, leaving)
                for each in (continuous(engine), ContinuousBatch(engine))
            )
            for i, request in enumerate(asked):
                if i in ours and i in theirs:
                    assert_same(ours[i].outputs(), theirs[i].outputs())
                if i in ours:
                    assert isinstance(request.options, DecodeOptions)
                    assert_same(ours[i].outputs(), decode(engine, request.batch, request.options))


def request_of(rng: random.Random, number: int) -> Request:
    """One or two sentences."""
    ids, lengths = random_sources(rng.choice((1, 1, 2)), rng.randrange(1, 20), rng.randrange(1 << 20))
    options = DecodeOptions(**{"max_tokens": LONGEST, **rng.choice(WAYS)})
    return Request(Batch(ids, lengths, [10 * number + i for i in range(len(ids))]), options)


def run(
    running: Running, limits: Limits, asked: Sequence[Request], begins: Sequence[int], leaving: dict[int, int]
) -> dict[int, Joined]:
    """Searches that have ended. Each joins before a step, or later when the plans have room for it."""
    searches: dict[int, Joined] = {}
    removed: set[int] = set()
    waiting = sorted(range(len(asked)), key=lambda i: begins[i])
    step = 0
    while waiting or going(searches, removed):
        for i in going(searches, removed):
            if leaving.get(i, step + 1) <= step:
                running.remove(searches[i])
                removed.add(i)
        on_their_way = going(searches, removed)
        joining: list[int] = []
        while waiting and begins[waiting[0]] <= step and has_room(limits, asked, [*on_their_way, *joining, waiting[0]]):
            joining.append(waiting.pop(0))
        if joining:
            searches.update(zip(joining, running.add([asked[i] for i in joining]), strict=True))
        running.step()
        step += 1
    return {i: search for i, search in searches.items() if i not in removed}


def going(searches: dict[int, Joined], removed: set[int]) -> list[int]:
    """Those that run; Python's searches do not say that they were removed."""
    return [i for i, search in searches.items() if search.running and i not in removed]


def has_room(limits: Limits, asked: Sequence[Request], together: Sequence[int]) -> bool:
    """As the scheduler asks it."""
    options: list[Any] = [asked[i].options for i in together]
    sentences = sum(len(asked[i].batch.src_ids) for i in together)
    widest = max(asked[i].batch.src_ids.shape[1] for i in together)
    most = limits.sentences(max(o.rows for o in options), widest, max(o.max_tokens for o in options))
    return len(together) == 1 or sentences <= most


def assert_same(found: list[list[Hypothesis]], expected: list[list[Hypothesis]]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert [(h.ids, h.end_id) for h in ours] == [(h.ids, h.end_id) for h in theirs]
        assert np.allclose([h.score for h in ours], [h.score for h in theirs], atol=CLOSE)


def serving(bundle: Path) -> None:
    """By the C API: lines of any beams, more of them than any plan takes, admitted at any step."""
    from . import cpp_library as cpp

    rng = random.Random(3)
    asked = [{"max_tokens": LONGEST, **way} for way in WAYS if not way.get("endless")]
    lines = [" ".join(f"w{rng.randrange(4, VOCAB)}" for _ in range(rng.randrange(1, 20))) for _ in range(40)]
    found: dict[int, Any] = {}
    with cpp.Model(bundle, backend="trt", variant="fp32") as model:
        with cpp.Serving(model) as running:
            for number, line in enumerate(lines):
                running.admit(line, number, **asked[number % len(asked)])
                for _ in range(rng.choice((0, 0, 0, 1, 4))):
                    running.step()
            running.retire(7)
            while running.step():
                pass
            while (taken := running.take()) is not None:
                found[taken[0]] = taken[1]
        assert set(range(40)) - found.keys() <= {7}
        for number, outputs in found.items():
            with cpp.Translator(model, **asked[number % len(asked)]) as translator:
                expected = translator.translate([lines[number]], first=number)[0]
            assert [each.ids for each in outputs] == [each.ids for each in expected], (number, outputs)
            assert np.allclose([each.score for each in outputs], [each.score for each in expected], atol=CLOSE)


def why_not(bundle: Path) -> None:
    """What the engine says; it batches lines all the same."""
    with load(bundle, "trt", variant="fp32", max_tokens=LONGEST) as translator:
        engine = translator.engine
        assert isinstance(engine, TrtEngine)
        with Scheduler(translator) as running:
            assert running.submit("w5 w6").result(60).ids == translator.translate(["w5 w6"])[0].ids
        print(engine.no_continuous)
        assert not engine._in_cpp


PROGRAMS: dict[str, Any] = {each.__name__: each for each in (scheduler, server, batches, serving, why_not)}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](Path(sys.argv[2]), *map(int, sys.argv[3:]))
