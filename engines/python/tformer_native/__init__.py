"""libtformer inside a Python process: the CPU engine, or ONNX Runtime. `tformer_deploy.engines` uses it."""

from ._native import Error, Model, Outputs, State, __version__, best_kernels, kernels, product_rate

__all__ = ["Error", "Model", "Outputs", "State", "__version__", "best_kernels", "kernels", "product_rate"]
