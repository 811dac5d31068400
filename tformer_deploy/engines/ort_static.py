"""ONNX Runtime with the graphs that TensorRT compiles, fp32 or half: what a plan must compute, seen without a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnxruntime import OrtValue

from .base import Ints, Scores, check_step
from .ort import OrtEngine, OrtState, view

CAPACITY = 32
"""Positions that a new cache has room for; it doubles when they are full, up to what the model has."""


class StaticEngine(OrtEngine):
    """Runs a variant of target `trt`."""

    def encode(self, src_ids: Ints, src_lengths: Ints) -> OrtState:
        """See `Engine.encode`."""
        state = super().encode(src_ids, src_lengths)
        half = self._step.get_inputs()[-1].type == "tensor(float16)"
        shape = len(src_ids), self.config.heads, min(CAPACITY, self.limits.tgt_tokens), self.config.head_dim
        empty = np.zeros(shape, np.float16 if half else np.float32)
        state.past = [OrtValue.ortvalue_from_numpy(empty)] * len(state.past)
        return state

    def best(self, beams: int) -> int:
        """See `Engine.best`."""
        return self.recipe.top_k or 2 * beams

    def step(self, tokens: Ints, state: Any, full: bool = False, attention: bool = False) -> Scores:
        """See `Engine.step`."""
        check_step(tokens.shape[1], state.position, self.limits)
        if state.position == state.past[0].shape()[2]:
            more = min(2 * state.position, self.limits.tgt_tokens)
            state.past = [grown(value, more) for value in state.past]
        scores = super().step(tokens, state, full, attention)
        best, log_probs = scores.ids.shape[-1], scores.log_probs
        return Scores(
            scores.ids.reshape(*tokens.shape, best),
            scores.scores.reshape(*tokens.shape, best),
            None if log_probs is None else log_probs.reshape(*tokens.shape, -1),
        )


def grown(cache: OrtValue, capacity: int) -> OrtValue:
    """A copy of a cache (R, H, M, D) with room for more positions."""
    old = view(cache)
    new = np.zeros((*old.shape[:2], capacity, old.shape[3]), old.dtype)
    new[:, :, : old.shape[2]] = old
    return OrtValue.ortvalue_from_numpy(new)
