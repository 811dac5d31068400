"""`tformer bench`: figures that fit each other, limits by another count, processes that are gone afterwards."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tformer_deploy import load
from tformer_deploy.base import processes
from tformer_deploy.base.errors import ConfigError, EngineError, LimitError, MissingExtra
from tformer_deploy.base.machine import cores
from tformer_deploy.bench import BenchPlan, Point, ceiling, make_points, roofline, run_benchmark, turns
from tformer_deploy.bench import plan as planning
from tformer_deploy.bench.ceiling import bandwidth, matrix_rates
from tformer_deploy.bench.measure import Sample, Watched, decode_part, some, synthetic_sources
from tformer_deploy.bench.page import bench_page
from tformer_deploy.bench.report import EngineFigures, PointReport, Spread, describe_device, figure, table
from tformer_deploy.bench.worker import Worker
from tformer_deploy.bundle.manifest import Bundle, open_bundle
from tformer_deploy.bundle.plans import Profile
from tformer_deploy.bundle.recipe import Recipe
from tformer_deploy.cli.bench import numbers
from tformer_deploy.decoding import DecodeOptions
from tformer_deploy.engines import expand, make_engine
from tformer_deploy.engines.base import Limits
from tformer_deploy.engines.ort import library
from tformer_deploy.export.save import weights_read
from tformer_deploy.export.to_onnx import export_graphs
from tformer_deploy.export.trace import Tracer
from tformer_deploy.model.config import ModelConfig
from tformer_deploy.model.network import Transformer

from .command import COMMAND, failed_line, printed, run_here
from .conftest import exported_once, random_model, small_config
from .params import long_but
from .test_check_html import Page, svgs

SMALL = ("--batch", "1,3", "--beam", "1,2", "--src-len", 5, "--new-tokens", "2,6", "--rounds", 2, "--seconds", 0)
SIMULATED = Path(__file__).parent / "simulated"
ONE = ("--batch", 1, "--beam", 1, "--new-tokens", 2, "--src-len", 3, "--rounds", 1, "--seconds", 0)


@pytest.fixture(scope="module")
def variants(run: Path) -> Path:
    """A bundle with two variants. Read only."""
    return exported_once(run, "bench-bundle", ["fp32", "fp32-cpu", "int8"])


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Process ids of the workers that a test starts; fails if one is left."""
    pids: list[int] = []
    original = processes.Process.__init__

    def watched(self: processes.Process, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        pids.append(self._process.pid)

    monkeypatch.setattr(processes.Process, "__init__", watched)
    yield pids
    assert pids and not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def model_bytes(kind: str) -> bytes:
    """The graph of `bench/matmul_<kind>.onnx`: a product of two matrices. To change it, write this there."""
    name, types = {
        "fp32": ("MatMul", (TensorProto.FLOAT, TensorProto.FLOAT, TensorProto.FLOAT)),
        "int8": ("MatMulInteger", (TensorProto.UINT8, TensorProto.INT8, TensorProto.INT32)),
    }[kind]
    a, b, c = (
        helper.make_tensor_value_info(value, dtype, shape)
        for value, dtype, shape in zip("abc", types, (["m", "k"], ["k", "n"], ["m", "n"]), strict=True)
    )
    graph = helper.make_graph([helper.make_node(name, ["a", "b"], ["c"])], "matmul", [a, b], [c])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.checker.check_model(model)
    return model.SerializeToString()


@pytest.mark.parametrize("kind", ["fp32", "int8"])
def test_the_matrix_graphs_rebuild_identically(kind: str) -> None:
    assert (Path(ceiling.__file__).parent / f"matmul_{kind}.onnx").read_bytes() == model_bytes(kind)


@pytest.fixture(scope="module")
def measured(variants: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON of the whole command with every engine."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "lines.txt").write_text("w5 w6 w7\n\nw8\nw9 w10\n")
    backends = ("--backend", "ort", "--backend", "eager")
    more = ("--src", folder / "lines.txt", "--profile", "--html", folder / "page.html", "--threads", 1)
    done = run_here("bench", variants, *backends, *SMALL, *more, "--json")
    (line,) = printed(done)
    assert done.stderr == b""
    return {**json.loads(line), "html": (folder / "page.html").read_text()}


def test_every_engine_is_measured_at_every_point(measured: dict[str, Any]) -> None:
    names = ["ort", "ort:fp32-cpu", "ort:int8", "eager"]
    assert [each["engine"] for each in measured["engines"]] == names
    assert [each["precision"] for each in measured["engines"]] == ["fp32", "fp32", "int8", "fp32"]
    points = [tuple(each["point"].values()) for each in measured["points"]]
    assert points == [(b, k, 5, n) for b in (1, 3) for k in (1, 2) for n in (2, 6) for _ in names]
    assert [each["engine"] for each in measured["points"]] == names * 8
    assert measured["threads"] == 1 and measured["workers"] == 1 and measured["machine"]["cores"]


def test_figures_fit_each_other(measured: dict[str, Any]) -> None:
    for each in measured["points"]:
        point = each["point"]
        assert each["tokens"] == point["batch"] * point["new_tokens"] and each["samples"] == 2
        assert len(each["steps_ms"]) == point["new_tokens"] and min(each["steps_ms"]) > 0
        for name in ("encoder_ms", "first_token_ms", "step_ms"):
            assert 0 < each[name]["min"] <= each[name]["median"] <= each[name]["p95"]
        latency = each["latency_ms"]
        assert 0 < latency["p50"] <= latency["p95"] <= latency["p99"]
        assert each["encoder_ms"]["min"] < each["first_token_ms"]["min"] < latency["p99"]
        assert each["tokens_per_s"] == pytest.approx(1e3 * each["tokens"] / latency["p50"])
        assert 0 < each["outside"] < 1
        for bound in (each["encoder_bound"], each["step_bound"]):
            assert bound["share"] > 0 and bound["limit_ms"] > 0


def test_memory_disk_and_text(measured: dict[str, Any], variants: Path, run: Path) -> None:
    engines = {each["engine"]: each for each in measured["engines"]}
    assert all(each["load_ms"] > 0 and each["import_ms"] > 0 and each["peak_mib"] > 10 for each in engines.values())
    common = [variants / "manifest.json", *variants.glob("*.words")]
    for name, files in (
        ("ort", [*common, *variants.glob("*.onnx"), *variants.glob("*.data")]),
        ("ort:int8", [*common, *variants.glob("int8/*")]),
        ("eager", [run / "checkpoint.json", *run.glob("*.words"), *run.glob("weights/*")]),
    ):
        assert engines[name]["disk_mib"] == pytest.approx(sum(file.stat().st_size for file in files) / 2**20)
    assert measured["corpus_name"] == "lines.txt" and len(measured["corpus"]) == 8
    for each in measured["corpus"]:
        assert each["sentences"] == each["singles"] == 3, "an empty line is no sentence"
        assert each["tokens_per_s"] / each["sentences_per_s"] == pytest.approx(each["tokens"] / 3)
    exact = {each["tokens"] for each in measured["corpus"] if each["engine"] != "ort:int8" and each["beams"] == 2}
    assert len(exact) == 1


@pytest.mark.parametrize(
    ("backend", "module"),
    [("ort", "onnxruntime"), ("eager", "torch"), ("native", "tformer_native"), ("trt", "cuda"), ("trt", "tensorrt")],
)
def test_the_import_that_is_timed_loads_the_runtime(backend: str, module: str) -> None:
    if module == "tformer_native":
        pytest.importorskip(module, reason="tformer-native is not installed: make native")
    code = (
        "import sys; from tformer_deploy.bench import worker; "
        f"assert {module!r} not in sys.modules, 'loaded before'; "
        f"worker.load_runtime({backend!r}); assert {module!r} in sys.modules, 'not loaded'"
    )
    path = {"PYTHONPATH": str(SIMULATED)} if backend == "trt" else {}
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_nodes_are_profiled_where_there_are_some(measured: dict[str, Any]) -> None:
    for each in measured["points"]:
        graphs = {kind["graph"] for kind in each["kinds"]}
        assert graphs == (set() if each["engine"] == "eager" else {"encoder", "decoder_step"})
        assert all(kind["ms"] >= 0 and kind["count"] == int(kind["count"]) for kind in each["kinds"])
        if each["engine"] == "ort":
            kinds = {(kind["graph"], kind["kind"]): kind["count"] for kind in each["kinds"]}
            assert kinds["encoder", "LayerNormalization"] == 5  # two a layer and the last


def test_the_page(measured: dict[str, Any]) -> None:
    page = Page(measured["html"])
    for words in ("ort:int8", "ms per step, batch 3, beams 2", "tokens/s, beams 1", "latency ms", "decoder_step"):
        assert words in page.text
    assert len(svgs(measured["html"])) > 20
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert not re.search(r"url\((?!#)|@import|https?:", measured["html"])


def test_text_workers_and_a_stop_of_all(bundle: Path, started: list[int], tmp_path: Path) -> None:
    sizes = ("--batch", 5, "--beam", 2, "--new-tokens", 4, "--src-len", 3, "--rounds", 1, "--seconds", 0)
    lines = printed(run_here("bench", bundle, *sizes, "--workers", 2, "--threads", 1))
    assert "workers 2, threads of each 1" in lines[0] and lines[1].startswith(
        f"limits with {min(2, cores())} threads: "
    )
    assert "batch 5, beams 2, source 3, output 4 tokens" in lines
    head, row = lines[-2:]
    assert head.split()[0] == "engine" and row.split()[0] == "ort" and len(head) == len(row)
    assert len(started) == 2


def parameters(model: Transformer, part: str, cross: bool) -> list[Any]:
    """Of one side, its last norm included; with or without the projections of the encoder's output."""
    named = [(name, value) for name, value in model.named_parameters() if name.startswith(f"{part}")]
    is_cross = re.compile(r"decoder\.\d+\.cross\.(key|value)\.")
    return [value for name, value in named if bool(is_cross.match(name)) is cross]


def weights(model: Transformer, folder: Path) -> list[roofline.WeightsRead]:
    """Of the encoder and of a step, as an export writes them down."""
    folder.mkdir(exist_ok=True)
    export_graphs(Tracer(model.eval()), Recipe().for_model(model.config), folder, "0")
    return [roofline.WeightsRead(**found) for found in weights_read(folder).values()]


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    long_but(
        {
            "usual": {},
            "no final norm": {"final_norm": False},
            "biased output": {"output_bias": True, "share_embeddings": "none"},
            "small heads": {"norm": "rms", "ff": "gated", "head_dim": 5},
            "wide": {
                "encoder_d_model": 24,
                "encoder_d_ff": 40,
                "encoder_heads": 3,
                "share_embeddings": "decoder",
            },
        },
        "wide",
    ),
)
def test_weight_bytes_are_those_of_a_real_model(changes: dict[str, object], tmp_path: Path) -> None:
    config = small_config(decoder_layers=3, **changes)
    model, point = random_model(config), Point(batch=3, beams=2, src_len=7, new_tokens=6)
    ours, theirs = weights(model, tmp_path / "graphs")
    step = [*parameters(model, "decoder", False), *model.output.parameters()]
    assert roofline.step_cost(config, theirs, roofline.Storage(), point).weight_bytes == 4 * sum(
        value.numel() for value in step
    )
    encoder = [*parameters(model, "encoder", False), *parameters(model, "decoder", True)]
    assert roofline.encoder_cost(config, ours, roofline.Storage(), point).weight_bytes == 4 * sum(
        value.numel() for value in encoder
    )


def test_caches_and_operations_by_hand(tmp_path: Path) -> None:
    config, point = small_config(), Point(batch=3, beams=2, src_len=7, new_tokens=6)
    caches, attention, matrices = [], [], 0
    for past in range(1, point.new_tokens):
        read = 6 * past + 6 + 3 * 7  # own rows, the new position, the sentences' sources
        caches.append(4 * 2 * config.decoder_layers * config.d_model * read)
        attention.append(2 * 2 * config.decoder_layers * config.d_model * 6 * (past + 1 + 7))
    for value in [*parameters(Transformer(config), "decoder", False), Transformer(config).output.weight]:
        matrices += 2 * 6 * value.numel() * (value.dim() == 2)
    step = weights(random_model(config), tmp_path)[1]
    cost = roofline.step_cost(config, step, roofline.Storage(), point)
    assert (cost.cache_bytes, cost.fp32_operations) == (np.mean(caches), np.mean(attention))
    assert cost.weight_operations == matrices
    half = roofline.Storage("int8", half_caches=True)
    assert roofline.step_cost(config, step, half, point).cache_bytes == np.mean(caches) / 2
    first = [replace(point, beams=beams, new_tokens=1) for beams in (1, 2)]  # whose step has one row a sentence
    assert len({roofline.step_cost(config, step, roofline.Storage(), each) for each in first}) == 1


@pytest.mark.parametrize(("precision", "block", "bits"), [("int8", 0, 8), ("int8", 16, 8), ("int4", 16, 4)])
def test_quantized_weights_have_fewer_bytes(precision: Any, block: int, bits: int, tmp_path: Path) -> None:
    config, point = small_config(), Point(1, 1, 4, 4)
    storage = roofline.Storage(precision, block)
    model, total = random_model(config), 0.0
    encoder, step = weights(model, tmp_path)
    for value in [*parameters(model, "decoder", False), model.output.weight]:
        scales = value.shape[0] * (math.ceil(value.shape[1] / block) if block else 1) if value.dim() == 2 else 0
        total += value.numel() * bits / 8 + 4 * scales if value.dim() == 2 else 4 * value.numel()
    assert roofline.step_cost(config, step, storage, point).weight_bytes == total
    assert roofline.encoder_cost(config, encoder, storage, point) == roofline.encoder_cost(
        config, encoder, roofline.Storage("int8"), point
    )


def test_what_bounds_a_call() -> None:
    cost = roofline.Cost(weight_bytes=1000, cache_bytes=24, weight_operations=4000, fp32_operations=96)
    size = roofline.buffer_size(cost, 1)
    assert 1024 <= size <= 1280
    ceiling = roofline.Ceiling(1, {size: 1e6}, {"fp32": 8e6, "int8": 4e6})
    reading, computing = 1.024, 0.512
    for rates, precision, measured, by, limit in (
        ({"fp32": 8e6}, "fp32", 1.1, "bandwidth", reading),
        ({"fp32": 1e6}, "fp32", 5.0, "arithmetic", 4.096),
        ({"fp32": 1e6, "int8": 100e6}, "int8", 1.5, "bandwidth", reading),
        ({"fp32": 8e6}, "fp32", 10.0, "overhead", reading),
    ):
        found = roofline.bound(cost, 1, replace(ceiling, operations_per_s=rates), precision, measured)
        assert (found.by, found.limit_ms) == (by, pytest.approx(limit)), rates
        assert found.share == pytest.approx(limit / measured)
    assert computing < reading
    assert [roofline.device_bound(cost, 1e6, ms).by for ms in (1.1, 10.0)] == ["bandwidth", "overhead"]
    two = replace(ceiling, read_bytes_per_s={roofline.buffer_size(cost, 2): 1e6})
    assert roofline.bound(cost, 2, two, "fp32", 2.1).limit_ms == pytest.approx(2 * reading)


def test_the_best_of_all_rounds_is_the_limit() -> None:
    ceiling = roofline.Ceiling(1)
    ceiling.add({10: 5.0, 20: 3.0}, {"fp32": 1.0})
    ceiling.add({10: 4.0, 20: 6.0}, {"fp32": 2.0})
    assert ceiling.read_bytes_per_s == {10: 5.0, 20: 6.0} and ceiling.operations_per_s == {"fp32": 2.0}


def test_the_machine_is_measured() -> None:
    assert all(bandwidth(np.ones(1 << 18, np.int32), size, 2) > 0 for size in (4, 1 << 16, 1 << 20))
    assert matrix_rates(1).keys() == {"fp32", "int8"} and min(matrix_rates(1).values()) > 0


def test_an_output_never_ends_early_and_takes_the_usual_path(bundle: Path) -> None:
    opened = open_bundle(bundle)
    asked = []
    with make_engine("ort", opened, threads=1) as engine:
        step = engine.step
        engine.step = lambda *given, **named: asked.append(given) or step(*given, **named)  # type: ignore[method-assign,func-returns-value]
        point = Point(2, 1, 5, 20)
        sources = synthetic_sources(opened.config, point)
        sample = decode_part(engine, sources, DecodeOptions(max_tokens=20, endless=True))
        assert sample.tokens == 40 and len(sample.steps_ms) == 20
        assert not any(full for _, _, full, _ in asked)  # all log-probabilities would be another, slower step
    assert (sources[:, -1] == opened.config.eos_id).all() and (sources[:, :-1] > opened.config.eos_id).all()


def test_steps_are_summed_with_their_reordering() -> None:
    class Quiet:
        config, limits, attention, best = small_config(), None, False, None

    watched = Watched(Quiet())  # type: ignore[arg-type]
    now = time.perf_counter()
    watched.calls = [("encode", now, now + 1), ("step", now + 1, now + 2), ("reorder", now + 2, now + 4)]
    watched.calls.append(("step", now + 5, now + 6))
    sample = watched.sample(now, 7)
    assert sample.steps_ms == pytest.approx([3000, 1000]) and sample.encoder_ms == pytest.approx(1000)
    assert sample.first_token_ms == pytest.approx(2000) and sample.tokens == 7


def test_numbers_for_people() -> None:
    samples = [Sample(10.0 * n, 1.0, 2.0, [5.0, 1.0 * n], 0.5, 8) for n in (1, 2, 3)]
    found = PointReport.of("ort", Point(1, 1, 2, 2), samples)
    assert (found.step_ms.min, found.step_ms.median) == (1, 2) and found.tokens_per_s == 400
    assert found.steps_ms == [5, 2] and str(Spread(0.0123, 1, 1234.5)) == "0.0123 / 1.00 / 1,234"
    assert [figure(value) for value in (0.5, 12.345, 99.94, 99.96, 0)] == ["0.500", "12.3", "99.9", "100", "0.00"]
    assert table(("a", "b"), [("long", "1")]) == ["a     b", "long  1"]
    assert some(list("abcde"), 3) == ["a", "c", "e"] and some(["a"], 3) == ["a"] and some([], 3) == []


def test_engines_by_name(variants: Path) -> None:
    opened = open_bundle(variants)
    assert expand(["ort"], [], opened) == ["ort", "ort:fp32-cpu", "ort:int8"]
    assert expand(["ort"], ["int8", "fp32"], opened) == ["ort:int8", "ort"]
    assert expand(["eager", "ort:int8", "ort"], ["int8"], opened) == ["eager", "ort:int8"]
    assert make_points({"src-len": [5, 6], "batch": [2]}) == tuple(
        Point(2, beams, src_len, 32) for beams in (1, 4) for src_len in (5, 6)
    )
    assert numbers("batch", "8,1,8") == [8, 1]


def test_bad_input_is_one_clear_line(variants: Path, run: Path, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("w5\n" + "w5 " * 40)
    os.mkfifo(tmp_path / "pipe")
    for arguments, words in (
        (["--backend", "otr"], "unknown backend 'otr': did you mean 'ort'"),
        (["--variant", "int9"], "unknown variant 'int9': did you mean 'int8'"),
        (["--backend", "eager", "--variant", "int8"], "add --backend ort"),
        (["--batch", "1,2048"], "--batch 2048: ort takes at most 1024"),
        (["--beam", "60"], "--beam 60: ort takes at most 30"),
        (["--src-len", "25"], "--src-len 25: ort takes at most 24"),
        (["--new-tokens", "25", "--backend", "eager"], "--new-tokens 25: eager takes at most 24"),
        (["--batch", "1,x"], "--batch 1,x: write whole numbers"),
        (["--beam", "0"], "--beam 0: every number must be at least 1"),
        (["--src", tmp_path / "long.txt"], "long.txt:2: a source of 41 tokens"),
        (["--html", tmp_path / "nowhere/page.html"], "page.html cannot be written"),
        (["--html", tmp_path], "cannot be written"),
        (["--html", tmp_path / "long.txt", "--src", tmp_path / "long.txt"], "is named twice, and would be overwritten"),
        (["--src", tmp_path / "pipe"], "every engine reads the text again: name a file on disk"),
        (["--backend", "eager", "--profile"], "--profile measures ONNX Runtime alone"),
    ):
        done = run_here("bench", variants, "--src-len", 5, "--new-tokens", 4, *arguments)
        assert words in failed_line(done) and done.stdout == b"", arguments
    assert {path.name for path in tmp_path.iterdir()} == {"long.txt", "pipe"}


@pytest.mark.long
def test_empty_lines_are_no_tokens(bundle: Path, tmp_path: Path) -> None:
    found = []
    for name, text in ("dense", "w5\n"), ("sparse", "\n\nw5\n\n"):
        (tmp_path / name).write_text(text)
        done = run_here("bench", bundle, *ONE, "--src", tmp_path / name, "--max-tokens", 3, "--json")
        found.append(json.loads(done.stdout)["corpus"][0])
    assert found[0]["tokens"] == found[1]["tokens"] and [each["sentences"] for each in found] == [1, 4]


def test_a_variant_with_fp32_layers_gets_no_limits(variants: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it reads stands nowhere: that of int8 would be too little."""
    opened = open_bundle(variants)
    opened.manifest["variants"]["int8"]["fp32"] = ["decoder.0.ff.up"]
    plan = BenchPlan(variants, ("ort", "ort:int8"), (Point(1, 1, 3, 2),), threads=1, rounds=1, seconds=0)
    points = {point.engine: point for point in run_benchmark(plan, opened).points}
    assert points["ort"].step_bound and not points["ort:int8"].step_bound


def test_a_workers_error_is_one_line_and_ends_all(bundle: Path, started: list[int], tmp_path: Path) -> None:
    both = ("--backend", "ort", "--backend", "eager")
    line = failed_line(run_here("bench", bundle, *both, *ONE, "--checkpoint", tmp_path / "nowhere"))
    assert "error: eager: eager PyTorch needs the checkpoint" in line and len(started) == 2


def small_plan(bundle: Path) -> tuple[BenchPlan, Bundle]:
    return BenchPlan(bundle, ("ort",), (Point(1, 1, 3, 2),), threads=1, rounds=1, seconds=0), open_bundle(bundle)


def test_a_worker_that_dies_is_told_of(bundle: Path, started: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    original = processes.Process.ask

    def ask(self: processes.Process, call: str, **arguments: Any) -> Any:
        if call == "point":
            os.kill(self._process.pid, signal.SIGKILL)
        return original(self, call, **arguments)

    monkeypatch.setattr(processes.Process, "ask", ask)
    with pytest.raises(EngineError, match="ort: its process was ended by SIGKILL: the machine may be out of memory"):
        run_benchmark(*small_plan(bundle))


def test_a_bug_in_a_worker_is_told_of(bundle: Path, started: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(EngineError, match=r"ort: its process ended with exit code 1: AttributeError: .*no_such_call"),
        turns.start("ort") as process,
    ):
        process.ask("no_such_call")


@pytest.mark.parametrize("error", [RuntimeError("injected"), KeyboardInterrupt()])
def test_nothing_is_left_after_a_failure(
    bundle: Path, started: list[int], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("tformer_deploy.bench.turns._round", fail)
    with pytest.raises(type(error)):
        run_benchmark(*small_plan(bundle))


def test_ctrl_c_is_130_and_leaves_nothing(bundle: Path) -> None:
    long = ("--batch", 1, "--beam", 1, "--new-tokens", 4, "--src-len", 3, "--rounds", 100000)
    command = [*COMMAND, "bench", bundle, *long]
    with subprocess.Popen(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell's background job ignores Ctrl-C, and so would all that it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        try:
            wait_for(lambda: len(children.read_text().split()) == 2)
            pids = children.read_text().split()
            # One that stands still has answered.
            wait_for(lambda: any(state(pid) == "T" for pid in pids))
        except BaseException:
            process.kill()
            raise
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and out == b"" and err.startswith(b"stopped: ") and err.count(b"\n") == 1
    wait_for(lambda: all(map(gone, pids)))  # one that was just being started ends by itself, at its parent's end


def test_workers_of_a_killed_benchmark_end(bundle: Path) -> None:
    code = (
        "import time; from tformer_deploy.bench.turns import start\n"
        "p = start('x'); p.ask('peak_mib'); print(p._process.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        pid = parent.stdout.readline().strip()
        try:
            wait_for(lambda: state(pid) == "T")  # it stands still
        finally:
            parent.kill()
    wait_for(lambda: gone(pid))


def state(pid: str) -> str:
    """As in /proc/PID/stat, "" for none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def gone(pid: str) -> bool:
    """Whether nothing runs there any more; nobody may fetch an orphan's exit status."""
    return state(pid) in ("", "Z")


def wait_for(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("where", ["limits of the machine: ", ""])
def test_without_onnxruntime_there_are_no_limits(where: str, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = processes.Process.ask

    def ask(self: processes.Process, call: str, **arguments: Any) -> Any:
        if call == "matrix_rates":
            raise MissingExtra(f"{where}the package 'onnxruntime' is not installed")
        return original(self, call, **arguments)

    monkeypatch.setattr(processes.Process, "ask", ask)
    report = run_benchmark(*small_plan(bundle))
    assert report.ceiling is None and report.points[0].step_bound is None
    said = "no limits of the machine: the package "
    assert said in str(report) and said in bench_page(report)
    assert report.notes == ["no limits of the machine: the package 'onnxruntime' is not installed"]


def test_a_library_that_cannot_be_used_leaves_the_other_s_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As two wheels of ONNX Runtime, or a binding built for another library."""

    def refuse() -> None:
        raise ConfigError("onnxruntime and onnxruntime-gpu are both installed")

    def product_rate(name: str, threads: int) -> float:
        return 7e9

    def no_binding(threads: int) -> dict[str, float]:
        raise ImportError("libtformer.so: undefined symbol: tformer_open", name="tformer_native._binding")

    monkeypatch.setattr(library, "check_library", refuse)
    monkeypatch.setitem(sys.modules, "tformer_native", SimpleNamespace(product_rate=product_rate))
    assert matrix_rates(1) == {"fp32": 7e9, "int8": 7e9}
    monkeypatch.setattr(ceiling, "_native_rates", no_binding)
    with pytest.raises(
        MissingExtra, match=r"both installed; tformer-native cannot be loaded \(libtformer.so: undefined"
    ):
        matrix_rates(1)
    monkeypatch.undo()
    monkeypatch.setattr(ceiling, "_native_rates", no_binding)
    assert matrix_rates(1).keys() == {"fp32", "int8"}


def test_a_text_that_an_engine_does_not_take_is_refused_first(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text"
    text.write_text("w5 w6\n" + "w7 " * 11 + "\n")
    plan, opened = replace(small_plan(bundle)[0], src=text, max_tokens=20), open_bundle(bundle)
    plan.check(opened)
    narrow = Limits(8, 10, 24, 4)
    plans = Limits(8, 24, 24, 4, (Profile(8, 1, 8, 24), Profile(8, 4, 24, 24)), "build a larger profile")
    monkeypatch.setattr(planning, "limits_of", lambda engine, bundle: narrow)
    with pytest.raises(
        LimitError, match=r"text: the longest source has 12 tokens: ort takes at most 10 in this bundle"
    ):
        plan.check(opened)
    monkeypatch.setattr(planning, "limits_of", lambda engine, bundle: plans)
    plan.check(opened)
    plans = replace(plans, profiles=(Profile(8, 4, 8, 24), Profile(8, 1, 24, 24)))
    wide = replace(plan, points=(Point(1, 4, 3, 2),))
    plan.check(opened)
    with pytest.raises(
        LimitError, match="no plan for 4 beams, a source of 12 and an output of 20 tokens in this bundle: "
    ):
        wide.check(opened)


def test_a_note_about_an_engine_leaves_the_limits_of_the_machine(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "explain", lambda *_: ["ort:trt: what an engine says of itself"])
    report = run_benchmark(*small_plan(bundle))
    assert report.notes == ["ort:trt: what an engine says of itself"]
    assert report.ceiling is not None and report.points[0].step_bound is not None


def test_a_profile_needs_room_for_the_whole_point(variants: Path) -> None:
    """It has one worker."""
    opened = open_bundle(variants)
    plan = BenchPlan(variants, ("ort", "eager"), (Point(2048, 1, 3, 2),), threads=1, workers=2)
    plan.check(opened)
    with pytest.raises(LimitError, match="--batch 2048: ort takes at most 1024 in this bundle"):
        replace(plan, profile=True).check(opened)


def test_a_text_is_translated_with_the_models_options(variants: Path, tmp_path: Path) -> None:
    """Those that `--max-tokens` and `--beam` do not set: here a first token, and outputs without end."""
    shutil.copytree(variants, tmp_path / "bundle")
    manifest = json.loads((variants / "manifest.json").read_text())
    own = {"first_ids": [8, 9], "suppress": [3]}
    (tmp_path / "bundle/manifest.json").write_text(json.dumps({**manifest, "decoding": own}))
    (tmp_path / "text").write_text("w5 w6\n\nw7\n")
    worker = Worker()
    worker.open(str(tmp_path / "bundle"), "ort", None, threads=1, workers=1)
    for beams, most in ((1, 6), (2, 1000)):
        with load(tmp_path / "bundle", variant="fp32", threads=1) as translator:
            made = translator.translate(["w5 w6", "w7"], beams=beams, max_tokens=most)
        tokens = sum(len(each.ids) + each.finished for each in made)
        assert worker.corpus(str(tmp_path / "text"), beams, most).tokens == tokens and made[0].ids[:2] == [8, 9]


ON_A_FULL_GPU = """
from cuda.bindings import runtime
from tformer_deploy.base.errors import NoRoom
from tformer_deploy.bench.worker import Worker
from tformer_deploy.engines import EngineName

full, allocate, left = runtime.cudaError_t.cudaErrorMemoryAllocation, runtime.cudaMalloc, LEFT
worker = Worker()
worker.name, worker.bench = EngineName("trt"), type("Bench", (), {"engine": None})
runtime.cudaMalloc = lambda size: (full, 0) if sum(map(len, runtime.DEVICE.values())) + size > left else allocate(size)
found = worker.device()
print(sorted(found), len(runtime.DEVICE))
"""


@pytest.mark.parametrize(("gib", "known"), [(0.75, False), (2, True)])
def test_a_full_gpu_has_no_bandwidth_and_a_report(gib: float, known: bool) -> None:
    """Half of what the measurement needs is given back where the other half does not fit."""
    code = ON_A_FULL_GPU.replace("LEFT", str(int(gib * (1 << 30))))
    path = {"PYTHONPATH": os.pathsep.join([str(SIMULATED), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **path})
    names = ["name", "not_captured", *["read_bytes_per_s"] * known, "total_mib", "used_mib"]
    assert done.stdout == f"{names} 0\n", done.stderr
    device = {"name": "GPU", "used_mib": 1000, "total_mib": 2000, "not_captured": "", "read_bytes_per_s": 4e12}
    device = {name: device[name] for name in names}
    engine = EngineFigures("trt", "fp16", 0.0, 0.0, 0.0, 0.0, device)
    line = "trt on GPU: 1,000 of 2,000 MiB in use" + ", 4,000 GB/s" * known
    assert describe_device(engine) == line


def test_a_wrong_list_is_refused() -> None:
    with pytest.raises(ConfigError):
        numbers("batch", "")


def test_random_sources_of_a_vocabulary_without_words() -> None:
    config = ModelConfig(src_vocab=4, tgt_vocab=4, d_model=4, heads=1)
    assert synthetic_sources(config, Point(2, 1, 3, 1)).max() < 4
