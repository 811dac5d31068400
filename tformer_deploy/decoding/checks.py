"""Checks of a batch and its options, before a search shares steps with others."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any

import numpy as np

from ..base.errors import DataError, LimitError
from ..base.messages import END_IS_FORCED, MORE_ROWS, NO_ATTENTION, TARGET_ID, TOO_MANY_ROWS
from ..engines.base import Batch, Engine
from ..model.config import MAX_SEED
from .options import DecodeOptions
from .rules import Trie


def check_search(engine: Engine, batch: Batch, options: DecodeOptions, allowed: Trie | None = None) -> None:
    """Raise DataError for a batch of wrong types or counts, LimitError for what the engine or the model cannot do."""
    check_batch(batch)
    check_options(engine, options)
    check_tokens(engine, [*batch.prefixes, allowed.tokens if allowed else ()])


def check_options(engine: Engine, options: DecodeOptions) -> None:
    """Raise LimitError for options that the engine or the model cannot follow with any source."""
    check_tokens(engine, [options.suppress, *options.bad_words, options.end_ids, options.first_ids])
    if set(options.first_ids) & set(options.ends(engine.config.eos_id)):
        raise LimitError(END_IS_FORCED)
    if options.rows > engine.limits.beams:
        fields = {"rows": options.rows, "kind": "samples" if options.sampling else "beams"}
        fields |= {"limit": engine.limits.beams, "remedy": engine.limits.hint or MORE_ROWS}
        raise LimitError(TOO_MANY_ROWS.format(**fields))
    if options.attention and not engine.attention:
        raise LimitError(NO_ATTENTION)


def check_tokens(engine: Engine, sequences: Iterable[Iterable[int]]) -> None:
    """Raise LimitError for tokens that the model does not have."""
    vocab = engine.config.tgt_vocab
    if bad := [token for ids in sequences for token in ids if not 0 <= token < vocab]:
        raise LimitError(TARGET_ID.format(token=bad[0], size=vocab))


def check_batch(batch: Batch) -> None:
    """Raise DataError where sources, lengths, numbers or prefixes differ in count, or are of a wrong type."""
    for name, array, axes in (("src_ids", batch.src_ids, 2), ("src_lengths", batch.src_lengths, 1)):
        if not (isinstance(array, np.ndarray) and array.ndim == axes and np.issubdtype(array.dtype, np.integer)):
            raise DataError(f"{name}: must be an array of {axes} axes and whole numbers: see decoding.Batch")
    count = len(batch.src_ids)
    if not count:
        raise DataError("src_ids has no sentence: give one at least")
    for name in ("src_lengths", "numbers", "prefixes"):
        count_given = len(getattr(batch, name))
        if count_given != count and (count_given or name == "src_lengths"):
            raise DataError(f"{count_given} {name} for {count} sentences: give one for each")
    _check_whole("numbers", batch.numbers)
    if len(batch.numbers) and not 0 <= min(batch.numbers) <= max(batch.numbers) < MAX_SEED:
        raise DataError(f"numbers: must be at least 0 and less than {MAX_SEED}")
    for prefix in batch.prefixes:
        _check_whole("prefixes", prefix)


def _check_whole(name: str, values: Iterable[Any]) -> None:
    for value in values:
        try:
            index(value)
        except TypeError:
            raise DataError(f"{name}: {value!r:.40} is no whole number") from None
