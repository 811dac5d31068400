"""Runs the application on uvicorn until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, TextIO

import uvicorn

from ..base.errors import ConfigError, TformerError
from .app import LOG, Guard, make_app
from .connections import Timed, allow_connections
from .current import Current
from .pages import Member
from .served import Served

if TYPE_CHECKING:
    from .grpc import GrpcServer

DRAIN_SECONDS = 30
"""Seconds that requests get to end after a signal."""
SWITCH_SECONDS = 0.0005
"""After which a thread that computes in Python lets another go on; Python's own 5 ms are as long as a step."""
BACKLOG = 2048
"""Connections that wait to be accepted."""


@dataclass(frozen=True)
class Service:
    """What is served, where, and to whom."""

    served: Served
    host: str
    port: int
    key: str = ""
    """What clients must send, if anything."""
    grpc_port: int | None = None
    """For gRPC too, if given."""
    shutdown_delay: float = 0.0
    """Seconds after a signal in which requests are still taken, while load balancers learn that this server ends."""


def run_server(service: Service, note: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; running requests end first. Raises TformerError where it cannot begin.

    The port is taken at once, and listens when all models are warm: until then, connections are refused.
    """
    with bind(service.host, service.port) as listening:
        serve_on(listening, service, note)


def bind(host: str, port: int, option: str = "--port") -> socket.socket:
    """A socket that does not listen yet. Raises ConfigError where the port is taken."""
    config = uvicorn.Config("", host=host, port=port, log_level="critical")
    try:
        listening = config.bind_socket()
    except SystemExit:
        raise ConfigError(f"{host}:{port} cannot be listened on: choose another --host or {option}") from None
    # Connections inherit it. asyncio sets it only for sockets made by itself; without it, a body waits 40 ms for the
    # client's acknowledgement of the headers.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def said(service: Service, listening: socket.socket, grpc_port: int | None) -> str:
    """What is served, and where."""
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    also = f", gRPC on {shown}:{grpc_port}" if grpc_port else ""
    return f"serving {', '.join(service.served.bundles)} on http://{shown}:{port}{also}"


def serve_on(
    listening: socket.socket, service: Service, note: Callable[[str], object], member: Member | None = None
) -> None:
    """Open the models, listen, and serve until a signal. `note` is told where, once clients may connect.

    `member`: of several workers.
    """
    log = Lines(sys.stderr)
    LOG.addHandler(log)
    LOG.setLevel(logging.INFO)
    LOG.propagate = False
    sys.setswitchinterval(SWITCH_SECONDS)
    early: list[int] = []
    ends: list[int] = []
    signal.signal(signal.SIGHUP, lambda number, _: early.append(number))  # while models are opened
    models = service.served.open()
    try:
        app = make_app(models, service.key, service.served.open, member)
    except BaseException:
        models.close(drain=False)
        raise
    calls = None
    try:
        config = uvicorn.Config(
            app,
            http=Timed,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=DRAIN_SECONDS,
            backlog=BACKLOG,
        )
        allow_connections()
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(
                each, lambda number, _: ends.append(number)
            )  # until uvicorn's own; it sends it again at its end
        listening.listen(BACKLOG)  # from here on clients may connect
        calls = open_calls(app, service, bool(member))
        note(said(service, listening, calls.port if calls else None))
        server = Server(config, app.current, service.shutdown_delay, bool(early))
        server.calls, server.log, server.early_ends = calls, log, ends
        if member:
            server.each_second = lambda: member.pages.write(app.counted.text())
        server.run(sockets=[listening])
    finally:
        if calls:
            calls.close(DRAIN_SECONDS)
        app.current.close()
        log.flush()


class Lines(logging.Handler):
    """A log whose lines are written together when it is flushed: each write may wait for Python's lock."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.stream, self._lines = stream, deque[str]()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self._lines.append(f"{record.getMessage()}\n")

    def flush(self) -> None:
        """Write the lines so far; those that cannot be written are lost."""
        count = len(self._lines)
        if text := "".join(self._lines.popleft() for _ in range(count)):
            with suppress(OSError):
                self.stream.write(text)
                self.stream.flush()


def open_calls(app: Guard, service: Service, shared: bool) -> GrpcServer | None:
    """The server for gRPC, if there is to be one. `shared`: on a port of all workers. Raises ConfigError."""
    if service.grpc_port is None:
        return None
    from .grpc import GrpcServer

    return GrpcServer(app, service.host, service.grpc_port, service.served.caps.body_bytes, shared)


class Server(uvicorn.Server):
    """Reloads at SIGHUP; says that it ends before it takes no more requests."""

    def __init__(self, config: uvicorn.Config, current: Current, delay: float, reload: bool) -> None:
        super().__init__(config)
        self.current, self.delay, self._reload_at_once = current, delay, reload
        self._ends: float | None = None
        self.calls: GrpcServer | None = None
        """Ends with this."""
        self.early_ends: list[int] = []
        """Signals to end that have come before it could handle them."""
        self.log: Lines | None = None
        self.each_second: Callable[[], None] = lambda: None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen to SIGHUP too."""
        await super().startup(sockets=sockets)
        loop = asyncio.get_running_loop()

        def reload() -> None:
            loop.run_in_executor(None, self._reload)

        loop.add_signal_handler(signal.SIGHUP, reload)
        if self._reload_at_once:
            reload()
        if self.early_ends:
            self.handle_exit(self.early_ends[0], None)

    def _reload(self) -> None:
        with suppress(TformerError):  # which it has said
            self.current.reload()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End after the delay; at a second signal, now."""
        self.current.draining = True
        if self._ends is None and self.delay:
            self._ends = time.monotonic() + self.delay
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests end, and calls over gRPC meanwhile."""
        calls = asyncio.to_thread(self.calls.close, DRAIN_SECONDS) if self.calls else asyncio.sleep(0)
        await asyncio.gather(super().shutdown(sockets), calls)

    async def on_tick(self, counter: int) -> bool:
        """Whether it is time to end. Called ten times a second."""
        if self.log:
            self.log.flush()
        if counter % 10 == 0:
            self.each_second()
        return await super().on_tick(counter) or (self._ends is not None and time.monotonic() >= self._ends)
