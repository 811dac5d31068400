"""The page of a parity report: one HTML file that needs no network, no script and no other file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from .markup import CSS, Html, join, limit_text, note, number, tag
from .plots import layer_plot, step_plot
from .report import Divergence, EngineReport, Outputs, Report, describe_constants

MAX_ROWS = 200
"""Of a table of divergences."""
SHOWN_ROWS = 20
"""Of those, rows that are not folded away."""
SHOWN_FAILURES = 4
"""Failures of an engine that are not folded away."""
_VARIANTS = {
    "alone": "one sentence at a time",
    "neighbours": "short sentences beside long ones",
    "shuffled": "in random order",
    "padded": "more padding",
}


def render(report: Report) -> str:
    """The whole page."""
    verdict = "PASSED" if report.passed else "FAILED"
    body = [_head(report), *(_engine_section(report, engine, n) for n, engine in enumerate(report.engines))]
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"{tag('title', f'{verdict}: parity of {report.corpus}')}\n<style>{CSS}</style>\n</head>\n"
        f"{tag('body', tag('main', *body, _about(report)))}\n</html>\n"
    )


class Cell(Html):
    """A whole `td`."""


def _table(head: Sequence[object], rows: Iterable[Sequence[object]], class_: str = "") -> Html:
    """The first column holds the rows' names."""
    lines = [
        tag("tr", tag("th", row[0], scope="row"), *(c if isinstance(c, Cell) else tag("td", c) for c in row[1:]))
        for row in rows
    ]
    top = tag("thead", tag("tr", *(tag("th", name, scope="col") for name in head)))
    return tag("div", tag("table", top, tag("tbody", *lines), class_=class_), class_="scroll")


def _cell(*content: object, mark: str = "") -> Cell:
    return Cell(tag("td", *content, class_=mark))


def _badge(passed: bool) -> Html:
    return tag("span", "✓ PASSED" if passed else "✗ FAILED", class_="badge good" if passed else "badge bad")


def _head(report: Report) -> Html:
    """Verdict, failures, what was compared."""
    failed, count = sum(not engine.passed for engine in report.engines), len(report.engines)
    which = f"{failed or count} of {count} engines" if count > 1 else "".join(e.engine for e in report.engines)
    loosened = any(engine.loosened for engine in report.engines)
    mark = tag("span", "loosened limits", class_="badge warn") if loosened else ""
    title = tag("h1", "✓ PASSED " if report.passed else "✗ FAILED ", tag("span", which), mark)
    none = [] if report.engines else [tag("p", "No engine was checked.", class_="card bad")]
    facts = {
        "Corpus": report.corpus,
        "Sentences": f"{report.sentences:,}",
        "Tokens": f"{report.tokens:,}",
        "Weights": tag("code", report.weights_sha256[:12], title=f"sha256 {report.weights_sha256}"),
    }
    return tag(
        "header",
        tag("p", "Parity with eager PyTorch", class_="eyebrow"),
        tag("div", title, class_="verdict good" if report.passed else "verdict bad"),
        *none,
        *(_verdict(engine, n, count > 1) for n, engine in enumerate(report.engines)),
        tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in facts.items())),
        _summary(report) if count > 1 else "",
    )


def _loosened(engine: EngineReport, name: str) -> Html:
    """A mark for a threshold that is wider than its precision's own."""
    return tag("span", "loosened", class_="badge warn") if name in engine.loosened else Html("")


def _limits(engine: EngineReport) -> Html:
    """Precision and limits of an engine, in one line."""
    limits, names = engine.tolerance, ["encoder", "scores", *["bleu"] * bool(engine.quality)]
    names += ["unstable"] * bool(engine.tolerance.unstable)
    texts = {name: f"{name} {limit_text(getattr(limits, name))}" for name in names}
    texts["tokens"] = "tokens equal" if limits.tokens else "tokens may differ"
    parts = [join((" · ", text, _loosened(engine, name))) for name, text in texts.items()]
    return tag("p", "Limits of ", tag("strong", engine.precision), *parts)


def _verdict(engine: EngineReport, n: int, named: bool) -> Html:
    """An engine's verdict with all its failures."""
    lines = [tag("li", failure) for failure in engine.failures]
    rest, figures = lines[SHOWN_FAILURES:], [f"{o.mode} {_share(o)}" for o in engine.outputs]
    figures += [f"scores within {number(engine.scores_max)}"] * bool(engine.scores_count)
    more = tag("details", tag("summary", _counted(len(rest), "more failure")), tag("ul", *rest)) if rest else ""
    parts = [
        tag("h2", _badge(engine.passed), " ", tag("a", engine.engine, href=f"#engine-{n + 1}")) if named else "",
        _limits(engine),
        tag("p", tag("strong", "First difference: "), engine.blame) if engine.blame else "",
        tag("ul", *lines[:SHOWN_FAILURES]) if lines else "",
        more,
        tag("p", " · ".join((*figures, f"{engine.seconds:,.1f} s"))),
    ]
    mark = "card good" if engine.passed else "card bad"
    return tag("div", *parts, class_=mark)


def _summary(report: Report) -> Html:
    modes = list(dict.fromkeys(o.mode for engine in report.engines for o in engine.outputs))
    rows = []
    for n, engine in enumerate(report.engines):
        outputs = {o.mode: o for o in engine.outputs}
        unstable = _cell(
            f"{sum(o.failed for o in engine.invariance):,}",
            mark="bad" if any(_failed(engine, o) for o in engine.invariance) else "",
        )
        rows.append(
            (
                tag("a", engine.engine, href=f"#engine-{n + 1}"),
                _badge(engine.passed),
                engine.precision,
                _over(engine.encoder_max, engine.tolerance.encoder, engine.encoder_sentences, shown=True),
                _over(engine.scores_max, engine.tolerance.scores, engine.scores_count, shown=True),
                *(_equal(engine, outputs.get(mode)) for mode in modes),
                unstable,
            )
        )
    head = ("Engine", "", "Precision", "Encoder max", "Scores max", *modes, "Differ by batch")
    return _table(head, rows, "figures")


def _over(value: float, limit: float, count: int, shown: bool = False) -> Cell:
    """A difference, marked where it is beyond its limit, which is `shown` below; none where nothing was compared."""
    small = tag("small", "limit\u00a0", limit_text(limit)) if shown else ""
    return _cell(number(value), small, mark="" if value <= limit else "bad") if count or value else _cell("-")


def _share(found: Outputs) -> str:
    return f"{found.equal:,} / {found.sentences:,}"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _failed(engine: EngineReport, found: Outputs) -> bool:
    """Whether more sentences differ than may: of eager all or none, of other batches a share."""
    share = engine.tolerance.unstable if found.variant else float(not engine.tolerance.tokens)
    return found.failed > math.ceil(share * found.sentences)


def _equal(engine: EngineReport, found: Outputs | None, eager: Outputs | None = None) -> Cell:
    """How many are equal, what the others are, and eager's own figure in small print."""
    notes: list[str] = []
    bad = found is not None and _failed(engine, found)
    apart = "failed" if bad else "differ"
    own = tag("small", "eager ", _share(eager).replace(" ", "\u00a0")) if eager else ""
    if found:
        notes += [_counted(found.ties, "tie")] * bool(found.ties) + [f"{found.failed:,} {apart}"] * bool(found.failed)
        notes += [f"{found.not_blamed:,} as in eager"] * bool(found.not_blamed)
    return _cell(
        _share(found) if found else "-",
        *(tag("small", each) for each in notes),
        own,
        mark="bad" if bad else "",
    )


def _engine_section(report: Report, engine: EngineReport, n: int) -> Html:
    """All about one engine."""
    ties, lossy = _divergences(engine.ties), not engine.tolerance.tokens
    parts = [
        tag("h2", engine.engine, " ", _badge(engine.passed) if len(report.engines) > 1 else ""),
        tag("h3", "Scores and encoder outputs"),
        _differences(engine),
        *_constants(engine),
        *_outputs(engine),
        *_invariance(engine, report.eager_invariance),
        *_sizes(engine),
        *_quality(engine),
        tag("h3", "Layers"),
        layer_plot(engine, engine.tolerance),
        tag("h3", "Decoding steps"),
        step_plot(engine.steps, engine.tolerance.scores),
        tag("h3", f"Divergences ({len(engine.divergences):,})"),
        note("Outputs that differ from eager's, as this precision may, are counted above.") if lossy else "",
        _divergences(engine.divergences),
        tag("h3", f"Ties ({len(engine.ties):,})"),
        tag("details", tag("summary", "Differences inside the measured error"), ties) if engine.ties else ties,
    ]
    return tag("section", *parts, id=f"engine-{n + 1}")


def _differences(engine: EngineReport) -> Html:
    encoder = ("Encoder outputs", "encoder", engine.encoder_max, ("-", "-"), engine.encoder_sentences, "sentence")
    quantiles = (number(engine.scores_p999), number(engine.scores_mean)) if engine.scores_count else ("-", "-")
    scores = ("Log-probabilities", "scores", engine.scores_max, quantiles, engine.scores_count, "value")
    measured = [encoder, scores]
    if engine.attention_max is not None:
        measured.insert(
            1, ("Attention", "encoder", engine.attention_max, ("-", "-"), engine.encoder_sentences, "sentence")
        )
    for each in engine.vocabulary:
        name = "encoder" if each.side == "source" else "scores"
        measured.append((f"{each.side.title()} entries, each once", name, each.largest, ("-", "-"), each.count, "id"))
    rows = []
    for label, name, largest, others, count, noun in measured:
        limit = getattr(engine.tolerance, name)
        allowed = join((limit_text(limit), _loosened(engine, name)))
        share = number(largest / limit) if limit and count else "-"
        rows.append((label, _over(largest, limit, count), *others, allowed, share, _counted(count, noun)))
    return _table(("Absolute difference", "Max", "99.9 %", "Mean", "Limit", "Max / limit", "Over"), rows, "figures")


def _constants(engine: EngineReport) -> list[Html]:
    """The arrays inside the graphs, beside the checkpoint's tensors."""
    if not engine.constants:
        return []
    return [tag("h3", "Constants"), tag("p", describe_constants(engine.constants))]


def _outputs(engine: EngineReport) -> list[Html]:
    """Against eager: whoever may differ does not fail where it does."""
    exact, rows = engine.tolerance.tokens, []
    for o in engine.outputs:
        apart = _cell(f"{o.failed:,}", mark="bad" if _failed(engine, o) else "")
        rows.append((o.mode, f"{o.sentences:,}", f"{o.equal:,}", f"{o.ties:,}", apart, number(o.score_max)))
    head = ("Mode", "Sentences", "Equal", "Ties", "Failed" if exact else "Differ", "Largest score difference")
    return [tag("h3", "Outputs"), _table(head, rows, "figures") if rows else note("No output was compared.")]


def _invariance(engine: EngineReport, eager: Sequence[Outputs]) -> list[Html]:
    """The same sentences in other batches: batches x modes, eager's own figures below the engine's."""
    ours, theirs = ({(o.variant, o.mode): o for o in found} for found in (engine.invariance, eager))
    modes = list(dict.fromkeys(mode for _, mode in (*ours, *theirs)))
    rows = []
    for variant in dict.fromkeys(variant for variant, _ in (*ours, *theirs)):
        cells = [_equal(engine, ours.get((variant, mode)), theirs.get((variant, mode))) for mode in modes]
        rows.append((join((variant, tag("small", _VARIANTS.get(variant, "")))), *cells))
    title = tag("h3", "Same sentences in other batches")
    told = note(
        "Equal to the engine's own outputs in its usual batches. Small: eager PyTorch against itself, likewise."
    )
    return [title, *([told, _table(("Batch", *modes), rows, "figures")] if rows else [note("Not checked.")])]


def _sizes(engine: EngineReport) -> list[Html]:
    """A wide beam and large batches."""
    rows = []
    for o in engine.sizes:
        bad = "bad" if _failed(engine, o) else ""
        name = f"{o.mode}, as many sentences as fit" if o.variant else f"{o.mode}, beside eager"
        rows.append((name, f"{o.sentences:,}", f"{o.equal:,}", f"{o.ties:,}", _cell(f"{o.failed:,}", mark=bad)))
    head = ("", "Compared", "Equal", "Ties", "Differ")
    equal = f"Equal rows of a wide beam have scores within {number(engine.rows_max or 0.0)} of each other."
    told = [note(equal)] if engine.rows_max is not None else []
    return [tag("h3", "Wide beams and large batches"), _table(head, rows, "figures"), *told] if rows else []


def _quality(engine: EngineReport) -> list[Html]:
    rows = []
    for mode, sides in engine.quality.items():
        for measure, eager in sides.get("eager", {}).items():
            own = sides.get("engine", {}).get(measure, math.nan)
            rows.append((f"{mode} {measure}", f"{eager:.2f}", f"{own:.2f}", f"{own - eager:+.2f}"))
    return [tag("h3", "Quality"), _table(("", "Eager", "Engine", "Difference"), rows, "figures")] if rows else []


def _divergences(found: Sequence[Divergence]) -> Html:
    """One row each, up to MAX_ROWS."""
    if not found:
        return note("None.")
    rows = []
    for d in found[:MAX_ROWS]:
        tokens = [token if token >= 0 else "-" for token in (d.eager_token, d.engine_token)]
        scores = [
            f"{score:.6f}" if math.isfinite(score) else number(score) for score in (d.eager_score, d.engine_score)
        ]
        where = (f"{d.sentence + 1:,}", d.mode, d.variant or "-", f"{d.step + 1:,}")
        rows.append((*where, *tokens, *scores, number(d.margin)))
    head = ("Sentence", "Mode", "Batch", "Token", "Expected", "Chosen", "Expected score", "Chosen score", "Margin")
    told = (
        "Sentences and tokens count from 1. Expected: eager's token id; in another batch, the engine's own in its "
        "usual one. Margin ∞: the choice was not among the candidates."
    )
    shown, rest = (_table(head, part, "figures divergences") for part in (rows[:SHOWN_ROWS], rows[SHOWN_ROWS:]))
    folded = tag("details", tag("summary", _counted(len(rows) - SHOWN_ROWS, "more row")), rest)
    more = note(f"and {len(found) - MAX_ROWS:,} more") if len(found) > MAX_ROWS else ""
    return join((note(told), shown, folded if len(rows) > SHOWN_ROWS else "", more))


def _about(report: Report) -> Html:
    """How the check ran and on what."""
    names = dict.fromkeys((*report.reference, *report.machine))
    machines = [(name, report.reference.get(name, "-"), report.machine.get(name, "-")) for name in names]
    options = [tag("div", tag("dt", name), tag("dd", value)) for name, value in report.options.items()]
    return tag(
        "section",
        tag("h2", "How it was checked"),
        tag("h3", "Machines and versions"),
        _table(("", "Eager PyTorch", "Engines"), machines) if machines else note("Not known."),
        tag("h3", "Options"),
        tag("dl", *options) if options else note("None."),
        note("Weights sha256 ", tag("code", report.weights_sha256)),
    )
