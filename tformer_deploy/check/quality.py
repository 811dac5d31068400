"""BLEU and chrF of eager PyTorch and of an engine, if there are reference translations."""

from __future__ import annotations

from collections.abc import Sequence

from ..bundle.recipe import Tolerance
from ..bundle.text import Tokenizers
from .recording import Run
from .report import EngineReport

ENOUGH = 1000
"""With fewer sentences, a few words move BLEU by more than its limits."""


def add_quality(
    report: EngineReport,
    eager: dict[str, Run],
    engine: dict[str, Run],
    translations: Sequence[str],
    tokenizers: Tokenizers,
    tolerance: Tolerance,
) -> None:
    """Add BLEU and chrF of both sides; a failure if they differ by more than allowed.

    Samples of lossy variants are excepted: they are other texts, whose BLEU differs by more than their quality does.
    """
    from ..train.metrics import corpus_bleu, corpus_chrf

    for mode in eager:
        if len(eager[mode].outputs) < len(translations):
            continue
        sides = {}
        for side, runs in (("eager", eager), ("engine", engine)):
            made = [tokenizers.target_text(runs[mode].outputs[i][0].ids) for i in range(len(translations))]
            sides[side] = {
                "BLEU": corpus_bleu(made, translations),
                "BLEU lower-cased": corpus_bleu(made, translations, lowercase=True),
                "chrF": corpus_chrf(made, translations),
            }
        report.quality[mode] = sides
        for measure in ("BLEU", "BLEU lower-cased"):
            difference = abs(sides["engine"][measure] - sides["eager"][measure])
            if not difference <= tolerance.bleu and (tolerance.tokens or mode != "sampling"):
                few = "" if len(translations) >= ENOUGH else f" over {len(translations)} sentences: {ENOUGH:,} say more"
                limit = f"more than {tolerance.bleu:g} (tolerance.bleu)"
                report.failures.append(f"{mode}: {measure} differs by {difference:.2f}, {limit}{few}")
