"""Costs of growth: tokens/s against the batch, ms per step against the cached positions, from `tformer bench`."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

BATCHES = "1,2,4,8,16,32,64,128"
LONG, WINDOW = 511, 16
"""New tokens of the long outputs, and how many steps a point of their curve is the median of."""


def main() -> None:
    """Measure, then write JSON and a picture beside it."""
    parser = argparse.ArgumentParser(prog="benchmarks.growth", description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--variants", nargs="+", default=["fp32", "fp32-cpu", "int8", "int4"])
    parser.add_argument("--out", type=Path, required=True, help="a .json file; the picture is a .png of the same name")
    options = parser.parse_args()
    long = bench(options.bundle, options.variants, "--batch", "1,8", "--beam", "1", "--new-tokens", str(LONG))
    wide = bench(options.bundle, ["int8"], "--batch", BATCHES, "--beam", "1,4", "--workers", "2")
    found = {"machine": long["machine"], "steps": steps(long), "batches": batches(wide)}
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    draw(found, options.out.with_suffix(".png"))


def bench(bundle: Path, variants: list[str], *more: str) -> dict[str, Any]:
    """The report of `tformer bench`."""
    names = [word for variant in variants for word in ("--variant", variant)]
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "tformer_deploy",
        "bench",
        bundle,
        *names,
        "--rounds",
        "3",
        "--seconds",
        "1",
    ]
    done = subprocess.run([*command, *more, "--json"], check=True, stdout=subprocess.PIPE)
    return dict(json.loads(done.stdout))


def steps(report: dict[str, Any]) -> dict[str, list[list[float]]]:
    """Engine and batch -> [cached positions, ms of a step]."""
    return {
        f"{each['engine']}, batch {each['point']['batch']}": [
            [start + WINDOW / 2, statistics.median(each["steps_ms"][start : start + WINDOW])]
            for start in range(0, len(each["steps_ms"]) - WINDOW, WINDOW)
        ]
        for each in report["points"]
    }


def batches(report: dict[str, Any]) -> dict[str, list[list[float]]]:
    """Beams -> [batch, tokens/s]."""
    found: dict[str, list[list[float]]] = {}
    for each in report["points"]:
        point = each["point"]
        found.setdefault(f"{each['engine']}, beam {point['beams']}", []).append([point["batch"], each["tokens_per_s"]])
    return found


def draw(found: dict[str, Any], path: Path) -> None:
    """Both curves side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for axes, curves in ((left, found["steps"]), (right, found["batches"])):
        for name, curve in curves.items():
            axes.plot(*zip(*curve, strict=True), marker=".", linewidth=1, markersize=4, label=name)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    left.set(xlabel="cached positions", ylabel="ms per step", title="a step against the length so far")
    right.set(xlabel="sentences at once", ylabel="tokens/s", title="throughput against the batch", xscale="log")
    right.set_xticks([1, 2, 4, 8, 16, 32, 64, 128], labels=["1", "2", "4", "8", "16", "32", "64", "128"])
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
