"""The step that scores a shortlist: the full step restricted to the list, alone as in a batch, however it decodes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from tformer_deploy.base.errors import ConfigError
from tformer_deploy.bundle.contract import GRAPHS, SHORT_GRAPHS, signature
from tformer_deploy.bundle.manifest import Bundle
from tformer_deploy.bundle.shortlist import Shortlist
from tformer_deploy.decoding import DecodeOptions, Trie, decode, score
from tformer_deploy.engines.base import ANYTHING, Ints, Outlook, Scores
from tformer_deploy.engines.ort import in_place
from tformer_deploy.engines.ort.in_place import LIST_UNIT, InPlaceEngine
from tformer_deploy.export.signature import read_signature
from tformer_deploy.model.network import Transformer
from tformer_deploy.translate.translator import make_batch

from .configs import EVERYTHING, T5
from .conftest import VOCAB, needs_vnni, random_model, random_sources, small_config, variant_engine
from .params import long_but
from .test_in_place import POSITIONS

WITH_LISTS = (*GRAPHS, *SHORT_GRAPHS)
# Of a log-probability. Products in blocks round the input of the full step only.
LIMITS = {"fp32-cpu": 1e-5, "int8": 1e-5, "int8-latency": 0.05, "int4": 0.05}
# Vocabularies are prime, and so large that a bundle keeps their tables beside its graphs.
LARGE: dict[str, object] = {"src_vocab": 1009, "tgt_vocab": 1009}
CONFIGS: dict[str, dict[str, object]] = {
    "tied": {**LARGE, "encoder_layers": 1, "decoder_layers": 1},
    "untied, with a bias": {**LARGE, "share_embeddings": "none", "output_bias": True, "encoder_layers": 1},
    "every option": {**LARGE, **EVERYTHING},
    "T5": {**LARGE, **T5},
}
OUTSIDE = 59
"""A token that is in no list of `lists`."""


def lists(source: int, target: int, best: int = 6) -> Shortlist:
    """Some tokens for each source token, and the special ones."""
    targets = np.random.default_rng(0).integers(4, min(target, OUTSIDE), source * best).astype(np.int32)
    return Shortlist(np.arange(4, dtype=np.int32), np.arange(source + 1) * best, targets, target)


def everything(source: int, target: int) -> Shortlist:
    """Every token in every list."""
    return Shortlist(np.arange(target, dtype=np.int32), np.zeros(source + 1, np.int64), np.empty(0, np.int32), target)


def short_engine(bundle: Bundle, shortlist: Any = lists) -> InPlaceEngine:
    return InPlaceEngine(bundle, 1, "variant", shortlist(bundle.config.src_vocab, bundle.config.tgt_vocab))


class Restricted:
    """The full step, its log-probabilities cut to lists and normalised again in numpy."""

    def __init__(self, engine: InPlaceEngine, shortlist: Shortlist) -> None:
        self.engine, self.shortlist = engine, shortlist
        self.config, self.limits, self.attention, self.best = engine.config, engine.limits, False, engine.best

    def encode(self, src_ids: Ints, src_lengths: Ints, outlook: Outlook = ANYTHING) -> dict[str, Any]:
        allowed = self.shortlist.allowed(src_ids, src_lengths)
        for row, ids in zip(allowed, outlook.required, strict=False):
            row[np.array(ids, np.int64)] = True
        return {"state": self.engine.encode(src_ids, src_lengths), "allowed": allowed}

    def step(self, tokens: Ints, state: dict[str, Any], full: bool = False, attention: bool = False) -> Scores:
        found = self.engine.step(tokens, state["state"], full=True).log_probs
        assert found is not None
        kept = restrict(found, state["allowed"])
        ids = np.argsort(-kept, -1, kind="stable")[..., : self.best(tokens.shape[1])].astype(np.int32)
        return Scores(ids, np.take_along_axis(kept, ids, -1), kept if full else None)

    def reorder(self, state: dict[str, Any], parents: Ints, sentences: Ints | None = None) -> None:
        self.engine.reorder(state["state"], parents, sentences)
        if sentences is not None:
            state["allowed"] = state["allowed"][sentences]


def restrict(log_probs: NDArray[np.float32], allowed: NDArray[np.bool_]) -> NDArray[np.float32]:
    kept = np.where(allowed[:, None], log_probs, np.float32(-np.inf))
    return kept - np.log(np.exp(kept.astype(np.float64)).sum(-1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("recipe", LIMITS)
@pytest.mark.parametrize("changes", long_but(CONFIGS, "tied"))
def test_the_full_step_restricted_to_the_list(changes: dict[str, object], recipe: str, tmp_path: Path) -> None:
    """Step by step, while sentences leave and beams come and go."""
    needs_vnni(recipe)
    model = random_model(small_config(**changes))
    src_ids, lengths = random_sources(6, 9)
    src_ids %= 44
    with variant_engine(model, tmp_path, recipe, WITH_LISTS) as full, short_engine(full.bundle) as short:
        assert isinstance(full, InPlaceEngine) and short.shortlist
        reference = Restricted(full, short.shortlist)
        states = [side.encode(src_ids, lengths) for side in (reference, short)]
        rng, sentences, beams = np.random.default_rng(1), np.arange(6), 1
        moves = {2: (sentences, 3), 5: (np.array([0, 2, 3, 5]), 3), 8: (np.array([1, 2]), 2)}
        for position in range(12):
            if position in moves:
                kept, wanted = moves[position]
                parents = (kept[:, None] * beams + rng.integers(0, beams, (len(kept), wanted))).astype(np.int32)
                for side, state in zip((reference, short), states, strict=True):
                    side.reorder(state, parents, kept.astype(np.int32))
                sentences, beams = kept, wanted
            tokens = rng.integers(0, 44, (len(sentences), beams)).astype(np.int32)
            expected, found = (
                side.step(tokens, state, full=True) for side, state in zip((reference, short), states, strict=True)
            )
            assert_near(expected, found, LIMITS[recipe])


def assert_near(expected: Scores, found: Scores, limit: float) -> None:
    assert expected.log_probs is not None and found.log_probs is not None
    inside = np.isfinite(expected.log_probs)
    assert (np.isfinite(found.log_probs) == inside).all() and not np.isnan(found.log_probs).any()
    assert np.abs(found.log_probs[inside] - expected.log_probs[inside]).max() <= limit
    order = np.argsort(-found.log_probs, axis=-1, kind="stable")[..., : found.ids.shape[-1]]
    best = np.take_along_axis(found.log_probs, order, -1)
    assert (found.scores == best).all() and (found.ids == order)[np.isfinite(best)].all()


@pytest.mark.parametrize("recipe", LIMITS)
def test_a_list_of_all_tokens_changes_nothing(recipe: str, tmp_path: Path) -> None:
    needs_vnni(recipe)
    src_ids, lengths = random_sources(5, 9)
    full = variant_engine(random_model(small_config()), tmp_path, recipe, WITH_LISTS)
    with full, short_engine(full.bundle, everything) as short:
        states = [side.encode(src_ids, lengths) for side in (full, short)]
        for token in range(5, 12):
            tokens = np.full((5, 1), token, np.int32)
            expected, found = (e.step(tokens, s, full=True) for e, s in zip((full, short), states, strict=True))
            assert_near(expected, found, LIMITS[recipe])
        if LIMITS[recipe] < 1e-3:
            theirs, ours = (decode(e, batch_of(7), DecodeOptions(max_tokens=20, beams=3)) for e in (full, short))
            assert [[h.ids for h in each] for each in ours] == [[h.ids for h in each] for each in theirs]


# Ways of decoding


@pytest.fixture(scope="module")
def model() -> Transformer:
    """Likelier to stop than most, so that sentences end at different steps."""
    model = random_model(small_config(max_positions=POSITIONS, share_embeddings="none"), seed=8).eval()
    model.output.weight.data[3] *= 1.5
    return model


@pytest.fixture(scope="module")
def engines(model: Transformer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Restricted, InPlaceEngine]]:
    with (
        variant_engine(model, tmp_path_factory.mktemp("short"), graphs=WITH_LISTS) as full,
        short_engine(full.bundle) as short,
    ):
        assert isinstance(full, InPlaceEngine) and short.shortlist
        yield Restricted(full, short.shortlist), short


def test_sessions_are_closed_with_the_engine(engines: tuple[Any, Any]) -> None:
    """Also that of the rows of the lists, whose weights take memory."""
    engine = short_engine(engines[1].bundle)
    with engine:
        session = weakref.ref(engine._rows)
        assert session()
    gc.collect()
    assert session() is None


def batch_of(count: int, prefixes: Sequence[Sequence[int]] = (), seed: int = 5) -> Any:
    src_ids, lengths = random_sources(count, 12, seed)
    sources = [row[:n].tolist() for row, n in zip(src_ids, lengths, strict=True)]
    return make_batch(sources, 1, range(count), prefixes)


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beam": {"beams": 5, "n_best": 3},
    "beam, short": {"beams": 3, "max_tokens": 20, "length_penalty": 0.6},
    "sampling": {"sampling": True, "n_best": 3, "seed": 7, "top_p": 0.9},
    "sampling of the best": {"sampling": True, "seed": 2, "top_k": 4, "min_p": 0.02},
    "without eos": {"suppress": (3, 9, 10), "beams": 2},
    "other ends": {"end_ids": (OUTSIDE, 3), "beams": 2},
    "first tokens": {"first_ids": (OUTSIDE, 8)},
    "no repetition": {"no_repeat_ngram": 2, "beams": 4, "repetition_penalty": 1.2},
    "as many beams as there may be": {"beams": 30, "max_tokens": 6},
}


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_decodes_as_the_restricted_step_does(engines: tuple[Any, Any], options: dict[str, Any]) -> None:
    chosen = DecodeOptions(**{"max_tokens": 60, **options})
    theirs, ours = (decode(side, batch_of(9), chosen) for side in engines)
    assert [[h.ids for h in found] for found in ours] == [[h.ids for h in found] for found in theirs]
    assert np.allclose(*([h.score for found in side for h in found] for side in (ours, theirs)), atol=1e-3)
    assert len({len(found[0].ids) for found in ours}) > 1 or 3 in chosen.suppress or chosen.max_tokens == 6


def test_forced_and_allowed_tokens_are_scored_wherever_they_are(engines: tuple[Any, Any]) -> None:
    prefixes = [[OUTSIDE, 5 + i] if i % 2 else [] for i in range(9)]
    theirs, ours = (decode(side, batch_of(9, prefixes), DecodeOptions(max_tokens=30)) for side in engines)
    assert [found[0].ids for found in ours] == [found[0].ids for found in theirs]
    assert all(
        found[0].ids[: len(p)] == p and np.isfinite(found[0].score) for found, p in zip(ours, prefixes, strict=True)
    )
    allowed = Trie([[OUTSIDE, OUTSIDE, 7], [OUTSIDE, 8]])
    theirs, ours = (decode(side, batch_of(9), DecodeOptions(max_tokens=30, beams=2), allowed) for side in engines)
    assert [found[0].ids for found in ours] == [found[0].ids for found in theirs]
    assert all(found[0].ids in ([OUTSIDE, OUTSIDE, 7], [OUTSIDE, 8]) for found in ours)


def test_given_translations_have_a_score(engines: tuple[Any, Any]) -> None:
    targets = [[OUTSIDE, 5, 3], [7, 3]]
    theirs, ours = (score(side, batch_of(2), targets) for side in engines)
    assert all(np.allclose(a, b, atol=1e-5) and np.isfinite(a).all() for a, b in zip(ours, theirs, strict=True))


def test_prefixes_of_a_sentence_are_not_in_the_lists_of_others(engines: tuple[Any, Any]) -> None:
    short = engines[1]
    batch = batch_of(2)
    state = short.encode(batch.src_ids, batch.src_lengths, Outlook(required=[[OUTSIDE], []]))
    found = short.step(np.full((2, 1), 2, np.int32), state, full=True).log_probs
    assert np.isfinite(found[0, 0, OUTSIDE]) and not np.isfinite(found[1, 0, OUTSIDE])
    assert state.listed.mask.shape[2] % LIST_UNIT == 0


@pytest.mark.parametrize("options", [{}, {"beams": 4, "n_best": 4}], ids=["greedy", "beam"])
@pytest.mark.parametrize("recipe", LIMITS)
def test_a_sentence_alone_is_the_same_as_in_a_batch(
    recipe: str, options: dict[str, Any], model: Transformer, tmp_path: Path
) -> None:
    needs_vnni(recipe)
    chosen, batch = DecodeOptions(max_tokens=30, **options), batch_of(12)
    with variant_engine(model, tmp_path, recipe, WITH_LISTS) as full, short_engine(full.bundle) as short:
        together = decode(short, batch, chosen)
        assert len({h.ids[0] for found in together for h in found if h.ids}) > 1
        for row, n, expected in zip(batch.src_ids, batch.src_lengths, together, strict=True):
            alone = decode(short, make_batch([row[:n].tolist()], 1), chosen)[0]
            assert [h.ids for h in alone] == [h.ids for h in expected]
            assert np.allclose([h.score for h in alone], [h.score for h in expected], atol=1e-4)


# Graphs


@pytest.mark.parametrize("recipe", LIMITS)
@pytest.mark.parametrize("changes", long_but(CONFIGS, "tied"))
def test_graphs_keep_the_contract_and_share_the_weights(
    changes: dict[str, object], recipe: str, tmp_path: Path
) -> None:
    """What `short_rows` reads lies where the step or the embedding has it.

    In int8 without a tied embedding it does not: the step's matrix lies there as ONNX Runtime packs it.
    """
    config = small_config(**changes)
    made = variant_engine(random_model(config), tmp_path, recipe, WITH_LISTS)
    regions: dict[str, set[tuple[str, ...]]] = {}
    for name in ("encoder", "decoder_step", *SHORT_GRAPHS):
        graph = onnx.load(made.bundle.graph(name, "variant"), load_external_data=False)
        if name in SHORT_GRAPHS:
            assert read_signature(graph) == signature(name, config, made.bundle.variants["variant"])
        outside = (tensor for tensor in graph.graph.initializer if tensor.external_data)
        regions[name] = {tuple(entry.value for entry in tensor.external_data) for tensor in outside}
    shared = recipe != "int8" or config.share_embeddings != "none"
    assert regions["short_rows"] and (regions["short_rows"] <= regions["decoder_step"] | regions["encoder"]) == shared
    assert regions["short_step"] <= regions["decoder_step"] | regions["encoder"]


def test_integer_products_need_vnni(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = variant_engine(random_model(small_config()), tmp_path, "int8", WITH_LISTS)
    monkeypatch.setattr(in_place, "has_vnni", lambda: False)
    with pytest.raises(
        ConfigError, match="--shortlist: variant needs a processor with VNNI for it: use another variant"
    ):
        short_engine(made.bundle)
    InPlaceEngine(made.bundle, 1, "variant")


def test_tokens_are_those_of_the_vocabulary(engines: tuple[Any, Any]) -> None:
    batch = batch_of(9)
    outputs = decode(engines[1], batch, DecodeOptions(max_tokens=20))
    allowed = engines[1].shortlist.allowed(batch.src_ids, batch.src_lengths)
    assert all(allowed[i, h.ids].all() for i, found in enumerate(outputs) for h in found)
    assert max(max(h.ids) for found in outputs for h in found) < VOCAB
