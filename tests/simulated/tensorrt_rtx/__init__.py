"""TensorRT for RTX: as TensorRT, but kernels are compiled where a plan runs, unless they were kept."""

from __future__ import annotations

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


class Plan(tensorrt.Plan):
    def create_runtime_config(self) -> Config:
        return Config()

    def create_execution_context(self, *, runtime_config: Config) -> tensorrt.Context:  # type: ignore[override]
        assert runtime_config.cache is not None
        runtime_config.cache.compile(f"{self.outputs[0].name} {self.inputs[0].shape}")
        return super().create_execution_context()


class Config:
    def __init__(self) -> None:
        self.cache: Cache | None = None

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
