"""TensorRT's runtime, for plans that are typed ONNX graphs of fixed sizes."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
from cuda.bindings import runtime

from tformer_deploy.engines.ort.library import InferenceSession, SessionOptions

__version__ = "11.4.0"
TYPES = {
    "tensor(float)": ("FLOAT", np.float32),
    "tensor(float16)": ("HALF", np.float16),
    "tensor(int32)": ("INT32", np.int32),
}


class ILogger:
    INTERNAL_ERROR, ERROR = 0, 1

    def log(self, severity: int, message: str) -> None: ...


class Runtime:
    def __init__(self, logger: ILogger) -> None:
        self.logger = logger

    def deserialize_cuda_engine(self, plan: bytes) -> Plan | None:
        try:
            return Plan(plan)
        except Exception as error:
            self.logger.log(ILogger.ERROR, f"bad plan: {type(error).__name__}")
            return None


class Plan:
    def __init__(self, graph: bytes) -> None:
        options = SessionOptions()
        options.intra_op_num_threads = 1
        self.session = InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        self.inputs, self.outputs = self.session.get_inputs(), self.session.get_outputs()
        self.tensors = {value.name: value for value in (*self.inputs, *self.outputs)}
        self.num_io_tensors = len(self.tensors)

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_shape(self, name: str) -> list[int]:
        return list(self.tensors[name].shape)

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name=TYPES[self.tensors[name].type][0])

    def create_execution_context(self) -> Context:
        return Context(self)


class Context:
    def __init__(self, plan: Plan) -> None:
        self.plan, self.addresses = plan, dict.fromkeys(plan.tensors, 0)

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert address % 256 == 0
        runtime.allocated(runtime.DEVICE, address, self.view(name, address).nbytes)
        self.addresses[name] = address
        return True

    def view(self, name: str, address: int) -> Any:
        value = self.plan.tensors[name]
        kind = np.dtype(TYPES[value.type][1])
        size = int(np.prod(value.shape)) * kind.itemsize
        raw: Any = (ctypes.c_uint8 * size).from_address(address)
        return np.frombuffer(raw, kind).reshape(value.shape)

    def execute_async_v3(self, stream: int) -> bool:
        assert not runtime.LAST, "somebody else's error"
        addresses = dict(self.addresses)

        def work() -> None:
            feed = {value.name: self.view(value.name, addresses[value.name]).copy() for value in self.plan.inputs}
            found = self.plan.session.run(None, feed)
            for value, array in zip(self.plan.outputs, found, strict=True):
                self.view(value.name, addresses[value.name])[...] = array

        runtime.HANDLES[stream].add(work)
        return True
