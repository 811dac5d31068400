"""libtformer inside a Python process: the CPU engine, or ONNX Runtime. `tformer_deploy.engines` uses it."""

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
]
