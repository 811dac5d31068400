"""Soak `tformer serve`: random texts, options, streams and cancels for minutes; every answer is compared.

Ends with 1 where an answer is wrong or lost, where lines stay in the server, or where its memory grows.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tformer_deploy import load
from tformer_deploy.base.errors import EngineError, TformerError
from tformer_deploy.base.lines import read_lines
from tformer_deploy.serve.protocols.own import shown
from tformer_deploy.translate.translator import Translator

from .__main__ import Side, memory, note

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"beams": 4},
    {"beams": 3, "n_best": 3},
    {"sampling": True, "seed": 5},
    {"max_tokens": 5},
    {"beams": 2, "min_tokens": 4},
)
KINDS = {"plain": 50, "stream": 20, "list": 10, "leave": 15, "wrong": 5}
"""What a request does, and how often of 100. `leave`: the client goes away; `wrong`: the server must refuse it."""
PATIENCE, LEAVES_WITHIN, KEEPS_SECONDS = 90.0, 0.2, 3.0
BURST = 1500
"""More than wait and run in a server at most."""
CLOSE_TO = 1e-3
"""Of a score: batches of other sizes sum floats in another order."""
LINES_LEFT = ("tformer_waiting_lines", "tformer_running_lines")
SETTLED_SECONDS, SAMPLE_SECONDS, COURSE = 20.0, 1.0, 40

Expected = dict[tuple[str, int], dict[str, Any]]
"""The result of each text with each of `OPTIONS`."""


@dataclass(frozen=True)
class Load:
    """What is sent."""

    url: str
    requests: int
    seconds: float
    expected: Expected
    seed: int = 1


class Soak:
    """Sends requests at random moments, and counts what became of them."""

    def __init__(self, load: Load) -> None:
        self.load, self.rng = load, random.Random(load.seed)
        self.texts = sorted({text for text, _ in load.expected})
        self.ended: Counter[str] = Counter()
        """By kind, and what became of it."""
        self.faults: list[str] = []
        self.seconds: list[float] = []

    async def run(self) -> None:
        """Send all requests, and wait for their answers: a burst, then at random moments (Poisson arrivals)."""
        burst = min(BURST, self.load.requests // 10)  # after which buffers are as large as they get
        rate, due = (self.load.requests - burst) / self.load.seconds, 0.0
        waiting = set[asyncio.Task[None]]()
        # Less than the server's own limit: a connection that it closes just as a request is sent is nobody's fault.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPS_SECONDS)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(PATIENCE)) as session:
            start = time.perf_counter()
            for number in range(self.load.requests):
                due += self.rng.expovariate(rate) if number >= burst else 0.0
                if (early := start + due - time.perf_counter()) > 0:
                    await asyncio.sleep(early)
                task = asyncio.create_task(self._ask(session, start + due))
                waiting.add(task)
                task.add_done_callback(waiting.discard)
            await asyncio.gather(*waiting)

    async def _ask(self, session: aiohttp.ClientSession, due: float) -> None:
        [kind] = self.rng.choices(list(KINDS), list(KINDS.values()))
        number = self.rng.randrange(len(OPTIONS))
        texts = self.rng.choices(self.texts, k=self.rng.randint(2, 4) if kind == "list" else 1)
        stream = kind == "stream" or (kind == "leave" and self.rng.random() < 0.5)
        body: dict[str, Any] = {"text": texts if kind == "list" else texts[0], "options": OPTIONS[number]}
        body |= {"stream": True} if stream else {}
        body |= {"txt": 1} if kind == "wrong" else {}
        headers = {"Connection": "close"} if self.rng.random() < 0.1 else {}
        leaves = self.rng.random() * LEAVES_WITHIN if kind == "leave" else PATIENCE
        try:
            async with asyncio.timeout(leaves), session.post(self.load.url, json=body, headers=headers) as reply:
                content = await reply.read()
            fault = self._fault(kind, reply.status, content, texts, number, stream)
            outcome = fault and ("refused" if reply.status == 429 else "wrong")
        except TimeoutError:
            fault = "" if kind == "leave" else f"no answer within {PATIENCE:g} s"
            outcome = "left" if kind == "leave" else "lost"
        except aiohttp.ClientError as error:
            fault, outcome = f"{type(error).__name__}: {error}", "lost"
        self.ended[f"{kind} {outcome or 'right'}"] += 1
        self.seconds.append(time.perf_counter() - due)
        if fault and outcome != "refused":
            self.faults.append(f"{kind} {body}: {fault}")

    def _fault(self, kind: str, status: int, content: bytes, texts: Sequence[str], number: int, stream: bool) -> str:
        """What is wrong with an answer; empty: nothing."""
        if status != (400 if kind == "wrong" else 200):
            return f"status {status}: {content[:200]!r}"
        if kind == "wrong":
            return ""
        try:
            found = streamed(content) if stream else json.loads(content)["results"]
        except (ValueError, LookupError) as error:
            return f"{type(error).__name__}: {error}: {content[:200]!r}"
        expected = [self.load.expected[text, number] for text in texts]
        refused = [isinstance(each, dict) and each.get("status") == 429 for each in found]  # by a full queue
        fine = len(found) == len(expected) and all(
            was or same(*pair) for was, *pair in zip(refused, found, expected, strict=True)
        )
        return "" if fine else f"{found} and not {expected}"


def streamed(content: bytes) -> list[dict[str, Any]]:
    """The result of a stream. Raises ValueError where its pieces are not its text, or its end is missing."""
    events = [each.split("\n", 1) for each in content.decode().split("\n\n") if each]
    *pieces, (last, result) = [(name, json.loads(data.removeprefix("data: "))) for name, data in events]
    if last != "event: result" or "".join(piece["text"] for _, piece in pieces) != result["text"]:
        raise ValueError("pieces that are not the result")
    return [result]


def same(found: Any, expected: Any) -> bool:
    """Whether values are equal, numbers with fractions nearly so."""
    if isinstance(expected, dict):
        return isinstance(found, dict) and all(same(found.get(name), value) for name, value in expected.items())
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return abs(found - expected) <= CLOSE_TO if isinstance(expected, float) else bool(found == expected)


def expect(translator: Translator, texts: Sequence[str], most_tokens: int) -> Expected:
    """The result of each text with each of `OPTIONS`, alone, as the server states it."""
    found = {}
    for (number, options), text in itertools.product(enumerate(OPTIONS), texts):
        [result] = translator.translate([text], **{"max_tokens": most_tokens, **options})
        found[text, number] = shown(result)
    return found


class Memory:
    """Samples a process group's resident memory while the block runs."""

    def __init__(self, group: int) -> None:
        self.group = group
        self.samples: list[tuple[float, float]] = []
        """Seconds and MiB."""

    async def __aenter__(self) -> Memory:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            self.samples.append((time.monotonic(), await asyncio.to_thread(memory, self.group)))
            await asyncio.sleep(SAMPLE_SECONDS)

    def growth(self) -> float:
        """MiB that the second half grows, by its slope."""
        times, sizes = zip(*self.samples[len(self.samples) // 2 :], strict=True)
        return float(statistics.linear_regression(times, sizes).slope * (times[-1] - times[0]))


async def left(url: str) -> dict[str, float]:
    """Lines that wait or run in the server when all requests have ended; asked again for a while, as lines end."""
    end = time.monotonic() + SETTLED_SECONDS
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{url.partition('/v1/')[0]}/metrics") as reply:
                text = await reply.text()
            found = dict.fromkeys(LINES_LEFT, 0.0)
            for name, value in _numbers(text):
                found[name] += value
            if not any(found.values()) or time.monotonic() > end:
                return found
            await asyncio.sleep(0.2)


def _numbers(text: str) -> Iterator[tuple[str, float]]:
    for line in text.splitlines():
        name = line.partition("{")[0]
        if name in LINES_LEFT:
            yield name, float(line.rpartition(" ")[2])


async def run(load: Load, group: int) -> dict[str, Any]:
    """Send the load to a server, and report."""
    soak, watched = Soak(load), Memory(group)
    async with watched:
        await soak.run()
    sizes = [size for _, size in watched.samples]
    growth = watched.growth()
    cuts = statistics.quantiles(soak.seconds, n=100, method="inclusive")
    return {
        "requests": sum(soak.ended.values()),
        "seconds": watched.samples[-1][0] - watched.samples[0][0],
        "ended": dict(sorted(soak.ended.items())),
        "faults": len(soak.faults),
        "first_faults": soak.faults[:5],
        "left": await left(load.url),
        "p50_ms": 1000 * cuts[49],
        "p99_ms": 1000 * cuts[98],
        "memory_mib": {"first": sizes[0], "middle": sizes[len(sizes) // 2], "last": sizes[-1], "most": max(sizes)},
        "memory_course_mib": [round(size, 1) for size in sizes[:: max(1, len(sizes) // COURSE)]],
        "growth_mib": growth,
        "growth_kib_per_request": 1024 * growth / (load.requests / 2),
    }


def main() -> None:
    """Start a server, soak it, and write what was found as JSON."""
    options = parser().parse_args()
    texts = [line for line in dict.fromkeys(read_lines(options.src)) if line.strip()]
    limits = options.out.with_suffix(".limits.toml")
    limits.write_text(f"max_tokens = {options.max_tokens}\n")
    asked: dict[str, Any] = {"variant": options.variant} if options.variant else {}
    with load(options.bundle, options.backend, **asked) as translator:
        expected = expect(translator, texts, options.max_tokens)
    command = [*SERVER, f"m={options.bundle}", "--backend", options.backend, "--limits", str(limits)]
    command += ["--variant", options.variant] if options.variant else []
    command += ["--workers", str(options.workers), "--threads", str(options.threads)]
    seconds = 60 * options.minutes
    with Side("tformer serve", command, "/v1/translate").running() as (url, group):
        report = asyncio.run(run(Load(url, options.requests, seconds, expected), group))
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    note(json.dumps(report, indent=1))
    if report["faults"] or any(report["left"].values()):
        raise EngineError(f"{report['faults']} answers are wrong or lost, lines left: {report['left']}")
    if report["growth_mib"] > options.most_growth:
        raise EngineError(f"memory grew {report['growth_mib']:.1f} MiB in the second half: {options.out} says more")


SERVER = ["-m", "tformer_deploy", "serve"]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.serve.soak", description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--backend", default="native")
    parser.add_argument("--variant", default="", help="of the bundle; none: the backend's default")
    parser.add_argument("--src", type=Path, required=True, help="texts, one a line, which are drawn at random")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--most-growth", type=float, default=8.0, help="MiB of the second half")
    parser.add_argument("--out", type=Path, required=True, help="a .json file")
    return parser


if __name__ == "__main__":
    try:
        main()
    except (TformerError, OSError) as error:
        sys.exit(f"error: {error}")
