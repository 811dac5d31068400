"""Connections: those that send no request in time are closed, and as many may be open as the system allows.

What comes while the queue is full is refused here, before its body is read and before any task is made for it.
"""

from __future__ import annotations

import asyncio
import resource
from dataclasses import dataclass

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADER_SECONDS = 10.0
"""Seconds in which the headers of a request must have come."""
MOST_HEADER_BYTES = 1 << 16
"""Of a request's headers."""


@dataclass(frozen=True)
class Refusal:
    """An answer that is ready to be sent: status line and headers without the empty line, and body."""

    head: bytes
    body: bytes


class Timed(HttpToolsProtocol):
    """uvicorn's protocol, with limits of the time and size of a request's headers.

    Bodies have `answers.BODY_SECONDS`. The application's `refuse`, if it has one, is asked for each POST.
    """

    _deadline: asyncio.TimerHandle | None = None
    _is_in_headers, _is_refused = True, False
    _header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        super().data_received(data)
        if self._is_in_headers:
            self._header_bytes += len(data)
            if self._header_bytes > MOST_HEADER_BYTES and not self.transport.is_closing():
                self.send_400_response(f"The headers of a request exceed {MOST_HEADER_BYTES} bytes.")
        if self._is_in_headers or not self._is_answering():
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._stop_waiting()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """See `HttpToolsProtocol`."""
        super().on_message_begin()
        self._is_in_headers, self._is_refused = True, False

    def on_headers_complete(self) -> None:
        """See `HttpToolsProtocol`."""
        self._is_in_headers, self._header_bytes = False, 0
        self._stop_waiting()
        self._is_refused = self._refused()
        if not self._is_refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """See `HttpToolsProtocol`."""
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """See `HttpToolsProtocol`."""
        if not self._is_refused:
            super().on_message_complete()

    def _refused(self) -> bool:
        """Whether the request has been refused, and so answered."""
        parser = self.parser
        refuse = getattr(self.config.app, "refuse", None)
        if refuse is None or parser.get_method() != b"POST" or self._is_answering():
            return False
        if self.expect_100_continue or parser.should_upgrade():
            return False
        refusal: Refusal | None = refuse(self.url, self.headers)
        if refusal is None:
            return False
        keep = parser.get_http_version() != "1.0" and parser.should_keep_alive()
        lines = [b"%s: %s\r\n" % pair for pair in self.server_state.default_headers]
        close = b"" if keep else b"connection: close\r\n"
        self.transport.write(b"".join([refusal.head, *lines, close, b"\r\n", refusal.body]))
        self.server_state.total_requests += 1
        if not keep:
            self.transport.close()
        return True

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def allow_connections() -> None:
    """Raise this process's limit of open files, and so of connections, to what the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
