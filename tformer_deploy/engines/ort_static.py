"""ONNX Runtime with the graphs that TensorRT compiles, fp32 or half: what a plan must compute, seen without a GPU."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable
from itertools import count
from typing import Any, Self

import numpy as np
from onnxruntime import OrtValue, RunOptions

from ..bundle import Bundle
from ..contract import signature
from ..errors import ArtifactError
from ..plans import Profile
from .base import Floats, Ints, Limits, Outlook
from .ort import OrtGraphs, view
from .static import Choice, Record, StaticEngine

CAPACITY = 32
"""Positions that a new cache has room for; it doubles when they are full."""
KEPT = 8
"""Devices that wait for a batch of their sizes."""
TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int32)": np.int32}


class OrtStaticEngine(StaticEngine, OrtGraphs):
    """Runs a variant of target `trt`, on a processor or on a GPU, where steps are replayed as CUDA graphs.

    ONNX Runtime captures a graph in the first run under a number, which it repeats three times for that: a step can be
    repeated, as it does not write what it reads. Later runs under the number must have the same sizes and addresses.
    """

    def __init__(self, bundle: Bundle, threads: int = 0, variant: str = "", device: str = "cpu") -> None:
        super().__init__(bundle, threads, variant, device)
        self.kept = 0 if device == "cpu" else KEPT
        self.not_captured = ""
        """Why steps are not replayed as CUDA graphs, if they should be and are not."""
        self._numbers = count(1)
        self._running = threading.Lock()

    def __enter__(self) -> Self:
        OrtGraphs.__enter__(self)
        return super().__enter__()

    def choose(self, batch: int, src_tokens: int, outlook: Outlook) -> Profile:
        """See `StaticEngine.choose`: what is asked for, or sizes that many requests share where devices are kept."""
        limits = self.limits
        tokens = min(outlook.tokens or limits.tgt_tokens, limits.tgt_tokens)
        exact = Profile(batch, outlook.beams or limits.beams, src_tokens, tokens)
        return rounded(exact, limits) if self.kept else exact

    def make(self, profile: Profile) -> OrtDevice:
        """See `StaticEngine.make`."""
        return OrtDevice(self, profile)

    def replay(self, session: Any, binding: Any, options: RunOptions | None) -> None:
        """Run a step; with options that number it, one at a time, as ONNX Runtime asks for captured ones."""
        if options is None:
            return self.run(session, binding)
        with self._running:
            self.run(session, binding, options)

    def numbered(self) -> RunOptions | None:
        """Options for all runs of one kind of step with the same buffers, where they are kept."""
        if not self.kept:
            return None
        options = RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(next(self._numbers)))
        return options

    def _session(self, graph: str, spin_us: int, **cuda: str) -> Any:
        """See `OrtGraphs._session`."""
        if self.device == "cpu" or graph != self.step_graph:
            return super()._session(graph, spin_us, **cuda)
        try:
            return super()._session(graph, spin_us, enable_cuda_graph="1", **cuda)
        except ArtifactError as error:
            session = super()._session(graph, spin_us, **cuda)  # fails as well if it is not for that option
            self.not_captured = str(error)
            warnings.warn(f"steps are not replayed as CUDA graphs: {error}", stacklevel=2)
            return session


class OrtDevice:
    """See `static.Device`. Even steps read what odd ones write, and the other way round."""

    def __init__(self, engine: OrtStaticEngine, profile: Profile) -> None:
        self.engine, self.profile = engine, profile
        self.best = engine.recipe.top_k or 2 * profile.beams
        # What is captured stays where it is, and caches on a GPU are not looked into from here.
        self._capacity = profile.capacity if engine.kept else min(CAPACITY, profile.capacity)
        self._encoder, self._step = engine.sessions()
        step = signature("decoder_step", engine.config, engine.recipe)
        self._specs = {spec.name: spec for spec in (*step.inputs, *step.outputs)}
        types = (*self._step.get_inputs(), *self._step.get_outputs())
        self._types = {value.name: TYPES[value.type] for value in types}
        self._carried = {spec.name: carried for spec in step.inputs if (carried := next_name(spec.name)) in self._specs}
        """Input of a step -> the output of the step before it."""
        found = [spec.name for spec in step.outputs if spec.name not in self._carried.values()]
        self._given = self._buffers(spec.name for spec in step.inputs if spec.name not in self._carried)
        self._states = [self._buffers(self._carried) for _ in range(2)]
        self._found = [self._buffers(found) for _ in range(2)]
        self._bindings = self._bind()
        self._options = [engine.numbered() for _ in self._bindings]

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
        kind = step % 2 if step else 2
        self.engine.replay(self._step, self._bindings[kind], self._options[kind])

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
        """Room for inputs or outputs."""
        sizes, device = {**self.profile.sizes, "capacity": self._capacity}, self.engine.device
        shapes = {name: (self._specs[name].sized(sizes), self._types[name]) for name in names}
        if zeros:
            return {name: OrtValue.ortvalue_from_numpy(np.zeros(*each), device) for name, each in shapes.items()}
        return {name: OrtValue.ortvalue_from_shape_and_type(*each, device) for name, each in shapes.items()}

    def _bind(self) -> list[Any]:
        """What even steps, odd steps and the first one read and write."""
        past = [name for name in self._carried if name.startswith("past_")]
        # The first reads caches that are masked as a whole, but must be finite.
        empty = dict.fromkeys(past, self._buffers(past[:1], zeros=True)[past[0]])
        return [self._binding(0, {}), self._binding(1, {}), self._binding(0, empty)]

    def _binding(self, turn: int, instead: dict[str, OrtValue]) -> Any:
        """`turn` 0: even steps, 1: odd ones."""
        binding = self._step.io_binding()
        for name, value in {**self._given, **self._states[turn], **instead}.items():
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
        self._bindings = self._bind()


def rounded(profile: Profile, limits: Limits) -> Profile:
    """Batches by powers of 2, lengths by multiples of 32, within the limits."""
    batch = min(1 << (profile.batch - 1).bit_length(), limits.batch)
    source, target = (-(-size // 32) * 32 for size in (profile.src_len, profile.capacity))
    return Profile(batch, profile.beams, min(source, limits.src_tokens), min(target, limits.tgt_tokens))


def next_name(name: str) -> str:
    """The output of a step that the next one has as the input `name`."""
    return name.replace("past", "present") if name.startswith("past_") else f"next_{name}"
