"""BLEU and chrF of eager PyTorch and of an engine, if there are reference translations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..base.errors import ArtifactError, EngineError, LimitError, MissingExtra
from ..bundle.text import Tokenizers
from ..engines.base import Engine
from .compare import DEFAULTS
from .defaults import translate
from .recording import Run
from .reference import Reference
from .report import EngineReport

ENOUGH = 1000
"""With fewer sentences, a few words move BLEU by more than its limits."""


def add_translation(reference: Reference, make_eager: Callable[[], Engine]) -> None:
    """Add eager's translation of the whole text with the model's default options, once, if it has any.

    `make_eager` returns eager, not entered. Raises ArtifactError where that is not there.
    """
    own = reference.defaults
    if reference.translated is not None or not own or not own.decoding:
        return
    try:
        made = make_eager()
    except (ArtifactError, MissingExtra, ModuleNotFoundError):
        raise ArtifactError(
            "--tgt: the reference has no translation by the model's default options: "
            "make it again with --save-reference and --src"
        ) from None
    with made as eager:
        reference.translated = translate(eager, reference.sources, own, reference.options)


def add_quality(
    report: EngineReport,
    engine: Engine,
    reference: Reference,
    runs: Mapping[str, Run],
    translations: Sequence[str],
    tokenizers: Tokenizers,
) -> None:
    """Add BLEU and chrF of eager and of an entered engine, whose `runs` are by mode.

    Of a model with default options, only what these give: without them, such as without the code of the target
    language, its outputs are no translations.
    """
    own, whole = reference.defaults, reference.translated
    if not own or whole is None:
        _compare(report, reference.observed.runs, runs, translations, tokenizers)
        return
    mode = "sampling" if own.decoding.get("sampling") else DEFAULTS
    try:
        run = translate(engine, reference.sources, own, reference.options)
    except (EngineError, LimitError) as error:
        report.failures.append(str(error))
        return
    if min(len(each.outputs) for each in (whole, run)) < len(translations):
        report.failures.append(f"{mode}: BLEU is not known: an engine cannot follow the model's default options")
        return
    _compare(report, {mode: whole}, {mode: run}, translations, tokenizers)


def _compare(
    report: EngineReport,
    eager: Mapping[str, Run],
    engine: Mapping[str, Run],
    translations: Sequence[str],
    tokenizers: Tokenizers,
) -> None:
    """Add BLEU and chrF of every mode; a failure if they differ by more than allowed.

    Samples of lossy variants are excepted: they are other texts, whose BLEU differs by more than their quality does.
    """
    from ..train.metrics import corpus_bleu, corpus_chrf

    tolerance = report.tolerance
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
