"""Measure variants with and without a shortlist: quality and speed on a text, or milliseconds a step with random lists.

Sides take turns, each in a process of its own. Exit code 3 where a list costs more BLEU than the variant's tolerance.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from tformer_deploy import load
from tformer_deploy.bundle.manifest import open_bundle
from tformer_deploy.bundle.shortlist import Shortlist, coverage, open_shortlist
from tformer_deploy.engines.ort.in_place import InPlaceEngine
from tformer_deploy.train.data import read_parallel
from tformer_deploy.train.metrics import corpus_bleu

SOURCE, STEPS, DECODES, WARM_UP = 20, 32, 10, 2
"""Tokens of a source; steps of a decode; decodes on the clock and before it."""


def main() -> None:
    """Take turns, print a line for each variant and size or beam."""
    parser = argparse.ArgumentParser(prog="benchmarks.shortlist", description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--variant", action="append", required=True)
    parser.add_argument("--src", type=Path)
    parser.add_argument("--tgt", type=Path)
    parser.add_argument("--beams", default="1,5")
    parser.add_argument("--listed", type=int, default=0, help="random lists of that many tokens instead of a text")
    parser.add_argument("--batch", default="1,8,32", help="with --listed")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="padded source tokens of a batch, with a text")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is not None:
        side = json.loads(options.side)
        print(json.dumps(steps(options, side) if options.listed else translated(options, side)))
        return
    if not options.listed:
        text = read_parallel(options.src, options.tgt)
        print(f"{options.tgt.name}: {covered(options, text)}")
    failed = False
    for variant in options.variant:
        for size in map(int, (options.batch if options.listed else options.beams).split(",")):
            turns = [(run(variant, False, size), run(variant, True, size)) for _ in range(options.rounds)]
            ratio = statistics.median(short["speed"] / full["speed"] for full, short in turns)
            without, with_list = (statistics.median(turn[i]["speed"] for turn in turns) for i in (0, 1))
            if options.listed:
                print(
                    f"{variant}, batch {size}: {1e3 / without:.2f} ms, {1e3 / with_list:.2f} with a list, x{ratio:.2f}"
                )
                continue
            full, short = (corpus_bleu(turns[0][i]["lines"], text.tgt, lowercase=True) for i in (0, 1))
            same = sum(a == b for a, b in zip(turns[0][0]["lines"], turns[0][1]["lines"], strict=True))
            print(
                f"{variant}, beams {size}: BLEU {full:.2f}, {short:.2f} with lists, {same} of {len(text.src)} lines "
                f"the same; {without:.0f} sentences/s, {with_list:.0f} with lists, x{ratio:.2f}"
            )
            failed |= full - short > open_bundle(options.bundle).variants[variant].tolerance.bleu
    if failed:
        sys.exit(3)


def run(variant: str, shortlist: bool, size: int) -> dict[str, Any]:
    """One side, measured in a process of its own."""
    side = json.dumps({"variant": variant, "shortlist": shortlist, "size": size})
    done = subprocess.run([sys.executable, *sys.argv, "--side", side], capture_output=True, check=True)
    return dict(json.loads(done.stdout))


def covered(options: argparse.Namespace, text: Any) -> str:
    """What the lists have of a text that they were not learned from."""
    bundle = open_bundle(options.bundle)
    tokenizers = bundle.tokenizers()
    both = zip(text.src, text.tgt, strict=True)
    pairs = [(tokenizers.source.encode(a), tokenizers.target.encode(b)) for a, b in both]
    return str(coverage(open_shortlist(bundle, options.variant[0]), pairs, bundle.config.eos_id))


def translated(options: argparse.Namespace, side: dict[str, Any]) -> dict[str, Any]:
    """The translation of a text, and sentences a second."""
    lines = read_parallel(options.src, options.tgt).src
    beams, listed = side["size"], side["shortlist"]
    engine = {"variant": side["variant"], "threads": options.threads, "shortlist": listed}
    engine["batch_tokens"] = options.batch_tokens
    with load(options.bundle, beams=beams, **engine) as translator:
        translator.translate(lines[: len(lines) // 2])
        start = clock(options)
        results = translator.translate(lines)
        seconds = clock(options) - start
    return {"lines": [result.text for result in results], "speed": len(lines) / seconds}


def clock(options: argparse.Namespace) -> float:
    """Seconds; of one thread its CPU time, to which other work on the machine adds least."""
    return time.process_time() if options.threads == 1 else time.perf_counter()


def steps(options: argparse.Namespace, side: dict[str, Any]) -> dict[str, Any]:
    """Steps a second of greedy search, all sentences with the same list; encoder and list are part of the first."""
    bundle, rng = open_bundle(options.bundle), np.random.default_rng(0)
    config, batch = bundle.config, side["size"]
    always = np.sort(rng.choice(config.tgt_vocab, options.listed, replace=False)).astype(np.int32)
    none = np.zeros(config.src_vocab + 1, np.int64), np.empty(0, np.int32)
    shortlist = Shortlist(always, *none, config.tgt_vocab) if side["shortlist"] else None
    times = []
    with InPlaceEngine(bundle, options.threads, side["variant"], shortlist) as engine:
        src_ids = rng.integers(4, config.src_vocab, (batch, SOURCE)).astype(np.int32)
        for _ in range(WARM_UP + DECODES):
            start = clock(options)
            state = engine.encode(src_ids, np.full(batch, SOURCE, np.int32))
            tokens = np.full((batch, 1), config.start_id, np.int32)
            for _ in range(STEPS):
                tokens = np.ascontiguousarray(engine.step(tokens, state).ids[:, :, 0])
                end = clock(options)
                times.append(end - start)
                start = end
    # By place, so that the first step counts as often as it happens; the fastest, as other work on a machine only adds.
    places = np.array(times).reshape(-1, STEPS)[WARM_UP:]
    return {"speed": 1 / float(places.min(axis=0).mean())}


if __name__ == "__main__":
    main()
