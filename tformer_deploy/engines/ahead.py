"""Engines of fixed sizes whose steps choose what the next one is fed, so that a device need not wait for the search.

The search on the host stays the one judge: it is shown every step, late, and where it decides otherwise than the device
did, that step is done again. What it gets never depends on whether the device was ahead.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from dataclasses import astuple, dataclass, field, replace
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from ..base.errors import EngineError, LimitError, NoRoom
from ..bundle.contract import DEAD
from ..bundle.plans import Profile
from ..model.config import ModelConfig
from .base import ANYTHING, Floats, Ints, Limits, Outlook, SameStep, Scores, check_request, check_step

MISSES = 4
"""Wrong guesses of the next step after which a batch is no longer run ahead: each costs a step."""


@dataclass(frozen=True)
class Choice:
    """What a step is fed: (B, K) each, of the device's sentences and rows."""

    tokens: Ints
    parents: Ints
    """Rows, counted over B*K."""
    values: Floats
    """Sums so far."""
    positions: Ints
    """In the target of each sentence."""


FED = ("tokens", "parents", "values", "positions")
"""As the inputs are called."""


@dataclass(frozen=True)
class Record:
    """What a step found."""

    ids: Ints
    """(B*K, k), best first."""
    scores: Floats
    next: Choice
    """What the device feeds the step after it."""


class Device(Protocol):
    """Buffers for one batch of a profile, and what runs on them. Steps are counted from 0.

    Even steps read what odd ones write, and the other way round, so that the last step can be done again.
    """

    profile: Profile
    best: int
    """Tokens that a step returns per row."""
    freed: bool

    def encode(self, src_ids: Ints, src_lengths: Ints, outlook: Outlook) -> None:
        """Have these sources, (B, S) and (B) of the profile's sizes, at any step."""
        ...

    def feed(self, choice: Choice, step: int) -> None:
        """Feed the next step this, not what the device chose; it is step `step`."""
        ...

    def issue(self, step: int) -> None:
        """Run a step, or have it run."""
        ...

    def read(self, step: int) -> Record:
        """What one of the last two steps found; waits for it."""
        ...

    def log_probs(self, step: int) -> Floats:
        """All log-probabilities (B*K, V) of the step that was issued last, which is `step`."""
        ...

    def cross(self) -> list[Floats]:
        """The encoder's outputs."""
        ...

    def caches(self, step: int) -> list[NDArray[Any]]:
        """What step `step` reads of earlier ones: 2L of (B*K, H, M, D), in the step's own type."""
        ...

    def fill(self, caches: list[NDArray[Any]], step: int) -> None:
        """Have step `step` read this, of up to M positions."""
        ...

    def free(self) -> None:
        """Give the memory back."""
        ...


@dataclass
class Seats:
    """A device and its sentences."""

    device: Device
    src_ids: Ints
    """(B, S)"""
    src_lengths: Ints
    begins: Ints
    """(B) The step that was the first of each."""


@dataclass
class AheadState:
    """Sentences on a device; `parents` are its rows, for each row (B, K) of the search."""

    seats: Seats
    outlook: Outlook
    parents: Ints
    """What the next step's rows continue."""
    steps: int = 0
    """How far the device may work ahead."""
    position: int = 0
    """Steps until now."""
    ahead: bool = False
    """Whether the device has done the next one too, by its own choice."""
    record: Record | None = None
    """Of the last step."""
    sums: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    """(B*K) `values` that it was fed."""
    misses: int = 0

    @property
    def sentences(self) -> Ints:
        """Where those of the search are on the device."""
        return self.parents[:, 0] // self.seats.device.profile.beams  # type: ignore[no-any-return]

    @property
    def longest(self) -> int:
        """Positions of the longest target."""
        return int((self.position - self.seats.begins[self.sentences]).max(initial=0))


class AheadEngine(SameStep, ABC):
    """What the engines of target `trt` share; a subclass brings the devices."""

    config: ModelConfig
    limits: Limits
    attention, admits = False, True
    keeps = 0
    """So many devices that a batch has done with wait for another one of their sizes."""
    not_captured = ""
    """Why steps are not replayed as CUDA graphs, if they should be and are not."""

    def __enter__(self) -> Self:
        self._idle: list[Device] = []
        self._lock, self._open = threading.Lock(), True
        return self

    def __exit__(self, *why: object) -> None:
        self._open = False
        self._idle.clear()

    @abstractmethod
    def choose(self, wanted: Profile, filled: int) -> Profile:
        """The sizes for a request whose targets have up to `filled` positions by now. Raises LimitError."""

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
        if self.keeps and self._open and not device.freed:
            self._idle.append(device)

    def note_not_captured(self, reason: str) -> None:
        """Say, once, that steps are not replayed as CUDA graphs."""
        if not self.not_captured:
            warnings.warn(f"steps are not replayed as CUDA graphs: {reason}", stacklevel=2)
        self.not_captured = self.not_captured or reason

    def encode(self, src_ids: Ints, src_lengths: Ints, outlook: Outlook = ANYTHING) -> AheadState:
        """See `Engine.encode`."""
        check_request(src_ids, src_lengths, self.config, self.limits)
        seats = self._seats(self.choose(self._wanted(len(src_ids), src_ids.shape[1], outlook), 0))
        state = AheadState(seats, outlook, np.empty((0, 1), np.int32))
        self._seat(state, src_ids, src_lengths, outlook)
        return state

    def admit(self, state: AheadState, src_ids: Ints, src_lengths: Ints, outlook: Outlook = ANYTHING) -> None:
        """See `Engine.admit`. What there is no room for moves to a larger device, with all others."""
        check_request(src_ids, src_lengths, self.config, self.limits)
        outlook = state.outlook.beside(outlook)
        total = len(state.parents) + len(src_ids)
        if total > self.limits.batch:
            raise LimitError(f"{total} sentences exceed the limit of {self.limits.batch}: admit fewer")
        widest = max(src_ids.shape[1], state.seats.src_lengths[state.sentences].max(initial=1))
        wanted = self._wanted(total, int(widest), outlook)
        chosen = self.choose(wanted, state.longest)
        have, need, most = map(astuple, (state.seats.device.profile, wanted, chosen))
        if any(has < min(size, enough) for has, size, enough in zip(have, need, most, strict=True)):
            self._move(state, chosen)
        self._seat(state, src_ids, src_lengths, outlook)

    def best(self, beams: int, state: AheadState) -> int:
        """See `Engine.best`."""
        return state.seats.device.best

    def step(self, tokens: Ints, state: AheadState, full: bool = False, attention: bool = False) -> Scores:
        """See `Engine.step`. Of tokens with equal scores any may come first."""
        profile, width, longest = state.seats.device.profile, tokens.shape[1], state.longest
        if width > profile.beams:
            raise LimitError(f"{width} beams exceed the {profile.beams} that were announced: {profile}")
        check_step(width, longest, self.limits)
        if attention:
            raise LimitError("graphs of target trt do not return attention: use the standard graphs of fp32-attention")
        if longest == profile.capacity:
            wanted = self._wanted(len(tokens), int(state.seats.src_lengths[state.sentences].max()), state.outlook)
            chosen = self.choose(wanted, longest)
            if chosen.capacity <= longest:
                raise LimitError(f"decoding step {longest + 1} is beyond what was announced: {profile}")
            self._move(state, chosen)
        device = state.seats.device
        places = self._chosen(tokens, state) if state.ahead else None
        if places is None:
            places = self._feed(tokens, state)
        following, room = state.position + 1, longest + 1 < device.profile.capacity
        state.ahead = not full and state.misses < MISSES and following < state.steps and room
        if state.ahead:
            device.issue(following)
        state.record = record = device.read(state.position)
        every = device.log_probs(state.position)[places] if full else None
        state.parents, state.position = places, following
        return Scores(record.ids[places], record.scores[places], every)

    def reorder(self, state: AheadState, parents: Ints, sentences: Ints | None = None) -> None:
        """See `Engine.reorder`."""
        state.parents = state.parents.ravel()[parents]

    def cross_keys_values(self, state: AheadState) -> list[Floats]:
        """See `Engine.cross_keys_values`."""
        longest = state.seats.src_lengths[state.sentences].max()
        return [value[state.sentences][:, :, :longest] for value in state.seats.device.cross()]

    def _wanted(self, batch: int, src_tokens: int, outlook: Outlook) -> Profile:
        limits = self.limits
        tokens = min(outlook.tokens or limits.tgt_tokens, limits.tgt_tokens)
        return Profile(batch, outlook.beams or limits.beams, src_tokens, tokens)

    def _seats(self, profile: Profile) -> Seats:
        """A device; sentences that nobody has asked for have one token."""
        sources = np.full((profile.batch, profile.src_len), self.config.pad_id, np.int32)
        device = self.take(profile)
        seats = Seats(device, sources, *(np.full(profile.batch, n, np.int32) for n in (1, 0)))
        weakref.finalize(seats, self.give_back, device)
        return seats

    def _seat(self, state: AheadState, src_ids: Ints, src_lengths: Ints, outlook: Outlook) -> None:
        """Put sentences where none of the search are; a device encodes all that it has, as it has one size."""
        seats, profile = state.seats, state.seats.device.profile
        free = np.setdiff1d(np.arange(profile.batch), state.sentences)[: len(src_ids)]
        seats.src_ids[free] = self.config.pad_id
        seats.src_ids[free, : src_ids.shape[1]] = src_ids
        seats.src_lengths[free], seats.begins[free] = src_lengths, state.position
        self._encode(seats, outlook)
        rows = np.repeat(free[:, None] * profile.beams, state.parents.shape[1], 1).astype(np.int32)
        state.parents = np.concatenate((state.parents, rows))
        state.outlook, state.ahead = outlook, False
        state.steps = 0 if outlook.drawn else state.position + (outlook.tokens or self.limits.tgt_tokens)

    def _encode(self, seats: Seats, outlook: Outlook) -> None:
        try:
            seats.device.encode(seats.src_ids, seats.src_lengths, outlook)
        except EngineError:
            seats.device.free()
            raise

    def _move(self, state: AheadState, profile: Profile) -> None:
        """Go on on another device, with what is known of the search's rows."""
        seats, own, filled = self._seats(profile), state.sentences, state.longest
        rows = np.arange(len(own))[:, None] * profile.beams + np.arange(state.parents.shape[1])

        def moved(values: NDArray[Any]) -> NDArray[Any]:
            found = np.zeros((profile.batch * profile.beams, *values.shape[1:]), values.dtype)
            found[rows] = values[state.parents]
            return found

        here, width = slice(len(own)), slice(min(profile.src_len, state.seats.src_ids.shape[1]))
        seats.src_ids[here, width] = state.seats.src_ids[own, width]
        seats.src_lengths[here], seats.begins[here] = state.seats.src_lengths[own], state.seats.begins[own]
        self._encode(seats, state.outlook)
        if state.record:
            caches = state.seats.device.caches(state.position)
            seats.device.fill([moved(each[:, :, :filled]) for each in caches], state.position)
            ids, scores = moved(state.record.ids), moved(state.record.scores)
            state.record, state.sums = replace(state.record, ids=ids, scores=scores), moved(state.sums)
        state.seats, state.parents, state.ahead = seats, rows.astype(np.int32), False

    def _chosen(self, tokens: Ints, state: AheadState) -> Ints | None:
        """Where the device's own next step has the rows that the search wants, in whatever order; or nothing."""
        assert state.record
        own, sentences = state.record.next, state.sentences
        same: NDArray[np.bool_] = own.tokens[sentences][:, None] == tokens[:, :, None]
        same &= own.parents[sentences][:, None] == state.parents[:, :, None]  # (B, K, rows of the device)
        if not same.any(2).all():
            state.misses += 1
            return None
        state.sums = own.values.ravel()
        places: Ints = (sentences[:, None] * own.tokens.shape[1] + same.argmax(2)).astype(np.int32)
        return places

    def _feed(self, tokens: Ints, state: AheadState) -> Ints:
        """Do a step of what the search wants, again if the device has done one of its own choice."""
        seats, sentences = state.seats, state.sentences
        profile = seats.device.profile
        shape = profile.batch, profile.beams
        columns = np.minimum(np.arange(shape[1]), tokens.shape[1] - 1)  # what the search has not, repeats its last
        every = np.arange(shape[0] * shape[1], dtype=np.int32).reshape(shape)
        positions = np.clip(state.position - seats.begins, 0, profile.capacity - 1)
        choice = Choice(
            np.zeros(shape, np.int32),
            every,
            np.full(shape, DEAD, np.float32),
            np.repeat(positions[:, None], shape[1], 1).astype(np.int32),
        )
        choice.values[sentences, : tokens.shape[1]] = self._sums(tokens, state)
        choice.tokens[sentences], choice.parents[sentences] = tokens[:, columns], state.parents[:, columns]
        seats.device.feed(choice, state.position)
        seats.device.issue(state.position)
        state.sums = choice.values.ravel()
        return (sentences[:, None] * shape[1] + np.arange(tokens.shape[1])).astype(np.int32)

    def _sums(self, tokens: Ints, state: AheadState) -> Floats:
        """What the search's rows (B, K) add up to, where their tokens are among the best that the device knows."""
        parents, record = state.parents, state.record
        sums = np.zeros(tokens.shape, np.float32)
        if record:
            same = record.ids[parents] == tokens[:, :, None]
            added = np.where(same, record.scores[parents], 0).sum(2)
            old = state.seats.begins[state.sentences] < state.position
            sums[old] = np.where(same.any(2), state.sums[parents] + added, DEAD)[old]
        # A search that is narrower than others repeats a row, from which candidates are to come once.
        again = (tokens[:, 1:] == tokens[:, :-1]) & (parents[:, 1:] == parents[:, :-1])
        sums[:, 1:][again] = DEAD
        return sums
