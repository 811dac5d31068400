"""Engines of fixed sizes whose steps choose what the next one is fed, so that a device need not wait for the search.

The search on the host stays the one judge: it is shown every step, late, and where it decides otherwise than the device
did, the steps from there on are done again. What it gets never depends on whether the device was ahead.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from ..config import ModelConfig
from ..errors import EngineError, LimitError, NoRoom
from ..plans import Profile
from .base import ANYTHING, Floats, Ints, Limits, Outlook, SameStep, Scores, check_request, check_step

DEAD = np.float32(-1e9)
"""The sum of a row that no candidate may come from."""
MISSES = 4
"""After so many other decisions of the search the device no longer works ahead for a batch."""


@dataclass(frozen=True)
class Choice:
    """What a step is fed: (B, K) each, of the device's sentences and rows."""

    tokens: Ints
    parents: Ints
    """Rows, counted over B*K."""
    values: Floats
    """Sums so far."""


@dataclass(frozen=True)
class Record:
    """What a step found."""

    ids: Ints
    """(B*K, k), best first."""
    scores: Floats
    next: Choice
    """What the device feeds the step after it."""


class Device(Protocol):
    """Buffers for one batch of a profile, and what runs on them. Steps are counted from 0."""

    profile: Profile
    best: int
    """Tokens that a step returns per row."""

    def encode(self, src_ids: Ints, src_lengths: Ints, outlook: Outlook) -> None:
        """Begin with these sources, (B, S) and (B) of the profile's sizes."""
        ...

    def feed(self, choice: Choice, step: int) -> None:
        """Feed the next step this, not what the device chose; it is step `step`."""
        ...

    def issue(self, step: int) -> None:
        """Run a step, or have it run."""
        ...

    def read(self, step: int) -> Record:
        """What one of the last `ahead` + 1 steps found; waits for it."""
        ...

    def log_probs(self, step: int) -> Floats:
        """All log-probabilities (B*K, V) of the step that was issued last, which is `step`."""
        ...

    def cross(self) -> list[Floats]:
        """The encoder's outputs."""
        ...

    def free(self) -> None:
        """Give the memory back."""
        ...


@dataclass
class AheadState:
    """A batch on a device; `places` and `parents` are rows of the device, for each row (B, K) of the search."""

    device: Device
    src_tokens: int
    steps: int
    """How far the device may work ahead."""
    places: Ints
    """Where the last step's rows lie."""
    parents: Ints
    """What the next step's rows continue."""
    position: int = 0
    issued: int = 0
    """Steps that the device was told to do."""
    fed: list[Choice] = field(default_factory=list)
    """What the steps up to `position` were fed."""
    record: Record | None = None
    """Of the step before `position`."""
    misses: int = 0


class AheadEngine(SameStep, ABC):
    """What the engines of target `trt` share; a subclass brings the devices."""

    config: ModelConfig
    limits: Limits
    attention = False
    ahead = 1
    """Steps that a device does before the search has seen those before them."""
    keeps = 0
    """So many devices that a batch has done with wait for another one of their sizes."""
    not_captured = ""
    """Why steps are not replayed as CUDA graphs, if they should be and are not."""

    def __enter__(self) -> Self:
        self._idle: list[Device] = []
        self._lock, self._open = threading.Lock(), True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        self._idle.clear()

    @abstractmethod
    def choose(self, batch: int, src_tokens: int, outlook: Outlook) -> Profile:
        """The sizes for a request. Raises LimitError."""

    @abstractmethod
    def make(self, profile: Profile) -> Device:
        """A device for one batch at a time."""

    def take(self, profile: Profile) -> Device:
        """One that no batch has; where there is no room, those that wait are given up for it."""
        with self._lock:
            for device in self._idle:
                if device.profile == profile:
                    self._idle.remove(device)
                    return device
            self._free_idle(self.keeps)
            try:
                return self.make(profile)
            except NoRoom:
                if not self._idle:
                    raise
            self._free_idle(0)
            return self.make(profile)

    def _free_idle(self, most: int) -> None:
        while len(self._idle) > most:
            self._idle.pop(0).free()

    def give_back(self, device: Device) -> None:
        """A batch has ended; without the lock, as any thread may come by here at any time, collecting garbage."""
        if self.keeps and self._open:
            self._idle.append(device)

    def note_not_captured(self, reason: str) -> None:
        """Say, once, that steps are not replayed as CUDA graphs."""
        if not self.not_captured:
            warnings.warn(f"steps are not replayed as CUDA graphs: {reason}", stacklevel=2)
        self.not_captured = self.not_captured or reason

    def encode(self, src_ids: Ints, src_lengths: Ints, outlook: Outlook = ANYTHING) -> AheadState:
        """See `Engine.encode`."""
        lengths = np.array(src_lengths, np.int32)
        check_request(src_ids, lengths, self.config, self.limits)
        batch, src_tokens = src_ids.shape
        profile = self.choose(batch, src_tokens, outlook)
        device = self.take(profile)
        # Sentences that there is room for beside the request's have one token.
        every = np.full((profile.batch, profile.src_len), self.config.pad_id, np.int32)
        sizes = np.ones(profile.batch, np.int32)
        every[:batch, :src_tokens], sizes[:batch] = src_ids, lengths
        try:
            device.encode(every, sizes, outlook)
        except EngineError:
            device.free()
            raise
        first = np.arange(batch, dtype=np.int32)[:, None] * profile.beams
        last = 0 if outlook.drawn else min(outlook.tokens or profile.capacity, profile.capacity)
        state = AheadState(device, src_tokens, last, first, first)
        weakref.finalize(state, self.give_back, device)
        return state

    def best(self, beams: int, state: AheadState) -> int:
        """See `Engine.best`."""
        return state.device.best

    def step(self, tokens: Ints, state: AheadState, full: bool = False, attention: bool = False) -> Scores:
        """See `Engine.step`. Of tokens with equal scores any may come first."""
        device, width = state.device, tokens.shape[1]
        if width > device.profile.beams:
            raise LimitError(f"{width} beams exceed the {device.profile.beams} that were announced: {device.profile}")
        check_step(width, state.position, self.limits)
        if state.position >= device.profile.capacity:
            raise LimitError(f"decoding step {state.position + 1} is beyond what was announced: {device.profile}")
        if attention:
            raise LimitError("graphs of target trt do not return attention: use the standard graphs of fp32-attention")
        places = self._chosen(tokens, state)
        if places is None or (full and state.issued > state.position + 1):
            places = self._again(tokens, state)
        if not full and state.misses < MISSES:
            while state.issued < min(state.position + 1 + self.ahead, state.steps):
                device.issue(state.issued)
                state.issued += 1
        record = device.read(state.position)
        every = device.log_probs(state.position)[places] if full else None
        state.record, state.places, state.parents = record, places, places
        state.position += 1
        return Scores(record.ids[places], record.scores[places], every)

    def reorder(self, state: AheadState, parents: Ints, sentences: Ints | None = None) -> None:
        """See `Engine.reorder`."""
        state.parents = state.places.ravel()[parents]

    def cross_keys_values(self, state: AheadState) -> list[Floats]:
        """See `Engine.cross_keys_values`."""
        sentences = state.parents[:, 0] // state.device.profile.beams
        return [value[sentences][:, :, : state.src_tokens] for value in state.device.cross()]

    def _chosen(self, tokens: Ints, state: AheadState) -> Ints | None:
        """Where the device's own next step has the rows that the search wants, in whatever order; or nothing."""
        if state.issued <= state.position:
            return None
        assert state.record
        own, width = state.record.next, state.device.profile.beams
        sentences = state.parents[:, 0] // width
        same: NDArray[np.bool_] = own.tokens[sentences][:, None] == tokens[:, :, None]
        same &= own.parents[sentences][:, None] == state.parents[:, :, None]  # (B, K, rows of the device)
        if not same.any(2).all():
            return None
        state.fed.append(own)
        places: Ints = (sentences[:, None] * width + same.argmax(2)).astype(np.int32)
        return places

    def _again(self, tokens: Ints, state: AheadState) -> Ints:
        """Feed what the search wants, after doing again what led there if the device has gone on without it."""
        device, step, width = state.device, state.position, state.device.profile.beams
        if state.issued > step:
            state.misses += 1
            # With one row a sentence nothing was moved, and what was written too much is masked or written again.
            for i, choice in enumerate(state.fed[:step] if width > 1 else []):
                device.feed(choice, i)
                device.issue(i)
        sums = self._sums(tokens, state)
        sentences = state.parents[:, 0] // width
        rows = np.minimum(np.arange(width), tokens.shape[1] - 1)  # rows that the search does not have repeat its last
        shape = device.profile.batch, width
        every = np.arange(device.profile.batch * width, dtype=np.int32).reshape(shape)
        choice = Choice(np.zeros(shape, np.int32), every, np.full(shape, DEAD))
        choice.tokens[sentences], choice.parents[sentences] = tokens[:, rows], state.parents[:, rows]
        choice.values[sentences, : tokens.shape[1]] = sums
        state.fed[step:] = [choice]
        device.feed(choice, step)
        device.issue(step)
        state.issued = step + 1
        return (sentences[:, None] * width + np.arange(tokens.shape[1])).astype(np.int32)

    def _sums(self, tokens: Ints, state: AheadState) -> Floats:
        """What the search's rows (B, K) add up to, where their tokens are among the best that the device knows."""
        if not state.position:
            return np.zeros(tokens.shape, np.float32)
        assert state.record
        same = state.record.ids[state.parents] == tokens[:, :, None]
        added = np.where(same, state.record.scores[state.parents], 0).sum(2)
        before = state.fed[state.position - 1].values.ravel()[state.parents]
        return np.where(same.any(2), before + added, DEAD).astype(np.float32)
