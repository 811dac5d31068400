"""Clients that connect and send nothing, or too slowly, keep nobody else out."""

from __future__ import annotations

import contextlib
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from .serving import Watched, counted, post, wait_for
from .test_serve_reload import BUNDLES

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
    monkeypatch.setattr(connections, "HEADER_SECONDS", 1)
    client = serve()
    started = b"GET /healthz HTTP/1.1\r\nHost: a\r\n"
    silent, begun, slow = opened(client), opened(client, started), opened(client, started)
    whole = opened(client, started + b"\r\n")
    with pytest.raises(ConnectionError):  # though something comes all the time
        for _ in range(1000):
            slow.sendall(b"A: b\r\n")
            time.sleep(0.01)
    assert all(is_closed_in(each, 5) for each in (silent, begun, slow))
    assert whole.recv(15) == b"HTTP/1.1 200 OK"


def test_a_request_takes_longer_than_its_headers_may(
    serve: Callable[..., Any], engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 1)
    client = serve()
    for pause in (1.5, 0.0):  # the second on the same connection
        engine.open.clear()
        threading.Timer(pause, engine.open.set).start()
        assert post(client, text="w4 w5").status_code == 200


@contextlib.contextmanager
def full(client: Any, engine: Watched, **headers: str) -> Iterator[None]:
    """One text runs and one waits, of a server that has room for these."""
    engine.open.clear()
    asked = {"url": "/v1/translate", "json": {"text": "w4"}, "headers": headers}
    threads = [threading.Thread(target=client.post, kwargs=asked) for _ in range(2)]
    client.headers.update(headers)
    for thread, name in zip(threads, ("running_lines", "waiting_lines"), strict=True):
        thread.start()
        wait_for(lambda name=name: counted(client, name) == 1)  # type: ignore[misc]
    yield
    engine.open.set()
    for thread in threads:
        thread.join(20)


def head(path: str, length: int, more: str = "") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n{more}\r\n".encode()


def answer_on(connection: socket.socket) -> tuple[str, str, str]:
    """Status line, headers and body."""
    found = ""
    while "\r\n\r\n" not in found:
        found += connection.recv(1).decode()
    begin, _, _ = found.partition("\r\n\r\n")
    status, _, headers = begin.partition("\r\n")
    length = re.search(r"content-length: (\d+)", headers.lower())
    assert length
    return status, headers.lower(), connection.recv(int(length[1]), socket.MSG_WAITALL).decode()


def test_a_full_queue_is_said_before_the_body_comes(serve: Callable[..., Any], engine: Watched) -> None:
    client = serve(named={"numbers": {}}, slots=1, max_queue=1)
    with full(client, engine), opened(client) as connection:
        for path, error in (("/v1/translate", '{"error": "1 lines are waiting'), ("/v1/completions", '{"error": {')):
            connection.sendall(head(path, 3, "X-Request-Id: mine\r\n"))
            status, headers, body = answer_on(connection)
            assert status == "HTTP/1.1 429 Too Many Requests" and body.startswith(error)
            assert "retry-after: 1" in headers and "x-request-id: mine" in headers
            connection.sendall(b"{}}")  # the body that nobody reads
        two = head("/v1/translate", 2) + b"{}" + head("/v1/translate", 2, "Connection: close\r\n") + b"{}"
        connection.sendall(two)
        assert "connection: close" not in answer_on(connection)[1]
        assert "connection: close" in answer_on(connection)[1] and is_closed_in(connection, 5)
        text = client.get("/metrics").text
        assert 'tformer_failed_lines_total{kind="Busy",model="numbers"} 4.0' in text
        assert 'tformer_requests_total{route="translate",status="429"} 3.0' in text
    assert post(client, text="w4").status_code == 200


def test_a_full_queue_tells_strangers_nothing(serve: Callable[..., Any], engine: Watched) -> None:
    client = serve("key", named={"numbers": {}}, slots=1, max_queue=1)
    with full(client, engine, Authorization="Bearer key"):
        assert post(client, text="w4").status_code == 429
        client.headers.clear()
        assert post(client, text="w4").status_code == 401


def test_headers_without_end_are_refused(serve: Callable[..., Any]) -> None:
    client = serve()
    with opened(client, b"GET /healthz HTTP/1.1\r\nHost: a\r\n") as connection:
        with contextlib.suppress(ConnectionError):
            for _ in range(200):
                connection.sendall(b"A: " + b"b" * 1000 + b"\r\n")
        answer = b""
        with contextlib.suppress(ConnectionError):  # what it had not read resets the connection
            while part := connection.recv(1000):
                answer += part
        assert answer.startswith(b"HTTP/1.1 400") or not answer


def test_many_idle_connections_keep_nobody_out(serve: Callable[..., Any]) -> None:
    client = serve()
    with contextlib.ExitStack() as ending:
        for _ in range(300):
            ending.enter_context(opened(client))
        assert post(client, text="w4 w5").status_code == 200


@pytest.mark.long
def test_ten_thousand_idle_connections_keep_nobody_out() -> None:
    """From several addresses, as one has fewer ports. The server's own time limit would end them one after another."""
    count, limits = 10_000, resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < count + 500:
        pytest.skip(f"the hard limit of open files is {limits[1]}")
    code = "from tformer_deploy.serve import connections; connections.HEADER_SECONDS = 300.0"
    code += "; from tformer_deploy.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", str(BUNDLES / "names"), "--port", "0"]
    with contextlib.ExitStack() as ending:
        server = ending.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        ending.callback(server.kill)
        assert server.stderr
        port = re.search(r":(\d+)$", server.stderr.readline().strip())
        assert port
        threading.Thread(target=server.stderr.read, daemon=True).start()
        ending.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
        url, before = f"http://127.0.0.1:{port[1]}/v1/translate", resident_kib(server.pid)
        expected = httpx.post(url, json={"text": "seven"}, timeout=60).json()
        held = []
        for number in range(count):
            source = (f"127.0.0.{2 + number % 4}", 0)
            held.append(ending.enter_context(socket.create_connection(("127.0.0.1", int(port[1])), 60, source)))
            if number % 1000 == 999:
                assert httpx.post(url, json={"text": "seven"}, timeout=60).json() == expected
        each = (resident_kib(server.pid) - before) / count
        assert len(list(Path(f"/proc/{server.pid}/fd").iterdir())) > count
        assert 0 < each < 32, f"{each:.1f} KiB a connection"
        held[0].sendall(head("/v1/translate", 17) + b'{"text": "seven"}')
        assert answer_on(held[0])[0] == "HTTP/1.1 200 OK"
        print(f"{each:.1f} KiB a connection")


def resident_kib(process: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{process}/status").read_text())
    assert found
    return int(found[1])


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
