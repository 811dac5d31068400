"""tformer student"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from ..base.errors import ConfigError, require, unknown
from ..base.notes import note
from ..engines import ENGINES
from .export import recipes
from .options import (
    Beams,
    Candidates,
    Choose,
    ConfigOption,
    FilterOption,
    Json,
    Preset,
    SettingsOption,
    VocabSize,
    among,
    folder,
    merge_settings,
    named_values,
)
from .root import app, emit
from .train import refuse

WITHOUT_PLANS = among(spec.name for spec in ENGINES if spec.measured and not spec.plans)


@app.command(
    epilog="Example: tformer student runs/large --src train.en --tgt train.de --valid-src valid.en --valid-tgt "
    "valid.de --preset tiny --recipe int8 --out student"
)
def student(
    context: typer.Context,
    teacher: Annotated[Path, typer.Argument(help="Run folder, FILE.py:FUNCTION, or bundle.")],
    src: Annotated[list[Path], typer.Option(help="Text that the teacher translates; repeatable.")],
    valid_src: Annotated[Path, typer.Option(help="Validation source text.")],
    valid_tgt: Annotated[Path, typer.Option(help="Translation of --valid-src, line by line.")],
    out: Annotated[
        Path, typer.Option(parser=folder, metavar="<path>", help="Folder for all that is made, a folder a step.")
    ],
    tgt: Annotated[
        list[Path] | None, typer.Option(help="Reference translation of each --src, for --choose and the report.")
    ] = None,
    test_src: Annotated[Path | None, typer.Option(help="Further source text for the report.")] = None,
    test_tgt: Annotated[Path | None, typer.Option(help="Translation of --test-src, line by line.")] = None,
    choose: Choose = "score",
    filter_: FilterOption = None,
    backend: Annotated[str, typer.Option(help=f"Backend of the teacher and of the report: {WITHOUT_PLANS}.")] = "ort",
    beams: Beams = None,
    n_best: Candidates = None,
    preset: Preset = "tiny",
    tokenizer: Annotated[str, typer.Option(help="Of the student: bpe or unigram.")] = "bpe",
    vocab_size: VocabSize = 8000,
    config: ConfigOption = None,
    settings: SettingsOption = None,
    recipe: Annotated[list[str] | None, recipes("what rounds nothing on the backend")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the report in which both models are timed.")] = 3,
    force: Annotated[
        bool, typer.Option("--force", help="Make again what other options made, and what follows it.")
    ] = False,
    json: Json = False,
) -> None:
    """Make a student of a teacher: its translations, a model trained on them, a checked bundle, a report of both.

    After a kill, the same command continues. docs/distill.md says more.
    """
    require("train", "torch", "sacrebleu")
    require("export", "onnx", "onnxscript")
    require("report", "jinja2", "matplotlib")
    from ..base.settings import parse_settings
    from ..train.runs import RunSettings
    from ..train.student import StudentOptions, make_student
    from ..train.teacher import OF_TEACHERS
    from ..translate.distill import Filters

    if (test_src is None) != (test_tgt is None):
        raise ConfigError("--test-src and --test-tgt belong together: give both or none")
    if tokenizer not in ("bpe", "unigram"):  # words are split by rules of a language
        raise unknown("tokenizer of a student", tokenizer, ("bpe", "unigram"))
    run = RunSettings(preset, tokenizer, vocab_size, *merge_settings(config, settings, {}))
    if any(name in run.train for name in OF_TEACHERS):
        refuse(context, ["tokenizer", "vocab_size"], "train.teacher_weight gives the student the teacher's vocabulary")
        run = replace(run, teacher=teacher)
    decoding = {name: value for name, value in (("beams", beams), ("n_best", n_best)) if value is not None}
    options = StudentOptions(
        teacher=teacher,
        out=out,
        src=src,
        tgt=tgt or [],
        valid=(valid_src, valid_tgt),
        test=(test_src, test_tgt) if test_src and test_tgt else None,
        choose=choose,
        filters=Filters(**parse_settings(Filters, "filter", named_values("--filter", filter_))),
        backend=backend,
        decoding=decoding,
        run=run,
        recipes=recipe or [],
        rounds=rounds,
        force=force,
    )
    report = make_student(options)
    emit(asdict(report), json, f"{report}\n{out / 'report'}: report written")
    for name, why in report.left_out.items():
        note(f"error: variant {name} left out: {why}")
    if report.left_out:
        raise typer.Exit(3)
