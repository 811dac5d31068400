"""The ASGI application: routes of all protocols, who may use them, and what is logged and counted."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import random
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from http import HTTPStatus
from ipaddress import ip_address
from typing import Any, cast

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from ..base.errors import TformerError
from ..translate.scheduler import Busy
from . import metrics, openapi, site
from .answers import REQUEST_ID, Json, failed, message_of
from .connections import Refusal
from .current import Current, Reopen
from .errors import Forbidden, NoKey
from .models import Models
from .pages import Member
from .protocols import deepl, kserve, libretranslate, openai, own

PROTOCOLS = (own, libretranslate, deepl, kserve, openai)
OPEN = {*openapi.OPEN, *openapi.PAGES}.union(*(getattr(each, "OPEN", ()) for each in PROTOCOLS))
"""Paths that need no key: what asks for them has none."""
IN_BODY = {path for protocol in PROTOCOLS for path in getattr(protocol, "KEY_IN_BODY", ())}
"""Paths whose key may stand in the body."""
SUBMITS = {path for protocol in PROTOCOLS for path in getattr(protocol, "SUBMITS", ())}
"""Paths whose requests need room in a queue: where all are full, they are refused before their bodies are read."""
SCHEMES = ("bearer", "deepl-auth-key")
"""What may stand before the key in `Authorization`."""
READY = ("/healthz", "/healthz/ready", "/v2/health/ready")
"""Paths by which load balancers learn whether to send requests here."""
LOG = logging.getLogger("tformer_deploy.serve.access")


def make_app(models: Models, key: str = "", reopen: Reopen | None = None, member: Member | None = None) -> Guard:
    """The application. `key`: what clients must send, as `Authorization: Bearer KEY` or `X-API-Key: KEY`, if any.

    `reopen`: opens the bundles that have changed, see `Current`. `member`: of several workers.
    """

    def of_models(models: Models) -> Starlette:
        protocols = (route for protocol in PROTOCOLS for route in protocol.routes(models))
        return _starlette([*site.routes(models, bool(key)), *protocols])

    current = Current(models, of_models, reopen)
    counted = metrics.Counted(current)
    own = _starlette([*health_routes(current), *operating_routes(current, counted, key, member)])
    return Guard(current, own, key, counted)


def _starlette(routes: list[Any]) -> Starlette:
    async def on_error(request: Request, error: Exception) -> Response:
        request.scope["error"] = error
        return failed_at(request.url.path, error)

    kinds = (TformerError, HTTPException, Exception)
    return Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, on_error))


def health_routes(current: Current) -> list[Route]:
    """What load balancers ask."""

    async def live(request: Request) -> Response:
        return Json({"status": "live"})

    async def ready(request: Request) -> Response:
        return Json({"status": "ready", "models": [model.name for model in current]})

    return [Route("/healthz", ready), Route("/healthz/live", live), Route("/healthz/ready", ready)]


def operating_routes(current: Current, counted: metrics.Counted, key: str, member: Member | None) -> list[Route]:
    """What holds for the whole server; of several workers, for all."""

    async def show_metrics(request: Request) -> Response:
        text = counted.text()
        if member:
            member.pages.write(text)
            text = member.pages.read()
        return PlainTextResponse(text, media_type=counted.media_type)

    async def reload(request: Request) -> Response:
        if not key and not _is_local(request):
            raise Forbidden("this server has no key: ask from its own machine, send it SIGHUP, or give it a key")
        new = await asyncio.to_thread(current.reload)
        if member:
            member.tell_reload()
        return Json({"models": [_state(model.name, model.version, model in new) for model in current]})

    return [Route("/metrics", show_metrics), Route("/admin/reload", reload, methods=["POST"])]


def _state(name: str, version: str, new: bool) -> dict[str, Any]:
    return {"name": name, "sha256": version, "new": new}


def _is_local(request: Request) -> bool:
    """Whether a request comes from this machine."""
    try:
        return request.client is not None and ip_address(request.client.host).is_loopback
    except ValueError:
        return False


def failed_at(path: str, error: BaseException) -> Response:
    """The answer to a request that failed, in the format of the protocol that the path is of."""
    for protocol in PROTOCOLS:
        if path.startswith(getattr(protocol, "PATHS", ())):
            return cast(Response, getattr(protocol, "failed", failed)(error))
    return failed(error)


class Guard:
    """Around the application: which models a request gets, request ids, the key, the access log, metrics."""

    def __init__(self, current: Current, own: Starlette, key: str, counted: metrics.Counted) -> None:
        self.current, self.own, self.key, self.counted = current, own, key.encode(), counted
        self._own_paths = {getattr(route, "path", "") for route in own.routes}
        self._submits = {route.path: route.endpoint for route in current.routes if route.path in SUBMITS}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.own(scope, receive, send)
            return
        headers = Headers(scope=scope)
        number, start, status = request_id(headers), time.perf_counter(), 500
        REQUEST_ID.set(number)

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = number
                if self.current.draining:  # so that clients go elsewhere with their next request
                    MutableHeaders(scope=message)["Connection"] = "close"
            await send(message)

        try:
            allowed = has_key = scope["path"] in OPEN or self.has_key(headers)
            if not allowed and scope["path"] in IN_BODY:  # its handler asks for the key
                scope.setdefault("state", {})["is_key"] = self.is_key
                allowed = True
            if has_key and scope["method"] == "POST" and (busy := self._busy(scope["path"])):
                scope["error"], scope["endpoint"] = busy, self._submits[scope["path"]]  # many came since `refuse`
                await failed_at(scope["path"], busy)(scope, receive, answer)
            elif allowed:
                await self._answer(scope, receive, answer)
            else:
                scope["error"] = NoKey("a key is needed: send Authorization: Bearer KEY")
                await failed_at(scope["path"], scope["error"])(scope, receive, answer)
        finally:
            line = {"request": number, "method": scope["method"], "path": scope["path"][:200], "status": status}
            route = getattr(scope.get("endpoint"), "__name__", "other")
            self.note(line, route, time.perf_counter() - start, scope.get("error"))

    def note(self, line: Mapping[str, Any], route: str, seconds: float, error: BaseException | None) -> None:
        """Log and count a request."""
        self.counted.answered(route, line["status"], seconds, error)
        said = {"error": message_of(error)} if error else {}
        LOG.info(json.dumps({"time": round(time.time(), 3), **line, "ms": round(seconds * 1000, 1), **said}))

    def refuse(self, url: bytes, headers: Sequence[tuple[bytes, bytes]]) -> Refusal | None:
        """The answer to a POST that no queue has room for, before its body is read; none: serve it."""
        start, path = time.perf_counter(), url.partition(b"?")[0].decode("latin-1")
        if path not in self._submits or self.current.draining:
            return None
        found = Headers(raw=list(headers))
        if not self.has_key(found) or (busy := self._busy(path)) is None:
            return None
        number = request_id(found)
        line = {"request": number, "method": "POST", "path": path, "status": HTTPStatus.TOO_MANY_REQUESTS.value}
        self.note(line, self._submits[path].__name__, time.perf_counter() - start, busy)
        refusal = refusal_of(path, str(busy))
        return Refusal(refusal.head + f"x-request-id: {number}\r\n".encode(), refusal.body)

    def _busy(self, path: str) -> Busy | None:
        """Why a request is refused before anything else is done for it: a server that has too much must be quick."""
        if path not in self._submits:
            return None
        try:
            self.current.check_room()
        except Busy as busy:
            return busy
        return None

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.current.draining and scope["path"] in READY:
            await Json({"status": "draining"}, 503)(scope, receive, send)
        elif scope["path"] in self._own_paths:
            await self.own(scope, receive, send)
        else:
            with self.current.use() as held:
                await held.app(scope, receive, send)

    def has_key(self, headers: Mapping[str, str]) -> bool:
        """Whether a request's headers, or a call's metadata, have the key, if there is one."""
        if not self.key:
            return True
        sent = headers.get("authorization", "")
        scheme, _, key = sent.partition(" ")
        sent = (key if scheme.lower() in SCHEMES else sent) or headers.get("x-api-key", "")
        return self.is_key(sent.encode("latin-1", "replace"))

    def is_key(self, sent: bytes) -> bool:
        """Whether this is the key; compared in constant time."""
        return hmac.compare_digest(sent, self.key)


@lru_cache(maxsize=256)
def refusal_of(path: str, message: str) -> Refusal:
    """The answer that `Busy` gets on a path, without the request's id."""
    response = failed_at(path, Busy(message))
    status = f"HTTP/1.1 {response.status_code} {HTTPStatus(response.status_code).phrase}\r\n".encode()
    return Refusal(b"".join([status, *(b"%s: %s\r\n" % pair for pair in response.raw_headers)]), bytes(response.body))


def request_id(headers: Mapping[str, str]) -> str:
    """The request's own id, if it is printable ASCII, or a new one."""
    own = str(headers.get("x-request-id", ""))[:64]
    return own if own.isascii() and own.isprintable() and own else f"{random.getrandbits(64):016x}"
