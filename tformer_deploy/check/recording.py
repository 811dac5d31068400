"""Decodes batches and records what a search decides at every step, so that two runs can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ..decoding import Batch, ContinuousBatch, DecodeOptions, Hypothesis, Search, Step
from ..engines.base import Engine, Ints, Searches

JOIN_STEPS = 3
"""Steps between batches that join: enough for the first to be reordered before the next comes."""
Rows = list[list[tuple[Ints, Ints, NDArray[np.float64], NDArray[np.float64]]]]
"""Of each sentence and step: parents, tokens, values and margins."""
Number = TypeVar("Number", bound=np.generic)


@dataclass
class Trace:
    """The decisions of a search for one sentence: up to N candidates of each of T steps, as in `decoding.Step`."""

    parents: Ints
    tokens: Ints
    """(T, N); -1: no candidate."""
    values: NDArray[np.float64]
    margins: NDArray[np.float64]


@dataclass
class Run:
    """Outputs of one mode and the decisions behind them, by sentence."""

    outputs: dict[int, list[Hypothesis]] = field(default_factory=dict)
    traces: dict[int, Trace] = field(default_factory=dict)
    own_search: list[str] = field(default_factory=list)
    """Differences between the runtime's own search, if it has one, and ours over the same engine."""


def record(engine: Engine, batch: Batch, indices: Sequence[int], options: DecodeOptions, run: Run) -> None:
    """Decode a batch and add outputs and traces to `run` under `indices`."""
    record_joined(engine, [(batch, indices)], options, run)


def record_joined(
    engine: Engine, batches: Sequence[tuple[Batch, Sequence[int]]], options: DecodeOptions, run: Run
) -> None:
    """The same, where each batch joins those before it a few steps after the last."""
    running, steps = ContinuousBatch(engine, strict=False), 0
    most = room(engine, options, max(batch.src_ids.shape[1] for batch, _ in batches))
    found: list[tuple[Search, Rows, Sequence[int]]] = []
    for batch, indices in batches:
        while running.searches and (steps % JOIN_STEPS or running.sentences + len(indices) > most):
            running.step()
            steps += 1
        rows: Rows = [[] for _ in indices]
        found.append((running.join(batch, options, on_step=partial(_note, rows, options)), rows, indices))
        running.step()
        steps += 1
    while running.searches:
        running.step()
    for search, rows, indices in found:
        for i, output, noted in zip(indices, search.outputs(), rows, strict=True):
            run.outputs[i] = output
            parents, tokens, values, margins = zip(*noted, strict=True)
            decided = _stack(parents, -1), _stack(tokens, -1)
            run.traces[i] = Trace(*decided, _stack(values, -np.inf), _stack(margins, np.inf))
    if isinstance(engine, Searches) and len(batches) == 1:
        _note_own_search(engine, *batches[0], options, run)


def _note_own_search(engine: Searches, batch: Batch, indices: Sequence[int], options: DecodeOptions, run: Run) -> None:
    """Both searches read the same steps, so tokens and sums are equal to the last bit."""
    own = engine.search(batch, options, strict=False)
    for i, theirs in zip(indices, own, strict=True):
        expected, found = ([(h.ids, h.end_id, h.score, h.value) for h in side] for side in (run.outputs[i], theirs))
        if found != expected:
            run.own_search.append(f"sentence {i + 1}, {len(indices)} at once: {found[:1]}, not {expected[:1]}")


def room(engine: Engine, decoding: DecodeOptions, src_tokens: int) -> int:
    """Largest batch of sources of that length."""
    tokens = min(decoding.max_tokens, engine.limits.tgt_tokens)
    return engine.limits.sentences(decoding.rows, src_tokens, tokens)


def _note(rows: Rows, options: DecodeOptions, step: Step) -> None:
    """Add a step's decisions to the rows of its sentences."""
    step = _by_sample(step, step.samples, options.n_best) if step.samples is not None else step
    margins = np.full(step.tokens.shape, np.inf) if step.margins is None else step.margins
    for row, sentence in enumerate(step.sentences.tolist()):
        rows[sentence].append((step.parents[row], step.tokens[row], step.values[row], margins[row]))


def _by_sample(step: Step, samples: Ints, count: int) -> Step:
    """A step with a column for each sample, where rows move up as others end."""
    live = samples >= 0
    where = np.nonzero(live)[0], samples[live]

    def place(array: NDArray[Number], filler: float) -> NDArray[Number]:
        placed = np.full((len(array), count), filler, array.dtype)
        placed[where] = array[live]
        return placed

    assert step.margins is not None
    values, margins = place(step.values, -np.inf), place(step.margins, np.inf)
    return Step(step.sentences, place(samples, -1), place(step.tokens, -1), values, values, margins)


def _stack(rows: Sequence[NDArray[Number]], filler: float) -> NDArray[Number]:
    """Rows of up to N numbers as (T, N)."""
    stacked = np.full((len(rows), max(map(len, rows))), filler, rows[0].dtype)
    for row, out in zip(rows, stacked, strict=True):
        out[: len(row)] = row
    return stacked
