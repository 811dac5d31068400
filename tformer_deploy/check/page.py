"""The report of a check as an HTML page."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from datetime import datetime

from ..base.pages.page import Cell, Row, Table, counted, limit_text, render_page, short_number
from .figures import layer_plot, step_plot
from .observe import JOINED, REBATCHED
from .parity import NEAR, differs
from .report import EngineReport, Report, describe_constants
from .results import KINDS, Divergence, Outputs
from .shares import allowed

MAX_ROWS, SHOWN_ROWS = 200, 20
"""Of a table of divergences; of those, rows that are not folded away."""
BATCHES = {**REBATCHED, JOINED: "joining others on their way"}
EXPLAINED = (
    "Sentences and tokens count from 1. Expected: eager's token id; in another batch, the engine's own in its usual "
    "one. Margin ∞: the choice was not among the candidates."
)


def check_page(report: Report, bundle: str = "") -> str:
    """The whole page, of today."""
    engines = [
        {
            "report": engine,
            "limits": limits(engine),
            "found": " · ".join(outline(engine)),
            "tables": [*tables(engine, report.eager_invariance)],
            "layers": layer_plot(engine) if engine.layers else "",
            "bounds": [limit_text(limit) for limit in (engine.tolerance.encoder, engine.tolerance.scores)],
            "steps": step_plot(engine.steps, engine.tolerance.scores) if engine.steps else "",
            "step_values": step_values(engine),
            "ends": [
                divergences("Divergences", engine.divergences, SHOWN_ROWS, lossy=not engine.tolerance.tokens),
                divergences("Ties", engine.ties, 0),
            ],
        }
        for engine in report.engines
    ]
    names = dict.fromkeys((*report.reference, *report.machine))
    machines = [(name, report.reference.get(name, "-"), report.machine.get(name, "-")) for name in names]
    about = Table(
        "Machines and versions", ("", "Eager PyTorch", "Engines"), machines, [] if machines else ["Not known."]
    )
    restricted = f"With {report.shortlist}: both sides score what it allows each sentence." if report.shortlist else ""
    rounding = f"{report.rounding}." if report.rounding else ""
    noticed = f"{report.noticed.removeprefix('; ').capitalize()}." if report.noticed else ""
    notes = [note for note in (noticed, restricted, report.calibration, rounding, *report.notes) if note]
    return render_page(
        "check.html",
        report=report,
        engines=engines,
        summary=summary(report),
        about=about,
        notes=notes,
        headline=" · ".join(map(outcome, report.engines)),
        bundle=bundle,
        date=datetime.now().astimezone().date().isoformat(),
    )


def outcome(engine: EngineReport) -> str:
    """An engine in a few words: its BLEU beside eager's, if measured, or how many outputs are equal."""
    for mode, sides in engine.quality.items():
        if "BLEU" in sides.get("eager", {}) and "BLEU" in sides.get("engine", {}):
            return f"{engine.engine}: BLEU {sides['engine']['BLEU'] - sides['eager']['BLEU']:+.2f} ({mode})"
    found = next(iter(engine.outputs), None)
    return f"{engine.engine}: {share(found)} {found.mode} outputs equal" if found else engine.engine


def limits(engine: EngineReport) -> Iterator[tuple[str, bool]]:
    """Each limit in words, and whether it is wider than the default of the precision."""
    for name, value in dataclasses.asdict(engine.tolerance).items():
        if isinstance(value, bool):
            yield f"{name} equal" if value else f"{name} may differ", name in engine.loosened
        elif value and (name != "bleu" or engine.quality) and (name != "memory" or engine.memory):
            yield f"{name} {limit_text(value)}", name in engine.loosened


def outline(engine: EngineReport) -> Iterator[str]:
    """An engine's figures in a line."""
    yield from (f"{found.mode} {share(found)}" for found in engine.outputs)
    if engine.scores_count:
        yield f"scores within {short_number(engine.scores_max)}"
    yield f"{engine.seconds:,.1f} s"


def summary(report: Report) -> Table:
    """A row for each engine."""
    modes = dict.fromkeys(o.mode for engine in report.engines for o in engine.outputs)
    rows: list[Row] = []
    for n, engine in enumerate(report.engines, 1):
        outputs, limit = {o.mode: o for o in engine.outputs}, engine.tolerance
        unstable = any(failed(engine, found) for found in engine.invariance)
        rows.append(
            (
                Cell(engine.engine, link=f"#engine-{n}"),
                Cell("", badge="good" if engine.passed else "bad"),
                engine.precision,
                over(
                    engine.encoder_max,
                    limit.encoder,
                    engine.encoder_sentences,
                    f"limit\u00a0{limit_text(limit.encoder)}",
                ),
                over(engine.scores_max, limit.scores, engine.scores_count, f"limit\u00a0{limit_text(limit.scores)}"),
                *(equal(engine, outputs.get(mode)) for mode in modes),
                Cell(f"{sum(found.failed for found in engine.invariance):,}", unstable),
            )
        )
    return Table("", ("Engine", "", "Precision", "Encoder max", "Scores max", *modes, "Differ by batch"), rows)


def tables(engine: EngineReport, eager: Sequence[Outputs]) -> Iterator[Table]:
    """A table for each kind of comparison."""
    head: tuple[str, ...] = ("Absolute difference", "Max", "99.9 %", "Mean", "Limit", "Max / limit", "Over")
    yield Table("Scores and encoder outputs", head, [*difference_rows(engine)])
    if engine.top1.steps:
        steps = (engine.top1.steps, engine.top1.equal, engine.top1.near, engine.top1.differ)
        few = engine.top1.differ > allowed(1 - engine.tolerance.top1, engine.top1.steps)
        agree = Cell(f"{engine.top1.share:.2%}", few, [f"at least {engine.tolerance.top1:.2%}"])
        note = f"As good: another token, which eager scores within {NEAR} of its best."
        row: Row = ("Best token, teacher forcing", *(f"{count:,}" for count in steps), agree)
        yield Table("Decisions", ("", "Steps", "Equal", "As good", "Differ", "Agree"), [row], [note])
    if engine.constants:
        yield Table("Constants", notes=[describe_constants(engine.constants)])
    if engine.unrounded:
        yield Table("Without rounding", notes=[str(engine.unrounded)])
    head = ("Mode", "Sentences", "Equal", "Ties", "Failed" if engine.tolerance.tokens else "Differ")
    rows = [(*counts(engine, o.mode, o), short_number(o.score_max)) for o in engine.outputs]
    none = [] if rows else ["No output was compared."]
    yield Table("Outputs", (*head, "Largest score difference"), rows, none)
    yield invariance(engine, eager)
    if engine.sizes:
        note = f"Equal rows of a wide beam have scores within {short_number(engine.rows_max or 0.0)} of each other."
        named = {o.mode + (", as many sentences as fit" if o.variant else ", beside eager"): o for o in engine.sizes}
        sizes = [counts(engine, name, o) for name, o in named.items()]
        notes = [note] if engine.rows_max is not None else []
        yield Table("Wide beams and large batches", ("", "Compared", "Equal", "Ties", "Differ"), sizes, notes)
    if engine.walks:
        yield Table(
            "Rows that were fed given tokens",
            ("", "Tokens", "Rows", "Differ", "Largest", "Limit"),
            [*walk_rows(engine)],
        )
    if engine.quality:
        quality = [
            (f"{mode} {measure}", f"{eager:.2f}", f"{own:.2f}", f"{own - eager:+.2f}")
            for mode, sides in engine.quality.items()
            for measure, eager in sides.get("eager", {}).items()
            for own in [sides.get("engine", {}).get(measure, math.nan)]
        ]
        yield Table("Quality", ("", "Eager", "Engine", "Difference"), quality)


def walk_rows(engine: EngineReport) -> Iterator[Row]:
    """A row for each kind of walk, widths together."""
    for kind in KINDS:
        walks = [walk for walk in engine.walks if walk.kind == kind]
        if not walks:
            continue
        widths = sorted({walk.width for walk in walks})
        several = (
            f"{len(widths)} widths, {widths[0]} to {widths[-1]} beams" if len(widths) > 1 else f"{widths[0]} beams"
        )
        rows, wrong = (sum(getattr(walk, name) for walk in walks) for name in ("rows", "wrong"))
        largest = over(max((w.largest for w in walks), key=lambda off: (off != off, off)), walks[0].limit, rows)
        steps, bad = max(walk.steps for walk in walks), any(differs(walk, engine.tolerance) for walk in walks)
        limit = Cell(limit_text(walks[0].limit))
        yield f"{kind}: {several}", str(steps), f"{rows:,}", Cell(f"{wrong:,}", bad), largest, limit


def difference_rows(engine: EngineReport) -> Iterator[Row]:
    """Rows of the largest differences beside their limits."""
    none = ("-", "-")
    found = [("Encoder outputs", "encoder", engine.encoder_max, engine.encoder_sentences, "sentence", none)]
    if engine.attention_max is not None:
        found.append(("Attention", "encoder", engine.attention_max, engine.encoder_sentences, "sentence", none))
    if engine.memory:
        found.append(("Memory", "memory", engine.memory.largest, engine.memory.sentences, "sentence", none))
    spread = (short_number(engine.scores_p999), short_number(engine.scores_mean)) if engine.scores_count else none
    found.append(("Log-probabilities", "scores", engine.scores_max, engine.scores_count, "value", spread))
    for each in engine.vocabulary:
        name = "encoder" if each.side == "source" else "scores"
        found.append((f"{each.side.title()} entries, each once", name, each.largest, each.count, "id", none))
    for label, name, largest, count, noun, others in found:
        limit = getattr(engine.tolerance, name)
        allowed = Cell(limit_text(limit), badge="loosened" if name in engine.loosened else "")
        part = short_number(largest / limit) if limit and count else "-"
        yield label, over(largest, limit, count), *others, allowed, part, counted(count, noun)


def invariance(engine: EngineReport, eager: Sequence[Outputs]) -> Table:
    """The same sentences in other batches: batches x modes, eager's own figures below the engine's."""
    ours, theirs = ({(o.variant, o.mode): o for o in found} for found in (engine.invariance, eager))
    modes, variants = (dict.fromkeys(key[n] for key in (*ours, *theirs)) for n in (1, 0))
    rows = [
        (
            Cell(variant, notes=[BATCHES.get(variant, "")]),
            *(equal(engine, ours.get((variant, mode)), theirs.get((variant, mode))) for mode in modes),
        )
        for variant in variants
    ]
    note = "Equal to the engine's own outputs in its usual batches. Small: eager PyTorch against itself, likewise."
    return Table("Same sentences in other batches", ("Batch", *modes), rows, [note if rows else "Not checked."])


def divergences(title: str, found: Sequence[Divergence], shown: int, lossy: bool = False) -> Table:
    """One row each, up to MAX_ROWS."""
    rows = []
    for d in found[:MAX_ROWS]:
        tokens = [str(token) if token >= 0 else "-" for token in (d.eager_token, d.engine_token)]
        scores = [
            f"{value:.6f}" if math.isfinite(value) else short_number(value) for value in (d.eager_score, d.engine_score)
        ]
        where = (f"{d.sentence + 1:,}", d.mode, d.variant or "-", f"{d.step + 1:,}")
        rows.append((*where, *tokens, *scores, short_number(d.margin)))
    notes = ["Outputs that differ from eager's, as this precision may, are counted above."] if lossy else []
    notes.append(EXPLAINED if found else "None.")
    notes += [f"The first {MAX_ROWS:,}, and {len(found) - MAX_ROWS:,} more"] if len(found) > MAX_ROWS else []
    head = ("Sentence", "Mode", "Batch", "Token", "Expected", "Chosen", "Expected score", "Chosen score", "Margin")
    folded = counted(len(rows) - shown, "more row") if shown else "Differences inside the measured error"
    return Table(f"{title} ({len(found):,})", head, rows, notes, shown, folded)


def step_values(engine: EngineReport) -> Table:
    """What is drawn of the steps."""
    limit = engine.tolerance.scores
    rows = [
        (str(n), over(step.largest, limit, 1), over(step.mean, limit, 1), f"{step.sentences:,}")
        for n, step in enumerate(engine.steps, 1)
    ]
    return Table("", ("Position", "Largest", "Mean", "Sentences"), rows, shown=0, folded="Values")


def over(value: float, limit: float, count: int, note: str = "") -> Cell:
    """A difference, marked where it is beyond its limit; none where nothing was compared."""
    return Cell(short_number(value), not value <= limit, [note] if note else []) if count or value else Cell("-")


def counts(engine: EngineReport, name: str, found: Outputs) -> Row:
    """Sentences, how many are equal, ties, and how many differ."""
    apart = Cell(f"{found.failed:,}", failed(engine, found))
    return name, f"{found.sentences:,}", f"{found.equal:,}", f"{found.ties:,}", apart


def equal(engine: EngineReport, found: Outputs | None, eager: Outputs | None = None) -> Cell:
    """How many are equal, what the others are, and eager's own figure in small print."""
    notes, bad = [], found is not None and failed(engine, found)
    if found:
        notes += [counted(found.ties, "tie")] * bool(found.ties)
        notes += [f"{found.failed:,} {'failed' if bad else 'differ'}"] * bool(found.failed)
        notes += [f"{found.not_blamed:,} as in eager"] * bool(found.not_blamed)
    notes += [f"eager {share(eager)}".replace(" ", "\u00a0").replace("\u00a0", " ", 1)] if eager else []
    return Cell(share(found) if found else "-", bad, notes)


def failed(engine: EngineReport, found: Outputs) -> bool:
    """Whether more sentences differ than may: of eager all or none, of other batches a share."""
    share = engine.tolerance.unstable if found.variant else float(not engine.tolerance.tokens)
    return bool(found.hopeless) or found.failed > allowed(share, found.sentences)


def share(found: Outputs) -> str:
    """As in 998 / 1,000."""
    return f"{found.equal:,} / {found.sentences:,}"
