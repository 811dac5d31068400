"""Steps that choose what the next one is fed, on ONNX Runtime: the search gets eager's numbers whatever it decides."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tformer_deploy.base.errors import EngineError, LimitError, NoRoom
from tformer_deploy.bundle.plans import Profile
from tformer_deploy.bundle.recipe import load_recipe
from tformer_deploy.decoding import ContinuousBatch, DecodeOptions, decode
from tformer_deploy.engines import speculative as static
from tformer_deploy.engines.base import FIRST_CAPACITY, Limits, Outlook
from tformer_deploy.engines.eager import EagerEngine
from tformer_deploy.engines.ort.device_search import DeviceSearchEngine, OrtDevice, rounded
from tformer_deploy.engines.ort.standard import OrtGraphs
from tformer_deploy.model.network import Transformer

from .conftest import VOCAB, ending_model, random_sources, variant_engine
from .params import long_but
from .test_continuous import run_joined
from .test_in_place import MODES, POSITIONS, TOLERANCE, batch_of


@pytest.fixture(scope="module")
def model() -> Transformer:
    return ending_model(POSITIONS)


@pytest.fixture(scope="module")
def engine(model: Transformer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with variant_engine(model, tmp_path_factory.mktemp("static"), "trt") as engine:
        assert isinstance(engine, DeviceSearchEngine)
        yield engine


@pytest.fixture(scope="module")
def eager(model: Transformer) -> Iterator[EagerEngine]:
    with EagerEngine(model) as engine:
        yield engine


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every step that a device does, by its number."""
    done: list[int] = []
    issue = OrtDevice.issue
    monkeypatch.setattr(OrtDevice, "issue", lambda self, step: done.append(step) or issue(self, step))
    return done


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_decodes_as_eager_does(engine: Any, eager: EagerEngine, options: dict[str, Any]) -> None:
    chosen = DecodeOptions(**{"max_tokens": POSITIONS, **options})
    theirs, ours = (decode(side, batch_of(9, 5), chosen) for side in (eager, engine))
    assert [[h.ids for h in found] for found in ours] == [[h.ids for h in found] for found in theirs]


@pytest.mark.parametrize("beams", [1, 4])
def test_a_plain_search_never_makes_the_device_do_a_step_again(engine: Any, steps: list[int], beams: int) -> None:
    """And what it did too much at the end are at most the steps that it has speculated on."""
    outputs = decode(engine, batch_of(6, 3), DecodeOptions(max_tokens=POSITIONS, beams=beams))
    longest = max(len(output.ids) + output.finished for found in outputs for output in found)
    assert steps == list(range(len(steps))) and longest <= len(steps) <= longest + 1
    decode(engine, batch_of(6, 3), DecodeOptions(max_tokens=7, beams=beams, endless=True))
    assert steps[-7:] == list(range(7)), "not a step beyond the last that was announced"


@pytest.mark.parametrize("beams", [1, 4])
def test_sentences_that_join_keep_the_device_speculating(engine: Any, steps: list[int], beams: int) -> None:
    """The step that it did without them is done again, and no other."""
    options = DecodeOptions(max_tokens=30, beams=beams, n_best=beams)
    batches = [batch_of(6, 3), batch_of(2, 5), batch_of(1, 7)]
    alone = [decode(engine, batch, options) for batch in batches]
    steps.clear()
    joined = run_joined(engine, [(batch, options, None) for batch in batches], [0, 4, 11])
    assert [[h.ids for h in each] for found in joined for each in found] == [
        [h.ids for h in each] for found in alone for each in found
    ]
    assert [b for a, b in pairwise(steps) if b != a + 1] == [4, 11]


def test_a_device_with_room_is_kept(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one without is given up for a larger one, with what has been written."""
    made: list[Profile] = []
    make = type(engine).make
    monkeypatch.setattr(type(engine), "make", lambda self, profile: made.append(profile) or make(self, profile))
    running = ContinuousBatch(engine)
    options = DecodeOptions(max_tokens=20, beams=2, endless=True)
    searches = [running.join(batch_of(3, 3), dataclasses.replace(options, max_tokens=2))]
    running.step()
    searches.append(running.join(batch_of(4, 5), options))
    running.step()
    searches.append(running.join(batch_of(2, 7), options))
    while running.searches:
        running.step()
    assert [(profile.batch, profile.beams, profile.capacity) for profile in made] == [(3, 2, 2), (7, 2, 20)]
    for search, batch in zip(searches[1:], (batch_of(4, 5), batch_of(2, 7)), strict=True):
        assert [[h.ids for h in each] for each in search.outputs()] == [
            [h.ids for h in each] for each in decode(engine, batch, options)
        ]


@pytest.mark.parametrize("beams", [1, 2, 3])
def test_a_wider_profile_makes_no_difference(
    engine: Any, steps: list[int], beams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many rows go on as the search has."""
    options = DecodeOptions(max_tokens=40, beams=beams, n_best=beams)
    exact = decode(engine, batch_of(6, 3), options)
    count, choose = len(steps), type(engine).choose
    wide = lambda self, *request: dataclasses.replace(choose(self, *request), beams=5)  # noqa: E731
    monkeypatch.setattr(type(engine), "choose", wide)
    found = decode(engine, batch_of(6, 3), options)
    assert [[h.ids for h in each] for each in found] == [[h.ids for h in each] for each in exact]
    assert steps[count:] == steps[:count] == list(range(count))


@pytest.mark.parametrize("recipe", long_but(["trt", "fp32-cpu"], "trt"))
@pytest.mark.parametrize("samples", [1, 3])
def test_draws_from_the_best_need_the_best_alone(
    model: Transformer, eager: EagerEngine, steps: list[int], tmp_path: Path, recipe: str, samples: int
) -> None:
    """And what is drawn no device can speculate on."""
    asked: list[bool] = []
    wide = dataclasses.replace(load_recipe(recipe), top_k=8)
    options = DecodeOptions(max_tokens=20, sampling=True, n_best=samples, top_k=5, top_p=0.9, suppress=(7, 9), seed=3)
    with variant_engine(model, tmp_path, wide) as engine:
        step = engine.step
        engine.step = lambda tokens, state, full, *rest: asked.append(full) or step(tokens, state, full, *rest)  # type: ignore[method-assign]
        theirs, ours = (decode(side, batch_of(6, 3), options) for side in (eager, engine))
        assert [[h.ids for h in found] for found in ours] == [[h.ids for h in found] for found in theirs]
        scores = [[h.score for h in chain(*found)] for found in (ours, theirs)]
        assert np.allclose(*scores, rtol=0, atol=1e-4)
        assert asked and not any(asked) and steps == list(range(len(asked)) if recipe == "trt" else [])
        asked.clear()
        decode(engine, batch_of(6, 3), dataclasses.replace(options, top_k=6))
        assert all(asked), "6, 2 that may be suppressed and one to measure the margin by are more than 8"


@pytest.mark.parametrize("beams", [1, 3])
def test_where_the_search_decides_otherwise_a_step_is_done_again(
    engine: Any, eager: EagerEngine, steps: Any, beams: int
) -> None:
    """A few times; then the device waits for the search."""
    favourite = int(
        np.bincount([t for found in decode(eager, batch_of(6, 3), DecodeOptions(30)) for t in found[0].ids]).argmax()
    )
    options = DecodeOptions(max_tokens=30, suppress=(favourite,), beams=beams)
    ours, theirs = (decode(side, batch_of(6, 3), options) for side in (engine, eager))
    assert [[h.ids for h in found] for found in ours] == [[h.ids for h in found] for found in theirs]
    assert 1 <= sum(b == a for a, b in pairwise(steps)) <= static.MISSES
    assert all(a <= b <= a + 1 for a, b in pairwise(steps))


@pytest.mark.parametrize(("seed", "beams"), [*((seed, 3) for seed in range(6)), (6, 1), (7, 1)])
def test_any_course_gives_eagers_numbers(
    engine: Any, eager: EagerEngine, seed: int, beams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device's own choice shuffled, other tokens and parents, sentences that leave, all scores or not."""
    monkeypatch.setattr(static, "MISSES", 1000)
    rng, sentences = np.random.default_rng(seed), 5
    src_ids, lengths = random_sources(sentences, 6, seed)
    states = [side.encode(src_ids, lengths, Outlook(beams, 60)) for side in (engine, eager)]
    tokens: NDArray[np.int32] = np.full((sentences, 1), 2, np.int32)
    for position in range(FIRST_CAPACITY + 12):
        full = rng.random() < 0.2
        ours, theirs = (
            side.step(tokens, state, full=True if side is eager else full)
            for side, state in zip((engine, eager), states, strict=True)
        )
        expected = np.take_along_axis(theirs.log_probs, ours.ids, 2)
        assert np.abs(ours.scores - expected).max() <= TOLERANCE and (np.diff(ours.scores) <= 0).all()
        if full:
            assert np.abs(ours.log_probs - theirs.log_probs).max() <= TOLERANCE
        state, width = states[0], tokens.shape[1]
        kept = np.arange(len(tokens))
        if rng.random() < 0.08 and len(kept) > 1:
            kept = np.delete(kept, rng.integers(len(kept)))
        if rng.random() < 0.6:  # as the device has it, shuffled
            own = state.record.next
            order = rng.permutation(beams)
            rows = state.parents[kept, 0] // beams
            tokens = own.tokens[rows][:, order]
            places = own.parents[rows][:, order]
            parents = np.array([[np.flatnonzero(state.parents.ravel() == place)[0] for place in row] for row in places])
        else:
            parents = kept[:, None] * width + rng.integers(0, width, (len(kept), beams))
            tokens = rng.integers(0, VOCAB, (len(kept), beams)).astype(np.int32)
        for side, each in zip((engine, eager), states, strict=True):
            side.reorder(each, parents.astype(np.int32), kept.astype(np.int32))
        assert state.position == position + 1


@pytest.fixture
def keeping(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The engine as it works on a GPU: sizes that requests share, buffers that stay."""
    with ThreadPoolExecutor(1) as thread:
        monkeypatch.setattr(engine, "keeps", 16)
        monkeypatch.setattr(engine, "_thread", thread)
        engine._try()
        yield engine
        engine._idle.clear()


def test_kept_devices_give_the_same_and_keep_their_addresses(
    keeping: Any, eager: EagerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a graph was captured with must not change: one number, one binding of buffers, one thread."""
    seen: dict[str, tuple[Any, int]] = {}
    run = type(keeping).run

    def note(self: Any, session: Any, binding: Any, options: Any = None) -> None:
        if options:
            known = binding, threading.get_ident()
            assert seen.setdefault(options.get_run_config_entry("gpu_graph_id"), known) == known
        run(self, session, binding, options)

    monkeypatch.setattr(type(keeping), "run", note)
    for seed, sentences in enumerate((5, 8, 3, 6, 7)):
        for beams in (1, 3):
            options = DecodeOptions(max_tokens=POSITIONS, beams=beams, n_best=beams)
            for device in keeping._idle:  # a batch that overflowed
                for state in device._states:
                    for name, value in state.items():
                        if name.startswith("past_"):
                            value.numpy()[:] = np.nan
            ours, theirs = (decode(side, batch_of(sentences, seed), options) for side in (keeping, eager))
            assert [[h.ids for h in each] for each in ours] == [[h.ids for h in each] for each in theirs]
    with ThreadPoolExecutor(4) as workers:
        same = list(workers.map(lambda _: decode(keeping, batch_of(6, 3), DecodeOptions(POSITIONS)), range(8)))
    assert all([h.ids for found in each for h in found] == [h.ids for found in same[0] for h in found] for each in same)
    assert len(keeping._idle) <= 4 + 3 and len(seen) <= 2 * len(keeping._idle), "devices were used again"


def test_steps_that_cannot_be_captured_run_all_the_same(
    keeping: Any, eager: EagerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, failing = type(keeping).run, keeping._step

    def fail(self: Any, session: Any, binding: Any, options: Any = None) -> None:
        if session is failing:
            raise EngineError("operation not permitted when the stream is capturing")
        run(self, session, binding, options)

    monkeypatch.setattr(type(keeping), "run", fail)
    with pytest.warns(UserWarning, match="not replayed as CUDA graphs: operation not permitted"):
        keeping._try()
    ours, theirs = (decode(side, batch_of(6, 3), DecodeOptions(POSITIONS)) for side in (keeping, eager))
    assert [[h.ids for h in each] for each in ours] == [[h.ids for h in each] for each in theirs]
    assert keeping.not_captured
    with pytest.raises(EngineError, match="capturing"):
        failing = keeping._step
        keeping._try()


def test_an_engine_that_cannot_be_entered_closes_what_it_opened(
    engine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(self: Any) -> None:
        self._alone(lambda: None)  # starts the thread
        raise EngineError("no room for a captured step")

    monkeypatch.setattr(DeviceSearchEngine, "_try", fail)
    other = DeviceSearchEngine(engine.bundle, 1, engine.variant)
    other.keeps = 16
    with pytest.raises(EngineError, match="no room for a captured step"):
        other.__enter__()
    assert not hasattr(other, "_encoder") and not hasattr(other, "_step")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gpu")]


def test_devices_that_wait_make_room(keeping: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decode(keeping, batch_of(6, 3), DecodeOptions(POSITIONS))
    assert keeping._idle
    make = type(keeping).make

    waiting = list(keeping._idle)

    def full(self: Any, profile: Profile) -> Any:
        if any(device._inputs for device in waiting):
            raise NoRoom("no room")
        return make(self, profile)

    monkeypatch.setattr(type(keeping), "make", full)
    decode(keeping, batch_of(3, 3), DecodeOptions(POSITIONS, beams=4))
    assert [device.profile.beams for device in keeping._idle] == [4]
    monkeypatch.setattr(keeping, "keeps", 1)
    for beams in (2, 3):
        decode(keeping, batch_of(3, 3), DecodeOptions(POSITIONS, beams=beams))
    assert [device.profile.beams for device in keeping._idle] == [2, 3], "before one is made, the oldest go"


def test_on_a_gpu_the_step_alone_is_captured(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, dict[str, str]]] = []

    def session(self: Any, graph: str, spin_us: int, **cuda: str) -> str:
        asked.append((graph, cuda))
        if cuda and len(asked) > 2:
            raise EngineError("no capture")
        return graph

    monkeypatch.setattr(OrtGraphs, "_session", session)
    gpu = DeviceSearchEngine(engine.bundle, 1, "variant", "cuda")
    assert [gpu._session(graph, 0) for graph in ("encoder", "decoder_step")] == ["encoder", "decoder_step"]
    assert asked == [("encoder", {}), ("decoder_step", {"enable_cuda_graph": "1"})] and not gpu.not_captured
    with pytest.warns(UserWarning, match="not replayed as CUDA graphs: no capture"):
        assert gpu._session("decoder_step", 0) == "decoder_step"
    assert asked[-1] == ("decoder_step", {})


def test_a_device_that_cannot_begin_is_freed(keeping: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: OrtDevice, *rest: Any) -> None:
        raise EngineError("out of memory")

    decode(keeping, batch_of(6, 3), DecodeOptions(POSITIONS))
    (device,) = (each for each in keeping._idle if each.profile.batch == 8)
    monkeypatch.setattr(OrtDevice, "encode", fail)
    with pytest.raises(EngineError, match="out of memory"):
        decode(keeping, batch_of(6, 3), DecodeOptions(POSITIONS))
    assert device not in keeping._idle and not device._inputs


def test_sizes_that_requests_share() -> None:
    limits = Limits(100, 200, 40, 5)
    assert rounded(Profile(1, 5, 3, 7), limits) == Profile(1, 5, 32, 32)
    assert rounded(Profile(5, 1, 33, 33), limits) == Profile(8, 1, 64, 40)
    assert rounded(Profile(8, 1, 65, 32), limits) == Profile(8, 1, 128, 32)
    assert rounded(Profile(65, 1, 193, 40), limits) == Profile(100, 1, 200, 40)


def test_limits_are_kept(engine: Any) -> None:
    src_ids, lengths = random_sources(2, 4)
    state = engine.encode(src_ids, lengths, Outlook(2, 5))
    engine.step(np.full((2, 1), 2, np.int32), state)
    engine.reorder(state, np.array([[0] * 3, [1] * 3], np.int32))
    with pytest.raises(LimitError, match="3 beams exceed the 2 that were announced: 2x2x4x5"):
        engine.step(np.full((2, 3), 5, np.int32), state)
    engine.reorder(state, np.array([[0], [1]], np.int32))
    for _ in range(4):
        engine.step(np.full((2, 1), 5, np.int32), state)
    with pytest.raises(LimitError, match="step 6 is beyond what was announced: 2x2x4x5"):
        engine.step(np.full((2, 1), 5, np.int32), state)
    with pytest.raises(LimitError, match="does not return attention"):
        engine.step(np.full((2, 1), 5, np.int32), engine.encode(src_ids, lengths), attention=True)
