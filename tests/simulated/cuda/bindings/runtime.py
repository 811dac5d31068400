"""The CUDA runtime, late: work is done when somebody waits for it."""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np

cudaHostAllocDefault, cudaStreamNonBlocking = 0, 1
cudaError_t = Enum(
    "cudaError_t", "cudaSuccess cudaErrorInsufficientDriver cudaErrorInvalidValue cudaErrorMemoryAllocation"
)
cudaMemcpyKind = Enum("cudaMemcpyKind", "cudaMemcpyHostToDevice cudaMemcpyDeviceToHost cudaMemcpyDeviceToDevice")
cudaStreamCaptureMode = Enum("cudaStreamCaptureMode", "cudaStreamCaptureModeThreadLocal")
OK = cudaError_t.cudaSuccess
DEVICE: dict[int, Any] = {}
PINNED: dict[int, Any] = {}
LAST: list[Any] = []
"""Errors that nobody has asked for."""
HANDLES: dict[int, Any] = {}
"""By what they are as a number."""


class Handle:
    """A stream, a graph or an event."""

    def __init__(self) -> None:
        self.work: deque[Callable[[], None]] = deque()
        self.captured: list[Callable[[], None]] | None = None
        self.done, self.time = True, 0.0
        HANDLES[id(self)] = self

    def __int__(self) -> int:
        return id(self)

    def add(self, work: Callable[[], None]) -> None:
        (self.work if self.captured is None else self.captured).append(work)

    def run(self, until: Handle | None = None) -> None:
        assert self.captured is None, "waits while it captures"
        while self.work and not (until and until.done):
            self.work.popleft()()


def allocated(kind: dict[int, Any], address: int, size: int) -> None:
    """Fail unless a range lies in one allocation."""
    here = list(kind.items())  # other threads allocate meanwhile
    assert any(base <= address and address + size <= base + len(array) for base, array in here), "no such memory"


def _allocate(kind: dict[int, Any], size: int) -> tuple[Any, int]:
    array = np.full(size + 256, 0xFF, np.uint8)  # not a number in any type
    shift = -array.ctypes.data % 256
    kind[array.ctypes.data + shift] = array[shift : shift + size]
    return OK, array.ctypes.data + shift


def cudaMalloc(size: int) -> tuple[Any, int]:
    return _allocate(DEVICE, size)


def cudaHostAlloc(size: int, flags: int) -> tuple[Any, int]:
    return _allocate(PINNED, size)


def cudaFree(address: int) -> tuple[Any]:
    del DEVICE[address]
    return (OK,)


def cudaFreeHost(address: int) -> tuple[Any]:
    del PINNED[address]
    return (OK,)


def cudaMemsetAsync(address: int, value: int, size: int, stream: Handle) -> tuple[Any]:
    allocated(DEVICE, address, size)
    stream.add(lambda: ctypes.memset(address, value, size) and None)
    return (OK,)


def cudaMemcpyAsync(target: int, source: int, size: int, kind: Any, stream: Handle) -> tuple[Any]:
    to_host, from_host = (kind.name.endswith("ToHost"), kind.name.startswith("cudaMemcpyHost"))
    allocated(PINNED if to_host else DEVICE, target, size)
    allocated(PINNED if from_host else DEVICE, source, size)
    stream.add(lambda: ctypes.memmove(target, source, size) and None)
    return (OK,)


def cudaStreamCreateWithFlags(flags: int) -> tuple[Any, Handle]:
    return OK, Handle()


def cudaStreamSynchronize(stream: Handle) -> tuple[Any]:
    stream.run()
    return (OK,)


def cudaStreamDestroy(stream: Handle) -> tuple[Any]:
    return (OK,)


def cudaStreamBeginCapture(stream: Handle, mode: Any) -> tuple[Any]:
    assert stream.captured is None and not stream.work
    stream.captured = []
    return (OK,)


def cudaStreamEndCapture(stream: Handle) -> tuple[Any, list[Any]]:
    captured, stream.captured = stream.captured, None
    assert captured, "nothing was captured"
    return OK, captured


def cudaGraphInstantiate(graph: list[Any], flags: int) -> tuple[Any, list[Any]]:
    return OK, graph


def cudaGraphLaunch(graph: list[Any], stream: Handle) -> tuple[Any]:
    for work in graph:
        stream.add(work)
    return (OK,)


def cudaGraphDestroy(graph: list[Any]) -> tuple[Any]:
    return (OK,)


def cudaGraphExecDestroy(graph: list[Any]) -> tuple[Any]:
    graph.clear()
    return (OK,)


def cudaGetLastError() -> tuple[Any]:
    found = LAST.pop() if LAST else OK
    LAST.clear()
    return (found,)


def cudaEventCreate() -> tuple[Any, Handle]:
    return OK, Handle()


def cudaEventRecord(event: Handle, stream: Handle) -> tuple[Any]:
    event.done, event.stream = False, stream  # type: ignore[attr-defined]

    def arrive() -> None:
        event.done, event.time = True, time.perf_counter()

    stream.add(arrive)
    return (OK,)


def cudaEventSynchronize(event: Handle) -> tuple[Any]:
    event.stream.run(until=event)  # type: ignore[attr-defined]
    assert event.done
    return (OK,)


def cudaEventElapsedTime(start: Handle, end: Handle) -> tuple[Any, float]:
    assert start.done and end.done, "an event that has not happened"
    return OK, 1e3 * (end.time - start.time)


def cudaEventDestroy(event: Handle) -> tuple[Any]:
    return (OK,)


def cudaDriverGetVersion() -> tuple[Any, int]:
    return OK, 13010


def cudaRuntimeGetVersion() -> tuple[Any, int]:
    return OK, 13000


def cudaGetDeviceCount() -> tuple[Any, int]:
    return OK, 1


def cudaGetDeviceProperties(device: int) -> tuple[Any, Any]:
    return OK, SimpleNamespace(name=b"Simulated GPU\0\0", major=9, minor=0, totalGlobalMem=8 << 30)


def cudaMemGetInfo() -> tuple[Any, int, int]:
    used = sum(map(len, DEVICE.values()))
    return OK, (8 << 30) - used, 8 << 30


def cudaGetErrorString(error: Any) -> tuple[Any, bytes]:
    return OK, error.name.encode()
