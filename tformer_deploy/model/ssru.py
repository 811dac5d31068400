"""The recurrent cell of decoder layers with `decoder_cell = "ssru"`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Ssru(nn.Module):
    """A simpler simple recurrent unit: a forget gate, one vector of state, no product with it.

    c(t) = f * c(t-1) + (1 - f) * W x(t), f = sigmoid(W_f x(t) + b_f); the output is relu(c(t)).
    Source: Kim et al. 2019, "From Research to Production and Back".
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.forget, self.value = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """All positions at once, from a state of zeros: (B, T, d) -> (B, T, d)."""
        gates, values, states = torch.sigmoid(self.forget(x)), self.value(x), [torch.zeros_like(x[:, 0])]
        for gate, value in zip(gates.unbind(1), values.unbind(1), strict=True):
            states.append(gate * states[-1] + (1 - gate) * value)
        return torch.stack(states[1:], 1).relu()

    def step(self, x: Tensor, replace: Callable[[Callable[[Tensor], Tensor]], Tensor]) -> Tensor:
        """One position of every row: x (R, d) -> (R, d); see `Cache.replace`."""
        gate, value = torch.sigmoid(self.forget(x)), self.value(x)
        return replace(lambda state: gate * state + (1 - gate) * value).relu()
