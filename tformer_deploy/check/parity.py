"""Compares one engine with eager PyTorch over a corpus."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from ..base.errors import ArtifactError
from ..base.notes import Progress, unseen
from ..bundle.recipe import Tolerance
from ..engines.base import Engine, Floats
from .compare import DEFAULTS, WIDE, Judge, by_layer, by_step, differences, worse
from .defaults import decoding_of, run_defaults
from .noise import moved, own_noise
from .observe import BEST, Observation, end_ids, observe, observe_fed, own_choices
from .recording import Run
from .reference import Reference, run_variants
from .report import EngineReport, describe_divergence
from .results import KINDS, Entries, Outputs, Top1, Walk
from .rounding import Rounding
from .shares import allowed
from .sizes import compare_large, rows_apart, run_large, run_wide
from .vocabulary import SIDES, read_vocabulary
from .walks import late_scores, run_walks

NEAR = 0.1
"""A best token that eager scores within so many nats of its own best counts as equally good, see docs/check.md."""
OWN_NOISE = 0.05
"""Share of `tolerance.scores` by which a lossy variant's scores may differ between batches."""
STAYS = 10
"""Times `tolerance.unstable`: the share of rows of a walk that may differ, as a flipped rounding stays in a row's cache
for all later steps."""
SAME_SCORES = 1e-4
"""Largest difference between the scores of a step's best tokens and its log-probabilities, in every precision."""
CAPPED = ("greedy", "beam")
"""Modes whose ties are limited. Samples of flat distributions are so close that any number of ties is possible."""
Cases = set[tuple[str, str, int]]
"""Variant, mode and sentence of the invariance check."""


def check(
    engine: Engine,
    name: str,
    reference: Reference,
    tolerance: Tolerance,
    not_blamed: Cases,
    progress: Progress = unseen,
) -> tuple[EngineReport, dict[str, Run]]:
    """Compare an entered engine with eager's outputs; also returns the engine's outputs by mode.

    `not_blamed`: cases in which eager fails its own invariance check.
    """
    start = time.perf_counter()
    report, expected = EngineReport(name, tolerance=tolerance), reference.observed
    observed = observe(engine, reference.sources, reference.options, expected, progress)
    _compare_fed(expected, observed, report)
    judge = Judge(expected, report.scores_max, tolerance.scores, reference.options.beams, end_ids(engine))
    for mode, run in expected.runs.items():
        totals = Outputs(mode)
        ties, failures, _ = judge.compare(run, observed.runs[mode], totals)
        report.outputs.append(totals)
        if tolerance.tokens:
            report.ties += ties
            report.divergences += failures
    again = run_variants(engine, reference.sources, reference.options, progress)
    if not tolerance.tokens:  # of a lossy variant, its own noise decides on ties, not its difference from eager
        largest, report.own_usual = own_noise(engine, reference.sources, expected, observed)
        report.own_noise = worse(largest, moved(observed.runs, again))
        own = own_choices(engine, reference.sources, reference.options, observed.runs["greedy"])
        judge = dataclasses.replace(
            judge,
            reference=own or expected,
            error=report.own_noise,
            tolerance=own_limit(tolerance),
            hopeless=tolerance.scores,
        )
    report.invariance, _ = _invariance(judge, observed, again, not_blamed, report)
    sizes = _compare_sizes(engine, judge, reference, report)
    sizes += _compare_defaults(engine, reference, report)
    report.walks = run_walks(engine, reference.sources, reference.options, own_limit(tolerance))
    report.vocabulary = _compare_vocabulary(engine, reference)
    report.failures = _failures(report, len(reference.sources), tolerance)
    report.failures += _other_searches(
        [*observed.runs.items(), *(run for runs in again.values() for run in runs.items()), *sizes]
    )
    report.seconds = time.perf_counter() - start
    return report, observed.runs


def _compare_fed(expected: Observation, observed: Observation, report: EngineReport) -> None:
    """Compare encoder outputs, attention, scores and layers under teacher forcing."""
    for i, arrays in expected.encoder.items():
        report.encoder_max = worse(report.encoder_max, float(differences(arrays, observed.encoder[i]).max()))
    report.encoder_sentences = len(expected.encoder)
    if observed.attention and not expected.attention:
        raise ArtifactError(
            f"the reference has no attention, which {report.engine} returns: make it again with --save-reference"
        )
    for i, weights in observed.attention.items():
        largest = float(differences([expected.attention[i]], [weights]).max())
        report.attention_max = worse(report.attention_max or 0.0, largest)
    # The last is as long as the engine has positions, which may be fewer than eager's.
    probes = [ours[: len(theirs)] for ours, theirs in zip(expected.probes, observed.probes, strict=True)]
    scores = differences(probes, observed.probes)
    report.scores_count = len(scores)
    if len(scores):
        report.scores_max, report.scores_mean = float(scores.max()), float(scores.mean())
        report.scores_p999 = float(np.quantile(scores, 0.999))
    report.steps = by_step(probes, observed.probes)
    report.layers = by_layer(expected.layers, observed.layers)
    report.top1, report.best_off = agreement(expected, observed), observed.best_off
    report.worst_sentence = _worst_sentence(observed, expected)


def agreement(expected: Observation, observed: Observation) -> Top1:
    """Compare the best tokens of all steps with eager's, without the long target."""
    total = Top1()
    for ids, probes, best in zip(expected.probe_ids[:-1], expected.probes[:-1], observed.best[:-1], strict=True):
        own = np.where(ids[:, :BEST] == best[:, None], probes[:, :BEST], -np.inf).max(1)
        equal = ids[:, 0] == best
        total.steps += len(best)
        total.equal += int(equal.sum())
        total.near += int((~equal & (probes[:, 0] - own <= NEAR)).sum())
    return total


def _other_searches(runs: Sequence[tuple[str, Run]]) -> list[str]:
    """One line if the runtime's own search differs from ours; `runs`: by mode."""
    apart = [f"{mode}, {line}" for mode, run in runs for line in run.own_search]
    return [f"the runtime's own search differs from ours {len(apart)} times, the first: {apart[0]}"] if apart else []


def _compare_sizes(engine: Engine, judge: Judge, reference: Reference, report: EngineReport) -> list[tuple[str, Run]]:
    """Compare a wide beam with eager's, its equal rows with each other, and large batches with usual ones.

    `judge`: that of the invariance check. Adds ties and failures to the report. Returns the engine's runs by mode.
    """
    runs: list[tuple[str, Run]] = []
    sources, options, tolerance = reference.sources, reference.options, report.tolerance
    expected = reference.observed
    if expected.wide and (run := run_wide(engine, sources, options)):
        totals = Outputs(WIDE)
        runs.append((WIDE, run))
        against_eager = Judge(expected, report.scores_max, tolerance.scores, options.wide, end_ids(engine))
        ties, failures, _ = against_eager.compare(expected.wide, run, totals)
        report.sizes.append(totals)
        report.ties += ties if tolerance.tokens else []
        report.divergences += failures if tolerance.tokens else []
        report.rows_max = rows_apart(engine, sources, expected.runs["greedy"], options)
    for mode in ("greedy", "beam") if options.large_tokens else ():
        if mode not in expected.runs:
            continue
        usual, rounds = run_large(engine, sources, options, mode)
        runs.append((f"{mode} (large)", usual))
        totals, ties, failures = compare_large(judge, usual, rounds, mode)
        if totals.sentences:
            report.sizes.append(totals)
            report.ties += ties
            report.divergences += failures
    return runs


def _compare_defaults(engine: Engine, reference: Reference, report: EngineReport) -> list[tuple[str, Run]]:
    """Compare lines of text with the model's own options; adds ties and failures to the report."""
    expected = reference.defaults
    if not expected or not expected.lines:
        return []
    decoding, totals, run = decoding_of(expected, reference.options), Outputs(DEFAULTS), Run()
    if not decoding.sampling:  # sampling is compared elsewhere, with a seed
        run = run_defaults(engine, expected, reference.options)
    if run.outputs:
        ends = list(decoding.ends(engine.config.eos_id))
        judge = Judge(
            reference.observed, report.scores_max, report.tolerance.scores, decoding.beams, ends, decoding=decoding
        )
        ties, failures, _ = judge.compare(expected.run, run, totals)
        report.sizes.append(totals)
        report.ties += ties if report.tolerance.tokens else []
        report.divergences += failures if report.tolerance.tokens else []
    return [(DEFAULTS, run)]


RELATIVE = 2e-5
"""A number beyond 10, such as the score of an improbable token, may differ by a further share of itself: fp32 has 7
digits."""


def _compare_vocabulary(engine: Engine, reference: Reference) -> list[Entries]:
    """Every entry of both sides against eager's. Raises ArtifactError for a reference of other vocabularies."""
    expected, entries = reference.observed.vocabulary, []
    if expected is None:
        return []
    found = read_vocabulary(engine)
    for side in SIDES:
        ours, theirs = getattr(expected, side), getattr(found, side)
        if ours.shape != theirs.shape:
            raise ArtifactError(
                f"the reference has {len(ours)} {side} entries, the bundle {len(theirs)}: "
                "make the reference again with --save-reference"
            )
        apart = _entries_apart(ours, theirs)
        worst = int(np.where(np.isnan(apart), np.inf, apart).argmax())
        entries.append(Entries(side, len(ours), float(apart[worst]), worst))
    return entries


def _entries_apart(ours: Floats, theirs: Floats) -> Floats:
    """The largest differences along axis 1, minus what `RELATIVE` allows; NaN stays NaN."""
    apart = differences([ours], [theirs]).reshape(ours.shape)
    largest: Floats = (apart - RELATIVE * np.where(np.abs(ours) > 10, np.abs(ours), 0)).max(1)
    return largest


def eager_invariance(reference: Reference, eos_id: int, tolerance: Tolerance) -> tuple[list[Outputs], Cases]:
    """Compare eager with itself in other batches; returns also the cases that differ, for which no engine is blamed."""
    judge = Judge(reference.observed, 0.0, tolerance.scores, reference.options.beams, [eos_id])
    return _invariance(judge, reference.observed, reference.variants, set(), EngineReport("eager"))


def eager_rounding(reference: Reference, eager: Engine, make_exact: Callable[[], Engine]) -> Rounding:
    """Compare eager's outputs with the same in fp64, and its scores of random late rows, where errors have added up.

    eager: not entered, like the engine that `make_exact` returns. Of a module that does not run in fp64, zeros and the
    reason.
    """
    ours, sources, options = reference.observed, reference.sources, reference.options
    try:
        with eager, make_exact() as exact:
            found = observe_fed(exact, sources, options, ours)
            late = [_entries_apart(*pair) for pair in late_scores(eager, exact, sources, options)] if sources else []
    except Exception as error:  # a user's module may do anything
        return Rounding.failed(error)
    encoder = [np.zeros(0), *(differences(ours.encoder[i], arrays) for i, arrays in found.encoder.items())]
    scores = [differences(ours.probes, found.probes), *(apart.ravel() for apart in late)]
    if ours.vocabulary and found.vocabulary:
        encoder.append(_entries_apart(ours.vocabulary.source, found.vocabulary.source))
        scores.append(_entries_apart(ours.vocabulary.target, found.vocabulary.target))
    largest = (np.nan_to_num(np.concatenate(each), posinf=0.0).max(initial=0.0) for each in (encoder, scores))
    of_encoder, of_scores = map(float, largest)
    return Rounding(of_encoder, of_scores)


def _invariance(
    judge: Judge, base: Observation, variants: dict[str, dict[str, Run]], not_blamed: Cases, report: EngineReport
) -> tuple[list[Outputs], Cases]:
    """Compare runs in other batches with the usual ones; adds ties and failures to the report."""
    found: list[Outputs] = []
    failing: Cases = set()
    for variant, runs in variants.items():
        for mode, run in runs.items():
            totals = Outputs(mode, variant)
            ties, apart, off = judge.compare(base.runs[mode], run, totals)
            cases = {(variant, mode, i) for i in [*off, *(d.sentence for d in apart)]}
            totals.not_blamed = len(cases & not_blamed)
            totals.failed -= totals.not_blamed
            totals.hopeless = judge.count_hopeless(d for d in apart if (variant, mode, d.sentence) not in not_blamed)
            failing |= cases
            found.append(totals)
            report.ties += ties
            report.divergences += [d for d in apart if (variant, mode, d.sentence) not in not_blamed]
    return found, failing


def _failures(report: EngineReport, sentences: int, tolerance: Tolerance) -> list[str]:
    """One line for each failure. Comparisons are written so that NaN fails."""
    failures = [] if sentences else ["the corpus has no sentence"]
    if not report.encoder_max <= tolerance.encoder:
        failures.append(f"encoder outputs differ {beyond(report.encoder_max, tolerance.encoder, 'encoder')}")
    if report.attention_max is not None and not report.attention_max <= tolerance.encoder:
        failures.append(f"attention differs {beyond(report.attention_max, tolerance.encoder, 'encoder')}")
    if not report.scores_max <= tolerance.scores:
        failures.append(f"scores differ {beyond(report.scores_max, tolerance.scores, 'scores')}")
    for entries in report.vocabulary:
        name, compared = ("encoder", "encoder outputs") if entries.side == "source" else ("scores", "scores")
        if not entries.largest <= (limit := getattr(tolerance, name)):
            where = f"{entries.side} entry {entries.worst} of the vocabulary"
            failures.append(f"{where}: {compared} differ {beyond(entries.largest, limit, name)}")
    if not report.best_off <= SAME_SCORES:
        failures.append(
            f"scores of the best tokens differ from the step's own log-probabilities by {report.best_off:.2e}"
        )
    if report.top1.differ > allowed(1 - tolerance.top1, report.top1.steps):
        failures.append(
            f"best token: {report.top1.share:.2%} of {report.top1.steps:,} steps agree with eager's, "
            f"fewer than {tolerance.top1:.1%} (tolerance.top1)"
        )
    most, part_of = own_limit(tolerance), "scores" if tolerance.tokens else f"scores, {OWN_NOISE:.0%} of it"
    if not tolerance.tokens and not report.own_usual <= most:
        moves = beyond(report.own_usual, most, part_of)
        failures.append(f"own scores: half of them are others alone, or where sentences join, {moves}")
    if report.rows_max is not None and not report.rows_max <= most:
        failures.append(f"equal rows of a {WIDE} have scores that differ {beyond(report.rows_max, most, part_of)}")
    for kind in KINDS:
        wrong = [walk for walk in report.walks if walk.kind == kind and differs(walk, tolerance)]
        others = f"; so do those of {len(wrong) - 1} other widths" if len(wrong) > 1 else ""
        failures += [f"{walk}{others}" for walk in wrong[:1]]
    sizes = [totals for totals in report.sizes if totals.variant or tolerance.tokens]
    for totals in (*(report.outputs if tolerance.tokens else []), *report.invariance, *sizes):
        most = allowed(tolerance.unstable, totals.sentences)
        if totals.hopeless or totals.failed > most:
            name = f"{totals.mode} ({totals.variant})" if totals.variant else totals.mode
            apart = [d for d in report.divergences if (d.mode, d.variant) == (totals.mode, totals.variant)]
            apart.sort(key=lambda d: not tolerance.scores < d.margin < np.inf)  # first those that no share excuses
            first = f"the first: {describe_divergence(apart[0])}" if apart else f"scores by {totals.score_max:.2e}"
            limit = f", more than {most} (tolerance.unstable)" if tolerance.unstable and totals.failed > most else ""
            far = f", {totals.hopeless} by more than {tolerance.scores:g} (tolerance.scores)" if totals.hopeless else ""
            failures.append(f"{name}: {totals.failed} of {totals.sentences} sentences differ{limit}{far}, {first}")
    for totals in report.outputs if tolerance.tokens else ():
        if totals.mode in CAPPED and totals.ties > (most := allowed(tolerance.ties, totals.sentences)):
            failures.append(
                f"{totals.mode}: {totals.ties} of {totals.sentences} sentences are ties, more than {most}: "
                f"more than chance explains (tolerance.ties)"
            )
    return failures


def beyond(difference: float, limit: float, name: str) -> str:
    """The end of a failure: by how much a limit of `Tolerance` is exceeded."""
    return f"by {difference:.2e}, more than {limit:g} (tolerance.{name})"


def own_limit(tolerance: Tolerance) -> float:
    """Largest difference between an engine's own log-probabilities in other rows and batches."""
    return tolerance.scores * (1 if tolerance.tokens else OWN_NOISE)


def differs(walk: Walk, tolerance: Tolerance) -> bool:
    """Whether more rows of a walk differ than may, or one by more than `tolerance.scores`."""
    return walk.wrong > allowed(STAYS * tolerance.unstable, walk.rows) or not walk.largest <= tolerance.scores


def _worst_sentence(observed: Observation, expected: Observation) -> int:
    """The sentence whose scores or encoder outputs differ most."""
    worst, most = 0, -1.0
    for i, probes in enumerate(expected.probes[: len(expected.runs["greedy"].outputs)]):
        pairs = [*expected.encoder.get(i, []), probes], [*observed.encoder.get(i, []), observed.probes[i]]
        difference = float(differences(*pairs).max(initial=0.0))
        if worse(most, difference) is not most:
            worst, most = i, difference
    return worst
