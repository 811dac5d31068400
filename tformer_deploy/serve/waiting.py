"""From requests to lines and back: submit texts, wait for all of them, or for their pieces, while a client is there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.types import Receive

from ..base.errors import ConfigError, TformerError
from ..translate.scheduler import Cancelled, Line
from ..translate.translator import Result
from .models import Model
from .texts import Outcome, Pair, cancel, check_busy, check_count, naming, submit_all

T = TypeVar("T")
SHORT = 2000
"""Characters of a request that are tokenized at once: less than a millisecond."""


class Caller(Protocol):
    """Who waits for an answer: a `Request`."""

    @property
    def receive(self) -> Receive:
        """What a client says further: that it goes away."""


async def translate_all(
    request: Caller, model: Model, pairs: Sequence[Pair], decoding: Mapping[str, Any]
) -> list[Outcome]:
    """The result or the error of each text. Raises errors that concern all: wrong options, a full queue."""
    check_count(len(pairs), model)
    model.scheduler.check_room()  # before any other work: a server that has too much must refuse quickly
    due = time.monotonic() + model.caps.seconds
    letters = sum(len(text) + len(prefix) for text, prefix in pairs)
    lines = await _submitted(lambda: submit_all(model, pairs, decoding, due), cancel, letters)
    outcomes = await _outcomes(request, lines)
    check_busy(outcomes)
    return outcomes


async def translate_through(
    request: Caller, models: Sequence[Model], pairs: Sequence[Pair], decoding: Mapping[str, Any]
) -> list[Outcome]:
    """Like `translate_all`, through several models: each translates the best outputs of the one before it.

    Prefixes and options are for the last model; those before it follow their own. Errors name the model.
    """
    *_, last = models
    if len(models) == 1:
        return await translate_all(request, last, pairs, decoding)
    check_pivot(models, decoding)
    ended: dict[int, Outcome] = {}
    texts = {number: text for number, (text, _) in enumerate(pairs)}
    for model in models:
        asked = [(text, pairs[number][1] if model is last else "") for number, text in texts.items()]
        outcomes = await translate_all(request, model, asked, decoding if model is last else {}) if asked else []
        named = [naming(model.name, each) if isinstance(each, BaseException) else each for each in outcomes]
        ended |= zip(texts, named, strict=True)
        texts = {number: each.text for number, each in ended.items() if isinstance(each, Result)}
    return [ended[number] for number in range(len(pairs))]


async def translate_lines(
    request: Caller, models: Sequence[Model], texts: Sequence[str], decoding: Mapping[str, Any]
) -> list[list[Result]]:
    """The results of the lines of each text; a line is translated by itself. Raises the first error."""
    lines = [text.split("\n") for text in texts]
    pairs = [(line, "") for each in lines for line in each]
    results = []
    for outcome in await translate_through(request, models, pairs, decoding):
        if isinstance(outcome, BaseException):
            raise outcome
        results.append(outcome)
    ended = iter(results)
    return [[next(ended) for _ in each] for each in lines]


def check_pivot(models: Sequence[Model], decoding: Mapping[str, Any]) -> None:
    """Raise errors of options, before the first of several models runs."""
    *_, last = models
    asked = last.capped(decoding)
    if len(models) > 1 and last.translator.asking(**asked).options.align:
        through = ", ".join(model.name for model in models)
        raise ConfigError(f"align: positions would be those of a text between {through}: ask each model by its name")


async def _submitted(submit: Callable[[], T], give_up: Callable[[T], None], letters: int) -> T:
    """Queue lines: short ones at once, long ones in a thread, as they take a while to tokenize.

    They are given up if the task that waits for that is cancelled.
    """
    if letters <= SHORT:
        return submit()
    queued = asyncio.ensure_future(run_in_threadpool(submit))
    try:
        return await asyncio.shield(queued)
    except asyncio.CancelledError:
        queued.add_done_callback(lambda done: None if done.exception() else give_up(done.result()))
        raise


async def _outcomes(request: Caller, lines: Sequence[Line | TformerError]) -> list[Outcome]:
    """Wait for all lines; they are cancelled if the client goes away."""
    submitted = [line for line in lines if isinstance(line, Line)]
    results = asyncio.gather(*(asyncio.wrap_future(line.future) for line in submitted), return_exceptions=True)
    left = asyncio.create_task(_gone(request))
    first: set[asyncio.Future[Any]] = {results, left}
    try:
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if not results.done():
            raise Cancelled("the client has gone away")
        ended = iter(results.result())
        return [next(ended) if isinstance(line, Line) else line for line in lines]
    finally:
        left.cancel()
        cancel(lines)


async def _gone(request: Caller) -> None:
    """Wait until the client has gone away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Stream:
    """The pieces of one text as they come, then its outcome. Close it: a line that nobody reads is cancelled."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[str | Outcome] = asyncio.Queue()
        self._line: Line | None = None

    @classmethod
    async def open(cls, model: Model, pair: Pair, decoding: Mapping[str, Any]) -> Stream:
        """Submit a text. Raises its error if that is known at once."""
        model.scheduler.check_room()
        stream, loop = cls(), asyncio.get_running_loop()

        def put(item: str | Outcome) -> None:
            loop.call_soon_threadsafe(stream._queue.put_nowait, item)

        letters = sum(map(len, pair))
        stream._line = await _submitted(lambda: model.submit(*pair, decoding, put), Line.cancel, letters)
        stream._line.future.add_done_callback(lambda future: put(future.exception() or future.result()))
        return stream

    async def items(self) -> AsyncGenerator[str | Outcome]:
        """Pieces, then the result or the error."""
        try:
            while True:
                item = await self._queue.get()
                yield item
                if not isinstance(item, str):
                    return
        finally:
            assert self._line
            self._line.cancel()


async def stream_through(request: Caller, models: Sequence[Model], pair: Pair, decoding: Mapping[str, Any]) -> Stream:
    """The pieces of one text through several models: those of the last. Raises the errors of those before it."""
    *before, last = models
    text, prefix = pair
    if before:
        check_pivot(models, decoding)
        [outcome] = await translate_through(request, before, [(text, "")], {})
        if isinstance(outcome, BaseException):
            raise naming(before[-1].name, outcome)
        text = outcome.text
    return await Stream.open(last, (text, prefix), decoding)
