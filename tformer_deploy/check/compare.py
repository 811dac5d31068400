"""Decides whether two runs of a sentence are equal, a tie or different. Comparisons are written so that NaN fails."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..decoding import DecodeOptions, Hypothesis
from ..decoding.search import length_norm
from .observe import Observation, tokens_of
from .recording import Run, Trace
from .results import Divergence, Layer, Outputs, StepDifference

WIDE = "wide beam"
DEFAULTS = "defaults"
BEAM_MODES = ("beam", WIDE, DEFAULTS)
"""Modes whose candidates are sums of several steps."""


@dataclass(frozen=True)
class Judge:
    """Tells ties from failures."""

    reference: Observation
    """Eager's, or the engine's own: its greedy probes hold the margins of greedy decisions."""
    error: float
    """Largest difference of a log-probability that was measured."""
    tolerance: float
    """Largest difference of a log-probability that is allowed."""
    beams: int
    end_ids: list[int]
    hopeless: float = np.inf
    """A larger margin is a failure, whatever share of sentences may differ."""
    decoding: DecodeOptions = field(default_factory=DecodeOptions)
    """Options by which outputs are ranked."""

    def compare(self, ours: Run, theirs: Run, totals: Outputs) -> tuple[list[Divergence], list[Divergence], list[int]]:
        """Compare the sentences that both runs have, and fill in `totals`.

        Returns ties, failures, and the sentences whose outputs are equal but for their scores.
        """
        apart, off, totals.sentences = [], [], 0
        for i in sorted(theirs.outputs.keys() & ours.outputs.keys()):
            totals.sentences += 1
            mine, other = ours.outputs[i], theirs.outputs[i]
            if [(h.ids, h.end_id) for h in mine] != [(h.ids, h.end_id) for h in other]:
                apart.append(i)
                continue
            for a, b in zip(mine, other, strict=True):
                difference = abs(a.score - b.score)
                totals.score_max = worse(totals.score_max, difference)
                if not difference <= self.tolerance * max(1, len(tokens_of(a))) and i not in off:
                    off.append(i)
        totals.equal = totals.sentences - len(apart) - len(off)
        found = [self.first_difference(i, ours, theirs, totals) for i in apart]
        ties = [d for d in found if d.margin <= self.open_margin(d, totals)]
        failures = [d for d in found if not d.margin <= self.open_margin(d, totals)]
        totals.ties, totals.failed = len(ties), len(off) + len(failures)
        return ties, failures, off

    def count_hopeless(self, found: Iterable[Divergence]) -> int:
        """How many differ by more than any rounding explains; NaN does."""
        return sum(not d.margin <= self.hopeless and d.margin != np.inf for d in found)

    def open_margin(self, found: Divergence, totals: Outputs) -> float:
        """Largest margin of a tie: both numbers can be off by the measured error, so twice that."""
        if found.mode in BEAM_MODES:  # sums of several steps
            moved = found.moved if found.variant else 0.0
            return 2 * min(max(self.error, totals.score_max, moved), self.tolerance * (found.step + 1))
        measured = max(self.error, totals.score_max) if found.variant else self.error
        return 2 * min(measured, self.tolerance)

    def first_difference(self, i: int, ours: Run, theirs: Run, totals: Outputs) -> Divergence:
        """The first decision that differs, or else the first output that does."""
        a, b = ours.traces[i], theirs.traces[i]
        steps, width = (min(sizes) for sizes in zip(a.tokens.shape, b.tokens.shape, strict=True))
        apart = (a.parents[:steps, :width] != b.parents[:steps, :width]) | (
            a.tokens[:steps, :width] != b.tokens[:steps, :width]
        )
        if totals.mode in BEAM_MODES:
            for step, row in enumerate(apart):
                row[max(self.decisive(a, step), self.decisive(b, step)) :] = False
        places = np.argwhere(apart)[:1].tolist()
        if totals.mode == "sampling":  # samples do not depend on each other, so a tie of one excuses no other
            places = [(int(apart[:, n].argmax()), n) for n in np.flatnonzero(apart.any(0)).tolist()]
        if not places:
            return self.order(i, ours, theirs, totals)
        found = [self.at_step(i, ours, theirs, totals, (step, n)) for step, n in places]
        return max(found, key=lambda d: (d.margin != d.margin, d.margin))

    def at_step(self, i: int, ours: Run, theirs: Run, totals: Outputs, where: tuple[int, int]) -> Divergence:
        """The divergence of candidate n at a step."""
        (step, n), a, b, moved = where, ours.traces[i], theirs.traces[i], 0.0
        token, chosen = int(a.tokens[step, n]), int(b.tokens[step, n])
        if totals.mode in BEAM_MODES:
            mine, other = float(a.values[step, n]), float(b.values[step, n])
            same = np.flatnonzero((a.parents[step] == b.parents[step, n]) & (a.tokens[step] == chosen))
            below = same[same > n]  # above it, the engine has named a candidate twice
            margin = mine - float(a.values[step, below[0]]) if len(below) else np.inf
            moved = sums_apart(a, b, step)
        else:
            mine, other = (float(np.diff(t.values[: step + 1, n], prepend=0)[-1]) for t in (a, b))
            margin = float(a.margins[step, n]) if totals.mode == "sampling" else self.greedy_margin(i, step, a, chosen)
        return Divergence(i, totals.mode, totals.variant, step, token, chosen, mine, other, margin, moved)

    def greedy_margin(self, i: int, step: int, ours: Trace, chosen: int) -> float:
        """How far apart eager has its own token and the engine's."""
        expected = tokens_of(self.reference.runs["greedy"].outputs[i][0])
        token = int(ours.tokens[step, 0])
        ids = self.reference.probe_ids[i]
        if step < len(ids) and ours.tokens[:step, 0].tolist() == expected[:step]:
            scores = dict(zip(ids[step].tolist(), self.reference.probes[i][step].tolist(), strict=True))
            if token in scores and chosen in scores:
                return abs(float(scores[token] - scores[chosen]))
        return np.inf

    def decisive(self, trace: Trace, step: int) -> int:
        """How many of a step's candidates matter: up to the last one that becomes a row."""
        return max(self.beams, int(self.live(trace, step)[-1:].max(initial=-1)) + 1)

    def live(self, trace: Trace, step: int) -> np.ndarray:
        """The candidates of a step that become rows of the next."""
        goes_on = (trace.values[step] > -np.inf) & ~np.isin(trace.tokens[step], self.end_ids)
        return np.flatnonzero(goes_on)[: self.beams]

    def rows(self, trace: Trace, step: int, mode: str) -> list[list[int]]:
        """The tokens of every row that a search had before a step."""
        if mode == "sampling":  # sample n is row n
            ended = np.isin(trace.tokens[:step], (-1, *self.end_ids)).any(0)
            return [column.tolist() for column in trace.tokens[:step].T[~ended]]
        found: list[list[int]] = [[]]
        for s in range(min(step, len(trace.tokens))):
            found = [[*found[trace.parents[s, n]], int(trace.tokens[s, n])] for n in self.live(trace, s)]
        return found

    def order(self, i: int, ours: Run, theirs: Run, totals: Outputs) -> Divergence:
        """Outputs of the same decisions in another order, or one that is ranked just below the last."""
        for place, (a, b) in enumerate(zip(ours.outputs[i], theirs.outputs[i], strict=False)):
            if (a.ids, a.end_id) != (b.ids, b.end_id):
                margin = abs(a.value - self.value_of(ours.traces[i], b))
                first, second = (tokens_of(h)[-1] if tokens_of(h) else -1 for h in (a, b))
                return Divergence(i, totals.mode, totals.variant, place, first, second, a.value, b.value, margin)
        return Divergence(i, totals.mode, totals.variant, 0, -1, -1, np.nan, np.nan, np.inf)

    def value_of(self, trace: Trace, output: Hypothesis) -> float:
        """What an output is worth to a beam that had it among its candidates, kept or not; else -inf."""
        row, tokens = 0, tokens_of(output)
        for step, token in enumerate(tokens[: len(trace.tokens)]):
            here = np.flatnonzero((trace.parents[step] == row) & (trace.tokens[step] == token))[:1]
            if step + 1 == len(tokens) and len(here):
                return float(trace.values[step, here[0]]) / length_norm(len(tokens), self.decoding)
            rows = np.flatnonzero(np.isin(self.live(trace, step), here))
            if not len(rows):
                break
            row = int(rows[0])
        return -np.inf


def sums_apart(a: Trace, b: Trace, step: int) -> float:
    """How far two searches have the sums of the same candidates in the same places apart, up to a step."""
    parts = [[getattr(t, name)[: step + 1] for name in ("parents", "tokens", "values")] for t in (a, b)]
    width = min(values.shape[1] for *_, values in parts)
    (parents, tokens, ours), (other, chosen, theirs) = ([part[:, :width] for part in side] for side in parts)
    same = (parents == other) & (tokens == chosen) & (tokens >= 0)
    return float(differences([ours[same]], [theirs[same]]).max(initial=0.0))


def differences(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> np.ndarray:
    """All absolute differences, flat. Equal numbers, infinite ones too, do not differ."""
    if not ours:
        return np.zeros(0)
    a, b = (np.concatenate([x.ravel() for x in side]).astype(np.float64) for side in (ours, theirs))
    with np.errstate(invalid="ignore"):
        return np.where(a == b, 0.0, np.abs(a - b))


def relative(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Differences relative to eager's value plus the layer's median, so that single large values hide nothing."""
    size = np.abs(ours).astype(np.float64)
    unit = size + max(float(np.median(size)), np.finfo(np.float32).tiny)
    with np.errstate(invalid="ignore"):
        apart: np.ndarray = differences([ours], [theirs]).reshape(ours.shape) / unit
    return apart


def by_step(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> list[StepDifference]:
    """Differences of probes (T, M) of every sentence, position by position."""
    found = []
    for step in range(max(map(len, ours), default=0)):
        here = [i for i, probe in enumerate(ours) if len(probe) > step]
        values = differences([ours[i][step] for i in here], [theirs[i][step] for i in here])
        found.append(StepDifference(float(values.max()), float(values.mean()), len(here)))
    return found


def by_layer(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> list[Layer]:
    """Differences of the layers that both engines return, in the order of computation."""
    found = []
    for name in (name for name in ours if name in theirs):
        apart = differences([ours[name]], [theirs[name]])
        noise = float(np.sqrt(np.square(apart).mean()))
        found.append(Layer(name, float(apart.max()), float(np.abs(ours[name]).max()), noise))
    return found


def worse(a: float, b: float) -> float:
    """The larger difference; NaN counts as the largest."""
    return a if a != a or a >= b else b
