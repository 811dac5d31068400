"""Answers to failures: which status an error has, and how requests are read."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..base.errors import ArtifactError, ConfigError, DataError, EngineError, LimitError, TformerError
from ..translate.scheduler import Busy, Cancelled, Late
from .models import UnknownModel

STATUS: tuple[tuple[type[TformerError], int], ...] = (
    (Busy, 429),
    (Late, 504),
    (Cancelled, 499),
    (UnknownModel, 404),
    (ConfigError, 400),
    (LimitError, 422),
    (DataError, 422),
    (EngineError, 500),
    (ArtifactError, 500),
    (TformerError, 503),
)
"""The first that an error is of."""


class TooLarge(LimitError):
    """A body beyond the cap."""


def status_of(error: BaseException) -> int:
    """The HTTP status of an error."""
    if isinstance(error, TooLarge):
        return 413
    return next((status for kind, status in STATUS if isinstance(error, kind)), 500)


def message_of(error: BaseException) -> str:
    """One line on an error; what is no error of ours says only that it is one."""
    return str(error) if isinstance(error, TformerError) else "internal error: the server's log has it"


def headers_of(status: int) -> dict[str, str]:
    """Headers of a status: when to come again."""
    return {"Retry-After": "1"} if status in (429, 503) else {}


def failed(error: BaseException) -> Response:
    """The answer to a request that failed."""
    status = status_of(error)
    return JSONResponse({"error": message_of(error)}, status, headers_of(status))


async def read_body(request: Request, most: int) -> bytes:
    """The request's body. Raises TooLarge before more than that is read."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise TooLarge(f"a body of more than {most} bytes exceeds this server's limit: send fewer texts at once")
    return bytes(body)


async def read_json(request: Request, most: int) -> dict[str, Any]:
    """The request's body as a JSON object. Raises DataError, ConfigError, TooLarge."""
    body = await read_body(request, most)
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise ConfigError("the body is not JSON") from None
    if not isinstance(value, dict):
        raise ConfigError('the body must be a JSON object, as in {"text": "A dog."}')
    return value
