"""Several processes behind one port: started, told to reload and to end, and started again if they die."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from contextlib import suppress

from ..base.errors import EngineError
from ..base.processes import describe_end
from .pages import Pages
from .run import DRAIN_SECONDS, Service, bind, said
from .worker import READY, Task

MOST_DEATHS = 5
"""How often a worker may die before it has served for `SETTLED_SECONDS`; then the server ends, if no other serves."""
HANG_SECONDS = 30
"""A worker whose event loop has not turned for so long is killed, and so started again."""
SETTLED_SECONDS, MOST_WAIT_SECONDS = 60.0, 60


def run_workers(service: Service, workers: int, note: Callable[[str], None]) -> None:
    """Serve with several processes until SIGTERM or SIGINT. Raises EngineError where workers keep dying."""
    if service.grpc_port:
        bind(service.host, service.grpc_port, "--grpc-port").close()  # whether it is free; each worker takes it too
    with bind(service.host, service.port) as listening:
        asyncio.run(Team(service, workers, listening, note).run())


class Team:
    """The workers, by their numbers from 0."""

    def __init__(self, service: Service, workers: int, listening: socket.socket, note: Callable[[str], None]) -> None:
        self.service, self.workers, self.listening, self.note = service, workers, listening, note
        self.pages = Pages.make(workers)
        self._processes: dict[int, Process] = {}
        """Those that run."""
        self._ready: set[int] = set()
        """Those that have opened their models, and so can be told to reload."""
        self._hangups = 0
        self._warm, self._ending = asyncio.Event(), asyncio.Event()
        self._failure, self._has_said_why = "", False

    async def run(self) -> None:
        """Start all, the first alone: where bundles cannot be opened, one says so. Raises EngineError."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        tasks = [asyncio.create_task(self._keep(number)) for number in range(self.workers)]
        ending = asyncio.create_task(self._ending.wait())
        watching = asyncio.create_task(self._watch())
        await asyncio.wait([*tasks, ending, watching], return_when=asyncio.FIRST_COMPLETED)
        watching.cancel()  # workers that end write no more
        self._end()
        service = self.service
        most = service.shutdown_delay + DRAIN_SECONDS + service.served.caps.seconds
        _, late = await asyncio.wait(tasks, timeout=most)
        if late:
            self._failure = self._failure or f"workers did not end within {most:g} s"
            self._send(signal.SIGKILL)
        await asyncio.gather(*tasks)
        if self._has_said_why:
            sys.exit(1)
        if self._failure:
            raise EngineError(self._failure)

    def _end(self) -> None:
        self._ending.set()
        self._send(signal.SIGTERM)

    def _reload(self) -> None:
        """Tell those that can; the others are told when they can."""
        self._hangups += 1
        self._send(signal.SIGHUP, self._ready)

    def _send(self, number: int, to: set[int] | None = None) -> None:
        for worker, process in self._processes.items():
            if to is None or worker in to:
                with suppress(ProcessLookupError):  # it has died, which its task will see
                    process.send_signal(number)

    async def _watch(self) -> None:
        """Kill those that hang: each writes its page every second. Looks are counted, as a clock may jump."""
        seen: dict[int, tuple[int, int]] = {}
        while True:
            await asyncio.sleep(1)
            for number in self._ready:
                written, (last, looks) = self.pages.written(number), seen.get(number, (0, 0))
                seen[number] = written, looks + 1 if written == last else 0
                if looks + 1 >= HANG_SECONDS and written == last:
                    self.note(f"worker {number} (process {self._processes[number].pid}) hangs: it is killed")
                    self._send(signal.SIGKILL, {number})
                    seen[number] = 0, 0

    async def _keep(self, number: int) -> None:
        """Keep a worker running until all end."""
        if number:
            await _first(self._warm, self._ending)
        deaths = 0
        while not self._ending.is_set():
            start = time.monotonic()
            code = await self._run_one(number)
            if self._ending.is_set():
                if code not in (0, -signal.SIGTERM):  # that before it could handle the signal
                    self._fail(f"worker {number} {describe_end(code, ())} when it was told to end")
                return
            if not self._warm.is_set():
                self._has_said_why = code == 1
                self._fail(f"the first worker {describe_end(code, ())} before it was ready")
                return
            deaths = 1 if time.monotonic() - start > SETTLED_SECONDS else deaths + 1
            if deaths >= MOST_DEATHS and not self._ready:
                self._fail(f"worker {number} {describe_end(code, ())}, {deaths} times in a row")
                return
            wait = min(2 ** (deaths - 1), MOST_WAIT_SECONDS)
            self.note(f"worker {number} {describe_end(code, ())}: it is started again in {wait} s")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), wait)

    def _fail(self, why: str) -> None:
        self._failure = self._failure or why
        self._end()

    async def _run_one(self, number: int) -> int:
        """Run a worker to its end. Returns its exit code."""
        files, hangups = (self.listening.fileno(), *self.pages.files), self._hangups
        # As `multiprocessing` does; `-m` would put the current folder before all others.
        code = f"import sys; sys.path[:] = {sys.path!r}; from tformer_deploy.serve.worker import main; main()"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, stdin=PIPE, stdout=PIPE, pass_fds=files, start_new_session=True
        )
        self._processes[number] = process
        assert process.stdin and process.stdout
        if self._ending.is_set():  # it was not there to be told
            process.terminate()
        process.stdin.write(pickle.dumps(Task(self.service, number, files, os.getpid())))
        process.stdin.close()
        if await process.stdout.readline() == READY:
            self._is_ready(number, told=self._hangups == hangups)
        status = await process.wait()
        del self._processes[number]
        self._ready.discard(number)
        self.pages.of(number).write("")
        return status

    def _is_ready(self, number: int, told: bool) -> None:
        self._ready.add(number)
        self._warm.set()
        if not told:
            self._send(signal.SIGHUP, {number})
        if len(self._ready) == self.workers:
            self.note(f"{said(self.service, self.listening, self.service.grpc_port)} with {self.workers} workers")


async def _first(*events: asyncio.Event) -> None:
    """Wait for one of several."""
    tasks = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
