"""Latency and goodput of HTTP servers under Poisson arrivals, each in turn at each rate, on one machine.

Sides: `tformer serve` (continuous batching); our engine, and CTranslate2, behind mosec, which batches whole requests in
windows of time. CTranslate2 first gets its best window: the one with the lowest 95th percentile at a middle rate.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import uvloop

from tformer_deploy import load
from tformer_deploy.base.errors import EngineError, TformerError
from tformer_deploy.base.lines import read_lines

from .load import PATIENCE, send

GOOD_SECONDS = 0.3
"""An answer after more than this is no goodput."""
START_SECONDS, SETTLE_SECONDS, MOST_LATE_SECONDS, WINDOW_SIZE = 120, 3.0, 0.5, 32
WINDOWS_MS = (1, 5, 20)
SHAPES = ((2, 1), (1, 2))
"""Threads and processes of CTranslate2, for two cores."""


@dataclass(frozen=True)
class Side:
    """A server."""

    name: str
    command: Sequence[str]
    path: str
    env: str = ""
    """The value of WINDOW."""

    @contextlib.contextmanager
    def running(self) -> Iterator[tuple[str, int]]:
        """Start it; the URL of its translations, and its process group."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with tempfile.TemporaryFile() as said:
            server = subprocess.Popen(
                ["nice", "-n", "10", sys.executable, *self.command, "--port", str(port)],  # a client is elsewhere
                env={**os.environ, "WINDOW": self.env},
                stdout=said,
                stderr=said,
                process_group=0,
            )
            try:
                url = f"http://127.0.0.1:{port}{self.path}"
                self._wait(server, url, said)
                yield url, server.pid
            finally:
                for number in (signal.SIGTERM, signal.SIGKILL):
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(server.pid, number)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        server.wait(10)

    def _wait(self, server: subprocess.Popen[bytes], url: str, said: IO[bytes]) -> None:
        deadline = time.monotonic() + START_SECONDS
        request = urllib.request.Request(url, b'{"text": "w4"}', {"Content-Type": "application/json"})
        while time.monotonic() < deadline:
            if server.poll() is not None:
                said.seek(0)
                last = (said.read().decode(errors="replace").split("\n")[-2:] or [""])[0]
                raise EngineError(f"{self.name} ended with {server.returncode}: {last}")
            with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=30) as answer:
                answer.read()
                return
            time.sleep(0.1)
        raise EngineError(f"{self.name} did not answer within {START_SECONDS} s")


def main() -> None:
    """Measure, and write what was found as JSON."""
    command = parser()
    options = command.parse_args()
    if options.stream and options.ctranslate2:
        command.error("--stream: only tformer serve streams: leave --ctranslate2 out")
    lines = read_lines(options.src)
    asked: dict[str, Any] = {"stream": True} if options.stream else {}
    bodies = [{"text": line, **asked} for line in lines if line.strip()]
    served = [ours(options)]
    with load(options.bundle, "native", variant=options.variant, max_tokens=options.max_tokens) as translator:
        expected = [result.text for result in translator.translate([body["text"] for body in bodies])]
    trials: list[dict[str, Any]] = []
    if options.ctranslate2:
        trial = options.rates[len(options.rates) // 2]
        tried = [window(options, "ctranslate2", ms, *shape) for ms in WINDOWS_MS for shape in SHAPES]
        trials = [measure(side, bodies, trial, options.seconds / 2, None) for side in tried]
        best = tried[min(range(len(tried)), key=lambda i: trials[i]["p95_ms"])]
        note(f"the best of CTranslate2's settings at {trial:g} requests a second: {best.name}")
        served += [best, window(options, "tformer", *json_window(best))]
    found: list[dict[str, Any]] = []
    report = {"options": {name: str(value) for name, value in vars(options).items()}, "trials": trials, "points": found}
    for rate in options.rates:
        for side in served:
            texts = expected if side.name.startswith("tformer") else None
            found.append(measure(side, bodies, rate, options.seconds, texts))
            note(shown(found[-1]))
            options.out.write_text(json.dumps(report, indent=1) + "\n")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.serve", description=__doc__)
    parser.add_argument("bundle", type=Path, help="with a variant for native")
    parser.add_argument("--variant", default="native-int8")
    parser.add_argument("--ctranslate2", type=Path, help="folder of benchmarks.peers.to_ctranslate2; needs mosec")
    parser.add_argument("--src", type=Path, required=True, help="texts, one a line, which are drawn at random")
    parser.add_argument("--stream", action="store_true", help="ask tformer serve for streams; without --ctranslate2")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--rates", type=float, nargs="+", default=[5, 10, 20, 40, 80], help="requests a second")
    parser.add_argument("--seconds", type=float, default=20, help="at each rate, for each side")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-queue", type=int, default=1024, help="of tformer serve")
    parser.add_argument("--out", type=Path, required=True, help="a .json file")
    return parser


def ours(options: argparse.Namespace) -> Side:
    """`tformer serve`."""
    limits = options.out.with_suffix(".limits.toml")
    limits.write_text(f"max_tokens = {options.max_tokens}\ntexts = 1\n")
    command = ["-m", "tformer_deploy", "serve", f"m={options.bundle}", "--backend", "native"]
    command += ["--variant", options.variant, "--threads", str(options.threads), "--limits", str(limits)]
    command += ["--max-queue", str(options.max_queue)]
    return Side("tformer serve", command, "/v1/translate")


def window(options: argparse.Namespace, engine: str, wait_ms: int, threads: int, processes: int) -> Side:
    """An engine behind mosec."""
    asked = {
        "engine": engine,
        "bundle": str(options.bundle),
        "backend": "native",
        "variant": options.variant,
        "model": str(options.ctranslate2 / "int8"),
        "threads": threads,
        "processes": processes,
        "batch": WINDOW_SIZE,
        "wait_ms": wait_ms,
        "max_tokens": options.max_tokens,
    }
    name = f"{engine}, windows of {wait_ms} ms, {processes} of {threads} threads"
    command = ["-m", "benchmarks.serve.window", "--timeout", "30000", "--log-level", "warning"]
    return Side(name, command, "/inference", json.dumps(asked))


def json_window(side: Side) -> tuple[int, int, int]:
    """The settings of a side behind mosec."""
    asked = json.loads(side.env)
    return asked["wait_ms"], asked["threads"], asked["processes"]


def measure(
    side: Side, bodies: list[dict[str, Any]], rate: float, seconds: float, expected: list[str] | None
) -> dict[str, Any]:
    """Latencies and goodput of one server at one rate; the first seconds are not counted. What is lost takes PATIENCE.

    Raises EngineError for wrong answers, and where the client sent its requests too late.
    """
    with side.running() as (url, pid):
        uvloop.run(send(url, bodies, rate, SETTLE_SECONDS, 1))
        before = memory(pid)
        answers, late = uvloop.run(send(url, bodies, rate, seconds, 2))
        after = memory(pid)
    if late > MOST_LATE_SECONDS:
        raise EngineError(f"the client sent a request {late:.1f} s late: use lower --rates, or leave it a core")
    good = [answer for answer in answers if answer.status == 200]
    lost = sum(answer.status not in (200, 429) for answer in answers)
    wrong = sum(answer.text != expected[answer.number] for answer in good) if expected else 0
    if wrong:
        raise EngineError(f"{side.name} gave {wrong} wrong answers of {len(good)} at {rate:g} a second")
    refusals = [answer.seconds for answer in answers if answer.status == 429]
    refused = percentiles(refusals) if refusals else {}
    return {
        "side": side.name,
        "rate": rate,
        "requests": len(answers),
        **percentiles([*(answer.seconds for answer in good), *[PATIENCE] * lost]),
        "goodput": sum(answer.seconds <= GOOD_SECONDS for answer in good) / seconds,
        "refused": len(refusals),
        "refused_ms": 1000 * max(refusals, default=0.0),
        "refused_p50_ms": refused.get("p50_ms"),
        "refused_p99_ms": refused.get("p99_ms"),
        "lost": lost,
        "words": statistics.mean([len(answer.text.split()) for answer in good] or [0]),
        "client_late_ms": 1000 * late,
        "first_ms": percentiles([answer.first for answer in good]) if bodies[0].get("stream") else None,
        "memory_mib": [before, after],
        "checked": expected is not None,
    }


def memory(group: int) -> float:
    """Resident memory of all processes of a group, in MiB."""
    listed = subprocess.run(["ps", "-eo", "pgid=,rss="], stdout=subprocess.PIPE, text=True, check=True).stdout
    pairs = (map(int, line.split()) for line in listed.splitlines())
    return sum(size for own, size in pairs if own == group) / 1024


def percentiles(seconds: list[float]) -> dict[str, float]:
    """p50, p95 and p99 in milliseconds; answers that would make two count as lost."""
    cuts = statistics.quantiles([*seconds, *[PATIENCE] * (2 - len(seconds))], n=100, method="inclusive")
    return {f"p{each}_ms": 1000 * cuts[each - 1] for each in (50, 95, 99)}


def shown(point: dict[str, Any]) -> str:
    """A line for people."""
    return (
        f"{point['rate']:>6g}/s  {point['side']:<55} p50 {point['p50_ms']:>8.1f}  p95 {point['p95_ms']:>8.1f}  "
        f"p99 {point['p99_ms']:>8.1f} ms  goodput {point['goodput']:>6.1f}/s  "
        f"refused {point['refused']} within {point['refused_ms']:.0f} ms  lost {point['lost']}  "
        f"{point['words']:.1f} words"
    )


def note(line: str) -> None:
    """Print at once."""
    print(line, flush=True)


if __name__ == "__main__":
    try:
        main()
    except (TformerError, OSError) as error:
        sys.exit(f"error: {error}")
