"""Weights to integers and scales: 8 bits per channel, 8 or 4 bits per group of inputs."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Range(NamedTuple):
    """Range of a linear layer's input for 8-bit quantization."""

    least: float
    largest: float
    """The range; it contains 0."""
    shrink: Array | None = None
    """(in): what each channel is multiplied by first, and its weights divided by, so that a few large channels do not
    set the step of all. Source: Xiao et al. 2023, "SmoothQuant"."""
    name: str = ""
    """Of `shrink`, which layers that read the same input share."""
    encodes: bool = False
    """Whether the layer runs in `encode` or `cross_keys_values`: their graph rounds by channels in every recipe."""
    scales: Array | None = None
    """(out): of its weights, where the model came with them; None: `channels` finds them."""
    most: int = 255
    """The largest integer that an input may become."""

    @property
    def step_and_zero(self) -> tuple[np.float32, np.uint8]:
        """Step between two integers, and the one that stands for 0."""
        step = np.float32(max(self.largest - self.least, LEAST_SPAN) / 255)
        return step, np.uint8(np.clip(np.rint(-self.least / step), 0, 255))

    def described(self) -> list[float]:
        """As the manifest has it."""
        return [self.least, self.largest, *([self.most] if self.most < 255 else [])]

    @property
    def highest(self) -> float:
        """The largest number that an input may be."""
        step, zero = self.step_and_zero
        return float((self.most - int(zero)) * step)


LEAST = 1e-9
"""A row or group whose largest value is below gets another scale: a quotient by a smaller one could be infinite."""
LEAST_SPAN = 1e-6
"""A narrower range of inputs counts as this wide: the step between two integers must not be 0."""
Ranges = dict[str, Range | None]
"""By the name of a linear layer; None: it stays fp32, as do the tables of embeddings where `TABLES` is among them."""
TABLES = "embeddings"


def channels(weight: Array, scales: Array | None = None) -> tuple[Array, Array]:
    """weight (out, in) in 8 bits, and a scale per output: the given ones, or the least without overflow."""
    if scales is None:
        scales = np.maximum(np.abs(weight).max(1), LEAST).astype(np.float32) / np.float32(127)
    return np.clip(np.rint(weight / scales[:, None]), -127, 127).astype(np.int8), scales


def group_size(largest: int, inputs: int) -> int:
    """The group size, reduced for layers with fewer inputs."""
    return min(largest, max(16, 1 << (inputs.bit_length() - 1)))


def packed_groups(weight: Array, bits: int, size: int) -> tuple[Array, Array]:
    """The integers of `groups` as bytes, two of 4 bits in one, and their scales."""
    integers, scales = groups(weight, bits, size)
    return integers if bits == 8 else integers[..., 0::2] | integers[..., 1::2] << 4, scales


def groups(weight: Array, bits: int, size: int) -> tuple[Array, Array]:
    """weight (out, in) as unsigned integers (out, groups, size) around 2^(bits-1), and scales (out, groups).

    The element furthest from zero becomes the least integer exactly, which uses the whole range.
    """
    outputs, inputs = weight.shape
    count, middle = -(-inputs // size), 1 << (bits - 1)
    padded = np.zeros((outputs, count * size), np.float32)
    padded[:, :inputs] = weight
    parts = padded.reshape(outputs, count, size)
    furthest = np.take_along_axis(parts, np.abs(parts).argmax(2, keepdims=True), 2)
    scales = np.where(np.abs(furthest) < LEAST, np.float32(1), furthest / np.float32(-middle))
    integers = np.clip(np.rint(parts / scales) + middle, 0, 2 * middle - 1).astype(np.uint8)
    return integers, scales[:, :, 0].astype(np.float32)
