"""Measure a bundle of the package annalog against the package's own generation loop, on molecules: speed and outputs.

Sides take turns, each in a process of its own; `tformer` runs one molecule at a time, as the package does, and all in
batches. Needs `pip install annalog==1.0.6 rdkit partialsmiles` in the environment of --python.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from tformer_deploy.base.processes import Process, in_turn, serve

ROOT = Path(__file__).parents[1]
SIDES = ("package", "one by one", "batches")


class Package:
    """The package's model and its beam search."""

    def __init__(self, folder: str) -> None:
        import torch
        from annalog import SMILESGenerator, SMILESModelHandler

        torch.set_num_threads(1)
        vocab, weights = f"{folder}/stereo_experiment_vocab_ttf.pkl", f"{folder}/Lev_extended.pt"
        self.generator = SMILESGenerator(SMILESModelHandler(vocab, vocab, weights, device="cpu"))

    def run(self, molecules: list[str], beams: int) -> tuple[float, list[str]]:
        """Seconds, and the best output of each molecule."""
        start = time.perf_counter()
        found = [self.generator.generate_smiles(one, beams, "beam") for one in molecules]
        return time.perf_counter() - start, [outputs[0][0] if outputs else "" for outputs in found]


class Bundle:
    """A bundle, with the package's rules: sums without a penalty, at most 101 tokens."""

    def __init__(self, bundle: str, variant: str, batches: bool) -> None:
        self.bundle, self.variant, self.batches = Path(bundle), variant, batches

    def run(self, molecules: list[str], beams: int) -> tuple[float, list[str]]:
        """See `Package.run`."""
        from tformer_deploy import load

        options: dict[str, Any] = {"beams": beams, "length_penalty": 0.0, "max_tokens": 101}
        with load(self.bundle, variant=self.variant, threads=1, **options) as translator:
            start = time.perf_counter()
            if self.batches:
                found = translator.translate(molecules)
            else:
                found = [translator.translate([one])[0] for one in molecules]
            return time.perf_counter() - start, [result.text for result in found]


def main() -> None:
    """Take turns; print a line for each side and number of beams."""
    parser = argparse.ArgumentParser(prog="benchmarks.molecules", description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--variant", default="fp32-cpu")
    parser.add_argument("--package", type=Path, required=True, help="annalog's folder ckpt_and_vocab")
    parser.add_argument("--molecules", type=Path, required=True, help="a SMILES a line")
    parser.add_argument("--python", default=sys.executable, help="of an environment that has annalog")
    parser.add_argument("--beams", default="1,5")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side == "package":
        serve(Package(str(options.package)))
        return
    if options.side:
        serve(Bundle(str(options.bundle), options.variant, options.side == "batches"))
        return
    molecules = options.molecules.read_text().split()
    arguments = [str(options.bundle.resolve()), "--variant", options.variant]
    arguments += ["--package", str(options.package.resolve()), "--molecules", str(options.molecules.resolve())]
    other = str(Path(shutil.which(options.python) or options.python).absolute())  # not resolved: venvs are links
    workers: dict[str, Process] = {}
    for side in SIDES:
        python = other if side == "package" else sys.executable
        workers[side] = Process(side, [python, "-m", "benchmarks.molecules", *arguments, "--side", side], cwd=ROOT)
    try:
        for beams in map(int, options.beams.split(",")):
            report(workers, molecules, beams, options.rounds)
    finally:
        for worker in workers.values():
            worker.end(kill=True)


def report(workers: dict[str, Process], molecules: list[str], beams: int, rounds: int) -> None:
    """One number of beams, after a round that does not count."""
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    outputs: dict[str, Any] = {}
    for number in range(rounds + 1):
        for side in in_turn(SIDES, number):
            took, outputs[side] = workers[side].ask("run", molecules=molecules, beams=beams)
            if number:
                seconds[side].append(took)
    for side in SIDES:
        ratio = statistics.median(a / b for a, b in zip(seconds["package"], seconds[side], strict=True))
        same = sum(a == b for a, b in zip(outputs["package"], outputs[side], strict=True))
        speed = len(molecules) / statistics.median(seconds[side])
        print(f"beams {beams}, {side}: {speed:.1f} molecules/s, x{ratio:.1f}, {same} of {len(molecules)} outputs equal")


if __name__ == "__main__":
    main()
