"""Training with matmuls in bfloat16: of a GPU by autocast; of a CPU in linear layers only.

On a CPU autocast slows down all that is not a matmul by more than the matmuls gain.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

MULTIPLE = 64
"""Of which the sizes of factors are made multiples."""


def bf16_matmuls(device: torch.device, enabled: bool) -> AbstractContextManager[Any]:
    """A context in which a network computes so."""
    if enabled and device.type == "cpu":
        return _LinearLayers()
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` with rounded factors."""
    return _Linear.apply(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])  # type: ignore[no-any-return,no-untyped-call]


class _LinearLayers(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear:
            return linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows, half = _rounded(x), _rounded(weight)
        ctx.save_for_backward(rows, half)
        ctx.shape = len(x), *weight.shape
        made = (rows @ half.t())[: len(x), : len(weight)].to(x.dtype)
        return made if bias is None else made.add_(bias)

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        count, made, size = ctx.shape
        half = _rounded(grad)
        of_x = (half @ weight)[:count, :size].to(grad.dtype) if ctx.needs_input_grad[0] else None
        of_weight = (half.t() @ rows)[:made, :size].to(grad.dtype)
        return of_x, of_weight, grad.sum(0) if ctx.needs_input_grad[2] else None


def _rounded(x: Tensor) -> Tensor:
    """In bfloat16, with zeros up to a multiple of 64 rows and columns.

    oneDNN compiles a kernel for each new shape, which takes longer than the product. Batches differ in their rows.
    """
    if x.stride(0) < x.stride(1):
        return _rounded(x.t()).t()
    shape = [-(-size // MULTIPLE) * MULTIPLE for size in x.shape]
    if list(x.shape) == shape:
        return x.bfloat16()
    rows = x.new_zeros(shape, dtype=torch.bfloat16)
    rows[: len(x), : x.shape[1]] = x
    return rows
