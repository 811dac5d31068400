"""An open-loop load: requests are sent at random moments, whether or not earlier ones have been answered."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

PATIENCE = 30.0
"""Seconds after which a request counts as lost."""
PIECE, DATA = b"event: piece", b"data: "


@dataclass
class Answer:
    """What became of a request. Seconds count from when it was due, so that a late client hides nothing."""

    number: int
    """Of the body."""
    status: int = 0
    """0: lost."""
    seconds: float = PATIENCE
    first: float = PATIENCE
    """To the first piece of a stream."""
    text: str = ""


async def send(
    url: str, bodies: Sequence[dict[str, Any]], rate: float, seconds: float, seed: int
) -> tuple[list[Answer], float]:
    """Send `rate` requests a second on average (Poisson). Returns their answers, and how late the latest was sent."""
    rng, due, late, waiting = random.Random(seed), 0.0, 0.0, []
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(PATIENCE)
    ) as session:
        start = time.perf_counter()
        while (due := due + rng.expovariate(rate)) < seconds:
            if (early := start + due - time.perf_counter()) > 0:
                await asyncio.sleep(early)
            late = max(late, time.perf_counter() - start - due)
            number = rng.randrange(len(bodies))
            waiting.append(asyncio.create_task(_ask(session, url, bodies[number], start + due, Answer(number))))
        return list(await asyncio.gather(*waiting)), late


async def _ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any], due: float, answer: Answer) -> Answer:
    try:
        async with session.post(url, json=body) as reply:
            content = b""
            async for line in reply.content:
                if line.startswith(PIECE) and answer.first == PATIENCE:
                    answer.first = time.perf_counter() - due
                content = line.removeprefix(DATA) if line.startswith(DATA) else content + line
            answer.status, answer.seconds = reply.status, time.perf_counter() - due
            answer.first = min(answer.first, answer.seconds)  # an empty output has no piece
        found = json.loads(content)
        answer.text = (found["results"][0] if "results" in found else found).get("text", "")
    except (aiohttp.ClientError, TimeoutError, json.JSONDecodeError):
        pass
    return answer
