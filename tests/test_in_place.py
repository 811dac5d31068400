"""The engine of steps in place: caches that grow there, sentences that leave, beams that come and go, threads."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tformer_deploy.base.errors import ArtifactError, LimitError
from tformer_deploy.bundle.manifest import open_bundle
from tformer_deploy.decoding import DecodeOptions, decode
from tformer_deploy.engines import make_engine
from tformer_deploy.engines.base import FIRST_CAPACITY as FIRST
from tformer_deploy.engines.base import Engine, Ints
from tformer_deploy.engines.eager import EagerEngine
from tformer_deploy.engines.ort.in_place import SPARSE, InPlaceEngine
from tformer_deploy.model.checkpoint import open_checkpoint
from tformer_deploy.model.network import Transformer
from tformer_deploy.translate.translator import make_batch

from .conftest import VOCAB, ending_model, random_sources, variant_engine

TOLERANCE = 2e-5
POSITIONS = 100


@pytest.fixture(scope="module")
def model() -> Transformer:
    return ending_model(POSITIONS)


@pytest.fixture(scope="module")
def engine(model: Transformer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InPlaceEngine]:
    with variant_engine(model, tmp_path_factory.mktemp("variant")) as engine:
        yield engine


@pytest.fixture(scope="module")
def eager(model: Transformer) -> Iterator[EagerEngine]:
    with EagerEngine(model) as engine:
        yield engine


@dataclass
class Both:
    """Two engines that are asked the same."""

    engines: tuple[Engine, Engine]
    states: list[Any]

    def step(self, tokens: Ints) -> None:
        a, b = (e.step(tokens, state, full=True) for e, state in zip(self.engines, self.states, strict=True))
        assert a.log_probs is not None and b.log_probs is not None and a.log_probs.shape == b.log_probs.shape
        assert np.abs(a.log_probs - b.log_probs).max() <= TOLERANCE
        order = np.argsort(-a.log_probs, axis=-1, kind="stable")[..., : a.ids.shape[-1]]
        assert a.ids.shape == (*tokens.shape, 2 * tokens.shape[1]) and (a.ids == order).all()

    def reorder(self, parents: Ints, sentences: Ints | None) -> None:
        for engine, state in zip(self.engines, self.states, strict=True):
            engine.reorder(state, parents, sentences)


def both(engine: Engine, eager: Engine, batch: int, width: int, seed: int = 0) -> Both:
    src_ids, lengths = random_sources(batch, width, seed)
    return Both((engine, eager), [side.encode(src_ids, lengths) for side in (engine, eager)])


def test_caches_grow_to_the_last_position(engine: InPlaceEngine, eager: Engine) -> None:
    sides, rng = both(engine, eager, 3, 11), np.random.default_rng(1)
    capacities = []
    for _ in range(POSITIONS):
        sides.step(rng.integers(0, VOCAB, (3, 1)).astype(np.int32))
        capacities.append(sides.states[0].written_by.shape[2])
    doubled = [FIRST] * FIRST + [2 * FIRST] * FIRST + [4 * FIRST] * (POSITIONS - 2 * FIRST)
    assert capacities == doubled and POSITIONS > 2 * FIRST
    with pytest.raises(LimitError, match=f"step {POSITIONS + 1} exceeds the limit of {POSITIONS}"):
        engine.step(np.full((3, 1), 5, np.int32), sides.states[0])


@pytest.mark.parametrize("seed", range(6))
def test_sentences_leave_and_beams_come_and_go(engine: InPlaceEngine, eager: Engine, seed: int) -> None:
    """Every second step something happens, past two growths of the caches."""
    rng = np.random.default_rng(seed)
    sentences, beams = 7, 1
    sides = both(engine, eager, sentences, 6, seed)
    for position in range(70):
        if rng.random() < 0.5:
            kept = np.arange(sentences)
            if rng.random() < 0.12 and sentences > 1:
                kept = np.sort(rng.choice(sentences, sentences - 1, replace=False))
            wanted = int(rng.integers(1, 6)) if rng.random() < 0.15 else beams
            parents = kept[:, None] * beams + rng.integers(0, beams, (len(kept), wanted))
            stays = None if len(kept) == sentences and rng.random() < 0.5 else kept.astype(np.int32)
            sides.reorder(parents.astype(np.int32), stays)
            sentences, beams = parents.shape
        sides.step(rng.integers(0, VOCAB, (sentences, beams)).astype(np.int32))
        assert sides.states[0].position == position + 1


@pytest.mark.parametrize("beams", [1, 3])
def test_sentences_that_ended_are_carried_along_until_they_are_many(
    engine: InPlaceEngine, eager: Engine, beams: int
) -> None:
    sides, rng = both(engine, eager, 8, 6), np.random.default_rng(3)
    sides.reorder(np.repeat(np.arange(8, dtype=np.int32)[:, None], beams, 1), None)
    sizes = []
    for left in range(8, 0, -1):
        sides.step(rng.integers(0, VOCAB, (left, beams)).astype(np.int32))
        sizes.append(len(sides.states[0].tokens))
        kept = np.delete(np.arange(left, dtype=np.int32), rng.integers(left))
        parents = kept[:, None] * beams + rng.integers(0, beams, (left - 1, beams))
        if left > 1:
            sides.reorder(parents.astype(np.int32), kept)
    assert SPARSE == 0.75 and sizes == [8, 8, 8, 5, 5, 3, 2, 1]


def test_every_beam_of_a_sentence_may_continue_any_other(engine: InPlaceEngine, eager: Engine) -> None:
    """The history of a beam is spread over the buffers of all."""
    sides, rng = both(engine, eager, 2, 5), np.random.default_rng(2)
    sides.reorder(np.array([[0] * 4, [1] * 4], np.int32), None)
    for _ in range(FIRST + 5):
        sides.step(rng.integers(0, VOCAB, (2, 4)).astype(np.int32))
        sides.reorder(np.stack([rng.integers(0, 4, 4), 4 + rng.integers(0, 4, 4)]).astype(np.int32), None)


def test_all_log_probabilities_only_where_asked(engine: InPlaceEngine) -> None:
    src_ids, lengths = random_sources(3, 4)
    states = [engine.encode(src_ids, lengths) for _ in range(2)]
    for step in range(4):
        tokens = np.full((3, 1), 5 + step, np.int32)
        always = engine.step(tokens, states[0], full=True)
        found = engine.step(tokens, states[1], full=step % 2 == 0)
        assert (found.log_probs is None) == (step % 2 == 1)
        assert (found.ids == always.ids).all() and (found.scores == always.scores).all()


def test_results_stay_valid_after_further_steps(engine: InPlaceEngine) -> None:
    src_ids, lengths = random_sources(3, 4)
    state = engine.encode(src_ids, lengths)
    kept = engine.cross_keys_values(state)
    first = engine.step(np.full((3, 1), 2, np.int32), state, full=True)
    assert first.log_probs is not None
    arrays = [first.ids, first.scores, first.log_probs, *kept]
    copies = [array.copy() for array in arrays]
    for _ in range(5):
        engine.step(np.full((3, 1), 7, np.int32), state, full=True)
    assert all((array == copy).all() for array, copy in zip(arrays, copies, strict=True))


def test_what_a_caller_keeps_is_not_written(engine: InPlaceEngine) -> None:
    src_ids, lengths = random_sources(2, 4)
    tokens, parents = np.full((2, 1), 2, np.int32), np.array([[0, 0], [1, 1]], np.int32)
    copies = [array.copy() for array in (src_ids, lengths, tokens, parents)]
    state = engine.encode(src_ids, lengths)
    engine.step(tokens, state)
    engine.reorder(state, parents)
    engine.step(np.array([[7, 8], [9, 10]], np.int32), state)
    assert all((a == b).all() for a, b in zip((src_ids, lengths, tokens, parents), copies, strict=True))


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beam": {"beams": 5, "n_best": 3},
    "beam, short": {"beams": 3, "max_tokens": 20, "length_penalty": 0.6},
    "sampling": {"sampling": True, "n_best": 3, "seed": 7, "top_p": 0.9},
    "without eos": {"suppress": (3,), "beams": 2},
    "no repetition": {"no_repeat_ngram": 2, "beams": 4},
}


def batch_of(count: int, seed: int) -> Any:
    src_ids, lengths = random_sources(count, 12, seed)
    sources = [row[:n].tolist() for row, n in zip(src_ids, lengths, strict=True)]
    return make_batch(sources, 1, range(count))


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_decodes_as_eager_does(engine: InPlaceEngine, eager: Engine, options: dict[str, Any]) -> None:
    chosen = DecodeOptions(**{"max_tokens": POSITIONS, **options})
    theirs, ours = (decode(side, batch_of(9, 5), chosen) for side in (eager, engine))
    assert [[h.ids for h in found] for found in ours] == [[h.ids for h in found] for found in theirs]
    lengths = [len(found[0].ids) for found in ours]
    assert len(set(lengths)) > 2 or options.get("suppress")
    assert max(lengths) > 2 * FIRST or options.get("max_tokens") or options.get("no_repeat_ngram")


def test_threads_share_one_engine(engine: InPlaceEngine) -> None:
    """A state belongs to one decode, so that many may run at the same time."""
    jobs = [(batch_of(3 + n % 4, n), DecodeOptions(max_tokens=60, **MODES[mode])) for n, mode in enumerate(THREADED)]
    alone = [decode(engine, *job) for job in jobs]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda job: decode(engine, *job), jobs))
    assert together == alone


THREADED = ["greedy", "beam", "sampling", "no repetition", "greedy", "without eos", "sampling", "beam"]


def test_limits_are_kept(engine: InPlaceEngine) -> None:
    assert engine.limits.beams == 30 and [engine.best(beams) for beams in (1, 3, 30)] == [2, 6, 60]
    src_ids, lengths = random_sources(2, POSITIONS + 1)
    with pytest.raises(LimitError, match=f"{POSITIONS + 1} tokens exceeds the limit of {POSITIONS}"):
        engine.encode(src_ids, lengths)
    state = engine.encode(src_ids[:, :5], np.array([5, 2], np.int32))
    parents = np.repeat(np.arange(2, dtype=np.int32)[:, None], 31, 1)
    with pytest.raises(LimitError, match="this variant does not return attention"):
        engine.step(np.full((2, 1), 2, np.int32), state, attention=True)
    engine.reorder(state, parents)
    with pytest.raises(LimitError, match="31 beams exceed the limit of 30"):
        engine.step(np.full((2, 31), 2, np.int32), state)


def test_graphs_of_other_weights_are_refused(model: Transformer, tmp_path: Path) -> None:
    engine = variant_engine(model, tmp_path)
    engine.bundle.manifest["checkpoint"]["weights_sha256"] = "1"
    with pytest.raises(ArtifactError, match=r"manifest.json was edited: decoder_step.onnx is of another model"), engine:
        pass


# Layer values


@pytest.mark.parametrize(("name", "limit"), [("fp32-cpu", 1e-5), ("int8", 1.0), ("int8-latency", 1.0), ("int4", 3.0)])
def test_layer_values_of_every_variant(name: str, limit: float, variants_bundle: Path, run: Path) -> None:
    src_ids, lengths = random_sources(3, 6)
    tgt_ids = np.random.default_rng(1).integers(4, VOCAB, (3, 24)).astype(np.int32)
    eager = EagerEngine(open_checkpoint(run).load_model())
    variant = make_engine(f"ort:{name}", open_bundle(variants_bundle), threads=1)
    expected, found = (side.layers(src_ids, lengths, tgt_ids) for side in (eager, variant))
    assert list(found) == list(expected)
    real = np.arange(6) < lengths[:, None]
    for layer, value in found.items():
        assert value.shape == expected[layer].shape, layer
        apart = np.abs(value - expected[layer])
        if layer.startswith(("encoder", "memory", "cross_")):  # padding is anything
            apart = (apart.transpose(0, 2, 1, 3) if apart.ndim == 4 else apart)[real]
        assert apart.max() <= limit, layer


def test_layer_values_are_those_that_the_engine_computes(engine: InPlaceEngine) -> None:
    src_ids, lengths = random_sources(2, 6)
    tgt_ids = np.random.default_rng(1).integers(4, VOCAB, (2, 40)).astype(np.int32)
    values, state = engine.layers(src_ids, lengths, tgt_ids), engine.encode(src_ids, lengths)
    for step, tokens in enumerate(tgt_ids.T):
        found = engine.step(tokens[:, None], state, full=True).log_probs
        assert found is not None and np.abs(found[:, 0] - values["log_probs"][:, step]).max() <= 1e-6
    with pytest.raises(LimitError, match=f"step {POSITIONS + 1} exceeds"):
        engine.layers(src_ids, lengths, np.full((2, POSITIONS + 1), 2, np.int32))
