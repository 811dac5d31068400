"""Answers to failures: which status an error has, and how requests are read."""

from __future__ import annotations

import asyncio
import json
from contextvars import ContextVar
from typing import Any
from urllib.parse import parse_qs

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..base.errors import ConfigError
from . import errors
from .errors import NoKey, TooLarge, TooSlow

FORM, MOST_FIELDS = "application/x-www-form-urlencoded", 1000
REQUEST_ID: ContextVar[str] = ContextVar("REQUEST_ID", default="")
"""Of the request that is answered."""
BODY_SECONDS = 30
"""Seconds in which a request's body must have come."""


class Json(JSONResponse):
    """An answer in JSON. What it repeats of a request may hold halves of characters, which UTF-8 does not have."""

    def render(self, content: Any) -> bytes:
        """See `Response.render`."""
        return json.dumps(content, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")


def status_of(error: BaseException) -> int:
    """The HTTP status of an error."""
    if isinstance(error, HTTPException):
        return error.status_code
    return errors.status_of(error)


def message_of(error: BaseException) -> str:
    """One line on an error; what is no error of ours says only that it is one. Of the server's faults with the id."""
    if isinstance(error, HTTPException):
        return f"{error.detail}: docs/serve.md has the paths of this server, and their methods"
    message = errors.message_of(error)
    return f"{message} (request {REQUEST_ID.get()})" if status_of(error) == 500 and REQUEST_ID.get() else message


def headers_of(error: BaseException) -> dict[str, str]:
    """Headers of the answer to an error: when to come again, which methods a path has."""
    if isinstance(error, HTTPException):
        return dict(error.headers or {})
    return {"Retry-After": "1"} if status_of(error) in (429, 503) else {}


def failed(error: BaseException) -> Response:
    """The answer to a request that failed."""
    return Json({"error": message_of(error)}, status_of(error), headers_of(error))


async def read_body(request: Request, most: int) -> bytes:
    """The request's body. Raises TooLarge before more than that is read, and TooSlow where it does not come."""
    too_large = TooLarge(f"a body of more than {most} bytes exceeds this server's limit: send fewer texts at once")
    if int(request.headers.get("content-length", 0)) > most:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise too_large
    except TimeoutError:
        raise TooSlow(f"the body did not come within {BODY_SECONDS} s: send it at once") from None
    return bytes(body)


async def read_json(request: Request, most: int) -> dict[str, Any]:
    """The request's body as a JSON object. Raises ConfigError, TooLarge."""
    return parse_object(await read_body(request, most))


def parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object. Raises ConfigError."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise ConfigError("the body is not JSON") from None
    if not isinstance(value, dict):
        raise ConfigError('the body must be a JSON object, as in {"text": "A dog."}')
    return value


def as_texts(name: str, value: Any) -> list[str]:
    """One or several texts as a list. Raises ConfigError."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"{name}: must be a string or a list of strings, not empty")
    return texts


async def read_fields(request: Request, most: int) -> dict[str, Any]:
    """The request's body as a JSON object, or a form's fields: a text each, or a list of texts where it is repeated.

    Raises DataError, ConfigError, TooLarge.
    """
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind == "multipart/form-data":
        raise ConfigError(f"a body of type {kind} is not read: send application/json or a form that is URL-encoded")
    if kind != FORM:
        return await read_json(request, most)
    body = await read_body(request, most)
    try:
        fields = parse_qs(body.decode(), keep_blank_values=True, errors="strict", max_num_fields=MOST_FIELDS)
    except ValueError:
        raise ConfigError(f"the body is no form in UTF-8, URL-encoded, of at most {MOST_FIELDS} fields") from None
    return {name: values[0] if len(values) == 1 else values for name, values in fields.items()}


def check_key(request: Request, key: Any) -> None:
    """Of a path whose key may stand in the body: raise NoKey if the request still needs one and this is not it."""
    is_key = getattr(request.state, "is_key", None)
    if is_key and not (isinstance(key, str) and is_key(key.encode(errors="replace"))):
        raise NoKey("the key is missing or wrong: send it as api_key, or in the header Authorization")
