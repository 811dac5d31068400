"""The binding `tformer_native`: both searches find the same in one process, arrays are shared, threads and signals."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import gc
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tformer_deploy import load
from tformer_deploy.base.errors import LimitError, NotNumbers, TformerError
from tformer_deploy.bench.measure import decode_part
from tformer_deploy.bench.roofline import ProgramRead
from tformer_deploy.bundle.contract import GRAPHS, PROGRAM
from tformer_deploy.bundle.manifest import Bundle, open_bundle
from tformer_deploy.decoding import Batch, ContinuousBatch, DecodeOptions, Hypothesis, Trie, decode
from tformer_deploy.engines import make_engine
from tformer_deploy.engines.base import Calls, Engine, Scores, Searches
from tformer_deploy.engines.ort import shared_library

from .command import failed_line, printed, run_here
from .conftest import random_sources

native = pytest.importorskip("tformer_native", reason="tformer-native is not installed: make native")
from tformer_deploy.engines.native import NativeEngine  # noqa: E402

BUNDLE = Path(__file__).parent / "bundles" / "v2" / "copy"
PROGRAMS = ("native-fp32", "native-int8", "native-int4")


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return open_bundle(BUNDLE)


@pytest.fixture(scope="module", params=PROGRAMS)
def engine(request: pytest.FixtureRequest, bundle: Bundle) -> Iterator[Engine]:
    with make_engine(f"native:{request.param}", bundle, threads=2) as engine:
        yield engine


@pytest.mark.parametrize("name", ["cpp", "cpp:fp32-cpu", "native:native-fp32", "ort", "ort:fp32-cpu"])
def test_rows_may_be_reordered_twice_before_a_step(name: str, bundle: Bundle) -> None:
    """As when a sentence ends, and another is then given up."""
    with make_engine(name, bundle, threads=1) as engine:
        ids, lengths = np.array([[4, 5, 3], [5, 3, 1], [4, 4, 3]], np.int32), np.array([3, 2, 3], np.int32)
        scores = []
        for twice in (False, True):
            state = engine.encode(ids, lengths)
            engine.step(np.full((3, 1), engine.config.start_id, np.int32), state)
            engine.reorder(state, np.array([[0, 0], [1, 1], [2, 2]], np.int32))
            engine.step(np.array([[4, 5], [5, 4], [4, 5]], np.int32), state)
            if twice:
                engine.reorder(state, np.array([[1, 0, 0], [3, 2, 2], [4, 5, 5]], np.int32))
                engine.reorder(state, np.array([[0, 1, 2], [6, 7, 8]], np.int32), np.array([0, 2], np.int32))
            else:
                engine.reorder(state, np.array([[1, 0, 0], [4, 5, 5]], np.int32), np.array([0, 2], np.int32))
            scores.append(engine.step(np.array([[4, 5, 5], [5, 4, 4]], np.int32), state).scores.copy())
    assert np.allclose(*scores, atol=1e-5)


def batch_of(engine: Engine, count: int = 6, width: int = 9, prefixes: Any = ()) -> Batch:
    ids, lengths = random_sources(count, width)
    words = engine.config.src_vocab
    ids = np.where(ids >= words, words - 1, ids).astype(np.int32)
    return Batch(ids, lengths, range(3, 3 + count), prefixes)


def sources_of_two() -> tuple[Any, Any]:
    return np.full((2, 6), 5, np.int32), np.array([6, 3], np.int32)


def shown(found: list[list[Hypothesis]]) -> list[list[dict[str, Any]]]:
    """All that an output has; equal numbers are equal to the last bit."""
    return [[dataclasses.asdict(each) for each in outputs] for outputs in found]


def ours(engine: Engine, batch: Batch, options: DecodeOptions, allowed: Trie | None = None) -> list[list[Hypothesis]]:
    """What Python's search finds over the engine's steps."""
    running = ContinuousBatch(engine)
    search = running.join(batch, options, allowed)
    while running.searches:
        running.step()
    return search.outputs()


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "limits": {"min_tokens": 3, "max_ratio": 0.8},
    "beam": {"beams": 4, "n_best": 3, "length_penalty": 0.6, "length_norm": "gnmt"},
    "exact": {"beams": 3, "stop": "exact", "repetition_penalty": 1.3},
    "estimate": {"beams": 3, "stop": "estimate", "no_repeat_ngram": 2},
    "sampling": {"sampling": True, "n_best": 3, "seed": 7, "temperature": 1.5},
    "top": {"sampling": True, "top_k": 4, "top_p": 0.9, "min_p": 0.01},
    "forced": {"first_ids": (5,), "first_adds_zero": True, "suppress": (6, 7), "forced_end": True, "max_tokens": 6},
    "endless": {"endless": True, "max_tokens": 5, "beams": 2},
    "aligned": {"align": True, "beams": 3, "coverage_penalty": 0.2},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_both_searches_find_the_same(name: str, engine: Engine) -> None:
    options = DecodeOptions(**{"max_tokens": 12, **OPTIONS[name]})
    for batch in (batch_of(engine), batch_of(engine, 3, 5, prefixes=[(5, 6), (), (8,)])):
        found = decode(engine, batch, options)
        assert shown(found) == shown(ours(engine, batch, options)) and any(each[0].ids for each in found)


def test_a_set_of_outputs(engine: Engine) -> None:
    allowed = [(5, 6), (5, 7, 8), (9,), ()]
    for outputs in (allowed, allowed[:1]):
        trie, options = Trie(outputs), DecodeOptions(beams=2, n_best=2)
        found = decode(engine, batch_of(engine), options, trie)
        assert sorted(trie.outputs()) == sorted(outputs)
        assert shown(found) == shown(ours(engine, batch_of(engine), options, trie))
        assert {tuple(each.ids) for best in found for each in best} <= set(outputs)


def test_only_steps_that_somebody_looks_at_are_pythons(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    taken = engine.step
    monkeypatch.setattr(engine, "step", lambda *given: steps.append(1) or taken(*given))  # type: ignore[func-returns-value]
    options = DecodeOptions(max_tokens=8)
    whole = decode(engine, batch_of(engine), options)
    assert not steps
    assert shown(decode(engine, batch_of(engine), options, on_step=lambda step: None)) == shown(whole)
    assert steps


def test_translations_are_those_of_python_whatever_the_workers() -> None:
    lines = [" ".join(str((i * j) % 10) for j in range(1, 2 + i % 7)) for i in range(40)]
    asked: dict[str, Any] = {"variant": "native-int8", "backend": "native", "beams": 3, "n_best": 2}
    with load(BUNDLE, **asked, threads=1) as one, load(BUNDLE, **asked, threads=2, workers=3) as three:
        found = one.translate(lines)
        assert three.translate(lines) == found and three.translate(lines) == found
        pieces: list[str] = []
        one.options = dataclasses.replace(one.options, beams=1, n_best=1)
        streamed = one.stream(lines[6], pieces.append)
        assert "".join(pieces) == streamed.text == one.translate([lines[6]])[0].text
        assert one.score(lines[:5], [each.text for each in found[:5]]) == three.score(
            lines[:5], [each.text for each in found[:5]]
        )


def test_the_command_says_what_python_says() -> None:
    stdin = b"3 1 4 1 5\n\n9 2 6\n"
    outputs = [
        printed(run_here("translate", BUNDLE, "--backend", backend, "--variant", variant, stdin=stdin))
        for backend, variant in (("native", "native-fp32"), ("ort", "fp32"))
    ]
    assert outputs[0] == outputs[1] == ["3 1 4 1 5", "", "9 2 6"]


def test_what_a_step_gave_stays_as_it_was(engine: Engine) -> None:
    batch = batch_of(engine)
    state = engine.encode(batch.src_ids, batch.src_lengths)
    kept: list[tuple[Scores, Any]] = []
    tokens = np.full((len(batch.src_ids), 1), engine.config.start_id, np.int32)
    for _ in range(4):
        scores = engine.step(tokens, state, full=True)
        assert scores.log_probs is not None and scores.attention is None
        assert not scores.log_probs.flags.owndata and not scores.ids.flags.owndata  # memory of C++
        kept.append((scores, [np.array(each) for each in (scores.ids, scores.scores, scores.log_probs)]))
        tokens = np.ascontiguousarray(scores.ids[:, :, 0])
    del state
    for scores, copies in kept:
        assert all(map(np.array_equal, (scores.ids, scores.scores, scores.log_probs), copies))


def test_memory_of_a_step_is_used_again(engine: Engine) -> None:
    batch = batch_of(engine)
    state = engine.encode(batch.src_ids, batch.src_lengths)
    tokens, places = np.full((len(batch.src_ids), 1), engine.config.start_id, np.int32), set()
    for _ in range(5):
        scores = engine.step(tokens, state, full=True)
        assert scores.log_probs is not None
        places.add(scores.log_probs.ctypes.data)
        del scores
    assert len(places) == 1


def test_mistakes_of_the_caller_are_refused(engine: Engine) -> None:
    batch = batch_of(engine, 3)
    state = engine.encode(batch.src_ids, batch.src_lengths)
    start = np.full((3, 1), engine.config.start_id, np.int32)
    engine.step(start, state)
    for rows in (start[:2], np.tile(start, 2), start[:, 0]):
        with pytest.raises(
            ValueError, match=r"tokens: an array of shape .* given: must be (of shape \(3, 1\), the|an arr)"
        ):
            engine.step(rows, state)
    for parents, kept in (
        *((start, None), (start * 0 - 1, None), (start[:2] * 0, [0, 1]), (start * 0, [0, 1])),
        *((start[:2] * 0, [0, 0]), (start[:2][::-1], [1, 0])),
    ):
        with pytest.raises(
            ValueError, match=r"(parents|sentences): .* given: must be (of shape|a row of|numbers from 0)"
        ):
            engine.reorder(state, parents, None if kept is None else np.array(kept, np.int32))
    with pytest.raises(LimitError, match="is outside the source vocabulary"):
        engine.encode(batch.src_ids + 10_000, batch.src_lengths)
    with pytest.raises(LimitError, match="is outside the target vocabulary"):
        engine.step(start - 9, state)


def test_every_argument_is_checked_where_it_enters() -> None:
    """What these asked for ended the process, never ended, or wrote where nothing was."""
    ids, lengths = np.full((2, 4), 5, np.int32), np.full(2, 4, np.int32)
    with pytest.raises(native.Error, match="threads=-5: must be a whole number from 0 to"):
        native.Model(str(BUNDLE), "native-int8", -5)
    model = native.Model(str(BUNDLE), "native-int8", 1)
    state = model.encode(ids, lengths, 1, 20, [])
    for call, words in (
        (lambda: model.encode(ids, lengths, 2**62, 20, []), f"{2**62} beams exceed the limit of 7"),
        (lambda: model.encode(ids, lengths, -1, 20, []), "beams=-1, tokens=20: must be at least 0"),
        (lambda: model.encode(ids, lengths, 1, -9, []), "beams=1, tokens=-9: must be at least 0"),
        (
            lambda: model.encode(ids, lengths, 1, 20, [[5], [10**6]]),
            "token id 1000000 is outside the target vocabulary",
        ),
        (lambda: state.admit(ids, lengths, 2**62, 20, []), "beams exceed the limit of 7"),
        (lambda: state.best(2**62), "beams exceed the limit of 7"),
        (lambda: state.reorder(np.zeros((1, 2000), np.int32), np.zeros(1, np.int32)), "2000 beams exceed the limit"),
        (lambda: model.search(ids, lengths, [], [], "{", None, False, None), "options are not JSON"),
        (lambda: native.product_rate("fp32", 0), "threads=0: must be a whole number from 1"),
        (lambda: native.product_rate("int8", 10**9), "threads=1000000000: must be a whole number from 1"),
    ):
        with pytest.raises(native.Error, match=words):
            call()
    assert state.step(np.full((2, 1), 2, np.int32), False, False)[0].shape == (2, 1, 2)


def test_arrays_that_are_none_or_do_not_fit_are_named_with_what_is_needed() -> None:
    """The caller's mistake, not a fault to report; what would lose a fraction or its upper bits is none either."""
    ids, lengths = np.full((2, 4), 5, np.int32), np.full(2, 4, np.int32)
    model = native.Model(str(BUNDLE), "native-int8", 1)
    state = model.encode(ids, lengths, 1, 20, [])
    rows = np.zeros((2, 1), np.int32)
    far, below = rows.astype(np.int64) + 2**32, rows.astype(np.int64) - 2**33
    beyond = rows.astype(np.uint64) + np.uint64(2**64 - 1)
    for call, kind, words in (
        (
            lambda: model.encode(ids + 0.5, lengths, 1, 20, []),
            TypeError,
            "src_ids: ndarray of float64 given: must be a",
        ),
        (lambda: model.memory(ids > 3, lengths), TypeError, "src_ids: ndarray of bool given: must be a numpy array of"),
        (lambda: state.admit(ids, [4, 4], 1, 20, []), TypeError, "src_lengths: list given: must be a numpy array of i"),
        (lambda: state.step(None, False, False), TypeError, "tokens: NoneType given: must be a numpy array of int32"),
        (lambda: state.reorder("01", None), TypeError, "parents: str given: must be a numpy array of int32"),
        (lambda: state.reorder(rows, [0, 1]), TypeError, "sentences: list given: must be a numpy array of int32"),
        (
            lambda: state.step(far, False, False),
            ValueError,
            "tokens: 4294967296 given: must be in the range",
        ),
        (
            lambda: state.step(below, False, False),
            ValueError,
            f"tokens: -{2**33} given: must be in",
        ),
        (
            lambda: state.step(beyond, False, False),
            ValueError,
            f"tokens: {2**64 - 1} given: must",
        ),
        (
            lambda: model.encode(ids[0], lengths, 1, 20, []),
            ValueError,
            "src_ids: an array of shape (4,) given: must be",
        ),
        (
            lambda: model.search(ids, lengths[:1], [], [], "{}", None, False, None),
            ValueError,
            "src_lengths: an array of shape (1,) given: must be of shape (2,), one for each row of src_ids",
        ),
        (lambda: model.encode(ids, lengths, 1, 20, [[5]]), ValueError, "required: 1 given: must be 2, one for each so"),
        (
            lambda: model.search(ids, lengths, [1, 2, 3], [], "{}", None, False, None),
            ValueError,
            "numbers: 3 given: must be 2, one for each source, or none",
        ),
        (
            lambda: model.search(ids, lengths, [], [[5]], "{}", None, False, None),
            ValueError,
            "prefixes: 1 given: must be 2, one for each source, or none",
        ),
        (
            lambda: state.step(rows[:1], False, False),
            ValueError,
            "tokens: an array of shape (1, 1) given: must be of sh",
        ),
        (
            lambda: state.reorder(rows[:1], None),
            ValueError,
            "parents: an array of shape (1, 1) given: must be of shape ",
        ),
        (
            lambda: state.reorder(rows, lengths),
            ValueError,
            "sentences: 4 given: must be numbers from 0 to 1, each large",
        ),
        (
            lambda: state.reorder(rows, None),
            ValueError,
            "parents: 0 given: must be a row of sentence 1, which has 1 to 1",
        ),
        (lambda: state.best(-1), ValueError, "beams: -1 given: must be at least 1"),
    ):
        with pytest.raises(kind) as error:
            call()
        assert str(error.value).startswith(words)
    wide, columns = state.step(rows.astype(np.int64), False, False), np.asfortranarray(ids)
    model.encode(columns.astype(np.uint8), lengths.astype(np.int16), 1, 20, [])
    again = model.encode(columns, lengths, 1, 20, []).step(rows, False, False)
    assert all(map(np.array_equal, wide[:2], again[:2])), "whole numbers of any size and order are what they say"


def test_any_arguments_and_threads_end_in_errors() -> None:
    """In a process of its own, as what goes wrong there ends it; engines/sanitize runs it with sanitizers."""
    program = Path(__file__).parent / "fuzz_native.py"
    done = subprocess.run([sys.executable, program, BUNDLE, "2"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


SHORT_OF_MEMORY = """
import contextlib, resource, re, sys
import numpy as np
import tformer_native

def limit(room):
    used = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
    resource.setrlimit(resource.RLIMIT_AS, (used + room if room else -1, -1))

def sources(count):
    return np.tile(np.array([5, 4, 5, 3], np.int32), (count, 4)), np.full(count, 16, np.int32), 1, 4, []

def step(state, count):
    ids, scores, _, _ = state.step(np.full((count, 1), 2, np.int32), False, False)
    print(ids.shape[0], ids[0, 0, :2].tolist(), scores[0, 0, 0], file=sys.stderr)

def leave(room):
    # use all memory but so much, that of freed blocks as well
    limit(room)
    ballast = []
    with contextlib.suppress(MemoryError):
        while True:
            ballast.append(bytearray(1 << 20))
    del ballast[: room >> 20]
    return ballast

def failed(call, words=""):
    try:
        call()
    except tformer_native.Error as error:
        assert error.args[1] == 9 and words in error.args[0], error
        return
    raise SystemExit("there was memory enough")
"""


@pytest.mark.parametrize(
    "work",
    [
        "state = model(1).encode(*sources(2))\nlimit(8 << 20)\nfailed(lambda: state.admit(*sources(1000)))\nlimit(0)",
        "one = model(1)\nstep(one.encode(*sources(2)), 2)\nlimit(8 << 20)\nfailed(lambda: one.encode(*sources(1000)))\n"
        "limit(0)\nstate = one.encode(*sources(2))",
        "limit(40 << 20)\nstate = model(16).encode(*sources(2))\nlimit(0)",
    ],
    ids=["a sentence that would join", "a batch", "threads"],
)
@pytest.mark.parametrize("name", ["native-fp32", "native-int4"])
def test_what_finds_no_memory_leaves_the_rest_as_it_was(work: str, name: str) -> None:
    program = f"""{SHORT_OF_MEMORY}
def model(threads):
    return tformer_native.Model({str(BUNDLE)!r}, {name!r}, threads)

{work}
step(state, 2)
step(model(1).encode(*sources(2)), 2)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done
    *_, found, expected = done.stderr.splitlines()
    assert found == expected


def in_little_memory(program: str) -> None:
    """Run a program in a process of its own: what goes wrong there ends it."""
    done = subprocess.run(
        [sys.executable, "-c", SHORT_OF_MEMORY + program], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done


def test_a_reorder_that_finds_no_memory_changes_no_sentence() -> None:
    in_little_memory(f"""
model = tformer_native.Model({str(BUNDLE)!r}, "native-fp32", 1)
ids, lengths, *_ = sources(1000)
both = [model.encode(ids, lengths, 2, 8, []) for _ in range(2)]
rows = np.arange(2000, dtype=np.int32).reshape(1000, 2)
for state in both:
    state.step(rows[:, :1] * 0 + 2, False, False)
    state.reorder(rows[:, :1] // 2 + [[0, 0]], None)
    state.step(np.tile(np.array([4, 9], np.int32), (1000, 1)), False, False)
ballast = leave(8 << 20)
failed(lambda: both[0].reorder(np.repeat(rows[:, ::-1], 3, 1), None))
limit(0)
one, other = (state.step(rows % 2 + 4, True, False)[2] for state in both)
assert np.array_equal(one, other)
""")


def test_a_state_that_lost_its_caches_is_refused() -> None:
    """In-place steps move their caches to new buffers."""
    in_little_memory(f"""
from tformer_deploy.engines.ort import shared_library

model = tformer_native.Model({str(BUNDLE)!r}, "fp32-cpu", 1, onnxruntime=shared_library())
state = model.encode(*sources(1000))
first = np.full((1000, 1), 2, np.int32)
state.step(first, False, False)
ballast = leave(4 << 20)
failed(lambda: state.reorder(np.repeat(np.arange(1000, dtype=np.int32)[:, None], 7, 1), None))
limit(0)
same = np.arange(1000, dtype=np.int32)[:, None]
for call in (
    lambda: state.step(first, False, False),
    lambda: state.reorder(same, None),
    lambda: state.admit(*sources(1)),
    lambda: state.cross_keys_values(),
):
    failed(call, "the caches were lost when memory ran out: encode again")
step(model.encode(*sources(2)), 2)
""")


def test_threads_that_do_not_start_end_in_an_error() -> None:
    in_little_memory("limit(40 << 20)\nfailed(lambda: tformer_native.product_rate('fp32', 8))\n")


@pytest.mark.parametrize("name", ["native-fp32", "fp32-cpu", "fp32"])
def test_tokens_outside_the_vocabulary_are_refused(name: str) -> None:
    library = None if name.startswith("native") else shared_library()
    state = native.Model(str(BUNDLE), name, 1, onnxruntime=library).encode(*sources_of_two(), 1, 8, [])
    for token in (-1, 14):
        with pytest.raises(native.Error, match=f"token id {token} is outside the target vocabulary of 14"):
            state.step(np.full((2, 1), token, np.int32), False, False)


def test_more_best_tokens_than_words_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(BUNDLE, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["variants"]["native-fp32"]["recipe"]["top_k"] = 20_000_000
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(native.Error, match="top_k=20000000 exceeds the vocabulary of 14"):
        native.Model(str(folder), "native-fp32", 1)


def test_threads_with_other_allowed_outputs_get_their_own(bundle: Bundle) -> None:
    """The engine keeps the last ones; here another thread replaces them at the worst moment."""
    mine, other = Trie([[4, 5]]), Trie([[6, 7]])

    class Raced(NativeEngine):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "_allowed" and value and value[0] is mine:
                thread = threading.Thread(target=self.compiled, args=(other,))
                thread.start()
                thread.join()

    with Raced(bundle, 1, "native-fp32") as engine:
        found = engine.search(batch_of(engine), DecodeOptions(), mine)
    assert all(output.ids == [4, 5][: len(output.ids)] for outputs in found for output in outputs), found


@pytest.mark.parametrize("changes", [{"beams": 5000}, {"suppress": (10_000,)}], ids=str)
def test_refusals_are_those_of_python(changes: dict[str, Any], engine: Engine) -> None:
    options, words = DecodeOptions(**changes), []
    for search in (decode, ours):
        with pytest.raises(LimitError) as refused:
            search(engine, batch_of(engine), options)  # type: ignore[operator]
        words.append(str(refused.value))
    assert words[0] == words[1]


@pytest.mark.parametrize(
    ("prefixes", "ids", "message"),
    [
        ([[2**40]], np.int32, "token id 1099511627776 is outside the target vocabulary"),
        ([["a"]], np.int32, "prefixes: 'a' is no whole number"),
        ((), np.float32, "src_ids: must be an array of 2 axes and whole numbers"),
    ],
    ids=str,
)
def test_batches_that_no_search_can_read_are_refused_as_by_python(
    prefixes: Any, ids: Any, message: str, engine: Engine
) -> None:
    batch = batch_of(engine, 1)
    batch = Batch(batch.src_ids.astype(ids), batch.src_lengths, batch.numbers, prefixes)
    for search in (decode, ours):
        with pytest.raises(TformerError, match=message):
            search(engine, batch, DecodeOptions())  # type: ignore[operator]


def test_numbers_that_are_none_name_their_request(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "request 5: NaN or infinite log-probabilities at token 1"

    class Model:
        limits, attention, admits = (64, 64, 64, 8), False, True

        def search(self, *arguments: Any) -> Any:
            raise native.Error(said, 6, 4)

    with NativeEngine(bundle, 1, "native-fp32") as engine:
        monkeypatch.setattr(engine, "_model", Model())
        with pytest.raises(NotNumbers, match=said) as found:
            decode(engine, batch_of(engine), DecodeOptions())
    assert found.value.request == 4


LONG = DecodeOptions(endless=True, sampling=True, n_best=7, top_k=5, top_p=0.9, repetition_penalty=1.1)
"""With 1,024 sentences twice as long as between two looks for signals."""


def test_a_signal_of_another_thread_ends_a_search(engine: Engine) -> None:
    """That thread sends it while the search runs."""

    class Enough(Exception):
        pass

    def handler(*_: Any) -> None:
        raise Enough

    calls: Calls = []
    batch = batch_of(engine, 1024)
    search = functools.partial(cast(Searches, engine).search, batch, LONG)
    before = signal.signal(signal.SIGALRM, handler)
    try:
        for delay in np.linspace(0.01, 0.1, 40):
            calls.clear()
            begun, other = False, threading.Timer(delay, signal.raise_signal, [signal.SIGALRM])
            with contextlib.suppress(Enough):  # none comes where it was raised in a garbage collection
                other.start()
                begun = True
                search(calls=calls)
                other.join()
            if begun and not calls:  # else it came before or after the search
                return
        raise AssertionError("no search was ended")
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.long
def test_forks_of_an_open_engine_go_on(bundle: Bundle) -> None:
    """Whatever the helper threads hold, which are not there in the child: it decodes alone, and ends."""
    with make_engine("native:native-int8", bundle, threads=8) as engine:
        batch = batch_of(engine)
        expected = shown(decode(engine, batch, DecodeOptions(max_tokens=9)))
        for i in range(100):
            decode(engine, batch, DecodeOptions(max_tokens=9))
            end = time.perf_counter() + i % 20 * 1e-5  # about when they go to sleep
            while time.perf_counter() < end:
                pass
            child = os.fork()
            if not child:
                signal.alarm(60)
                same = shown(decode(engine, batch, DecodeOptions(max_tokens=9))) == expected
                if not i:
                    cast(NativeEngine, engine).__exit__()
                    del engine
                    gc.collect()
                os._exit(0 if same else 1)
            assert os.waitpid(child, 0)[1] == 0


UPWARD, INVALID = 0x800, 1
"""Of <fenv.h> on x86."""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of <fenv.h> are those of x86")
@pytest.mark.parametrize("host", ["upward", "traps"])
def test_a_hosts_rounding_and_traps_are_not_the_engines(host: str, bundle: Bundle) -> None:
    libm = ctypes.CDLL("libm.so.6")
    with make_engine("native:native-fp32", bundle, threads=2) as engine:
        batch = batch_of(engine)

        def numbers() -> Any:
            state = engine.encode(batch.src_ids, batch.src_lengths)
            return engine.step(np.full((6, 1), 2, np.int32), state, full=True).log_probs

        expected = numbers()
        try:
            libm.fesetround(UPWARD) if host == "upward" else libm.feenableexcept(INVALID)
            found = numbers()
            kept = libm.fegetround() if host == "upward" else libm.fegetexcept()
        finally:
            libm.fesetround(0)
            libm.fedisableexcept(INVALID)
    assert np.array_equal(found, expected) and kept == (UPWARD if host == "upward" else INVALID)


def test_a_batch_of_nothing_is_refused(engine: Engine) -> None:
    with pytest.raises(TformerError, match="src_ids has no sentence: give one at least"):
        decode(engine, Batch(np.zeros((0, 3), np.int32), np.zeros(0, np.int32)), DecodeOptions())


def test_what_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("translate", BUNDLE, "--backend", "native")
    monkeypatch.setattr("tformer_deploy.engines.native.native_version", "9.9.9")
    line = failed_line(run_here(*command))
    assert re.search(r"tformer-native is of version 9\.9\.9, this is .*: install the wheel", line)
    monkeypatch.delitem(sys.modules, "tformer_deploy.engines.native", raising=False)
    monkeypatch.setitem(sys.modules, "tformer_native", None)
    way = "install the wheel that was released with this tformer, or make native in a checkout"
    expected = f"tformer-native is not installed: {way}"
    assert failed_line(run_here(*command)) == f"error: {expected}"
    older = types.ModuleType("tformer_native")  # an old version has no `State`
    monkeypatch.setitem(sys.modules, "tformer_native", older)
    assert "error: tformer-native cannot be loaded (cannot import name" in failed_line(run_here(*command))


def test_nothing_of_what_is_linked_is_exported() -> None:
    (library,) = Path(native.__file__).parent.glob("_native.*so")
    lines = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout
    assert {line.split()[-1] for line in lines.splitlines()} == {"PyInit__native"}
    needed = subprocess.run(["readelf", "-d", library], check=True, capture_output=True, text=True).stdout
    assert not re.search(r"\[lib(stdc\+\+|gcc_s|onnxruntime|crypto)", needed)


# How far from the machine's limit


def test_a_program_reads_what_it_says(bundle: Bundle) -> None:
    """All arrays of a step but tables; each weight of the network once."""
    config = bundle.config
    for name in PROGRAMS:
        program = json.loads((BUNDLE / name / PROGRAM).read_text())
        encoder, step = (ProgramRead.of(program, graph) for graph in GRAPHS)
        every = sum(int(np.prod(each["shape"])) * np.dtype(each["dtype"]).itemsize for each in program["arrays"])
        assert 0 < step.size < every and 0 < encoder.size < every
        d = config.d_model
        weights = config.decoder.layers * (6 * d * d + 2 * d * config.d_ff) + d * config.tgt_vocab
        assert sum(step.products()) == weights
        assert (step.products()[0] == 0) is (name == "native-fp32")


def test_calls_of_a_search_are_watched(engine: Engine) -> None:
    sample = decode_part(engine, batch_of(engine, 2, 6).src_ids, DecodeOptions(max_tokens=6, beams=2, endless=True))
    assert len(sample.steps_ms) == 6 and sample.tokens == 12
    assert 0 < sample.encoder_ms < sample.first_token_ms < sample.latency_ms and 0 <= sample.outside < 1


def test_the_rate_of_products() -> None:
    assert native.best_kernels() in native.kernels()
    assert min(native.product_rate(name, 1) for name in ("fp32", "int8")) > 1e8
    with pytest.raises(native.Error, match="numbers=int5: must be fp32 or int8"):
        native.product_rate("int5", 1)


@pytest.mark.long
def test_the_benchmark_has_limits_for_programs(tmp_path: Path) -> None:
    sizes = (
        "--batch",
        2,
        "--beam",
        1,
        "--src-len",
        4,
        "--new-tokens",
        4,
        "--rounds",
        1,
        "--seconds",
        0,
        "--threads",
        1,
    )
    (text,) = printed(run_here("bench", BUNDLE, "--backend", "native", *sizes, "--json"))
    report = json.loads(text)
    programs = (name for name, recipe in open_bundle(BUNDLE).variants.items() if recipe.target == "native")
    assert [each["engine"] for each in report["engines"]] == [f"native:{name}" for name in sorted(programs)]
    sizes_of = {}
    for point in report["points"]:
        assert point["step_bound"]["share"] > 0 and point["encoder_bound"]["share"] > 0
        sizes_of[point["engine"]] = point["step_bound"]["bytes"]
    assert sizes_of["native:native-int4"] < sizes_of["native:native-int8"] < sizes_of["native:native-fp32"]


def test_batches_are_of_a_size_that_suits_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless somebody says another."""
    sizes: list[int] = []
    search = NativeEngine.search

    def noted(engine: NativeEngine, batch: Batch, *arguments: Any) -> Any:
        sizes.append(batch.src_ids.size)
        return search(engine, batch, *arguments)

    monkeypatch.setattr(NativeEngine, "search", noted)
    lines = ["9 7 3 6 5 4"] * 150
    for given, largest in ((0, 36 * 7), (40, 5 * 7), (4096, 150 * 7)):  # the first: at most 256 tokens
        with load(BUNDLE, backend="native", threads=1, batch_tokens=given) as translator:
            sizes.clear()
            translator.translate(lines)
        assert max(sizes) == largest
