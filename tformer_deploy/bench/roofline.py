"""The least bytes and operations of a step and of the encoder, and how near an engine is to that limit.

Source: Williams et al. 2009, "Roofline". `docs/bench.md` has the rules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from ..model.config import ModelConfig
from .plan import Point

LARGE_BUFFER = 512 << 20
"""Bytes; larger than the caches of most processors."""
WEIGHT_BITS = {"int8": 8, "int4": 4}
"""Bits of a weight with a scale per group. With a scale per column, as in every quantized encoder, it is 8."""
_ARRAYS = ("gain", "bias")
"""Other arrays that an instruction reads as a whole; of a table it reads only rows."""
FLOAT_BYTES = 4
HALF_BYTES = 2
OVERHEAD = 0.5
"""Below this share of the limit, neither memory nor arithmetic explains the time: `overhead`."""


@dataclass(frozen=True)
class Storage:
    """Types in which an engine stores weights and caches."""

    precision: str = "fp32"
    group_size: int = 0
    """Weights of the step that share a scale; 0: a whole column."""
    half_caches: bool = False
    """Whether caches have 16 bits although arithmetic has 32."""

    @property
    def float_bytes(self) -> int:
        """Bytes of a floating-point number."""
        return HALF_BYTES if self.precision in ("fp16", "bf16") else FLOAT_BYTES

    @property
    def cache_bytes(self) -> int:
        """Bytes of a number in a cache."""
        return HALF_BYTES if self.half_caches else self.float_bytes

    def weight_bytes(self, matrices: Sequence[tuple[int, int]], group_size: int) -> int:
        """Bytes of matrices (inputs, outputs) and, if they are quantized, their scales; `group_size` 0: per column."""
        elements = sum(math.prod(matrix) for matrix in matrices)
        if self.precision not in WEIGHT_BITS:
            return elements * self.float_bytes
        bits = WEIGHT_BITS[self.precision] if group_size else 8
        scales = sum(outputs * (-(-inputs // group_size) if group_size else 1) for inputs, outputs in matrices)
        return elements * bits // 8 + scales * FLOAT_BYTES


@dataclass(frozen=True)
class WeightsRead:
    """The weights that a graph reads, as stored by the export, see `export.save.weights_read`."""

    matmuls: Sequence[tuple[int, int]]
    """Inputs and outputs of each matrix."""
    others: int
    """Numbers of biases, norms and the like."""

    def bytes(self, storage: Storage, group_size: int) -> int:
        """Bytes of all of them, as an engine stores them."""
        return storage.weight_bytes(self.matmuls, group_size) + FLOAT_BYTES * self.others

    def products(self) -> tuple[int, int]:
        """Number of weights in matmuls of the variant's precision, and in fp32 matmuls."""
        return sum(math.prod(matrix) for matrix in self.matmuls), 0


@dataclass(frozen=True)
class ProgramRead:
    """The weights that a program reads, counted from its instructions."""

    size: int
    """Bytes."""
    quantized: int
    floats: int

    @classmethod
    def of(cls, program: Mapping[str, Any], graph: str) -> Self:
        """Of one of its graphs: packed matrices, scales, biases and norms."""
        arrays: dict[int, int] = {}
        products = {True: 0, False: 0}
        for instruction in program["graphs"][graph]["code"]:
            matrix = instruction.get("matrix", {})
            for number in (*(matrix.get(key) for key in ("data", "scales", "sums")), *map(instruction.get, _ARRAYS)):
                if number is not None:
                    about = program["arrays"][number]
                    arrays[number] = math.prod(about["shape"]) * np.dtype(about["dtype"]).itemsize
            if matrix:
                products[matrix["kind"] in WEIGHT_BITS] += matrix["outputs"] * matrix["inputs"]
        return cls(sum(arrays.values()), products[True], products[False])

    def bytes(self, storage: Storage, group_size: int) -> int:
        """See `WeightsRead.bytes`."""
        return self.size

    def products(self) -> tuple[int, int]:
        """See `WeightsRead.products`."""
        return self.quantized, self.floats


@dataclass(frozen=True)
class Cost:
    """Least bytes and operations of one call."""

    weight_bytes: int
    cache_bytes: int
    """Cached keys and values that are read or written."""
    weight_operations: int
    """Of matmuls with weights; a multiplication and an addition are two."""
    fp32_operations: int
    """Of attention, and of layers that a quantized variant keeps in fp32."""

    @property
    def bytes(self) -> int:
        """Weights and caches."""
        return self.weight_bytes + self.cache_bytes

    @property
    def operations(self) -> int:
        """All matmuls and attention."""
        return self.weight_operations + self.fp32_operations


@dataclass
class Ceiling:
    """The machine's best speeds in this run."""

    threads: int
    read_bytes_per_s: dict[int, float] = field(default_factory=dict)
    """By the size of the buffer in bytes."""
    operations_per_s: dict[str, float] = field(default_factory=dict)
    """fp32 and int8."""

    def add(self, speeds: dict[int, float], rates: dict[str, float]) -> None:
        """Keep the best of these and earlier measurements."""
        for size, speed in speeds.items():
            self.read_bytes_per_s[size] = max(speed, self.read_bytes_per_s.get(size, 0.0))
        for name, rate in rates.items():
            self.operations_per_s[name] = max(rate, self.operations_per_s.get(name, 0.0))


@dataclass(frozen=True)
class Bound:
    """A call's limit, and how near it came."""

    bytes: int
    operations: int
    limit_ms: float
    share: float
    """Of the limit, from 0 to about 1."""
    by: str
    """`bandwidth`, `arithmetic` or `overhead`."""

    def __str__(self) -> str:
        return f"{100 * self.share:.0f} %, {self.by}"


def step_cost(config: ModelConfig, weights: WeightsRead | ProgramRead, storage: Storage, point: Point) -> Cost:
    """Mean cost of all steps but the first: past lengths 1 to new_tokens - 1."""
    quick, floats = weights.products()
    side, rows = config.decoder, point.batch * (point.beams if point.new_tokens > 1 else 1)
    inner, layers = side.heads * side.head_dim, side.layers
    past = point.new_tokens / 2 if point.new_tokens > 1 else 0.0
    read = 0.0 if config.decoder_cell == "ssru" else past + 1  # by self-attention
    states = layers * side.width * rows if config.decoder_cell == "ssru" else 0
    # Beams of a sentence share its cross keys and values.
    cached = 2 * layers * inner * (rows * read + point.batch * point.src_len) + states
    return Cost(
        weights.bytes(storage, storage.group_size),
        round(storage.cache_bytes * cached),
        2 * rows * quick,
        2 * rows * floats + round(4 * layers * inner * rows * (read + point.src_len)),
    )


def encoder_cost(config: ModelConfig, weights: WeightsRead | ProgramRead, storage: Storage, point: Point) -> Cost:
    """Cost of the encoder, cross-attention keys and values of every decoder layer included."""
    side, tokens = config.encoder, point.batch * point.src_len
    cross = config.decoder.heads * config.decoder.head_dim
    quick, floats = weights.products()
    return Cost(
        weights.bytes(storage, 0),
        storage.cache_bytes * 2 * config.decoder_layers * cross * tokens,
        2 * tokens * quick,
        2 * tokens * floats + 4 * side.layers * side.heads * side.head_dim * tokens * point.src_len,
    )


def buffer_size(cost: Cost, workers: int) -> int:
    """Size of the buffer with whose bandwidth a call is compared: its bytes, rounded up by at most a quarter."""
    total = cost.bytes * workers
    unit = 1 << max(0, total.bit_length() - 3)
    return -(-total // unit) * unit


def bound(cost: Cost, workers: int, ceiling: Ceiling, precision: str, measured_ms: float) -> Bound:
    """Compare a call's time with its limit: the slower of reading and computing, `workers` calls at a time."""
    rates = ceiling.operations_per_s
    # Matmuls with int4 weights are computed in int8 or in fp32.
    rate = rates["fp32"] if precision == "fp32" else max(rates.values())
    reading = 1e3 * workers * cost.bytes / ceiling.read_bytes_per_s[buffer_size(cost, workers)]
    computing = 1e3 * workers * (cost.weight_operations / rate + cost.fp32_operations / rates["fp32"])
    limit = max(reading, computing)
    share = limit / measured_ms
    by = "overhead" if share < OVERHEAD else "bandwidth" if reading >= computing else "arithmetic"
    return Bound(cost.bytes * workers, cost.operations * workers, limit, share, by)


def device_bound(cost: Cost, read_bytes_per_s: float, measured_ms: float) -> Bound:
    """Compare a call on a GPU with reading its bytes; a GPU's operations per second are not measured."""
    limit = 1e3 * cost.bytes / read_bytes_per_s
    share = limit / measured_ms
    return Bound(cost.bytes, cost.operations, limit, share, "overhead" if share < OVERHEAD else "bandwidth")
