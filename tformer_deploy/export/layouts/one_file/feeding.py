"""What a file is fed for some decoding options, and what it gives: all that a program in any language needs to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....decoding import DecodeOptions

Arrays = dict[str, NDArray[Any]]
NONE = -1


def feed_of(options: DecodeOptions) -> Arrays:
    """Every input but the sources."""
    whole = {
        "beams": [options.beams],
        "n_best": [options.n_best],
        "max_tokens": [options.max_tokens],
        "min_tokens": [options.min_tokens],
        "no_repeat_ngram": [options.no_repeat_ngram],
        "suppress": options.suppress or [NONE],
        "bad_words": left_padded(options.bad_words or [[NONE]]),
        "first_ids": [options.first_ids or [NONE]],
    }
    return {
        **{name: np.array(value, np.int32) for name, value in whole.items()},
        "length_penalty": np.array([options.length_penalty], np.float64),
        "repetition_penalty": np.array([options.repetition_penalty], np.float32),
    }


def left_padded(sequences: Sequence[Sequence[int]]) -> list[list[int]]:
    """Sequences of one length."""
    longest = max(map(len, sequences))
    return [[NONE] * (longest - len(each)) + list(each) for each in sequences]


def feed_sources(sources: Sequence[Sequence[int]], pad: int) -> Arrays:
    """The sources of a batch."""
    lengths = np.array([len(each) for each in sources], np.int32)
    ids = np.full((len(sources), int(lengths.max())), pad, np.int32)
    for row, each in zip(ids, sources, strict=True):
        row[: len(each)] = each
    return {"src_ids": ids, "src_lengths": lengths}
