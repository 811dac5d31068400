"""Programs that are compiled against an installed libtformer, shared and static, by CMake and pkg-config."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from .cpp_library import ROOT, built, onnxruntime

BUNDLE = ROOT / "tests/bundles/v2/copy"
PROGRAM = """
#include <tformer/tformer.hpp>
#include <cstdio>
int main(int, char** words) {
  tformer::Model model(words[1], {{"backend", words[2]}});
  tformer::Translator translator(model);
  std::puts(translator.translate({"7 3 9"})[0][0].text.c_str());
}
"""
PROJECT = """
cmake_minimum_required(VERSION 3.25)
project(app CXX)
find_package(tformer REQUIRED)
foreach(kind tformer static)
  add_executable(app-${kind} main.cpp)
  target_link_libraries(app-${kind} PRIVATE tformer::${kind})
endforeach()
"""


def run(command: list[str | Path], **more: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **more})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An installation, moved after it was made, beside a program's source."""
    folder = tmp_path_factory.mktemp("install")
    run(["cmake", "--install", built(), "--prefix", folder / "made"])
    (folder / "made").rename(folder / "prefix")
    (folder / "main.cpp").write_text(PROGRAM)
    (folder / "CMakeLists.txt").write_text(PROJECT)
    return folder / "prefix"


@pytest.mark.long
def test_cmake_links_either_library(prefix: Path) -> None:
    build = prefix.parent / "build"
    run(["cmake", "-S", prefix.parent, "-B", build, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix}"])
    run(["cmake", "--build", build])
    for kind in ("tformer", "static"):
        needed = run(["readelf", "-d", build / f"app-{kind}"])
        assert ("libtformer.so" in needed) == (kind == "tformer")
        assert "onnxruntime" not in needed and "crypto" not in needed
        for backend in ("native", "ort"):
            said = run([build / f"app-{kind}", BUNDLE, backend], TFORMER_ONNXRUNTIME=onnxruntime())
            assert said == "7 3 9\n", (kind, backend)


@pytest.mark.long
@pytest.mark.parametrize("link", ["shared", "static"])
def test_pkg_config_links_either_library(link: str, prefix: Path) -> None:
    """A program without any shared library runs programs; it cannot load ONNX Runtime, which is one."""
    if not shutil.which("pkg-config"):
        pytest.skip("pkg-config is not installed")
    place = next(prefix.rglob("tformer.pc")).parent
    words = ["--static"] if link == "static" else []
    flags = run(["pkg-config", *words, "--cflags", "--libs", "tformer"], PKG_CONFIG_PATH=str(place)).split()
    app = prefix.parent / f"app-{link}"
    own: list[str | Path] = ["-static"] if link == "static" else [f"-Wl,-rpath,{place.parent}"]
    run(["c++", "-std=c++17", "-O0", prefix.parent / "main.cpp", *own, *flags, "-o", app])
    assert ("Shared library" in run(["readelf", "-d", app])) == (link == "shared")
    assert run([app, BUNDLE, "native"]) == "7 3 9\n"
