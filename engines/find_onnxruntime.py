"""Prints where ONNX Runtime's library is, this Python's or a downloaded one: find_onnxruntime.py [TARGET]."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def installed() -> Path:
    """The folder of this Python's package."""
    spec = importlib.util.find_spec("onnxruntime")
    if not spec or not spec.submodule_search_locations:
        sys.exit("find_onnxruntime.py: the package onnxruntime is not installed: pip install onnxruntime")
    return Path(spec.submodule_search_locations[0])


def downloaded(processor: str) -> Path:
    """The wheel for that processor, in the version of constraints.txt."""
    folder = ROOT / ".cache" / f"onnxruntime-{processor}"
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    command += [
        "--only-binary=:all:",
        f"--platform=manylinux_2_28_{processor}",
        f"--platform=manylinux_2_27_{processor}",
    ]
    done = subprocess.run(
        [*command, "-c", ROOT / "constraints.txt", "-d", folder, "onnxruntime"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"find_onnxruntime.py: pip download: {(done.stderr.strip() or 'failed').splitlines()[-1]}")
    return next(folder.glob("*.whl"))


if __name__ == "__main__":
    print(downloaded(sys.argv[1].split("-")[0]) if sys.argv[1:] else installed())
