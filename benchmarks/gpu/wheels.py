"""Wheels for the host's Python, whatever Python this is."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

from tformer_deploy.base.errors import ConfigError

ROOT = Path(__file__).parents[2]
OWN = tuple(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"])
"""What every installation of tformer-deploy needs."""
CORE = (*OWN, "polygraphy", "onnx", "onnxruntime", "cuda-bindings", "sacrebleu", "pip")
RTX = "tensorrt_rtx_cu13_libs"
RTX_BINDINGS = "tensorrt_rtx_cu13_bindings"
RTX_PACKAGE = "tensorrt_rtx_cu13"
"""What is imported; it needs those two."""
ORT_GPU = ("onnxruntime-gpu",)
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_24_x86_64", "manylinux_2_17_x86_64")
"""Newest first: glibc 2.28 and above."""


def download(names: Sequence[str], python: str, out: Path, dependencies: bool = True) -> None:
    """Fetch wheels and, unless told otherwise, what they need, in the versions of constraints.txt."""
    out.mkdir(parents=True, exist_ok=True)
    platforms = [word for platform in (*PLATFORMS, "manylinux2014_x86_64") for word in ("--platform", platform)]
    wanted = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms]
    options = [*([] if dependencies else ["--no-deps"]), "-c", str(ROOT / "constraints.txt"), "-d", str(out)]
    pip("download", *wanted, *options, *names)


def unsqueeze(folder: Path) -> None:
    """Repack wheels without compression: a piece is compressed as a whole, which is far smaller."""
    for wheel in sorted(folder.glob("*.whl")):
        part = wheel.with_suffix(".part")
        with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(part, "w", zipfile.ZIP_STORED) as new:
            for entry in old.infolist():
                data = old.read(entry)
                entry.compress_type = zipfile.ZIP_STORED
                new.writestr(entry, data)
        part.replace(wheel)


def build_source(name: str, out: Path) -> None:
    """A package that its index has as source alone, all of it Python."""
    out.mkdir(parents=True, exist_ok=True)
    pip("wheel", "--no-deps", "-c", str(ROOT / "constraints.txt"), "-w", str(out), name)


def build_own(out: Path) -> None:
    """This checkout as a wheel."""
    out.mkdir(parents=True, exist_ok=True)
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(out), str(ROOT))


def pip(*arguments: str) -> None:
    """Run pip. Raises ConfigError with its own last line."""
    command = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise ConfigError(f"pip {arguments[0]} failed: {lines[-1] if lines else done.returncode}: try it by hand")
