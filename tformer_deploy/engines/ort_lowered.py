"""ONNX Runtime with lowered graphs: buffers bound once and written in place; a step binds and allocates nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from onnxruntime import OrtValue

from ..contract import caches
from ..errors import LimitError
from .base import ANYTHING, Ints, Outlook, Scores, check_step
from .ort import OrtEngine, view

CAPACITY = 32
"""Positions that a new cache has room for; it doubles when they are full."""
SPARSE = 0.75
"""Sentences that have ended are carried along until fewer than this share is left: a copy costs more than they do."""


@dataclass
class LoweredState:
    """Buffers of B sentences with K beams, of which `slots` are still asked for."""

    src_lengths: Ints
    """(B)"""
    cross: list[OrtValue]
    past: list[OrtValue]
    """2L of (B*K, H, M, D)"""
    slots: Ints
    """(B') Where the sentences of the next step lie in the buffers."""
    tokens: Ints
    """(B, K), bound."""
    written_by: Ints
    """(B, K, M), bound: the beam that wrote each position of a beam's target."""
    place: Ints = field(default_factory=lambda: np.zeros(1, np.int32))
    """(1), bound: the position."""
    position: int = 0
    bound: dict[bool, tuple[Any, list[Any]]] = field(default_factory=dict)
    """Without and with all log-probabilities: the binding and its output arrays."""


class LoweredEngine(OrtEngine):
    """Runs a variant of a bundle."""

    def __enter__(self) -> Self:
        super().__enter__()
        self._present = [spec.name for spec in caches("present", self.config, ())]
        return self

    def encode(self, src_ids: Ints, src_lengths: Ints, outlook: Outlook = ANYTHING) -> Any:
        """See `Engine.encode`."""
        batch, lengths = len(src_ids), np.array(src_lengths, np.int32)
        cross = self._encode(src_ids, lengths)
        past = [self._buffer(batch, CAPACITY) for _ in self._past]
        tokens, written_by = np.zeros((batch, 1), np.int32), np.zeros((batch, 1, CAPACITY), np.int32)
        return LoweredState(lengths, cross, past, np.arange(batch, dtype=np.int32), tokens, written_by)

    def best(self, beams: int, state: Any = None) -> int:
        """See `Engine.best`."""
        return self.recipe.top_k or 2 * beams

    def step(self, tokens: Ints, state: Any, full: bool = False, attention: bool = False) -> Scores:
        """See `Engine.step`."""
        check_step(tokens.shape[1], state.position, self.limits)
        if attention:
            raise LimitError("this variant does not return attention: use the standard graphs of fp32-attention")
        if state.position == state.written_by.shape[2]:
            self._move(state, state.slots, 2 * state.position)
        if full not in state.bound:
            state.bound[full] = self._bind(state, full)
        binding, outputs = state.bound[full]
        state.tokens[state.slots] = tokens
        state.place[0] = state.position
        self.run(self._step, binding)
        state.position += 1
        ids, scores, *others = (array.reshape(*state.tokens.shape, -1)[state.slots] for array in outputs)
        return Scores(ids, scores, others[0] if others else None)

    def reorder(self, state: Any, parents: Ints, sentences: Ints | None = None) -> None:
        """See `Engine.reorder`."""
        width, filled = state.tokens.shape[1], state.position
        slots = state.slots if sentences is None else state.slots[sentences]
        beams = parents % width
        if parents.shape[1] != width:
            written_by = np.take_along_axis(state.written_by[slots, :, :filled], beams[:, :, None], 1)
            self._move(state, slots, state.written_by.shape[2], written_by)
            return
        if width > 1:
            own = state.written_by[slots, :, :filled]
            state.written_by[slots, :, :filled] = np.take_along_axis(own, beams[:, :, None], 1)
        if len(slots) < SPARSE * len(state.tokens):
            self._move(state, slots, state.written_by.shape[2])
        else:
            state.slots = slots

    def _move(self, state: LoweredState, slots: Ints, capacity: int, written_by: Ints | None = None) -> None:
        """Move the sentences at `slots` to new buffers.

        `written_by` (B, K, T): their beams change in number, so each gets the history that it names.
        """
        filled, batch, width = state.position, len(slots), state.tokens.shape[1]
        beams = width if written_by is None else written_by.shape[1]
        own = np.ascontiguousarray(np.broadcast_to(np.arange(beams, dtype=np.int32)[:, None], (batch, beams, capacity)))
        rows = slots[:, None] * width + np.arange(width)
        for i, old in enumerate(state.past):
            new = self._buffer(batch * beams, capacity)
            if written_by is None:
                view(new)[:, :, :filled] = view(old)[:, :, :filled][rows.ravel()]
            else:
                # (B, K, T, H, D), as numpy puts indexed axes first.
                history = view(old)[slots[:, None, None] * width + written_by, :, np.arange(filled)]
                view(new).reshape(batch, beams, *new.shape()[1:])[:, :, :, :filled] = history.swapaxes(2, 3)
            state.past[i] = new
        if written_by is None:
            own[:, :, :filled] = state.written_by[slots, :, :filled]
        if len(slots) < len(state.src_lengths):
            state.src_lengths = state.src_lengths[slots]
            state.cross = [OrtValue.ortvalue_from_numpy(view(value)[slots]) for value in state.cross]
        state.slots = np.arange(batch, dtype=np.int32)
        state.tokens = np.zeros((batch, beams), np.int32)
        state.written_by = own
        state.bound = {}

    def _bind(self, state: LoweredState, full: bool) -> tuple[Any, list[Any]]:
        """Bind every input and output of the step, all log-probabilities only where they are asked for."""
        binding, rows = self._step.io_binding(), state.tokens.size
        inputs = {
            "tokens": state.tokens,
            "position": state.place,
            "written_by": state.written_by,
            "src_lengths": state.src_lengths,
        }
        for name, array in inputs.items():
            binding.bind_ortvalue_input(name, OrtValue.ortvalue_from_numpy(array))
        for name, value in zip([*self._cross, *self._past], [*state.cross, *state.past], strict=True):
            binding.bind_ortvalue_input(name, value)
        for name, value in zip(self._present, state.past, strict=True):
            binding.bind_ortvalue_output(name, value)
        best = self.best(state.tokens.shape[1])
        outputs: dict[str, Any] = {
            "top_ids": np.empty((rows, best), np.int32),
            "top_scores": np.empty((rows, best), np.float32),
        }
        if full:
            outputs["log_probs"] = np.empty((rows, self.config.tgt_vocab), np.float32)
        for name, array in outputs.items():
            binding.bind_ortvalue_output(name, OrtValue.ortvalue_from_numpy(array))
        return binding, list(outputs.values())

    def _buffer(self, rows: int, capacity: int) -> OrtValue:
        shape = [rows, self.config.heads, capacity, self.config.head_dim]
        return OrtValue.ortvalue_from_shape_and_type(shape, np.float32, "cpu")
