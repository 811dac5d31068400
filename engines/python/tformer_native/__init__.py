"""libtformer inside a Python process: the CPU engine, ONNX Runtime, or TensorRT. `tformer_deploy.engines` uses it."""

from ._native import (
    Error,
    Joined,
    Model,
    Outputs,
    Running,
    State,
    __version__,
    best_kernels,
    kernels,
    product_rate,
    tensorrt_headers,
)

__all__ = [
    "Error",
    "Joined",
    "Model",
    "Outputs",
    "Running",
    "State",
    "__version__",
    "best_kernels",
    "kernels",
    "product_rate",
    "tensorrt_headers",
]
