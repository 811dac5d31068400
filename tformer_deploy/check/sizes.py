"""The largest sizes: a beam as wide as the recipe allows, and batches as large as a translator makes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..decoding import DecodeOptions
from ..engines.base import Engine, Outlook
from ..translate.batches import make_batch
from .compare import Judge, differences, worse
from .observe import CheckOptions, by_length, spread, tokens_of
from .recording import Run, record, room
from .results import Divergence, Outputs

WIDE_SENTENCES, WIDE_TOKENS = 3, 6
"""Sentences of the wide beam, and its longest output."""
LARGE_SENTENCES, LARGE_TOKENS = 8, 4
"""Different sentences of a large batch: the shortest, as most of them fit into one. Its longest output."""
LARGE = "large"


def wide_beam(options: CheckOptions) -> DecodeOptions | None:
    """Options of the wide beam; None if it is no wider than the usual one."""
    if options.wide <= options.beams:
        return None
    return DecodeOptions(min(WIDE_TOKENS, options.max_tokens), beams=options.wide, n_best=options.wide)


def wide_sentences(sources: Sequence[Sequence[int]]) -> list[int]:
    """Indices of a few short sentences."""
    picked = spread(sources, LARGE_SENTENCES)
    return picked[1 : 1 + WIDE_SENTENCES] or picked


def run_wide(engine: Engine, sources: Sequence[Sequence[int]], options: CheckOptions) -> Run | None:
    """Decode a few sentences with the wide beam; None if there is none, or no plan has room for it."""
    decoding, picked, run = wide_beam(options), wide_sentences(sources), Run()
    if decoding is None or not picked or not has_room(engine, decoding, max(len(sources[i]) for i in picked)):
        return None
    for batch, indices in by_length(engine, sources, picked, options, decoding):
        record(engine, batch, indices, decoding, run)
    return run


def has_room(engine: Engine, decoding: DecodeOptions, src_tokens: int) -> bool:
    """Whether an engine has a plan of these sizes; engines without plans take every combination."""
    wanted = decoding.rows, src_tokens, min(decoding.max_tokens, engine.limits.tgt_tokens)
    fits = [p.beams >= wanted[0] and p.src_len >= wanted[1] and p.capacity >= wanted[2] for p in engine.limits.profiles]
    return any(fits) or not fits


def rows_apart(engine: Engine, sources: Sequence[Sequence[int]], greedy: Run, options: CheckOptions) -> float | None:
    """Largest difference between rows of a wide beam that are all fed the same; None if there is no wide beam.

    Lossy variants must score equal rows alike too.
    """
    decoding, picked = wide_beam(options), wide_sentences(sources)
    if decoding is None or not picked or not has_room(engine, decoding, max(len(sources[i]) for i in picked)):
        return None
    picked = picked[: room(engine, decoding, max(len(sources[i]) for i in picked))]
    steps, width, worst = min(decoding.max_tokens, engine.limits.tgt_tokens), decoding.beams, 0.0
    targets = np.array([np.resize(tokens_of(greedy.outputs[i][0]), steps) for i in picked], np.int32)
    batch = make_batch([sources[i] for i in picked], engine.config.pad_id)
    state = engine.encode(batch.src_ids, batch.src_lengths, Outlook(width, steps))
    tokens = np.full((len(picked), 1), engine.config.start_id, np.int32)
    for step in range(steps):
        scores = engine.step(tokens, state, full=True)
        assert scores.log_probs is not None
        first = np.broadcast_to(scores.log_probs[:, :1], scores.log_probs.shape)
        worst = worse(worst, float(differences([first], [scores.log_probs]).max()))
        if step == 0:
            parents = np.arange(len(picked), dtype=np.int32)[:, None]
            engine.reorder(state, np.ascontiguousarray(np.broadcast_to(parents, (len(picked), width))))
        tokens = np.repeat(targets[:, step : step + 1], width, 1)
    return worst


def run_large(
    engine: Engine, sources: Sequence[Sequence[int]], options: CheckOptions, mode: str
) -> tuple[Run, list[Run]]:
    """Decode a few sentences in a usual batch, and in a large one that repeats them: a run for each repetition.

    Their order is random, so that a row that is confused with another is another sentence.
    """
    rounds: list[Run] = []
    usual = Run()
    tokens = min(LARGE_TOKENS, options.max_tokens)
    decoding = dataclasses.replace(options.modes()[mode], max_tokens=tokens)
    picked = sorted(range(len(sources)), key=lambda i: len(sources[i]))[:LARGE_SENTENCES]
    if not picked:
        return usual, rounds
    longest = len(sources[picked[-1]])
    count = min(options.large_tokens // decoding.rows // longest, room(engine, decoding, longest))
    if count <= len(picked):
        return usual, rounds
    for batch, indices in by_length(engine, sources, picked, options, decoding):
        record(engine, batch, indices, decoding, usual)
    order = np.random.default_rng(options.seed).permutation(np.resize(picked, count)).tolist()
    rows = Run()
    batch = make_batch([sources[i] for i in order], engine.config.pad_id, order)
    record(engine, batch, range(count), decoding, rows)
    usual.own_search += rows.own_search
    for row, i in enumerate(order):
        target = next((each for each in rounds if i not in each.outputs), None)
        if target is None:
            rounds.append(target := Run())
        target.outputs[i], target.traces[i] = rows.outputs[row], rows.traces[row]
    return usual, rounds


def compare_large(
    judge: Judge, usual: Run, rounds: Sequence[Run], mode: str
) -> tuple[Outputs, list[Divergence], list[Divergence]]:
    """All rows of a large batch beside the same sentences in a usual one: counts, ties and failures."""
    totals, ties, failures = Outputs(mode, LARGE), [], []
    for run in rounds:
        one = Outputs(mode, LARGE)
        excused, apart, _ = judge.compare(usual, run, one)
        ties += excused
        failures += apart
        one.hopeless = judge.count_hopeless(apart)
        for name in ("sentences", "equal", "ties", "failed", "hopeless"):
            setattr(totals, name, getattr(totals, name) + getattr(one, name))
        totals.score_max = worse(totals.score_max, one.score_max)
    return totals, ties, failures
