"""Continuous batching of lines: any thread submits lines, one thread steps those that run."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from threading import Condition, Thread
from typing import Any, Self

from ..base.errors import ConfigError, EngineError, LimitError, TformerError
from ..base.settings import check_whole
from ..decoding import Batch, DecodeOptions, Request, Trie, check_search, continuous
from ..engines.base import Joined, Running
from .batches import make_batch
from .streaming import TextStream
from .translator import Result, Translator

JOIN_TOKENS = 256
"""Padded source tokens that are encoded between two steps while other lines run: some ten lines of usual length. With
the preset `base` in int8, on two cores, they take 16 ms, and a step of 20 lines 4 ms; times grow with the tokens."""
MOST_SLOTS, MOST_QUEUED = 4096, 1 << 20
BOUNDS = tuple(float(f"{digit}e{power}") for power in range(-4, 2) for digit in (1, 2, 5))
"""Seconds between which `Times` counts."""


class Busy(TformerError):
    """The queue is full: try again later."""


class Late(TformerError):
    """A line's deadline has passed."""


class Cancelled(TformerError):
    """A line was cancelled."""


class Line:
    """A line on its way: waiting, running or ended."""

    def __init__(self, options: DecodeOptions, batch: Batch, seconds: float | None, stream: TextStream | None) -> None:
        self.options, self.batch, self.stream = options, batch, stream
        self.submitted = time.monotonic()
        self.deadline = self.submitted + seconds if seconds is not None else None
        self.first: float | None = None
        """When its first step ended."""
        self.search: Joined | None = None
        self.future: Future[Result] = Future()
        """Its result, or the error of this line. Its own `cancel` does nothing: a task that waits for it may be
        cancelled, see `cancel`."""
        self.future.set_running_or_notify_cancel()
        self.cancelled = False
        self.on_end: Callable[[Result | BaseException], None] | None = None
        """Called before the result or the error is handed over."""

    def cancel(self) -> None:
        """Give the line up: it leaves before the next step, and its future raises Cancelled."""
        self.cancelled = True

    def result(self, seconds: float | None = None) -> Result:
        """Wait for the result. Raises the line's error, and TimeoutError after so many seconds."""
        return self.future.result(seconds)

    @property
    def on_token(self) -> Callable[[int], None] | None:
        """What streams its tokens, if they are final at once."""
        return self.stream.on_token if self.stream and self.options.streamable else None

    @property
    def length(self) -> int:
        """Source tokens."""
        return int(self.batch.src_ids.shape[1])

    @property
    def running(self) -> bool:
        """Whether it has joined and not ended."""
        return self.search is not None and self.search.running

    def why_ended(self, now: float) -> TformerError | None:
        """Why the line is not to go on, if so."""
        if self.cancelled:
            return Cancelled("the line was cancelled")
        if self.deadline is not None and now > self.deadline:
            return Late(f"the line did not end within {self.deadline - self.submitted:g} s")
        return None

    def end(self, result: Result | BaseException) -> None:
        """Hand the result or the error over. An error that is no TformerError becomes an EngineError."""
        if isinstance(result, BaseException):
            result = _named(result)
        if self.on_end:
            self.on_end(result)
        if isinstance(result, BaseException):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)


class Times:
    """How many times lie between bounds, for a histogram."""

    def __init__(self) -> None:
        self.counts, self.sum = [0] * (len(BOUNDS) + 1), 0.0

    def add(self, seconds: float) -> None:
        """Count a time."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds


class Group:
    """Running lines that share steps."""

    def __init__(self, batch: Running, allowed: Trie | None) -> None:
        self.batch, self.allowed = batch, allowed
        self.lines: list[Line] = []

    def add(self, lines: list[Line]) -> None:
        """Let lines join. Those that the engine refuses end with its error; if it fails, so do all that run."""
        try:
            self._join(lines)
        except LimitError as error:
            if len(lines) == 1:
                lines[0].end(error)
                return
            for line in lines:  # perhaps it refuses only some of them
                self.add([line])
        except BaseException as error:  # `step` ends those that ran
            for line in lines:
                line.end(error)

    def _join(self, lines: list[Line]) -> None:
        requests = [Request(line.batch, line.options, self.allowed, line.on_token) for line in lines]
        for line, search in zip(lines, self.batch.add(requests), strict=True):
            line.search = search
        self.lines += lines

    def remove(self, line: Line, error: TformerError) -> None:
        """End a line early."""
        assert line.search
        self.lines.remove(line)
        line.end(error)
        with suppress(BaseException):  # which ended the others: each has the error
            self.batch.remove(line.search)

    def step(self) -> list[Line]:
        """Take a step. Returns the lines that ended with it."""
        with suppress(BaseException):  # which ended all lines: each has the error
            self.batch.step()
        ended = [line for line in self.lines if not line.running]
        self.lines = [line for line in self.lines if line.running]
        return ended


class Scheduler:
    """Translates lines of many callers together: they join a running batch and leave it when they have ended.

    A line's result is what `Translator.translate` gives for it alone. Lines wait in order of arrival. Those with about
    as many rows (1, 2, 3 to 4, 5 to 8 and so on) share steps, so that a wide beam makes nobody else's steps wider.
    An engine that admits nobody to a running batch (`Engine.admits`) begins a batch when the one before has ended.
    """

    def __init__(
        self, translator: Translator, slots: int = 32, max_queue: int = 1024, join_tokens: int = JOIN_TOKENS
    ) -> None:
        """`translator`: open. `slots`: most lines that run at once; `max_queue`: how many more may wait."""
        check_whole("slots", slots, 1, MOST_SLOTS)
        check_whole("max_queue", max_queue, 0, MOST_QUEUED)
        check_whole("join_tokens", join_tokens, 1, MOST_QUEUED)
        self.translator, self.slots, self.max_queue, self.join_tokens = translator, slots, max_queue, join_tokens
        self.steps = self.rows = 0
        """Steps so far, and the rows of all of them."""
        self.tokens = 0
        """Tokens of the lines that have ended, the best output of each."""
        self.failed: Counter[str] = Counter()
        """Lines that failed or were refused, by the name of their error's class."""
        self.first_token, self.per_token = Times(), Times()
        """From a line's arrival to the end of its first step; from there, the mean time of its further steps."""
        self._unfinished = 0
        """Lines that wait, join or run."""
        self._waiting: deque[Line] = deque()
        self._joining: dict[int, list[Line]] = {}
        self._groups: dict[int, Group] = {}
        self._wake, self._closed, self._abandoned = Condition(), False, False
        self._thread = Thread(target=self._run, name="tformer scheduler", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *why: object) -> None:
        self.close(drain=why[0] is None)

    @property
    def running(self) -> int:
        """Lines that run."""
        return sum(len(group.lines) for group in list(self._groups.values()))

    @property
    def waiting(self) -> int:
        """Lines that wait."""
        return len(self._waiting)

    def submit(
        self,
        text: str,
        prefix: str = "",
        write: Callable[[str], None] | None = None,
        seconds: float | None = None,
        number: int = 0,
        **decoding: Any,
    ) -> Line:
        """Queue a line; `Line.result` waits for its result.

        `write` is called with each further piece of its text, in the scheduler's thread: at once for greedy search and
        single samples, else when the line has ended. `seconds`: from now on, after which it fails with Late. `number`
        seeds its samples. `decoding`: options over the translator's.

        Raises Busy where the queue is full, and what `Translator.translate` raises for a line.
        """
        self.check_room()
        try:
            return self._submit(self._line(text, prefix, write, seconds, number, decoding))
        except TformerError as error:
            self._count(error)
            raise

    def check_room(self) -> None:
        """Raise Busy where the queue is full, and count it as a line that was refused."""
        if busy := self._busy():
            self._count(busy)
            raise busy

    @property
    def full(self) -> bool:
        """Whether the queue has no room."""
        return self._unfinished >= self.slots + self.max_queue

    def _busy(self) -> Busy | None:
        if not self.full:
            return None
        return Busy(f"{len(self._waiting)} lines are waiting: try again later")

    def _submit(self, line: Line) -> Line:
        if not line.length:
            line.end(Result("", [], 0.0))
            return line
        with self._wake:
            if self._closed:
                raise ConfigError("the scheduler is closed: it takes no lines")
            if busy := self._busy():
                raise busy
            self._unfinished += 1
            line.on_end = self._ended
            self._waiting.append(line)
            self._wake.notify()
        return line

    def _ended(self, result: Result | BaseException) -> None:
        with self._wake:
            self._unfinished -= 1
        if isinstance(result, BaseException):
            self._count(result)

    def _count(self, error: BaseException) -> None:
        with self._wake:
            self.failed[type(error).__name__] += 1

    def close(self, drain: bool = True) -> None:
        """Take no more lines, and end the thread when all lines have ended; without `drain`, cancel them."""
        with self._wake:
            self._closed, self._abandoned = True, self._abandoned or not drain
            self._wake.notify()
        self._thread.join()

    def _line(
        self,
        text: str,
        prefix: str,
        write: Callable[[str], None] | None,
        seconds: float | None,
        number: int,
        decoding: dict[str, Any],
    ) -> Line:
        asking = self.translator.asking(**decoding)
        requests = asking.read([text], [prefix] if prefix else [], number)
        [source] = requests.sources
        config, options = asking.engine.config, asking.options
        batch = make_batch([source], config.pad_id, [number], requests.prefixes)
        if source:
            check_search(asking.engine, batch, options, asking.allowed)
        stream = TextStream(asking.tokenizers, options.ends(config.eos_id), write) if write else None
        return Line(options, batch, seconds, stream)

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closed or self._waiting or self.running)
                if not self._waiting and not self.running:
                    return
            try:
                with self.translator.in_use():
                    self._drop()
                    self._join()
                    self._step()
            except BaseException as error:  # whatever it is: without this thread, lines would wait for ever
                self._fail(error)

    def _drop(self) -> None:
        """End lines that are cancelled or late; all, if the scheduler was closed without draining."""
        now = time.monotonic()

        def why_ended(line: Line) -> TformerError | None:
            if self._abandoned:
                line.cancel()
            return line.why_ended(now)

        for group in self._groups.values():
            for line in list(group.lines):
                if error := why_ended(line):
                    group.remove(line, error)
        with self._wake:
            for line in list(self._waiting):
                if error := why_ended(line):
                    self._waiting.remove(line)
                    line.end(error)

    def _join(self) -> None:
        """Let waiting lines join, in order: as many as there are slots, and as the encoder may take between steps."""
        joining = self._joining
        count, longest, running = 0, 0, self.running
        while self._waiting and running + count < self.slots:
            line = self._waiting[0]
            key = 1 << (line.options.rows - 1).bit_length()
            longest = max(longest, line.length)
            if running and count and longest * (count + 1) > self.join_tokens:
                break
            if not self._has_room(key, joining.get(key, []), line):
                break
            joining.setdefault(key, []).append(self._waiting.popleft())
            count += 1
        for key in list(joining):
            if key not in self._groups:
                self._groups[key] = Group(continuous(self.translator.engine), self.translator.allowed)
            self._groups[key].add(joining.pop(key))

    def _has_room(self, key: int, joining: list[Line], line: Line) -> bool:
        engine = self.translator.engine
        running = self._groups[key].lines if key in self._groups else []
        if running and not engine.admits:
            return False
        lines = [*running, *joining, line]
        rows, tokens = max(each.options.rows for each in lines), max(each.options.max_tokens for each in lines)
        limits = engine.limits
        most = limits.sentences(rows, max(each.length for each in lines), min(tokens, limits.tgt_tokens))
        return len(lines) <= max(1, most)

    def _step(self) -> None:
        """One step of each group."""
        for group in self._groups.values():
            if not group.lines:
                continue
            self.steps += 1
            self.rows += sum(line.options.rows for line in group.lines)
            stepped, ended, now = group.lines, group.step(), time.monotonic()
            for line in stepped:
                if line.first is None:
                    line.first = now
                    self.first_token.add(now - line.submitted)
            for line in ended:
                line.end(self._result(line, now))

    def _result(self, line: Line, now: float) -> Result | BaseException:
        try:
            assert line.search and line.first
            [outputs] = line.search.outputs()
            result = self.translator.result_of(outputs)
            self.tokens += len(result.ids)
            if further := len(result.ids) + result.finished - 1:
                self.per_token.add((now - line.first) / further)
            if line.stream:
                line.stream.finish(result.text)
        except BaseException as error:
            return error
        return result

    def _fail(self, error: BaseException) -> None:
        """End all lines with an error that is nobody's own."""
        with self._wake:
            lines = list(self._waiting)
            for some in (*self._joining.values(), *(group.lines for group in self._groups.values())):
                lines += some
            self._waiting.clear()
            self._joining.clear()
            self._groups.clear()
        for line in lines:
            if not line.future.done():
                line.end(error)


def _named(error: BaseException) -> BaseException:
    return error if isinstance(error, TformerError) else EngineError(f"{type(error).__name__}: {error}")
