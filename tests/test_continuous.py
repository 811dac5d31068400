"""Sentences that join others on their way get what they get alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from tformer_deploy.bundle import open_bundle
from tformer_deploy.contract import GRAPHS, SLOTS_GRAPH
from tformer_deploy.decoding import Batch, ContinuousBatch, DecodeOptions, Hypothesis, Trie, decode
from tformer_deploy.engines import make_engine
from tformer_deploy.engines.ahead import AheadState
from tformer_deploy.engines.base import Engine
from tformer_deploy.engines.eager import EagerEngine
from tformer_deploy.engines.ort.choosing import ChoosingEngine
from tformer_deploy.engines.ort.in_place import InPlaceEngine
from tformer_deploy.errors import LimitError

from .conftest import ending_model, random_model, random_sources, small_config, variant_engine
from .params import long_but
from .plain_decoding import make_batch
from .test_decoding import Chooser, make_trie, seeds
from .test_in_place import POSITIONS
from .test_short_step import lists

Request = tuple[Batch, DecodeOptions, Trie | None]
BUNDLES = Path(__file__).parent / "bundles"
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


def requests_of(chooser: Chooser) -> Iterator[Request]:
    for _ in range(chooser.one(2, 3, 5)):
        options = chooser.one(chooser.beam_options, chooser.sampling_options)()
        sentences = chooser.sentences(options)
        batch = make_batch([s.source for s in sentences], [s.number for s in sentences], [s.prefix for s in sentences])
        yield batch, options, make_trie(sentences[0].allowed)


@settings(max_examples=150)
@given(seeds)
def test_every_search_is_as_it_is_alone(seed: int) -> None:
    """Batches of any options, widths and rules, beside each other, on an engine whose numbers are exact."""
    chooser = Chooser(seed)
    requests = list(requests_of(chooser))
    engine = chooser.sentences(chooser.beam_options())[0].engine
    begins = [chooser.one(0, 0, 1, 2, 5, 9) for _ in requests]
    alone = [decode(engine, batch, options, allowed, strict=False) for batch, options, allowed in requests]
    assert run_joined(engine, requests, begins) == alone


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
        if isinstance(found, ChoosingEngine):
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
    if isinstance(state, AheadState):
        device = state.seats.device
        return [*device.caches(0), *device.caches(1), *device.cross()]
    return [value.numpy() for value in (*state.past, *state.cross)]


def test_what_a_sentence_left_behind_harms_nobody(engine: Any) -> None:
    """Places of a sentence that has ended are masked, but read: they may hold no numbers."""
    first, second = sources(5, [(4, 6), (2, 6)])
    options = DecodeOptions(max_tokens=12)
    alone = decode(engine, second, options)
    running = ContinuousBatch(engine)
    running.join(first, options)
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
    older = open_bundle(BUNDLES / "v2/copy")
    others: list[Engine] = [
        EagerEngine(random_model(small_config())),
        make_engine("ort", opened),
        make_engine("ort:fp32-cpu", older),
        make_engine("ort:trt", older),
        InPlaceEngine(opened, 1, "fp32-cpu", lists(opened.config.src_vocab, opened.config.tgt_vocab)),
    ]
    for each in others:
        with each as other:
            running = ContinuousBatch(other)
            running.join(Batch(np.array([[4, 3]], np.int32), np.array([2], np.int32)), DecodeOptions())
            message = (
                "no sentence can join others here: use a variant of target ort-cpu or trt of a new export, no shortlist"
            )
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
