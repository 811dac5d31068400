"""Compares the encoder's output with eager PyTorch's, for engines that have a graph for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..engines.base import Encoder, Floats
from ..translate.pooling import pooled
from .compare import differences, worse
from .observe import ENCODER_SENTENCES, PADDING, spread
from .results import Memory
from .rounding import Rounding

MANY, TOKENS = 1024, 1 << 15
"""Largest batch of an encoder alone, in sentences and in padded tokens."""
FEW, SHORT, LARGE_TOKENS = 16, 2, 4096
"""Short sentences that are repeated to a large batch: how many, their tokens each, and the batch's tokens."""


def read_memory(
    encoder: Encoder, sources: Sequence[Sequence[int]], together: int = 2, most: int = ENCODER_SENTENCES
) -> dict[int, Floats]:
    """Encoder outputs (S, d) of some sentences by an entered encoder, with extra padding.

    Each is encoded beside the one that differs most from it in length; with `together` = 1, alone.
    """
    picked = spread(sources, most)
    ends = zip(picked, reversed(picked), strict=True)
    order = [i for pair in ends for i in pair][: len(picked)]
    longest = max((len(sources[i]) for i in picked), default=1)
    width = min(longest + PADDING, encoder.limits.src_tokens)
    size = min(together, encoder.limits.sentences(1, width, 1), max(1, TOKENS // width))
    found: dict[int, Floats] = {}
    for start in range(0, len(order), size):
        indices = order[start : start + size]
        ids = np.full((len(indices), width), encoder.config.pad_id, np.int32)
        for row, i in zip(ids, indices, strict=True):
            row[: len(sources[i])] = sources[i]
        memory = encoder.memory(ids, np.array([len(sources[i]) for i in indices], np.int32))
        found |= {i: memory[row, : len(sources[i])].copy() for row, i in enumerate(indices)}
    return found


def many_apart(encoder: Encoder) -> tuple[int, float]:
    """Compare short sentences in a batch as large as a translator makes with a small batch: count and difference."""
    config, rng = encoder.config, np.random.default_rng(0)
    width = min(SHORT, encoder.limits.src_tokens)
    count = min(LARGE_TOKENS // SHORT, encoder.limits.sentences(1, width, 1))
    if count <= FEW:
        return 0, 0.0
    ids = rng.integers(0, config.src_vocab, (FEW, width)).astype(np.int32)
    order, lengths = rng.permutation(np.resize(np.arange(FEW), count)), np.full(count, width, np.int32)
    few, many = encoder.memory(ids, lengths[:FEW]), encoder.memory(np.ascontiguousarray(ids[order]), lengths)
    return count, float(differences([few[order]], [many]).max())


def compare_memory(encoder: Encoder, sources: Sequence[Sequence[int]], expected: dict[int, Floats]) -> Memory:
    """Compare an entered encoder with eager's output; if that has all sentences, in large batches too."""
    result = Memory(sentences=len(expected))
    for together in (2, MANY) if len(expected) == len(sources) else (2,):
        _compare(read_memory(encoder, sources, together, len(expected)), expected, result)
    result.many, result.many_apart = many_apart(encoder)
    return result


def memory_rounding(
    make_exact: Callable[[], Encoder], sources: Sequence[Sequence[int]], expected: dict[int, Floats]
) -> Rounding:
    """Compare eager's output with the same in fp64; `make_exact` returns that encoder, not entered.

    Of a module that does not run in fp64, zeros and the reason.
    """
    try:
        with make_exact() as encoder:
            exact = read_memory(encoder, sources, 1, len(expected))
    except Exception as error:  # a user's module may do anything
        return Rounding.failed(error)
    return Rounding(max((float(differences([ours], [exact[i]]).max()) for i, ours in expected.items()), default=0.0))


def _compare(found: dict[int, Floats], expected: dict[int, Floats], result: Memory) -> None:
    for i, ours in expected.items():
        largest = float(differences([ours], [found[i]]).max())
        if worse(result.largest, largest) is not result.largest:
            result.largest, result.worst = largest, i
        a, b = (pooled(each, "mean").astype(np.float64) for each in (ours, found[i]))
        with np.errstate(invalid="ignore", divide="ignore"):
            result.cosine = float(np.minimum(result.cosine, a @ b / np.sqrt((a @ a) * (b @ b))))
