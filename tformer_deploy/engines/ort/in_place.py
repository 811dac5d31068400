"""ONNX Runtime with caches that are updated in place: buffers are bound once, so a step binds and allocates nothing."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ...base import messages
from ...base.errors import ConfigError, LimitError
from ...bundle.contract import LISTED, SLOTS_GRAPH, cache_names, signature
from ...bundle.manifest import Bundle
from ...bundle.shortlist import Shortlist
from ..base import ANYTHING, FIRST_CAPACITY, Floats, Ints, Outlook, Scores, check_step
from .library import SHORT_SPIN_US, OrtValue, has_vnni
from .standard import OrtEngine, view

SPARSE = 0.75
"""Buffers are compacted when less than this share of their sentences is left: until then, copying the caches costs more
than computing sentences that have ended."""

LIST_UNIT = 64
"""Shortlists are padded to a multiple of this."""


@dataclass
class Listed:
    """The shortlist of a batch, and the inputs by which the step scores only its tokens."""

    ids: Ints
    """(n) Ascending."""
    inputs: dict[str, OrtValue]
    """Bound: the padded ids, and their rows of the output weights, from graph `short_rows`."""
    mask: Floats
    """(B, 1, n padded), bound: 0 where a sentence may use a token, else -inf."""


@dataclass
class InPlaceState:
    """Buffers for B sentences with K beams; only the sentences at `slots` are still decoded."""

    src_lengths: Ints
    """(B)"""
    cross: list[OrtValue]
    past: list[OrtValue]
    """2L of (B*K, H, M, D); of recurrent cells L states (B*K, d)"""
    slots: Ints
    """(B') The sentences of the next step, as indices into the buffers."""
    tokens: Ints
    """(B, K), bound."""
    written_by: Ints
    """(B, K, M), bound: the beam that wrote each position of a beam's target."""
    place: Ints = field(default_factory=lambda: np.zeros(1, np.int32))
    """(1), bound: `position`."""
    position: int = 0
    """The position in the buffers that the next step writes, the same for every sentence."""
    longest: int = 0
    """The length of the longest target so far."""
    positions: Ints | None = None
    """(B, K), bound, once a sentence has joined others: the length of each target; 0 in a free slot."""
    bound: dict[bool, tuple[Any, list[Any]]] = field(default_factory=dict)
    """Without and with all log-probabilities: the binding and its output arrays."""
    listed: Listed | None = None


@dataclass(frozen=True)
class _Room:
    """What new buffers have room for."""

    capacity: int
    """Positions of the target."""
    first: int = 0
    """Earlier positions are dropped."""
    spare: int = 0
    """Further sentences."""
    src_len: int = 0
    """Source tokens of the longest of these."""


class InPlaceEngine(OrtEngine):
    """Runs a variant of a bundle, with a shortlist its short step."""

    def __init__(self, bundle: Bundle, threads: int = 0, variant: str = "", shortlist: Shortlist | None = None) -> None:
        super().__init__(bundle, threads, variant)
        self.shortlist = shortlist
        if shortlist:
            self.step_graph = "short_step"
            if self.recipe.integer_step and not has_vnni():
                # Its weights are no constants, which the runtime could make unsigned.
                raise ConfigError(f"--shortlist: {variant} needs a processor with VNNI for it: use another variant")

    def __enter__(self) -> Self:
        super().__enter__()
        # A bundle may lack the graph for it, and a shortlist's step has one position for all sentences.
        self.admits = not self.shortlist and self.bundle.lists(SLOTS_GRAPH, self.variant)
        self._slots: Any = None
        self._rows: Any = None
        self._lock = threading.Lock()
        if self.shortlist:
            self._rows = self._session("short_rows", SHORT_SPIN_US)
            self._listed = [spec.name for spec in signature("short_rows", self.config, self.recipe).outputs]
        self._present = cache_names("present", self.config)
        self.states = self.config.decoder_cell == "ssru"
        return self

    def __exit__(self, *why: Any) -> None:
        super().__exit__(*why)
        self._slots = self._rows = None

    def encode(self, src_ids: Ints, src_lengths: Ints, outlook: Outlook = ANYTHING) -> Any:
        """See `Engine.encode`."""
        batch, lengths = len(src_ids), np.array(src_lengths, np.int32)
        cross = self._encode(src_ids, lengths)
        past = self._buffers(batch, FIRST_CAPACITY)
        tokens, written_by = np.zeros((batch, 1), np.int32), np.zeros((batch, 1, FIRST_CAPACITY), np.int32)
        state = InPlaceState(lengths, cross, past, np.arange(batch, dtype=np.int32), tokens, written_by)
        if self.shortlist:
            allowed = self.shortlist.allowed(src_ids, lengths)
            for row, ids in zip(allowed, outlook.required, strict=False):
                row[list(ids)] = True
            state.listed = self._gather(allowed)
        return state

    def admit(self, state: Any, src_ids: Ints, src_lengths: Ints, outlook: Outlook = ANYTHING) -> None:
        """See `Engine.admit`."""
        if not self.admits:
            super().admit(state, src_ids, src_lengths, outlook)
        with self._lock:  # opened at the first admit, as most callers never do
            self._slots = self._slots or self._session(SLOTS_GRAPH, 0)
        count, live, lengths = len(src_ids), len(state.slots), np.array(src_lengths, np.int32)
        if live + count > self.limits.batch:
            raise LimitError(messages.TOO_MANY_JOINED.format(sentences=live + count, limit=self.limits.batch))
        cross = [view(value) for value in self._encode(src_ids, lengths)]
        free = np.setdiff1d(np.arange(len(state.tokens), dtype=np.int32), state.slots)
        src_len = max(src_ids.shape[1], state.cross[0].shape()[2])
        if len(free) < count or src_len > state.cross[0].shape()[2]:
            self._move(state, state.slots, _Room(state.written_by.shape[2], spare=count, src_len=src_len))
            free = np.arange(live, live + count, dtype=np.int32)
        new, beams = free[:count], state.tokens.shape[1]
        rows = (new[:, None] * beams + np.arange(beams)).ravel()
        for value in state.past:  # keys are masked, but still read: NaN left by another sentence would spread
            view(value)[(rows, ...) if self.states else (rows, slice(None), slice(state.position))] = 0
        for value, own in zip(state.cross, cross, strict=True):
            view(value)[new] = 0
            view(value)[new, :, : src_ids.shape[1]] = own
        if state.positions is None:
            state.positions, state.bound = np.zeros(state.tokens.shape, np.int32), {}
            state.positions[state.slots] = state.position
        state.src_lengths[new], state.positions[new] = lengths, 0
        state.written_by[new] = np.arange(beams, dtype=np.int32)[:, None]
        state.slots = np.concatenate((state.slots, new))

    def best(self, beams: int, state: Any = None) -> int:
        """See `Engine.best`."""
        return self.recipe.top_k or 2 * beams

    def step(self, tokens: Ints, state: Any, full: bool = False, attention: bool = False) -> Scores:
        """See `Engine.step`."""
        check_step(tokens.shape[1], state.longest, self.limits)
        if attention:
            raise LimitError(messages.NO_ATTENTION)
        if state.position == state.written_by.shape[2]:
            self._make_room(state)
        if full not in state.bound:
            state.bound[full] = self._bind(state, full)
        binding, outputs = state.bound[full]
        state.tokens[state.slots] = tokens
        state.place[0] = state.position
        self.run(self._step if state.positions is None else self._slots, binding)
        state.position += 1
        state.longest += 1
        if state.positions is not None:
            state.positions[state.slots] += 1
        ids, scores, *others = (array.reshape(*state.tokens.shape, -1)[state.slots] for array in outputs)
        log_probs = others[0] if others else None
        if log_probs is not None and state.listed:
            known, listed = log_probs[..., : len(state.listed.ids)], state.listed.ids
            log_probs = np.full((*known.shape[:2], self.config.tgt_vocab), -np.inf, np.float32)
            log_probs[..., listed] = known
        return Scores(ids, scores, log_probs)

    def _gather(self, allowed: NDArray[np.bool_]) -> Listed:
        """The tokens that any sentence may use, and their rows of the output weights."""
        ids = np.flatnonzero(allowed.any(0)).astype(np.int32)
        size = -(-max(len(ids), self.best(self.limits.beams)) // LIST_UNIT) * LIST_UNIT
        filled = np.zeros(size, np.int32)
        filled[: len(ids)] = ids
        mask = np.full((len(allowed), 1, size), -np.inf, np.float32)
        mask[:, 0, : len(ids)][allowed[:, ids]] = 0
        gathered = dict(zip(self._listed, self.call(self._rows, {LISTED.name: filled}, self._listed), strict=True))
        return Listed(ids, {LISTED.name: OrtValue.ortvalue_from_numpy(filled), **gathered}, mask)

    def reorder(self, state: Any, parents: Ints, sentences: Ints | None = None) -> None:
        """See `Engine.reorder`."""
        width, filled = state.tokens.shape[1], state.position
        slots = state.slots if sentences is None else state.slots[sentences]
        beams = parents % width
        if parents.shape[1] != width:
            written_by = np.take_along_axis(state.written_by[slots, :, :filled], beams[:, :, None], 1)
            self._move(state, slots, _Room(state.written_by.shape[2]), written_by)
            return
        if width > 1:
            own = state.written_by[slots, :, :filled]
            state.written_by[slots, :, :filled] = np.take_along_axis(own, beams[:, :, None], 1)
        if len(slots) < SPARSE * len(state.tokens):
            self._move(state, slots, _Room(state.written_by.shape[2]))
        else:
            if state.positions is not None:
                state.positions[np.setdiff1d(state.slots, slots)] = 0
                state.longest = int(state.positions.max())
            state.slots = slots

    def _make_room(self, state: InPlaceState) -> None:
        """Drop the positions before all targets; if these are less than half, double the buffers."""
        capacity = state.written_by.shape[2]
        room = capacity if 2 * state.longest <= capacity else 2 * capacity
        self._move(state, state.slots, _Room(room, first=state.position - state.longest))

    def _move(self, state: InPlaceState, slots: Ints, room: _Room, written_by: Ints | None = None) -> None:
        """Copy the sentences at `slots` to new buffers.

        `written_by` (B, K, T): given where the number of beams changes; each new beam gets the history that it names.
        """
        capacity, first, spare = room.capacity, room.first, room.spare
        filled, live, width = state.position - first, len(slots), state.tokens.shape[1]
        batch, beams = live + spare, width if written_by is None else written_by.shape[1]
        own = np.ascontiguousarray(np.broadcast_to(np.arange(beams, dtype=np.int32)[:, None], (batch, beams, capacity)))
        rows = slots[:, None] * width + np.arange(width)
        for old, new in zip(state.past, buffers := self._buffers(batch * beams, capacity), strict=True):
            if self.states:  # by the beam that wrote a row's last position; before the first all are zeros
                last = np.arange(width) if written_by is None else written_by[:, :, -1] if filled else 0
                view(new)[: live * beams].reshape(live, beams, -1)[:] = view(old)[slots[:, None] * width + last]
            elif written_by is None:
                view(new)[: live * beams, :, :filled] = view(old)[:, :, first : state.position][rows.ravel()]
            else:
                # (B, K, T, H, D), as numpy puts indexed axes first.
                history = view(old)[slots[:, None, None] * width + written_by, :, np.arange(filled)]
                view(new).reshape(batch, beams, *new.shape()[1:])[:, :, :, :filled] = history.swapaxes(2, 3)
        state.past = buffers
        if written_by is None:
            own[:live, :, :filled] = state.written_by[slots, :, first : state.position]
        if spare or not np.array_equal(slots, np.arange(len(state.src_lengths))):
            state.src_lengths, cross = state.src_lengths[slots], [view(value)[slots] for value in state.cross]
            if spare:
                state.src_lengths = np.pad(state.src_lengths, (0, spare), constant_values=1)
                more = (0, spare), (0, 0), (0, room.src_len - cross[0].shape[2]), (0, 0)
                cross = [np.pad(each, more) for each in cross]
            state.cross = [OrtValue.ortvalue_from_numpy(each) for each in cross]
            if state.listed:
                state.listed.mask = state.listed.mask[slots]
        if state.positions is not None:
            state.positions = np.pad(state.positions[slots][:, :1].repeat(beams, 1), ((0, spare), (0, 0)))
            state.longest = int(state.positions.max())
        state.position = filled
        state.slots = np.arange(live, dtype=np.int32)
        state.tokens = np.zeros((batch, beams), np.int32)
        state.written_by = own
        state.bound = {}

    def _bind(self, state: InPlaceState, full: bool) -> tuple[Any, list[Any]]:
        """Bind all inputs and outputs of the step; with `full` also all log-probabilities."""
        session = self._step if state.positions is None else self._slots
        binding, rows = session.io_binding(), state.tokens.size
        inputs: dict[str, Any] = {
            "tokens": state.tokens,
            "position": state.place,
            **({} if state.positions is None else {"positions": state.positions}),
            "written_by": state.written_by,
            "src_lengths": state.src_lengths,
        }
        if state.listed:
            inputs["listed_mask"] = state.listed.mask
        for name, array in inputs.items():
            binding.bind_ortvalue_input(name, OrtValue.ortvalue_from_numpy(array))
        for name, value in zip([*self._cross, *self._past], [*state.cross, *state.past], strict=True):
            binding.bind_ortvalue_input(name, value)
        for name, value in (state.listed.inputs if state.listed else {}).items():
            binding.bind_ortvalue_input(name, value)
        for name, value in zip(self._present, state.past, strict=True):
            binding.bind_ortvalue_output(name, value)
        best = self.best(state.tokens.shape[1])
        outputs: dict[str, Any] = {
            "top_ids": np.empty((rows, best), np.int32),
            "top_scores": np.empty((rows, best), np.float32),
        }
        if full:
            width = state.listed.mask.shape[2] if state.listed else self.config.tgt_vocab
            outputs["log_probs"] = np.empty((rows, width), np.float32)
        for name, array in outputs.items():
            binding.bind_ortvalue_output(name, OrtValue.ortvalue_from_numpy(array))
        return binding, list(outputs.values())

    def _buffers(self, rows: int, capacity: int) -> list[OrtValue]:
        """New ones, `InPlaceState.past`; states are zeros."""
        shapes = [list(each.sized({"rows": rows, "capacity": capacity})) for each in self._carried]
        found = [OrtValue.ortvalue_from_shape_and_type(shape, np.float32, "cpu") for shape in shapes]
        for value in found if self.states else []:
            view(value)[:] = 0
        return found
