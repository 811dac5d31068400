"""An engine's own noise: how much its log-probabilities change between batches. It decides what a tie between two of
its runs is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from ..engines.base import Engine, Floats, Outlook
from ..translate.batches import make_batch
from .compare import differences, worse
from .observe import Observation, spread, tokens_of
from .recording import JOIN_STEPS, Run

SENTENCES = 8
"""Sentences that are scored under teacher forcing: few, as each runs alone, but enough for a median."""


def own_noise(
    engine: Engine, sources: Sequence[Sequence[int]], reference: Observation, usual_batches: Observation
) -> tuple[float, float]:
    """Score a few sentences again under teacher forcing, and compare with the engine's own scores in `usual_batches`.

    Each sentence alone; and, if the engine supports it, in pairs in which one joins the other later. Returns the
    largest difference, and the larger of the two medians: rounding moves a few scores far, a fault moves most.
    """
    picked = spread(sources, SENTENCES)
    alone: list[tuple[int, ...]] = [(i,) for i in picked]
    pairs: list[tuple[int, ...]] = [(i, k) for i, k in [*pairwise(picked)][::2] if engine.admits]
    largest = usual = 0.0
    for groups in (alone, pairs):
        off = [np.zeros(1)]
        for group in groups:
            for i, step, log_probs in _fed(engine, sources, group, reference):
                off.append(differences([log_probs[usual_batches.probe_ids[i][step]]], [usual_batches.probes[i][step]]))
        apart = np.concatenate(off)
        largest, usual = worse(largest, float(apart.max())), worse(usual, float(np.median(apart)))
    return largest, usual


def _fed(
    engine: Engine, sources: Sequence[Sequence[int]], picked: Sequence[int], reference: Observation
) -> Iterator[tuple[int, int, Floats]]:
    """Feed eager's tokens to a sentence, and to others that join it `JOIN_STEPS` apart, until the first one ends.

    Yields sentence, step and log-probabilities (V), once all are there.
    """
    pad, start = engine.config.pad_id, engine.config.start_id
    targets = [tokens_of(reference.runs["greedy"].outputs[i][0]) for i in picked]
    longest = max(map(len, targets))
    state, steps = None, [0] * len(picked)
    for n in range(longest + JOIN_STEPS * len(picked)):
        place, late = divmod(n, JOIN_STEPS)
        if late == 0 and place < len(picked):
            batch, outlook = make_batch([sources[picked[place]]], pad), Outlook(1, longest, required=[targets[place]])
            if state is None:
                state = engine.encode(batch.src_ids, batch.src_lengths, outlook)
            else:
                engine.admit(state, batch.src_ids, batch.src_lengths, outlook)
        here = range(min(place + 1, len(picked)))
        if any(steps[k] == len(targets[k]) for k in here):
            return
        before = [[targets[k][steps[k] - 1] if steps[k] else start] for k in here]
        scores = engine.step(np.array(before, np.int32), state, full=True)
        assert scores.log_probs is not None
        for k in here:
            if len(here) == len(picked):
                yield picked[k], steps[k], scores.log_probs[k, 0]
            steps[k] += 1


def moved(usual: Mapping[str, Run], others: Mapping[str, Mapping[str, Run]]) -> float:
    """The largest change of a chosen token's log-probability between an engine's usual batches and others.

    Of greedy search and samples, as long as all earlier tokens are the same.
    """
    worst = 0.0
    for mode in ("greedy", "sampling"):
        for runs in others.values():
            for i, theirs in runs[mode].traces.items():
                ours = usual[mode].traces[i]
                steps, width = (min(sizes) for sizes in zip(ours.tokens.shape, theirs.tokens.shape, strict=True))
                a, b = (trace.tokens[:steps, :width] for trace in (ours, theirs))
                same = np.logical_and.accumulate((a == b) & (a >= 0))
                sums = [np.where(same, trace.values[:steps, :width], 0.0) for trace in (ours, theirs)]
                one, other = (np.diff(values, axis=0, prepend=0.0)[same] for values in sums)
                worst = worse(worst, float(differences([one], [other]).max(initial=0.0)))
    return worst
