"""The parity check: it passes equal engines and catches graphs that were broken on purpose."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from tformer_deploy.bundle import hashes, open_bundle
from tformer_deploy.check import Report, check, generated_sources
from tformer_deploy.checkpoint import open_checkpoint
from tformer_deploy.decoding import DecodeOptions
from tformer_deploy.engines.base import Engine, Ints, Scores, State
from tformer_deploy.engines.eager import EagerEngine
from tformer_deploy.recipe import Tolerance
from tformer_deploy.ship import check_bundle


def check_of(bundle: Path, run: Path) -> Report:
    return check_bundle(open_bundle(bundle), "ort", open_checkpoint(run), None, threads=1)


def test_equal_engines_pass(bundle: Path, run: Path) -> None:
    report = check_of(bundle, run)
    assert report.passed and report.sentences == report.equal == len(generated_sources(60, 3, 24))
    assert 0 < report.scores_max < 1e-5 and 0 < report.encoder_max < 1e-5
    assert "passed" in str(report)


def scale_one_weight(graph: onnx.GraphProto) -> None:
    """One matrix times 1.01."""
    matrix = next(t for t in graph.initializer if len(t.dims) == 2 and min(t.dims) >= 32)
    matrix.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(matrix) * np.float32(1.01), matrix.name))


def drop_the_mask(graph: onnx.GraphProto) -> None:
    """Attention over padding as well."""
    for node in graph.node:
        if node.op_type == "Attention" and len(node.input) == 4:
            del node.input[3]


def shift_positions(graph: onnx.GraphProto) -> None:
    """Position 1 where 0 belongs, and so on."""
    for tensor in graph.initializer:
        if "positions" in tensor.name:
            shifted = np.roll(numpy_helper.to_array(tensor), -1, 0)
            tensor.CopyFrom(numpy_helper.from_array(shifted, tensor.name))


def swap_keys_and_values(graph: onnx.GraphProto) -> None:
    """K and V of one attention exchanged."""
    node = next(node for node in graph.node if node.op_type == "Attention")
    node.input[1], node.input[2] = node.input[2], node.input[1]


MUTATIONS: list[tuple[str, Callable[[onnx.GraphProto], None], str]] = [
    ("encoder", scale_one_weight, "encoder outputs differ"),
    ("encoder", drop_the_mask, "encoder outputs differ"),
    ("encoder", shift_positions, "encoder outputs differ"),
    ("encoder", swap_keys_and_values, "encoder outputs differ"),
    ("decoder_step", scale_one_weight, "scores differ"),
    ("decoder_step", drop_the_mask, "scores differ"),
    ("decoder_step", shift_positions, "scores differ"),
    ("decoder_step", swap_keys_and_values, "scores differ"),
]


@pytest.mark.parametrize(("graph", "mutate", "message"), MUTATIONS, ids=lambda value: getattr(value, "__name__", None))
def test_broken_graphs_fail(
    graph: str,
    mutate: Callable[[onnx.GraphProto], None],
    message: str,
    bundle: Path,
    run: Path,
    tmp_path: Path,
) -> None:
    broken = break_graph(bundle, tmp_path / "bundle", graph, mutate)
    report = check_of(broken, run)
    assert not report.passed
    assert any(message in failure for failure in report.failures)
    if graph == "decoder_step":
        assert report.encoder_max < 1e-5, "the encoder is not to blame"


def break_graph(bundle: Path, out: Path, graph: str, mutate: Callable[[onnx.GraphProto], None]) -> Path:
    """A copy of a bundle with one graph changed and the hashes made to fit."""
    shutil.copytree(bundle, out)
    model = onnx.load(out / f"{graph}.onnx")
    before = model.SerializeToString()
    mutate(model.graph)
    assert model.SerializeToString() != before
    onnx.save(model, out / f"{graph}.onnx")
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps({**manifest, "files": hashes(out)}))
    return out


class Altered:
    """An engine whose scores are changed before anyone sees them."""

    def __init__(self, engine: Engine, change: Callable[[np.ndarray], np.ndarray]) -> None:
        self.inner, self.change = engine, change
        self.config, self.limits = engine.config, engine.limits

    def encode(self, src_ids: Ints, src_lengths: Ints) -> State:
        return self.inner.encode(src_ids, src_lengths)

    def step(self, tokens: Ints, state: State, full: bool = False) -> Scores:
        log_probs = self.change(self.inner.step(tokens, state, full=True).log_probs)  # type: ignore[arg-type]
        ids = log_probs.argmax(-1)[..., None]
        return Scores(ids.astype(np.int32), np.take_along_axis(log_probs, ids, -1), log_probs)

    def reorder(self, state: State, parents: Ints, sentences: Ints | None = None) -> None:
        self.inner.reorder(state, parents, sentences)

    def cross_keys_values(self, state: State) -> list[np.ndarray]:
        return self.inner.cross_keys_values(state)


def altered_report(run: Path, change: Callable[[np.ndarray], np.ndarray], margin: float) -> Report:
    """Check eager PyTorch against a copy of itself whose two best tokens are `margin` apart."""
    model = open_checkpoint(run).load_model()

    def near_tie(log_probs: np.ndarray) -> np.ndarray:
        best = log_probs.argmax(-1)[..., None]
        log_probs = log_probs.copy()
        np.put_along_axis(log_probs, (best + 1) % 60, np.take_along_axis(log_probs, best, -1) - np.float32(margin), -1)
        return log_probs

    with EagerEngine(model) as engine:
        reference = Altered(engine, near_tie)
        subject = Altered(engine, lambda log_probs: change(near_tie(log_probs)))
        sources = [[5, 6, 7, 3], [8, 9, 3]]
        return check(subject, reference, "altered", sources, Tolerance(), DecodeOptions(4))  # type: ignore[arg-type]


def lower_the_best(amount: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(log_probs: np.ndarray) -> np.ndarray:
        lowered = log_probs.copy()
        best = lowered.argmax(-1)[..., None]
        np.put_along_axis(lowered, best, np.take_along_axis(lowered, best, -1) - np.float32(amount), -1)
        return lowered

    return change


def test_token_inside_the_measured_error_is_a_tie(run: Path) -> None:
    report = altered_report(run, lower_the_best(4e-5), margin=2e-5)
    assert report.passed and len(report.ties) == report.sentences == 2 and report.equal == 0
    assert report.ties[0].eager_margin == pytest.approx(2e-5, rel=0.2)
    assert "tie: sentence" in str(report)


def test_token_outside_the_measured_error_fails(run: Path) -> None:
    report = altered_report(run, lower_the_best(0.2), margin=0.1)
    assert not report.passed and len(report.divergences) == 2 and not report.ties
    assert "the first: sentence 1, token 1" in str(report)


def test_nan_fails(run: Path) -> None:
    report = altered_report(run, lambda log_probs: log_probs * np.float32("nan"), margin=0.1)
    assert not report.passed


def test_empty_corpus_fails(run: Path) -> None:
    with EagerEngine(open_checkpoint(run).load_model()) as engine:
        assert not check(engine, engine, "eager", [], Tolerance(), DecodeOptions()).passed


def test_generated_sources_cover_the_lengths() -> None:
    sources = generated_sources(100, 3, 512)
    lengths = [len(source) for source in sources]
    assert lengths[:16] == list(range(1, 17)) and lengths[-1] == 512 and len(lengths) <= 48
    assert all(source[-1] == 3 and max(source) < 100 for source in sources)
    assert sources == generated_sources(100, 3, 512)
