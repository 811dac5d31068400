"""ONNX Runtime with the graphs that TensorRT compiles, fp32 or half: what a plan must compute, seen without a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from onnxruntime import OrtValue

from ..contract import signature
from ..plans import Profile
from .base import Floats, Ints, Outlook
from .ort import OrtGraphs, view
from .static import Choice, Record, StaticEngine

CAPACITY = 32
"""Positions that a new cache has room for; it doubles when they are full."""
TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int32)": np.int32}


class OrtStaticEngine(StaticEngine, OrtGraphs):
    """Runs a variant of target `trt`, on a processor or on a GPU."""

    def choose(self, batch: int, src_tokens: int, outlook: Outlook) -> Profile:
        """See `StaticEngine.choose`: exactly what is asked for."""
        tokens = min(outlook.tokens or self.limits.tgt_tokens, self.limits.tgt_tokens)
        return Profile(batch, outlook.beams or self.limits.beams, src_tokens, tokens)

    def take(self, profile: Profile) -> OrtDevice:
        """See `StaticEngine.take`."""
        return OrtDevice(self, profile)


class OrtDevice:
    """See `static.Device`. Even steps read what odd ones write, and the other way round."""

    def __init__(self, engine: OrtStaticEngine, profile: Profile) -> None:
        self.engine, self.profile = engine, profile
        self.best = engine.recipe.top_k or 2 * profile.beams
        # On a GPU caches are not looked into from here, so they have room for all from the beginning.
        self._capacity = min(CAPACITY, profile.capacity) if engine.device == "cpu" else profile.capacity
        self._encoder, self._step = engine.sessions()
        step = signature("decoder_step", engine.config, engine.recipe)
        self._specs = {spec.name: spec for spec in (*step.inputs, *step.outputs)}
        types = (*self._step.get_inputs(), *self._step.get_outputs())
        self._types = {value.name: TYPES[value.type] for value in types}
        self._carried = {spec.name: carried for spec in step.inputs if (carried := next_name(spec.name)) in self._specs}
        """Input of a step -> the output of the step before it."""
        found = [spec.name for spec in step.outputs if spec.name not in self._carried.values()]
        self._given = self._buffers(spec.name for spec in step.inputs if spec.name not in self._carried)
        self._states = [self._buffers(self._carried, zeros=turn == 0) for turn in range(2)]
        self._found = [self._buffers(found) for _ in range(2)]
        self._bindings = [self._bind(turn) for turn in range(2)]

    def encode(self, src_ids: Ints, src_lengths: Ints, outlook: Outlook) -> None:
        """See `Device.encode`."""
        self._given["src_lengths"].update_inplace(src_lengths)
        self._given["end_id"].update_inplace(np.array([outlook.end_id], np.int32))
        self._given["live_beams"].update_inplace(np.array([outlook.beams or self.profile.beams], np.int32))
        binding = self._encoder.io_binding()
        binding.bind_cpu_input("src_ids", src_ids)
        binding.bind_ortvalue_input("src_lengths", self._given["src_lengths"])
        for name, value in self._given.items():
            if name.startswith("cross_"):
                binding.bind_ortvalue_output(name, value)
        self.engine.run(self._encoder, binding)

    def feed(self, choice: Choice, step: int) -> None:
        """See `Device.feed`."""
        values = {"tokens": choice.tokens, "parents": choice.parents, "values": choice.values}
        for name, array in {**values, "position": np.array([step], np.int32)}.items():
            self._states[step % 2][name].update_inplace(np.ascontiguousarray(array))

    def issue(self, step: int) -> None:
        """See `Device.issue`."""
        if step == self._capacity:
            self._grow()
        self.engine.run(self._step, self._bindings[step % 2])

    def read(self, step: int) -> Record:
        """See `Device.read`."""
        found, state = self._found[step % 2], self._states[1 - step % 2]
        choice = Choice(*(view(state[name]).copy() for name in ("tokens", "parents", "values")))
        return Record(view(found["top_ids"]).copy(), view(found["top_scores"]).copy(), choice)

    def log_probs(self, step: int) -> Floats:
        """See `Device.log_probs`."""
        return view(self._found[step % 2]["log_probs"])  # type: ignore[no-any-return]

    def cross(self) -> list[Floats]:
        """See `Device.cross`."""
        return [view(value) for name, value in self._given.items() if name.startswith("cross_")]

    def _buffers(self, names: Iterable[str], zeros: bool = False) -> dict[str, OrtValue]:
        """Room for inputs or outputs; what the first step reads must be finite, where it is masked too."""
        sizes, device = {**self.profile.sizes, "capacity": self._capacity}, self.engine.device
        shapes = {name: (self._specs[name].sized(sizes), self._types[name]) for name in names}
        if zeros:
            return {name: OrtValue.ortvalue_from_numpy(np.zeros(*each), device) for name, each in shapes.items()}
        return {name: OrtValue.ortvalue_from_shape_and_type(*each, device) for name, each in shapes.items()}

    def _bind(self, turn: int) -> Any:
        """What even steps (0) or odd steps (1) read and write."""
        binding = self._step.io_binding()
        for name, value in {**self._given, **self._states[turn]}.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in self._found[turn].items():
            binding.bind_ortvalue_output(name, value)
        for name, output in self._carried.items():
            binding.bind_ortvalue_output(output, self._states[1 - turn][name])
        return binding

    def _grow(self) -> None:
        """Room for twice as many positions."""
        filled, self._capacity = self._capacity, min(2 * self._capacity, self.profile.capacity)
        names = [name for name in self._carried if name.startswith("past_")]
        for state in self._states:
            larger = self._buffers(names, zeros=True)
            for name, value in larger.items():
                view(value)[:, :, :filled] = view(state[name])
            state.update(larger)
        self._bindings = [self._bind(turn) for turn in range(2)]


def next_name(name: str) -> str:
    """The output of a step that the next one has as the input `name`."""
    return name.replace("past", "present") if name.startswith("past_") else f"next_{name}"
