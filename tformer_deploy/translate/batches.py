"""Requests to batches of similar length, and batches to threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ..base.machine import cores
from ..decoding import Batch

LINES_EACH = 8
"""From so many lines per core on, one single-threaded worker per core is faster than one worker with all cores."""
Ids = NDArray[np.int32]
Item = TypeVar("Item")
Out = TypeVar("Out")


def side_by_side(call: Callable[[Item], Out], items: Iterable[Item], workers: int) -> Iterator[Out]:
    """Call for each item in a pool of `workers` threads; results come in the order in which they are ready."""
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
    """One worker per core for many lines, else one worker with all cores."""
    return cores() if lines >= LINES_EACH * cores() else 1


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
    """A batch of sources, padded on the right."""
    lengths = np.array([len(source) for source in sources], np.int32)
    return Batch(pad([np.array(source, np.int32) for source in sources], pad_id), lengths, numbers, prefixes)


def length_batches(lengths: Sequence[int], batch_tokens: int, max_batch: Callable[[int], int]) -> Iterator[list[int]]:
    """Batches of indices of requests, longest first; empty requests are left out.

    `max_batch`: most requests in a batch, by the tokens of its longest request.
    """
    order = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i])
    start = 0
    while start < len(order):
        longest = lengths[order[start]]
        rows = max(1, min(max_batch(longest), batch_tokens // longest))
        yield order[start : start + rows]
        start += rows
