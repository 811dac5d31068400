"""The memory, stream and CUDA graphs of one batch on TensorRT."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...base.errors import EngineError, NoRoom
from ...bundle.contract import cache_names
from ...bundle.plans import Profile
from ...model.config import ModelConfig
from ..base import Floats, Ints, Outlook
from ..speculative import FED, Choice, Record
from .api import Kernels, TensorRt, is_full
from .cuda import Event, Memory, Pinned, Stream, lay_out

REQUEST_INPUTS = ("src_lengths", "end_id", "live_beams", "src_ids")
BEST_OUTPUTS = ("top_ids", "top_scores")
TRT_TYPES = {"FLOAT": np.float32, "HALF": np.float16, "BF16": np.uint16, "INT32": np.int32}
"""numpy has no bf16: its bits."""

Part = TypeVar("Part", bound=Any)


class Owner(Protocol):
    """The engine of a device."""

    config: ModelConfig
    tensorrt: TensorRt
    kernels: Kernels
    timings: list[tuple[Event, Event]] | None

    def reasons(self) -> str:
        """TensorRT's errors since the last call."""
        ...


class TrtDevice:
    """See `speculative.Device`."""

    def __init__(self, engine: Owner, profile: Profile, encoder: Any, step: Any) -> None:
        self.engine, self.profile, self.freed, self.not_captured = engine, profile, False, ""
        self._parts: list[Any] = []
        self._contexts: list[Any] = []
        self._launches: list[Callable[[], None]] = []
        """Of even steps, odd steps and the encoder."""
        try:
            self._make(encoder, step)
        except EngineError:
            self.free()
            raise

    def _make(self, encoder: Any, step: Any) -> None:
        """Allocate memory, and prepare the encoder and the even and odd steps."""
        self._shapes = shapes = {**tensors_of(encoder), **tensors_of(step)}
        if missing := {*REQUEST_INPUTS, *FED, *BEST_OUTPUTS} - shapes.keys():
            raise EngineError(f"the plans for {self.profile} have no {min(missing)}: export and build again")
        self.best = shapes["top_ids"][0][-1]
        self._stream = self._own(Stream())
        given, given_size = lay_out({name: shapes[name] for name in REQUEST_INPUTS})
        turn, turn_size = lay_out({name: shapes[name] for name in (*FED, *BEST_OUTPUTS)})
        self._fed_size = turn[BEST_OUTPUTS[0]].offset
        self._memory = {
            name: self._own(Memory(size_of(shapes[name]))) for name in shapes if name.startswith(("cross_", "log_"))
        }
        self._past, past_size = lay_out({name: shapes[name] for name in shapes if name.startswith("past_")})
        self._pasts = [self._own(Memory(past_size)) for _ in range(2)]
        self._given = self._own(Memory(given_size))
        self._turns = [self._own(Memory(turn_size)) for _ in range(2)]
        self._requests, self._choices = self._own(Pinned(given_size)), self._own(Pinned(self._fed_size))
        self._slots = [self._own(Pinned(turn_size)) for _ in range(2)]
        self._ends = [self._own(Event()) for _ in self._slots]
        self._fetched: dict[str, Pinned] = {}
        # Views are made once: they would slow down each step.
        self._request = {name: place.view(self._requests.bytes) for name, place in given.items()}
        self._choice = {name: turn[name].view(self._choices.bytes) for name in FED}
        self._records = [[turn[name].view(slot.bytes) for name in (*BEST_OUTPUTS, *FED)] for slot in self._slots]
        places = {name: self._given.address + place.offset for name, place in given.items()}
        fixed = {**{name: memory.address for name, memory in self._memory.items()}, **places}
        for memory in (*self._memory.values(), *self._pasts, self._given, *self._turns):
            self._stream.clear(memory)
        for now, other in ((0, 1), (1, 0)):
            addresses = dict(fixed)
            for name, place in turn.items():
                here, there = (self._turns[each].address + place.offset for each in (now, other))
                addresses |= {name: here, f"next_{name}": there} if name in FED else {name: there}
            for name, place in self._past.items():
                addresses[name] = self._pasts[now].address + place.offset
                addresses[name.replace("past", "present")] = self._pasts[other].address + place.offset
            self._launches.append(self._prepare(step, addresses))
        self._launches.append(self._prepare(encoder, fixed))

    def encode(self, src_ids: Ints, src_lengths: Ints, outlook: Outlook) -> None:
        """See `Device.encode`."""
        self._stream.wait()
        request = self._request
        request["src_ids"][:], request["src_lengths"][:] = src_ids, src_lengths
        request["end_id"][:] = outlook.end_id
        request["live_beams"][:] = outlook.beams or self.profile.beams
        self._stream.to_device(self._given.address, self._requests, self._given.size)
        self._timed(self._launches[2])

    def feed(self, choice: Choice, step: int) -> None:
        """See `Device.feed`."""
        if step:  # the last copy from the pinned buffer may not be done; before step 0 there is none
            self._stream.wait()
        for name, array in zip(FED, vars(choice).values(), strict=True):
            self._choice[name][...] = np.resize(array, self._choice[name].shape)
        self._stream.to_device(self._turns[step % 2].address, self._choices, self._fed_size)

    def issue(self, step: int) -> None:
        """See `Device.issue`."""
        slot, written = step % len(self._slots), self._turns[1 - step % 2]
        self._timed(self._launches[step % 2])
        self._stream.to_host(self._slots[slot], written.address, written.size)
        self._ends[slot].record(self._stream)

    def read(self, step: int) -> Record:
        """See `Device.read`."""
        slot = step % len(self._slots)
        self._ends[slot].wait()
        ids, scores, *choice = (view.copy() for view in self._records[slot])
        return Record(ids, scores, Choice(*choice))

    def log_probs(self, step: int) -> Floats:
        """See `Device.log_probs`."""
        return self._fetch("log_probs")

    def cross(self) -> list[Floats]:
        """See `Device.cross`."""
        return [self._fetch(name) for name in cache_names("cross", self.engine.config)]

    def caches(self, step: int) -> list[NDArray[Any]]:
        """See `Device.caches`."""
        memory = self._pasts[step % 2]
        block = Pinned(memory.size)
        self._stream.to_host(block, memory.address, memory.size)
        self._stream.wait()
        found = [place.view(block.bytes).copy() for place in self._past.values()]
        block.free()
        return found

    def fill(self, caches: list[NDArray[Any]], step: int) -> None:
        """See `Device.fill`."""
        memory = self._pasts[step % 2]
        block = Pinned(memory.size)
        for place, some in zip(self._past.values(), caches, strict=True):
            place.view(block.bytes)[tuple(map(slice, some.shape))] = some
        self._stream.to_device(memory.address, block, memory.size)
        self._stream.wait()
        block.free()

    def free(self) -> None:
        """Free all memory, graphs and contexts."""
        self.freed, parts = True, self._parts[::-1]
        self._parts.clear()
        waits = [part.wait for part in parts[-1:]]  # the stream, which is the first of all
        free_all([*waits, self._launches.clear, self._contexts.clear, *(part.free for part in parts)])

    def _own(self, part: Part) -> Part:
        """Register a part for `free`."""
        self._parts.append(part)
        return part

    def _timed(self, launch: Callable[[], None]) -> None:
        """Launch; record when the device began and ended, if `timings` is on."""
        if self.engine.timings is None:
            launch()
            return
        begin, end = Event(), Event()
        begin.record(self._stream)
        launch()
        end.record(self._stream)
        self.engine.timings.append((begin, end))

    def _fetch(self, name: str) -> Floats:
        """A tensor copied from the device, in fp32."""
        memory, (shape, dtype) = self._memory[name], self._shapes[name]
        if name not in self._fetched:
            self._fetched[name] = self._own(Pinned(memory.size))
        self._stream.to_host(self._fetched[name], memory.address, memory.size)
        self._stream.wait()
        return as_floats(self._fetched[name].bytes, dtype).reshape(shape)

    def _prepare(self, plan: Any, addresses: dict[str, int]) -> Callable[[], None]:
        """A function that launches a plan, as a CUDA graph if that can be captured. Runs it once, to load it."""
        title, reasons = self.engine.tensorrt.title, self.engine.reasons
        context = self.engine.kernels.make_context(plan, lambda size: self._own(Memory(size)).address)
        if context is None:
            if is_full(said := reasons()):
                raise NoRoom(f"{title} has no room for {self.profile}: {said}: build a smaller profile")
            raise EngineError(f"{title} cannot run the plans for {self.profile} on this GPU: {said}")
        self._contexts.append(context)  # which the graph needs for its memory
        for i in range(plan.num_io_tensors):
            name = plan.get_tensor_name(i)
            if not context.set_tensor_address(name, addresses[name]):
                raise EngineError(f"{title} does not take {name}: {reasons()}")

        def run() -> None:
            if not context.execute_async_v3(int(self._stream.handle)):
                raise EngineError(f"{title} stopped: {reasons()}")

        run()
        self._stream.wait()
        try:
            graph = self._own(self._stream.capture(run))
            graph.launch()  # the first launch uploads it
            self._stream.wait()
            return graph.launch
        except EngineError as error:
            self.not_captured = str(error)
            return run


def free_all(frees: Iterable[Callable[[], None]], quiet: bool = False) -> None:
    """Call all, even if some fail; then raise the first EngineError, unless `quiet`."""
    failures = []
    for free in frees:
        try:
            free()
        except EngineError as failure:
            failures.append(failure)
    if failures and not quiet:
        raise failures[0]


def tensors_of(plan: Any) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Shape and type of every input and output."""
    names = [plan.get_tensor_name(i) for i in range(plan.num_io_tensors)]
    types = {name: np.dtype(TRT_TYPES[plan.get_tensor_dtype(name).name]) for name in names}
    return {name: (tuple(plan.get_tensor_shape(name)), types[name]) for name in names}


def size_of(tensor: tuple[tuple[int, ...], np.dtype[Any]]) -> int:
    """Bytes of a tensor."""
    return math.prod(tensor[0]) * tensor[1].itemsize


def as_floats(raw: NDArray[np.uint8], dtype: np.dtype[Any]) -> Floats:
    """A copy in fp32 of the bytes of fp32, fp16 or, as uint16, bf16."""
    if dtype == np.uint16:
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return raw.view(dtype).astype(np.float32)
