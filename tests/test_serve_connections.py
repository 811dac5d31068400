"""Clients that connect and send nothing, or too slowly, keep nobody else out."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from .serving import engine as engine
from .serving import post
from .serving import serve as serve

connections = pytest.importorskip("tformer_deploy.serve.connections", reason="the extra serve is not installed")


def opened(client: Any, sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection((client.base_url.host, client.base_url.port), 20)
    connection.sendall(sent)
    return connection


def is_closed_in(connection: socket.socket, seconds: float) -> bool:
    connection.settimeout(seconds)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_a_connection_whose_headers_do_not_come_is_closed(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.5)
    client = serve()
    started = b"GET /healthz HTTP/1.1\r\nHost: a\r\n"
    silent, begun, slow = opened(client), opened(client, started), opened(client, started)
    whole = opened(client, started + b"\r\n")
    with contextlib.suppress(ConnectionError):  # until it is closed
        for _ in range(200):
            slow.sendall(b"A: b\r\n")
            time.sleep(0.01)
    assert all(is_closed_in(each, 5) for each in (silent, begun, slow))
    assert whole.recv(15) == b"HTTP/1.1 200 OK"


def test_a_request_takes_longer_than_its_headers_may(
    serve: Callable[..., Any], engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.2)
    client = serve()
    for pause in (0.4, 0.0):  # the second on the same connection
        engine.open.clear()
        threading.Timer(pause, engine.open.set).start()
        assert post(client, text="w4 w5").status_code == 200


def test_many_idle_connections_keep_nobody_out(serve: Callable[..., Any]) -> None:
    client = serve()
    with contextlib.ExitStack() as ending:
        for _ in range(300):
            ending.enter_context(opened(client))
        assert post(client, text="w4 w5").status_code == 200


def test_the_limit_of_open_files_is_raised_to_what_the_system_allows() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
        connections.allow_connections()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_an_answer_does_not_wait_for_the_clients_acknowledgement() -> None:
    """asyncio sees to that only for sockets that it has made itself."""
    run = pytest.importorskip("tformer_deploy.serve.run")
    with run.bind("127.0.0.1", 0) as listening:
        listening.listen()
        with socket.create_connection(listening.getsockname(), 20), listening.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
