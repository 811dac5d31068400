"""The ASGI application: routes of all protocols, who may use them, and what is logged and counted."""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import time
from typing import cast

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..base.errors import TformerError
from . import metrics, openapi, site
from .answers import Json, NoKey, failed
from .models import Models
from .protocols import deepl, kserve, libretranslate, openai, own

PROTOCOLS = (own, libretranslate, deepl, kserve, openai)
OPEN = {*openapi.OPEN, *openapi.PAGES}.union(*(getattr(each, "OPEN", ()) for each in PROTOCOLS))
"""Paths that need no key: what asks for them has none."""
IN_BODY = {path for protocol in PROTOCOLS for path in getattr(protocol, "KEY_IN_BODY", ())}
"""Paths whose key may stand in the body."""
LOG = logging.getLogger("tformer_deploy.serve.access")


def make_app(models: Models, key: str = "") -> ASGIApp:
    """The application. `key`: what clients must send, as `Authorization: Bearer KEY` or `X-API-Key: KEY`, if any."""
    counted = metrics.Counted(models)

    async def live(request: Request) -> Response:
        return Json({"status": "live"})

    async def ready(request: Request) -> Response:
        return Json({"status": "ready", "models": [model.name for model in models]})

    async def show_metrics(request: Request) -> Response:
        return PlainTextResponse(counted.text(), media_type=counted.media_type)

    routes = [
        Route("/healthz", ready),
        Route("/healthz/live", live),
        Route("/healthz/ready", ready),
        Route("/metrics", show_metrics),
        *site.routes(models, bool(key)),
        *(route for protocol in PROTOCOLS for route in protocol.routes(models)),
    ]

    async def on_error(request: Request, error: Exception) -> Response:
        return failed_at(request.url.path, error)

    kinds = (TformerError, HTTPException, Exception)
    app = Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, on_error))
    return Guard(app, key, counted)


def failed_at(path: str, error: BaseException) -> Response:
    """The answer to a request that failed, in the format of the protocol that the path is of."""
    for protocol in PROTOCOLS:
        if path.startswith(getattr(protocol, "PATHS", ())):
            return cast(Response, getattr(protocol, "failed", failed)(error))
    return failed(error)


class Guard:
    """Around the application: request ids, the key, the access log, metrics."""

    def __init__(self, app: ASGIApp, key: str, counted: metrics.Counted) -> None:
        self.app, self.key, self.counted = app, key.encode(), counted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        number, start, status = _request_id(headers), time.perf_counter(), 500

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = number
            await send(message)

        try:
            allowed = self._allowed(scope["path"], headers)
            if not allowed and scope["path"] in IN_BODY:  # its handler asks for the key
                scope.setdefault("state", {})["is_key"] = self.is_key
                allowed = True
            if allowed:
                await self.app(scope, receive, answer)
            else:
                refusal = failed_at(scope["path"], NoKey("a key is needed: send Authorization: Bearer KEY"))
                await refusal(scope, receive, answer)
        finally:
            seconds = time.perf_counter() - start
            self.counted.answered(getattr(scope.get("endpoint"), "__name__", "other"), status, seconds)
            LOG.info(
                json.dumps(
                    {
                        "request": number,
                        "method": scope["method"],
                        "path": scope["path"][:200],
                        "status": status,
                        "ms": round(seconds * 1000, 1),
                    }
                )
            )

    def _allowed(self, path: str, headers: Headers) -> bool:
        """Whether a request's headers have the key, or its path needs none."""
        if not self.key or path in OPEN:
            return True
        sent = headers.get("authorization", "").removeprefix("Bearer ").removeprefix("DeepL-Auth-Key ")
        sent = sent or headers.get("x-api-key", "")
        return self.is_key(sent.encode("latin-1", "replace"))

    def is_key(self, sent: bytes) -> bool:
        """Whether this is the key; compared in constant time."""
        return hmac.compare_digest(sent, self.key)


def _request_id(headers: Headers) -> str:
    """The request's own id, if it is printable ASCII, or a new one."""
    own = headers.get("x-request-id", "")[:64]
    return own if own.isascii() and own.isprintable() and own else secrets.token_hex(8)
