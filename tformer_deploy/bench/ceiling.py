"""The machine's limits: memory bandwidth and operations per second, measured in this process."""

from __future__ import annotations

import threading
import time
from importlib.resources import as_file, files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.errors import MissingExtra, TformerError, extras

TRIES = 3
"""The best one counts, as other work on the machine only slows it down."""
TRY_SECONDS = 0.01
"""Short, so that a try often falls between other work; long against the clock and the start of threads."""
ASSUMED_GB = 20
"""Gigabytes per second and thread, a guess that gives the number of repetitions in a try."""
MATRIX = 512
"""Rows and columns: large enough to keep every core busy, small enough to stay in its cache."""
DTYPES: dict[str, tuple[Any, Any]] = {"fp32": (np.float32, np.float32), "int8": (np.uint8, np.int8)}


def bandwidth(buffer: NDArray[np.int32], size: int, threads: int) -> float:
    """Bytes per second at which threads together read the first `size` bytes of a buffer again and again.

    Bytes that fit into a cache come from there, as weights that fit do. numpy releases the interpreter's lock, and the
    maximum of integers is the cheapest arithmetic.
    """
    parts = np.array_split(buffer[: max(1, size // 4)], threads)
    repetitions = max(1, round(ASSUMED_GB * 1e9 * TRY_SECONDS / max(1, parts[0].nbytes)))
    return max(repetitions * size / _seconds(parts, repetitions) for _ in range(TRIES))


def _seconds(parts: list[Any], repetitions: int) -> float:
    """Time in which every thread reads its part `repetitions` times."""
    parts = [part for part in parts if len(part)]
    gate = threading.Barrier(len(parts) + 1)

    def read(part: Any) -> None:
        # One call reads the part many times over: the first axis has stride 0.
        repeated = np.broadcast_to(part, (repetitions, len(part)))
        gate.wait()
        repeated.max(axis=1)
        gate.wait()

    readers = [threading.Thread(target=read, args=(part,)) for part in parts]
    for reader in readers:
        reader.start()
    gate.wait()
    start = time.perf_counter()
    gate.wait()
    seconds = time.perf_counter() - start
    for reader in readers:
        reader.join()
    return seconds


def matrix_rates(threads: int) -> dict[str, float]:
    """Operations per second (a multiplication and an addition are two) of matmuls, by type.

    The faster of ONNX Runtime and the C++ library. Raises MissingExtra with the reasons if neither can be used: the
    engines that are measured may need none of them.
    """
    rates: dict[str, float] = {}
    reasons: list[str] = []
    for measure in (_onnxruntime_rates, _native_rates):
        try:
            with extras():
                found = measure(threads)
        except (ImportError, TformerError) as error:
            reasons.append(" ".join(str(error).split()))
            continue
        rates = {name: max(rate, rates.get(name, 0.0)) for name, rate in found.items()}
    if not rates:
        raise MissingExtra("; ".join(reasons))
    return rates


def _native_rates(threads: int) -> dict[str, float]:
    from tformer_native import product_rate

    return {name: product_rate(name, threads) for name in DTYPES}


def _onnxruntime_rates(threads: int) -> dict[str, float]:
    from ..engines.ort.library import check_library, loading, open_session, session_options

    check_library()
    rates = {}
    for name, dtypes in DTYPES.items():
        a, b = (np.ones((MATRIX, MATRIX), dtype) for dtype in dtypes)
        with as_file(files(__package__) / f"matmul_{name}.onnx") as graph, loading(graph):
            session = open_session(graph, session_options(threads))
            best, end = np.inf, time.perf_counter() + TRIES * TRY_SECONDS
            while best == np.inf or time.perf_counter() < end:
                start = time.perf_counter()
                session.run(None, {"a": a, "b": b})
                best = min(best, time.perf_counter() - start)
        rates[name] = 2 * MATRIX**3 / float(best)
    return rates
