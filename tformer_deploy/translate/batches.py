"""Requests to batches of similar length, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ..base.machine import cores
from ..decoding import Batch

LINES_EACH = 8
"""Lines per core from which a core does best alone with its own."""
Ids = NDArray[np.int32]
Item = TypeVar("Item")
Out = TypeVar("Out")


def side_by_side(call: Callable[[Item], Out], items: Iterable[Item], workers: int) -> Iterator[Out]:
    """The results of `call` for each item, in the order in which they are ready, `workers` of them at a time."""
    if workers == 1:
        yield from map(call, items)
        return
    pool = ThreadPoolExecutor(workers)
    try:
        for future in as_completed([pool.submit(call, item) for item in items]):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def suitable_workers(lines: int) -> int:
    """One worker per core where each gets several batches' worth of lines, else one with all cores."""
    most = cores()
    return most if lines >= LINES_EACH * most else 1


def pad(rows: list[Ids], pad_id: int) -> Ids:
    """Right-pad id lists to one array (B, longest)."""
    padded = np.full((len(rows), max(map(len, rows))), pad_id, np.int32)
    for target, ids in zip(padded, rows, strict=True):
        target[: len(ids)] = ids
    return padded


def make_batch(
    sources: Sequence[Sequence[int]],
    pad_id: int,
    numbers: Sequence[int] = (),
    prefixes: Sequence[Sequence[int]] = (),
) -> Batch:
    """Sources to decode together, padded on the right."""
    lengths = np.array([len(source) for source in sources], np.int32)
    return Batch(pad([np.array(source, np.int32) for source in sources], pad_id), lengths, numbers, prefixes)


def length_batches(lengths: Sequence[int], batch_tokens: int, max_batch: Callable[[int], int]) -> Iterator[list[int]]:
    """Indices of requests of similar length, longest first; empty requests are left out.

    `max_batch`: most requests of a batch whose longest has so many tokens.
    """
    order = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i])
    start = 0
    while start < len(order):
        longest = lengths[order[start]]
        rows = max(1, min(max_batch(longest), batch_tokens // longest))
        yield order[start : start + rows]
        start += rows
