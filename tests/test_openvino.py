"""OpenVINO as a backend: the check, both precisions, commands, what it refuses; its steps are in test_engines.py."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tformer_deploy import load
from tformer_deploy.base.errors import ArtifactError, ConfigError, EngineError
from tformer_deploy.bundle.manifest import Bundle, open_bundle
from tformer_deploy.bundle.recipe import TOLERANCES
from tformer_deploy.check import CheckOptions, Gate, make_corpus
from tformer_deploy.engines import encoder_names, engine_name, expand, make_encoder, make_engine
from tformer_deploy.model.checkpoint import open_checkpoint

from .command import failed_line, printed, run_here
from .conftest import VOCAB, random_sources

if not find_spec("openvino"):
    pytest.skip("OpenVINO is not installed: pip install '.[openvino]'", allow_module_level=True)
from tformer_deploy.engines.openvino import ov  # its own import would be reported to the vendor

DEMO = Path(__file__).parent.parent / ".demo/bundle"
LINES = [f"w{n} w{n + 7} w9" for n in range(4, 20)]
TEXT = "".join(f"{line}\n" for line in LINES).encode()


def has_bf16() -> bool:
    return "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


@pytest.fixture(scope="module")
def opened(bundle: Path) -> Bundle:
    return open_bundle(bundle)


@pytest.fixture(scope="module")
def checked(opened: Bundle) -> Any:
    """The check of both precisions, without a text."""
    gate = Gate(opened)
    options = CheckOptions(max_tokens=24, invariance=4, wide=4, large_tokens=512, walks=8, seconds=1)
    corpus = make_corpus(opened.config, opened.recipe, opened.tokenizers(), None, options)
    names = ["openvino", *["openvino:bf16"] * has_bf16()]
    return {found.engine: found for found in gate.run(names, gate.reference(corpus)).engines}


def test_the_check_finds_every_token_equal(checked: Any) -> None:
    """Greedy, beams, samples and other batches; the scores of the last positions, too."""
    found = checked["openvino"]
    assert found.passed and found.precision == "fp32" and not found.loosened, found.failures
    assert all(each.equal == each.sentences for each in found.outputs)
    assert all(each.equal == each.sentences for each in found.invariance)
    assert found.scores_max <= 2e-5 and found.constants.wrong == []


def test_bf16_rounds_and_holds_the_limits_of_its_precision(checked: Any) -> None:
    if "openvino:bf16" not in checked:
        pytest.skip("this processor does not compute in bf16")
    found = checked["openvino:bf16"]
    assert found.passed and found.precision == "bf16" and found.tolerance == TOLERANCES["bf16"], found.failures
    assert found.scores_max > 1e-3 and found.encoder_max > 1e-3


def test_a_processor_without_bf16_is_told(bundle: Path) -> None:
    if has_bf16():
        pytest.skip("this processor computes in bf16")
    engine = make_engine("openvino:bf16", open_bundle(bundle))
    with pytest.raises(EngineError, match="does not compute in bf16: use openvino, which has fp32"), engine:
        pass


@pytest.mark.long
def test_the_check_of_the_demo_passes() -> None:
    """A trained model, whose outputs are long enough for its attention to be wrong if it were fused."""
    if not DEMO.is_dir():
        pytest.skip("there is no .demo/bundle: make demo")
    done = run_here("check", DEMO, "--backend", "openvino", "--src", DEMO.parent / "lines.en", "--seconds", 1)
    assert done.returncode == 0 and b"\npassed\n" in done.stdout, done.stderr


def test_names(opened: Bundle) -> None:
    assert engine_name("openvino", None, opened) == engine_name("openvino", "fp32", opened) == "openvino"
    assert engine_name("openvino", "bf16", opened) == "openvino:bf16"
    assert expand(["openvino", "ort"], [], opened) == ["openvino", "ort"]
    assert expand(["openvino"], ["bf16", "fp32"], opened) == ["openvino:bf16", "openvino"]
    assert expand(["ort", "openvino"], ["fp32"], opened) == ["ort", "openvino"]
    assert not any(name.startswith("openvino") for name in encoder_names(opened))
    for call, message in (
        (lambda: engine_name("openvino", "int8", opened), r"unknown variant 'int8': .*valid: bf16, fp32"),
        (lambda: engine_name("openvino", None, opened, "cuda"), "--device cuda: OpenVINO runs on processors"),
        (lambda: make_engine("openvino", opened, shortlist=True), "--shortlist: openvino has no graphs for it"),
        (lambda: make_encoder("openvino", opened), "OpenVINO does not run the encoder alone: use --backend ort or"),
    ):
        with pytest.raises(ConfigError, match=message):
            call()


def test_translations_are_those_of_onnx_runtime(bundle: Path, attention_bundle: Path) -> None:
    """Beams, samples and alignments; also with two batches at a time."""
    beams: dict[str, Any] = {"beams": 4, "n_best": 3}
    for asked in (beams, {"sampling": True, "n_best": 2, "seed": 3, "top_p": 0.9}):
        found = []
        for backend, workers in (("ort", 1), ("openvino", 1), ("openvino", 2)):
            with load(bundle, backend, threads=1, workers=workers, batch_tokens=32, **asked) as translator:
                results = translator.translate(LINES)
            found.append([[each.ids for each in (result, *result.alternatives)] for result in results])
        assert found[0] == found[1] == found[2]
    aligned = []
    for backend in ("ort", "openvino"):
        with load(attention_bundle, backend, align=True) as translator:
            aligned.append([result.alignment for result in translator.translate(LINES)])
    assert aligned[0] == aligned[1] and any(aligned[0])


def test_commands(bundle: Path, tmp_path: Path) -> None:
    """Nothing but the backend's name is given to any of them."""
    (tmp_path / "lines").write_bytes(TEXT)
    (tmp_path / "few").write_bytes(b"w5 w6\nw7\n")
    expected = printed(run_here("translate", bundle, stdin=TEXT))
    assert printed(run_here("translate", bundle, "--backend", "openvino", stdin=TEXT)) == expected
    printed(run_here("corpus", bundle, "--in", tmp_path / "lines", "--out", tmp_path / "out", "--backend", "openvino"))
    (shard,) = (tmp_path / "out").glob("0*")
    assert shard.read_text().splitlines() == expected
    scored = ["score", bundle, "--src", tmp_path / "few", "--tgt", tmp_path / "few"]
    ours, theirs = (printed(run_here(*scored, "--backend", name)) for name in ("openvino", "ort"))
    assert [float(line) for line in ours] == pytest.approx([float(line) for line in theirs], abs=1e-4)


def test_bench_measures_it(bundle: Path) -> None:
    options = ["--batch", 2, "--beam", 2, "--new-tokens", 3, "--rounds", 1, "--seconds", 0]
    done = run_here("bench", bundle, "--backend", "openvino", "--backend", "ort", *options)
    assert done.returncode == 0, done.stderr
    assert "openvino" in done.stdout.decode()


def test_a_missing_package_is_one_line(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tformer_deploy.engines.openvino", raising=False)
    monkeypatch.setitem(sys.modules, "openvino", None)
    line = failed_line(run_here("translate", bundle, "--backend", "openvino", stdin=b"w5\n"))
    assert line.startswith("error: the package 'openvino' is not installed: pip install '.[openvino]'")


def test_equal_scores_give_the_lower_id(bundle: Path, run: Path, tmp_path: Path) -> None:
    """Every token is there twice."""
    table = open_checkpoint(run).load_model().output.weight.detach()
    table[30:] = table[:30]
    shutil.copytree(bundle, tmp_path / "bundle")
    graph = onnx.load(bundle / "decoder_step.onnx")
    for stored in graph.graph.initializer:  # the table of the embedding and its transpose of the output
        if sorted(stored.dims) == [32, VOCAB]:
            stored.raw_data = (table if stored.dims[0] == VOCAB else table.T).contiguous().numpy().tobytes()
    onnx.save(graph, tmp_path / "bundle/decoder_step.onnx")
    with make_engine("openvino", dataclasses.replace(open_bundle(bundle), directory=tmp_path / "bundle")) as engine:
        state = engine.encode(*random_sources(2, 4))
        engine.reorder(state, np.repeat(np.arange(2, dtype=np.int32)[:, None], 3, 1))
        found = engine.step(np.array([[4, 9, 2]] * 2, np.int32), state, full=True)
    assert found.log_probs is not None and (found.log_probs[..., :30] == found.log_probs[..., 30:]).all()
    order = np.argsort(-found.log_probs, axis=-1, kind="stable")[..., : found.ids.shape[-1]]
    assert (found.ids == order).all()


def changed(bundle: Path, out: Path, change: Any) -> Bundle:
    """A bundle that is taken for verified, with another step."""
    shutil.copytree(bundle, out)
    change(out / "decoder_step.onnx")
    return dataclasses.replace(open_bundle(bundle), directory=out)


def elsewhere(path: Path) -> None:
    """Weights that lie outside the bundle."""
    graph = onnx.load(path)
    stored = max(graph.graph.initializer, key=lambda each: len(each.raw_data))
    (path.parent.parent / "secret").write_bytes(stored.raw_data)
    stored.ClearField("raw_data")
    stored.data_location = onnx.TensorProto.EXTERNAL
    stored.external_data.append(onnx.StringStringEntryProto(key="location", value="../secret"))
    path.write_bytes(graph.SerializeToString())


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def other_kind(path: Path) -> None:
    graph = onnx.load(path, load_external_data=False)
    next(each for each in graph.graph.input if each.name == "position").type.tensor_type.elem_type = 7
    onnx.save(graph, path)


def other_name(path: Path) -> None:
    graph = onnx.load(path, load_external_data=False)
    for each in (*graph.graph.output, *graph.graph.node):
        if getattr(each, "name", "") == "top_ids" and each in graph.graph.output:
            each.name = "best_ids"
    for node in graph.graph.node:
        node.output[:] = ["best_ids" if name == "top_ids" else name for name in node.output]
    onnx.save(graph, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut, r"cannot load .*decoder_step\.onnx: it is damaged, or tformer did not make it \(.+\): copy or export"),
        (elsewhere, r"cannot load .*decoder_step\.onnx: .*secret.* outside"),
        (other_name, r"decoder_step\.onnx has no 'top_ids': it is not a graph of tformer, export the bundle again"),
        (other_kind, r"decoder_step\.onnx: 'position' is .*, not int32 of \[1\]: export the bundle again"),
    ],
)
def test_graphs_that_are_not_tformers(change: Any, message: str, bundle: Path, tmp_path: Path) -> None:
    engine = make_engine("openvino", changed(bundle, tmp_path / "bundle", change))
    with pytest.raises(ArtifactError, match=message) as failure, engine:
        pass
    assert "\n" not in str(failure.value)


def test_other_weights_are_seen(bundle: Path) -> None:
    """The manifest has no hash of itself: what stands in the graph's file counts."""
    opened = open_bundle(bundle)
    manifest = {**opened.manifest, "checkpoint": {**opened.manifest["checkpoint"], "weights_sha256": "0" * 64}}
    engine = make_engine("openvino", dataclasses.replace(opened, manifest=manifest))
    with pytest.raises(ArtifactError, match="was edited"), engine:
        pass
