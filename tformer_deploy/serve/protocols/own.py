"""`POST /v1/translate` and `/v1/score`: one or many texts, an error for each that fails, pieces as they come."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ...base.errors import ConfigError
from ...base.settings import from_dict
from ...bundle.text import Tokenizers
from ...translate.scheduler import Busy, Late
from ...translate.translator import Result
from ..answers import Json, as_texts, message_of, read_json, status_of
from ..models import Model, Models
from ..texts import Outcome, check_count
from ..waiting import Stream, stream_through, translate_through

PATHS = ("/v1/translate", "/v1/score", "/v1/cards")
SUBMITS = ("/v1/translate",)
Texts = str | list[str]
MOST_SCORES = 16
"""Requests to score that wait; further ones are refused."""


@dataclass(frozen=True)
class Translate:
    """The body of `/v1/translate`."""

    text: Texts
    """One text, or several."""
    model: str = ""
    """Which of the server's models; none: the first."""
    source_lang: str = ""
    """Language of the texts; none: the only one that the target language has."""
    target_lang: str = ""
    """Language to translate to, instead of a model."""
    prefix: Texts = ""
    """How the output begins; of several texts, one for each."""
    stream: bool = False
    """Send pieces of the text as server-sent events; of one text."""
    options: dict[str, Any] = field(default_factory=dict)
    """Decoding options, as in `docs/decoding.md`."""

    def pairs(self) -> list[tuple[str, str]]:
        """Texts with their prefixes. Raises ConfigError."""
        texts = as_texts("text", self.text)
        prefixes = as_texts("prefix", self.prefix) if self.prefix != "" else [""] * len(texts)
        if len(prefixes) != len(texts):
            raise ConfigError(f"{len(texts)} texts, {len(prefixes)} prefixes: give each text one, empty for none")
        if self.stream and not isinstance(self.text, str):
            raise ConfigError("stream: one text at a time")
        if not all(isinstance(each, str) for each in (self.model, self.source_lang, self.target_lang)):
            raise ConfigError("model, source_lang and target_lang must be strings")
        if not isinstance(self.options, dict) or not isinstance(self.stream, bool):
            raise ConfigError("options must be an object, stream true or false")
        return list(zip(texts, prefixes, strict=True))

    def through(self, models: Models) -> tuple[Model, ...]:
        """The model, or the two that lead to the target language. Raises ConfigError."""
        if not self.source_lang and not self.target_lang:
            return (models.get(self.model),)
        if self.model:
            raise ConfigError("model and languages are both given: give the one or the other")
        if not self.target_lang:
            raise ConfigError("source_lang without target_lang: say to which language")
        return models.find(self.source_lang, self.target_lang)


@dataclass(frozen=True)
class Score:
    """The body of `/v1/score`."""

    source: Texts
    target: Texts
    """The translation of each source whose log-probability is asked for."""
    model: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str):
            raise ConfigError("model must be a string")


def routes(models: Models) -> list[Route]:
    """The routes."""
    turn = asyncio.Semaphore(1)  # one request is scored after the other, beside the lines that are translated
    scoring: set[Request] = set()

    async def translate(request: Request) -> Response:
        asked = from_dict(Translate, await read_json(request, models.body_bytes), "body")
        pairs, through = asked.pairs(), asked.through(models)
        if asked.stream:
            stream = await stream_through(request, through, pairs[0], asked.options)
            return StreamingResponse(_events(stream, through[-1], pairs[0][0]), media_type="text/event-stream")
        outcomes = await translate_through(request, through, pairs, asked.options)
        if isinstance(asked.text, str) and isinstance(outcomes[0], BaseException):
            raise outcomes[0]
        names = {"model": through[-1].name, **({"pivot": through[0].name} if len(through) > 1 else {})}
        results = [await _detailed(each, through[-1], text) for each, (text, _) in zip(outcomes, pairs, strict=True)]
        return Json({**names, "results": results})

    async def score(request: Request) -> Response:
        asked = from_dict(Score, await read_json(request, models.body_bytes), "body")
        sources, targets = as_texts("source", asked.source), as_texts("target", asked.target)
        model = models.get(asked.model)
        check_count(len(sources), model)
        for text in (*sources, *targets):
            model.check_size("text", text)
        if len(scoring) > MOST_SCORES:
            raise Busy(f"{MOST_SCORES} requests to score are waiting: try again later")
        scoring.add(request)
        try:
            async with asyncio.timeout(model.caps.seconds), turn:
                scores = await run_in_threadpool(model.translator.score, sources, targets)
        except TimeoutError:
            raise Late(f"the texts were not scored within {model.caps.seconds:g} s") from None
        finally:
            scoring.discard(request)
        return Json({"model": model.name, "scores": [{"score": sum(each), "tokens": each} for each in scores]})

    return [
        Route("/v1/translate", translate, methods=["POST"]),
        Route("/v1/score", score, methods=["POST"]),
    ]


async def _detailed(outcome: Outcome, model: Model, text: str) -> dict[str, Any]:
    """An outcome as JSON; with an alignment, also the text of each token."""
    item = shown(outcome)
    if not isinstance(outcome, BaseException) and any(each.alignment for each in (outcome, *outcome.alternatives)):
        await run_in_threadpool(_add_pieces, item, outcome, model.translator.tokenizers, text)
    return item


def _add_pieces(item: dict[str, Any], result: Result, tokenizers: Tokenizers, text: str) -> None:
    item["source_pieces"] = pieces_of(tokenizers.source.decode, tokenizers.source_ids(text.strip()))
    for shown_one, each in zip((item, *item.get("alternatives", ())), (result, *result.alternatives), strict=True):
        shown_one["pieces"] = pieces_of(tokenizers.target_text, each.ids)


def pieces_of(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[str]:
    """What each token adds to the text; nothing for special ones and for the first bytes of a character."""
    pieces, shown = [], ""
    for count in range(1, len(ids) + 1):
        text = decode(ids[:count])
        settled = count == len(ids) or not text.endswith("\ufffd")  # else an incomplete UTF-8 character
        pieces.append(text[len(shown) :] if settled else "")
        shown = text if settled else shown
    return pieces


async def _events(stream: Stream, model: Model, text: str) -> AsyncIterator[str]:
    """Server-sent events: pieces of the text, then the result or the error."""
    async for item in stream.items():
        if isinstance(item, str):
            yield event("piece", {"text": item})
        else:
            name = "error" if isinstance(item, BaseException) else "result"
            yield event(name, await _detailed(item, model, text))


def event(name: str, data: Any) -> str:
    """A server-sent event."""
    return f"event: {name}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"


def shown(result: Result | BaseException) -> dict[str, Any]:
    """A result, or the error of a text, as JSON."""
    if isinstance(result, BaseException):
        return {"error": message_of(result), "status": status_of(result)}
    item = {"text": result.text, "score": result.score, "finished": result.finished, "tokens": len(result.ids)}
    if result.alignment:
        item["alignment"] = result.alignment
    if result.alternatives:
        item["alternatives"] = [shown(each) for each in result.alternatives]
    return item
