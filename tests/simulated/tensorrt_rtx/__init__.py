"""TensorRT for RTX: as TensorRT, but kernels are compiled where a plan runs, unless they were kept."""

from __future__ import annotations

from enum import Enum

import tensorrt
from cuda.bindings import runtime
from tensorrt import ILogger

__all__ = ["ILogger"]
__version__ = "1.7.1"
HEAD = b"kernels of the simulated GPU\n"
COMPILED: list[str] = []
"""Names of the first output of each plan that was compiled in this process."""


class Runtime(tensorrt.Runtime):
    def deserialize_cuda_engine(self, plan: bytes) -> Plan | None:
        found = super().deserialize_cuda_engine(plan)
        return found and Plan(plan)


class ExecutionContextAllocationStrategy(Enum):
    STATIC = 0
    USER_MANAGED = 2


class Plan(tensorrt.Plan):
    device_memory_size_v2 = 4096

    def create_runtime_config(self) -> Config:
        return Config()

    def create_execution_context(self, *, runtime_config: Config) -> Context:  # type: ignore[override]
        assert runtime_config.cache is not None
        assert runtime_config.strategy is ExecutionContextAllocationStrategy.USER_MANAGED
        runtime_config.cache.compile(f"{self.outputs[0].name} {self.inputs[0].shape}")
        return Context(self)


class Context(tensorrt.Context):
    """It computes in memory that it is given."""

    scratch = 0

    def set_device_memory(self, memory: int, size: int) -> None:
        assert memory % 256 == 0
        assert size >= Plan.device_memory_size_v2
        self.scratch = memory

    def execute_async_v3(self, stream: int) -> bool:
        runtime.allocated(runtime.DEVICE, self.scratch, Plan.device_memory_size_v2)
        return super().execute_async_v3(stream)


class Config:
    strategy = ExecutionContextAllocationStrategy.STATIC

    def __init__(self) -> None:
        self.cache: Cache | None = None

    def set_execution_context_allocation_strategy(self, strategy: ExecutionContextAllocationStrategy) -> None:
        self.strategy = strategy

    def create_runtime_cache(self) -> Cache:
        return Cache()

    def set_runtime_cache(self, cache: Cache) -> bool:
        self.cache = cache
        return True


class Cache:
    def __init__(self) -> None:
        self.kernels: set[str] = set()

    def compile(self, name: str) -> None:
        if name not in self.kernels:
            COMPILED.append(name)
            self.kernels.add(name)

    def deserialize(self, blob: bytes) -> bool:
        assert runtime.DEVICE, "no CUDA context yet"
        if blob.startswith(HEAD):
            self.kernels = set(blob.removeprefix(HEAD).decode().splitlines())
        return blob.startswith(HEAD)

    def serialize(self) -> bytes:
        return HEAD + "\n".join(sorted(self.kernels)).encode()
