"""Sources for Windows and macOS: they compile. The kernels' program for Windows also runs, where wine is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from .cpp_library import ROOT, built

pytestmark = pytest.mark.long
KINDS = {"x86_64-windows": b"\x64\x86", "aarch64-macos": b"\xcf\xfa\xed\xfe\x0c\x00\x00\x01"}
"""How object files of a target begin."""


def compiled(target: str) -> Path:
    """The folder of that build; skips where there is no zig."""
    if not shutil.which("zig"):
        pytest.skip("zig is not in PATH: pip install ziglang")
    built()  # downloads the headers of dependencies
    folder = ROOT / "engines" / f"build-{target}"
    done = subprocess.run(["make", folder.relative_to(ROOT)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return folder


@pytest.mark.parametrize("target", KINDS)
def test_all_sources_compile(target: str) -> None:
    objects = [path for path in compiled(target).rglob("*.o*") if path.suffix in (".o", ".obj")]
    assert all(path.read_bytes().startswith(KINDS[target]) for path in objects)
    sources = {path.name for path in (ROOT / "engines" / "src").rglob("*.cpp")}
    optional = {path.name for path in (ROOT / "engines" / "src").glob("trt/*.cpp")} - {"off.cpp"}
    other = {"x86_64-windows": {"amx.cpp", "neon.cpp", "dotprod.cpp", "i8mm.cpp"}}
    other["aarch64-macos"] = {"avx2.cpp", "avxvnni.cpp", "avx512.cpp", "amx.cpp"}
    assert {path.stem for path in objects} >= sources - optional - other[target]


def test_the_kernels_for_windows_give_equal_bits(tmp_path: Path) -> None:
    """Every instruction set of this machine but AMX, in wine."""
    wine = shutil.which("wine64") or shutil.which("/usr/lib/wine/wine64")
    if not wine:
        pytest.skip("wine is not installed: apt-get install wine64")
    program = compiled("x86_64-windows") / "tests" / "kernels.exe"
    environment = {**os.environ, "WINEPREFIX": str(tmp_path / "wine"), "WINEDEBUG": "-all", "DISPLAY": ""}
    command = [wine, program, "1", "30"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0 and done.stdout.startswith("15 checks of "), done.stdout + done.stderr
