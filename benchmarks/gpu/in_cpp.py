"""Translate a text with the C++ runtime and with the Python package on the same plans, and compare the tokens.

Needs the standard library alone; both run as processes. Prints a report as JSON; exit code 3 where something differs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PACKAGES = {"rtx": ("tensorrt_rtx_libs",), "tensorrt": ("tensorrt_libs", "tensorrt")}
"""What may have the library of each flavor."""
SHOWN = 5
"""Sentences that differ, in the report."""


def library(flavor: str) -> str:
    """The folder of TensorRT's library: the environment's, or that of this Python's package; empty: the loader's."""
    if named := os.environ.get("TFORMER_TENSORRT"):
        return named
    specs = filter(None, map(importlib.util.find_spec, PACKAGES[flavor]))
    folders = (folder for spec in specs for folder in spec.submodule_search_locations or ())
    return next((folder for folder in folders if any(Path(folder).glob("lib*.so*"))), "")


def translated(command: list[str], text: bytes, **environment: str) -> tuple[list[list[list[int]]], float]:
    """Ids of every output of every line, and how long it took. Ends this program where the other fails."""
    begin = time.perf_counter()
    done = subprocess.run(command, input=text, capture_output=True, env={**os.environ, **environment}, check=False)
    seconds = time.perf_counter() - begin
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        sys.exit(f"{Path(command[0]).name}: {lines[-1]}")
    found = [json.loads(line) for line in done.stdout.decode().splitlines()]
    return [[each["ids"] for each in (line, *line["alternatives"])] for line in found], seconds


def compare(options: argparse.Namespace, beams: int) -> dict[str, Any]:
    """One search of both."""
    text = options.text.read_bytes()
    words = [str(options.bundle), "--backend", "trt", "--variant", options.precision, "--json"]
    words += ["--max-tokens", str(options.max_tokens), "--beams", str(beams), "--n-best", str(beams)]
    place = library(options.flavor)
    found = {"TFORMER_TENSORRT": place} if place else {}
    ours, seconds = translated([str(options.cpp / "bin/tformer-cpp"), "translate", *words], text, **found)
    theirs, python_seconds = translated([sys.executable, "-m", "tformer_deploy", "translate", *words], text)
    equal = [a == b for a, b in zip(ours, theirs, strict=True)]
    return {
        "beams": beams,
        "sentences": len(theirs),
        "equal": sum(equal),
        "cpp_seconds": seconds,
        "python_seconds": python_seconds,
        "differ": [
            {"line": i + 1, "cpp": ours[i][0], "python": theirs[i][0]} for i, same in enumerate(equal) if not same
        ][:SHOWN],
    }


def main() -> int:
    """Greedy, and the widest beam of the plans."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpp", type=Path, required=True, help="folder with bin/tformer-cpp")
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--precision", required=True)
    parser.add_argument("--flavor", choices=PACKAGES, required=True)
    parser.add_argument("--profile", action="append", required=True, help="of the plans, such as 8x4x64x128")
    options = parser.parse_args()
    sizes = [list(map(int, each.split("x"))) for each in options.profile]
    options.max_tokens = min(size[3] for size in sizes)
    searches = [compare(options, beams) for beams in sorted({size[1] for size in sizes})]
    print(json.dumps({"searches": searches}))
    return 3 if any(each["equal"] != each["sentences"] for each in searches) else 0


if __name__ == "__main__":
    sys.exit(main())
