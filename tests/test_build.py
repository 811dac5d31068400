"""`tformer build`: real plans by TensorRT for RTX, which needs no GPU; stamps, look-up, refusals."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from tformer_deploy.base.errors import ArtifactError, ConfigError, EngineError, LimitError, MissingExtra
from tformer_deploy.bundle.manifest import Exported, open_bundle, write_manifest
from tformer_deploy.bundle.plans import Profile, Stamp, find_plans, parse_profile
from tformer_deploy.bundle.recipe import load_recipe
from tformer_deploy.engines.ort.library import InferenceSession
from tformer_deploy.engines.ort.ranges import RangeEngine
from tformer_deploy.engines.trt import api, cuda
from tformer_deploy.engines.trt.api import TensorRt, installed, load_builder, load_tensorrt
from tformer_deploy.export.build import build, make_stamp, type_graph, usual_profiles
from tformer_deploy.export.checked import choose
from tformer_deploy.export.to_onnx import export_graphs
from tformer_deploy.export.trace import Tracer
from tformer_deploy.export.trt_builder import (
    BuildOptions,
    check_precision,
    compile_plan,
    defer_interrupt,
    graph_types,
    tensor_types,
    weight_types,
)
from tformer_deploy.model.checkpoint import open_checkpoint

from .command import COMMAND, failed_line, printed, run_here
from .conftest import exported_once, small_config, write_checkpoint

RTX = "sm80+, TensorRT for RTX"


@pytest.fixture(scope="module")
def trt_bundle(run: Path) -> Path:
    """The small model with graphs for TensorRT, checked on ONNX Runtime. Read only."""
    return exported_once(run, "trt-bundle", ["fp32", "trt"])


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "lines.txt"
    path.write_text("w5 w6 w7\n\nw8 w9 w10 w11 w12\nw20\n")
    return path


@pytest.fixture(scope="module")
def built(trt_bundle: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy with plans in every precision. Read only."""
    out = tmp_path_factory.mktemp("built") / "bundle"
    shutil.copytree(trt_bundle, out)
    for precision in ("fp32", "fp16", "bf16"):
        done = run_here(
            "build",
            out,
            "--precision",
            precision,
            "--calibrate",
            text,
            "--profile",
            "1x1x8x16",
            "--profile",
            "4x3x8x16",
            "--json",
        )
        report = json.loads(printed(done)[0])
        assert report["stamp"].startswith(RTX) and report["stamp"].endswith(precision)
        kind = {"fp32": "float", "fp16": "half", "bf16": "bf16"}[precision]
        assert len(report["plans"]) == 4 and Path(report["directory"]).is_dir()
        assert all(set(plan["layers"]["matrix_multiply"]) == {kind} for plan in report["plans"])
    return out


def test_a_build_needs_no_torch(trt_bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(trt_bundle, copy)
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('torch is hidden', name='torch')\n")
    words = ["build", copy, "--precision", "fp32", "--profile", "1x1x8x16"]
    code = "from tformer_deploy.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "plans written" in done.stdout, done.stderr


def test_the_gate_holds_the_graphs(trt_bundle: Path) -> None:
    report = json.loads((trt_bundle / "check.json").read_text())
    assert report["passed"] and [engine["engine"] for engine in report["engines"]] == ["ort", "ort:trt"]
    assert open_bundle(trt_bundle).variants["trt"].target == "trt"


def test_graphs_for_tensorrt_are_never_the_default(tmp_path: Path) -> None:
    config = small_config()
    write_manifest(tmp_path, choose(["trt", "int8"], config), Exported(config, {}))
    assert json.loads((tmp_path / "manifest.json").read_text())["default"] == "int8"


def test_a_model_with_an_island_builds(tmp_path: Path, text: Path) -> None:
    """Through the command's own road: ranges, types, a real plan with exactly those products in fp32."""
    run = write_checkpoint(tmp_path / "run", small_config())
    model = open_checkpoint(run).load_model()
    feed_forward = model.decoder[1].ff
    for parameter in (feed_forward.up.weight, feed_forward.up.bias):
        parameter.data *= 1e6
    feed_forward.down.weight.data /= 1e6
    out = tmp_path / "bundle"
    config, chosen = small_config(), choose(["trt"], small_config())
    out.mkdir()
    description = open_checkpoint(run).tokenizers.save(out)
    for name, recipe in chosen.items():
        export_graphs(Tracer(model.eval()), recipe, out / name, "0" * 64)
    write_manifest(out, chosen, Exported(config, description, {"path": "run", "weights_sha256": "0" * 64}))
    report = build(out, BuildOptions("fp16"), [Profile(1, 1, 8, 16)], text)
    assert [(island.graph, island.node) for island in report.islands] == [
        ("decoder_step", "decoder.1.ff.up"),
        ("decoder_step", "decoder.1.ff.down"),
    ]
    products = {plan.graph: plan.layers["matrix_multiply"] for plan in report.plans}
    assert "float" not in products["encoder"] and products["decoder_step"]["float"] == 2


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("profile", [Profile(3, 1, 8, 16), Profile(2, 3, 8, 16)], ids=str)
def test_a_step_for_8_6_computes_the_same(trt_bundle: Path, profile: Profile, precision: Any, tmp_path: Path) -> None:
    """On ONNX Runtime, without the layers that TensorRT 8.6.0 got wrong on a GPU."""
    found = []
    for major in (11, 8):
        file = tmp_path / f"{major}.onnx"
        type_graph(open_bundle(trt_bundle).graph("decoder_step", "trt"), file, profile, precision, {}, major)
        session = InferenceSession(str(file))
        rng, given = np.random.default_rng(1), {}
        for each in session.get_inputs():
            kind = {"tensor(int32)": np.int32, "tensor(float16)": np.float16}.get(each.type, np.float32)
            values = rng.integers(1, 4, each.shape) if kind is np.int32 else rng.standard_normal(each.shape)
            given[each.name] = values.astype(kind)
        given["parents"] %= profile.batch * profile.beams
        names = [each.name for each in session.get_outputs()]
        found.append(dict(zip(names, session.run(names, given), strict=True)))
    theirs, ours = found
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        if precision == "fp32" or expected.dtype.kind == "f":  # which ids come first of equal ones, no rule says
            near = 1e-5 if precision == "fp32" else 0.01
            np.testing.assert_allclose(ours[name], expected, rtol=0, atol=near, err_msg=name)
    graph = onnx.load(file).graph
    weights = {tensor.name for tensor in graph.initializer}
    products = [node for node in graph.node if node.op_type == "MatMul" and node.input[1] not in weights]
    assert len(products) == (0 if profile.beams == 1 else 2 * open_bundle(trt_bundle).config.decoder_layers)
    norms = [node for node in graph.node if node.op_type == "LayerNormalization"]
    assert bool(norms) == (precision == "fp32")


@pytest.mark.parametrize("graph", ["encoder", "decoder_step"])
def test_types_are_those_that_the_library_finds(trt_bundle: Path, graph: str, tmp_path: Path) -> None:
    """TensorRT 8.6 has to be told the type of every tensor; TensorRT for RTX, which finds them itself, says what."""
    tensorrt = load_builder("rtx")
    from polygraphy.backend.trt import network_from_onnx_path

    file = tmp_path / "graph.onnx"
    type_graph(open_bundle(trt_bundle).graph(graph, "trt"), file, Profile(4, 3, 8, 16), "fp16", {}, 8)
    _builder, network, _parser = network_from_onnx_path(str(file))
    types = graph_types(network, tensorrt.module)
    outputs = [layer.get_output(i) for layer in network for i in range(layer.num_outputs)]
    assert {each.name: types[each.name] for each in outputs} == {each.name: each.dtype for each in outputs}
    assert {tensorrt.module.float16, tensorrt.module.float32} <= set(types.values())


def test_plans_lie_in_the_bundle_with_their_stamp(built: Path, text: Path) -> None:
    bundle = open_bundle(built)
    version = load_tensorrt("rtx").version
    for precision in ("fp32", "fp16", "bf16"):
        plans = find_plans(bundle, "trt", [Stamp("sm80+", f"TensorRT for RTX {version}", precision)])
        assert plans.profiles == [Profile(1, 1, 8, 16), Profile(4, 3, 8, 16)]
        assert plans.header["graphs"] == {name: bundle.manifest["files"][name] for name in bundle.graph_files("trt")}
        data = plans.plan("decoder_step", Profile(4, 3, 8, 16)).read_bytes()
        assert set(weight_types(data).values()) >= {precision}
        report = plans.header["report"]
        assert report["directory"] == plans.directory.name
        assert report["calibration"] == f"3 sentences of {text.name}" and report["coverage"] == {
            "1x1x8x16": 1,
            "4x3x8x16": 1,
        }
    assert not {"plans", "timing"} & {Path(name).parent.name for name in bundle.manifest["files"]}


def test_a_request_gets_the_smallest_plan_that_takes_it(built: Path) -> None:
    version = load_tensorrt("rtx").version
    plans = find_plans(open_bundle(built), "trt", [Stamp("sm80+", f"TensorRT for RTX {version}", "fp16")])
    assert plans.fitting(Profile(1, 1, 5, 10)) == Profile(1, 1, 8, 16)
    assert plans.fitting(Profile(2, 1, 8, 16)) == plans.fitting(Profile(1, 3, 1, 1)) == Profile(4, 3, 8, 16)
    for request, message in (
        (
            (5, 1, 8, 16),
            rf"batch 5 exceeds the plans' largest, 4: tformer build {built} --precision fp16 --src FILE "
            "--profile 1x1x8x16 --profile 4x3x8x16 --profile 5x1x8x16",
        ),
        ((1, 1, 9, 16), r"src_len 9 exceeds"),
        ((1, 1, 8, 17), r"capacity 17 exceeds"),
    ):
        with pytest.raises(LimitError, match=message):
            plans.fitting(Profile(*request))
    uneven = dataclasses.replace(plans, header={**plans.header, "profiles": ["4x1x8x16", "1x4x8x16"]})
    with pytest.raises(LimitError, match=r"no plan takes 4x4x8x16 .*there are 1x4x8x16, 4x1x8x16"):
        uneven.fitting(Profile(4, 4, 8, 16))


def test_plans_of_another_host_are_named(built: Path) -> None:
    wanted = Stamp("sm90", "TensorRT 11.4.0", "fp16")
    with pytest.raises(ArtifactError) as error:
        find_plans(open_bundle(built), "trt", [wanted])
    message = str(error.value)
    assert "no plans for this host (sm90, TensorRT 11.4.0, fp16)" in message and RTX in message
    assert f"tformer build {built} --precision fp16 --src FILE" in message


def test_damaged_and_stale_plans_are_refused(built: Path, tmp_path: Path) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(built, copy)
    stamp = Stamp("sm80+", f"TensorRT for RTX {load_tensorrt('rtx').version}", "fp32")
    folder = copy / "trt/plans" / stamp.folder
    plan = folder / "encoder-1x1x8x16.plan"
    whole = plan.read_bytes()
    plan.write_bytes(whole[:-1])
    command = f"tformer build {copy} --precision fp32 --profile 1x1x8x16 --profile 4x3x8x16"
    with pytest.raises(ArtifactError, match=rf"encoder-1x1x8x16\.plan does not match.*: {command}"):
        find_plans(open_bundle(copy), "trt", [stamp])
    plan.write_bytes(whole)
    header = json.loads((folder / "plans.json").read_text())
    header["graphs"] = {name: "0" * 64 for name in header["graphs"]}
    (folder / "plans.json").write_text(json.dumps(header))
    with pytest.raises(ArtifactError, match=r"compiled from other graphs than the bundle's: tformer build"):
        find_plans(open_bundle(copy), "trt", [stamp])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--precision", "fp16"], "--precision fp16: add --src FILE"),
        (["--calibrate", "no-such"], "no-such: no such file"),
        (["--precision", "fp32", "--profile", "8x4x64"], "profile '8x4x64': write BATCHxBEAMSxSOURCExTARGET"),
        (["--precision", "fp32", "--profile", "1x1x900x16"], "src_len 900 is outside 1..24 of the recipe's axis"),
        (["--precision", "fp32", "--profile", "1x1x8x99"], "99 target positions are outside 1..24"),
        (["--precision", "fp32", "--version-compatible"], "--version-compatible: TensorRT for RTX"),
        (["--precision", "fp32", "--timing-cache", "no-such"], "--timing-cache: TensorRT for RTX"),
        (["--precision", "fp32", "--trt-flavor", "rxt"], "unknown TensorRT flavor 'rxt': did you mean 'rtx'"),
        (
            ["--precision", "fp32", "--trt-flavor", "tensorrt"],
            r"TensorRT is not installed: pip install '.[trt]'",
        ),
    ],
)
def test_a_mistake_is_one_line_and_leaves_no_plans(trt_bundle: Path, arguments: list[str], message: str) -> None:
    done = run_here("build", trt_bundle, *arguments)
    assert message in failed_line(done)
    assert not (trt_bundle / "trt/plans").exists()


def test_a_bundle_without_the_graphs_says_how_to_get_them(bundle: Path) -> None:
    with pytest.raises(ConfigError, match="export it again and add --recipe trt"):
        build(bundle, BuildOptions("fp32"))


def test_a_build_does_not_write_through_a_link(trt_bundle: Path, tmp_path: Path) -> None:
    copy, outside = tmp_path / "bundle", tmp_path / "outside"
    shutil.copytree(trt_bundle, copy)
    outside.mkdir()
    (copy / "trt/plans").symlink_to(outside)
    line = failed_line(run_here("build", copy, "--precision", "fp32", "--profile", "1x1x8x8"))
    assert "is a link" in line and list(outside.iterdir()) == []


def test_a_build_that_fails_keeps_what_was_there(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(built, copy)
    before = sorted((path.name, path.stat().st_size) for path in copy.rglob("*.plan"))

    def fail(*rest: Any) -> Any:
        raise EngineError("out of memory")

    monkeypatch.setattr("tformer_deploy.export.build.compile_plan", fail)
    with pytest.raises(EngineError):
        build(copy, BuildOptions("fp32"))
    assert sorted((path.name, path.stat().st_size) for path in copy.rglob("*.plan")) == before


def test_what_tensorrt_refuses_is_one_line_with_its_reason(trt_bundle: Path, tmp_path: Path) -> None:
    model = onnx.load(trt_bundle / "trt/encoder.onnx")
    relu = next(node for node in model.graph.node if node.op_type == "Relu")
    relu.CopyFrom(helper.make_node("Unique", relu.input, relu.output))
    onnx.save(model, tmp_path / "bad.onnx")
    with pytest.raises(EngineError, match=r"TensorRT for RTX .* cannot build bad\.onnx: .*Unique"):
        compile_plan(load_builder(), tmp_path / "bad.onnx", BuildOptions("fp32"))


def test_a_plan_of_the_wrong_precision_fails(trt_bundle: Path, tmp_path: Path) -> None:
    """The graph is fp32, so what comes out is too, whatever was asked for."""
    from tformer_deploy.export.build import type_graph

    profile = Profile(1, 1, 8, 16)
    type_graph(trt_bundle / "trt/decoder_step.onnx", tmp_path / "step.onnx", profile, "fp32", {}, 11)
    with pytest.raises(EngineError, match=r"the plan of step\.onnx is not fp16"):
        compile_plan(load_builder(), tmp_path / "step.onnx", BuildOptions("fp16"))
    with pytest.raises(EngineError, match="its weights"):
        check_precision(Path("step.onnx"), "fp16", {"output_fp16": "fp32"}, {"matrix_multiply": {"half": 3}})
    with pytest.raises(EngineError, match="its matmuls are"):
        check_precision(Path("step.onnx"), "bf16", {}, {"matrix_multiply": {"half": 3}})
    mixed = {"matrix_multiply": {"half": 3, "float": 2}}
    check_precision(Path("step.onnx"), "fp16", {}, mixed, exact=2)
    with pytest.raises(EngineError, match="its matmuls are"):
        check_precision(Path("step.onnx"), "fp16", {}, mixed, exact=1)


def test_profiles_as_text() -> None:
    assert str(parse_profile("8x4x64x128")) == "8x4x64x128"
    for wrong in ("0x1x1x1", "8x4x64x", "8x4x64x128x1", "8 x4x64x128", "-1x1x1x1"):
        with pytest.raises(ConfigError, match="BATCHxBEAMSxSOURCExTARGET"):
            parse_profile(wrong)


def test_versions_differ_in_what_is_asked_of_them() -> None:
    old, ten, new = (TensorRt("tensorrt", None, version) for version in ("8.6.1", "10.13.2", "11.4.0.106"))
    assert old.precision_options("fp16") == {"tf32": False, "fp16": True, "precision_constraints": "obey"}
    assert old.precision_options("fp32") == {"tf32": False} and not old.typed and not old.network_options()
    assert ten.network_options() == {"strongly_typed": True} and not ten.precision_options("fp16")
    assert not new.network_options() and not new.precision_options("fp16")
    assert TensorRt("rtx", None, "1.7.1").major == 11


@pytest.mark.parametrize(
    ("driver", "error", "message"),
    [
        (0, "cudaErrorInsufficientDriver", "TensorRT 11.4.0 needs a GPU, and no NVIDIA driver is loaded here"),
        (12040, "cudaErrorInsufficientDriver", "driver knows CUDA up to 12.4, and cuda-python here is of 13.4: update"),
        (13040, "cudaErrorNoDevice", "there is none here"),
        (13040, "cudaSuccess", "there is none here"),
    ],
)
def test_without_gpu_or_driver_it_says_which(
    driver: int, error: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = SimpleNamespace(
        cudaErrorInsufficientDriver=SimpleNamespace(name="cudaErrorInsufficientDriver"),
        cudaErrorNoDevice=SimpleNamespace(name="cudaErrorNoDevice"),
        cudaSuccess=SimpleNamespace(name="cudaSuccess"),
    )
    runtime = SimpleNamespace(
        cudaError_t=kinds,
        cudaDriverGetVersion=lambda: (kinds.cudaSuccess, driver),
        cudaRuntimeGetVersion=lambda: (kinds.cudaSuccess, 13040),
        cudaGetDeviceCount=lambda: (getattr(kinds, error), 0),
    )
    monkeypatch.setattr(cuda, "runtime", runtime)
    with pytest.raises(EngineError, match=f"{message}"):
        TensorRt("tensorrt", None, "11.4.0").capability()
    assert TensorRt("rtx", None, "1.7").capability() == "sm80+", "builds without"


def test_the_stamps_that_a_gpu_runs() -> None:
    rtx, other = TensorRt("rtx", None, "1.7.1"), TensorRt("tensorrt", None, "10.3.0")
    assert [str(stamp) for stamp in rtx.stamps("sm90", "fp16")] == ["sm80+, TensorRT for RTX 1.7.1, fp16"]
    assert not rtx.stamps("sm75", "fp16"), "a portable plan is not for it"
    found = [(stamp.capability, stamp.tensorrt) for stamp in other.stamps("sm90", "fp32")]
    assert found == [(c, v) for v in ("TensorRT 10.3.0", "TensorRT 10") for c in ("sm90", "sm80+")]


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install '\.\[trt\]' or '\.\[trt-rtx\]'"):
        installed()
    monkeypatch.setattr(api, "find_spec", lambda name: None if name == "polygraphy" else object())
    with pytest.raises(MissingExtra, match=r"polygraphy is not installed"):
        load_builder()
    monkeypatch.setitem(sys.modules, "tformer_deploy.engines.trt.cuda", None)
    with pytest.raises(MissingExtra, match=r"cuda-python is not installed: pip install '\.\[trt\]'"):
        api.require_gpu("TensorRT")


def test_without_profiles_the_text_decides() -> None:
    axes = load_recipe("trt").for_model(small_config(max_positions=100)).axes
    short = load_recipe("trt").for_model(small_config(max_positions=1)).axes
    for given, lengths, wanted in (
        (axes, [], ["1x1x64x64", "8x1x64x64", "1x1x100x100"]),
        (axes, [20] * 99 + [90], ["1x1x24x48", "8x1x24x48", "1x1x96x100"]),
        (axes, [20] * 50 + [90], ["1x1x96x100", "8x1x96x100"]),
        (short, [1], ["1x1x1x1", "8x1x1x1"]),
    ):
        assert usual_profiles(given, lengths) == set(map(parse_profile, wanted))


def test_one_text_has_the_lengths_and_another_the_values(trt_bundle: Path, text: Path, tmp_path: Path) -> None:
    """Either stands for both; fp32 needs no values."""
    copy, short = tmp_path / "bundle", tmp_path / "short.txt"
    shutil.copytree(trt_bundle, copy)
    short.write_text("w5 w6\nw7\n")
    profile, takes_all = Profile(1, 1, 4, 4), {"1x1x4x4": 1.0}
    sources = [line.split() for line in text.read_text().splitlines() if line]
    known = f"{len(sources)} sentences of {text.name}"
    share = sum(len(words) < 4 for words in sources) / len(sources)
    for precision, texts, calibration, coverage in (
        ("fp32", {"src": short}, "", takes_all),
        ("fp16", {"src": short}, "2 sentences of short.txt", takes_all),
        ("fp16", {"src": short, "calibrate": text}, known, takes_all),
        ("fp16", {"calibrate": text}, known, {"1x1x4x4": share}),
    ):
        report = build(copy, BuildOptions(precision), [profile], **texts)  # type: ignore[arg-type]
        assert (report.calibration, report.coverage) == (calibration, coverage)


def test_the_report_tells_what_a_batch_takes(trt_bundle: Path, text: Path, tmp_path: Path) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(trt_bundle, copy)
    words = ["--profile", "4x3x8x16"]
    lines = printed(run_here("build", copy, "--calibrate", text, *words))
    model = small_config()
    rows, heads = 4 * 3, 2 * model.decoder_layers * model.decoder.heads * model.decoder.head_dim
    half = 2 * (2 * rows * heads * 16 + 4 * heads * 8)  # both sets of caches, the encoder's outputs
    choices = 4 * (rows * model.tgt_vocab + 2 * 4 * rows + 2 * rows * 6)  # all scores, what is fed, the best
    given = 4 * (4 * 8 + 4 + 1 + 1)
    wanted = f"a batch of 4x3x8x16 holds {(half + choices + given) / 1e6:.1f} MB on the device"
    assert (
        wanted in lines and f"not checked yet: on their GPU, run tformer check {copy} --backend trt:fp16" in lines[-2]
    )
    header = json.loads(next((copy / "trt/plans").glob("*/plans.json")).read_text())
    assert header["report"]["buffers"] == {"4x3x8x16": (half + choices + given) / 1e6}
    assert str(tmp_path) not in json.dumps(header)


def test_inspect_lists_plans(built: Path) -> None:
    lines = printed(run_here("inspect", built))
    found = [line for line in lines if line.strip().startswith("plans")]
    assert len(found) == 3 and all(RTX in line and "1x1x8x16, 4x3x8x16" in line for line in found)


def test_a_build_that_was_killed_or_a_damaged_header_is_no_trace(built: Path, tmp_path: Path) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(built, copy)
    (copy / "trt/plans/.half-written").mkdir()
    assert printed(run_here("inspect", copy))
    header = next((copy / "trt/plans").glob("*/plans.json"))
    whole = json.loads(header.read_text())
    for broken in ({key: value for key, value in whole.items() if key != "capability"}, {**whole, "profiles": [3]}):
        header.write_text(json.dumps(broken))
        assert f"{header} is damaged" in failed_line(run_here("inspect", copy))


def test_weights_without_a_hash_are_refused(trt_bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(trt_bundle, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    del manifest["files"]["trt/weights.data"]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match=r"no hash of trt/weights\.data"):
        open_bundle(copy)


def test_the_stamp_says_where_a_plan_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorRt, "capability", lambda self: "sm90")
    tensorrt = TensorRt("tensorrt", None, "11.4.0")
    assert str(make_stamp(tensorrt, BuildOptions())) == "sm90, TensorRT 11.4.0, fp16"
    assert str(make_stamp(tensorrt, BuildOptions(hardware_compatible=True))) == "sm80+, TensorRT 11.4.0, fp16"
    assert str(make_stamp(tensorrt, BuildOptions(version_compatible=True))) == "sm90, TensorRT 11, fp16"
    folders = {Stamp(each, "TensorRT 11.4.0", "fp16").folder for each in ("sm80", "sm80+")}
    assert len(folders) == 2


def test_every_option_reaches_the_builder(trt_bundle: Path, tmp_path: Path) -> None:
    """What they do to a plan shows on a GPU only."""
    copy = tmp_path / "bundle"
    shutil.copytree(trt_bundle, copy)
    options = ["--fast", "--hardware-compatible"]
    lines = printed(run_here("build", copy, "--precision", "fp32", "--profile", "1x1x8x16", *options))
    assert lines[-1].endswith("plans written")


def test_plans_that_go_are_named(trt_bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(trt_bundle, copy)
    build(copy, BuildOptions("fp32"), [Profile(1, 1, 4, 4), Profile(1, 1, 8, 8)])
    report = build(copy, BuildOptions("fp32", fast=True), [Profile(1, 1, 8, 8)])
    assert report.replaced == ["1x1x4x4"] and "plans of 1x1x4x4 were there before and are gone" in str(report)
    assert str(report).startswith(f"{report.stamp}, built fast\n")
    header = json.loads((report.directory / "plans.json").read_text())
    assert header["report"]["fast"] and not header["report"]["replaced"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_a_build_behind_the_plan_that_it_meets(number: int) -> None:
    """And what ends a verb as it does."""
    original, done = signal.signal(number, signal.default_int_handler), []
    try:
        with pytest.raises(KeyboardInterrupt), defer_interrupt():
            os.kill(os.getpid(), number)
            time.sleep(0.05)  # nothing is raised here, where the library would lose it
            assert signal.getsignal(number) == signal.SIG_DFL, "a second one ends the process"
            done.append(1)
        assert done and signal.getsignal(number) == signal.default_int_handler
        with defer_interrupt():
            pass
        signal.signal(number, signal.SIG_IGN)
        with defer_interrupt():
            os.kill(os.getpid(), number)  # as to a background job
    finally:
        signal.signal(number, original)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: defer_interrupt().__enter__()).result()


def test_ctrl_c_leaves_no_plans(trt_bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(trt_bundle, copy)
    profiles = [word for size in range(1, 25) for word in ("--profile", f"1x1x{size}x{size}")]
    with subprocess.Popen(
        [*COMMAND, "build", str(copy), "--precision", "fp32", *profiles],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        end = time.monotonic() + 60
        while not list(copy.glob("trt/plans/.*/*.plan")):
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and not out and b"Traceback" not in err, err
    assert not list(copy.glob("trt/plans/*")) and not list(copy.glob("trt/plans/.*/*.plan"))


def test_types_of_a_plans_layers_are_counted() -> None:
    """In the words of 8.6, and of later versions."""
    old = '{"Inputs": [{"Format/Datatype": "Row major linear FP16 format"}, {"Format/Datatype": "Int32"}]}'
    new = '[{"Format/Datatype": "Half"}, {"Format/Datatype": "BFloat16"}, {"Format/Datatype":"Float"}]'
    assert tensor_types(old) == {"fp16": 1} and tensor_types(new) == {"fp16": 1, "bf16": 1, "fp32": 1}
    assert tensor_types('{"Layers": ["a", "b"]}') == {}


def test_values_that_are_not_finite_stop_the_build(
    trt_bundle: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(engine: RangeEngine, *rest: Any, **how: Any) -> list[Any]:
        engine.largest["encoder"]["memory"] = float("inf")
        return []

    monkeypatch.setattr("tformer_deploy.export.build.decode", broken)
    with pytest.raises(LimitError, match="memory is not finite on the calibration text, in fp32 already"):
        build(trt_bundle, BuildOptions("fp16"), calibrate=text)
