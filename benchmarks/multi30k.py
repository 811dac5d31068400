"""Measure a Multi30K bundle on test_2016_flickr: parity with eager PyTorch, BLEU, time and memory of `translate`.

Every figure comes from the real command in a process of its own; the backends take turns.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import sacrebleu

PACKAGES = ("torch", "onnx", "onnxruntime", "sentencepiece", "sacrebleu", "numpy")


def main() -> None:
    """Check, then translate in turns, then score; writes results/ and prints a summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder with test_2016_flickr.en.gz and .de.gz")
    parser.add_argument("--machine", required=True, help="short name for the file of results")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    source = options.data / "test_2016_flickr.en.gz"
    text = gzip.decompress(source.read_bytes())
    reference = gzip.decompress((options.data / "test_2016_flickr.de.gz").read_bytes()).decode().splitlines()

    done = run("check", options.bundle, "--backend", "ort", "--src", source, "--json")
    results: dict[str, Any] = {"machine": machine(), "check": json.loads(done["stdout"])}
    rounds: dict[str, list[dict[str, Any]]] = {"ort": [], "eager": []}
    for _ in range(options.rounds):
        for backend, found in rounds.items():
            found.append(run("translate", options.bundle, "--backend", backend, stdin=text))
    for backend, found in rounds.items():
        lines = found[0]["stdout"].decode().splitlines()
        results[backend] = {
            "bleu_lowercased": sacrebleu.corpus_bleu(lines, [reference], lowercase=True).score,
            "bleu": sacrebleu.corpus_bleu(lines, [reference]).score,
            "chrf": sacrebleu.corpus_chrf(lines, [reference]).score,
            "seconds": [row["seconds"] for row in found],
            "seconds_median": statistics.median(row["seconds"] for row in found),
            "peak_mib": max(row["peak_mib"] for row in found),
        }
    results["same_lines"] = rounds["ort"][0]["stdout"] == rounds["eager"][0]["stdout"]
    name = f"{datetime.date.today()}-{options.machine}.json"
    (Path(__file__).parent / "results" / name).write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps({key: value for key, value in results.items() if key != "check"}, indent=2))
    print("check passed:", results["check"]["passed"], "equal:", results["check"]["equal"])


def run(*arguments: object, stdin: bytes = b"") -> dict[str, Any]:
    """Run `tformer`; its output, wall-clock seconds (start and load included) and peak memory."""
    command = [sys.executable, "-m", "tformer_deploy", *map(str, arguments)]
    start = time.perf_counter()
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as target:
        source.write(stdin)
        source.seek(0)
        process = subprocess.Popen(command, stdin=source, stdout=target)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        if status:
            sys.exit(f"{' '.join(command)} failed")
        target.seek(0)
        return {"stdout": target.read(), "seconds": seconds, "peak_mib": usage.ru_maxrss / 1024}


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    return {
        "cpu": cpu.split(": ")[1],
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
    }


if __name__ == "__main__":
    main()
