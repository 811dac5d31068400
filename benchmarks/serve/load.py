"""An open-loop load: requests are sent at random moments, whether or not earlier ones have been answered.

The client shares the machine with the server, so it is as light as it can be: connections that are kept, no library
but httptools for what comes back.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httptools

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


class Connection(asyncio.Protocol):
    """Sends one request after the other."""

    def __init__(self) -> None:
        self.answer: Answer | None = None
        self.due, self.content = 0.0, b""
        self.done: asyncio.Future[None] | None = None
        self.parser = httptools.HttpResponseParser(self)
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self.parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """A request that waits is lost."""
        if self.done and not self.done.done():
            self.done.set_result(None)

    def on_body(self, body: bytes) -> None:
        """A part of an answer."""
        assert self.answer
        self.content += body
        if self.answer.first == PATIENCE and PIECE in self.content:
            self.answer.first = time.perf_counter() - self.due

    def on_message_complete(self) -> None:
        """An answer is whole."""
        assert self.answer and self.done
        self.answer.status, self.answer.seconds = self.parser.get_status_code(), time.perf_counter() - self.due
        self.answer.first = min(self.answer.first, self.answer.seconds)  # an empty output has no piece
        if not self.done.done():
            self.done.set_result(None)

    async def ask(self, request: bytes, due: float, answer: Answer) -> bool:
        """Fill in what becomes of a request. Returns whether the connection can be used again."""
        self.answer, self.due, self.content = answer, due, b""
        self.done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        try:
            await asyncio.wait_for(self.done, PATIENCE)
        except TimeoutError:
            self.transport.close()
            return False
        if answer.status == 200:
            answer.text = _text(self.content)
        return bool(answer.status) and self.parser.should_keep_alive() and not self.transport.is_closing()


def _text(content: bytes) -> str:
    """The text of an answer, or of a stream's last event."""
    found = json.loads(content.rstrip().rpartition(b"\n")[2].removeprefix(DATA))
    return str((found["results"][0] if "results" in found else found).get("text", ""))


async def send(
    url: str, bodies: Sequence[dict[str, Any]], rate: float, seconds: float, seed: int
) -> tuple[list[Answer], float]:
    """Send `rate` requests a second on average (Poisson). Returns their answers, and how late the latest was sent."""
    rng, due, late, waiting = random.Random(seed), 0.0, 0.0, []
    idle: list[Connection] = []
    place = urlsplit(url)
    requests = [_request(place.path, body) for body in bodies]

    async def ask(request: bytes, due: float, answer: Answer) -> Answer:
        try:
            connection = idle.pop() if idle else await _connect(str(place.hostname), int(place.port or 80))
            if await connection.ask(request, due, answer):
                idle.append(connection)
        except OSError:
            pass
        return answer

    start = time.perf_counter()
    while (due := due + rng.expovariate(rate)) < seconds:
        if (early := start + due - time.perf_counter()) > 0:
            await asyncio.sleep(early)
        late = max(late, time.perf_counter() - start - due)
        number = rng.randrange(len(bodies))
        waiting.append(asyncio.create_task(ask(requests[number], start + due, Answer(number))))
    answers = await asyncio.gather(*waiting)
    for connection in idle:
        connection.transport.close()
    return list(answers), late


async def _connect(host: str, port: int) -> Connection:
    _, connection = await asyncio.get_running_loop().create_connection(Connection, host, port)
    return connection


def _request(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content
