"""Parity: an engine against eager PyTorch, sentence by sentence and step by step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .data import pad
from .decoding import DecodeOptions, Hypothesis, greedy
from .engines.base import Engine, Ints
from .recipe import Tolerance
from .translate import length_batches

BATCH_TOKENS = 1024


@dataclass
class Divergence:
    """The first step at which an engine chose another token than eager PyTorch."""

    sentence: int
    """Index in the corpus, from 0."""
    step: int
    """Index of the token, from 0."""
    eager_token: int
    engine_token: int
    eager_margin: float
    """Eager's log-probability of its own token minus that of the engine's."""


@dataclass
class Report:
    """What a check found. `failures` is empty where the engine passed."""

    engine: str
    sentences: int = 0
    tokens: int = 0
    """Tokens that eager PyTorch produced, eos included."""
    encoder_max: float = 0.0
    """Largest absolute difference of the encoder's outputs, padding left out."""
    scores_max: float = 0.0
    """Largest absolute difference of a log-probability, teacher-forced with eager's tokens."""
    scores_mean: float = 0.0
    equal: int = 0
    """Sentences whose greedy tokens are all equal."""
    ties: list[Divergence] = field(default_factory=list)
    """Sentences that differ where eager's margin is inside the measured error."""
    divergences: list[Divergence] = field(default_factory=list)
    """Sentences that differ without such an excuse."""
    tolerance: Tolerance = field(default_factory=Tolerance)
    failures: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether the engine may be called equal."""
        return not self.failures

    def to_json(self) -> dict[str, Any]:
        """All of it, for files and machines; a figure that is not finite becomes null."""
        fields = {"passed": self.passed, **dataclasses.asdict(self)}
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}

    def __str__(self) -> str:
        lines = [
            f"{self.engine} against eager PyTorch: {self.sentences} sentences, {self.tokens} tokens",
            f"  encoder outputs   max difference {self.encoder_max:.2e}   tolerance {self.tolerance.encoder:.0e}",
            f"  scores per step   max difference {self.scores_max:.2e}   tolerance {self.tolerance.scores:.0e}"
            f"   mean {self.scores_mean:.1e}",
            f"  greedy tokens     {self.equal} of {self.sentences} sentences equal, {len(self.ties)} ties",
        ]
        lines += [f"  tie: {_describe(tie)}" for tie in self.ties]
        lines += [f"  FAILED: {failure}" for failure in self.failures]
        return "\n".join([*lines, "passed" if self.passed else "failed"])


def _describe(found: Divergence) -> str:
    return (
        f"sentence {found.sentence + 1}, token {found.step + 1}: eager {found.eager_token}, "
        f"engine {found.engine_token}, eager's margin {found.eager_margin:.2e}"
    )


def check(
    engine: Engine,
    eager: Engine,
    name: str,
    sources: Sequence[Sequence[int]],
    tolerance: Tolerance,
    options: DecodeOptions,
    progress: Callable[[int], None] | None = None,
) -> Report:
    """Compare two entered engines over sources given as the ids that the encoder sees."""
    report = Report(name, tolerance=tolerance)
    total, count = 0.0, 0
    max_batch = min(engine.limits.batch, eager.limits.batch)
    options = dataclasses.replace(options, max_tokens=min(options.max_tokens, engine.limits.tgt_tokens))
    for indices in length_batches([len(ids) for ids in sources], BATCH_TOKENS, max_batch):
        src_ids = pad([np.array(sources[i], np.int32) for i in indices], eager.config.pad_id)
        lengths = np.array([len(sources[i]) for i in indices], np.int32)
        expected = greedy(eager, src_ids, lengths, options)
        found = greedy(engine, src_ids, lengths, options)
        forced = _Forced((eager, engine), src_ids, lengths, expected, found)
        report.encoder_max = _worse(report.encoder_max, forced.encoder_difference())
        for difference in forced.steps():
            report.scores_max = _worse(report.scores_max, float(difference.max()))
            total, count = total + float(difference.sum(dtype=np.float64)), count + difference.size
        report.sentences += len(indices)
        report.tokens += sum(len(_tokens(h, eager.config.eos_id)) for h in expected)
        divergences = [forced.first_divergence(row, i) for row, i in enumerate(indices)]
        report.divergences += [divergence for divergence in divergences if divergence]
        report.equal += divergences.count(None)
        if progress:
            progress(len(indices))
    report.scores_mean = total / count if count else 0.0
    return _judge(report)


def _judge(report: Report) -> Report:
    """Excuse ties, collect failures. Comparisons are written so that NaN fails."""
    # Two scores can each be off by the measured error, so their order is open within twice that.
    open_margin = 2 * min(report.scores_max, report.tolerance.scores)
    report.ties = [d for d in report.divergences if d.eager_margin <= open_margin]
    report.divergences = [d for d in report.divergences if not d.eager_margin <= open_margin]
    if not report.sentences:
        report.failures.append("the corpus has no sentence")
    if not report.encoder_max <= report.tolerance.encoder:
        report.failures.append(f"encoder outputs differ by {report.encoder_max:.2e}")
    if not report.scores_max <= report.tolerance.scores:
        report.failures.append(f"scores differ by {report.scores_max:.2e}")
    if report.divergences:
        first = min(report.divergences, key=lambda d: d.sentence)
        report.failures.append(f"{len(report.divergences)} sentences differ, the first: {_describe(first)}")
    return report


class _Forced:
    """One batch through both engines with eager's tokens, so that every step sees the same prefix."""

    def __init__(
        self,
        engines: tuple[Engine, Engine],
        src_ids: Ints,
        lengths: Ints,
        expected: list[Hypothesis],
        found: list[Hypothesis],
    ) -> None:
        eager, engine = engines
        self.eager, self.engine, self.lengths = eager, engine, lengths
        self.states = eager.encode(src_ids, lengths), engine.encode(src_ids, lengths)
        config = eager.config
        self.expected, self.found = ([_tokens(h, config.eos_id) for h in side] for side in (expected, found))
        targets = pad([np.array(ids, np.int32) for ids in self.expected], config.pad_id)
        bos = np.full((len(targets), 1), config.bos_id, np.int32)
        self.inputs = np.concatenate((bos, targets[:, :-1]), 1)
        self.margins: list[list[float]] = []
        """Of every step and row: eager's log-probability of its own token minus that of the engine's."""

    def encoder_difference(self) -> float:
        """Largest difference at a source position that is not padding."""
        pairs = zip(
            self.eager.cross_keys_values(self.states[0]), self.engine.cross_keys_values(self.states[1]), strict=True
        )
        largest = 0.0
        for ours, theirs in pairs:
            real = np.arange(ours.shape[2]) < self.lengths[:, None]  # (B, S)
            difference = np.abs(ours - theirs).transpose(0, 2, 1, 3)[real]
            largest = _worse(largest, float(difference.max()))
        return largest

    def steps(self) -> Any:
        """Yield the absolute differences (rows, V) of each step, rows that have ended left out."""
        sizes = np.array([len(ids) for ids in self.expected])
        for step in range(self.inputs.shape[1]):
            tokens = np.ascontiguousarray(self.inputs[:, step : step + 1])
            ours, theirs = (
                engine.step(tokens, state, full=True).log_probs
                for engine, state in zip((self.eager, self.engine), self.states, strict=True)
            )
            assert ours is not None and theirs is not None
            self.margins.append(
                [
                    float(ours[row, 0, a[step]] - ours[row, 0, b[step]]) if step < min(len(a), len(b)) else 0.0
                    for row, (a, b) in enumerate(zip(self.expected, self.found, strict=True))
                ]
            )
            alive = sizes > step
            yield np.abs(ours[alive, 0] - theirs[alive, 0])

    def first_divergence(self, row: int, sentence: int) -> Divergence | None:
        """Where the engine's own greedy tokens leave eager's, if they do. Both end with eos or at the same limit."""
        for step, (a, b) in enumerate(zip(self.expected[row], self.found[row], strict=False)):
            if a != b:
                return Divergence(sentence, step, a, b, self.margins[step][row])
        return None


def _tokens(hypothesis: Hypothesis, eos_id: int) -> list[int]:
    return [*hypothesis.ids, eos_id] if hypothesis.finished else hypothesis.ids


def _worse(a: float, b: float) -> float:
    """The larger difference; NaN counts as the largest."""
    return a if a != a or a >= b else b


def generated_sources(src_vocab: int, eos_id: int, longest: int) -> list[list[int]]:
    """Random sources of lengths 1 to `longest`, each once up to 16 and then ever farther apart; the same each time."""
    lengths = [n for n in range(1, longest + 1) if n <= 16 or n % 16 == 0 or n == longest]
    while len(lengths) > 48:
        lengths = lengths[:16] + lengths[16:-1:2] + lengths[-1:]
    rng = np.random.default_rng(0)
    return [[*rng.integers(min(4, src_vocab - 1), src_vocab, n - 1).tolist(), eos_id] for n in lengths]
