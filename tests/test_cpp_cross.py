"""libtformer for ARM64: cross-compiled here, run by qemu-user, compared with what this machine computes.

qemu shows what is computed. It shows neither speed nor what an ARM processor does with the order of writes to memory.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tformer_deploy.export.packing import column_sums, pack_bf16, pack_fp32, pack_int4, pack_int8, pack_vector
from tformer_deploy.export.quantizing import channels, groups

from .conftest import export_unchecked
from .cpp_library import BUILD, ROOT, built
from .cpp_trt import VERSIONS, object_of, sources

TARGET = "aarch64-linux-gnu"
CROSS = ROOT / "engines" / f"build-{TARGET}"
DEMO = ROOT / ".demo" / "run"
SETS = {"cortex-a72": ["neon"], "neoverse-n1": ["dotprod", "neon"], "max": ["i8mm", "dotprod", "neon"]}
"""Processors of qemu, and the instruction sets of each, best first."""
VARIANTS = ["native-fp32", "native-bf16", "native-int8", "native-int8-bf16-cache", "native-int4"]
SEARCHES = {
    "greedy": [],
    "5 best": ["--beams", "5", "--n-best", "5"],
    "samples": ["--sample", "--n-best", "3", "--seed", "7"],
    "alignments": ["--align", "--beams", "2", "--set", "length_penalty=0.7", "--set", "length_norm=gnmt"],
}
LINES = """seven
forty-two
zero
thirteen
ninety-nine
one hundred
one hundred and one
two hundred and fifty-six
nine hundred and ninety-nine
one thousand
one thousand, two hundred and thirty-four
four thousand, ninety-six
nine thousand, nine hundred and ninety-nine
ten thousand
thirty-one thousand, four hundred and fifteen
sixty-five thousand, five hundred and thirty-six
one hundred thousand
two hundred and seventy-one thousand, eight hundred and twenty-eight
nine hundred and ninety-nine thousand, nine hundred and ninety-nine

"""
PROGRAMS = (
    "examples/tformer-cpp",
    "tests/cores",
    "tests/decode_table",
    "tests/header",
    "tests/kernels",
    "tests/tokenize",
)

pytestmark = pytest.mark.long


def emulated(program: str, cpu: str = "max") -> list[str]:
    return [f"qemu-{TARGET.split('-')[0]}", "-cpu", cpu, "-L", f"/usr/{TARGET}", str(CROSS / program)]


def run(command: list[str | Path], given: bytes = b"") -> bytes:
    done = subprocess.run(command, input=given, capture_output=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout.decode()[-500:] + done.stderr.decode()[-500:]
    return done.stdout


@pytest.fixture(scope="module", autouse=True)
def cross() -> Iterator[None]:
    """The build for ARM64, brought up to date."""
    for tool in ("cmake", "ninja", f"{TARGET}-g++", emulated("")[0]):
        if not shutil.which(tool):
            pytest.skip(f"{tool} is not installed: apt-get install cmake ninja-build g++-{TARGET} qemu-user")
    with (ROOT / "engines" / "cmake" / f"{TARGET}.cmake").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        configured = (CROSS / "build.ninja").is_file()
        command = ["cmake", "--build", str(CROSS)] if configured else ["make", "cpp-cross", f"TARGET={TARGET}"]
        made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if made.returncode and "get-dependencies:" in made.stderr:
        pytest.skip(made.stderr.strip().splitlines()[0])
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-2000:]
    yield


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model as a program of each kind, exported without its check."""
    if not DEMO.is_dir():
        pytest.skip("there is no .demo: make demo")
    return export_unchecked(DEMO, tmp_path_factory.mktemp("cross") / "bundle", VARIANTS)


@pytest.mark.parametrize("cpu", SETS)
def test_kernels_of(cpu: str) -> None:
    """A processor's best set is chosen, what it lacks is refused, and all its sets give the same bits."""
    said = dict(line.split("\t") for line in run([*emulated("tests/kernels", cpu), "sets"]).decode().splitlines())
    here = [*SETS[cpu], "portable"]
    assert [name for name, text in said.items() if text == "here"] == here
    assert said["best"] == here[0]
    for name in {"i8mm", "dotprod"} - {*here}:
        assert said[name].startswith(f"kernels '{name}' need ")
        assert said[name].endswith(", which this machine does not have")
    for seed in (1, 1000):
        found = run([*emulated("tests/kernels", cpu), str(seed), "30"]).decode()
        assert found == f"15 checks of {len(here)} sets, 30 times\n"


def test_no_kernel_runs_before_the_processor_is_asked() -> None:
    """As in test_native.py: a table that is not a constant would be filled when the library loads."""
    objects = sorted((CROSS / "src/kernels").rglob("*.o"))
    assert {path.name.partition(".")[0] for path in objects} == {"choose", "portable", *SETS["max"]}
    for path in objects:
        symbols = run([f"{TARGET}-nm", str(path)]).decode()
        assert path.name.startswith("choose") or "_GLOBAL__sub_I" not in symbols, path


@pytest.mark.parametrize(("rows", "inputs"), [(1, 200), (3, 200), (7, 200), (16, 2100)])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8", "int4"])
def test_products_have_the_bits_of_this_machine(kind: str, rows: int, inputs: int) -> None:
    """Whatever the set, on both processors. So many inputs are more than a panel is arranged for."""
    outputs, group = 70, 32
    draw = np.random.default_rng(rows)
    weight = draw.standard_normal((outputs, inputs)).astype(np.float32)
    x = draw.standard_normal((rows, inputs)).astype(np.float32)
    if kind == "int8":
        integers, scales = channels(weight)
        arrays, x = [pack_int8(integers), pack_vector(scales), column_sums(integers)], np.round(x * 40)
    elif kind == "int4":
        integers, scales = groups(weight, 4, group)
        arrays = [pack_int4(integers), pack_fp32(scales)]
    else:
        arrays = [pack_fp32(weight) if kind == "fp32" else pack_bf16(weight)]
    given = b"".join(array.tobytes() for array in [*arrays, x])
    words = ["product", kind, str(rows), str(inputs), str(outputs), str(group)]
    size = rows * outputs * 4
    expected = run([built() / "tests/kernels", *words], given)[:size]
    assert np.abs(np.frombuffer(expected, np.float32)).max() > 1
    found = run([*emulated("tests/kernels"), *words], given)
    assert found == expected * (len(SETS["max"]) + 1)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_translates_as_this_machine(variant: str, search: str, bundle: Path) -> None:
    """Byte by byte, scores included, with every instruction set."""
    words = ["translate", str(bundle), "--backend", "native", "--variant", variant, "--json", *SEARCHES[search]]
    expected = run([built() / "examples/tformer-cpp", *words], LINES.encode())
    assert expected.count(b"\n") == LINES.count("\n") == 20
    for cpu in SETS:
        assert run([*emulated("examples/tformer-cpp", cpu), *words], LINES.encode()) == expected, cpu


@pytest.mark.parametrize("variant", ["native-fp32", "native-int8", "native-int4", "native-int8-bf16-cache"])
def test_threads(variant: str) -> None:
    """8 threads on models of each kind. What this cannot show: see above."""
    run([*emulated("threads"), str(ROOT / "tests/bundles/v2/copy"), variant, "3", "9 7 3 6", "", "5"])


def test_what_drives_its_programs_passes(tmp_path: Path) -> None:
    """Tests of kernels, tokenizers and searches that compare with Python, on programs that qemu runs."""
    for program in PROGRAMS:
        script = tmp_path / program
        script.parent.mkdir(exist_ok=True)
        script.write_text(f'#!/bin/sh\nexec {" ".join(emulated(program))} "$@"\n')
        script.chmod(0o755)
    files = [f"tests/test_{name}.py" for name in ("cpp_decoding", "cpp_text", "kernels")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", *files],
        cwd=ROOT,
        env={**environment, "TFORMER_CPP_BUILD": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("version", VERSIONS)
def test_plans_compile(version: str, tmp_path: Path) -> None:
    for source, of in sources(version).items():
        object_of(source, of, tmp_path, CROSS)


def test_a_library_of_another_processor_is_refused(tmp_path: Path) -> None:
    """It would otherwise be skipped by the linker."""
    built()
    own = ROOT / ".cache" / "cpp"
    if os.environ.get("TFORMER_CPP_BUILD") or not (own / "pcre2").is_dir():
        pytest.skip(f"{BUILD} was made elsewhere: {own} has no libraries")
    toolchain = ROOT / "engines" / "cmake" / f"{TARGET}.cmake"
    words = ["-G", "Ninja", f"-DCMAKE_TOOLCHAIN_FILE={toolchain}", f"-DPCRE2_LIBRARY={own}/pcre2/libpcre2-8.a"]
    command = ["cmake", "-S", str(ROOT / "engines"), "-B", str(tmp_path), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    said = " ".join(done.stderr.split())
    assert (
        "libpcre2-8.a is a library for x86_64, but this build is for aarch64: give CMake -DPCRE2_LIBRARY=FILE" in said
    )
