"""Connections: those that send no request in time are closed, and as many may be open as the system allows."""

from __future__ import annotations

import asyncio
import resource

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADER_SECONDS = 10.0
"""Seconds in which the headers of a request must have come."""
HEADER_BYTES = 1 << 16
"""The most that they may have."""


class Timed(HttpToolsProtocol):
    """uvicorn's protocol, with limits of the time and size of a request's headers; bodies have `answers.BODY_SECONDS`.

    httptools, as uvicorn's other protocol, h11, takes twice the time of all else that a refused request costs.
    """

    _deadline: asyncio.TimerHandle | None = None
    _received = 0
    """Bytes since the headers of a request began."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        super().data_received(data)
        if self._deadline is not None:
            self._received += len(data)
            if self._received > HEADER_BYTES and not self.transport.is_closing():
                self.send_400_response(f"The headers of a request exceed {HEADER_BYTES} bytes.")

    def on_message_begin(self) -> None:
        """The first byte of a request has come."""
        super().on_message_begin()
        self._wait()

    def on_headers_complete(self) -> None:
        """The headers have come."""
        self._stop_waiting()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        if self._deadline is None:
            self._received = 0
            self._deadline = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def allow_connections() -> None:
    """Raise this process's limit of open files, and so of connections, to what the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
