"""Decoding on plans, with a simulated GPU in place of the real one: the loop, the copies, the waits, the commands.

What a real GPU computes, and how fast, no test here can tell.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tformer_deploy.base.errors import ArtifactError, ConfigError
from tformer_deploy.base.files import sha256
from tformer_deploy.bundle.manifest import open_bundle
from tformer_deploy.bundle.plans import Profile, Stamp, find_plans
from tformer_deploy.engines import EngineName, engine_name, expand, explain
from tformer_deploy.engines.base import Limits
from tformer_deploy.export.checked import export_checked

from .command import Done, failed_line, printed, run_here, run_process
from .params import long_but
from .simulated_trt import PROFILES, SIMULATED, as_input, lines, make_bundle, run_simulated


@pytest.fixture(scope="module")
def bundle(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model with plans for the simulated GPU, fp16 and fp32. Read only."""
    return make_bundle(run, tmp_path_factory.mktemp("simulated") / "bundle")


@pytest.mark.parametrize("precision", long_but(["fp32", "fp16"], "fp16"))
def test_the_check_passes(bundle: Path, precision: str, tmp_path: Path) -> None:
    """Greedy, beam and sampling against eager, and invariance."""
    (tmp_path / "text").write_bytes(as_input())
    done = run_simulated(
        "check", bundle, "--backend", f"trt:{precision}", "--src", tmp_path / "text", "--max-tokens", 20, "--json"
    )
    report = json.loads(done.stdout)
    engine = report["engines"][0]
    assert report["passed"] and not done.returncode, engine["failures"]
    assert engine["precision"] == precision
    assert [(found["mode"], found["sentences"]) for found in engine["outputs"]] == [
        (mode, 40) for mode in ("greedy", "beam", "sampling")
    ]
    if precision == "fp32":
        assert all(found["equal"] + found["ties"] == 40 and found["ties"] <= 1 for found in engine["outputs"])


@pytest.mark.parametrize("options", [[], ["--beams", "5"], ["--beams", "3", "--workers", "2"]])
def test_translates_as_onnx_runtime_does(bundle: Path, options: list[str]) -> None:
    words = ["translate", bundle, "--max-tokens", 24, *options]
    ours = run_simulated(*words, "--backend", "trt:fp32", stdin=as_input())
    theirs = run_simulated(*words, "--backend", "ort", "--variant", "fp32", stdin=as_input())
    assert printed(ours) == printed(theirs)


def test_a_sentence_that_overflows_leaves_nothing_behind(bundle: Path) -> None:
    """Caches that are not finite do not reach the next batch on the same memory."""
    code = f"""
import numpy as np
from pathlib import Path
from cuda.bindings import runtime
from tformer_deploy import load
with load({str(bundle)!r}, "trt", variant="fp32", max_tokens=24, beams=5) as translator:
    before = translator.translate({lines()[:6]!r})
    for device in translator.engine._devices:
        for memory in device._pasts:
            runtime.DEVICE[memory.address][:] = 0xFF
    assert translator.translate({lines()[:6]!r}) == before
"""
    env = {**os.environ, "PYTHONPATH": str(SIMULATED)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr


def test_sentences_join_and_move_to_larger_plans(bundle: Path) -> None:
    """One beam's plan gives way to that of five, with the caches that it has written; beyond both a join is refused."""
    code = f"""
import numpy as np
from tformer_deploy import load
from tformer_deploy.translate.batches import make_batch
from tformer_deploy.decoding import ContinuousBatch, DecodeOptions, decode
from tformer_deploy.base.errors import LimitError
with load({str(bundle)!r}, "trt", variant="fp32", max_tokens=24) as translator:
    engine = translator.engine
    sources = [[4 + (7 * i + 3 * j) % 50 for j in range(i)] + [3] for i in range(1, 9)]
    batches = [make_batch(sources[i : i + 2], 0) for i in (0, 2, 4)]
    options = [DecodeOptions(24, beams=beams, n_best=beams, endless=True) for beams in (1, 1, 4)]
    alone = [decode(engine, *each) for each in zip(batches, options)]
    running = ContinuousBatch(engine)
    searches = []
    for each in zip(batches, options):
        searches.append(running.join(*each))
        for _ in range(3):
            running.step()
        print(running._state.slots.device.profile)
    try:
        running.join(make_batch(sources[:1], 0), options[0])
    except LimitError as error:
        print(error)
    while running.searches:
        running.step()
    found = [[[h.ids for h in outputs] for outputs in search.outputs()] for search in searches]
    assert found == [[[h.ids for h in outputs] for outputs in each] for each in alone]
"""
    env = {**os.environ, "PYTHONPATH": str(SIMULATED)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    *profiles, refused = done.stdout.splitlines()
    assert profiles == ["8x1x24x24", "8x1x24x24", "6x5x24x24"]
    assert refused.startswith("no plan takes 7x4x7x24 ") and "--profile 7x4x7x24" in refused


def test_compiled_kernels_are_kept(bundle: Path, tmp_path: Path) -> None:
    """Of TensorRT for RTX; a file that does not fit, or cannot be written, costs time alone."""
    copy, kept = tmp_path / "bundle", tmp_path / "cache"
    shutil.copytree(bundle, copy)
    for header in (copy / "trt/plans").glob("*/plans.json"):
        stamp = Stamp("sm80+", "TensorRT for RTX 1.7.1", json.loads(header.read_text())["precision"])
        header.write_text(json.dumps({**json.loads(header.read_text()), **dataclasses.asdict(stamp)}))
        header.parent.rename(header.parent.with_name(stamp.folder))
    code = f"""
from tformer_deploy import load
import tensorrt_rtx
with load({str(copy)!r}, "trt", max_tokens=24) as translator:
    print([result.text for result in translator.translate({lines()[:3]!r})])
print(len(tensorrt_rtx.COMPILED))
"""

    def run(cache: Path) -> Done:
        env = {**os.environ, "PYTHONPATH": str(SIMULATED), "XDG_CACHE_HOME": str(cache)}
        return subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, env=env)

    text, compiled = printed(run(kept))
    assert compiled == "2"
    assert printed(run(kept)) == [text, "0"]
    (file,) = (kept / "tformer").iterdir()
    whole = file.read_bytes()
    file.write_bytes(b"of another driver")
    assert printed(run(kept)) == [text, "2"] and file.read_bytes() == whole
    (tmp_path / "file").touch()
    done = run(tmp_path / "file")
    assert printed(done) == [text, "2"] and b"compiled kernels are not kept" in done.stderr


def test_scores_are_those_of_onnx_runtime(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(as_input())
    words = ["score", bundle, "--src", tmp_path / "text", "--tgt", tmp_path / "text"]
    ours, theirs = (
        printed(run_simulated(*words, "--backend", backend, *variant))
        for backend, variant in (("trt:fp32", []), ("ort", ["--variant", "fp32"]))
    )
    assert [float(line) for line in ours] == pytest.approx([float(line) for line in theirs], abs=1e-3)


def test_how_many_sentences_depends_on_the_request() -> None:
    profiles = Profile(8, 1, 24, 24), Profile(6, 3, 24, 24), Profile(2, 5, 50, 24)
    limits = Limits(8, 50, 24, 5, profiles)
    assert [limits.sentences(beams, 20, 20) for beams in (1, 2, 3, 4, 5)] == [8, 6, 6, 2, 2]
    assert limits.sentences(1, 30, 20) == 2 and limits.sentences(1, 20, 30) == 1
    assert Limits(8, 24, 24, 5).sentences(5, 99, 99) == 8


def test_a_machine_that_only_translates_needs_little(bundle: Path, tmp_path: Path) -> None:
    for name in ("torch", "onnx", "polygraphy", "ml_dtypes"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('hidden', name='{name}')\n")
    path = os.pathsep.join([str(tmp_path), str(SIMULATED)])
    words = ["translate", bundle, "--backend", "trt", "--max-tokens", 24]
    assert len(printed(run_simulated(*words, stdin=as_input(), path=path))) == 40


@pytest.mark.long
def test_bench_takes_the_sizes_of_the_plans(bundle: Path) -> None:
    """Where none is given."""
    words = ("bench", bundle, "--backend", "trt:fp32", "--backend", "ort", "--rounds", 1, "--seconds", 0, "--json")
    report = json.loads(printed(run_simulated(*words))[0])
    found = {tuple(each["point"].values()) for each in report["points"]}
    assert found == {(each.batch, each.beams, each.src_len, each.capacity) for each in PROFILES}
    assert len(report["points"]) == 3 * len(PROFILES)


def test_bench_tells_what_the_gpu_did(bundle: Path) -> None:
    done = run_simulated(
        *("bench", bundle, "--backend", "trt", "--batch", "1,3", "--beam", "1,4", "--src-len", 5, "--new-tokens", 9),
        *("--rounds", 1, "--seconds", 0, "--json"),
    )
    report: dict[str, Any] = json.loads(printed(done)[0])
    assert report["engines"][0]["precision"] == "fp16"
    assert report["engines"][0]["device"]["name"] == "Simulated GPU"
    assert len(report["points"]) == 4
    assert all(point["device_ms"] > 0 and len(point["steps_ms"]) == 9 for point in report["points"])
    assert all(point["step_bound"]["share"] > 0 for point in report["points"])
    assert report["ceiling"] is None, "the processor's limits say nothing here"


def test_what_no_plan_has_is_refused_if_somebody_asks_for_it(bundle: Path) -> None:
    """And is done as far as plans go if it is merely usual."""
    line = failed_line(run_simulated("translate", bundle, "--backend", "trt", "--max-tokens", 25, stdin=b"w5\n"))
    wanted = "max_tokens 25 exceeds the plans' largest, 24: use less, or build a larger profile too: tformer build"
    assert wanted in line
    line = failed_line(run_simulated("check", bundle, "--backend", "trt", "--beams", 6))
    assert "beams 6 exceeds the plans' largest, 5: use less" in line
    code = f"import tformer_deploy; tformer_deploy.load({str(bundle)!r}, 'trt', max_tokens=25)"
    env = {**os.environ, "PYTHONPATH": str(SIMULATED)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    assert "LimitError: max_tokens 25 exceeds the plans' largest, 24" in done.stderr
    done = run_simulated("translate", bundle, "--backend", "trt:fp32", stdin=b"w5\n")
    assert done.returncode == 0 and b"cut off at 24 tokens" in done.stderr


def test_requests_beyond_the_plans_are_refused(bundle: Path) -> None:
    done = run_simulated("translate", bundle, "--backend", "trt", "--beams", 6, stdin=b"w5\n")
    line = failed_line(done)
    assert "beams 6 exceeds the plans' largest, 5: use less, or build a larger profile too" in line
    assert "--profile 6x5x24x24 --profile 8x1x24x24 --profile BATCHxBEAMSxSOURCExTARGET" in line
    done = run_simulated("translate", bundle, "--backend", "trt:bf16", stdin=b"w5\n")
    line = failed_line(done)
    assert "no plans for this host (sm90, TensorRT 11.4.0, bf16)" in line and "it has sm90" in line
    assert "tformer build" in line


def test_a_machine_without_a_gpu_is_told_what_is_missing(bundle: Path, tmp_path: Path) -> None:
    """Here no driver is loaded; then a machine without cuda-python."""
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has a GPU")
    words = ["translate", bundle, "--backend", "trt"]
    assert "needs a GPU, and no NVIDIA driver is loaded here" in failed_line(run_process(*words, stdin=b"w5\n"))
    (tmp_path / "cuda.py").write_text("raise ModuleNotFoundError('hidden', name='cuda')\n")
    done = run_simulated(*words, stdin=b"w5\n", path=tmp_path)
    assert "the package 'cuda' is not installed: pip install '.[trt-rtx]'" in failed_line(done)
    for backend in ("ort", "eager"):
        done = run_process("translate", bundle, "--backend", backend, "--device", "cuda", stdin=b"w5\n")
        assert "without CUDA" in failed_line(done) or "finds no GPU" in failed_line(done)
    (tmp_path / "text").write_text("w5\n")
    parallel = ["--src", tmp_path / "text", "--tgt", tmp_path / "text"]
    done = run_process("score", bundle, *parallel, "--backend", "eager", "--device", "cuda")
    assert "finds no GPU" in failed_line(done)


def test_a_plan_that_does_not_load_is_named(bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(bundle, copy)
    folder = copy / "trt/plans" / Stamp("sm90", "TensorRT 11.4.0", "fp16").folder
    plan = folder / "encoder-8x1x24x24.plan"
    plan.write_bytes(b"nothing")
    header = json.loads((folder / "plans.json").read_text())
    header["files"][plan.name] = sha256(plan)
    (folder / "plans.json").write_text(json.dumps(header))
    done = run_simulated("translate", copy, "--backend", "trt:fp16", "--max-tokens", 24, stdin=b"w5\n")
    assert f"TensorRT 11.4.0 cannot load {plan}: bad plan" in failed_line(done)
    done = run_simulated("--debug", "translate", copy, "--backend", "trt:fp16", "--max-tokens", 24, stdin=b"w5\n")
    assert b"tformer_deploy.engines.trt.api: 1: bad plan" in done.stderr and b"Traceback" in done.stderr


def test_what_no_context_is_made_for_is_named(bundle: Path, tmp_path: Path) -> None:
    """Too little memory is said as such, other reasons as they are."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, tensorrt\n"
        "class Runtime(tensorrt.Runtime):\n"
        "    def deserialize_cuda_engine(self, plan):\n"
        "        found = super().deserialize_cuda_engine(plan)\n"
        "        found.create_execution_context = lambda: self.logger.log(1, open(__file__ + '.why').read())\n"
        "        return found\n"
        "tensorrt.Runtime = Runtime\n"
    )
    path = os.pathsep.join([str(tmp_path), str(SIMULATED)])
    for why, said in (
        ("Error Code 2: OutOfMemory (no further information)", "has no room for 8x1x24x24: Error Code 2: OutOfMemory"),
        ("sm90 is not supported", "cannot run the plans for 8x1x24x24 on this GPU: sm90 is not supported"),
    ):
        (tmp_path / "sitecustomize.py.why").write_text(why)
        done = run_simulated("translate", bundle, "--backend", "trt", "--max-tokens", 24, stdin=b"w5\n", path=path)
        assert f"TensorRT 11.4.0 {said}" in failed_line(done)


def test_plans_in_a_folder_of_another_name_are_refused(bundle: Path, tmp_path: Path) -> None:
    copy, own = tmp_path / "bundle", Stamp("sm90", "TensorRT 11.4.0", "fp16").folder
    shutil.copytree(bundle, copy)
    folder = copy / "trt/plans" / own
    header = json.loads((folder / "plans.json").read_text())
    (folder / "plans.json").write_text(json.dumps({**header, "capability": "sm89"}))
    said = f"{folder} has plans for sm89, TensorRT 11.4.0, fp16: call it {own.replace('sm90', 'sm89')} again"
    assert said in failed_line(run_simulated("translate", copy, "--backend", "trt:fp16", stdin=b"w5\n"))
    assert said in failed_line(run_simulated("inspect", copy))


def test_steps_that_cannot_be_captured_are_called(bundle: Path, tmp_path: Path) -> None:
    """And the benchmark says so."""
    (tmp_path / "sitecustomize.py").write_text(
        "from cuda.bindings import runtime\n"
        "def fail(graph, flags):\n"
        "    runtime.LAST.append(runtime.cudaError_t.cudaErrorInvalidValue)\n"
        "    return runtime.LAST[-1], None\n"
        "runtime.cudaGraphInstantiate = fail\n"
    )
    words = ["bench", bundle, "--backend", "trt", "--batch", 2, "--beam", 1, "--src-len", 5, "--new-tokens", 6]
    path = os.pathsep.join([str(tmp_path), str(SIMULATED)])
    done = run_simulated(*words, "--rounds", 1, "--seconds", 0, path=path)
    assert "NOT replayed as CUDA graphs: CUDA stopped in " in done.stdout.decode(), done.stderr


def test_plans_for_another_gpu_are_not_verified_to_list_them(bundle: Path, tmp_path: Path) -> None:
    """What is wrong with them is no reason why there are none for this one."""
    opened = open_bundle(Path(shutil.copytree(bundle, tmp_path / "bundle")))
    folders = sorted((opened.directory / "trt/plans").iterdir())
    next(folders[0].glob("*.plan")).write_bytes(b"damaged")
    (folders[1] / "plans.json").write_text("{")
    with pytest.raises(
        ArtifactError, match=r"has no plans for this host \(sm86, .*\), it has sm90, \S+ \S+, fp16: run here"
    ):
        find_plans(opened, "trt", [Stamp("sm86", "TensorRT 11.4.0", "fp16")])


def test_names_of_engines(bundle: Path) -> None:
    opened = open_bundle(bundle)
    assert expand(["trt", "ort", "eager"], [], opened) == ["trt", "ort", "ort:trt", "eager"]
    assert expand(["trt", "ort", "eager"], [], opened, "cuda") == ["trt", "ort:trt@cuda", "eager@cuda"]
    for name, parts in {"ort:trt@cuda": ("ort", "trt", "cuda"), "trt": ("trt", "", "cuda")}.items():
        assert tuple(vars(EngineName(name)).values()) == parts and EngineName(name) == name
    assert expand(["ort:trt"], [], opened, "cuda") == ["ort:trt@cuda"]
    graphs = "the graphs that tformer build compiles for TensorRT, here on ONNX Runtime"
    lines = [f"ort:trt: {graphs}, without a GPU", f"ort:trt@cuda: {graphs}"]
    assert explain(["ort:trt", "ort:trt@cuda", "trt"], opened) == lines
    assert expand(["trt", "ort"], ["trt"], opened, "cuda") == ["trt", "ort:trt@cuda"]
    for command in ("check", "bench"):
        line = failed_line(run_here(command, bundle, "--backend", "ort", "--backend", "cpp", "--variant", "trt"))
        assert line == "error: --backend cpp runs none of the variants asked for by --variant: leave it out"
    assert engine_name("trt", "fp32", opened) == "trt:fp32"
    for call, message in (
        (lambda: engine_name("trt", "int8", opened), "unknown variant 'int8': .*valid: bf16, fp16, fp32"),
        (lambda: engine_name("ort", "fp32", opened, "cuda"), "ONNX Runtime runs --variant trt on a GPU, not fp32"),
        (lambda: engine_name("ort", None, opened, "gpu"), "unknown device 'gpu': .*valid: cpu, cuda"),
        (lambda: engine_name("eager", "trt", opened), "eager has no variants"),
    ):
        with pytest.raises(ConfigError, match=message):
            call()


def test_new_plans_are_compared_with_their_graphs(run: Path, tmp_path: Path) -> None:
    """Plans that compute something else, with several beams alone, are not kept."""
    bundle = tmp_path / "bundle"
    export_checked(run, bundle, ["fp32", "trt"])
    code = f"""
import sys
from pathlib import Path
import onnx
from tests import simulated_trt
from tests.simulated_trt import PROFILES, simulate_build
from tformer_deploy.export import build as building

def broken(tensorrt, graph, options, exact=0):
    model = onnx.load(graph)
    for node in model.graph.node:
        if node.op_type == "Gather" and node.input[0] == "past_k_0":  # beams keep the caches of others
            node.op_type, node.input[:] = "Identity", node.input[:1]
            node.ClearField("attribute")
    return building.Plan(model.SerializeToString(), 0.0, {{}}, {{}})

bundle, reports = Path({str(bundle)!r}), []
original = building.build
building.build = lambda *given: reports.append(original(*given))
simulate_build(bundle, "fp32", PROFILES)
print(reports[0].compared)
simulated_trt.keep_graph = broken
try:
    simulate_build(bundle, "fp32", PROFILES)
except building.WrongPlans as error:
    print(error)
print([path.name for path in (bundle / "trt/plans").iterdir()])
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SIMULATED), str(SIMULATED.parents[1])])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    equal, wrong, left = done.stdout.splitlines()
    assert equal == "as their graphs on ONNX Runtime, within the check's limits: 8 generated sentences a profile"
    assert wrong.startswith("the plans of 6x5x24x24 for sm90, TensorRT 11.4.0, fp32 compute something else than ")
    assert "they are not kept" in wrong and left == "[]"
