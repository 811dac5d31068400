"""Log-probabilities of given outputs, by teacher forcing over the same steps as decoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..base.errors import LimitError
from ..engines.base import Batch, Engine, Ints, Outlook, Scores
from .rules import require_numbers
from .sampling import Doubles


def forced_steps(
    engine: Engine, batch: Batch, targets: Sequence[Sequence[int]], attention: bool = False
) -> Iterator[tuple[int, Ints, Scores]]:
    """Feed each source its target; yields the step, the indices (n) of targets that reach it, and their full scores.

    Raises LimitError for a target that is empty, too long or has an unknown id.
    """
    limit, vocab = engine.limits.tgt_tokens, engine.config.tgt_vocab
    for target in targets:
        if not 0 < len(target) <= limit:
            raise LimitError(f"a target of {len(target)} tokens: must have 1 to {limit}, the end token included")
        if not 0 <= min(target) <= max(target) < vocab:
            raise LimitError(f"a target has a token id outside the vocabulary of {vocab}")
    lengths = np.array([len(target) for target in targets])
    required = [list(target) for target in targets]
    state = engine.encode(batch.src_ids, batch.src_lengths, Outlook(1, int(lengths.max()), required=required))
    live = np.arange(len(targets), dtype=np.int32)
    tokens = np.full((len(live), 1), engine.config.start_id, np.int32)
    for step in range(lengths.max()):
        yield step, live, engine.step(tokens, state, full=True, attention=attention)
        keep = np.flatnonzero(lengths[live] > step + 1).astype(np.int32)
        if 0 < len(keep) < len(live):
            engine.reorder(state, keep[:, None], keep)
        live = live[keep]
        tokens = np.array([[targets[i][step]] for i in live.tolist()], np.int32)


def score(engine: Engine, batch: Batch, targets: Sequence[Sequence[int]]) -> list[Doubles]:
    """The log-probability of every token of each target, end token included, given the tokens before it.

    Raises NotNumbers for NaN or infinite log-probabilities.
    """
    log_probs = [np.empty(len(target)) for target in targets]
    for step, live, scores in forced_steps(engine, batch, targets):
        require_numbers(scores, batch.numbers, live, np.ones((len(live), 1), np.bool_), step)
        assert scores.log_probs is not None
        for row, i in enumerate(live.tolist()):
            log_probs[i][step] = scores.log_probs[row, 0, targets[i][step]]
    return log_probs
