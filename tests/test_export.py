"""Graphs: the contract, every model variant, external data, atomic bundles, failed checks."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import onnx
import pytest

from tformer_deploy import load
from tformer_deploy.base.errors import ArtifactError, ConfigError, LimitError
from tformer_deploy.bundle.contract import GRAPHS, described, layer_names, signature
from tformer_deploy.bundle.manifest import add_report, open_bundle
from tformer_deploy.bundle.recipe import Recipe
from tformer_deploy.export import checked as ship_module
from tformer_deploy.export.checked import export_checked
from tformer_deploy.export.save import save_graphs
from tformer_deploy.export.signature import compare_signature, read_signature
from tformer_deploy.export.to_onnx import export_graphs
from tformer_deploy.export.trace import Tracer
from tformer_deploy.model.network import Transformer

from .command import failed_line, run_here
from .conftest import small_config, write_checkpoint
from .params import long_but


def test_graphs_keep_the_contract(bundle: Path) -> None:
    opened = open_bundle(bundle)
    for name in GRAPHS:
        model = onnx.load(opened.graph(name))
        assert model.ir_version == 10
        assert [(o.domain, o.version) for o in model.opset_import] == [("", 23)]
        assert not {node.domain for node in model.graph.node} - {""}, "standard operators only"
        assert not {node.op_type for node in model.graph.node} & {"If", "Loop", "Scan"}
        found = read_signature(model)
        assert found == signature(name, opened.config, opened.recipe)
        stated = opened.manifest["graphs"][name]
        assert {**described(name, opened.config, opened.recipe), "passes": ["fold_weights"]} == stated
        stored = {entry.key: entry.value for entry in model.metadata_props}
        assert stored["tformer.graph"] == name
        assert stored["tformer.weights_sha256"] == opened.weights_sha256
        assert json.loads(stored["tformer.model"]) == opened.manifest["model"]


def test_signature_check_reports_every_difference(bundle: Path) -> None:
    opened = open_bundle(bundle)
    model = onnx.load(opened.graph("encoder"))
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT64
    model.graph.output[1].type.tensor_type.shape.dim[0].dim_value = 2
    with pytest.raises(ArtifactError) as error:
        compare_signature("encoder", read_signature(model), signature("encoder", opened.config, opened.recipe))
    assert "src_ids" in str(error.value) and "cross_v_0" in str(error.value)


@pytest.mark.parametrize("folder", ["bundle", "attention_bundle"])
def test_layer_values_stand_inside_the_graphs_by_name(folder: str, request: pytest.FixtureRequest) -> None:
    opened = open_bundle(request.getfixturevalue(folder))
    for name in GRAPHS:
        graph = onnx.load(opened.graph(name)).graph
        names = layer_names(name, opened.config)
        assert [output for node in graph.node for output in node.output if output in names] == list(names)
        assert not {output.name for output in graph.output} & set(names)
        assert "Identity" not in {node.op_type for node in graph.node}, "a name must not cost an operation"
        shapes = {value.name: len(value.type.tensor_type.shape.dim) for value in graph.value_info}
        assert all(shapes[each] == 3 for each in names)


VARIANTS: dict[str, tuple[dict[str, object], int, str]] = {
    "annotated": (
        {"norm": "annotated", "norm_eps": 1e-6, "share_embeddings": "none", "output_bias": True, "tgt_vocab": 45},
        18,
        "top_k = 7",
    ),
    "post-learned": (
        {"norm_position": "post", "final_norm": False, "positions": "learned", "activation": "gelu", "norm_eps": 1e-12},
        20,
        "attention = true",
    ),
    "silu-one-head": (
        {"scale_embeddings": False, "activation": "silu", "decoder_layers": 3, "position_base": 500.0, "heads": 1},
        24,
        "axes.beams = { min = 1, opt = 1, max = 1 }",
    ),
}


@pytest.mark.parametrize("variant", long_but(VARIANTS, "annotated"))
def test_every_variant_exports_and_passes_its_check(
    variant: tuple[dict[str, object], int, str], tmp_path: Path
) -> None:
    changes, opset, rest = variant
    config = small_config(**{"encoder_layers": 1, "decoder_layers": 1, **changes})
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f"opset = {opset}\n{rest}\n")
    report = export_checked(write_checkpoint(tmp_path / "run", config), tmp_path / "bundle", [str(recipe)])
    step = onnx.load(tmp_path / "bundle/decoder_step.onnx")
    assert step.opset_import[0].version == opset
    assert set(layer_names("decoder_step", config)) < {name for node in step.graph.node for name in node.output}
    assert report.passed and all(each.equal == report.sentences for each in report.engines[0].outputs)
    stored = json.loads((tmp_path / "bundle/check.json").read_text())
    assert stored["passed"] and stored["engines"][0]["scores_max"] <= 1e-4


def test_equal_weights_of_both_graphs_are_written_once(tmp_path: Path) -> None:
    model = Transformer(small_config(share_embeddings="all")).eval()
    export_graphs(Tracer(model), Recipe().for_model(model.config), tmp_path / "first", "0")
    table = model.output.weight.detach().numpy()
    written = (tmp_path / "first/weights.data").read_bytes()
    assert written.count(table.tobytes()) == 1

    def graphs() -> dict[str, onnx.ModelProto]:
        return {name: onnx.load(tmp_path / f"first/{name}.onnx") for name in GRAPHS}

    (tmp_path / "second").mkdir()
    save_graphs(graphs(), tmp_path / "second")
    assert (tmp_path / "second/weights.data").read_bytes() == written
    assert all(onnx.load(tmp_path / f"second/{name}.onnx") == graph for name, graph in graphs().items())
    for name in GRAPHS:
        stored = onnx.load(tmp_path / f"second/{name}.onnx", load_external_data=False).graph.initializer
        places = [int(entry.value) for tensor in stored for entry in tensor.external_data if entry.key == "offset"]
        assert places and not any(place % 4096 for place in places)


def test_failed_check_leaves_no_bundle(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def export_a_wrong_weight(tracer: Tracer, *rest: Any) -> None:
        tracer.model.output.weight.data *= 1.01
        export_graphs(tracer, *rest)

    monkeypatch.setattr(ship_module, "export_graphs", export_a_wrong_weight)
    done = run_here("export", run, "--out", tmp_path / "bundle", "--recipe", "fp32-cpu")
    limit = r"\(tolerance\.(encoder|scores)\)"
    assert re.search(
        rf"not written, the check failed: ort: (encoder outputs|scores) differ by \S+, more than 0\.0001 {limit}",
        failed_line(done, 3),
    )
    said = done.stdout.decode()
    assert "\n  FAILED: scores differ by " in said and "\n  FIRST DIFFERENCE: " in said, "the report is not lost"
    assert list(tmp_path.iterdir()) == []


def test_a_report_hides_no_damage(bundle: Path, tmp_path: Path) -> None:
    """Only the report is hashed, not what else has changed since."""
    copy = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    add_report(copy, {"passed": True})
    open_bundle(copy)
    (copy / "encoder.onnx").write_bytes(b"")
    add_report(copy, {"passed": False})
    with pytest.raises(ArtifactError, match=r"encoder\.onnx"):
        open_bundle(copy)


def test_bundle_is_never_overwritten_by_accident(run: Path, bundle: Path, tmp_path: Path) -> None:
    before = (bundle / "manifest.json").read_bytes()
    with pytest.raises(ArtifactError, match="--force"):
        export_checked(run, bundle)
    assert (bundle / "manifest.json").read_bytes() == before
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/thesis.txt").write_text("all of it")
    for manifest in ("", '{"name": "my web app"}', "[]"):
        if manifest:
            (tmp_path / "precious/manifest.json").write_text(manifest)
        with pytest.raises(ArtifactError, match="not a bundle"):
            export_checked(run, tmp_path / "precious", force=True)
    assert (tmp_path / "precious/thesis.txt").read_text() == "all of it"


@pytest.mark.long
def test_kill_during_export_leaves_the_old_bundle(run: Path, bundle: Path, tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    shutil.copytree(bundle, out)
    command = [sys.executable, "-m", "tformer_deploy", "export", str(run), "--out", str(out), "--force"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while not list(tmp_path.glob(".bundle.*/encoder.onnx")) and process.poll() is None:
        time.sleep(0.02)
    assert list(tmp_path.glob(".bundle.*/encoder.onnx")), "the export must be under way when it is killed"
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert open_bundle(out).manifest == open_bundle(bundle).manifest


@pytest.mark.parametrize(
    "name",
    [
        "decoder_step.onnx",
        "encoder.onnx",
        "tokenizer.words",
        "check.json",
        "int8/decoder_step.onnx",
        "int4/encoder.onnx",
    ],
)
def test_damaged_bundles_are_refused(name: str, variants_bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(variants_bundle, copy)
    content = bytearray((copy / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / name).write_bytes(content)
    with pytest.raises(ArtifactError, match=f"{name} does not match its SHA-256"):
        open_bundle(copy)
    (copy / name).unlink()
    with pytest.raises(ArtifactError, match=f"{name} is missing"):
        open_bundle(copy)


def test_edited_manifest_is_refused(bundle: Path, tmp_path: Path) -> None:
    """The manifest has no hash, but what it says of the model stands inside the graphs as well."""
    copy = tmp_path / "bundle"
    shutil.copytree(bundle, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["model"]["eos_id"] = 6
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match=r"manifest.json was edited"):
        load(copy)
    del manifest["versions"]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match=r"damaged: must contain \['versions'\]"):
        open_bundle(copy)


def test_newer_and_broken_manifests_are_refused(bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(bundle, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps({**manifest, "version": 99}))
    with pytest.raises(ArtifactError, match="format version 99"):
        open_bundle(copy)
    (copy / "manifest.json").write_text("{")
    with pytest.raises(ArtifactError, match="damaged"):
        open_bundle(copy)
    (copy / "manifest.json").unlink()
    with pytest.raises(ArtifactError, match="not a bundle"):
        open_bundle(copy)


def test_recipe_narrows_the_source(run: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "short.toml"
    recipe.write_text("[axes]\nsrc_len = { min = 1, opt = 4, max = 6 }\npast_len = { min = 0, opt = 2, max = 9 }\n")
    export_checked(run, tmp_path / "bundle", [str(recipe)])
    with load(tmp_path / "bundle") as translator:
        assert len(translator.translate(["w5 " * 5])[0].ids) <= 10
        with pytest.raises(LimitError, match="line 1: a source of 7 tokens exceeds the limit of 6"):
            translator.translate(["w5 " * 6])


def test_load_takes_what_the_command_takes(bundle: Path) -> None:
    with load(bundle, allowed=["w5 w6", "w7"], batch_tokens=8, device="cpu") as translator:
        assert translator.settings.batch_tokens == 8
        texts = [result.text for result in translator.translate(["w5 w6 w7"] * 5)]
    assert len(set(texts)) == 1 and texts[0] in ("w5 w6", "w7")
    with pytest.raises(ConfigError, match="unknown device 'gpu'"):
        load(bundle, device="gpu")
    with pytest.raises(ConfigError, match="export it again and add --recipe trt"):
        load(bundle, device="cuda")
