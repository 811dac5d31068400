"""Time a graph of layout one-file beside the two graphs of a bundle under our loop: in turns, a process each."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import onnxruntime as ort

from tformer_deploy import DecodeOptions, load
from tformer_deploy.base.lines import read_lines
from tformer_deploy.decoding import decode
from tformer_deploy.translate.batches import make_batch

Outputs = list[list[int]]


def main() -> None:
    """Print the processor's seconds of every turn, and the ratio of the medians: above 1 the one file is faster."""
    parser = argparse.ArgumentParser(prog="benchmarks.one_file", description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--src", type=Path, required=True)
    parser.add_argument("--beams", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lines", type=int, default=200)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", choices=["file", "loop"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(run(options)))
        return
    command = [sys.executable, "-m", "benchmarks.one_file", *sys.argv[1:], "--only"]
    turns = [
        {only: json.loads(subprocess.check_output([*command, only])) for only in ("file", "loop")}
        for _ in range(options.turns)
    ]
    assert all(turn["file"]["ids"] == turn["loop"]["ids"] for turn in turns), "tokens differ"
    seconds = {only: [turn[only]["seconds"] for turn in turns] for only in ("file", "loop")}
    ratio = median(seconds["loop"]) / median(seconds["file"])
    print(json.dumps({**seconds, "ratio": ratio}))


def run(options: argparse.Namespace) -> dict[str, object]:
    """One turn: a batch to warm up, then all of them, the least seconds of the processor of three times."""
    lines = read_lines(options.src)[: options.lines]
    with load(options.bundle, "ort", threads=options.threads) as translator:
        sources = [translator.tokenizers.source_ids(line) for line in lines]
        batches = [sources[i : i + options.batch] for i in range(0, len(sources), options.batch)]
        pad, asked = translator.engine.config.pad_id, DecodeOptions(beams=options.beams)

        def looped(batch: Sequence[list[int]]) -> Outputs:
            return [best.ids for best, *_ in decode(translator.engine, make_batch(list(batch), pad), asked)]

        generate = looped if options.only == "loop" else one_file(options, pad)
        generate(batches[0])
        times = []
        for _ in range(3):
            start = time.process_time()
            ids = [each for batch in batches for each in generate(batch)]
            times.append(time.process_time() - start)
    return {"seconds": min(times), "ids": ids}


def one_file(options: argparse.Namespace, pad: int) -> Callable[[Sequence[list[int]]], Outputs]:
    """The graph as a function; what is not asked for is fed as its metadata say."""
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = options.threads
    session = ort.InferenceSession(options.file, settings)
    about = json.loads(session.get_modelmeta().custom_metadata_map["tformer.generate"])
    feed = {name: np.array(each["value"], each["type"]) for name, each in about["inputs"].items()}
    feed["beams"][:] = options.beams

    def generate(batch: Sequence[list[int]]) -> Outputs:
        made = make_batch(list(batch), pad)
        sources = {"src_ids": made.src_ids.astype(np.int32), "src_lengths": made.src_lengths.astype(np.int32)}
        ids, lengths = session.run(["ids", "lengths"], {**sources, **feed})
        return [row[0, :length].tolist() for row, length in zip(ids, lengths[:, 0], strict=True)]

    return generate


if __name__ == "__main__":
    main()
