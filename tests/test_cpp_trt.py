"""Plans in C++: compiled against NVIDIA's headers, run on a simulated GPU, compared with Python's engine on its own.

What a real GPU computes, and how fast, no test here can tell.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tformer_deploy.base.files import sha256
from tformer_deploy.bundle.plans import Stamp

from .command import failed_line, printed
from .cpp_library import ROOT, built, onnxruntime
from .cpp_trt import VERSIONS, as_json, gpu, headers, library, translate
from .params import long_but
from .simulated_trt import BUNDLES, SIMULATED, as_input, lines, make_bundle, run_simulated

NEWEST = VERSIONS[-1]
PLANS = {"SIMULATED_TENSORRT": 110400}
"""The version of the simulated TensorRT that the plans of `bundle` are for: 11.4.0."""
NUMBERS = {"8.6.1": "8.6.1", "10.0.1": "10.0.1", "10.16": "10.16.0"}
"""What TensorRT of other headers calls itself."""
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "suppressed": {"suppress": [20], "max_tokens": 20},
    "all scores": {"suppress": [9, 20, 41], "repetition_penalty": 1.2},
    "beams": {"beams": 5, "n_best": 5},
    "fewer beams": {"beams": 3, "length_penalty": 0.6, "stop": "estimate", "no_repeat_ngram": 2},
    "patience": {"beams": 2, "patience": 2.0, "stop": "count", "min_tokens": 4, "end_ids": [3, 12]},
    "short": {"max_ratio": 1.0, "forced_end": True, "beams": 4},
    "first": {"first_ids": [11], "endless": True, "max_tokens": 9},
    "samples": {"sampling": True, "n_best": 3, "seed": 5},
    "best samples": {"sampling": True, "n_best": 2, "seed": 7, "top_k": 1, "temperature": 2.0},
}
PYTHON = """
import dataclasses, json, sys
from tformer_deploy import load
bundle, searches, lines = json.loads(sys.argv[1])
found = {}
for precision in ("fp32", "fp16"):
    for name, asked in searches.items():
        with load(bundle, "trt", variant=precision, **{"max_tokens": 24, **asked}) as translator:
            found[f"{precision} {name}"] = [dataclasses.asdict(each) for each in translator.translate(lines)]
    with load(bundle, "trt", variant=precision, max_tokens=24) as translator:
        found[f"{precision} scores"] = translator.score(lines, lines[::-1])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def bundle(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model with plans of TensorRT 11.4.0, fp16 and fp32. Read only."""
    headers(NEWEST)
    return make_bundle(run, tmp_path_factory.mktemp("plans") / "bundle")


@pytest.fixture(scope="module")
def libraries(compiled: Path) -> list[Path]:
    return [library(NEWEST, compiled), gpu(NEWEST, compiled)]


@pytest.fixture(scope="module")
def in_python(bundle: Path) -> dict[str, Any]:
    """What Python's engine finds on its simulated GPU."""
    asked = json.dumps([str(bundle), SEARCHES, lines()])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SIMULATED), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", PYTHON, asked], capture_output=True, env=env, timeout=300)
    return dict(json.loads(printed(done)[-1]))


def flags(asked: dict[str, Any]) -> Iterator[str]:
    for name, value in {"max_tokens": 24, **asked}.items():
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        yield from ("--set", f"{name}={text.lower() if isinstance(value, bool) else text}")


@pytest.mark.parametrize("version", long_but(VERSIONS, "8.6.1", "11.1"))
def test_compiles_and_decodes_with_the_headers_of(version: str, bundle: Path, compiled: Path, tmp_path: Path) -> None:
    """Warnings are errors. The plans are the same in all versions here, so the tokens must be."""
    both = library(version, compiled), gpu(version, compiled)
    title = f"TensorRT {NUMBERS.get(version, '11.1.0')}"
    copy = stamped(bundle, tmp_path / "bundle", "sm90", title)
    words = ["--variant", "fp32", *flags(SEARCHES["beams"]), "--json"]
    found = as_json(translate(both, copy, "--backend", "trt", *words, stdin=as_input()))
    assert ids_of(found) == ids_of(as_json(translate([], bundle, *words, stdin=as_input())))


def ids_of(found: list[dict[str, Any]]) -> list[list[list[int]]]:
    """Of each line those of its outputs."""
    return [[each["ids"] for each in (line, *line["alternatives"])] for line in found]


def stamped(bundle: Path, out: Path, capability: str, title: str) -> Path:
    """A copy whose plans are of another GPU or TensorRT."""
    shutil.copytree(bundle, out)
    for header in (out / "trt/plans").glob("*/plans.json"):
        values = json.loads(header.read_text())
        stamp = Stamp(capability, title, values["precision"])
        header.write_text(json.dumps({**values, **dataclasses.asdict(stamp)}))
        header.parent.rename(header.parent.with_name(stamp.folder))
    return out


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", SEARCHES)
def test_decodes_as_in_python(
    bundle: Path, libraries: list[Path], in_python: dict[str, Any], name: str, precision: str
) -> None:
    """To the last bit, as one ONNX Runtime executes one graph for both. More lines than a plan has sentences."""
    words = ["--backend", "trt", "--variant", precision, "--json", *flags(SEARCHES[name])]
    assert as_json(translate(libraries, bundle, *words, stdin=as_input(), **PLANS)) == in_python[f"{precision} {name}"]


@pytest.mark.parametrize("options", [["--workers", "3"], ["--batch-tokens", "30"]])
def test_batches_make_no_difference(
    bundle: Path, libraries: list[Path], in_python: dict[str, Any], options: list[str]
) -> None:
    words = ["--backend", "trt", "--variant", "fp32", "--json", *flags(SEARCHES["beams"]), *options]
    found = as_json(translate(libraries, bundle, *words, stdin=as_input(), **PLANS))
    assert ids_of(found) == ids_of(in_python["fp32 beams"])


def test_scores_are_those_of_python(bundle: Path, libraries: list[Path], in_python: dict[str, Any]) -> None:
    pairs = "".join(f"{a}\t{b}\n" for a, b in zip(lines(), lines()[::-1], strict=True)).encode()
    for precision in ("fp32", "fp16"):
        words = ["--backend", "trt", "--variant", precision, "--score", "--max-tokens", "24"]
        assert as_json(translate(libraries, bundle, *words, stdin=pairs, **PLANS)) == in_python[f"{precision} scores"]


def test_fp16_goes_before_fp32_and_nothing_says_ort(bundle: Path, libraries: list[Path], tmp_path: Path) -> None:
    words = [*flags({}), "--json"]
    default, half, full = (
        as_json(translate(libraries, bundle, "--backend", "trt", *variant, *words, stdin=as_input(), **PLANS))
        for variant in ([], ["--variant", "fp16"], ["--variant", "fp32"])
    )
    assert default == half != full


def test_the_device_works_ahead(bundle: Path, libraries: list[Path], tmp_path: Path) -> None:
    """Behind the three launches of a first run; where something is drawn it waits for the search."""

    def called(**asked: Any) -> tuple[str, list[int]]:
        """Launches and waits, and the tokens."""
        words = [
            "--backend",
            "trt",
            "--variant",
            "fp32",
            "--json",
            *flags({"max_tokens": 12, "endless": True, **asked}),
        ]
        log = tmp_path / "log"
        (found,) = as_json(translate(libraries, bundle, *words, stdin=b"w5 w9 w30\n", SIMULATED_LOG=log, **PLANS))
        return log.read_text().removeprefix("LLL"), found["ids"]

    greedy, tokens = called()
    beams, sampled = called(beams=4)[0], called(sampling=True)[0]
    otherwise, _ = called(suppress=[max(tokens, key=tokens.count)])
    ended, _ = called(endless=False, end_ids=[tokens[-1]])
    assert greedy == beams == "L" + "LL" + "EL" * 10 + "EE", "the encoder, two steps, then a step for each that is read"
    assert sampled == "L" + "LE" * 12
    assert ended.count("L") == ended.count("E") + 2 < 14, "the encoder, and a step that nobody reads"
    assert otherwise.count("E") == 12 < otherwise.count("L") - 1, "steps are done again"


def test_tensorrt_for_rtx_runs_plans_of_its_own(bundle: Path, libraries: list[Path], tmp_path: Path) -> None:
    """By its version alone: the interface is that of TensorRT 11."""
    copy = stamped(bundle, tmp_path / "bundle", "sm80+", "TensorRT for RTX 1.7.1")
    words = ["--backend", "trt", *flags({}), "--json"]
    found = as_json(translate(libraries, copy, *words, stdin=as_input(), SIMULATED_TENSORRT=10701))
    assert found == as_json(translate(libraries, bundle, *words, stdin=as_input(), **PLANS))
    done = translate(libraries, copy, *words, stdin=b"w5\n", SIMULATED_TENSORRT=10701, SIMULATED_CAPABILITY=75)
    wanted = "TensorRT for RTX 1.7.1.106 needs a GPU of compute capability 8.0 or later, this one has sm75"
    assert wanted in failed_line(done)


def test_steps_that_cannot_be_captured_are_called(bundle: Path, libraries: list[Path]) -> None:
    words = ["--backend", "trt", *flags(SEARCHES["beams"]), "--json"]
    plain, called = (
        translate(libraries, bundle, *words, stdin=as_input(), **PLANS, **other)
        for other in ({}, {"SIMULATED_NO_CAPTURE": 1})
    )
    assert as_json(called) == as_json(plain) and b"warning" not in plain.stderr
    wanted = b"warning: steps are not replayed as CUDA graphs: CUDA stopped in cuGraphInstantiate: invalid argument\n"
    assert called.stderr.startswith(wanted)
    logged = in_one_process(bundle, libraries, 0, script=LOGGED, SIMULATED_NO_CAPTURE=1)
    assert logged.returncode == 0, logged.stderr


IN_ONE_PROCESS = """
import sys
from concurrent.futures import ThreadPoolExecutor
from tests.cpp_library import Model, Translator
bundle, lines = sys.argv[1], sys.argv[2:]

def translated(model, **options):
    with Translator(model, max_tokens=24, **options) as translator:
        return translator.translate(lines)

with Model(bundle, backend="trt", variant="fp32") as model:
    expected = [translated(model, beams=beams) for beams in (1, 5)]
    print(len(expected[1]))
    with ThreadPoolExecutor(4) as threads:
        for found in threads.map(lambda n: translated(model, beams=1 + 4 * (n % 2)), range(int(sys.argv.pop()))):
            assert found in expected
    assert translated(model, beams=5) == expected[1]
"""


LOGGED = """
import sys
from tests.cpp_library import CLOSE, LOG, Model, Translator, library
said = []

def log(user, level, message):
    said.append((level, message.decode()))
    library().tformer_model_warning(handles[0]) if handles else None  # which takes the lock of the model's devices

call, handles = LOG(log), []
assert library().tformer_on_log(call, None, CLOSE()) == 0
with Model(sys.argv[1], backend="trt", variant="fp32") as model:
    handles.append(model.handle)
    for beams in (1, 5, 1):
        with Translator(model, max_tokens=24, beams=beams) as translator:
            translator.translate(sys.argv[2:4])
    handles.clear()
assert any(level == 20 and "runs plans for sm90" in message for level, message in said), said
slow = [message for level, message in said if level == 30]
assert len(slow) == 1 and "steps are not replayed as CUDA graphs" in slow[0], said
"""
IN_MEMORY = """
import sys
from pathlib import Path
from tests.cpp_files import Memory, folder_read
from tests.cpp_library import CppError, Model, Serving, Translator
bundle, lines, options = Path(sys.argv[1]), sys.argv[2:-1], {"backend": "trt", "variant": "fp32"}
read = folder_read(bundle)

def translated(model, **options):
    with Translator(model, max_tokens=24, **options) as translator:
        return translator.translate(lines)

memory = Memory(read)
with Model(bundle, **options) as folder, Model(memory.files, **options) as model:
    opened = len(memory.reads)
    assert len(set(memory.reads)) == opened and sum(name.endswith(".plan") for name in memory.reads) == 2, memory.reads
    for beams in (1, 5):
        assert translated(model, beams=beams) == translated(folder, beams=beams)
    assert len(memory.reads) > opened  # plans of larger profiles
    with Serving(model, max_tokens=24) as serving:
        serving.admit(lines[0], 0)
        while serving.step(): pass
        assert serving.take()[1][0].text == translated(folder)[0][0].text
memory.require_closed()

def refusal(give, **more):
    memory = Memory(give)
    try:
        with Model(memory.files, **options, **more) as model:
            for beams in (1, 5):
                translated(model, beams=beams)
    except CppError as error:
        memory.require_closed()
        return str(error)
    raise AssertionError("nothing was refused")

for wanted, change in (("encoder-", lambda data: data[:-1] + b"?"), ("decoder_step-6x5", lambda data: data[:-9])):
    def give(name):
        data = read(name)
        return change(data) if data and name.split("/")[-1].startswith(wanted) and name.endswith(".plan") else data
    said = refusal(give)
    assert "does not match its SHA-256" in said and "tformer build memory" in said and "\\n" not in said, said
assert ".plan is missing" in refusal(lambda name: None if "decoder_step-6x5" in name else read(name))
none = refusal(lambda name: None if "plans" in name else read(name))
assert "it has others, if any: run here: tformer build memory" in none
"""


def test_plans_in_memory_are_those_of_the_folder(bundle: Path, libraries: list[Path]) -> None:
    done = in_one_process(bundle, libraries, 0, script=IN_MEMORY)
    assert done.returncode == 0, done.stderr


def in_one_process(
    bundle: Path, libraries: list[Path], *arguments: object, script: str = IN_ONE_PROCESS, **environment: object
) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TFORMER_CPP_BUILD": str(libraries[0]),
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries)),
        "TFORMER_ONNXRUNTIME": onnxruntime(),
        **{name: str(value) for name, value in {**PLANS, **environment}.items()},
    }
    command = [sys.executable, "-c", script, bundle, *lines()[:12], *arguments]
    return subprocess.run([*map(str, command)], capture_output=True, text=True, env=env, timeout=120)


def test_threads_share_one_model(bundle: Path, libraries: list[Path]) -> None:
    done = in_one_process(bundle, libraries, 8)
    assert done.returncode == 0, done.stderr


def test_devices_that_wait_make_room(bundle: Path, libraries: list[Path]) -> None:
    """Each profile alone has room, both together have not; then nothing has."""
    for room, message in ((1_300_000, ""), (100_000, "CUDA stopped in cuMemAlloc: out of memory: use fewer workers")):
        done = in_one_process(bundle, libraries, 0, SIMULATED_ROOM=room)
        assert (done.returncode == 0) == (not message) and message in done.stderr, done.stderr


REFUSED: dict[str, tuple[list[str], dict[str, object], str]] = {
    "no driver": ([], {"SIMULATED_DRIVER": 0}, "TensorRT 11.4.0.106 needs a GPU, and no NVIDIA driver is loaded here"),
    "old driver": (
        [],
        {"SIMULATED_DRIVER": 11080},
        "the NVIDIA driver knows CUDA up to 11.8, and TensorRT 11.4.0.106 needs 12.0: update the driver",
    ),
    "no GPU": ([], {"SIMULATED_DEVICES": 0}, "needs a GPU, and there is none here (CUDA_ERROR_NO_DEVICE)"),
    "other GPU": ([], {"SIMULATED_CAPABILITY": 86}, "no plans for this host (sm86, TensorRT 11.4.0.106, fp16), it has"),
    "other major": (
        [],
        {"SIMULATED_TENSORRT": 101600},
        "is TensorRT 10.16.0.106, and this libtformer was built with the headers of TensorRT 11: build it with",
    ),
    "other version": (
        [],
        {"SIMULATED_TENSORRT": 110500},
        "no plans for this host (sm90, TensorRT 11.5.0.106, fp16), it has sm90, TensorRT 11.4.0, fp16; sm90, ",
    ),
    "no TensorRT": (["--tensorrt", "/nowhere.so"], {}, "TensorRT cannot be loaded (/nowhere.so: cannot open"),
    "driver too old for the library": (
        [],
        {"SIMULATED_NO_RUNTIME": 1},
        "TensorRT 11.4.0.106 does not begin: it gives no reason: is the driver new enough for it?",
    ),
    "no room": (
        [],
        {"SIMULATED_NO_CONTEXT": "Error Code 2: OutOfMemory (no further information)"},
        "TensorRT 11.4.0.106 has no room for 8x1x24x24: Error Code 2: OutOfMemory (no further information): build a ",
    ),
    "another kind of GPU": (
        [],
        {"SIMULATED_NO_CONTEXT": "sm90 is not supported"},
        "TensorRT 11.4.0.106 cannot run the plans for 8x1x24x24 on this GPU: sm90 is not supported",
    ),
    "no such folder": (["--tensorrt", str(BUNDLES)], {}, "has no libnvinfer.so and no libtensorrt_rtx.so: name"),
    "other library": (["--tensorrt", "libcuda.so.1"], {}, "libcuda.so.1 is not TensorRT: it has no getInferLibVersion"),
    "precision": (["--variant", "int8"], {}, "unknown variant 'int8'"),
    "no such plans": (["--variant", "bf16"], {}, "no plans for this host (sm90, TensorRT 11.4.0.106, bf16), it has"),
    "shortlist": (["--shortlist"], {}, "shortlist: trt has no graphs for it"),
    "backend": (["--backend", "tpu"], {}, "unknown backend 'tpu'"),
    "tokens": (["--max-tokens", "25"], {}, "max_tokens 25 exceeds the plans' largest, 24: use less, or build a larger"),
    "beams": (["--beams", "6"], {}, "beams 6 exceeds the plans' largest, 5: use less, or build a larger profile too"),
    "attention": (["--align"], {}, "does not return attention"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_in_one_line(bundle: Path, libraries: list[Path], name: str) -> None:
    """Before anything of TensorRT is made, which crashes where there is no GPU."""
    asked, environment, message = REFUSED[name]
    done = translate(libraries, bundle, "--backend", "trt", *asked, stdin=b"w5\n", **{**PLANS, **environment})
    assert message in failed_line(done)


def test_the_library_that_fits_is_taken_from_a_folder_of_several(
    bundle: Path, libraries: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "libnvinfer.so.11").symlink_to(libraries[1] / "libnvinfer.so.11")
    for other in ("libnvinfer.so", "libnvinfer.so.8.6.1", "libtensorrt_rtx.so.1"):
        (tmp_path / other).write_text("of another version")
    done = translate(libraries, bundle, "--backend", "trt", "--tensorrt", tmp_path, stdin=b"w5\n", **PLANS)
    assert done.returncode == 0 and done.stdout, done.stderr


def test_a_long_source_is_refused_with_its_line(bundle: Path, libraries: list[Path]) -> None:
    text = f"w5\n{' '.join(['w7'] * 40)}\n".encode()
    done = translate(libraries, bundle, "--backend", "trt", "--max-tokens", 24, stdin=text, **PLANS)
    assert len(done.stdout.splitlines()) == 1
    line = failed_line(done)
    assert "line 2: a source of 41 tokens exceeds the limit of 24: split the line, or build a larger profile" in line


def damage_bytes(plans: Path, header: dict[str, Any]) -> None:
    plan = plans / "decoder_step-8x1x24x24.plan"
    plan.write_bytes(plan.read_bytes()[:-1] + b"?")


def forge(plans: Path, header: dict[str, Any]) -> None:
    plan = plans / "encoder-8x1x24x24.plan"
    plan.write_bytes(b"nothing")
    header["files"][plan.name] = sha256(plan)


def swap(plans: Path, header: dict[str, Any]) -> None:
    """The plan of other sizes."""
    shutil.copy(plans / "decoder_step-6x5x24x24.plan", plan := plans / "decoder_step-8x1x24x24.plan")
    header["files"][plan.name] = sha256(plan)


DAMAGES: dict[str, tuple[Callable[[Path, dict[str, Any]], object], str]] = {
    "bytes": (damage_bytes, "decoder_step-8x1x24x24.plan does not match its SHA-256"),
    "missing": (lambda plans, _: (plans / "encoder-6x5x24x24.plan").unlink(), "encoder-6x5x24x24.plan is missing"),
    "no hash": (lambda _, header: header["files"].pop("encoder-8x1x24x24.plan"), "no hash of encoder-8x1x24x24.plan"),
    "graphs": (lambda _, header: header["graphs"].popitem(), "was compiled from other graphs than the bundle's"),
    "another GPU": (
        lambda _, header: header.update(capability="sm89"),
        "has plans for sm89, TensorRT 11.4.0, fp16: ",
    ),
    "version": (lambda _, header: header.update(version=2), "format version 2, this tformer reads up to 1: update it"),
    "profile": (lambda _, header: header.update(profiles=["8x1"]), "is damaged: profiles[0] must match pattern"),
    "no plan": (forge, "TensorRT 11.4.0.106 cannot load "),
    "sizes": (swap, "the plans for 8x1x24x24 have no src_lengths of that size: export and build again"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_plans_are_refused(bundle: Path, libraries: list[Path], tmp_path: Path, name: str) -> None:
    damage, message = DAMAGES[name]
    copy = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    plans = copy / "trt/plans" / Stamp("sm90", "TensorRT 11.4.0", "fp16").folder
    header = json.loads((plans / "plans.json").read_text())
    damage(plans, header)
    (plans / "plans.json").write_text(json.dumps(header))
    done = translate(libraries, copy, "--backend", "trt", "--max-tokens", 24, stdin=b"w5\n", **PLANS)
    assert message in failed_line(done)
    if name not in ("profile", "no plan", "sizes"):  # the words of libraries, and what only C++ looks at
        python = run_simulated("translate", copy, "--backend", "trt", "--max-tokens", 24, stdin=b"w5\n")
        assert failed_line(python).split(": ")[-1] == failed_line(done).split(": ")[-1]


def test_a_bundle_without_graphs_for_it_says_so(libraries: list[Path]) -> None:
    done = translate(libraries, BUNDLES / "v2/copy", "--backend", "trt", stdin=b"1\n", **PLANS)
    assert "it has none at all: run here: tformer build" in failed_line(done)
    done = translate(libraries, BUNDLES / "v2/names", "--backend", "trt", stdin=b"1\n", **PLANS)
    assert "has no graphs for TensorRT: export it again and add --recipe trt" in failed_line(done)


def test_a_library_without_tensorrt_says_so() -> None:
    done = translate([], BUNDLES / "v2/copy", "--backend", "trt", stdin=b"1\n")
    assert failed_line(done) == (
        "error: backend trt: this libtformer was built without TensorRT: build it with -DTensorRT_ROOT=FOLDER, or use "
        "backend ort"
    )


def test_the_real_library_is_asked_for_a_gpu_first(bundle: Path, libraries: list[Path]) -> None:
    """TensorRT for RTX, on a machine without a driver, where its factory would crash."""
    found = find_spec("tensorrt_rtx_libs")
    if not found or not found.submodule_search_locations:
        pytest.skip("tensorrt_rtx is not installed: pip install '.[trt-rtx]'")
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has a GPU")
    place = found.submodule_search_locations[0]
    done = translate(libraries[:1], bundle, "--backend", "trt", stdin=b"w5\n", TFORMER_TENSORRT=place)
    line = failed_line(done)
    assert re.search(r"TensorRT for RTX 1\.\d+\.\d+\.\d+ needs a GPU, and no NVIDIA driver is loaded here", line)


def test_cmake_takes_the_headers_folder(tmp_path: Path) -> None:
    """The folder itself or what has `include`; another one is refused."""
    built()
    include = tmp_path / "root/include"
    include.parent.mkdir()
    include.symlink_to(headers(NEWEST))
    for root, compiled in ((include.parent, True), (headers(NEWEST), True), (tmp_path, False)):
        command = ["cmake", "-S", ROOT / "engines", "-B", tmp_path / f"build-{root.name}", "-G", "Ninja"]
        done = subprocess.run([*map(str, command), f"-DTensorRT_ROOT={root}"], capture_output=True, text=True)
        assert (done.returncode == 0) == compiled, done.stderr
        if compiled:
            made = subprocess.run(
                ["ninja", "-C", str(command[4]), "-t", "commands", "libtformer.so"], capture_output=True, text=True
            )
            assert "src/trt/engine.cpp" in made.stdout and "src/trt/off.cpp" not in made.stdout
