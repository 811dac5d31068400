"""The few calls of the CUDA runtime that plans need: errors as exceptions, memory with an owner."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from cuda.bindings import runtime
from numpy.typing import NDArray

from ...base.errors import EngineError, NoRoom

COPIED, COPIES = 512 << 20, 10
"""Bytes and number of copies that measure the memory's bandwidth; a copy reads and writes."""
ALIGNMENT = 256
"""Bytes, for tensors that share a block of memory."""


@dataclass(frozen=True)
class Gpu:
    """The first GPU of the host."""

    name: str
    capability: str
    """Compute capability, such as `sm90`."""


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """A function's result, or a tuple of several. Raises EngineError, NoRoom where memory is full."""
    error, *found = function(*arguments)
    if error != runtime.cudaError_t.cudaSuccess:
        runtime.cudaGetLastError()  # or whoever asks next takes it for an error of his own
        reason = f"CUDA stopped in {function.__name__}: {runtime.cudaGetErrorString(error)[1].decode()}"
        if error == runtime.cudaError_t.cudaErrorMemoryAllocation:
            raise NoRoom(f"{reason}: use fewer --workers, or plans of smaller profiles")
        raise EngineError(reason)
    return found[0] if len(found) == 1 else tuple(found)


def find_gpu(wanted_by: str) -> Gpu:
    """The first GPU. Raises EngineError that says whether the driver or the GPU is missing."""
    try:
        _, driver = runtime.cudaDriverGetVersion()
    except RuntimeError:  # of cuda-python 12, where it finds no library of the driver
        driver = 0
    if not driver:
        raise EngineError(f"{wanted_by} needs a GPU, and no NVIDIA driver is loaded here: install or start it")
    error, count = runtime.cudaGetDeviceCount()
    if error == runtime.cudaError_t.cudaErrorInsufficientDriver:
        _, own = runtime.cudaRuntimeGetVersion()
        raise EngineError(
            f"the NVIDIA driver knows CUDA up to {_dotted(driver)}, and cuda-python here is of {_dotted(own)}: "
            f"update the driver, or take cuda-python and TensorRT of CUDA {driver // 1000}"
        )
    if error != runtime.cudaError_t.cudaSuccess or not count:
        raise EngineError(f"{wanted_by} needs a GPU, and there is none here ({error.name})")
    properties = call(runtime.cudaGetDeviceProperties, 0)
    name = properties.name.decode().rstrip("\0")
    return Gpu(name, f"sm{properties.major}{properties.minor}")


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


class Memory:
    """A block of device memory, uninitialized."""

    def __init__(self, size: int) -> None:
        self.size, self.address = size, int(call(runtime.cudaMalloc, size))

    def free(self) -> None:
        """Give it back."""
        call(runtime.cudaFree, self.address)


class Pinned:
    """A block of pinned host memory, for asynchronous copies."""

    def __init__(self, size: int) -> None:
        self.address = int(call(runtime.cudaHostAlloc, size, runtime.cudaHostAllocDefault))
        self.bytes: NDArray[np.uint8] = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.address))
        self.bytes[:] = 0

    def free(self) -> None:
        """Free it; no view of it may be used afterwards."""
        call(runtime.cudaFreeHost, self.address)


class Stream:
    """A CUDA stream."""

    def __init__(self) -> None:
        self.handle = call(runtime.cudaStreamCreateWithFlags, runtime.cudaStreamNonBlocking)

    def wait(self) -> None:
        """Until all its work is done."""
        call(runtime.cudaStreamSynchronize, self.handle)

    def to_device(self, address: int, source: Pinned, size: int) -> None:
        """Copy the first `size` bytes."""
        kind = runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        call(runtime.cudaMemcpyAsync, address, source.address, size, kind, self.handle)

    def clear(self, memory: Memory) -> None:
        """Fill with zeros."""
        call(runtime.cudaMemsetAsync, memory.address, 0, memory.size, self.handle)

    def to_host(self, target: Pinned, address: int, size: int) -> None:
        """Copy `size` bytes."""
        kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        call(runtime.cudaMemcpyAsync, target.address, address, size, kind, self.handle)

    def capture(self, work: Callable[[], None]) -> Graph:
        """Capture what `work` launches on this stream as a CUDA graph; nothing runs now."""
        call(
            runtime.cudaStreamBeginCapture, self.handle, runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        )
        try:
            try:
                work()
            except EngineError:
                runtime.cudaStreamEndCapture(self.handle)
                raise
            graph = call(runtime.cudaStreamEndCapture, self.handle)
            try:
                return Graph(self, call(runtime.cudaGraphInstantiate, graph, 0))
            finally:
                runtime.cudaGraphDestroy(graph)
        except EngineError:
            runtime.cudaGetLastError()  # of what `work` did without `call`
            raise

    def free(self) -> None:
        """Give it back."""
        call(runtime.cudaStreamDestroy, self.handle)


class Graph:
    """A CUDA graph."""

    def __init__(self, stream: Stream, executable: Any) -> None:
        self._stream, self._executable = stream, executable

    def launch(self) -> None:
        """Launch it on its stream."""
        call(runtime.cudaGraphLaunch, self._executable, self._stream.handle)

    def free(self) -> None:
        """Give it back."""
        call(runtime.cudaGraphExecDestroy, self._executable)


class Event:
    """A CUDA event."""

    def __init__(self) -> None:
        self.handle = call(runtime.cudaEventCreate)

    def record(self, stream: Stream) -> None:
        """Record it after the stream's current work."""
        call(runtime.cudaEventRecord, self.handle, stream.handle)

    def wait(self) -> None:
        """Until the stream has reached it."""
        call(runtime.cudaEventSynchronize, self.handle)

    def since(self, earlier: Event) -> float:
        """Milliseconds between two that the stream has passed."""
        return float(call(runtime.cudaEventElapsedTime, earlier.handle, self.handle))

    def free(self) -> None:
        """Give it back."""
        call(runtime.cudaEventDestroy, self.handle)


def gpu_in_use() -> dict[str, Any]:
    """The first GPU's name, and its memory."""
    gpu = find_gpu("the measurement")
    free, total = call(runtime.cudaMemGetInfo)
    return {"name": gpu.name, "used_mib": (total - free) >> 20, "total_mib": total >> 20}


def copy_rate() -> float:
    """The first GPU's bandwidth: bytes read and written a second in a copy. Raises NoRoom without 1 GiB of memory."""
    best = math.inf
    with ExitStack() as stack:
        parts: list[Any] = []
        for make in (lambda: Memory(COPIED), lambda: Memory(COPIED), Event, Event, Stream):
            parts.append(make())
            stack.callback(parts[-1].free)
        target, source, before, after, stream = parts
        for _ in range(COPIES):
            before.record(stream)
            kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
            call(runtime.cudaMemcpyAsync, target.address, source.address, COPIED, kind, stream.handle)
            after.record(stream)
            after.wait()
            best = min(best, after.since(before))
    return 2 * COPIED / (best / 1e3)


@dataclass(frozen=True)
class Tensor:
    """Where one of several tensors lies in a block."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def view(self, block: NDArray[np.uint8]) -> NDArray[Any]:
        """The tensor in a copy of the block."""
        size = int(np.prod(self.shape)) * self.dtype.itemsize
        return block[self.offset : self.offset + size].view(self.dtype).reshape(self.shape)


def lay_out(tensors: dict[str, tuple[tuple[int, ...], np.dtype[Any]]]) -> tuple[dict[str, Tensor], int]:
    """Places one behind the other, aligned, and the size of the block."""
    places, end = {}, 0
    for name, (shape, dtype) in tensors.items():
        places[name] = Tensor(end, shape, dtype)
        end += -(-int(np.prod(shape)) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return places, end
