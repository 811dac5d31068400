"""The kit for a GPU host: pieces, hashes, stages on a simulated GPU, and what comes of the results."""

from __future__ import annotations

import ast
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu import __main__ as kit_maker
from benchmarks.gpu import bundles, host
from benchmarks.gpu.eager import Decoder
from benchmarks.gpu.host import collect
from benchmarks.gpu.pieces import pack, write_sums
from benchmarks.gpu.results import BEGIN, END, cpp_problem, load, main, markdown, sides
from benchmarks.gpu.seeded import LISTED, fill, restore
from benchmarks.gpu.targets import Side, judge
from benchmarks.gpu.wheels import unsqueeze
from tformer_deploy.base.errors import ArtifactError
from tformer_deploy.bundle.manifest import open_bundle
from tformer_deploy.bundle.plans import Plans, Profile, Stamp, parse_profile
from tformer_deploy.check.observe import REBATCHED, by_length, other_batches, spread
from tformer_deploy.check.reference import load_reference
from tformer_deploy.engines.base import Limits
from tformer_deploy.engines.eager import EagerEngine
from tformer_deploy.engines.trt.api import TensorRt
from tformer_deploy.export import build as building
from tformer_deploy.export.checked import export_checked
from tformer_deploy.export.trt_builder import BuildOptions

from .conftest import random_model, small_config
from .cpp_library import built, onnxruntime
from .cpp_trt import VERSIONS, gpu, library
from .simulated_trt import SIMULATED, keep_graph, lines

PIECE_MIB = 0.25


@pytest.fixture(scope="module")
def kit(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kit of small models without wheels. Read only."""
    folder = tmp_path_factory.mktemp("gpu")
    export_checked(run, folder / "bundle", ["fp32", "trt"])
    (folder / "lines.txt").write_text("".join(f"{line}\n" for line in lines()))
    (folder / "lines.tgt").write_text("w5 w6 w7 w8 w9\n" * len(lines()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundles, "BATCHES", (1, 2))
        patch.setattr(bundles, "preset", lambda name, source, target: small_config(src_vocab=source, tgt_vocab=target))
        patch.setattr(kit_maker, "build_own", lambda out: out.mkdir())
        kit_maker.main(
            [
                *("--bundle", str(folder / "bundle"), "--text", str(folder / "lines.txt"), "--sentences", "12"),
                *("--tgt", str(folder / "lines.tgt")),
                *("--preset", "tiny", "--vocab-size", "90", "--piece-mib", str(PIECE_MIB), "--with", "--no-wheels"),
                *("--out", str(folder / "kit")),
            ]
        )
    return folder / "kit"


@pytest.fixture(scope="module")
def used(kit: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy that was unpacked, and whose plans the simulated GPU runs."""
    folder = tmp_path_factory.mktemp("used") / "kit"
    shutil.copytree(kit, folder)
    done = run_kit(folder, "host", "install")
    assert done.returncode == 0, done.stdout + done.stderr
    models = folder / "work/models"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "load_builder", lambda flavor: TensorRt("tensorrt", None, "11.4.0"))
        patch.setattr(building, "compile_plan", keep_graph)
        patch.setattr(building, "make_stamp", lambda rt, options: Stamp("sm90", rt.title, options.precision))
        for name in ("trained", "base"):
            for stage in bundles.measured((1,), (1,)):
                with (models / f"{name}.{stage}").open("a") as file:
                    file.write("--rounds\n1\n--seconds\n0\n")
            profiles = [parse_profile(word) for word in (models / f"{name}.build").read_text().split()[1::2]]
            options = BuildOptions("fp32")
            building.build(models / name, options, profiles, models / f"{name}.text")
    return folder


def start_kit(folder: Path, *stages: str, python: object = sys.executable) -> subprocess.Popen[str]:
    """run.sh with this Python and a simulated GPU."""
    environment = {
        **os.environ,
        "KIT_INSTALLED": str(python),
        "KIT_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join([str(SIMULATED), str(SIMULATED.parents[1])]),
    }
    command = ["env", "--default-signal=INT", str(folder / "run.sh"), *stages]  # a background job ignores it
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment, start_new_session=True)


def run_kit(folder: Path, *stages: str, python: object = sys.executable) -> subprocess.CompletedProcess[str]:
    """The same until its end."""
    with start_kit(folder, *stages, python=python) as running:
        out, err = running.communicate(timeout=300)
    return subprocess.CompletedProcess(stages, running.returncode, out, err)


def test_pieces_are_small_and_make_the_folder_again(tmp_path: Path) -> None:
    folder, out = tmp_path / "stage", tmp_path / "out"
    (folder / "deep").mkdir(parents=True)
    out.mkdir()
    (folder / "deep/large").write_bytes(os.urandom(100_000))
    (folder / "link").symlink_to("deep/large")
    for compress in (False, True):
        pieces = pack(folder, out, 30_000, compress)
        assert [path.suffix for path in pieces] == [".00", ".01", ".02", ".03"]
        assert all(path.stat().st_size <= 30_000 for path in pieces)
        assert [path.read_bytes() for path in pieces] == [p.read_bytes() for p in pack(folder, out, 30_000, compress)]
        tar = b"".join(path.read_bytes() for path in pieces)
        there = tmp_path / f"there-{compress}"
        there.mkdir()
        subprocess.run(["tar", "-x", "-J" if compress else "-v", "-C", there], input=tar, check=True)
        assert (there / "stage/link").read_bytes() == (folder / "deep/large").read_bytes()
    write_sums(out, pieces)
    subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=out, check=True, capture_output=True)


def test_a_wheel_is_kept_as_it_is_but_not_compressed(tmp_path: Path) -> None:
    wheel, program = tmp_path / "some-1-py3-none-any.whl", zipfile.ZipInfo("some/program")
    program.external_attr, program.compress_type = 0o755 << 16, zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(program, b"x" * 10_000)
    assert wheel.stat().st_size < 5_000
    unsqueeze(tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        (entry,) = archive.infolist()
        assert archive.read(entry) == b"x" * 10_000 and entry.external_attr >> 16 == 0o755
    assert wheel.stat().st_size > 10_000 and list(tmp_path.iterdir()) == [wheel]


@pytest.mark.long
def test_seeded_weights_are_the_same_bytes_everywhere(kit: Path, used: Path, tmp_path: Path) -> None:
    assert fill(tmp_path / "one", 4000, 7) == fill(tmp_path / "two", 4000, 7) != fill(tmp_path / "three", 4000, 8)
    # What numpy 2.4 makes on x86; any other result would refuse every kit.
    assert fill(tmp_path / "one", 64, 1) == "3b7f37e7679a70916abe895f3d550725e4ed36fba40e0c5d97a3e8e9a8edc795"
    bundle = used / "work/models/base"
    names = list(json.loads((bundle / LISTED).read_text()))
    assert names == ["weights.data", "trt/weights.data"]
    opened = open_bundle(bundle)  # every hash is right
    assert not restore(bundle) and set(names) < set(opened.manifest["files"])
    changed = json.loads((bundle / LISTED).read_text())
    changed["weights.data"]["seed"] += 1
    (tmp_path / LISTED).write_text(json.dumps(changed))
    with pytest.raises(ValueError, match="makes other bytes of seed"):
        restore(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda path: path.unlink(), "core: core.tar.xz.00 not here: copy to"),
        (lambda path: path.write_bytes(b"x" + path.read_bytes()[1:]), "core.tar.xz.00 does not match SHA256SUMS: copy"),
    ],
)
def test_harmed_pieces_are_refused(kit: Path, tmp_path: Path, harm: Callable[[Path], object], message: str) -> None:
    shutil.copytree(kit, tmp_path / "kit")
    assert all(path.stat().st_size <= PIECE_MIB * 2**20 for path in kit.glob("*.tar.xz.*"))
    harm(tmp_path / "kit/core.tar.xz.00")
    done = run_kit(tmp_path / "kit")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and line.startswith("error: core: ") and message in line


@pytest.mark.long
def test_a_stage_that_does_not_exist_is_refused(used: Path) -> None:
    assert "STAGE...   of: unpack host" in run_kit(used, "--help").stdout
    done = run_kit(used, "tune")
    assert done.returncode == 1 and "there is no stage 'tune'" in done.stderr


ALL = ("trained", "base", "steps", "batches", "beams")


def measured(steps: dict[str, Any], stage: str) -> set[tuple[int, int]]:
    """Sentences and beams of every point of the random model."""
    points = steps[f"{stage}-tensorrt-base-fp32"]["report"]["points"]
    return {(each["point"]["batch"], each["point"]["beams"]) for each in points}


@pytest.mark.long
def test_stages_on_a_simulated_gpu(used: Path, tmp_path: Path) -> None:
    done = run_kit(used, *ALL, "eager")
    results = json.loads((used / "results/results.json").read_text())
    steps = results["steps"]
    assert done.returncode == 1  # there are no plans in fp16, and no torch with CUDA
    assert "check-tensorrt-trained-fp16: not run: there are no plans: build-tensorrt-trained-fp16 has" in done.stdout
    # All of them, then the first alone.
    assert done.stdout.count("build-tensorrt-trained-fp16: FAILED") == 2
    assert "eager: not run: the host's torch sees no GPU" in done.stdout
    assert steps["check-tensorrt-trained-fp32"]["report"]["passed"] and steps["weights"]["code"] == 0
    assert measured(steps, "steps") == {(1, 1)} and measured(steps, "batches") == {(2, 1)}
    assert measured(steps, "beams") == {(1, 4), (2, 4)}
    assert not steps["steps-tensorrt-trained-fp32"]["report"]["corpus"]
    texts = [steps[f"{stage}-tensorrt-trained-fp32"]["report"]["corpus"] for stage in ("batches", "beams")]
    assert [[(text["sentences"], text["beams"]) for text in found] for found in texts] == [[(12, 1)], [(12, 5)]]
    again = run_kit(used, "trained", "batches")
    assert "check-tensorrt-trained-fp32: done before" in again.stdout
    assert sorted(path.name for path in (used / "results").iterdir()) == ["results.json", "run.log"]


@pytest.mark.long
def test_stages_have_an_order_and_an_end(used: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What says most comes first, and all of it takes 25 minutes at most."""
    folder = Path(shutil.copytree(used, tmp_path / "kit"))
    shutil.rmtree(folder / "work/out")
    monkeypatch.setenv("KIT_TOTAL_SECONDS", "1")  # no stage begins
    done = run_kit(folder)
    begun = re.findall(
        r"^(\S+): not begun: it may take (\d+) s, and -?\d+ s are left of 1: run it again", done.stdout, re.M
    )
    wanted = ["probe", "trained", "where", "steps", "ort-cuda", "eager", "base", "batches", "beams"]
    assert [name for name, _ in begun] == ["host", "install", *wanted]
    assert sum(int(seconds) for _, seconds in begun) <= 25 * 60
    assert done.returncode == 1 and done.stdout.splitlines()[-1].startswith("11 not done: host install probe")


@pytest.mark.long
def test_the_cpp_runtime_is_compared_on_the_same_plans(
    used: Path, compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the kit has it; other tokens are a failure of their own."""
    kit = Path(shutil.copytree(used, tmp_path / "kit"))
    version = VERSIONS[-1]
    libraries, program = [library(version, compiled), gpu(version, compiled)], kit / "work/core/cpp/11/bin/tformer-cpp"
    program.parent.mkdir(parents=True)
    shutil.copy(built() / "examples/tformer-cpp", program)
    monkeypatch.setenv("LD_LIBRARY_PATH", os.pathsep.join(map(str, libraries)))
    monkeypatch.setenv("TFORMER_ONNXRUNTIME", onnxruntime())
    monkeypatch.setenv("SIMULATED_TENSORRT", "110400")
    done = run_kit(kit, "trained", "base")
    assert "cpp-tensorrt-trained-fp16: not run: there are no plans: build-tensorrt-trained-fp16 has" in done.stdout
    steps = json.loads((kit / "results/results.json").read_text())["steps"]
    for model, sentences in (("trained", 12), ("base", 72)):
        searches = steps[f"cpp-tensorrt-{model}-fp32"]["report"]["searches"]
        assert searches[0]["beams"] == 1 < searches[1]["beams"], done.stdout
        assert all(each["equal"] == each["sentences"] == sentences for each in searches)
    program.write_text("""#!/bin/sh\nsed 's/.*/{"ids": [7], "alternatives": []}/'\n""")
    (kit / "work/out/cpp-tensorrt-trained-fp32.done").unlink()
    assert "cpp-tensorrt-trained-fp32: FAILED, code 3 after" in run_kit(kit, "trained").stdout
    assert "cpp-tensorrt-trained-fp32: FAILED, code 3 before" in run_kit(kit, "trained").stdout
    step = json.loads((kit / "results/results.json").read_text())["steps"]["cpp-tensorrt-trained-fp32"]
    assert step["report"]["searches"][0]["differ"][0]["cpp"] == [7]
    found = cpp_problem({"cpp-tensorrt-trained-fp32": step}, "cpp-tensorrt-trained-fp32", 12)
    assert "C++ gives other tokens with 1 beams: 0 of 12 are equal" in found


def test_cpp_is_proven_on_all_sentences_or_not_at_all() -> None:
    def compared(*searches: tuple[int, int]) -> str:
        found = [{"beams": 1, "equal": equal, "sentences": sentences} for equal, sentences in searches]
        return cpp_problem({"cpp": {"code": 0, "report": {"searches": found}}}, "cpp", 12)

    assert compared((12, 12), (12, 12)) == ""
    assert compared((0, 0), (0, 0)) == "cpp: C++ was compared on 0, 0 sentences, not on 12"
    assert compared() == "cpp: C++ was compared on no sentences, not on 12"
    assert compared((12, 12), (11, 12)) == "cpp: C++ gives other tokens with 1 beams: 11 of 12 are equal"


@pytest.mark.long  # builds the C++ runtime where nobody has
def test_a_build_without_tensorrt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="is no build of the C\\+\\+ runtime with TensorRT: make cpp-trt"):
        kit_maker.add_cpp(tmp_path / "cpp", built())


def results_of(tmp_path: Path, used: Path, **changes: Any) -> dict[str, Any]:
    """The simulated results as those of a host with a GPU, with other steps in place of some."""
    out = tmp_path / "results"
    out.mkdir()
    collect(used / "work/out", used / "work/core/kit.json", out / "results.json")
    results = json.loads((out / "results.json").read_text())
    assert str(used) not in json.dumps(results), "where the kit was is nobody's business"
    results["kit"]["stages"] = ["trt86"]
    results["host"]["gpus"] = [{"name": "NVIDIA H200", "driver_version": "580.1"}]
    points = [
        {"dtype": dtype, "point": {"batch": batch, "beams": beams}, "tokens_per_s": 10.0}
        for dtype in ("float32", "float16")
        for batch in (1, 2)
        for beams in (1, 4)
    ]
    results["steps"] |= {"eager": {"code": 0, "seconds": 1, "report": {"points": points}}, **changes}
    (out / "results.json").write_text(json.dumps(results))
    return results


@pytest.mark.long
def test_results_become_a_table(used: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_kit(used, *ALL)
    results = results_of(tmp_path, used)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    arguments = [str(tmp_path / "results"), str(tmp_path / "results"), "--out", str(tmp_path), "--page", str(page)]
    assert main(arguments) == 3
    printed = capsys.readouterr()
    assert "`trt`, TensorRT, fp16: refused: check-tensorrt-trained-fp16 did not run" in printed.err
    assert "ms a step of `base`, batch 1, greedy | ≤ 0.250 | `trt`, TensorRT, fp16 | not measured\n" in printed.out
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith(f"{END}\nafter\n") and "old" not in text
    assert "| `trt`, TensorRT, fp16 | refused | refused | refused | refused |" in text
    assert text.count("| batch 1, greedy | batch 2, greedy | batch 1, beam 4 | batch 2, beam 4 |") == 2
    assert re.search(r"\| `trt`, TensorRT, fp32 \| \d+\.\d{3} \(\d+%\) \|", text)
    # A draw may be near enough to two tokens to be a tie.
    assert re.search(r"72 of 72 \| 72 of 72 \| 72 of 72 \| 12 of 12 \| 12 of 12 \| 1[12] of 12(, 1 ties)? \| 0\.", text)
    written = json.loads((tmp_path / f"{results['host']['date']}-h200.json").read_text())
    assert written == results
    page.write_text("no place")
    with pytest.raises(ArtifactError, match="has no place for the table"):
        main(arguments)


@pytest.mark.long
def test_what_is_missing_is_said(used: Path, tmp_path: Path) -> None:
    run_kit(used, *ALL)
    results = results_of(tmp_path, used)
    results["steps"]["beams-tensorrt-trained-fp32"] = {"code": 124, "seconds": 9, "error": "stopped after 9 s"}
    results["steps"]["check-tensorrt-trained-fp32"]["report"]["engines"][0]["outputs"][1] |= {"equal": 10, "ties": 2}
    report = results["steps"]["steps-tensorrt-base-fp32"]["report"]
    report["engines"][0]["device"]["not_captured"] = "no room"
    text = markdown(results, sides(results))
    assert "10 of 12, 2 ties" in text
    assert "- `trt`, TensorRT, fp32: beams-tensorrt-trained-fp32 failed: stopped after 9 s" in text
    assert "steps were not replayed as CUDA graphs: no room" in text


@pytest.mark.long
def test_a_probe_that_fails_spares_the_rest(used: Path, tmp_path: Path) -> None:
    """The simulated TensorRT builds nothing."""
    folder = tmp_path / "kit"
    shutil.copytree(used, folder)
    shutil.rmtree(folder / "work/out")
    done = run_kit(folder, "probe", *ALL)
    assert "probe-tensorrt: FAILED, code 1" in done.stdout
    for name in ("build-tensorrt-trained-fp16", "check-tensorrt-trained-fp32", "steps-tensorrt-base-fp32"):
        assert f"{name}: not run: probe-tensorrt failed: " in done.stdout
    steps = json.loads((folder / "results/results.json").read_text())["steps"]
    assert steps["probe-tensorrt"]["code"] == 1 and "probe" in steps["check-tensorrt-trained-fp32"]["skipped"]
    assert "Traceback" in (folder / "results/probe-tensorrt.log").read_text()


def test_an_old_nvidia_smi_names_the_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"name,driver_version": "Old GPU, 1.2"}
    monkeypatch.setattr(host, "run", lambda command, seconds: known.get(command[1].partition("=")[2], ""))
    assert host.gpus() == [{"name": "Old GPU", "driver_version": "1.2"}]


@pytest.mark.long
def test_what_takes_too_long_is_stopped_and_said(used: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(shutil.copytree(used, tmp_path / "kit"))
    shutil.rmtree(folder / "results", ignore_errors=True)
    for step in (folder / "work/out").glob("check-*"):
        step.unlink()
    monkeypatch.setenv("KIT_PRECISIONS", "fp32")
    monkeypatch.setenv("KIT_LIMIT_SECONDS", "15")  # of which a busy machine needs some to begin
    done = run_kit(folder, "trained", python=sleepy(folder, "check"))
    stopped = r"^check-tensorrt-trained-fp32: FAILED, code 124 after \d+ s: stopped after \d+ s$"
    assert re.search(stopped, done.stdout, re.M), done.stdout
    steps = json.loads((folder / "results/results.json").read_text())["steps"]
    assert steps["check-tensorrt-trained-fp32"]["error"].startswith("stopped after")
    child = Path("/proc", (folder / "begun").read_text().strip(), "status")
    assert not child.exists() or "State:\tZ" in child.read_text(), "what a step started ends with it"
    monkeypatch.setenv("KIT_LIMIT_SECONDS", "0")
    done = run_kit(folder, "trained")
    assert "check-tensorrt-trained-fp32: not run: no time was left of what the stage trained may take" in done.stdout


def sleepy(folder: Path, stage: str) -> Path:
    """A Python to give the kit, in which a command of the package has one that takes a minute, whose id is `begun`."""
    python = folder / "sleepy"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *"tformer_deploy {stage} "*) sleep 60 & echo $! > {folder}/begun; wait;; esac\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    return python


@pytest.mark.long
def test_a_run_that_is_killed_keeps_what_it_had(used: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(shutil.copytree(used, tmp_path / "kit"))
    shutil.rmtree(folder / "results", ignore_errors=True)
    shutil.rmtree(folder / "work/out")
    monkeypatch.setenv("KIT_PRECISIONS", "fp32")
    with start_kit(folder, "trained", "steps", python=sleepy(folder, "bench")) as running:
        while not (folder / "begun").exists():
            assert running.poll() is None
            time.sleep(0.05)
        os.killpg(running.pid, signal.SIGKILL)  # as a host does that is cut off
    with (folder / "work/.lock").open() as lock:  # of children that are still ending
        fcntl.flock(lock, fcntl.LOCK_EX)
    steps = json.loads((folder / "results/results.json").read_text())["steps"]
    assert steps["check-tensorrt-trained-fp32"]["report"]["passed"] and "steps-tensorrt-base-fp32" not in steps
    done = run_kit(folder, "trained", "steps")
    assert done.returncode == 0 and "check-tensorrt-trained-fp32: done before" in done.stdout
    assert "steps-tensorrt-base-fp32: ok" in done.stdout


@pytest.mark.long
def test_ctrl_c_ends_the_run(used: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(shutil.copytree(used, tmp_path / "kit"))
    shutil.rmtree(folder / "work/out")
    monkeypatch.setenv("KIT_PRECISIONS", "fp32")
    with start_kit(folder, "steps", python=sleepy(folder, "bench")) as running:
        while not (folder / "begun").exists():
            assert running.poll() is None
            time.sleep(0.05)
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does
        _, errors = running.communicate(timeout=60)
    assert running.returncode == -signal.SIGINT and not errors
    assert not (folder / "work/out/steps-tensorrt-base-fp32.done").exists(), "it is to run again"
    child = Path("/proc", (folder / "begun").read_text().strip(), "status")
    assert not child.exists() or "State:\tZ" in child.read_text(), "what a step started ends with it"


def test_a_host_without_python_starts_with_the_kit_s(tmp_path: Path) -> None:
    """That of a kit for TensorRT 8.6, which is not compressed; so is no other host's."""
    kit, tools, python = tmp_path / "kit", tmp_path / "tools", tmp_path / "python/usr/bin/python3.11"
    source = Path(kit_maker.__file__).parent
    kit.mkdir()
    shutil.copy(source / "run.sh", kit / "run.sh")
    shutil.copytree(source / "runner", kit / "runner")
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    tools.mkdir()
    for name in ("sh", "dirname", "grep", "sha256sum", "rm", "mkdir", "cat", "tar", "mv"):
        (tools / name).symlink_to(str(shutil.which(name)))
    command = [kit / "run.sh", "--help"]
    done = subprocess.run(command, env={"PATH": str(tools)}, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "there is no Python 3.8 or later with lzma: name one in KIT_PYTHON" in done.stderr
    write_sums(kit, pack(tmp_path / "python", kit, 100))
    done = subprocess.run(command, env={"PATH": str(tools)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "STAGE...   of: unpack host" in done.stdout and not done.stderr


@pytest.mark.long
def test_two_runs_at_a_time_are_refused(used: Path) -> None:
    with (used / "work/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = run_kit(used, "host")
    assert done.returncode == 1 and "another run.sh, or what one has left, works in" in done.stderr


@pytest.mark.long
def test_every_plan_of_the_random_model_is_checked(kit: Path, used: Path) -> None:
    model = used / "work/models"
    reference = load_reference(model / "base.reference")
    options = replace(reference.options, invariance=bundles.BATCHES[1])  # the test's own kit has other batches
    profiles = [
        Profile(batch, beams, *bundles.BASE_LENGTHS) for beams in bundles.BASE_BEAMS for batch in bundles.BATCHES
    ]
    limits = Limits(128, *bundles.BASE_LENGTHS, 4, tuple(profiles))
    engine: Any = SimpleNamespace(limits=limits, config=SimpleNamespace(pad_id=0))
    plans, taken = Plans(model, model, {"profiles": list(map(str, profiles))}), set()
    picked = spread(reference.sources, options.invariance)
    for decoding in options.modes().values():
        batches = list(by_length(engine, reference.sources, range(len(reference.sources)), options, decoding))
        for variant in REBATCHED:
            batches += other_batches(variant, engine, reference.sources, picked, options, decoding)
        for batch, _ in batches:
            wanted = Profile(len(batch.src_ids), decoding.rows, batch.src_ids.shape[1], decoding.max_tokens)
            taken.add(plans.fitting(wanted))
    assert taken == set(profiles)


def failing(step: dict[str, Any]) -> None:
    step["code"], step["report"]["passed"] = 3, False
    step["report"]["engines"][0]["failures"] = ["greedy: sentence 3 differs"]


def other_precision(step: dict[str, Any]) -> None:
    step["report"]["engines"][0]["precision"] = "fp16"


def fewer_sentences(step: dict[str, Any]) -> None:
    step["report"]["sentences"] = 2


def broken(step: dict[str, Any]) -> None:
    step.clear()
    step.update(code=1, seconds=2, error="error: no room")


@pytest.mark.long
@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (failing, "check-tensorrt-trained-fp32 FAILED: greedy: sentence 3 differs"),
        (other_precision, "ran fp16, not fp32"),
        (fewer_sentences, "is of 2 sentences, not of 12"),
        (broken, "check-tensorrt-trained-fp32 failed: error: no room"),
    ],
)
def test_what_is_not_proven_has_no_figures(
    used: Path, tmp_path: Path, harm: Callable[[dict[str, Any]], None], reason: str
) -> None:
    run_kit(used, *ALL)
    results = results_of(tmp_path, used)
    harm(results["steps"]["check-tensorrt-trained-fp32"])
    found = {side.name: side for side in sides(results)}["`trt`, TensorRT, fp32"]
    assert reason in found.refused and not found.speeds and not found.text
    assert reason in markdown(results, sides(results))


def test_targets_stand_beside_what_was_measured() -> None:
    eager = [
        Side("eager fp32", "eager:fp32", speeds={(1, 1): 12.0, (128, 4): 90.0}),
        Side("eager fp16", "eager:fp16", speeds={(1, 1): 10.0, (128, 4): 100.0}),
    ]
    plans = Side("plans", "trt:fp16", speeds={(1, 1): 101.0, (128, 4): 599.0}, steps={(1, 1): 0.25})
    plans.host, plans.bleu = {(1, 1): 0.04, (128, 4): 0.06}, {"greedy": (38.5, 38.45), "beam": (39.0, 39.2)}
    plans.equal = {("trained", "greedy"): "990 of 1,000, 10 ties", ("trained", "beam"): "1,000 of 1,000"}
    cuda = Side("cuda", "ort:trt@cuda", speeds={(1, 1): 36.0})
    found = [(target.measured, target.verdict) for target in judge([*eager, plans, cuda], 1000)]
    assert found == [
        ("greedy: 990 of 1,000, 10 ties; beam: 1,000 of 1,000", "met"),
        ("0.20", "missed"),
        ("0.250", "met"),
        ("10.10", "met"),
        ("5.99", "missed"),
        ("6.0%", "missed"),
        ("3.00", "met"),
    ]
    wrong = Side("wrong", "trt:fp16", refused="check FAILED: sentence 3 differs", failed=True)
    tokens, *others = judge([wrong], 1000)
    assert (tokens.measured, tokens.verdict) == ("check FAILED: sentence 3 differs", "missed")
    assert {(target.measured, target.verdict) for target in others} == {("not measured", "")}
    assert judge([plans], 60)[0].verdict == ""  # too few to say


@pytest.mark.long
def test_results_of_several_calls_are_one(used: Path, tmp_path: Path) -> None:
    """Of each step what worked, or ran last; of one kit and one kind of GPU."""
    (tmp_path / "a").mkdir()
    results = results_of(tmp_path / "a", used)
    one, two = tmp_path / "a/results", tmp_path / "b"
    two.mkdir()
    worked, failed, skipped = ({"code": 0, "seconds": 1}, {"code": 1, "seconds": 2}, {"skipped": "no GPU"})
    sides_of = {"1": (worked, failed), "2": (failed, worked), "3": (failed, skipped), "4": (skipped, failed)}
    for folder, number in ((one, 0), (two, 1)):
        changed = {**results, "steps": {name: both[number] for name, both in sides_of.items()}}
        (folder / "results.json").write_text(json.dumps(changed))
    assert load([one, two])["steps"] == {"1": worked, "2": worked, "3": failed, "4": failed}
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    (unpacked / "results.json").write_text(json.dumps({**results, "host": {}, "steps": {}}))
    assert load([unpacked, one, two]) == load([one, unpacked, two]) == load([one, two])
    with pytest.raises(ArtifactError, match="unpacked is of a host where nvidia-smi showed no GPU"):
        load([unpacked, unpacked])
    for change, message in (
        ({"kit": {**results["kit"], "commit": "x"}}, "is of another kit"),
        ({"host": {**results["host"], "gpus": [{"name": "H100"}]}}, "is of H100, .* of NVIDIA H200"),
    ):
        (two / "results.json").write_text(json.dumps({**results, **change}))
        with pytest.raises(ArtifactError, match=message):
            load([one, two])


@pytest.mark.long
def test_results_that_are_none_are_refused(used: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="has no results"):
        load([tmp_path])
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(ArtifactError, match="is damaged"):
        load([tmp_path])
    collect(used / "work/out", used / "work/core/kit.json", tmp_path / "results.json")
    with pytest.raises(ArtifactError, match="showed no GPU"):
        load([tmp_path])


@pytest.mark.parametrize("beams", [1, 4])
def test_the_yardstick_decodes_as_the_engine_does(beams: int) -> None:
    """Greedy: token by token; of a beam the device's part, which knows no ends, so its sums only fall."""
    decoder = Decoder(random_model(small_config()).eval(), 3, beams, (6, 7))
    with torch.inference_mode():
        found = decoder().numpy()
    assert found.shape == (3, beams)
    if beams == 1:
        with EagerEngine(decoder.model) as engine:
            state = engine.encode(decoder.ids.numpy(), decoder.lengths.numpy())
            tokens = decoder.first.numpy()
            for _ in range(7):
                tokens = engine.step(tokens, state).ids[:, :, 0]
        assert np.array_equal(found, tokens)


def test_the_script_is_clean() -> None:
    script, checker = Path(kit_maker.__file__).with_name("run.sh"), Path(sys.executable).with_name("shellcheck")
    subprocess.run([checker, "-x", "-P", script.parent, script], check=True)
    for path in script.with_name("runner").glob("*.py"):  # the host's Python may be as old as that
        ast.parse(path.read_text(), feature_version=(3, 8))


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_tensors_that_differ_are_named(used: Path, precision: str) -> None:
    """Of plans that keep the caches of other rows: from the second step on, with several beams, both ways to run."""
    code = f"""
import sys
import onnx
from benchmarks.gpu import where
from tests.simulated_trt import keep_graph
from tformer_deploy.engines.trt.api import load_tensorrt

def broken(tensorrt, graph, options, exact=0):
    model = onnx.load_from_string(keep_graph(tensorrt, graph, options).data)
    for node in model.graph.node:
        if node.op_type == "Gather" and node.input[0] == "past_k_0":
            node.op_type, node.input[:] = "Identity", node.input[:1]
            node.ClearField("attribute")
    return where.SimpleNamespace(data=model.SerializeToString())

where.load_builder = lambda flavor: load_tensorrt("tensorrt")
given = [{str(used / "work/models/trained")!r}, "tensorrt", {precision!r}, "4x1x24x24", "4x3x24x24"]
where.compile_plan = keep_graph
assert where.main(given) == 0
where.compile_plan = broken
sys.exit(where.main(given))
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SIMULATED), str(SIMULATED.parents[1])])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 3, done.stderr
    right, wrong = (json.loads(line)["reports"] for line in done.stdout.splitlines())
    for way in ("CUDA graphs", "one by one"):
        assert all(each[way]["compared"] > 20 and not each[way]["wrong"] for each in (*right, wrong[0]))
        assert wrong[1][way]["wrong"][0]["step"] == 1
        assert "present_k_0" in [each["tensor"] for each in wrong[1][way]["wrong"]]
