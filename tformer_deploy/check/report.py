"""The report of a check, as data and as text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..bundle.recipe import Tolerance
from .results import KINDS, WIDTHS, Constants, Divergence, Entries, Layer, Memory, Outputs, StepDifference, Top1, Walk
from .rounding import Rounding, Unrounded

TIES_SHOWN = 5
"""Ties of each kind that the text lists."""
CONFIDENCE = 0.95
"""Probability that a rare fault shows."""
SHARES = ("unstable", "ties", "top1")
"""Limits that are printed in percent."""
LOSSY = (
    "                    may differ: rounded weights are another model, and a draw follows its smallest change; "
    "what decides are scores, best tokens and the batches below"
)
NAMES_SHOWN = 3
"""Constants that text and page name; `--json` has all."""


@dataclass
class EngineReport:
    """One engine compared with eager PyTorch."""

    engine: str
    precision: str = "fp32"
    tolerance: Tolerance = field(default_factory=Tolerance)
    loosened: list[str] = field(default_factory=list)
    """Limits of the recipe that are wider than the defaults of the precision."""
    encoder_max: float = 0.0
    """Largest absolute difference of the encoder's outputs, padding left out."""
    encoder_sentences: int = 0
    attention_max: float | None = None
    """Largest absolute difference of an attention weight, if the graph returns them."""
    memory: Memory | None = None
    """If the engine has a graph for the encoder alone."""
    scores_max: float = 0.0
    """Largest absolute difference of a log-probability under teacher forcing."""
    scores_mean: float = 0.0
    scores_p999: float = 0.0
    """99.9th percentile."""
    scores_count: int = 0
    top1: Top1 = field(default_factory=Top1)
    best_off: float = 0.0
    """Largest difference between the scores of a step's best tokens and its log-probabilities."""
    own_noise: float = 0.0
    """Of a lossy variant: largest change of its own log-probabilities between batches."""
    own_usual: float = 0.0
    """Median of those changes under teacher forcing."""
    steps: list[StepDifference] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)
    late_layers: list[Layer] = field(default_factory=list)
    """`LATE_LAYERS` of a variant with limits for layers, at every position."""
    constants: Constants | None = None
    """If the engine runs graphs or programs."""
    unrounded: Unrounded | None = None
    """If the variant is quantized or bf16."""
    outputs: list[Outputs] = field(default_factory=list)
    invariance: list[Outputs] = field(default_factory=list)
    sizes: list[Outputs] = field(default_factory=list)
    """A wide beam compared with eager's, and rows of the largest batches compared with the engine's usual ones."""
    rows_max: float | None = None
    """Largest difference between equal rows of a wide beam."""
    walks: list[Walk] = field(default_factory=list)
    vocabulary: list[Entries] = field(default_factory=list)
    ties: list[Divergence] = field(default_factory=list)
    divergences: list[Divergence] = field(default_factory=list)
    """Differences that are no ties."""
    quality: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    """Mode, then `eager` or `engine`, then measure; only with reference translations."""
    worst_sentence: int = 0
    """The sentence whose scores or encoder outputs differ most."""
    blame: str = ""
    """The first difference from eager, by sentence, token and layer; only if the engine failed."""
    failures: list[str] = field(default_factory=list)
    """One line each; empty: the engine passed."""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return not self.failures


@dataclass
class Report:
    """The check of one or several engines over one corpus."""

    sentences: int
    tokens: int
    """Tokens of eager's greedy outputs, end tokens included."""
    corpus: str
    weights_sha256: str
    options: dict[str, Any]
    reference: dict[str, str]
    """Machine and versions of eager PyTorch's run."""
    machine: dict[str, str]
    """Machine and versions of the engines' run."""
    rounding: Rounding | None = None
    """Eager's own rounding error, if it was measured."""
    shortlist: str = ""
    """File of the shortlists that both sides use; empty: none."""
    calibration: str = ""
    """Text for calibration, and text left for the check; only in an export."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Variant that an export left out → one line: why, and what to do."""
    notes: list[str] = field(default_factory=list)
    """Lines about the engines that a reader should know."""
    eager_invariance: list[Outputs] = field(default_factory=list)
    engines: list[EngineReport] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every engine passed, and there was one."""
        return bool(self.engines) and all(engine.passed for engine in self.engines)

    @property
    def noticed(self) -> str:
        """How rare a fault is that the check still shows: 1 of n sentences has it, of which 3n are enough (95 %)."""
        rate = int(self.sentences / -math.log(1 - CONFIDENCE))
        return f"; a fault in 1 of {rate:,} sentences shows with {CONFIDENCE:.0%}" if rate > 1 else ""

    @property
    def failures(self) -> list[str]:
        """Of all engines."""
        return [f"{engine.engine}: {failure}" for engine in self.engines for failure in engine.failures]

    def to_json(self) -> dict[str, Any]:
        """As JSON; NaN and infinity become null."""
        fields = dataclasses.asdict(self)
        for engine, values in zip(self.engines, fields["engines"], strict=True):
            values["passed"] = engine.passed
        return {"passed": self.passed, **_finite(fields)}

    def __str__(self) -> str:
        lines = [
            f"{self.corpus}: {self.sentences:,} sentences, {self.tokens:,} tokens of eager PyTorch{self.noticed}",
            "options: " + ", ".join(f"{name} {value}" for name, value in self.options.items()),
        ]
        if not self.options:
            lines = [f"{self.corpus}: {self.sentences} sentences, for an encoder alone"]
        if self.rounding:
            lines.append(str(self.rounding))
        if self.shortlist:
            lines.append(f"with {self.shortlist}: both sides score what it allows each sentence")
        if self.calibration:
            lines.append(self.calibration)
        lines += self.notes
        if self.options.get("beams") == 1:
            lines.append("NOTE: with a beam of 1, beam search is not compared")
        if differs := [found for found in self.eager_invariance if found.failed]:
            worst = max(differs, key=lambda found: found.failed)
            lines.append(
                f"NOTE: eager PyTorch itself differs between batches ({worst.variant}, {worst.mode}: {worst.failed} of "
                f"{worst.sentences} sentences); no engine is blamed for those"
            )
        for engine in self.engines:
            lines += _describe(engine)
        return "\n".join(lines)


def _encoder_alone(report: EngineReport) -> list[str]:
    assert report.memory
    return [
        f"{report.engine}, {report.precision}, against eager PyTorch, in pairs and in large batches, padded",
        f"  limits            memory {report.tolerance.memory:.0e}",
        _memory(report.memory),
        *_constants(report),
        *(f"  FAILED: {failure}" for failure in report.failures),
        "passed" if report.passed else "failed",
    ]


def _memory(found: Memory) -> str:
    return (
        f"  memory            max difference {found.largest:.2e}   {found.sentences} sentences, "
        f"cosine of their means at least {found.cosine:.7f}"
    )


def _describe(report: EngineReport) -> list[str]:
    if report.memory and not report.outputs:
        return _encoder_alone(report)
    lines = [
        f"{report.engine}, {report.precision}, against eager PyTorch",
        f"  limits            {_limits(report)}",
        *_fed(report),
        *_constants(report),
        *_decoded(report),
        *_walks(report.walks),
        *_quality(report),
        *_ties(report.ties),
        *(f"  FAILED: {failure}" for failure in report.failures),
    ]
    if report.blame:
        lines.append(f"  FIRST DIFFERENCE: {report.blame}")
    return [*lines, "passed" if report.passed else "failed"]


def _fed(report: EngineReport) -> list[str]:
    """Encoder outputs, and scores under teacher forcing."""
    top1 = report.top1
    lines = [
        f"  encoder outputs   max difference {report.encoder_max:.2e}   {report.encoder_sentences} sentences",
        f"  scores per step   max difference {report.scores_max:.2e}   mean {report.scores_mean:.1e}"
        f"   99.9 % {report.scores_p999:.1e}   {report.scores_count:,} values of {len(report.steps)} positions",
        f"  best token        {top1.equal:,} of {top1.steps:,} steps eager's, {top1.near:,} as good, {top1.differ:,} "
        f"differ: {top1.share:.2%} agree",
    ]
    if not report.tolerance.tokens:
        lines.append(
            f"  own scores        in other batches within {report.own_noise:.2e}, half of them within "
            f"{report.own_usual:.1e}"
        )
    for entries in report.vocabulary:
        lines.append(
            f"  {entries.side} entries    max difference {entries.largest:.2e}   {entries.count:,}, each fed once"
        )
    if report.attention_max is not None:
        lines.append(f"  attention         max difference {report.attention_max:.2e}")
    if report.memory:
        lines.append(_memory(report.memory))
    if limited := [layer for layer in (*report.layers, *report.late_layers) if layer.limit is not None]:
        share = max((layer.noise / layer.limit for layer in limited if layer.limit), default=0.0)
        lines.append(f"  layers            {len(limited)} with a limit from calibration, at most {share:.0%} of it")
    return lines


def _constants(report: EngineReport) -> list[str]:
    lines = [f"  constants         {describe_constants(report.constants)}"] if report.constants else []
    return [*lines, *([f"  without rounding  {report.unrounded}"] if report.unrounded else [])]


def _decoded(report: EngineReport) -> list[str]:
    """Outputs of each mode, in other batches, and of other sizes."""
    lines = [
        f"  {outputs.mode:<17} {outputs.equal} of {outputs.sentences} sentences equal, {outputs.ties} ties"
        f", {outputs.failed} differ   scores within {outputs.score_max:.1e}"
        for outputs in report.outputs
    ]
    if not report.tolerance.tokens and report.outputs:
        lines.append(LOSSY)
    for outputs in report.invariance:
        name = f"{outputs.variant}, {outputs.mode}"
        unblamed = f", {outputs.not_blamed} where eager differs too" if outputs.not_blamed else ""
        lines.append(f"  {name:<22} {outputs.equal} of {outputs.sentences} the same, {outputs.ties} ties{unblamed}")
    for outputs in report.sizes:
        name, equal = (
            (f"{outputs.variant}, {outputs.mode}", "rows the same") if outputs.variant else (outputs.mode, "equal")
        )
        counts = f"{outputs.equal} of {outputs.sentences} {equal}, {outputs.ties} ties, {outputs.failed} differ"
        lines.append(f"  {name:<22} {counts}")
    if report.rows_max is not None:
        lines.append(f"  equal rows of a beam   within {report.rows_max:.1e}")
    return lines


def _quality(report: EngineReport) -> list[str]:
    return [
        f"  {mode} {measure}: eager {eager:.2f}, engine {engine:.2f}, difference {engine - eager:+.2f}"
        for mode, sides in report.quality.items()
        for measure, eager in sides["eager"].items()
        for engine in [sides["engine"][measure]]
    ]


def _walks(walks: list[Walk]) -> list[str]:
    """A line for each kind of walk: its rows compared with the same rows alone."""
    lines = []
    for kind in KINDS:
        if found := [walk for walk in walks if walk.kind == kind]:
            rows, steps = sum(walk.rows for walk in found), max(walk.steps for walk in found)
            widths = sorted(walk.width for walk in found)
            extent = {WIDTHS: f"{len(widths)} from {widths[0]} to {widths[-1]} beams"}.get(kind, f"{steps} tokens")
            largest = max((walk.largest for walk in found), key=lambda off: (off != off, off))
            lines.append(f"  {kind:<22} {extent}, {rows:,} rows as alone within {largest:.1e}")
    return lines


def describe_constants(found: Constants) -> str:
    """How many constants are equal to the checkpoint's, and how many are of other origin."""
    if found.skipped:
        return f"not compared: {found.skipped}"
    texts = [f"{found.equal:,} of {found.compared:,} equal to the checkpoint's"]
    if found.unknown:
        shown = ", ".join(found.unknown[:NAMES_SHOWN]) + (" and others" if len(found.unknown) > NAMES_SHOWN else "")
        texts.append(f"{len(found.unknown):,} of other origin ({shown})")
    return "; ".join(texts)


def _ties(ties: list[Divergence]) -> list[str]:
    groups: dict[tuple[str, str], list[Divergence]] = {}
    for tie in ties:
        groups.setdefault((tie.mode, tie.variant), []).append(tie)
    lines = [f"  tie: {describe_divergence(tie)}" for group in groups.values() for tie in group[:TIES_SHOWN]]
    hidden = sum(max(0, len(group) - TIES_SHOWN) for group in groups.values())
    return [*lines, *([f"  {hidden} further ties: --json and --html list all"] if hidden else [])]


def _limits(report: EngineReport) -> str:
    texts = []
    for name, limit in dataclasses.asdict(report.tolerance).items():
        if (name == "unstable" and not limit) or (name == "ties" and not report.tolerance.tokens):
            continue
        if name == "memory" and not report.memory:
            continue
        value = ("equal" if limit else "may differ") if isinstance(limit, bool) else f"{limit:.0e}"
        value = f"{100 * limit:g} %" if name in SHARES else value
        texts.append(f"{name} {value}" + (" (LOOSENED)" if name in report.loosened else ""))
    return ", ".join(texts)


def describe_divergence(found: Divergence) -> str:
    """One line."""
    where = f"{found.mode}, {found.variant}" if found.variant else found.mode
    own = "the engine in its usual batch" if found.variant else "eager"
    return (
        f"{where}: sentence {found.sentence + 1}, token {found.step + 1}: {own} {found.eager_token} "
        f"({found.eager_score:.6f}), engine {found.engine_token} ({found.engine_score:.6f}), margin {found.margin:.2e}"
    )


def _finite(value: Any) -> Any:
    replace: dict[type, Callable[[Any], Any]] = {
        dict: lambda v: {key: _finite(item) for key, item in v.items()},
        list: lambda v: [_finite(item) for item in v],
        float: lambda v: v if math.isfinite(v) else None,
    }
    return replace.get(type(value), lambda v: v)(value)
