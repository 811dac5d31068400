"""Decoding loops over the Engine protocol; numpy only, blind to the backend."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .engines.base import Engine, Ints
from .errors import LimitError


@dataclass(frozen=True)
class DecodeOptions:
    """How to decode."""

    max_tokens: int = 256
    """Longest output, eos included; the model's positions are a limit of their own."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise LimitError(f"max_tokens={self.max_tokens}: must be at least 1")


@dataclass
class Hypothesis:
    """One decoded output."""

    ids: list[int] = field(default_factory=list)
    """Tokens, without bos and eos."""
    score: float = 0.0
    """Sum of the log-probabilities of ids and, where `finished`, of eos."""
    finished: bool = False
    """Ended by eos, not by a limit."""


def greedy(engine: Engine, src_ids: Ints, src_lengths: Ints, options: DecodeOptions) -> list[Hypothesis]:
    """The best token at every step; equal scores go to the lower id. src_ids (B, S), src_lengths (B).

    Finished sentences leave the batch at once. Scores are summed as float64 in the order of the tokens.
    """
    eos, bos = engine.config.eos_id, engine.config.bos_id
    found = [Hypothesis() for _ in src_ids]
    live = list(found)
    state = engine.encode(src_ids, src_lengths)
    tokens = np.full((len(live), 1), bos, np.int32)
    for _ in range(min(options.max_tokens, engine.limits.tgt_tokens)):
        best = engine.step(tokens, state)
        tokens = np.ascontiguousarray(best.ids[:, :, 0])
        for hypothesis, token, score in zip(live, tokens[:, 0].tolist(), best.scores[:, 0, 0].tolist(), strict=True):
            hypothesis.score += score
            hypothesis.finished = token == eos
            if not hypothesis.finished:
                hypothesis.ids.append(token)
        keep = np.flatnonzero(tokens[:, 0] != eos).astype(np.int32)
        if len(keep) == 0:
            break
        if len(keep) < len(live):
            live = [live[i] for i in keep]
            tokens = tokens[keep]
            engine.reorder(state, keep[:, None], keep)
    return found
