"""The CPU engine of tformer-deploy, as its C++ library has it. `tformer_deploy.engines.native` uses it."""

from ._native import Error, Model, Outputs, State, __version__, best_kernels, kernels, product_rate

__all__ = ["Error", "Model", "Outputs", "State", "__version__", "best_kernels", "kernels", "product_rate"]
