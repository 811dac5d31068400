"""Sentences that join others on their way get what they get alone."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings

from tformer_deploy.base.errors import ConfigError, EngineError, LimitError, NotNumbers, TformerError
from tformer_deploy.bundle.contract import GRAPHS, SLOTS_GRAPH
from tformer_deploy.bundle.manifest import open_bundle
from tformer_deploy.decoding import Batch, ContinuousBatch, DecodeOptions, Hypothesis, Trie, decode
from tformer_deploy.engines import make_engine
from tformer_deploy.engines.base import Engine
from tformer_deploy.engines.eager import EagerEngine
from tformer_deploy.engines.ort.device_search import DeviceSearchEngine
from tformer_deploy.engines.ort.in_place import InPlaceEngine
from tformer_deploy.engines.speculative import SpeculativeState

from .conftest import ending_model, random_model, random_sources, small_config, variant_engine
from .params import long_but
from .plain_decoding import TableEngine, Tokens, make_batch
from .test_decoding import Chooser, make_trie, seeds
from .test_in_place import POSITIONS
from .test_short_step import lists

Request = tuple[Batch, DecodeOptions, Trie | None]
CLOSE = 1e-4
"""Between batches the order of sums differs."""


def run_joined(engine: Engine, requests: Sequence[Request], begins: Sequence[int]) -> list[list[list[Hypothesis]]]:
    """The outputs of each request, which joins before a step."""
    running, searches = ContinuousBatch(engine, strict=False), {}
    for step in count():
        for i in (i for i, begin in enumerate(begins) if begin == step):
            batch, options, allowed = requests[i]
            searches[i] = running.join(batch, options, allowed)
        if not running.searches and step >= max(begins):
            return [searches[i].outputs() for i in range(len(requests))]
        if running.searches:
            running.step()
    raise AssertionError


def requests_of(chooser: Chooser, engine: TableEngine) -> Iterator[Request]:
    for _ in range(chooser.one(2, 3, 5)):
        options = chooser.one(chooser.beam_options, chooser.sampling_options)()
        sentences = chooser.sentences(options, engine)
        batch = make_batch([s.source for s in sentences], [s.number for s in sentences], [s.prefix for s in sentences])
        yield batch, sentences[0].options, make_trie(sentences[0].allowed)


@settings(max_examples=150)
@given(seeds)
def test_every_search_is_as_it_is_alone(seed: int) -> None:
    """Batches of any options, widths and rules, beside each other, on an engine whose numbers are exact."""
    chooser = Chooser(seed)
    engine = chooser.sentences(chooser.beam_options())[0].engine
    requests = list(requests_of(chooser, engine))
    begins = [chooser.one(0, 0, 1, 2, 5, 9) for _ in requests]
    alone = [decode(engine, batch, options, allowed, strict=False) for batch, options, allowed in requests]
    assert run_joined(engine, requests, begins) == alone


# What is wrong with one request ends that request alone


class PartlyBroken(TableEngine):
    """Without attention; sources of a word have log-probabilities that are no numbers from their third token on."""

    BROKEN = 3

    def __init__(self, seed: int, positions: int) -> None:
        super().__init__(seed, positions=positions)
        self.attention = False

    def log_probs(self, source: Tokens, output: Tokens) -> Any:
        found = super().log_probs(source, output)
        return found * np.float32(np.nan) if self.BROKEN in source and len(output) > 1 else found

    def step(self, tokens: Any, state: Any, full: bool = False, attention: bool = False) -> Any:
        if attention:
            raise LimitError("too late: every sentence on its way fails")
        return super().step(tokens, state, full)


def bad_requests(engine: Engine) -> dict[str, tuple[Any, Any, Any]]:
    """Of everything that a request consists of: a batch, options, allowed outputs."""
    fine, plain, limits, vocab = make_batch([(4, 5), (6,)]), DecodeOptions(), engine.limits, engine.config.tgt_vocab
    wide = np.full((1, limits.src_tokens + 1), 4, np.int32)
    many = np.full((limits.batch + 1, 1), 4, np.int32)

    def batch(**changes: Any) -> Batch:
        return dataclasses.replace(fine, **changes)

    return {
        "align": (fine, DecodeOptions(align=True), None),
        "coverage": (fine, DecodeOptions(beams=2, coverage_penalty=0.5), None),
        "beams": (fine, DecodeOptions(beams=limits.beams + 1), None),
        "samples": (fine, DecodeOptions(sampling=True, n_best=limits.beams + 1), None),
        "suppress": (fine, DecodeOptions(suppress=(vocab,)), None),
        "end_ids": (fine, DecodeOptions(end_ids=(-1,)), None),
        "first_ids": (fine, DecodeOptions(first_ids=(vocab,)), None),
        "allowed": (fine, plain, Trie([(1, 2), (vocab, 1)])),
        "prefix": (batch(prefixes=[(), (vocab,)]), plain, None),
        "a prefix of the end token": (batch(prefixes=[(), (engine.config.eos_id,)]), plain, None),
        "a long prefix": (batch(prefixes=[(1, 1, 1), ()]), DecodeOptions(max_tokens=2), None),
        "a prefix beyond the positions": (batch(prefixes=[(1,) * (limits.tgt_tokens + 1), ()]), plain, None),
        "a prefix of no ids": (batch(prefixes=[(1.5,), ()]), plain, None),
        "prefixes": (batch(prefixes=[(1,)]), plain, None),
        "numbers": (batch(numbers=[1, 2, 3]), DecodeOptions(sampling=True), None),
        "a negative number": (batch(numbers=[1, -2]), DecodeOptions(sampling=True), None),
        "a number of 65 bits": (batch(numbers=[1, 1 << 64]), DecodeOptions(sampling=True), None),
        "a number that is text": (batch(numbers=["1", "2"]), DecodeOptions(sampling=True), None),
        "source ids": (batch(src_ids=np.array([[4, 5], [engine.config.src_vocab, 1]], np.int32)), plain, None),
        "negative source ids": (batch(src_ids=np.array([[4, -5], [6, 1]], np.int32)), plain, None),
        "fractions": (batch(src_ids=np.array([[4.5, 5], [6, 1]])), plain, None),
        "one axis": (batch(src_ids=np.array([4, 5], np.int32)), plain, None),
        "a list": (batch(src_ids=[[4, 5], [6, 1]]), plain, None),
        "nothing": (Batch(np.empty((0, 3), np.int32), np.empty(0, np.int32)), plain, None),
        "lengths": (batch(src_lengths=np.array([2], np.int32)), plain, None),
        "a length of 0": (batch(src_lengths=np.array([2, 0], np.int32)), plain, None),
        "a length beyond the width": (batch(src_lengths=np.array([2, 3], np.int32)), plain, None),
        "width": (Batch(wide, np.array([limits.src_tokens + 1], np.int32)), plain, None),
        "sentences": (Batch(many, np.ones(limits.batch + 1, np.int32)), plain, None),
    }


class CallerError(Exception):
    """Of the program around us."""


def assert_alone(engine: Engine, good: Sequence[Request], begins: Sequence[int], chooser: Chooser, same: Any) -> None:
    """Good requests get what they get alone, while bad ones come and fail at every step."""
    alone = [decode(engine, *request) for request in good]
    running, searches, failing = ContinuousBatch(engine), dict[int, Any](), list[Any]()
    bad = list(bad_requests(engine).items())
    for step in count():
        for i in (i for i, begin in enumerate(begins) if begin == step):
            searches[i] = running.join(*good[i])
        for name, request in chooser.several(bad):
            before = list(running.searches)
            with pytest.raises(TformerError) as refused:
                running.join(*request)
            assert running.searches == before and "\n" not in str(refused.value), name
        if chooser.one(True, False):
            failing.append(running.join(*failing_request(running, chooser)))
        if not running.searches and step >= max(begins):
            break
        running.step()
    for search in failing:
        with pytest.raises((CallerError, ConfigError)):
            search.outputs()
    same([searches[i].outputs() for i in range(len(good))], alone)


def failing_request(running: ContinuousBatch, chooser: Chooser) -> tuple[Any, ...]:
    """Its callback fails sooner or later, or asks for what it must not."""
    fails = chooser.one(1, 1, 2, 3)
    told = count(1)

    def on_step(step: Any) -> None:
        if next(told) == fails:
            chooser.one(raise_error, running.step, lambda: running.join(make_batch([(5,)]), DecodeOptions()))()

    def raise_error() -> None:
        raise CallerError

    width = chooser.one({}, {"beams": 4}, {"sampling": True, "n_best": 3})
    return make_batch([(4, 5), (6,)]), DecodeOptions(min_tokens=5, max_tokens=6, **width), None, on_step


@settings(max_examples=40)
@given(seeds)
def test_bad_requests_end_alone(seed: int) -> None:
    """Of every kind, beside good ones of any options, on an engine whose numbers are exact."""
    chooser = Chooser(seed)
    engine, good = PartlyBroken(seed % 100, 7), list[Request]()
    for batch, options, allowed in requests_of(chooser, engine):
        good.append((batch, dataclasses.replace(options, align=False, coverage_penalty=0.0), allowed))

    def same(found: Any, alone: Any) -> None:
        assert found == alone

    assert_alone(engine, good, [chooser.one(0, 0, 1, 2, 5) for _ in good], chooser, same)


def test_log_probabilities_that_are_no_numbers_end_their_batch_alone() -> None:
    engine = PartlyBroken(5, 7)
    good, bad = make_batch([(4, 5), (6,)], [3, 4]), make_batch([(7,), (engine.BROKEN, 5)], [5, 6])
    for first, second in ((good, bad), (bad, good)):
        for options in (DecodeOptions(min_tokens=5), DecodeOptions(beams=3), DecodeOptions(sampling=True, n_best=2)):
            alone, running = decode(engine, good, options), ContinuousBatch(engine)
            searches = [running.join(batch, options) for batch in (first, second)]
            while running.searches:
                running.step()
            search = dict(zip(map(id, (first, second)), searches, strict=True))
            assert search[id(good)].outputs() == alone
            with pytest.raises(NotNumbers, match="request 7: NaN or infinite log-probabilities at token 3"):
                search[id(bad)].outputs()


def test_an_engine_that_fails_ends_all_and_others_may_begin() -> None:
    engine, options = TableEngine(5), DecodeOptions(min_tokens=3)
    alone, running = decode(engine, make_batch([(4, 5)]), options), ContinuousBatch(engine)
    searches = [running.join(make_batch([source]), options) for source in ((4, 5), (6,))]
    running.step()
    lost = mock.patch.object(engine, "step", side_effect=EngineError("the device is lost"))
    with lost, pytest.raises(EngineError, match="the device is lost"):
        running.step()
    for search in searches:
        with pytest.raises(EngineError, match="the device is lost"):
            search.outputs()
    again = running.join(make_batch([(4, 5)]), options)
    while running.searches:
        running.step()
    assert again.outputs() == alone


@pytest.mark.parametrize("call", ["admit", "reorder"])
def test_an_engine_that_fails_to_add_or_remove_ends_all(call: str) -> None:
    """It may have changed what the others share."""
    engine, options = TableEngine(5), DecodeOptions(min_tokens=3)
    running = ContinuousBatch(engine)
    searches = [running.join(make_batch([source]), options) for source in ((4, 5), (6,))]
    running.step()
    with mock.patch.object(engine, call, side_effect=EngineError("lost")), pytest.raises(EngineError, match="lost"):
        running.join(make_batch([(7,)]), options) if call == "admit" else running.remove(searches[0])
    assert not running.searches
    with pytest.raises(EngineError, match="lost"):
        searches[1].outputs()


def test_an_engine_that_refuses_a_batch_goes_on() -> None:
    engine, options = TableEngine(5), DecodeOptions(min_tokens=3)
    running = ContinuousBatch(engine)
    search = running.join(make_batch([(4, 5)]), options)
    with mock.patch.object(engine, "admit", side_effect=LimitError("too many")), pytest.raises(LimitError):
        running.join(make_batch([(7,)]), options)
    while running.searches:
        running.step()
    assert search.outputs() == decode(engine, make_batch([(4, 5)]), options)


def test_a_state_is_freed_with_its_last_sentence() -> None:
    """Engines free a device with the state, before another batch asks for memory."""
    engine, states = TableEngine(5), list[Any]()
    running = ContinuousBatch(engine)
    encode = engine.encode

    def watched(*request: Any) -> Any:
        state = encode(*request)
        states.append(weakref.ref(state))
        return state

    with mock.patch.object(engine, "encode", side_effect=watched):
        search = running.join(make_batch([(4, 5)]), DecodeOptions(max_tokens=3))
    while running.searches:
        running.step()
    gc.collect()
    assert search.outputs()[0][0].ids and states[0]() is None


def sources(seed: int, sizes: Sequence[tuple[int, int]]) -> list[Batch]:
    """Batches of so many sources, so wide."""
    return [Batch(*random_sources(*size, seed=seed + i)) for i, size in enumerate(sizes)]


def assert_close(found: Any, expected: Any) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert [h.ids for h in one] == [h.ids for h in other]
            assert np.allclose([h.score for h in one], [h.score for h in other], atol=CLOSE)


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beam": {"beams": 4, "n_best": 4},
    "all log-probabilities": {"beams": 3, "repetition_penalty": 1.2},
    "sampling": {"sampling": True, "n_best": 3, "seed": 7},
}


KINDS = ("fp32-cpu", "fp32-cpu, relative", "trt", "trt, relative", "trt, kept")


@pytest.fixture(scope="module", params=long_but(KINDS, "fp32-cpu", "trt, kept"))
def engine(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Targets are longer than a new cache has room for; kept: as on a GPU, with sizes and buffers that are shared."""
    recipe, _, how = request.param.partition(", ")
    graphs = GRAPHS if recipe == "trt" else (*GRAPHS, SLOTS_GRAPH)
    model = ending_model(POSITIONS, positions="relative" if how == "relative" else "sinusoidal")
    with variant_engine(model, tmp_path_factory.mktemp("slots"), recipe, graphs) as found:
        if isinstance(found, DeviceSearchEngine):
            found.keeps = 16 if how == "kept" else 0
        yield found


@pytest.mark.parametrize("name", OPTIONS)
def test_sentences_join_where_others_have_left_and_beside_them(engine: Engine, name: str) -> None:
    """More than there were, of sources wider than those there, at steps before and behind the end of the buffers."""
    options = DecodeOptions(max_tokens=80, **OPTIONS[name])
    requests = [(batch, options, None) for batch in sources(3, [(5, 7), (2, 12), (6, 4), (1, 9), (8, 10)])]
    alone = [decode(engine, batch, options) for batch, _, _ in requests]
    assert {len(each[0].ids) < 20 for outputs in alone for each in outputs} == {True, False}
    for begins in ([0, 3, 9, 31, 33], [4, 1, 1, 0, 64]):
        assert_close(run_joined(engine, requests, begins), alone)


def test_bad_requests_end_alone_on_engines(engine: Engine) -> None:
    """Whether the first sentences have left, moved or only begun."""
    batches = sources(11, [(3, 6), (2, 9), (4, 5), (2, 7)])
    good: list[Request] = [
        (batch, DecodeOptions(max_tokens=12, **changes), None)
        for batch, changes in zip(batches, OPTIONS.values(), strict=True)
    ]
    assert_alone(engine, good, [0, 2, 5, 6], Chooser(1), assert_close)


def test_searches_of_every_kind_share_steps(engine: Engine) -> None:
    batches = sources(11, [(3, 6), (2, 9), (4, 5), (2, 7)])
    requests = [
        (batch, DecodeOptions(max_tokens=40, **changes), None)
        for batch, changes in zip(batches, OPTIONS.values(), strict=True)
    ]
    alone = [decode(engine, *request) for request in requests]
    assert_close(run_joined(engine, requests, [0, 2, 5, 11]), alone)


def buffers(state: Any) -> list[Any]:
    """All that is written of sentences."""
    if isinstance(state, SpeculativeState):
        device = state.slots.device
        return [*device.caches(0), *device.caches(1), *device.cross()]
    return [value.numpy() for value in (*state.past, *state.cross)]


def test_what_a_sentence_left_behind_harms_nobody(engine: Any) -> None:
    """Places of a sentence that has ended are masked, but read: they may hold no numbers."""
    first, second = sources(5, [(4, 6), (2, 6)])
    options = DecodeOptions(max_tokens=12)
    alone = decode(engine, second, options)
    running = ContinuousBatch(engine)
    running.join(first, DecodeOptions(max_tokens=12, endless=True))
    running.step()
    state: Any = running._state
    for value in buffers(state):
        value[2:] = np.nan
    engine.reorder(state, np.arange(2, dtype=np.int32)[:, None], np.arange(2, dtype=np.int32))
    engine.admit(state, second.src_ids, second.src_lengths)
    tokens = np.full((4, 1), engine.config.start_id, np.int32)
    scores = engine.step(tokens, state)
    assert np.isfinite(scores.scores).all()
    assert scores.ids[2:, 0, 0].tolist() == [[*each[0].ids, engine.config.eos_id][0] for each in alone]


@pytest.mark.parametrize("engine", ["fp32-cpu"], indirect=True)
def test_a_place_that_nobody_has_is_at_position_0(engine: Any) -> None:
    """Else its last sentence would count as the longest on its way, and caches grow for it."""
    first, second = sources(7, [(8, 5), (1, 5)])
    state = engine.encode(first.src_ids, first.src_lengths)
    for _ in range(5):
        engine.step(np.full((8, 1), 4, np.int32), state)
    kept = np.arange(6, dtype=np.int32)
    engine.reorder(state, kept[:, None], kept)
    engine.admit(state, second.src_ids, second.src_lengths)
    assert state.positions is not None and state.positions.ravel().tolist() == [5] * 6 + [0, 0]


def test_what_cannot_join_is_refused(engine: Engine, variants_bundle: Path) -> None:
    batch, opened = sources(1, [(2, 5)])[0], open_bundle(variants_bundle)
    others: list[Engine] = [
        EagerEngine(random_model(small_config())),
        make_engine("ort", opened),
        InPlaceEngine(opened, 1, "fp32-cpu", lists(opened.config.src_vocab, opened.config.tgt_vocab)),
    ]
    for each in others:
        with each as other:
            running = ContinuousBatch(other)
            running.join(Batch(np.array([[4, 3]], np.int32), np.array([2], np.int32)), DecodeOptions())
            message = "cannot add sentences to a running batch: use a variant of target ort-cpu, native or trt, without"
            with pytest.raises(LimitError, match=message):
                running.join(Batch(np.array([[4, 3]], np.int32), np.array([2], np.int32)), DecodeOptions())
            assert not other.admits
    running = ContinuousBatch(engine)
    running.join(batch, DecodeOptions())
    many = sources(1, [(engine.limits.batch, 1)])[0]
    most = engine.limits.batch
    with pytest.raises(LimitError, match=f"{most + 2} sentences exceed the limit of {most}: admit fewer"):
        running.join(many, DecodeOptions())
    assert engine.admits and len(running.searches) == 1
