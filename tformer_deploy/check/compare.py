"""Decides whether two runs of a sentence are the same, a tie, or apart. Comparisons are written so that NaN fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..decoding import Hypothesis
from .observe import Observation, Run, Trace, tokens_of
from .report import Divergence, Layer, Outputs, StepDifference


@dataclass(frozen=True)
class Judge:
    """What is needed to tell a tie from a failure."""

    reference: Observation
    """Eager's, whose greedy probes hold the margins of greedy decisions."""
    error: float
    """Largest difference of a log-probability that was measured."""
    tolerance: float
    """Largest difference of a log-probability that is allowed."""
    beams: int
    end_ids: tuple[int, ...]

    def compare(self, ours: Run, theirs: Run, totals: Outputs) -> tuple[list[Divergence], list[Divergence]]:
        """Compare the sentences that both runs have; fills in `totals`, returns ties and failures."""
        apart, totals.sentences = [], 0
        for i in sorted(theirs.outputs.keys() & ours.outputs.keys()):
            totals.sentences += 1
            mine, other = ours.outputs[i], theirs.outputs[i]
            if [(h.ids, h.end_id) for h in mine] != [(h.ids, h.end_id) for h in other]:
                apart.append(i)
                continue
            differences = [abs(a.score - b.score) for a, b in zip(mine, other, strict=True)]
            totals.score_max = worse(totals.score_max, max(differences))
            allowed = [self.tolerance * max(1, len(tokens_of(h))) for h in mine]
            if not all(d <= limit for d, limit in zip(differences, allowed, strict=True)):
                totals.failed += 1
        totals.equal = totals.sentences - len(apart) - totals.failed
        found = [self.first_difference(i, ours, theirs, totals) for i in apart]
        ties = [d for d in found if d.margin <= self.open_margin(d, totals)]
        failures = [d for d in found if not d.margin <= self.open_margin(d, totals)]
        totals.ties, totals.failed = len(ties), totals.failed + len(failures)
        return ties, failures

    def open_margin(self, found: Divergence, totals: Outputs) -> float:
        """Two numbers can each be off by the measured error, so their order is open within twice that."""
        if found.mode == "beam":  # sums of several steps
            return 2 * min(max(self.error, totals.score_max), self.tolerance * (found.step + 1))
        measured = max(self.error, totals.score_max) if found.variant else self.error
        return 2 * min(measured, self.tolerance)

    def first_difference(self, i: int, ours: Run, theirs: Run, totals: Outputs) -> Divergence:
        """Where the decisions of a sentence part, or else the order of its outputs."""
        a, b = ours.traces[i], theirs.traces[i]
        for step in range(min(len(a.tokens), len(b.tokens))):
            count = max(self.decisive(a, step), self.decisive(b, step)) if totals.mode == "beam" else a.tokens.shape[1]
            for n in range(min(count, a.tokens.shape[1], b.tokens.shape[1])):
                if (a.parents[step, n], a.tokens[step, n]) != (b.parents[step, n], b.tokens[step, n]):
                    return self.at_step(i, ours, theirs, totals, (step, n))
        return _order(i, ours.outputs[i], theirs.outputs[i], totals)

    def at_step(self, i: int, ours: Run, theirs: Run, totals: Outputs, where: tuple[int, int]) -> Divergence:
        """The divergence of candidate n at a step."""
        (step, n), a, b = where, ours.traces[i], theirs.traces[i]
        token, chosen = int(a.tokens[step, n]), int(b.tokens[step, n])
        mine, other = float(a.values[step, n]), float(b.values[step, n])
        if totals.mode == "sampling":
            margin = float(a.margins[step, n])
        elif totals.mode == "greedy":
            mine, margin = self.greedy_margin(i, step, a, chosen)
        else:
            same = np.flatnonzero((a.parents[step] == b.parents[step, n]) & (a.tokens[step] == chosen))
            margin = mine - float(a.values[step, same[0]]) if len(same) else np.inf
        return Divergence(i, totals.mode, totals.variant, step, token, chosen, mine, other, margin)

    def greedy_margin(self, i: int, step: int, ours: Trace, chosen: int) -> tuple[float, float]:
        """Eager's log-probability of its own token, and how much less it gives the engine's."""
        expected = tokens_of(self.reference.runs["greedy"].outputs[i][0])
        token = int(ours.tokens[step, 0])
        ids = self.reference.probe_ids[i]
        if step < len(ids) and ours.tokens[:step, 0].tolist() == expected[:step]:
            scores = dict(zip(ids[step].tolist(), self.reference.probes[i][step].tolist(), strict=True))
            if token in scores and chosen in scores:
                return scores[token], scores[token] - scores[chosen]
        return float(ours.values[step, 0]), np.inf

    def decisive(self, trace: Trace, step: int) -> int:
        """How many of a step's candidates decide anything: as far as the last that becomes a live row."""
        goes_on = np.flatnonzero((trace.values[step] > -np.inf) & ~np.isin(trace.tokens[step], self.end_ids))
        return max(self.beams, int(goes_on[: self.beams][-1]) + 1 if len(goes_on) else 0)


def _order(i: int, ours: list[Hypothesis], theirs: list[Hypothesis], totals: Outputs) -> Divergence:
    """Outputs of the same decisions in another order."""
    for place, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if (a.ids, a.end_id) != (b.ids, b.end_id):
            same = [h for h in ours if (h.ids, h.end_id) == (b.ids, b.end_id)]
            margin = a.value - same[0].value if same else np.inf
            first, second = (tokens_of(h)[-1] if tokens_of(h) else -1 for h in (a, b))
            return Divergence(i, totals.mode, totals.variant, place, first, second, a.value, b.value, margin)
    return Divergence(i, totals.mode, totals.variant, 0, -1, -1, np.nan, np.nan, np.inf)


def differences(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> np.ndarray:
    """All absolute differences, flat. What both have as the same number, infinite too, does not differ."""
    if not ours:
        return np.zeros(0)
    a, b = (np.concatenate([x.ravel() for x in side]).astype(np.float64) for side in (ours, theirs))
    with np.errstate(invalid="ignore"):
        return np.where(a == b, 0.0, np.abs(a - b))


def by_step(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> list[StepDifference]:
    """Differences of probes (T, M) of every sentence, position by position."""
    found = []
    for step in range(max(map(len, ours), default=0)):
        here = [i for i, probe in enumerate(ours) if len(probe) > step]
        values = differences([ours[i][step] for i in here], [theirs[i][step] for i in here])
        found.append(StepDifference(float(values.max()), float(values.mean()), len(here)))
    return found


def by_layer(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> list[Layer]:
    """Differences of the layers that both engines show, in the order of computation."""
    return [
        Layer(name, float(differences([ours[name]], [theirs[name]]).max()), float(np.abs(ours[name]).max()))
        for name in ours
        if name in theirs
    ]


def worse(a: float, b: float) -> float:
    """The larger difference; NaN counts as the largest."""
    return a if a != a or a >= b else b
