"""Finds where an engine that failed first leaves eager PyTorch: the sentence, the token and the layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..base.errors import MissingExtra
from ..bundle.recipe import Tolerance
from ..decoding.rules import best_tokens
from ..engines.base import Engine, Floats, Outlook
from ..translate.batches import make_batch
from .compare import DEFAULTS, WIDE, Judge, by_layer, differences, relative
from .observe import end_ids, far_target, layers_of, middle, tokens_of
from .reference import Reference
from .report import EngineReport

ABOVE_NOISE = 10
"""A layer is at fault if its difference is so many times that of the layers before it."""
SUSPECTS = 8
"""Most rows of a beam that are fed again: each takes a run of both sides."""


@dataclass(frozen=True)
class Suspect:
    """A source and target that both sides are fed, to find where they differ."""

    sentence: int
    target: Sequence[int]
    name: str = ""
    """Empty: the sentence's number."""
    source: Sequence[int] = ()
    """Empty: the sentence's own."""


def find_layer(engine: Engine, eager: Engine, reference: Reference, report: EngineReport, tolerance: Tolerance) -> str:
    """Where an engine that failed first leaves eager: the sentence, the token and the layer. Both must be entered."""
    if not reference.sources:
        return ""
    first = min(report.divergences, key=lambda d: (bool(d.variant), d.sentence), default=None)
    text = reference.defaults if first and first.mode == DEFAULTS else None
    i, worst = first.sentence if first and not text else report.worst_sentence, report.worst_sentence
    runs, positions, beams = reference.observed.runs, reference.options.positions, reference.options.beams
    usual, end = middle(reference.sources), engine.config.eos_id
    suspects = [Suspect(j, tokens_of(runs["greedy"].outputs[j][0])) for j in dict.fromkeys((i, worst))]
    if text and first:
        name, run = f"line {first.sentence + 1} of text", text.run
        target = tokens_of(run.outputs[first.sentence][0])
        suspects.insert(0, Suspect(usual, target, name, text.sources[first.sentence]))
    elif first:  # a token that only a beam or a sample takes is not in the greedy output
        wide = reference.observed.wide if first.mode == WIDE else None
        beams = reference.options.wide if wide else beams
        judge = Judge(reference.observed, 0.0, 0.0, beams, end_ids(engine))
        rows = judge.rows((wide or runs[first.mode]).traces[i], first.step, first.mode)
        suspects += [Suspect(i, [*row, first.eager_token]) for row in rows[:SUSPECTS]]
    suspects.append(Suspect(usual, far_target(runs["greedy"], engine, min(positions, engine.limits.tgt_tokens))))
    if entries := {each.side: each.worst for each in report.vocabulary}:
        suspects.append(Suspect(usual, [end], f"source entry {entries['source']}", [entries["source"]]))
        if engine.limits.tgt_tokens > 1:
            suspects.append(Suspect(usual, [entries["target"], end], f"target entry {entries['target']}"))
    for suspect in suspects:
        source = suspect.source or reference.sources[suspect.sentence]
        try:
            ours, theirs = (layers_of(side, source, suspect.target) for side in (eager, engine))
        except MissingExtra as error:
            return f"sentence {i + 1}; the layer is not known: {error}"
        report.layers = by_layer(ours, theirs)
        where = first_apart(ours, theirs, tolerance)
        where = where or _step_apart(engine, eager, source, suspect.target, beams, tolerance)
        if where:
            return f"{suspect.name or f'sentence {suspect.sentence + 1}'}, {where}"
    if report.attention_max is not None and not report.attention_max <= tolerance.encoder:
        return "the output attention, where no layer differs"
    if not first and (walk := next((walk for walk in report.walks if walk.wrong), None)):
        return (
            f"{walk.name}, {walk.first}: every layer agrees on a row alone, so rows are mixed up between steps "
            f"(parents, caches) or between beams and sentences of a batch"
        )
    where = f"line {first.sentence + 1} of text" if text and first else f"sentence {i + 1}"
    return (
        f"{where}: every layer agrees on it alone with eager's tokens, so rows are mixed up between steps "
        f"(parents, caches) or between sentences of a batch"
    )


def first_apart(ours: dict[str, Floats], theirs: dict[str, Floats], tolerance: Tolerance) -> str:
    """The first layer far above the noise of those before it, with the token if it is the decoder's; or nothing."""
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
    engine: Engine, eager: Engine, source: Sequence[int], target: Sequence[int], beams: int, tolerance: Tolerance
) -> str:
    """Which output of a step is wrong, with several equal rows, if no layer is; or nothing."""
    batch = make_batch([source], engine.config.pad_id)
    states = [side.encode(batch.src_ids, batch.src_lengths, Outlook(beams, len(target))) for side in (eager, engine)]
    tokens = np.full((1, 1), engine.config.start_id, np.int32)
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
