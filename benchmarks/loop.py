"""Time one translation run from inside: target tokens per second, and the share of time outside the engine's calls."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from tformer_deploy import load
from tformer_deploy.base.lines import read_lines

WARM_UP_LINES = 50


def main() -> None:
    """Translate a file once to warm up (in part) and once for the clock; prints JSON."""
    parser = argparse.ArgumentParser(prog="benchmarks.loop", description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--src", type=Path, required=True)
    parser.add_argument("--backend", default="ort")
    parser.add_argument("--beams", type=int, default=1)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--batch-tokens", type=int, default=0)
    options = parser.parse_args()
    lines = read_lines(options.src)
    asked = {"threads": options.threads, "beams": options.beams, "batch_tokens": options.batch_tokens}
    with load(options.bundle, options.backend, **asked) as translator:
        translator.translate(lines[:WARM_UP_LINES])
        inside = watch(translator.engine)
        start = time.perf_counter()
        results = translator.translate(lines)
        seconds = time.perf_counter() - start
    tokens = sum(len(result.ids) + result.finished for result in results)
    print(
        json.dumps(
            {
                "seconds": seconds,
                "tokens": tokens,
                "tokens_per_second": tokens / seconds,
                "share_outside_engine": 1 - inside["seconds"] / seconds,
            }
        )
    )


def watch(engine: Any) -> dict[str, float]:
    """Add up the wall-clock time of the engine's calls from now on."""
    found = {"seconds": 0.0}

    def timed(call: Any) -> Any:
        def run(*arguments: Any, **names: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*arguments, **names)
            finally:
                found["seconds"] += time.perf_counter() - start

        return run

    for name in ("encode", "step", "reorder"):
        setattr(engine, name, timed(getattr(engine, name)))
    return found


if __name__ == "__main__":
    main()
