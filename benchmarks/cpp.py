"""Time of the C++ runtime outside ONNX Runtime: microseconds a step, and the share of the whole; prints JSON."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from pathlib import Path

from tformer_deploy.engines.ort import shared_library

from .peers.points import random_sources

SRC_TOKENS, NEW_TOKENS = 20, 40
"""A cache is made for 32 positions, so it has to grow once."""
POINTS = {(1, 1): 20, (1, 4): 12, (32, 1): 4, (32, 4): 2}
"""Batch and beams, and how often the lines are translated in a round."""


def main() -> None:
    """Measure every point in turns, a process each."""
    parser = argparse.ArgumentParser(prog="benchmarks.cpp", description=__doc__)
    parser.add_argument("bundle", type=Path, help="random weights, whose words are w4, w5 and so on")
    parser.add_argument("--variant", default="int8")
    parser.add_argument("--program", type=Path, default=Path("engines/build/overhead"))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    vocab = json.loads((options.bundle / "manifest.json").read_text())["model"]["src_vocab"]
    found: dict[tuple[int, int], list[dict[str, float]]] = {point: [] for point in POINTS}
    for _ in range(options.rounds):
        for (batch, beams), repeats in POINTS.items():
            sources = random_sources(vocab, [SRC_TOKENS] * batch, batch)
            lines = "".join(" ".join(f"w{i}" for i in ids[:-1]) + "\n" for ids in sources)
            asked = {"variant": options.variant, "threads": 1, "beams": beams, "max_tokens": NEW_TOKENS}
            settings = [f"{name}={value}" for name, value in {**asked, "endless": "true"}.items()]
            found[batch, beams].append(measure([options.program, options.bundle, repeats, *settings], lines))
    for (batch, beams), rounds in found.items():
        medians = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
        print(json.dumps({"batch": batch, "beams": beams, **medians}))


def measure(command: list[object], lines: str) -> dict[str, float]:
    """One process' output, as figures per step."""
    environment = {**os.environ, "TFORMER_ONNXRUNTIME": shared_library()}
    words = [*map(str, command)]
    said = json.loads(
        subprocess.run(words, input=lines, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout
    )
    outside = said["seconds"] - said["inside"]
    return {
        "outside_us": outside / said["runs"] * 1e6,
        "outside_percent": 100 * outside / said["seconds"],
        "step_ms": said["seconds"] / said["runs"] * 1e3,
    }


if __name__ == "__main__":
    main()
