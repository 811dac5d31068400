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
    on_log,
    options,
    product_rate,
    tensorrt_headers,
    variants,
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
    "on_log",
    "options",
    "product_rate",
    "tensorrt_headers",
    "variants",
]
