"""Compares one engine with eager PyTorch over a corpus, and finds where it leaves eager."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from ..engines.base import Engine, Floats
from ..errors import MissingExtra
from ..recipe import Tolerance
from .compare import Judge, by_layer, by_step, differences, worse
from .observe import CheckOptions, Observation, Run, end_ids, layers_of, observe, tokens_of
from .reference import Reference, run_variants
from .report import Divergence, EngineReport, Outputs, describe_divergence


def check(
    engine: Engine,
    name: str,
    reference: Reference,
    tolerance: Tolerance,
    progress: Callable[[int], None] | None = None,
) -> tuple[EngineReport, dict[str, Run]]:
    """Compare an entered engine with eager's side of the check; also returns what it decoded, by mode."""
    start = time.perf_counter()
    report, expected = EngineReport(name), reference.observed
    found = observe(engine, reference.sources, reference.options, expected, progress)
    for i, arrays in expected.encoder.items():
        report.encoder_max = worse(report.encoder_max, float(differences(arrays, found.encoder[i]).max()))
    report.encoder_sentences = len(expected.encoder)
    scores = differences(expected.probes, found.probes)
    report.scores_count = len(scores)
    if len(scores):
        report.scores_max, report.scores_mean = float(scores.max()), float(scores.mean())
        report.scores_p999 = float(np.quantile(scores, 0.999))
    report.steps = by_step(expected.probes, found.probes)
    report.layers = by_layer(expected.layers, found.layers)
    report.worst_sentence = _worst_sentence(found, expected)
    judge = Judge(expected, report.scores_max, tolerance.scores, reference.options.beams, end_ids(engine))
    for mode, run in expected.runs.items():
        totals = Outputs(mode)
        ties, failures = judge.compare(run, found.runs[mode], totals)
        report.outputs.append(totals)
        report.ties += ties
        report.divergences += failures
    not_blamed = {(d.variant, d.mode, d.sentence) for d in eager_invariance(reference, engine, tolerance)[1]}
    again = run_variants(engine, reference.sources, reference.options, progress)
    report.invariance, apart, ties = _invariance(judge, found, again, not_blamed)
    report.ties += ties
    report.divergences += apart
    report.failures = _failures(report, len(reference.sources), tolerance)
    report.seconds = time.perf_counter() - start
    return report, found.runs


def eager_invariance(
    reference: Reference, engine: Engine, tolerance: Tolerance
) -> tuple[list[Outputs], list[Divergence]]:
    """Eager against itself in other batches. No engine is blamed where eager fails."""
    judge = Judge(reference.observed, 0.0, tolerance.scores, reference.options.beams, end_ids(engine))
    totals, apart, _ = _invariance(judge, reference.observed, reference.variants, set())
    return totals, apart


def _invariance(
    judge: Judge, base: Observation, variants: dict[str, dict[str, Run]], not_blamed: set[tuple[str, str, int]]
) -> tuple[list[Outputs], list[Divergence], list[Divergence]]:
    """Compare runs in other batches with those of the whole corpus; returns totals, failures, ties."""
    found: list[Outputs] = []
    failures, ties = [], []
    for variant, runs in variants.items():
        for mode, run in runs.items():
            totals = Outputs(mode, variant)
            excused, apart = judge.compare(base.runs[mode], run, totals)
            blamed = [d for d in apart if (variant, mode, d.sentence) not in not_blamed]
            totals.not_blamed = len(apart) - len(blamed)
            totals.failed -= totals.not_blamed
            found.append(totals)
            failures += blamed
            ties += excused
    return found, failures, ties


def _failures(report: EngineReport, sentences: int, tolerance: Tolerance) -> list[str]:
    """One line for each thing that is not as it must be. Comparisons are written so that NaN fails."""
    found = [] if sentences else ["the corpus has no sentence"]
    if not report.encoder_max <= tolerance.encoder:
        found.append(f"encoder outputs differ by {report.encoder_max:.2e}")
    if not report.scores_max <= tolerance.scores:
        found.append(f"scores differ by {report.scores_max:.2e}")
    for totals in (*report.outputs, *report.invariance):
        if totals.failed:
            name = f"{totals.mode} ({totals.variant})" if totals.variant else totals.mode
            apart = [d for d in report.divergences if (d.mode, d.variant) == (totals.mode, totals.variant)]
            first = f"the first: {describe_divergence(apart[0])}" if apart else f"scores by {totals.score_max:.2e}"
            found.append(f"{name}: {totals.failed} of {totals.sentences} sentences differ, {first}")
    return found


def find_layer(engine: Engine, eager: Engine, reference: Reference, report: EngineReport, tolerance: Tolerance) -> str:
    """Where an engine that failed first leaves eager: the sentence, the step and the layer. Both must be entered."""
    between = [d.sentence for d in report.divergences if not d.variant] or [d.sentence for d in report.divergences]
    i = min(between, default=report.worst_sentence)
    target = tokens_of(reference.observed.runs["greedy"].outputs[i][0])
    try:
        ours, theirs = (layers_of(side, reference.sources[i], target) for side in (eager, engine))
    except MissingExtra as error:
        return f"sentence {i + 1}; the layer is not known: {error}"
    report.layers = by_layer(ours, theirs)
    for name in ours:
        # Large values have large errors.
        limit = tolerance.encoder * max(1.0, float(np.abs(ours[name]).max()))
        if name not in theirs:
            continue
        if not differences([ours[name]], [theirs[name]]).max() <= limit:
            where = f"sentence {i + 1}, {name}"
            if name.startswith(("encoder", "memory", "cross_")):
                return where
            return _first_step(ours, theirs, tolerance, i)
    return (
        f"sentence {i + 1}: every layer agrees on it alone with eager's tokens, so rows are mixed up between steps "
        f"(parents, caches) or between sentences of a batch"
    )


def _first_step(ours: dict[str, Floats], theirs: dict[str, Floats], tolerance: Tolerance, i: int) -> str:
    """The first step at which a layer of the decoder differs, and the first such layer."""
    names = [n for n in ours if n in theirs and not n.startswith(("encoder", "memory", "cross_"))]
    for step in range(len(ours[names[0]])):
        for name in names:
            a, b = ours[name][step], theirs[name][step]
            if not differences([a], [b]).max() <= tolerance.encoder * max(1.0, float(np.abs(ours[name]).max())):
                return f"sentence {i + 1}, token {step + 1}, {name}"
    return f"sentence {i + 1}"


def _worst_sentence(found: Observation, expected: Observation) -> int:
    """The sentence whose scores or encoder outputs differ most."""
    worst, most = 0, -1.0
    for i, probes in enumerate(expected.probes):
        pairs = [*expected.encoder.get(i, []), probes], [*found.encoder.get(i, []), found.probes[i]]
        difference = float(differences(*pairs).max(initial=0.0))
        if worse(most, difference) is not most:
            worst, most = i, difference
    return worst


def generated_sources(src_vocab: int, eos_id: int, longest: int) -> list[list[int]]:
    """Random sources of lengths 1 to `longest`, each once up to 16 and then ever farther apart; the same each time."""
    lengths = [n for n in range(1, longest + 1) if n <= 16 or n % 16 == 0 or n == longest]
    while len(lengths) > 48:
        lengths = lengths[:16] + lengths[16:-1:2] + lengths[-1:]
    rng = np.random.default_rng(0)
    return [[*rng.integers(min(4, src_vocab - 1), src_vocab, n - 1).tolist(), eos_id] for n in lengths]
