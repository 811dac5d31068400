"""Tables of positions: sinusoids, and buckets of distances."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def distance_buckets(distances: Tensor, count: int, furthest: int, causal: bool) -> Tensor:
    """Buckets 0 to `count` - 1 of distances, query position minus key position.

    The first half of the buckets hold one distance each, the others ranges that grow with the logarithm. Keys after
    their query have half of all buckets for themselves; `causal`: they are in bucket 0. Source: transformers,
    `T5Attention._relative_position_bucket`.
    """
    start = 0 if causal else (distances < 0) * (count // 2)
    count, size = (count, distances.clamp(min=0)) if causal else (count // 2, distances.abs())
    exact = count // 2
    grown = torch.log(size.clamp(min=1) / exact) / math.log(furthest / exact) * (count - exact)
    return start + torch.where(size < exact, size, (exact + grown.long()).clamp(max=count - 1))


def sinusoids(count: int, width: int, base: float) -> Tensor:
    """Position table (count, width): sine in even, cosine in odd columns. Source: Vaswani et al. 2017, 3.5."""
    position = torch.arange(count, dtype=torch.float32)[:, None]
    frequency = torch.exp(torch.arange(0, width, 2, dtype=torch.float32) * -(math.log(base) / width))
    table = torch.zeros(count, width)
    table[:, 0::2], table[:, 1::2] = torch.sin(position * frequency), torch.cos(position * frequency)
    return table
