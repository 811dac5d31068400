"""What constants should be, computed from the checkpoint by their origins, and how far they are from that.

The functions are written anew here, so that a mistake of the export does not excuse itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..bundle.origin import Origin
from ..model.config import ModelConfig

if TYPE_CHECKING:
    from ..model.seq2seq import Seq2Seq

Array = NDArray[Any]
CLOSE = 1e-6
"""Largest relative difference of an element: a few fp32 multiplications in another order."""
HALF_STEP = 0.5 * 1.001
"""Largest rounding error of a quantized weight, in units of its scale. The 0.1 % above a half is for fp32 rounding."""
LEAST, LEAST_SPAN = 1e-9, 1e-6
"""Rows and groups whose largest value is smaller may have any scale, smaller ranges have this span: a quotient could be
infinite otherwise."""
Bounds = Mapping[str, Sequence[float]]
"""Linear layer → the smallest and the largest value of its input, by calibration or as the model came; and if that is
less than 255, the largest integer of its 8 bits."""


class Compared(NamedTuple):
    """Constants that are one tensor together."""

    names: list[str]
    origins: list[str]
    """The checkpoint's tensors behind them."""
    off: Array
    """Difference of each element; 0 where it is allowed."""
    beside: str = "the checkpoint's"


Comparisons = Iterator[Compared]


class Made(NamedTuple):
    """What an origin makes of the checkpoint."""

    names: list[str]
    """Tensors of the checkpoint, concatenated."""
    factors: list[np.float32]
    sizes: list[int]
    """Rows of each."""
    array: Array
    """Their concatenation, scaled; those of its rows that the constant has."""
    rows: slice
    scales: Array | None = None
    """Those of its rows in 8 bits, where the model came with them."""


class Checkpoint:
    """The tensors of a checkpoint, and what constants of each origin must be."""

    def __init__(self, weights: Mapping[str, Array], config: ModelConfig, scales: Mapping[str, float]) -> None:
        """`scales`: of layers in 8 bits, where the model came with them."""
        self.weights, self.config, self.scales = weights, config, scales

    def made(self, origin: Origin | None) -> Made | None:
        """What a constant of this origin is made from; None if the checkpoint does not have it."""
        if origin is None or origin.form == "shrink" or not all(name in self.weights for name in origin.tensors):
            return None
        stated = origin.factors or (1.0,) * len(origin.tensors)
        factors = [self.factor(f, self.weights[each].ndim) for f, each in zip(stated, origin.tensors, strict=True)]
        arrays = [f * self.weights[each] for f, each in zip(factors, origin.tensors, strict=True)]
        array = np.concatenate(arrays) if len(arrays) > 1 else np.asarray(arrays[0])
        sizes = [len(each) if each.ndim else 1 for each in arrays]
        rows = slice(*origin.rows) if origin.rows else slice(None)
        layers = zip((name.removesuffix(".weight") for name in origin.tensors), sizes, strict=True)
        given = [np.full(size, self.scales[name]) for name, size in layers if name in self.scales]
        scales = np.concatenate(given)[rows].astype(np.float32) if given else None
        return Made(list(origin.tensors), factors, sizes, array[rows] if origin.rows else array, rows, scales)

    def factor(self, stated: float, axes: int) -> np.float32:
        """What a tensor of so many axes may be multiplied by before it becomes a constant; NaN for any other number."""
        if stated == 1:
            return np.float32(1)
        sides = self.config.encoder, self.config.decoder
        possible = [1 / math.sqrt(side.head_dim) for side in sides]  # weights and biases of queries
        if axes == 2 and self.config.scale_embeddings:
            possible += [math.sqrt(side.width) for side in sides]
        if axes == 1:  # gains of the annotated norm, whose deviation is over d - 1
            possible += [math.sqrt((side.width - 1) / side.width) for side in sides]
        near = [value for value in possible if abs(stated - value) <= CLOSE * value]
        return np.float32(near[0] if near else np.nan)

    def bias(self, name: str, made: Made, bias: Array | None, scaled: bool = True) -> Compared | None:
        """Compare what is added to a matmul or norm with the bias of the layers whose weights it has.

        A layer with an equal weight will do, as exporters keep one of equal arrays. None if the checkpoint has no bias
        by that name.
        """
        if not any(self._bias(weight) in self.weights for weight in made.names):
            return None
        count, bias = len(made.array), np.zeros(len(made.array), np.float32) if bias is None else bias
        if bias.shape != (count,):
            return Compared([name], [self._bias(weight) for weight in made.names], np.array(np.nan))
        origins, parts, begin, done = [], [], made.rows.start or 0, 0
        for weight, factor, size in zip(made.names, made.factors, made.sizes, strict=True):
            first, end = max(begin, done), min(begin + count, done + size)
            if first < end:
                part, rows = bias[first - begin : end - begin], slice(first - done, end - done)
                nearest, off = self._nearest(weight, factor if scaled else np.float32(1), part, rows)
                origins.append(self._bias(nearest))
                parts.append(off)
            done += size
        return Compared([name], origins, np.concatenate(parts))

    @staticmethod
    def _bias(weight: str) -> str:
        return weight.removesuffix("weight") + "bias"

    def _nearest(self, weight: str, factor: np.float32, bias: Array, rows: slice) -> tuple[str, Array]:
        """Of the layers with this weight or an equal one, the first whose bias fits, and the differences."""
        own, found = self.weights[weight], list[tuple[str, Array]]()
        biased = (name for name in self.weights if name != weight and self._bias(name) in self.weights)
        others = (name for name in biased if np.array_equal(self.weights[name], own))
        for name in (weight, *others):
            expected = self.weights.get(self._bias(name))
            off = elements_off(bias, np.zeros_like(bias) if expected is None else factor * expected[rows])
            found.append((name, off))
            if not off.any():
                return found[-1]
        return found[0]


def elements_off(ours: Array, expected: Array, near: Callable[[Array], Array] | float = CLOSE) -> Array:
    """Absolute differences; 0 where they are within a share `near` of the expected value. NaN stays NaN."""
    if ours.shape != expected.shape:
        return np.array(np.nan)
    with np.errstate(invalid="ignore"):
        off: Array = np.abs(ours.astype(np.float32) - expected.astype(np.float32))
        allowed = near(expected) if callable(near) else near * np.abs(expected)
        return np.where((ours == expected) | (off <= allowed), 0, off)


def half_of_bf16(expected: Array) -> Array:
    """Half the distance between neighbouring bf16 numbers (8 bits of precision) at each value."""
    half: Array = np.ldexp(np.float32(1), np.frexp(expected)[1] - 9)
    return half


def integers_off(integers: Array, scales: Array, expected: Array, least: int, given: Array | None = None) -> Array:
    """Compare quantized weights with `expected` (out, in): integers (out, groups, size) times scales (out, groups).

    A scale must be the `given` one (out), or map the element furthest from zero to an end of the integer range, whose
    smallest integer is `least`. 0 where rounding explains the difference.
    """
    outputs, count, size = integers.shape
    if scales.shape != (outputs, count) or len(expected) != outputs or not 0 <= count * size - expected.shape[1] < size:
        return np.full(expected.shape, np.nan)
    symmetric = least == -127
    filled = np.zeros((outputs, count * size), np.float32)
    filled[:, : expected.shape[1]] = expected
    filled = filled.reshape(integers.shape)
    furthest = np.take_along_axis(filled, np.abs(filled).argmax(2, keepdims=True), 2)[:, :, 0]
    right = np.abs(furthest / np.float32(127)) if symmetric else furthest / np.float32(least)
    step = np.where(np.abs(furthest) < LEAST, scales, right) if given is None else given[:, None]
    off = np.abs(integers * scales[:, :, None] - filled)
    # On the other side of zero the range ends one integer earlier, which is then the nearest there is.
    half = HALF_STEP if symmetric else np.where(integers == -least - 1, 2 * HALF_STEP, HALF_STEP)
    wrong = ~(off <= np.abs(step)[:, :, None] * half) | ~(np.abs(scales - step) <= CLOSE * np.abs(step))[:, :, None]
    return np.where(wrong, np.where(off == 0, CLOSE, off), 0)


def rounding_off(step: float, zero: int, most: int | None, weights: Sequence[str], bounds: Bounds) -> Array | None:
    """Compare scale, zero point and, if known, largest integer of layers' input with those of the calibrated range.

    None if the bundle has no ranges; NaN for a layer that was not to be quantized.
    """
    if not bounds:
        return None
    off = []
    for name in weights:
        least, largest, highest = (*bounds.get(name.removesuffix(".weight"), (np.nan, np.nan)), 255)[:3]
        right = np.float32(max(largest - least, LEAST_SPAN) / 255)
        off += [abs(step - right) / right, abs(zero - float(np.clip(np.rint(-least / right), 0, 255)))]
        off += [abs(most - highest)] if most is not None else []
    found = np.array(off, np.float32)
    return np.where(found <= CLOSE, 0, found)


def describe(compared: Compared, where: str) -> str:
    """One line for constants that differ; `where`: their file."""
    worst = int(np.where(np.isnan(compared.off), np.inf, compared.off).argmax())
    place = [int(n) for n in np.unravel_index(worst, compared.off.shape)]
    short = compared.names[0].removeprefix("model.")
    behind = "" if short in compared.origins else f" ({', '.join(compared.origins)})"
    return (
        f"constant {short}{behind} of {where} differs from {compared.beside} by {float(compared.off.flat[worst]):.2g}"
        f"{f' at {place}' if place else ''}"
    )


def named_tensors(model: Seq2Seq) -> dict[str, Array]:
    """The floating-point tensors of a model by name, buffers such as fixed positions included."""
    from ..model.modules.running import tensors_of  # which imports torch

    module: Any = model  # a torch.nn.Module as well
    tensors = {**dict(module.named_buffers(remove_duplicate=False)), **tensors_of(module)}
    floating = {name: tensor.detach().cpu() for name, tensor in tensors.items() if tensor.is_floating_point()}
    return {name: (t.float() if t.itemsize < 4 else t).numpy() for name, t in floating.items()}  # no bfloat16 in numpy
