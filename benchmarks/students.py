"""Time a student of Bergamot or Firefox beside fxtranslate, which runs such files itself: text in, text out, one core.

`--node-modules`: also beside Bergamot's translator in Node, as WebAssembly.
`--program`: also the milliseconds from a line in to its line out, which is flushed, as at the shared task of WMT.
Sides take turns, each in a process of its own. fxtranslate takes one text a call, and knows no beams.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

from tformer_deploy.base.processes import Process, in_turn, serve

ROOT = Path(__file__).parents[1]
THEIRS, BERGAMOT, A_LINE, BATCHES = "fxtranslate", "bergamot", "a line at a time", "in batches"


def main() -> None:
    """Take turns, print the medians, and write the result."""
    parser = argparse.ArgumentParser(prog="benchmarks.students", description=__doc__)
    parser.add_argument("bundle", type=Path, help="of the imported student, with its lists: tformer shortlist --marian")
    parser.add_argument(
        "--student", type=Path, required=True, help="folder with model.*.bin, vocab.*.spm, lex.*.s2t.bin"
    )
    parser.add_argument("--text", type=Path, required=True, help="lines to translate")
    parser.add_argument("--python", default=sys.executable, help="of an environment that has fxtranslate")
    parser.add_argument("--node-modules", type=Path, help="folder with @browsermt/bergamot-translator, from npm")
    parser.add_argument("--variant", default="native-int8")
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--core", type=int, default=0, help="that all sides run on")
    parser.add_argument("--program", type=Path, help="tformer-cpp, to send it a line at a time")
    parser.add_argument("--sent", type=Path, help="the lines for --program")
    parser.add_argument("--machine", default="", help="short name for the file of results; without it none is written")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        os.sched_setaffinity(0, {options.core})
        serve(Theirs(options.student) if options.only == THEIRS else Ours(options.bundle, options.only))
        return
    lines = options.text.read_text(encoding="utf-8").splitlines()[: options.lines]
    workers = start(options)
    try:
        result = {"rounds": options.rounds, "lines": len(lines), **measure(workers, lines, options.rounds)}
        result["versions"] = {side: worker.ask("versions") for side, worker in workers.items()}
    finally:
        for worker in workers.values():
            worker.end(kill=True)
    if options.program and options.sent:
        result["milliseconds"] = latencies(options)
    if options.machine:
        path = ROOT / f"benchmarks/results/{date.today()}-{options.machine}-students.json"
        path.write_text(json.dumps(result, indent=2) + "\n")


def start(options: argparse.Namespace) -> dict[str, Process]:
    """All sides."""
    arguments = [str(options.bundle.resolve()), "--student", str(options.student.resolve())]
    arguments += ["--text", str(options.text.resolve()), "--core", str(options.core)]
    other = str(Path(shutil.which(options.python) or options.python).absolute())  # not resolved: venvs are links
    sides = {
        side: Process(side, [python, "-m", "benchmarks.students", *arguments, "--only", side], cwd=ROOT)
        for side, python in ((THEIRS, other), (options.variant, sys.executable))
    }
    if options.node_modules:
        words = [
            str(each.resolve()) for each in (ROOT / "benchmarks/bergamot.mjs", options.student, options.node_modules)
        ]
        sides[BERGAMOT] = Process(BERGAMOT, ["taskset", "-c", str(options.core), "node", *words])
    return sides


class Theirs:
    """fxtranslate with its own list."""

    def __init__(self, student: Path) -> None:
        from fxtranslate import Translator  # type: ignore[import-not-found]

        model, vocab, lists = (
            next(student.glob(name)).read_bytes() for name in ("model.*.bin", "vocab.*.spm", "lex.*.s2t.bin")
        )
        self.translator: Any = Translator(model, vocab, vocab, lists)

    def versions(self) -> dict[str, str]:
        """Of what runs."""
        from importlib.metadata import version

        return {"fxtranslate": version("fxtranslate"), "backend": self.translator.backend()}

    def run(self, lines: list[str], batches: bool) -> dict[str, Any]:
        """Wall-clock and processor's seconds, and the texts."""
        return timed(lambda: [str(self.translator.translate(line)).strip() for line in lines])


class Ours:
    """The bundle on the CPU engine."""

    def __init__(self, bundle: Path, variant: str) -> None:
        from tformer_deploy import load

        self.translator = load(bundle, "native", variant=variant, threads=1, workers=1, shortlist=True)

    def versions(self) -> dict[str, str]:
        """See `Theirs.versions`."""
        from tformer_deploy.check.gate import machine

        return machine()

    def run(self, lines: list[str], batches: bool) -> dict[str, Any]:
        """See `Theirs.run`."""
        translate = self.translator.translate
        if batches:
            return timed(lambda: [each.text for each in translate(lines)])
        return timed(lambda: [translate([line])[0].text for line in lines])


def latencies(options: argparse.Namespace) -> list[float]:
    """Means over the lines, one a round."""
    lines = options.sent.read_text(encoding="utf-8").splitlines()
    command = [options.program, "translate", options.bundle, "--backend", "native", "--variant", options.variant]
    found = []
    with subprocess.Popen(
        [*command, "--shortlist", "--threads", "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        preexec_fn=lambda: os.sched_setaffinity(0, {options.core}),
    ) as process:
        assert process.stdin and process.stdout
        for _ in range(options.rounds + 1):  # the first one warms it up
            start = time.perf_counter()
            for line in lines:
                process.stdin.write(f"{line}\n".encode())
                process.stdout.readline()
            found.append((time.perf_counter() - start) / len(lines) * 1e3)
        process.stdin.close()
    shown = ", ".join(f"{each:.2f}" for each in found[1:])
    print(f"a line in, a line out: {shown} ms, {len(lines)} lines")
    return found[1:]


def timed(work: Any) -> dict[str, Any]:
    """See `Theirs.run`."""
    start = time.perf_counter(), time.process_time()
    outputs = work()
    return {"wall": time.perf_counter() - start[0], "cpu": time.process_time() - start[1], "outputs": outputs}


def measure(workers: dict[str, Process], lines: list[str], rounds: int) -> dict[str, Any]:
    """Lines a second of all sides, and how alike their texts are. Ratios are medians of those within a round."""
    import sacrebleu

    for worker in workers.values():
        worker.ask("run", lines=lines[:20], batches=False)
    ways = [(side, batches) for side in workers for batches in (False, True) if (side, batches) != (THEIRS, True)]
    turns: dict[tuple[str, bool], list[dict[str, Any]]] = {way: [] for way in ways}
    for number in range(rounds):
        for side, batches in in_turn(ways, number):
            turns[side, batches].append(workers[side].ask("run", lines=lines, batches=batches))
    result: dict[str, Any] = {}
    theirs, expected = turns[THEIRS, False], turns[THEIRS, False][0]["outputs"]
    for (side, batches), found in turns.items():
        name, outputs = f"{side}, {BATCHES if batches else A_LINE}", found[0]["outputs"]
        result[name] = {
            "lines_per_second": [len(lines) / turn["wall"] for turn in found],
            "times_as_fast": {
                clock: statistics.median(a[clock] / b[clock] for a, b in zip(theirs, found, strict=True))
                for clock in ("wall", "cpu")
            },
            "equal": sum(a == b for a, b in zip(expected, outputs, strict=True)),
            "bleu": sacrebleu.corpus_bleu(outputs, [expected]).score,
        }
        times, each = result[name]["times_as_fast"], result[name]
        print(
            f"{name}: {statistics.median(each['lines_per_second']):.0f} lines/s, x{times['wall']:.2f} by wall time, "
            f"x{times['cpu']:.2f} by CPU time; {each['equal']} of {len(lines)} texts equal, BLEU {each['bleu']:.1f}",
            flush=True,
        )
    return result


if __name__ == "__main__":
    main()
