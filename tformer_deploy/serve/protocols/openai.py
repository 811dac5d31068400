"""OpenAI's `/v1/completions`, `/v1/chat/completions`, `/v1/models`: a prompt or the last user message is translated."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ...base.errors import ConfigError, unknown
from ...base.settings import check_whole
from ...decoding import DecodeOptions
from ...translate.translator import Result
from ..answers import Json, as_texts, headers_of, message_of, read_json, status_of
from ..models import Model, Models, UnknownModel
from ..texts import Pair, all_results
from ..waiting import Stream, translate_all

PATHS = ("/v1/",)
SUBMITS = ("/v1/completions", "/v1/chat/completions")
OPTIONS = [each.name for each in fields(DecodeOptions) if each.name not in ("n_best", "sampling", "align")]
"""Decoding options that may stand in a body, some of them by OpenAI's name."""
OURS = ("model", "prompt", "messages", "stream", "stream_options", "n", "max_completion_tokens", *OPTIONS)
UNREAD = (
    "user",
    "metadata",
    "store",
    "safety_identifier",
    "service_tier",
    "prompt_cache_key",
    "prompt_cache_retention",
)
"""Keys that change no result."""
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0, 0.0),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0, 0.0),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "stop": ([], ""),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}
"""Keys of OpenAI that are not supported, and their values that ask for nothing; with any other they are refused."""


@dataclass(frozen=True)
class Asked:
    """A request as it was sent."""

    model: str
    pairs: list[Pair]
    decoding: dict[str, Any]
    stream: bool = False
    usage: bool = False
    """Whether a stream ends with the usage."""
    chat: bool = False
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))


def routes(models: Models) -> list[Route]:
    """The routes."""
    created = int(time.time())

    def listed(model: Model) -> dict[str, Any]:
        return {"id": model.name, "object": "model", "created": created, "owned_by": "tformer"}

    async def openai_models(request: Request) -> Response:
        return Json({"object": "list", "data": [listed(model) for model in models.listed()]})

    async def openai_model(request: Request) -> Response:
        return Json(listed(models.get(request.path_params["name"])))

    async def openai_completions(request: Request) -> Response:
        return await _complete(request, models, chat=False)

    async def openai_chat(request: Request) -> Response:
        return await _complete(request, models, chat=True)

    return [
        Route("/v1/models", openai_models),
        Route("/v1/models/{name}", openai_model),
        Route("/v1/completions", openai_completions, methods=["POST"]),
        Route("/v1/chat/completions", openai_chat, methods=["POST"]),
    ]


def failed(error: BaseException) -> Response:
    """The answer to a request that failed, in OpenAI's format."""
    status = _status(error)
    return Json(_error(error), status, headers_of(error))


def _status(error: BaseException) -> int:
    """OpenAI has one status for requests that are wrong and for those beyond a limit."""
    status = status_of(error)
    return 400 if status == 422 else status


def _error(error: BaseException) -> dict[str, Any]:
    status = _status(error)
    kind = "server_error" if status >= 500 else "invalid_request_error"
    code = {401: "invalid_api_key", 429: "rate_limit_exceeded"}.get(status)
    if isinstance(error, UnknownModel):
        code = "model_not_found"
    if status == 429:
        kind = "rate_limit_error"
    return {"error": {"message": message_of(error), "type": kind, "param": None, "code": code}}


async def _complete(request: Request, models: Models, chat: bool) -> Response:
    asked = read_request(await read_json(request, models.body_bytes), chat)
    model = models.get(asked.model)
    decoding, count = _with_beams(model, asked.decoding), asked.decoding.get("n_best", 1)
    if asked.stream:
        stream = await Stream.open(model, asked.pairs[0], decoding)
        return StreamingResponse(_events(model, asked, stream), media_type="text/event-stream")
    results = all_results(await translate_all(request, model, asked.pairs, decoding))
    choices = [
        _choice(asked, number * count + index, output)
        for number, result in enumerate(results)
        for index, output in enumerate(_outputs(result, count))
    ]
    usage = await _usage(model, asked, results)
    return Json({**_head(model, asked), "choices": choices, "usage": usage})


def _outputs(result: Result, count: int) -> list[Result]:
    """The outputs of a text that were asked for; a bundle may be set to more."""
    return [result, *result.alternatives][:count]


def read_request(body: Mapping[str, Any], chat: bool) -> Asked:
    """A request as it was sent. Raises ConfigError."""
    given = {key: value for key, value in body.items() if value is not None and key not in UNREAD}
    for key, accepted in WITHOUT_EFFECT.items():
        if key in given and not any(_same(given[key], value) for value in accepted):
            raise ConfigError(f"'{key}' is not supported: leave it out")
        given.pop(key, None)
    for key in given:
        if key not in OURS:
            raise unknown("key of the body", f"{key:.40}", OURS)
    model, stream, options = given.pop("model", ""), given.pop("stream", False), given.pop("stream_options", {})
    if not isinstance(model, str) or not isinstance(stream, bool) or not isinstance(options, dict):
        raise ConfigError("model must be a string, stream true or false, stream_options an object")
    prompt, messages = given.pop("prompt", None), given.pop("messages", None)
    if (messages if not chat else prompt) is not None:
        raise ConfigError("send 'messages' to /v1/chat/completions, 'prompt' to /v1/completions")
    pairs = (
        [_last(messages)] if chat else [(text, "") for text in as_texts("prompt (token ids are not supported)", prompt)]
    )
    if stream and len(pairs) > 1:
        raise ConfigError("stream: one prompt at a time")
    usage = options.get("include_usage") is True
    return Asked(model, pairs, _decoding(given), stream, usage, chat)


def _same(value: Any, accepted: Any) -> bool:
    """Whether a value is one that asks for nothing; for OpenAI, `logprobs` 0 is not false."""
    return type(value) is type(accepted) and bool(value == accepted)


def _last(messages: Any) -> Pair:
    """The last user message, and how its output begins: the assistant message after it, if there is one."""
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise ConfigError('messages: must be a list of objects, as in [{"role": "user", "content": "A dog."}]')
    last, prefix = messages[-1], ""
    if last.get("role") == "assistant" and len(messages) > 1:
        last, prefix = messages[-2], _content(last)
    if last.get("role") != "user":
        raise ConfigError("messages: the last must be of the user, or of the assistant after one of the user")
    return _content(last), prefix


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts
    ):
        raise ConfigError("messages: content must be a string, or a list of parts of type text")
    return "".join(part["text"] for part in parts)


def _decoding(given: dict[str, Any]) -> dict[str, Any]:
    """Decoding options: a temperature above 0 or a top_p below 1 samples, n outputs are the best or samples."""
    decoding = dict(given)
    if "max_completion_tokens" in decoding:
        if "max_tokens" in decoding:
            raise ConfigError("max_tokens and max_completion_tokens are the same: send one of them")
        decoding["max_tokens"] = decoding.pop("max_completion_tokens")
    count, temperature, top_p = decoding.pop("n", 1), decoding.get("temperature"), decoding.get("top_p", 1)
    check_whole("n", count, 1, 1 << 20)
    if temperature == 0:
        decoding["sampling"] = False
    if temperature == 0 or (temperature is None and top_p == 1):
        for name in ("temperature", "top_p"):  # the search is the model's
            decoding.pop(name, None)
    else:
        decoding["sampling"] = True
    return {**decoding, "n_best": count} if count > 1 else decoding


def _with_beams(model: Model, decoding: dict[str, Any]) -> dict[str, Any]:
    """With beams for all outputs, unless they are samples, or the request says how many."""
    decoding, count = dict(decoding), decoding.get("n_best", 1)
    samples = decoding.get("sampling", model.translator.options.sampling)
    if not samples:
        DecodeOptions(sampling=True, seed=decoding.pop("seed", 0))  # nothing is drawn, but what is wrong is said
    if count == 1 or samples or "beams" in decoding:
        return decoding
    return {**decoding, "beams": max(count, model.translator.options.beams)}


def _head(model: Model, asked: Asked, chunk: bool = False) -> dict[str, Any]:
    """What every answer and chunk begins with."""
    kind = ("chat.completion.chunk" if chunk else "chat.completion") if asked.chat else "text_completion"
    name = f"{'chatcmpl' if asked.chat else 'cmpl'}-{asked.id}"
    head = {"id": name, "object": kind, "created": asked.created, "model": model.name}
    return {**head, "system_fingerprint": model.version or None}


def _choice(asked: Asked, index: int, result: Result) -> dict[str, Any]:
    content: dict[str, Any] = {"text": result.text}
    if asked.chat:
        content = {"message": {"role": "assistant", "content": result.text, "refusal": None}}
    return {"index": index, **content, "logprobs": None, "finish_reason": _reason(result)}


def _reason(result: Result) -> str:
    return "stop" if result.finished else "length"


async def _usage(model: Model, asked: Asked, results: Sequence[Result]) -> dict[str, int]:
    """Tokens of the sources, as the encoder reads them, and of all outputs, without end tokens."""
    texts = [text for text, _ in asked.pairs]
    sources = (await run_in_threadpool(model.translator.read, texts)).sources
    count = asked.decoding.get("n_best", 1)
    outputs = sum(len(output.ids) for result in results for output in _outputs(result, count))
    inputs = sum(map(len, sources))
    return {"prompt_tokens": inputs, "completion_tokens": outputs, "total_tokens": inputs + outputs}


async def _events(model: Model, asked: Asked, stream: Stream) -> AsyncIterator[str]:
    """Chunks of the text as they come, further outputs, why each ended, the usage if asked for; or the error."""
    head = _head(model, asked, chunk=True)

    def chunk(index: int, text: str | None = None, reason: str | None = None, **delta: str) -> str:
        said = {"text": text or ""} if not asked.chat else {"delta": delta if text is None else {"content": text}}
        return _event({**head, "choices": [{"index": index, **said, "logprobs": None, "finish_reason": reason}]})

    if asked.chat:
        yield chunk(0, role="assistant", content="")
    async for item in stream.items():
        if isinstance(item, str):
            yield chunk(0, item)
        elif isinstance(item, BaseException):
            yield _event(_error(item))
            return
        else:
            for index, output in enumerate(_outputs(item, asked.decoding.get("n_best", 1))):
                if index:
                    yield chunk(index, output.text)
                yield chunk(index, reason=_reason(output))
            if asked.usage:
                yield _event({**head, "choices": [], "usage": await _usage(model, asked, [item])})
    yield "data: [DONE]\n\n"


def _event(data: Any) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
