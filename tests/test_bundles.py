"""Committed bundles: every kind of graph still gives the tokens that were stored beside it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tformer_deploy import load
from tformer_deploy.base.errors import ArtifactError
from tformer_deploy.base.headers import schema_error
from tformer_deploy.bundle.contract import KINDS, SIZES, described, graphs_of
from tformer_deploy.bundle.manifest import MANIFEST, VERSION, hashes, open_bundle
from tformer_deploy.bundle.plans import trt_variant
from tformer_deploy.engines import make_engine
from tformer_deploy.export.signature import name_sizes, read_signature
from tformer_deploy.translate.encode import EncoderOptions, TextEncoder

from .conftest import needs_vnni

BUNDLES = Path(__file__).parent / "bundles"
DOCS = Path(__file__).parent.parent / "docs/bundle.md"


def stored() -> Iterator[tuple[str, str]]:
    """Every bundle and variant whose outputs are stored; `+shortlist` behind a name: with the bundle's lists."""
    for answers in sorted(BUNDLES.glob("v*/*.json")):
        if answers.with_suffix("").is_dir():
            for name in json.loads(answers.read_text())["greedy"]:
                yield str(answers.with_suffix("").relative_to(BUNDLES)), name


@pytest.mark.parametrize(("bundle", "name"), list(stored()))
def test_every_kind_gives_the_stored_tokens(bundle: str, name: str) -> None:
    """Plans need a GPU: of target `trt`, the graphs that they are made of run on ONNX Runtime."""
    answers = json.loads((BUNDLES / f"{bundle}.json").read_text())
    variant, _, shortlist = name.partition("+")
    if shortlist:
        needs_vnni(variant)
    asked: dict[str, Any] = {"variant": variant, "shortlist": bool(shortlist), "threads": 1}
    if variant.startswith("native"):
        pytest.importorskip("tformer_native", reason="tformer-native is not installed: make native")
        asked["backend"] = "native"
    with load(BUNDLES / bundle, **asked) as translator:
        assert [found.ids for found in translator.translate(answers["lines"])] == answers["greedy"][name]
    with load(BUNDLES / bundle, **asked, beams=3, n_best=3) as translator:
        for found, expected in zip(translator.translate(answers["lines"]), answers["beam"][name], strict=True):
            assert [each.ids for each in (found, *found.alternatives)][: len(expected)] == expected
    if alignments := answers.get("alignment", {}).get(name):
        with load(BUNDLES / bundle, **asked, align=True) as translator:
            assert [found.alignment for found in translator.translate(answers["lines"])] == alignments


@pytest.mark.parametrize(
    ("bundle", "variant"),
    [("v2/copy", "fp32"), ("v2/copy", "int8"), ("v2/copy", "native-bf16"), ("v2/copy", "native-int8")],
)
def test_the_encoder_alone_gives_the_stored_vectors(bundle: str, variant: str) -> None:
    """Means of the tokens' vectors, rounded; in 8 bits processors may differ, but not where sums have an order."""
    native = variant.startswith("native")
    if native:
        pytest.importorskip("tformer_native", reason="tformer-native is not installed: make native")
    answers = json.loads((BUNDLES / f"{bundle}.json").read_text())
    options = EncoderOptions(BUNDLES / bundle, backend="native" if native else "ort", variant=variant, threads=1)
    with TextEncoder(options) as encoder:
        found = np.array([each.vectors for each in encoder.encode(answers["lines"])])
    assert np.abs(found - np.array(answers["vectors"][variant])).max() < (0.02 if variant == "int8" else 2e-5)


def test_every_kind_is_among_the_committed_bundles() -> None:
    found = set()
    for path in BUNDLES.glob("v*/*/manifest.json"):
        manifest = json.loads(path.read_text())
        for part in (manifest, *manifest["variants"].values()):
            found |= {graph["kind"] for graph in part["graphs"].values()}
    assert found == set(KINDS)


# What is refused, in one line


Change = Callable[[dict[str, Any]], object]


def edited(bundle: Path, tmp_path: Path, change: Change) -> Path:
    copy = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    manifest = json.loads((copy / MANIFEST).read_text())
    change(manifest)
    (copy / MANIFEST).write_text(json.dumps({**manifest, "files": hashes(copy)}))
    return copy


def newer(manifest: dict[str, Any]) -> None:
    manifest["variants"]["trt"]["graphs"]["decoder_step"]["kind"] = "device_search/9"
    manifest["variants"]["int8"]["graphs"]["encoder"]["kind"] = "encoder/7"


def test_a_kind_that_is_not_known_is_refused_where_it_would_run(tmp_path: Path) -> None:
    copy = edited(BUNDLES / "v2/copy", tmp_path, newer)
    with load(copy, variant="int4", threads=1) as translator:
        assert translator.translate(["6"])[0].ids
    message = re.escape(f"has a graph 'encoder' of kind encoder/7, this tformer runs {', '.join(KINDS)}: update it, or")
    with pytest.raises(ArtifactError, match=message) as caught:
        load(copy, variant="int8", threads=1)
    assert "\n" not in str(caught.value)
    for look in (trt_variant, lambda bundle: make_engine("ort:trt", bundle)):
        with pytest.raises(ArtifactError, match="has a graph 'decoder_step' of kind device_search/9"):
            look(open_bundle(copy))


@pytest.mark.parametrize(
    "change",
    [
        lambda graph: graph.update(kind="inplace/1"),
        lambda graph: graph["inputs"].pop(),
        lambda graph: graph["outputs"][0].update(dtype="float32"),
        lambda graph: graph["outputs"][2].update(shape=["batch", "beams", 15]),
    ],
    ids=["kind", "input", "type", "size"],
)
def test_graphs_that_are_not_what_their_recipe_makes_are_refused(change: Change, tmp_path: Path) -> None:
    copy = edited(BUNDLES / "v2/copy", tmp_path, lambda manifest: change(manifest["graphs"]["decoder_step"]))
    with pytest.raises(ArtifactError, match=r"has other graphs than its recipe makes, or manifest\.json was edited"):
        load(copy, variant="fp32", threads=1)


def test_a_format_of_before_the_first_release_is_refused(tmp_path: Path) -> None:
    copy = edited(BUNDLES / "v2/copy", tmp_path, lambda manifest: manifest.update(version=1))
    with pytest.raises(ArtifactError, match="has format version 1, of before the first release: make"):
        open_bundle(copy)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    copy = edited(BUNDLES / "v2/copy", tmp_path, lambda manifest: manifest.update(version=VERSION + 1))
    with pytest.raises(ArtifactError, match=f"has format version {VERSION + 1}, this tformer reads up to {VERSION}"):
        open_bundle(copy)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("graphs.encoder.kind", None),
        ("graphs.encoder.kind", "encoder"),
        ("graphs.decoder_step.inputs.0.shape.1", "2*beams"),
        ("variants.int8.graphs.decoder_step.outputs.0.shape.0", "past_len + 1"),
        ("variants.int8.graphs", None),
        ("model.start_id", None),
        ("recipe.target", "vulkan"),
        ("tokenizer.source.specials", None),
        ("tokenizer.target.specials.eos", -1),
        ("tokenizer.target.specials.bos", -2),
        ("default", None),
    ],
)
def test_what_this_version_must_say_is_in_the_schema(path: str, value: Any) -> None:
    manifest = json.loads(json.dumps(open_bundle(BUNDLES / "v2/copy").manifest))
    assert schema_error(manifest, "bundle") == ""
    *parts, last = path.split(".")
    place = manifest
    for part in parts:
        place = place[int(part)] if isinstance(place, list) else place[part]
    if isinstance(place, list):
        place[int(last)] = value
    elif value is None:
        del place[last]
    else:
        place[last] = value
    assert schema_error(manifest, "bundle")


# Names


def test_sizes_are_names_and_every_one_is_explained() -> None:
    opened = [open_bundle(BUNDLES / folder) for folder in ("v2/copy", "v2/names")]
    found: set[str] = set()
    for bundle in opened:
        for recipe in (bundle.recipe, *bundle.variants.values()):
            for name in graphs_of(recipe):
                graph = described(name, bundle.config, recipe)
                assert graph["kind"] in KINDS
                specs = [*graph["inputs"], *graph["outputs"]]
                found |= {size for spec in specs for size in spec["shape"] if isinstance(size, str)}
    assert found == set(SIZES)


def test_the_documentation_names_every_kind_size_and_key() -> None:
    text = DOCS.read_text(encoding="utf-8")
    for name in (*KINDS, *SIZES):
        assert f"`{name}`" in text, f"docs/bundle.md does not say what {name} is"
    for kind, meaning in {**KINDS, **SIZES}.items():
        assert meaning in text, f"docs/bundle.md has another meaning of {kind}"


def test_sizes_of_a_trace_get_their_names() -> None:
    """Expressions become names; inside the graph others are left open, outside they are reported."""

    def value(name: str, *shape: int | str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    node = helper.make_node("Identity", ["x"], ["y"])
    inputs, outputs = [value("x", "batch*beams", "past_len + 1")], [value("y", "2*beams - 1", "4*batch")]
    inside = [value("v", "beams*batch", "s77 + 2", "src_len", 8)]
    model = helper.make_model(helper.make_graph([node], "g", inputs, outputs, value_info=inside))
    name_sizes(model)
    found = read_signature(model)
    assert [spec.shape for spec in (*found.inputs, *found.outputs)] == [("rows", "present_len"), ("best", "4*batch")]
    dims = model.graph.value_info[0].type.tensor_type.shape.dim
    assert [dim.dim_param or dim.dim_value for dim in dims] == ["rows", 0, "src_len", 8]


@pytest.mark.parametrize("variant", ["", "fp32-cpu", "int8", "int8-latency", "int4"])
def test_exported_graphs_have_names_of_sizes_alone(variant: str, variants_bundle: Path) -> None:
    opened = open_bundle(variants_bundle)
    manifest = opened.manifest["variants"][variant] if variant else opened.manifest
    for name, stated in manifest["graphs"].items():
        graph = onnx.load(opened.graph(name, variant), load_external_data=False).graph
        values = [*graph.input, *graph.output, *graph.value_info]
        assert {dim.dim_param for each in values for dim in each.type.tensor_type.shape.dim} <= {"", *SIZES}
        for side, specs in (("inputs", graph.input), ("outputs", graph.output)):
            shapes = [[dim.dim_param or dim.dim_value for dim in each.type.tensor_type.shape.dim] for each in specs]
            assert shapes == [spec["shape"] for spec in stated[side]]
