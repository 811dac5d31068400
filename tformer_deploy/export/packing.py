"""Weights as the kernels of libtformer read them: panels of 16 outputs, see engines/src/kernels/kernels.hpp.

Weights are (out, in); the last panel is padded with zeros.
"""

from __future__ import annotations

import numpy as np

from .quantizing import Array

LANES = 16
"""Outputs in a panel: one AVX-512 register of fp32."""
INT8_INPUTS = 64
"""Inputs of int8 weights are padded to a multiple of it."""


def pack_fp32(weight: Array) -> Array:
    """(out, in) -> fp32 (panels, in, 16)."""
    return _panels(weight.astype(np.float32), 1)[..., 0]


def pack_bf16(weight: Array) -> Array:
    """(out, in) fp32, rounded to nearest even -> bits as uint16 (panels, in / 2, 16, 2)."""
    bits = np.ascontiguousarray(weight, np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + (bits >> 16 & 1)
    quiet = bits >> 16 | 0x40  # of NaN, which must not become infinity
    return _panels(np.where(np.isnan(weight), quiet, rounded >> 16).astype(np.uint16), 2)


def pack_int8(integers: Array) -> Array:
    """int8 (out, in), see `quantizing.channels` -> (panels, in / 4, 16, 4), inputs padded to a multiple of 64."""
    return _panels(_padded(integers, 1, INT8_INPUTS), 4)


def column_sums(integers: Array) -> Array:
    """int8 (out, in) -> int32 (panels * 16): what a zero point of the inputs is multiplied by."""
    return pack_vector(integers.sum(1, dtype=np.int32))


def pack_vector(values: Array) -> Array:
    """(out) -> (panels * 16): scales, sums or biases."""
    return _padded(values, 0, LANES)


def pack_int4(integers: Array) -> Array:
    """(out, groups, size) of 0 to 15, see `quantizing.groups` -> uint8 (panels, in / 8, 16, 4).

    The low half of a byte is of input k, the high half of input k + 4.
    """
    outputs, groups, size = integers.shape
    flat = np.full((-(-outputs // LANES) * LANES, groups * size), 8, np.uint8)  # 8 is 0
    flat[:outputs] = integers.reshape(outputs, -1)
    halves = flat.reshape(-1, LANES, groups * size // 8, 2, 4).transpose(3, 0, 2, 1, 4)
    return np.ascontiguousarray(halves[0] | halves[1] << 4)


def _panels(weight: Array, together: int) -> Array:
    """(out, in) -> (panels, in / together, 16, together)."""
    padded = _padded(_padded(weight, 0, LANES), 1, together)
    parts = padded.reshape(-1, LANES, padded.shape[1] // together, together)
    return np.ascontiguousarray(parts.transpose(0, 2, 1, 3))


def _padded(array: Array, axis: int, to: int) -> Array:
    """Pad an axis with zeros to a multiple of a number."""
    missing = -array.shape[axis] % to
    return np.pad(array, [(0, missing if i == axis else 0) for i in range(array.ndim)])
