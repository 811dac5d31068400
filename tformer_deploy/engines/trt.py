"""TensorRT: plans that the device runs by itself, one CUDA graph a step; the host reads what it chose, late.

Nothing of a state leaves the device. Each step's best tokens, and what the device feeds the next one, are copied to the
host behind the step; `static.py` says how the search follows.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ..bundle import Bundle
from ..contract import GRAPHS
from ..errors import EngineError
from ..plans import PRECISIONS, Plans, Profile, find_plans, trt_variant
from .base import Floats, Ints, Limits, Outlook
from .cuda import Event, Graph, Memory, Pinned, Stream, lay_out
from .static import Choice, Record, StaticEngine
from .trt_api import TensorRt, find_gpu, installed, load_tensorrt, make_logger

AHEAD = 4
"""Steps in flight."""
FED = ("tokens", "parents", "values", "position")
FOUND = ("top_ids", "top_scores")


class TrtEngine(StaticEngine):
    """Runs the plans of a bundle that fit this host."""

    ahead = AHEAD

    def __init__(self, bundle: Bundle, precision: str = "") -> None:
        self.bundle, self.config, self.precision = bundle, bundle.config, precision
        self.timed = False
        """Whether `device_ms` counts."""
        self.device_ms = 0.0
        """How long the device worked."""
        self.not_captured = ""
        """Why steps are not replayed as CUDA graphs, if they are not."""

    def __enter__(self) -> Self:
        self.plans, self.tensorrt = self._find()
        self.precision = self.plans.stamp.precision
        profiles = self.plans.profiles
        widths = {each.beams: max(p.batch for p in profiles if p.beams >= each.beams) for each in profiles}
        self.limits = Limits(
            max(each.batch for each in profiles),
            max(each.src_len for each in profiles),
            max(each.capacity for each in profiles),
            max(widths),
            tuple(sorted(widths.items())),
        )
        logger, self._reasons = make_logger(self.tensorrt.module)
        self._runtime = self.tensorrt.module.Runtime(logger)
        self._loaded: dict[Path, Any] = {}
        self._devices: list[TrtDevice] = []
        self._idle: dict[Profile, list[TrtDevice]] = defaultdict(list)
        self._lock = threading.Lock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for device in self._devices:
            device.free()
        del self._devices, self._idle, self._loaded, self._runtime

    def _find(self) -> tuple[Plans, TensorRt]:
        """The plans for this host, and what runs them. Raises ArtifactError, EngineError, MissingExtra."""
        found = [load_tensorrt(flavor) for flavor in installed()]
        capability = find_gpu(found[0].title).capability
        precisions = [self.precision] if self.precision else list(PRECISIONS)
        owners = {stamp: each for name in precisions for each in found for stamp in each.stamps(capability, name)}
        plans = find_plans(self.bundle, trt_variant(self.bundle), list(owners))
        return plans, owners[plans.stamp]

    def layers(self, src_ids: Ints, src_lengths: Ints, tgt_ids: Ints) -> dict[str, Floats]:
        """See `Engine.layers`: a plan shows none. Raises EngineError."""
        raise EngineError("a plan does not show its layers: check ort:trt, which runs the same graphs")

    def choose(self, batch: int, src_tokens: int, outlook: Outlook) -> Profile:
        """See `StaticEngine.choose`: the smallest that takes the request."""
        limits = self.limits
        tokens = min(outlook.tokens or limits.tgt_tokens, limits.tgt_tokens)
        return self.plans.fitting(batch, outlook.beams or limits.beams, src_tokens, tokens)

    def take(self, profile: Profile) -> TrtDevice:
        """See `StaticEngine.take`."""
        with self._lock:
            if self._idle[profile]:
                return self._idle[profile].pop()
            encoder, step = (self._load(self.plans.plan(graph, profile)) for graph in GRAPHS)
            self._devices.append(TrtDevice(self, profile, encoder, step))
            return self._devices[-1]

    def give_back(self, device: Any) -> None:
        """See `StaticEngine.give_back`."""
        if not device.freed:
            self._idle[device.profile].append(device)

    def reasons(self) -> str:
        """What TensorRT has complained of."""
        return "; ".join(self._reasons) or "it gives no reason"

    def _load(self, path: Path) -> Any:
        """A plan in the device's memory, once."""
        if path not in self._loaded:
            plan = self._runtime.deserialize_cuda_engine(path.read_bytes())
            if plan is None:
                raise EngineError(f"{self.tensorrt.title} cannot load {path}: {self.reasons()}")
            self._loaded[path] = plan
        return self._loaded[path]


class TrtDevice:
    """See `static.Device`. Even steps read what odd ones write, and the other way round."""

    def __init__(self, engine: TrtEngine, profile: Profile, encoder: Any, step: Any) -> None:
        self.engine, self.profile, self.freed = engine, profile, False
        self._stream = Stream()
        shapes = {**tensors_of(encoder), **tensors_of(step)}
        self.best = shapes["top_ids"][0][-1]
        self._sent, sent_size = lay_out({name: shapes[name] for name in ("src_lengths", "end_id", "src_ids")})
        blocks = {**{name: shapes[name] for name in FED}, **{name: shapes[name] for name in FOUND}}
        self._turn, turn_size = lay_out(blocks)
        self._fed_size = self._turn[FOUND[0]].offset
        self._memory = {name: Memory(size_of(shapes[name])) for name in shapes if name.startswith(("cross_", "log_"))}
        past = [name for name in shapes if name.startswith("past_")]
        self._pasts = [{name: Memory(size_of(shapes[name])) for name in past} for _ in range(2)]
        self._given, self._turns = Memory(sent_size), [Memory(turn_size) for _ in range(2)]
        self._shapes = shapes
        self._staging = Pinned(max(sent_size, self._fed_size))
        self._slots = [Pinned(turn_size) for _ in range(AHEAD + 2)]
        self._fetched: dict[str, Pinned] = {}
        self._begins, self._ends = ([Event() for _ in self._slots] for _ in range(2))
        self._contexts: list[Any] = []
        self._encoder = self._prepare(encoder, self._addresses(0))
        self._steps = [self._prepare(step, self._addresses(turn)) for turn in range(2)]

    def encode(self, src_ids: Ints, src_lengths: Ints, end_id: int) -> None:
        """See `Device.encode`. Sentences that there is room for beside the request's have one token."""
        self._stream.wait()
        batch, width = src_ids.shape
        views = {name: tensor.view(self._staging.bytes) for name, tensor in self._sent.items()}
        views["src_ids"][:] = self.engine.config.pad_id
        views["src_ids"][:batch, :width] = src_ids
        views["src_lengths"][:] = 1
        views["src_lengths"][:batch] = src_lengths
        views["end_id"][:] = end_id
        self._stream.to_device(self._given.address, self._staging, self._given.size)
        self._begins[0].record(self._stream)
        self._encoder.launch()
        if self.engine.timed:
            self._ends[0].record(self._stream)
            self._ends[0].wait()
            self.engine.device_ms += self._ends[0].since(self._begins[0])

    def feed(self, choice: Choice, step: int) -> None:
        """See `Device.feed`."""
        self._stream.wait()  # what was fed before may not have left the host
        values = {"tokens": choice.tokens, "parents": choice.parents, "values": choice.values, "position": step}
        for name, array in values.items():
            self._turn[name].view(self._staging.bytes)[:] = array
        self._stream.to_device(self._turns[step % 2].address, self._staging, self._fed_size)

    def issue(self, step: int) -> None:
        """See `Device.issue`."""
        slot = step % len(self._slots)
        if self.engine.timed:
            self._begins[slot].record(self._stream)
        self._steps[step % 2].launch()
        written = self._turns[1 - step % 2]
        self._stream.to_host(self._slots[slot], written.address, written.size)
        self._ends[slot].record(self._stream)

    def read(self, step: int) -> Record:
        """See `Device.read`."""
        slot = step % len(self._slots)
        self._ends[slot].wait()
        if self.engine.timed:
            self.engine.device_ms += self._ends[slot].since(self._begins[slot])
        found = {name: tensor.view(self._slots[slot].bytes).copy() for name, tensor in self._turn.items()}
        return Record(found["top_ids"], found["top_scores"], Choice(*(found[name] for name in FED[:3])))

    def log_probs(self, step: int) -> Floats:
        """See `Device.log_probs`."""
        return self._fetch("log_probs")

    def cross(self) -> list[Floats]:
        """See `Device.cross`."""
        return [self._fetch(name) for name in self._memory if name.startswith("cross_")]

    def free(self) -> None:
        """Give everything back to the device."""
        self.freed = True
        self._stream.wait()
        memory = [*self._memory.values(), *(each for past in self._pasts for each in past.values())]
        pinned = [self._staging, *self._slots, *self._fetched.values()]
        parts: list[Any] = [self._encoder, *self._steps, *memory, self._given, *self._turns, *pinned]
        for part in [*parts, *self._begins, *self._ends, self._stream]:
            part.free()
        self._contexts.clear()

    def _fetch(self, name: str) -> Floats:
        """A tensor of the device's, in fp32."""
        memory, (shape, dtype) = self._memory[name], self._shapes[name]
        if name not in self._fetched:
            self._fetched[name] = Pinned(memory.size)
        self._stream.to_host(self._fetched[name], memory.address, memory.size)
        self._stream.wait()
        return as_floats(self._fetched[name].bytes, dtype).reshape(shape)

    def _addresses(self, turn: int) -> dict[str, int]:
        """Where even steps (0) or odd steps (1), and the encoder, find every tensor."""
        found = {name: memory.address for name, memory in self._memory.items()}
        found |= {name: self._given.address + tensor.offset for name, tensor in self._sent.items()}
        for name, tensor in self._turn.items():
            here, other = (self._turns[each].address + tensor.offset for each in (turn, 1 - turn))
            found |= {name: here, f"next_{name}": other} if name in FED else {name: other}
        for name, memory in self._pasts[turn].items():
            found |= {name: memory.address, name.replace("past", "present"): self._pasts[1 - turn][name].address}
        return found

    def _prepare(self, plan: Any, addresses: dict[str, int]) -> Graph | Calls:
        """A plan's work as a CUDA graph, after a run that loads what it needs; as calls where it cannot be captured."""
        context = plan.create_execution_context()
        if context is None:
            raise EngineError(f"{self.engine.tensorrt.title} has no room for {self.profile}: build a smaller profile")
        for i in range(plan.num_io_tensors):
            name = plan.get_tensor_name(i)
            if not context.set_tensor_address(name, addresses[name]):
                raise EngineError(f"{self.engine.tensorrt.title} does not take {name}: {self.engine.reasons()}")

        def run() -> None:
            if not context.execute_async_v3(int(self._stream.handle)):
                raise EngineError(f"{self.engine.tensorrt.title} stopped: {self.engine.reasons()}")

        run()
        self._stream.wait()
        self._contexts.append(context)  # a graph uses its memory
        try:
            return self._stream.capture(run)
        except EngineError as error:
            self.engine.not_captured = str(error)
            return Calls(run)


@dataclass(frozen=True)
class Calls:
    """Work that TensorRT gives to its stream anew each time."""

    launch: Callable[[], None]

    def free(self) -> None:
        """There is nothing to give back."""


TYPES = {"FLOAT": np.float32, "HALF": np.float16, "BF16": np.uint16, "INT32": np.int32}
"""numpy has no bf16: its bits."""


def tensors_of(plan: Any) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Shape and type of every input and output."""
    names = [plan.get_tensor_name(i) for i in range(plan.num_io_tensors)]
    types = {name: np.dtype(TYPES[plan.get_tensor_dtype(name).name]) for name in names}
    return {name: (tuple(plan.get_tensor_shape(name)), types[name]) for name in names}


def size_of(tensor: tuple[tuple[int, ...], np.dtype[Any]]) -> int:
    """Bytes."""
    return int(np.prod(tensor[0])) * tensor[1].itemsize


def as_floats(raw: NDArray[np.uint8], dtype: np.dtype[Any]) -> Floats:
    """A copy in fp32 of the bytes of fp32, fp16 or, as uint16, bf16."""
    if dtype == np.uint16:
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return raw.view(dtype).astype(np.float32)
