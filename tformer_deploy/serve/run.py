"""Runs the application on uvicorn until a signal ends it."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable

import uvicorn

from ..base.errors import ConfigError
from .app import LOG, make_app
from .models import Models

DRAIN_SECONDS = 30
"""Seconds that requests get to end after a signal."""


def run_server(models: Models, host: str, port: int, key: str, note: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; running requests end first. Raises ConfigError where the port is taken."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    LOG.propagate = False
    config = uvicorn.Config(
        make_app(models, key),
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )
    try:
        listening = config.bind_socket()
    except SystemExit:
        raise ConfigError(f"{host}:{port} cannot be listened on: choose another --host or --port") from None
    listening.listen(config.backlog)  # from here on clients may connect
    names = ", ".join(model.name for model in models)
    host, port = listening.getsockname()[:2]
    note(f"serving {names} on http://{host}:{port}")
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: None)  # uvicorn sends itself again the one that ended it
    uvicorn.Server(config).run(sockets=[listening])
