"""Speculative execution of decoding steps, for engines of fixed sizes whose step itself picks the next beams.

The device starts the next step with its own pick before the search on the host has read the last one, so that it never
waits for the host. The search decides: where it picks otherwise, the step is done again with its rows. Results do not
depend on speculation. There is no draft model, so this is not speculative decoding.
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

from ..base import messages
from ..base.errors import EngineError, LimitError, NoRoom
from ..bundle.contract import DEAD
from ..bundle.plans import Profile
from ..model.config import ModelConfig
from .base import ANYTHING, Floats, Ints, Limits, Outlook, Scores, check_request, check_step

MISSES = 4
"""Wrong picks after which a batch is no longer speculated on. Each costs a step, and a search with rules that the
device does not know, such as a penalty, picks otherwise often."""


@dataclass(frozen=True)
class Choice:
    """The inputs of a step, (B, K) each, by the device's sentences and rows."""

    tokens: Ints
    parents: Ints
    """Rows, counted over B*K."""
    values: Floats
    """Sums of log-probabilities so far."""
    positions: Ints
    """Position in the target of each sentence."""


FED = ("tokens", "parents", "values", "positions")
"""The names of these inputs."""


@dataclass(frozen=True)
class Record:
    """The outputs of a step."""

    ids: Ints
    """(B*K, k), best first."""
    scores: Floats
    next: Choice
    """The device's own inputs for the next step."""


class Device(Protocol):
    """Buffers for one batch of a profile, and what runs on them. Steps are counted from 0.

    Even steps read what odd ones write, and the other way round, so that the last step can be done again.
    """

    profile: Profile
    best: int
    """Tokens that a step returns per row."""
    freed: bool

    def encode(self, src_ids: Ints, src_lengths: Ints, outlook: Outlook) -> None:
        """Encode sources, (B, S) and (B) of the profile's sizes; allowed before any step."""
        ...

    def feed(self, choice: Choice, step: int) -> None:
        """Give step `step`, which is the next, other inputs than the device's own."""
        ...

    def issue(self, step: int) -> None:
        """Start a step; does not wait for its end."""
        ...

    def read(self, step: int) -> Record:
        """Wait for one of the last two steps, and return its outputs."""
        ...

    def log_probs(self, step: int) -> Floats:
        """All log-probabilities (B*K, V) of `step`, which must be the last that was started."""
        ...

    def cross(self) -> list[Floats]:
        """The encoder's outputs."""
        ...

    def caches(self, step: int) -> list[NDArray[Any]]:
        """The keys and values that step `step` reads, 2L of (B*K, H, M, D), or states (B*K, d), in the step's type."""
        ...

    def fill(self, caches: list[NDArray[Any]], step: int) -> None:
        """Write what `caches` has; of keys and values up to M positions."""
        ...

    def free(self) -> None:
        """Free the memory."""
        ...


@dataclass
class Slots:
    """A device, and the sentence in each of its slots."""

    device: Device
    src_ids: Ints
    """(B, S)"""
    src_lengths: Ints
    first_steps: Ints
    """(B) The step at which each sentence began."""


@dataclass
class SpeculativeState:
    """Sentences on a device."""

    slots: Slots
    outlook: Outlook
    parents: Ints
    """(B, K) The device's row that each row of the search continues."""
    steps: int = 0
    """The device may speculate on steps before this one."""
    position: int = 0
    """Number of the next step."""
    speculated: bool = False
    """Whether the next step has been started with the device's own pick."""
    record: Record | None = None
    """Outputs of the last step."""
    sums: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    """(B*K) `values` among the last step's inputs."""
    misses: int = 0
    """How often the search picked otherwise."""

    @property
    def sentences(self) -> Ints:
        """The device's slots of the search's sentences."""
        return self.parents[:, 0] // self.slots.device.profile.beams  # type: ignore[no-any-return]

    @property
    def longest(self) -> int:
        """Positions of the longest target so far."""
        return int((self.position - self.slots.first_steps[self.sentences]).max(initial=0))


class SpeculativeEngine(ABC):
    """The common part of the engines of target `trt`; a subclass makes the devices."""

    config: ModelConfig
    limits: Limits
    attention, admits = False, True
    keeps = 0
    """How many unused devices are kept for later batches of their sizes."""
    not_captured = ""
    """Why steps are not replayed as CUDA graphs, where that was tried."""

    def __enter__(self) -> Self:
        self._idle: list[Device] = []
        self._lock, self._open = threading.Lock(), True
        return self

    def __exit__(self, *why: object) -> None:
        self._open = False
        self._idle.clear()

    @abstractmethod
    def choose(self, wanted: Profile, filled: int) -> Profile:
        """The sizes of a device for a request whose targets have `filled` positions already. Raises LimitError."""

    @abstractmethod
    def make(self, profile: Profile) -> Device:
        """A new device, for one batch at a time."""

    def take(self, profile: Profile) -> Device:
        """An unused device of these sizes, or a new one; frees unused ones where memory is short."""
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
        """Keep the device of a batch that has ended. Takes no lock, as garbage collection calls this in any thread."""
        if self.keeps and self._open and not device.freed:
            self._idle.append(device)

    def note_not_captured(self, reason: str) -> None:
        """Warn, once, that steps are not replayed as CUDA graphs."""
        if not self.not_captured:
            warnings.warn(f"steps are not replayed as CUDA graphs: {reason}", stacklevel=2)
        self.not_captured = self.not_captured or reason

    def encode(self, src_ids: Ints, src_lengths: Ints, outlook: Outlook = ANYTHING) -> SpeculativeState:
        """See `Engine.encode`."""
        check_request(src_ids, src_lengths, self.config, self.limits)
        slots = self._new_slots(self.choose(self._wanted(len(src_ids), src_ids.shape[1], outlook), 0))
        state = SpeculativeState(slots, outlook, np.empty((0, 1), np.int32))
        self._fill_slots(state, src_ids, src_lengths, outlook)
        return state

    def admit(self, state: SpeculativeState, src_ids: Ints, src_lengths: Ints, outlook: Outlook = ANYTHING) -> None:
        """See `Engine.admit`. Where the device is too small, all sentences move to a larger one."""
        check_request(src_ids, src_lengths, self.config, self.limits)
        total = len(state.parents) + len(src_ids)
        if total > self.limits.batch:
            raise LimitError(messages.TOO_MANY_JOINED.format(sentences=total, limit=self.limits.batch))
        widest = max(src_ids.shape[1], state.slots.src_lengths[state.sentences].max(initial=1))
        wanted = self._wanted(total, int(widest), outlook)
        wanted = replace(wanted, beams=max(wanted.beams, state.parents.shape[1]))
        chosen = self.choose(wanted, state.longest)
        have, need, most = map(astuple, (state.slots.device.profile, wanted, chosen))
        if any(has < min(size, enough) for has, size, enough in zip(have, need, most, strict=True)):
            self._move(state, chosen)
        self._fill_slots(state, src_ids, src_lengths, outlook)

    def best(self, beams: int, state: SpeculativeState) -> int:
        """See `Engine.best`."""
        return state.slots.device.best

    def step(self, tokens: Ints, state: SpeculativeState, full: bool = False, attention: bool = False) -> Scores:
        """See `Engine.step`. Tokens with equal scores come in any order."""
        profile, width, longest = state.slots.device.profile, tokens.shape[1], state.longest
        if width > profile.beams:
            raise LimitError(f"{width} beams exceed the {profile.beams} that were announced: {profile}")
        check_step(width, longest, self.limits)
        if attention:
            raise LimitError(messages.NO_ATTENTION)
        if longest == profile.capacity:
            wanted = self._wanted(len(tokens), int(state.slots.src_lengths[state.sentences].max()), state.outlook)
            chosen = self.choose(wanted, longest)
            if chosen.capacity <= longest:
                raise LimitError(f"decoding step {longest + 1} is beyond what was announced: {profile}")
            self._move(state, chosen)
        device = state.slots.device
        places = self._speculated_rows(tokens, state) if state.speculated else None
        if places is None:
            places = self._feed(tokens, state)
        following, room = state.position + 1, longest + 1 < device.profile.capacity
        state.speculated = not full and state.misses < MISSES and following < state.steps and room
        if state.speculated:
            device.issue(following)
        state.record = record = device.read(state.position)
        every = device.log_probs(state.position)[places] if full else None
        state.parents, state.position = places, following
        return Scores(record.ids[places], record.scores[places], every)

    def reorder(self, state: SpeculativeState, parents: Ints, sentences: Ints | None = None) -> None:
        """See `Engine.reorder`."""
        state.parents = state.parents.ravel()[parents]

    def cross_keys_values(self, state: SpeculativeState) -> list[Floats]:
        """See `Engine.cross_keys_values`."""
        longest = state.slots.src_lengths[state.sentences].max()
        return [value[state.sentences][:, :, :longest] for value in state.slots.device.cross()]

    def _wanted(self, batch: int, src_tokens: int, outlook: Outlook) -> Profile:
        limits = self.limits
        tokens = min(outlook.tokens or limits.tgt_tokens, limits.tgt_tokens)
        return Profile(batch, outlook.beams or limits.beams, src_tokens, tokens)

    def _new_slots(self, profile: Profile) -> Slots:
        """A device whose slots have no sentence yet: sources of one token."""
        sources = np.full((profile.batch, profile.src_len), self.config.pad_id, np.int32)
        device = self.take(profile)
        slots = Slots(device, sources, *(np.full(profile.batch, n, np.int32) for n in (1, 0)))
        weakref.finalize(slots, self.give_back, device)
        return slots

    def _fill_slots(self, state: SpeculativeState, src_ids: Ints, src_lengths: Ints, outlook: Outlook) -> None:
        """Put sentences into free slots. The device has fixed sizes, so it encodes all of its slots again."""
        slots, profile = state.slots, state.slots.device.profile
        free = np.setdiff1d(np.arange(profile.batch), state.sentences)[: len(src_ids)]
        slots.src_ids[free] = self.config.pad_id
        slots.src_ids[free, : src_ids.shape[1]] = src_ids
        slots.src_lengths[free], slots.first_steps[free] = src_lengths, state.position
        self._encode(slots, outlook)
        rows = np.repeat(free[:, None] * profile.beams, state.parents.shape[1], 1).astype(np.int32)
        state.parents = np.concatenate((state.parents, rows))
        state.outlook, state.speculated = outlook, False
        state.steps = 0 if outlook.drawn else state.position + (outlook.tokens or self.limits.tgt_tokens)

    def _encode(self, slots: Slots, outlook: Outlook) -> None:
        try:
            slots.device.encode(slots.src_ids, slots.src_lengths, outlook)
        except EngineError:
            slots.device.free()
            raise

    def _move(self, state: SpeculativeState, profile: Profile) -> None:
        """Move the search's rows, with their keys and values, to another device."""
        slots, own, filled = self._new_slots(profile), state.sentences, state.longest
        rows = np.arange(len(own))[:, None] * profile.beams + np.arange(state.parents.shape[1])

        def moved(values: NDArray[Any]) -> NDArray[Any]:
            target = np.zeros((profile.batch * profile.beams, *values.shape[1:]), values.dtype)
            target[rows] = values[state.parents]
            return target

        here, width = slice(len(own)), slice(min(profile.src_len, state.slots.src_ids.shape[1]))
        slots.src_ids[here, width] = state.slots.src_ids[own, width]
        slots.src_lengths[here], slots.first_steps[here] = state.slots.src_lengths[own], state.slots.first_steps[own]
        self._encode(slots, state.outlook)
        if state.record:
            caches = state.slots.device.caches(state.position)
            kept = [each[:, :, :filled] if each.ndim == 4 else each for each in caches]
            slots.device.fill([moved(each) for each in kept], state.position)
            ids, scores = moved(state.record.ids), moved(state.record.scores)
            state.record, state.sums = replace(state.record, ids=ids, scores=scores), moved(state.sums)
        state.slots, state.parents, state.speculated = slots, rows.astype(np.int32), False

    def _speculated_rows(self, tokens: Ints, state: SpeculativeState) -> Ints | None:
        """The rows (B, K) of the speculated step that have the search's tokens and parents; None: it lacks some."""
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

    def _feed(self, tokens: Ints, state: SpeculativeState) -> Ints:
        """Start the step with the search's tokens and parents, again if it was speculated on; returns its rows."""
        slots, sentences = state.slots, state.sentences
        profile = slots.device.profile
        shape = profile.batch, profile.beams
        columns = np.minimum(np.arange(shape[1]), tokens.shape[1] - 1)  # further rows repeat the search's last
        every = np.arange(shape[0] * shape[1], dtype=np.int32).reshape(shape)
        positions = np.clip(state.position - slots.first_steps, 0, profile.capacity - 1)
        choice = Choice(
            np.zeros(shape, np.int32),
            every,
            np.full(shape, DEAD, np.float32),
            np.repeat(positions[:, None], shape[1], 1).astype(np.int32),
        )
        choice.values[sentences, : tokens.shape[1]] = self._sums(tokens, state)
        choice.tokens[sentences], choice.parents[sentences] = tokens[:, columns], state.parents[:, columns]
        slots.device.feed(choice, state.position)
        slots.device.issue(state.position)
        state.sums = choice.values.ravel()
        return (sentences[:, None] * shape[1] + np.arange(tokens.shape[1])).astype(np.int32)

    def _sums(self, tokens: Ints, state: SpeculativeState) -> Floats:
        """Sums (B, K) of the search's rows; DEAD where a token is not among the best of the last step."""
        parents, record = state.parents, state.record
        sums = np.zeros(tokens.shape, np.float32)
        if record:
            same = record.ids[parents] == tokens[:, :, None]
            added = np.where(same, record.scores[parents], 0).sum(2)
            old = state.slots.first_steps[state.sentences] < state.position
            sums[old] = np.where(same.any(2), state.sums[parents] + added, DEAD)[old]
        # A search with fewer rows than others repeats its last; only the first copy may give candidates.
        again = (tokens[:, 1:] == tokens[:, :-1]) & (parents[:, 1:] == parents[:, :-1])
        sums[:, 1:][again] = DEAD
        return sums
