"""ONNX Runtime with the graphs that TensorRT compiles, in fp32 or half precision: a plan's results without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...base.errors import EngineError, NoRoom
from ...bundle.contract import signature
from ...bundle.manifest import Bundle
from ...bundle.plans import Profile
from ..base import ANYTHING, FIRST_CAPACITY, Floats, Ints, Limits, Outlook, Scores
from ..speculative import FED, Choice, Record, SpeculativeEngine, SpeculativeState
from .library import OrtValue, RunOptions, reason
from .standard import OrtGraphs, view

KEPT = 16
"""Unused devices that are kept on a GPU. ONNX Runtime does not free what it has captured for one that is given up."""
Out = TypeVar("Out")
ORT_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int32)": np.int32}


class DeviceSearchEngine(SpeculativeEngine, OrtGraphs):
    """Runs a variant of target `trt`, on a processor, or on a GPU, where steps are replayed as CUDA graphs.

    ONNX Runtime captures a graph in the first run with a given `gpu_graph_id`, which it repeats three times; a step can
    be repeated, as it does not write its inputs. Later runs with that id must have the same sizes and addresses, and
    come from the same thread; during a capture no other thread may use the GPU. So one thread makes all calls.
    """

    def __init__(self, bundle: Bundle, threads: int = 0, variant: str = "", device: str = "cpu") -> None:
        super().__init__(bundle, threads, variant, device)
        self.keeps = 0 if device == "cpu" else KEPT
        self._numbers = count(1)
        self._thread: ThreadPoolExecutor | None = None

    def __enter__(self) -> Self:
        OrtGraphs.__enter__(self)
        super().__enter__()
        if self.keeps:
            self._thread = ThreadPoolExecutor(1, "gpu")
            try:
                self._try()
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, *why: object) -> None:
        if self._thread:
            self._thread.shutdown()
        super().__exit__(*why)
        OrtGraphs.__exit__(self, *why)

    def encode(self, src_ids: Ints, src_lengths: Ints, outlook: Outlook = ANYTHING) -> SpeculativeState:
        """See `Engine.encode`."""
        return self._alone(super().encode, src_ids, src_lengths, outlook)

    def admit(self, state: SpeculativeState, src_ids: Ints, src_lengths: Ints, outlook: Outlook = ANYTHING) -> None:
        """See `Engine.admit`."""
        self._alone(super().admit, state, src_ids, src_lengths, outlook)

    def step(self, tokens: Ints, state: SpeculativeState, full: bool = False, attention: bool = False) -> Scores:
        """See `Engine.step`."""
        return self._alone(super().step, tokens, state, full, attention)

    def cross_keys_values(self, state: SpeculativeState) -> list[Floats]:
        """See `Engine.cross_keys_values`."""
        return self._alone(super().cross_keys_values, state)

    def _alone(self, call: Callable[..., Out], *arguments: Any) -> Out:
        """Call in the one thread that uses the GPU."""
        return self._thread.submit(call, *arguments).result() if self._thread else call(*arguments)

    def _try(self) -> None:
        """Run a step, which shows whether it can be captured; if not, open the session again without capture."""
        try:
            self._alone(self._take_step)
        except EngineError as error:
            if self.not_captured:
                raise
            self._step = self._alone(super()._session, self.step_graph, 0)
            self.note_not_captured(str(error))

    def _take_step(self) -> None:
        device, one = self.make(Profile(1, 1, 1, 1)), np.zeros((1, 1), np.int32)
        device.encode(one, np.ones(1, np.int32), ANYTHING)
        device.feed(Choice(one, one, np.zeros((1, 1), np.float32), one), 0)
        device.issue(0)

    def choose(self, wanted: Profile, filled: int) -> Profile:
        """See `SpeculativeEngine.choose`: the sizes needed now; where devices are kept, rounded, so that many fit."""
        if self.keeps:
            return rounded(wanted, self.limits)
        return replace(wanted, capacity=min(wanted.capacity, FIRST_CAPACITY << (filled // FIRST_CAPACITY).bit_length()))

    def make(self, profile: Profile) -> OrtDevice:
        """See `SpeculativeEngine.make`."""
        return OrtDevice(self, profile)

    def numbered(self) -> RunOptions | None:
        """Run options with a `gpu_graph_id` of their own, for all runs with the same buffers; None on a processor."""
        if not self.keeps:
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
        except EngineError as error:
            session = super()._session(graph, spin_us, **cuda)  # raises too if the option is not the reason
            self.note_not_captured(str(error))
            return session


class OrtDevice:
    """See `speculative.Device`."""

    def __init__(self, engine: DeviceSearchEngine, profile: Profile) -> None:
        self.engine, self.profile, self.freed = engine, profile, False
        self.best = engine.recipe.top_k or 2 * profile.beams
        self._encoder, self._step = engine.sessions()
        step = signature("decoder_step", engine.config, engine.recipe)
        self._specs = {spec.name: spec for spec in (*step.inputs, *step.outputs)}
        types = (*self._step.get_inputs(), *self._step.get_outputs())
        self._types = {value.name: ORT_TYPES[value.type] for value in types}
        self._carried = {spec.name: carried for spec in step.inputs if (carried := next_name(spec.name)) in self._specs}
        """Input of a step -> the output of the step before it."""
        outputs = [spec.name for spec in step.outputs if spec.name not in self._carried.values()]
        self._inputs = self._buffers(spec.name for spec in step.inputs if spec.name not in self._carried)
        self._states = [self._buffers(self._carried) for _ in range(2)]
        self._outputs = [self._buffers(outputs) for _ in range(2)]
        self._past = [name for name in self._carried if name.startswith("past_")]
        self._bindings = [self._binding(turn) for turn in range(2)]
        self._options = [engine.numbered() for _ in self._bindings]

    def encode(self, src_ids: Ints, src_lengths: Ints, outlook: Outlook) -> None:
        """See `Device.encode`."""
        self._inputs["src_lengths"].update_inplace(src_lengths)
        self._inputs["end_id"].update_inplace(np.array([outlook.end_id], np.int32))
        self._inputs["live_beams"].update_inplace(np.array([outlook.beams or self.profile.beams], np.int32))
        binding = self._encoder.io_binding()
        binding.bind_cpu_input("src_ids", src_ids)
        binding.bind_ortvalue_input("src_lengths", self._inputs["src_lengths"])
        for name, value in self._inputs.items():
            if name.startswith("cross_"):
                binding.bind_ortvalue_output(name, value)
        self.engine.run(self._encoder, binding)

    def feed(self, choice: Choice, step: int) -> None:
        """See `Device.feed`."""
        for name, array in zip(FED, vars(choice).values(), strict=True):
            value = self._states[step % 2][name]
            value.update_inplace(np.resize(array, value.shape()))

    def issue(self, step: int) -> None:
        """See `Device.issue`."""
        self.engine.run(self._step, self._bindings[step % 2], self._options[step % 2])

    def read(self, step: int) -> Record:
        """See `Device.read`."""
        outputs, state = self._outputs[step % 2], self._states[1 - step % 2]
        choice = Choice(*(view(state[name]).copy() for name in FED))
        return Record(view(outputs["top_ids"]).copy(), view(outputs["top_scores"]).copy(), choice)

    def log_probs(self, step: int) -> Floats:
        """See `Device.log_probs`."""
        return view(self._outputs[step % 2]["log_probs"])  # type: ignore[no-any-return]

    def cross(self) -> list[Floats]:
        """See `Device.cross`."""
        return [view(value) for name, value in self._inputs.items() if name.startswith("cross_")]

    def caches(self, step: int) -> list[NDArray[Any]]:
        """See `Device.caches`."""
        return [view(self._states[step % 2][name]) for name in self._past]

    def fill(self, caches: list[NDArray[Any]], step: int) -> None:
        """See `Device.fill`."""
        for name, some in zip(self._past, caches, strict=True):
            value = self._states[step % 2][name]
            behind = zip(value.shape(), some.shape, strict=True)
            value.update_inplace(np.pad(some, [(0, whole - part) for whole, part in behind]))

    def free(self) -> None:
        """See `Device.free`."""
        self.freed = True
        self._bindings.clear()
        for part in (self._inputs, *self._states, *self._outputs):
            part.clear()

    def _buffers(self, names: Iterable[str]) -> dict[str, OrtValue]:
        """Zeros for inputs or outputs. Raises NoRoom."""
        sizes, device = self.profile.sizes, self.engine.device
        shapes = {name: (self._specs[name].sized(sizes), self._types[name]) for name in names}
        try:
            return {name: OrtValue.ortvalue_from_numpy(np.zeros(*each), device) for name, each in shapes.items()}
        except Exception as error:  # the library's exceptions share no base class
            raise NoRoom(f"onnxruntime has no room for {self.profile}: {reason(error)}: use smaller batches") from None

    def _binding(self, turn: int) -> Any:
        """`turn` 0: even steps, 1: odd ones."""
        binding = self._step.io_binding()
        for name, value in {**self._inputs, **self._states[turn]}.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in self._outputs[turn].items():
            binding.bind_ortvalue_output(name, value)
        for name, output in self._carried.items():
            binding.bind_ortvalue_output(output, self._states[1 - turn][name])
        return binding


def rounded(profile: Profile, limits: Limits) -> Profile:
    """The next powers of 2 within the limits; lengths are at least 32."""
    batch, source, target = (
        1 << (size - 1).bit_length() for size in (profile.batch, max(profile.src_len, 32), max(profile.capacity, 32))
    )
    most = limits.batch, limits.src_tokens, limits.tgt_tokens
    batch, source, target = map(min, (batch, source, target), most)
    return Profile(batch, profile.beams, source, target)


def next_name(name: str) -> str:
    """The output of a step that becomes the input `name` of the next one."""
    return name.replace("past", "present") if name.startswith("past_") else f"next_{name}"
