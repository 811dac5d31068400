"""Engines alone: equal numbers at many shapes, reordering, limits, telemetry."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tformer_deploy.bundle import open_bundle
from tformer_deploy.checkpoint import open_checkpoint
from tformer_deploy.engines import make_engine
from tformer_deploy.engines.base import Engine
from tformer_deploy.engines.eager import EagerEngine
from tformer_deploy.engines.ort import OrtEngine
from tformer_deploy.errors import ArtifactError, ConfigError, LimitError, MissingExtra

from .conftest import VOCAB, random_sources

TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def ort(bundle: Path) -> Iterator[Engine]:
    with OrtEngine(open_bundle(bundle), threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def eager(run: Path) -> Iterator[Engine]:
    with EagerEngine(open_checkpoint(run).load_model()) as engine:
        yield engine


@pytest.mark.parametrize(("batch", "width", "steps"), [(1, 1, 24), (1, 24, 3), (2, 5, 6), (5, 9, 4), (33, 3, 2)])
def test_ort_equals_eager_at_many_shapes(ort: Engine, eager: Engine, batch: int, width: int, steps: int) -> None:
    src_ids, lengths = random_sources(batch, width)
    states = [engine.encode(src_ids, lengths) for engine in (ort, eager)]
    real = np.arange(width) < lengths[:, None]
    for ours, theirs in zip(eager.cross_keys_values(states[1]), ort.cross_keys_values(states[0]), strict=True):
        assert theirs.shape == (batch, 4, width, 8)
        assert np.abs(ours - theirs).transpose(0, 2, 1, 3)[real].max() <= TOLERANCE
    rng = np.random.default_rng(1)
    for _ in range(steps):
        tokens = rng.integers(0, VOCAB, (batch, 1)).astype(np.int32)
        a, b = (engine.step(tokens, state, full=True) for engine, state in zip((ort, eager), states, strict=True))
        assert a.log_probs is not None and b.log_probs is not None
        assert np.abs(a.log_probs - b.log_probs).max() <= TOLERANCE
        assert a.ids.shape == a.scores.shape == (batch, 1, 1)
        assert (a.log_probs[:, 0].argmax(-1) == a.ids[:, 0, 0]).all()
        assert (a.log_probs[:, 0].max(-1) == a.scores[:, 0, 0]).all()


def test_beams_and_compaction_follow_their_parents(ort: Engine, eager: Engine) -> None:
    src_ids, lengths = random_sources(4, 7, seed=3)
    rng = np.random.default_rng(2)
    states = [engine.encode(src_ids, lengths) for engine in (ort, eager)]
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
            for engine, state in zip((ort, eager), states, strict=True):
                engine.reorder(state, parents, keep)
            sentences, beams = parents.shape
        tokens = rng.integers(0, VOCAB, (sentences, beams)).astype(np.int32)
        a, b = (engine.step(tokens, state, full=True) for engine, state in zip((ort, eager), states, strict=True))
        assert a.log_probs is not None and b.log_probs is not None
        assert a.log_probs.shape == (sentences, beams, VOCAB)
        assert np.abs(a.log_probs - b.log_probs).max() <= TOLERANCE


def test_results_stay_valid_after_further_steps(ort: Engine) -> None:
    src_ids, lengths = random_sources(3, 4)
    state = ort.encode(src_ids, lengths)
    first = ort.step(np.full((3, 1), 2, np.int32), state, full=True)
    assert first.log_probs is not None
    copies = first.ids.copy(), first.scores.copy(), first.log_probs.copy()
    for _ in range(5):
        ort.step(np.full((3, 1), 7, np.int32), state, full=True)
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
    monkeypatch.delitem(sys.modules, "tformer_deploy.engines.ort")
    with pytest.raises(MissingExtra, match=r"pip install 'tformer-deploy\[cpu\]'"):
        make_engine("ort", open_bundle(bundle))


def test_both_onnxruntime_wheels_are_refused(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tformer_deploy.engines.ort.distribution", lambda name: name)
    with pytest.raises(ConfigError, match="both installed"), OrtEngine(open_bundle(bundle)):
        pass


def test_telemetry_is_off(bundle: Path, tmp_path: Path) -> None:
    """The library starts no thread of its own and leaves nothing in the home folder."""
    code = (
        "import os, sys, tformer_deploy\n"
        "t = tformer_deploy.load(sys.argv[1], threads=1)\n"
        "t.translate(['w5 w6'])\n"
        "print(os.environ['ORT_DISABLE_TELEMETRY'], len(os.listdir('/proc/self/task')))\n"
    )
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, bundle], env=env, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == ["1", "1"]
    assert list(tmp_path.iterdir()) == []
