"""What `make release` makes: the same files again, that run elsewhere.

The long tests are of a release's files, in dist/release or the folder TFORMER_RELEASE, and skip where there are none.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tformer_deploy import __version__

from .arm64_python import NoPackagesError, arm64_python
from .conftest import export_unchecked
from .test_cpp_cross import LINES

ROOT = Path(__file__).parent.parent
RELEASE = Path(os.environ.get("TFORMER_RELEASE") or ROOT / "dist" / "release")
DEMO = ROOT / ".demo" / "run"
PROCESSORS = ("x86_64", "aarch64")
WHEELS = [f"tformer_native-{__version__}-{tags}" for tags in ("cp311-cp311", "cp312-abi3")]
TRANSLATE = """
import json, sys
import tformer_deploy
with tformer_deploy.load(sys.argv[1], backend="native", variant="native-int8", beams=4, threads=1) as translator:
    for result in translator.translate(sys.stdin.read().splitlines()):
        print(json.dumps([result.text, result.score]))
"""


def run(command: list[str | Path], given: str = "", **more: str) -> str:
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, check=False, timeout=900, env={**os.environ, **more}
    )
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-1500:]
    return done.stdout


def refused(*arguments: str | Path) -> str:
    command = [sys.executable, ROOT / "engines" / "release.py", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and not done.stdout
    return done.stderr.splitlines()[-1]


def test_two_folders_give_the_same_packages(tmp_path: Path) -> None:
    """Of Python; those with C++ need minutes, so that CONTRIBUTING.md says how to compare them."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("not a clone: what belongs to the source package is not known")
    names = run(["git", "-C", ROOT, "ls-files", "-z"]).split("\0")
    found = []
    for clone in (tmp_path / "a", tmp_path / "elsewhere" / "b"):
        for name in filter(None, names):
            if not name.startswith(("tests/", "benchmarks/")) and (ROOT / name).is_file():
                (clone / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, clone / name)
        command = [sys.executable, "-m", "hatchling", "build", "-d", clone / "out"]
        subprocess.run(
            command, cwd=clone, check=True, capture_output=True, env={**os.environ, "SOURCE_DATE_EPOCH": "1800000000"}
        )
        found.append({path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (clone / "out").iterdir()})
    assert found[0] == found[1]
    assert set(found[0]) == {f"tformer_deploy-{__version__}{end}" for end in ("-py3-none-any.whl", ".tar.gz")}


def test_what_cannot_be_released_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    assert refused(tmp_path / "out", sys.executable) == (
        f"release: Python {sys.version_info[0]}.{sys.version_info[1]}: name 3.11 and one from 3.12 on, "
        "each of which builds a wheel"
    )
    assert refused(tmp_path / "out", "python3.999").startswith("release: python3.999 cannot be run: ")
    assert not (tmp_path / "out").exists()


@functools.cache
def released() -> dict[str, Path]:
    """Name → file of the release."""
    if not (RELEASE / "SHA256SUMS").is_file():
        pytest.skip(f"there is no {RELEASE}: make release")
    return {path.name: path for path in RELEASE.iterdir()}


def wheel(begin: str, processor: str) -> Path:
    return next(path for name, path in released().items() if name.startswith(begin) and processor in name)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model as a program, exported without its check."""
    if not DEMO.is_dir():
        pytest.skip("there is no .demo: make demo")
    return export_unchecked(DEMO, tmp_path_factory.mktemp("release") / "bundle", ["native-int8"])


@pytest.fixture(scope="module")
def expected(bundle: Path) -> str:
    """Of this checkout's own engine."""
    return run([sys.executable, "-c", TRANSLATE, bundle], LINES, PYTHONPATH=str(ROOT))


@pytest.mark.long
def test_all_files_are_there_with_their_hashes() -> None:
    names = {f"tformer_deploy-{__version__}{end}" for end in ("-py3-none-any.whl", ".tar.gz")}
    for processor in PROCESSORS:
        names |= {wheel(begin, processor).name for begin in WHEELS}
        names.add(f"tformer-cpp-{__version__}-linux-{processor}.tar.gz")
    assert set(released()) == names | {"sbom.cdx.json", "SHA256SUMS"}
    stated = [line.split("  ") for line in released()["SHA256SUMS"].read_text().splitlines()]
    assert {name: digest for digest, name in stated} == {
        name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in released().items() if name != "SHA256SUMS"
    }


@pytest.mark.long
@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("begin", WHEELS)
def test_a_wheel_is_what_its_name_says(begin: str, processor: str, tmp_path: Path) -> None:
    path = wheel(begin, processor)
    said = run([Path(sys.executable).with_name("auditwheel"), "show", path])
    fits = re.search(r'"manylinux_2_(\d+)_(\w+)"', said)
    assert fits and int(fits[1]) <= 28 and fits[2] == processor, said
    assert f"manylinux_2_{fits[1]}_{processor}" in path.name
    with zipfile.ZipFile(path) as files:
        names = files.namelist()
        files.extractall(tmp_path)
    libraries = [name for name in names if ".so" in name]
    suffix = "abi3" if "abi3" in begin else f"cpython-311-{processor}-linux-gnu"
    assert libraries == [f"tformer_native/_native.{suffix}.so"]
    needed = run(["readelf", "-dW", tmp_path / libraries[0]])
    assert not re.search(r"onnxruntime|stdc\+\+|libcrypto|libpcre|RPATH|RUNPATH", needed)
    assert str(ROOT).encode() not in (tmp_path / libraries[0]).read_bytes()
    licenses = {Path(name).name for name in names if "/licenses/" in name}
    assert licenses >= {"NOTICE", "nanobind", "json", "onnxruntime", "openssl", "pcre2"}


def packages(processor: str, version: str, site: Path, begin: str) -> dict[str, str]:
    """What the wheel needs, installed into a folder, and the environment in which Python finds it."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--only-binary=:all:"]
    platforms = [f"--platform=manylinux_2_{glibc}_{processor}" for glibc in (28, 27, 17)]
    words = [
        *pip,
        *platforms,
        "--python-version",
        version,
        "--implementation=cp",
        "--target",
        site,
        "--find-links",
        RELEASE,
    ]
    done = subprocess.run(
        [*words, f"tformer-deploy=={__version__}", wheel(begin, processor)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"pip cannot install what tformer-deploy needs: {done.stderr.strip().splitlines()[-1]}")
    return {"PYTHONPATH": str(site), "PYTHONNOUSERSITE": "1"}


@pytest.mark.long
@pytest.mark.parametrize(("version", "begin"), [("3.11", WHEELS[0]), ("3.13", WHEELS[1])])
def test_wheels_for_arm64_translate_as_this_machine(
    version: str, begin: str, bundle: Path, expected: str, tmp_path: Path
) -> None:
    """By qemu-user, in a Python of Debian: texts and scores of 20 lines."""
    if not shutil.which("qemu-aarch64"):
        pytest.skip("qemu-aarch64 is not installed: apt-get install qemu-user")
    try:
        python = arm64_python(version, tmp_path)
    except NoPackagesError as error:
        pytest.skip(f"there is no Python {version} for ARM64: {error}")
    environment = packages("aarch64", version, tmp_path / "site", begin)
    code = f"import platform; assert platform.machine() == 'aarch64'\n{TRANSLATE}"
    found = run([*python, "-c", code, bundle], LINES, **environment)
    assert found == expected and found.count("\n") == 20


@pytest.mark.long
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_wheels_for_x86_translate_as_this_checkout(version: str, bundle: Path, expected: str, tmp_path: Path) -> None:
    """Every Python that is here; from 3.12 on they share one wheel."""
    python = find_python(version)
    environment = packages("x86_64", version, tmp_path / "site", WHEELS[version != "3.11"])
    assert run([python, "-c", TRANSLATE, bundle], LINES, **environment) == expected


def find_python(version: str) -> str:
    """A Python of that version; skips where there is none."""
    for name in (f"python{version}", *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python3"))):
        if shutil.which(name) and not subprocess.run([name, "-c", ""], capture_output=True, check=False).returncode:
            return name
    pytest.skip(f"there is no Python {version}")


@pytest.mark.long
@pytest.mark.parametrize("processor", PROCESSORS)
def test_an_archive_translates_without_python(processor: str, bundle: Path, tmp_path: Path) -> None:
    with tarfile.open(released()[f"tformer-cpp-{__version__}-linux-{processor}.tar.gz"]) as tar:
        tar.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    command: list[str | Path] = [folder / "bin" / "tformer-cpp"]
    if processor == "aarch64":
        if not shutil.which("qemu-aarch64") or not Path("/usr/aarch64-linux-gnu").is_dir():
            pytest.skip("apt-get install qemu-user libc6-arm64-cross")
        command = ["qemu-aarch64", "-cpu", "max", "-L", "/usr/aarch64-linux-gnu", *command]
    words = ["translate", bundle, "--backend", "native", "--variant", "native-int8", "--beams", "4"]
    ours = [sys.executable, "-m", "tformer_deploy", *words]
    assert run([*command, *words], LINES) == run(ours, LINES, PYTHONPATH=str(ROOT))
    header = (folder / "lib" / "libonnxruntime.so.1").read_bytes()[:20]
    assert header[:4] == b"\x7fELF" and header[18] == {"x86_64": 0x3E, "aarch64": 0xB7}[processor]
    if processor == "x86_64":  # under qemu, ONNX Runtime reads the x86 machine's /sys
        graphs = ["translate", ROOT / ".demo" / "bundle"]
        assert run([*command, *graphs], "forty-two\n", TFORMER_ONNXRUNTIME="") == "zweiundvierzig\n"


@pytest.mark.long
def test_the_list_of_parts_names_what_is_inside() -> None:
    found = json.loads(released()["sbom.cdx.json"].read_text())
    assert found["bomFormat"] == "CycloneDX" and found["metadata"]["component"]["version"] == __version__
    parts = {each["bom-ref"]: each for each in found["components"]}
    dependencies = {each["ref"]: each.get("dependsOn", []) for each in found["dependencies"]}
    for name, path in released().items():
        if name in ("SHA256SUMS", "sbom.cdx.json"):
            continue
        assert parts[name]["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(path.read_bytes()).hexdigest()}]
        inside = {parts[ref]["name"] for ref in dependencies[name]}
        linked = {"libssl-dev", "libpcre2-dev", "nlohmann-json3-dev", "ziglang/libcxx"}
        if name.startswith("tformer-cpp"):
            assert inside >= linked | {"onnxruntime", "sentencepiece", "sentencepiece/protobuf-lite"}
        elif name.startswith("tformer_native"):
            assert inside >= linked | {"nanobind", "nanobind/robin_map", "numpy"}
        else:
            assert "sentencepiece" in inside
    assert all(each.get("version") for each in parts.values())
