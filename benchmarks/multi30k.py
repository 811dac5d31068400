"""Measure a Multi30K bundle on test_2016_flickr: parity with eager PyTorch, BLEU, time and memory of `translate`.

Every figure comes from the real command in a process of its own; the backends take turns.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import sacrebleu


def main() -> None:
    """Check, then translate in turns, then score; writes results/ and prints a summary."""
    parser = argparse.ArgumentParser(prog="benchmarks.multi30k", description=__doc__)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder with test_2016_flickr.en.gz and .de.gz")
    parser.add_argument("--machine", required=True, help="short name for the file of results")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    source, target = (options.data / f"test_2016_flickr.{language}.gz" for language in ("en", "de"))
    text = gzip.decompress(source.read_bytes())
    lines = gzip.decompress(target.read_bytes()).decode().splitlines()

    corpus = ("--src", source, "--tgt", target, "--invariance", text.count(b"\n"))
    done = tformer("check", options.bundle, "--backend", "ort", *corpus, "--json")
    results: dict[str, Any] = {"check": json.loads(done["stdout"])}  # with machine and versions
    for beams in (1, 5):
        found = measure(options.bundle, source, text, beams, options.rounds)
        for backend, rounds in found.items():
            made = rounds["translate"][0]["stdout"].decode().splitlines()
            results[f"{backend}, beams {beams}"] = {
                "bleu_lowercased": sacrebleu.corpus_bleu(made, [lines], lowercase=True).score,
                "bleu": sacrebleu.corpus_bleu(made, [lines]).score,
                "chrf": sacrebleu.corpus_chrf(made, [lines]).score,
                "command_seconds": [row["seconds"] for row in rounds["translate"]],
                "command_seconds_median": statistics.median(row["seconds"] for row in rounds["translate"]),
                "peak_mib": max(row["peak_mib"] for row in rounds["translate"]),
                "loop": rounds["loop"],
                "tokens_per_second_median": statistics.median(row["tokens_per_second"] for row in rounds["loop"]),
                "share_outside_engine_median": statistics.median(row["share_outside_engine"] for row in rounds["loop"]),
            }
        same = found["ort"]["translate"][0]["stdout"] == found["eager"]["translate"][0]["stdout"]
        results[f"same lines, beams {beams}"] = same
    name = f"{datetime.date.today()}-{options.machine}.json"
    (Path(__file__).parent / "results" / name).write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps({key: value for key, value in results.items() if key != "check"}, indent=2))
    print("check passed:", results["check"]["passed"])


def measure(bundle: Path, source: Path, text: bytes, beams: int, rounds: int) -> dict[str, dict[str, list[Any]]]:
    """The whole command, and the loop inside it, with both backends in turns."""
    found: dict[str, dict[str, list[Any]]] = {backend: {"translate": [], "loop": []} for backend in ("ort", "eager")}
    for _ in range(rounds):
        for backend, rows in found.items():
            common = ("--backend", backend, "--beams", beams)
            rows["translate"].append(tformer("translate", bundle, *common, stdin=text))
            loop = run(Path(__file__).parent / "loop.py", bundle, "--src", source, *common)
            rows["loop"].append(json.loads(loop["stdout"]))
    return found


def tformer(*arguments: object, stdin: bytes = b"") -> dict[str, Any]:
    """Run the command."""
    return run("-m", "tformer_deploy", *arguments, stdin=stdin)


def run(*arguments: object, stdin: bytes = b"") -> dict[str, Any]:
    """Run Python; its output, wall-clock seconds (start and load included) and peak memory."""
    command = [sys.executable, *map(str, arguments)]
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


if __name__ == "__main__":
    main()
