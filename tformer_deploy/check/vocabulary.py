"""Every entry of both vocabularies once: sources that hold them all, and steps that are fed them all.

A corpus meets some thousand of 32,000 entries; a wrong row of an embedding, or of the output, is one that it may miss.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..engines.base import Engine, Floats, Ints, Outlook

MAX_BATCH = 512
"""Most sentences of a batch, as far as an engine goes; each is one source entry, whose step is fed one target entry."""
PROBES = 8
"""Numbers that are kept for each entry."""
SIDES = ("source", "target")


@dataclass
class Vocabulary:
    """What an engine makes of every entry, a few numbers each."""

    source: Floats
    """(V, PROBES): elements of the encoder's outputs for the entry alone."""
    target: Floats
    """(V, PROBES): log-probabilities behind the entry, of a source that differs from one to the next."""


def read_vocabulary(engine: Engine) -> Vocabulary:
    """Encode every source entry as a sentence of its own, and feed every target entry in place of bos."""
    config, limits = engine.config, engine.limits
    found = Vocabulary(*(np.empty((size, PROBES), np.float32) for size in (config.src_vocab, config.tgt_vocab)))
    count = max(config.src_vocab, config.tgt_vocab)
    entries = (np.random.default_rng(0).permutation(config.src_vocab), np.arange(config.tgt_vocab))
    sources, targets = (np.resize(side, count).astype(np.int32) for side in entries)
    batch = max(1, min(MAX_BATCH, limits.sentences(1, 1, 1)))
    for start in range(0, count, batch):
        ids, tokens = (side[start : start + batch, None] for side in (sources, targets))
        state = engine.encode(np.ascontiguousarray(ids), np.ones(len(ids), np.int32), Outlook(1, 1))
        arrays = engine.cross_keys_values(state)
        for probe, n in enumerate(np.linspace(0, len(arrays) - 1, PROBES).astype(int)):
            heads, width = arrays[n].shape[1], arrays[n].shape[3]
            head, element = np.divmod((7919 * ids[:, 0] + 101 * probe) % (heads * width), width)
            found.source[ids[:, 0], probe] = arrays[n][np.arange(len(ids)), head, 0, element]
        log_probs = engine.step(np.ascontiguousarray(tokens), state, full=True).log_probs
        assert log_probs is not None
        kept = probed(tokens[:, 0], config.tgt_vocab)
        found.target[tokens[:, 0]] = np.take_along_axis(log_probs[:, 0], kept, 1)
    return found


def probed(tokens: Ints, vocab: int) -> NDArray[np.int64]:
    """The ids whose log-probabilities are kept behind each token (n, PROBES): over all tokens, every id as often."""
    steps = np.arange(PROBES, dtype=np.int64) * (vocab // PROBES + 1)
    return (tokens[:, None] + steps) % vocab
