"""Feeds every entry of both vocabularies once: as a source, and as a target token.

A corpus has some thousand of 32,000 entries, so it may miss a wrong row of an embedding or of the output.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..engines.base import Engine, Floats, Ints, Outlook

MAX_BATCH = 512
"""Largest batch; each sentence is one source entry, and its step is fed one target entry."""
PROBES = 8
"""Values that are compared for each entry: enough to see a wrong row, few enough to store for 250,000 entries."""
SIDES = ("source", "target")


@dataclass
class Vocabulary:
    """A few values of an engine's output for every entry."""

    source: Floats
    """(V, PROBES): elements of the encoder's outputs for the entry alone."""
    target: Floats
    """(V, PROBES): log-probabilities after the entry, each with another source."""


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
        ids_compared = probed(tokens[:, 0], config.tgt_vocab)
        found.target[tokens[:, 0]] = np.take_along_axis(log_probs[:, 0], ids_compared, 1)
    return found


def probed(tokens: Ints, vocab: int) -> NDArray[np.int64]:
    """The ids whose log-probabilities are compared after each token (n, PROBES); over all tokens, every id as often."""
    steps = np.arange(PROBES, dtype=np.int64) * (vocab // PROBES + 1)
    return (tokens[:, None] + steps) % vocab
