"""The encoder's output, of engines that have a graph for it, beside eager PyTorch's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..engines.base import Encoder, Floats
from ..translate.pooling import pooled
from .compare import differences, worse
from .found import Memory
from .observe import ENCODER_SENTENCES, PADDING, spread
from .rounding import Rounding

MANY = 1024
"""Sentences of a large batch, where they have no more than TOKENS."""
TOKENS = 1 << 15

FEW, SHORT, LARGE_TOKENS = 16, 2, 4096
"""Different short sentences, their source tokens, and those of the largest batch."""


def read_memory(
    encoder: Encoder, sources: Sequence[Sequence[int]], together: int = 2, most: int = ENCODER_SENTENCES
) -> dict[int, Floats]:
    """(S, d) of some sentences, each encoded beside the one that differs most in length, or alone, with padding.

    Of an encoder that is entered.
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
    """How far short sentences in a batch as large as a translator makes are from the same in a small one; how many."""
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
    """How far an encoder that is entered is from eager's output; of all sentences also in large batches."""
    result = Memory(sentences=len(expected))
    for together in (2, MANY) if len(expected) == len(sources) else (2,):
        _compare(read_memory(encoder, sources, together, len(expected)), expected, result)
    result.many, result.many_apart = many_apart(encoder)
    return result


def memory_rounding(encoder: Encoder, sources: Sequence[Sequence[int]], expected: dict[int, Floats]) -> Rounding:
    """How far eager's output is from that of a copy in fp64, not entered; zeros where the module does not run in it."""
    try:
        with encoder:
            exact = read_memory(encoder, sources, 1, len(expected))
    except Exception:  # a user's module may do anything
        return Rounding()
    return Rounding(max((float(differences([ours], [exact[i]]).max()) for i, ours in expected.items()), default=0.0))


def _compare(found: dict[int, Floats], expected: dict[int, Floats], result: Memory) -> None:
    for i, ours in expected.items():
        largest = float(differences([ours], [found[i]]).max())
        if worse(result.largest, largest) is not result.largest:
            result.largest, result.worst = largest, i
        a, b = (pooled(each, "mean").astype(np.float64) for each in (ours, found[i]))
        with np.errstate(invalid="ignore", divide="ignore"):
            result.cosine = float(np.minimum(result.cosine, a @ b / np.sqrt((a @ a) * (b @ b))))
