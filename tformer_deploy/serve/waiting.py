"""From requests to lines and back: submit texts, wait for all of them, or for their pieces, while a client is there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from copy import copy
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from ..base.errors import ConfigError, TformerError
from ..translate.scheduler import Busy, Cancelled, Line
from ..translate.translator import Result
from .models import Model

Pair = tuple[str, str]
"""A text and how its output begins."""
Outcome = Result | BaseException


async def translate_all(
    request: Request, model: Model, pairs: Sequence[Pair], decoding: Mapping[str, Any]
) -> list[Outcome]:
    """The result or the error of each text. Raises errors that concern all: wrong options, a full queue."""
    check_count(len(pairs), model)
    due = time.monotonic() + model.caps.seconds
    lines = await run_in_threadpool(_submit_all, model, pairs, decoding, due)
    outcomes = await _outcomes(request, lines)
    if isinstance(outcomes[0], Busy) and all(isinstance(outcome, Busy) for outcome in outcomes):
        raise outcomes[0]
    return outcomes


async def translate_through(
    request: Request, models: Sequence[Model], pairs: Sequence[Pair], decoding: Mapping[str, Any]
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
        named = [_naming(model.name, each) if isinstance(each, BaseException) else each for each in outcomes]
        ended |= zip(texts, named, strict=True)
        texts = {number: each.text for number, each in ended.items() if isinstance(each, Result)}
    return [ended[number] for number in range(len(pairs))]


async def translate_lines(
    request: Request, models: Sequence[Model], texts: Sequence[str], decoding: Mapping[str, Any]
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


def _naming(where: str, error: BaseException) -> BaseException:
    """An error of ours that names the model or the text that it is of."""
    if isinstance(error, TformerError):
        error = copy(error)
        error.args = (f"{where}: {error}",)
    return error


def all_results(outcomes: Sequence[Outcome]) -> list[Result]:
    """The results, for protocols that have one error for all texts. Raises the first, which names its text."""
    results = []
    for number, outcome in enumerate(outcomes, 1):
        if isinstance(outcome, BaseException):
            raise _naming(f"text {number}", outcome) if len(outcomes) > 1 else outcome
        results.append(outcome)
    return results


def check_count(texts: int, model: Model) -> None:
    """Raise ConfigError for more texts than a request may have."""
    if texts > model.caps.texts:
        raise ConfigError(f"{texts} texts exceed this server's limit of {model.caps.texts} a request: send fewer")


def _submit_all(
    model: Model, pairs: Sequence[Pair], decoding: Mapping[str, Any], due: float
) -> list[Line | TformerError]:
    """Queue texts; in the place of one that cannot be queued, its error. Raises ConfigError, which concerns all."""
    lines: list[Line | TformerError] = []
    for pair in pairs:
        try:
            lines.append(model.submit(*pair, decoding, seconds=max(0.0, due - time.monotonic())))
        except ConfigError:
            _cancel(lines)
            raise
        except TformerError as error:
            lines.append(error)
    return lines


def _cancel(lines: Sequence[Line | TformerError]) -> None:
    """Cancel lines; those that have ended are left as they are."""
    for line in lines:
        if isinstance(line, Line):
            line.cancel()


async def _outcomes(request: Request, lines: Sequence[Line | TformerError]) -> list[Outcome]:
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
        _cancel(lines)


async def _gone(request: Request) -> None:
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
        stream, loop = cls(), asyncio.get_running_loop()

        def put(item: str | Outcome) -> None:
            loop.call_soon_threadsafe(stream._queue.put_nowait, item)

        stream._line = await run_in_threadpool(model.submit, *pair, decoding, put)
        stream._line.future.add_done_callback(lambda future: put(future.exception() or future.result()))
        return stream

    async def items(self) -> AsyncIterator[str | Outcome]:
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


async def stream_through(request: Request, models: Sequence[Model], pair: Pair, decoding: Mapping[str, Any]) -> Stream:
    """The pieces of one text through several models: those of the last. Raises the errors of those before it."""
    *before, last = models
    text, prefix = pair
    if before:
        check_pivot(models, decoding)
        [outcome] = await translate_through(request, before, [(text, "")], {})
        if isinstance(outcome, BaseException):
            raise _naming(before[-1].name, outcome)
        text = outcome.text
    return await Stream.open(last, (text, prefix), decoding)
