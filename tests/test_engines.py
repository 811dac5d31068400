"""Engines alone: equal numbers at many shapes, reordering, limits, telemetry."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tformer_deploy.base.errors import ArtifactError, ConfigError, LimitError, MissingExtra
from tformer_deploy.bundle.manifest import open_bundle
from tformer_deploy.engines import make_engine
from tformer_deploy.engines.base import Engine, Scores
from tformer_deploy.engines.eager import EagerEngine, best_ids
from tformer_deploy.engines.ort.standard import OrtEngine
from tformer_deploy.model.checkpoint import open_checkpoint

from .attention import attention_weights
from .conftest import VOCAB, random_sources

TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def ort(bundle: Path) -> Iterator[Engine]:
    with OrtEngine(open_bundle(bundle), threads=1) as engine:
        yield engine


@pytest.fixture(scope="module", params=["ort", "openvino"])
def graphs(bundle: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Each engine that runs the standard graphs."""
    if request.param == "openvino" and not find_spec("openvino"):
        pytest.skip("OpenVINO is not installed: pip install '.[openvino]'")
    with make_engine(request.param, open_bundle(bundle), threads=1) as engine:
        yield engine


@pytest.fixture(scope="module", params=["ort", "openvino"])
def attentive(attention_bundle: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    if request.param == "openvino" and not find_spec("openvino"):
        pytest.skip("OpenVINO is not installed: pip install '.[openvino]'")
    with make_engine(request.param, open_bundle(attention_bundle), threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def eager(run: Path) -> Iterator[Engine]:
    with EagerEngine(open_checkpoint(run).load_model()) as engine:
        yield engine


@pytest.mark.parametrize(("batch", "width", "steps"), [(1, 1, 24), (1, 24, 3), (2, 5, 6), (5, 9, 4), (33, 3, 2)])
def test_graphs_equal_eager_at_many_shapes(graphs: Engine, eager: Engine, batch: int, width: int, steps: int) -> None:
    src_ids, lengths = random_sources(batch, width)
    states = [engine.encode(src_ids, lengths) for engine in (graphs, eager)]
    real = np.arange(width) < lengths[:, None]
    for ours, theirs in zip(eager.cross_keys_values(states[1]), graphs.cross_keys_values(states[0]), strict=True):
        assert theirs.shape == (batch, 4, width, 8)
        assert np.abs(ours - theirs).transpose(0, 2, 1, 3)[real].max() <= TOLERANCE
    rng = np.random.default_rng(1)
    for _ in range(steps):
        tokens = rng.integers(0, VOCAB, (batch, 1)).astype(np.int32)
        a, b = (engine.step(tokens, state, full=True) for engine, state in zip((graphs, eager), states, strict=True))
        assert a.log_probs is not None and b.log_probs is not None
        assert np.abs(a.log_probs - b.log_probs).max() <= TOLERANCE
        assert a.ids.shape == a.scores.shape == (batch, 1, 1)
        assert (a.log_probs[:, 0].argmax(-1) == a.ids[:, 0, 0]).all()
        assert (a.log_probs[:, 0].max(-1) == a.scores[:, 0, 0]).all()


def test_beams_and_compaction_follow_their_parents(graphs: Engine, eager: Engine) -> None:
    src_ids, lengths = random_sources(4, 7, seed=3)
    rng = np.random.default_rng(2)
    states = [engine.encode(src_ids, lengths) for engine in (graphs, eager)]
    sentences, beams = 4, 1
    # Widen to three beams, swap them, go on as they are, drop sentences 1 and 3, go on, narrow to two beams.
    stay = (None, 0)
    for keep, wanted in [
        stay,
        (None, 3),
        (None, 3),
        stay,
        (np.array([0, 2], np.int32), 3),
        stay,
        stay,
        (None, 2),
        stay,
    ]:
        if wanted:
            kept = np.arange(sentences) if keep is None else keep
            parents = (kept[:, None] * beams + rng.integers(0, beams, (len(kept), wanted))).astype(np.int32)
            for engine, state in zip((graphs, eager), states, strict=True):
                engine.reorder(state, parents, keep)
            sentences, beams = parents.shape
        tokens = rng.integers(0, VOCAB, (sentences, beams)).astype(np.int32)
        a, b = (engine.step(tokens, state, full=True) for engine, state in zip((graphs, eager), states, strict=True))
        assert a.log_probs is not None and b.log_probs is not None
        assert a.log_probs.shape == (sentences, beams, VOCAB)
        assert np.abs(a.log_probs - b.log_probs).max() <= TOLERANCE
        for scores in (a, b):
            assert scores.ids.shape == (sentences, beams, 2 * beams - 1)
            assert_best(scores)


def assert_best(found: Scores) -> None:
    """The ids and scores are what a full sort of the log-probabilities gives."""
    assert found.log_probs is not None
    order = np.argsort(-found.log_probs, axis=-1, kind="stable")[..., : found.ids.shape[-1]]
    assert (found.ids == order).all()
    assert (found.scores == np.take_along_axis(found.log_probs, order, -1)).all()


def test_number_of_best_tokens_follows_recipe_and_beams(graphs: Engine, eager: Engine, run: Path) -> None:
    assert [graphs.best(beams) for beams in (1, 2, 5, 30)] == [1, 3, 9, 59]
    assert [eager.best(beams) for beams in (1, 2, 30, 31, 64)] == [1, 3, 59, 60, 60]
    fixed = EagerEngine(open_checkpoint(run).load_model(), top_k=4)
    assert [fixed.best(beams) for beams in (1, 9)] == [4, 4]


def test_as_many_beams_as_the_vocabulary_allows(graphs: Engine, eager: Engine) -> None:
    """60 tokens: 30 beams read 59, one more is refused."""
    src_ids, lengths = random_sources(2, 4)
    parents = np.repeat(np.arange(2, dtype=np.int32)[:, None], 31, 1)
    tokens = np.full((2, 31), 5, np.int32)
    for engine in (graphs, eager):
        state = engine.encode(src_ids, lengths)
        engine.reorder(state, parents[:, :30])
        found = engine.step(tokens[:, :30], state, full=True)
        assert found.ids.shape == (2, 30, 59)
        assert_best(found)
    assert graphs.limits.beams == 30 and eager.limits.beams == 1 << 16
    state = graphs.encode(src_ids, lengths)
    graphs.reorder(state, parents)
    with pytest.raises(LimitError, match="31 beams exceed the limit of 30"):
        graphs.step(tokens, state)


@given(st.lists(st.lists(st.integers(-3, 0), min_size=7, max_size=7), min_size=1, max_size=4), st.integers(1, 7))
def test_best_ids_equal_a_stable_sort(rows: list[list[int]], k: int) -> None:
    scores = torch.tensor(rows, dtype=torch.float32)
    assert torch.equal(best_ids(scores, k), scores.sort(descending=True, stable=True).indices[:, :k])


def test_equal_scores_give_the_lower_id(bundle: Path, run: Path, tmp_path: Path) -> None:
    """With every token there twice, an odd number of best ones ends between two that are equal."""
    model = open_checkpoint(run).load_model()
    table = model.output.weight.detach()
    table[30:] = table[:30]
    shutil.copytree(bundle, tmp_path / "bundle")
    graph = onnx.load(bundle / "decoder_step.onnx")
    for stored in graph.graph.initializer:  # the table of the embedding and its transpose of the output
        if sorted(stored.dims) == [32, VOCAB]:
            stored.raw_data = (table if stored.dims[0] == VOCAB else table.T).contiguous().numpy().tobytes()
    onnx.save(graph, tmp_path / "bundle/decoder_step.onnx")
    opened = dataclasses.replace(open_bundle(bundle), directory=tmp_path / "bundle")
    src_ids, lengths = random_sources(2, 4)
    src_ids %= 30  # the encoder's table, which eager shares, is as before
    found = []
    for engine in (EagerEngine(model), OrtEngine(opened, threads=1)):
        with engine:
            state = engine.encode(src_ids, lengths)
            engine.reorder(state, np.repeat(np.arange(2, dtype=np.int32)[:, None], 3, 1))
            found.append(engine.step(np.array([[4, 9, 2]] * 2, np.int32), state, full=True))
        assert found[-1].log_probs is not None
        assert (found[-1].log_probs[..., :30] == found[-1].log_probs[..., 30:]).all()
        assert_best(found[-1])
    assert (found[0].ids == found[1].ids).all()
    assert (found[0].ids[..., 1] == found[0].ids[..., 0] + 30).all()


def test_attention_is_the_last_layers_mean_over_heads(attentive: Engine, eager: Engine, run: Path) -> None:
    src_ids, lengths = random_sources(3, 6)
    tgt_ids = np.random.default_rng(1).integers(4, VOCAB, (3, 4)).astype(np.int32)
    model = open_checkpoint(run).load_model().eval()
    weights = attention_weights(model, *(torch.from_numpy(each) for each in (src_ids, lengths, tgt_ids)))
    expected = weights["decoder.1.cross"].mean(1).numpy()
    assert attentive.attention and eager.attention
    for engine in (attentive, eager):
        state = engine.encode(src_ids, lengths)
        for step in range(4):
            tokens = tgt_ids[:, step : step + 1]
            found = engine.step(tokens, state, full=step % 2 == 0, attention=step != 1)
            assert (found.log_probs is None) == (step % 2 != 0)
            if step == 1:
                assert found.attention is None
                continue
            assert found.attention is not None and found.attention.shape == (3, 1, 6)
            assert np.abs(found.attention[:, 0] - expected[:, step]).max() <= 1e-6
            assert not found.attention[:, 0][np.arange(6) >= lengths[:, None]].any()


def test_attention_of_beams(attentive: Engine, eager: Engine) -> None:
    src_ids, lengths = random_sources(2, 5)
    found = []
    for engine in (attentive, eager):
        state = engine.encode(src_ids, lengths)
        engine.reorder(state, np.array([[0, 0, 0], [1, 1, 1]], np.int32))
        scores = engine.step(np.array([[4, 5, 6], [7, 8, 9]], np.int32), state, attention=True)
        assert scores.attention is not None and scores.attention.shape == (2, 3, 5)
        found.append(scores.attention)
    assert np.abs(found[0] - found[1]).max() <= 1e-6
    assert np.abs(found[0].sum(-1) - 1).max() <= 1e-5


def test_attention_that_a_bundle_does_not_have(graphs: Engine) -> None:
    assert not graphs.attention
    src_ids, lengths = random_sources(1, 3)
    state = graphs.encode(src_ids, lengths)
    with pytest.raises(LimitError, match="attention = true, such as fp32-attention"):
        graphs.step(np.full((1, 1), 2, np.int32), state, attention=True)


STEP_LAYERS = ["decoder_embedding", "decoder_layer_0", "decoder_layer_1", "hidden", "log_probs"]
CROSS = ["cross_k_0", "cross_v_0", "cross_k_1", "cross_v_1"]


def test_layer_values_equal_eagers(graphs: Engine, attentive: Engine, eager: Engine, run: Path) -> None:
    src_ids, lengths = random_sources(3, 6)
    tgt_ids = np.random.default_rng(1).integers(4, VOCAB, (3, 4)).astype(np.int32)
    expected = eager.layers(src_ids, lengths, tgt_ids)
    assert list(expected) == ["encoder_embedding", "encoder_layer_0", "encoder_layer_1", "memory", *CROSS, *STEP_LAYERS]
    assert expected["memory"].shape == (3, 6, 32) and expected["cross_k_0"].shape == (3, 4, 6, 8)
    assert expected["hidden"].shape == (3, 4, 32) and expected["log_probs"].shape == (3, 4, VOCAB)
    for engine in (graphs, attentive):
        found = engine.layers(src_ids, lengths, tgt_ids)
        assert list(found) == list(expected)
        for name, value in found.items():
            assert value.shape == expected[name].shape and np.abs(value - expected[name]).max() <= 1e-5, name
    model = open_checkpoint(run).load_model().eval()
    with torch.inference_mode():
        logits = model(*(torch.from_numpy(each) for each in (src_ids, lengths, tgt_ids)))
    assert np.abs(expected["log_probs"] - logits.log_softmax(-1).numpy()).max() <= 1e-5


def test_layer_values_need_onnx(ort: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    monkeypatch.delitem(sys.modules, "tformer_deploy.engines.ort.layers", raising=False)
    src_ids, lengths = random_sources(1, 3)
    with pytest.raises(MissingExtra, match=r"pip install '\.\[export\]'"):
        ort.layers(src_ids, lengths, np.full((1, 1), 2, np.int32))


def test_layer_values_keep_the_limits(graphs: Engine, eager: Engine) -> None:
    src_ids, lengths = random_sources(1, 25)
    for engine in (graphs, eager):
        with pytest.raises(LimitError, match="25 tokens exceeds"):
            engine.layers(src_ids, lengths, np.full((1, 1), 2, np.int32))
        with pytest.raises(LimitError, match="step 25 exceeds the limit of 24"):
            engine.layers(src_ids[:, :3], np.array([3], np.int32), np.full((1, 25), 2, np.int32))


def test_results_stay_valid_after_further_steps(graphs: Engine) -> None:
    src_ids, lengths = random_sources(3, 4)
    state = graphs.encode(src_ids, lengths)
    first = graphs.step(np.full((3, 1), 2, np.int32), state, full=True)
    assert first.log_probs is not None
    copies = first.ids.copy(), first.scores.copy(), first.log_probs.copy()
    for _ in range(5):
        graphs.step(np.full((3, 1), 7, np.int32), state, full=True)
    for kept, copy in zip((first.ids, first.scores, first.log_probs), copies, strict=True):
        assert (kept == copy).all()


@pytest.mark.parametrize("name", ["ort", "eager"])
def test_requests_beyond_the_limits_are_refused(name: str, request: pytest.FixtureRequest) -> None:
    engine: Engine = request.getfixturevalue(name)
    src_ids, lengths = random_sources(2, 25)
    with pytest.raises(LimitError, match="25 tokens exceeds the limit of 24"):
        engine.encode(src_ids, lengths)
    src_ids, lengths = random_sources(2, 4)
    with pytest.raises(LimitError, match=f"token id {VOCAB} is outside the source vocabulary of {VOCAB}"):
        engine.encode(np.where(src_ids == src_ids[0, 0], VOCAB, src_ids).astype(np.int32), lengths)
    with pytest.raises(LimitError, match="token id -1"):
        engine.encode(np.where(src_ids == src_ids[0, 0], -1, src_ids).astype(np.int32), lengths)
    with pytest.raises(LimitError, match="lengths"):
        engine.encode(src_ids, np.array([4, 0], np.int32))
    state = engine.encode(src_ids, lengths)
    for _ in range(24):
        engine.step(np.full((2, 1), 5, np.int32), state)
    with pytest.raises(LimitError, match="step 25 exceeds the limit of 24"):
        engine.step(np.full((2, 1), 5, np.int32), state)


def test_unknown_backend_names_the_nearest(bundle: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'ort'"):
        make_engine("otr", open_bundle(bundle))


def test_eager_refuses_other_weights(bundle: Path, tmp_path: Path) -> None:
    from .conftest import small_config, write_checkpoint

    other = write_checkpoint(tmp_path / "other", small_config(), seed=9)
    with pytest.raises(ArtifactError, match="not exported from the weights"):
        make_engine("eager", open_bundle(bundle), other)
    with pytest.raises(ArtifactError, match="--checkpoint"):
        make_engine("eager", open_bundle(bundle), tmp_path / "nowhere")


def test_missing_package_names_the_extra(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    for module in [name for name in sys.modules if name.startswith("tformer_deploy.engines.ort")]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(MissingExtra, match=r"pip install '\.\[cpu\]'"):
        make_engine("ort", open_bundle(bundle))


def test_both_onnxruntime_wheels_are_refused(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxruntime.__file__", str(tmp_path / "onnxruntime/__init__.py"))
    (tmp_path / "onnxruntime-1.31.1.dist-info").mkdir()
    with OrtEngine(open_bundle(bundle)):
        pass
    (tmp_path / "onnxruntime_gpu-1.31.1.dist-info").mkdir()
    with pytest.raises(ConfigError, match="both installed"), OrtEngine(open_bundle(bundle)):
        pass
