"""One of several processes of a server; `workers` starts it."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import socket
import sys
from dataclasses import dataclass

from ..base.errors import TformerError
from ..base.notes import note, printable
from ..base.processes import PARENT_DEATH_SIGNAL
from .pages import Member, Pages
from .run import Service, serve_on

READY = b"ready\n"
"""What a worker writes to its standard output when it takes requests."""


@dataclass(frozen=True)
class Task:
    """What a worker reads from its standard input."""

    service: Service
    number: int
    files: tuple[int, ...]
    """Open files that it has inherited: the socket, then the pages of all workers."""
    parent: int


def main() -> None:
    """Read the task, and serve until a signal."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no reply
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)  # nobody would start it again
    task: Task = pickle.load(sys.stdin.buffer)
    if os.getppid() != task.parent:
        sys.exit(1)
    member = Member(Pages(task.files[1:], task.number), task.parent)
    try:
        with socket.socket(fileno=task.files[0]) as listening:
            serve_on(listening, task.service, lambda _: replies.write(READY), member)
    except TformerError as error:
        note(printable(f"error: {error}"))
        sys.exit(1)
