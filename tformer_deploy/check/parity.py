"""Compares one engine with eager PyTorch over a corpus, and finds where it leaves eager."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from ..decoding.rules import best_tokens
from ..engines.base import Engine, Floats, Outlook
from ..errors import MissingExtra
from ..recipe import Tolerance
from ..translate import make_batch
from .compare import Judge, by_layer, by_step, differences, relative, worse
from .observe import Observation, Run, end_ids, far_target, layers_of, middle, observe, own_noise, tokens_of
from .reference import Reference, run_variants
from .report import EngineReport, Outputs, describe_divergence

ABOVE_NOISE = 10
"""By how much a layer's difference must exceed those of the layers before it, to be the one at fault."""
OWN_NOISE = 0.05
"""Between its batches a lossy engine's scores may differ by this share of what it may differ from eager."""
Cases = set[tuple[str, str, int]]
"""Variant, mode and sentence of the invariance check."""


def check(
    engine: Engine,
    name: str,
    reference: Reference,
    tolerance: Tolerance,
    not_blamed: Cases,
    progress: Callable[[int], None] | None = None,
) -> tuple[EngineReport, dict[str, Run]]:
    """Compare an entered engine with eager's side of the check; also returns what it decoded, by mode.

    `not_blamed`: where eager fails its own invariance check.
    """
    start = time.perf_counter()
    report, expected = EngineReport(name, tolerance=tolerance), reference.observed
    found = observe(engine, reference.sources, reference.options, expected, progress)
    for i, arrays in expected.encoder.items():
        report.encoder_max = worse(report.encoder_max, float(differences(arrays, found.encoder[i]).max()))
    report.encoder_sentences = len(expected.encoder)
    for i, looked in found.attention.items():
        largest = float(differences([expected.attention[i]], [looked]).max())
        report.attention_max = worse(report.attention_max or 0.0, largest)
    # The last is as long as the engine has positions, which may be fewer than eager's.
    probes = [ours[: len(theirs)] for ours, theirs in zip(expected.probes, found.probes, strict=True)]
    scores = differences(probes, found.probes)
    report.scores_count = len(scores)
    if len(scores):
        report.scores_max, report.scores_mean = float(scores.max()), float(scores.mean())
        report.scores_p999 = float(np.quantile(scores, 0.999))
    report.steps = by_step(probes, found.probes)
    report.layers = by_layer(expected.layers, found.layers)
    report.worst_sentence = _worst_sentence(found, expected)
    judge = Judge(expected, report.scores_max, tolerance.scores, reference.options.beams, end_ids(engine))
    for mode, run in expected.runs.items():
        totals = Outputs(mode)
        ties, failures, _ = judge.compare(run, found.runs[mode], totals)
        report.outputs.append(totals)
        if tolerance.tokens:
            report.ties += ties
            report.divergences += failures
    again = run_variants(engine, reference.sources, reference.options, progress)
    if not tolerance.tokens:  # what separates such an engine from eager does not excuse it towards itself
        report.own_noise = own_noise(engine, reference.sources, expected, found)
        judge = dataclasses.replace(judge, error=report.own_noise, tolerance=tolerance.scores * OWN_NOISE)
    report.invariance, _ = _invariance(judge, found, again, not_blamed, report)
    report.failures = _failures(report, len(reference.sources), tolerance)
    report.seconds = time.perf_counter() - start
    return report, found.runs


def eager_invariance(reference: Reference, eos_id: int, tolerance: Tolerance) -> tuple[list[Outputs], Cases]:
    """Eager against itself in other batches, and where it fails: no engine is blamed there."""
    judge = Judge(reference.observed, 0.0, tolerance.scores, reference.options.beams, [eos_id])
    return _invariance(judge, reference.observed, reference.variants, set(), EngineReport("eager"))


def _invariance(
    judge: Judge, base: Observation, variants: dict[str, dict[str, Run]], not_blamed: Cases, report: EngineReport
) -> tuple[list[Outputs], Cases]:
    """Compare runs in other batches with those of the whole corpus; adds ties and failures to the report."""
    found: list[Outputs] = []
    failing: Cases = set()
    for variant, runs in variants.items():
        for mode, run in runs.items():
            totals = Outputs(mode, variant)
            ties, apart, off = judge.compare(base.runs[mode], run, totals)
            cases = {(variant, mode, i) for i in [*off, *(d.sentence for d in apart)]}
            totals.not_blamed = len(cases & not_blamed)
            totals.failed -= totals.not_blamed
            failing |= cases
            found.append(totals)
            report.ties += ties
            report.divergences += [d for d in apart if (variant, mode, d.sentence) not in not_blamed]
    return found, failing


def _failures(report: EngineReport, sentences: int, tolerance: Tolerance) -> list[str]:
    """One line for each thing that is not as it must be. Comparisons are written so that NaN fails."""
    found = [] if sentences else ["the corpus has no sentence"]
    if not report.encoder_max <= tolerance.encoder:
        found.append(f"encoder outputs differ by {report.encoder_max:.2e}")
    if report.attention_max is not None and not report.attention_max <= tolerance.encoder:
        found.append(f"attention differs by {report.attention_max:.2e}")
    if not report.scores_max <= tolerance.scores:
        found.append(f"scores differ by {report.scores_max:.2e}")
    for totals in (*(report.outputs if tolerance.tokens else []), *report.invariance):
        if totals.failed > (math.ceil(tolerance.unstable * totals.sentences) if totals.variant else 0):
            name = f"{totals.mode} ({totals.variant})" if totals.variant else totals.mode
            apart = [d for d in report.divergences if (d.mode, d.variant) == (totals.mode, totals.variant)]
            first = f"the first: {describe_divergence(apart[0])}" if apart else f"scores by {totals.score_max:.2e}"
            found.append(f"{name}: {totals.failed} of {totals.sentences} sentences differ, {first}")
    return found


def find_layer(engine: Engine, eager: Engine, reference: Reference, report: EngineReport, tolerance: Tolerance) -> str:
    """Where an engine that failed first leaves eager: the sentence, the token and the layer. Both must be entered."""
    if not reference.sources:
        return ""
    first = min(report.divergences, key=lambda d: (bool(d.variant), d.sentence), default=None)
    i, worst = first.sentence if first else report.worst_sentence, report.worst_sentence
    runs = reference.observed.runs
    positions = reference.options.positions
    suspects = [(j, tokens_of(runs["greedy"].outputs[j][0])) for j in dict.fromkeys((i, worst))]
    if first:  # a token that only a beam or a sample takes is not in the greedy output
        judge = Judge(reference.observed, 0.0, 0.0, reference.options.beams, end_ids(engine))
        rows = judge.rows(runs[first.mode].traces[i], first.step, first.mode)
        suspects += [(i, [*row, first.eager_token]) for row in rows]
    suspects.append(
        (middle(reference.sources), far_target(runs["greedy"], engine, min(positions, engine.limits.tgt_tokens)))
    )
    for sentence, target in suspects:
        source = reference.sources[sentence]
        try:
            ours, theirs = (layers_of(side, source, target) for side in (eager, engine))
        except MissingExtra as error:
            return f"sentence {i + 1}; the layer is not known: {error}"
        report.layers = by_layer(ours, theirs)
        where = first_apart(ours, theirs, tolerance)
        where = where or _step_apart(engine, eager, source, target, reference.options.beams, tolerance)
        if where:
            return f"sentence {sentence + 1}, {where}"
    if report.attention_max is not None and not report.attention_max <= tolerance.encoder:
        return "the output attention, where no layer differs"
    return (
        f"sentence {i + 1}: every layer agrees on it alone with eager's tokens, so rows are mixed up between steps "
        f"(parents, caches) or between sentences of a batch"
    )


def first_apart(ours: dict[str, Floats], theirs: dict[str, Floats], tolerance: Tolerance) -> str:
    """The first layer that is far above the noise of those before it, and for the decoder's the token; or nothing."""
    noise = 0.0
    for name in [name for name in ours if name in theirs]:
        apart = relative(ours[name], theirs[name])
        limit = max(tolerance.encoder / ABOVE_NOISE, ABOVE_NOISE * noise)
        if not apart.max() <= limit:
            if name.startswith(("encoder", "memory", "cross_")):
                return name
            tokens = [not here.max() <= limit for here in apart]
            return f"token {tokens.index(True) + 1}, {name}"
        noise = max(noise, float(apart.max()))
    return ""


def _step_apart(
    engine: Engine, eager: Engine, source: Sequence[int], target: list[int], beams: int, tolerance: Tolerance
) -> str:
    """Which output of the engine's own steps is wrong where no layer is, with several rows alike; or nothing."""
    batch = make_batch([source], engine.config.pad_id)
    states = [side.encode(batch.src_ids, batch.src_lengths, Outlook(beams, len(target))) for side in (eager, engine)]
    tokens = np.full((1, 1), engine.config.bos_id, np.int32)
    for step, token in enumerate(target):
        sides = zip((eager, engine), states, strict=True)
        expected, found = (side.step(tokens, state, full=True) for side, state in sides)
        assert expected.log_probs is not None and found.log_probs is not None
        ids = found.ids.clip(0, engine.config.tgt_vocab - 1)
        best = np.take_along_axis(found.log_probs, best_tokens(found.log_probs, ids.shape[-1]), -1)
        pairs = {
            "log_probs": (expected.log_probs, found.log_probs),
            "top_ids": (best, np.where(ids == found.ids, np.take_along_axis(found.log_probs, ids, -1), np.nan)),
            "top_scores": (best, found.scores),
        }
        for name, (ours, theirs) in pairs.items():
            if not differences([ours], [theirs]).max() <= tolerance.scores:
                return f"token {step + 1}, {name} of {tokens.size} rows, where no layer differs"
        if step == 0:
            for side, state in zip((eager, engine), states, strict=True):
                side.reorder(state, np.zeros((1, beams), np.int32))
        tokens = np.full((1, beams), token, np.int32)
    return ""


def _worst_sentence(found: Observation, expected: Observation) -> int:
    """The sentence whose scores or encoder outputs differ most."""
    worst, most = 0, -1.0
    for i, probes in enumerate(expected.probes[: len(expected.runs["greedy"].outputs)]):
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
