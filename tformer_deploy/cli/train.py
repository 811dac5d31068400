"""tformer train"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..base.errors import ConfigError
from ..model.config import TrainConfig
from .options import ConfigOption, Json, Preset, SettingsOption, VocabSize, folder, merge_settings
from .root import app, emit


@app.command(
    epilog="Example: tformer train --task numbers --out runs/numbers --preset tiny --vocab-size 200 --updates 1000"
)
def train(
    context: typer.Context,
    out: Annotated[
        Path,
        typer.Option(
            parser=folder, metavar="<path>", help="Run folder to write: checkpoint, metrics.jsonl, metrics.png."
        ),
    ],
    src: Annotated[str, typer.Option(help="Source text: UTF-8, one sentence per line, plain or .gz.")] = "",
    tgt: Annotated[str, typer.Option(help="Translation of --src, line by line.")] = "",
    valid_src: Annotated[str, typer.Option(help="Validation source text.")] = "",
    valid_tgt: Annotated[str, typer.Option(help="Translation of --valid-src, line by line.")] = "",
    multi30k: Annotated[str, typer.Option(help="Folder with the raw files of the Multi30K data set.")] = "",
    pair: Annotated[str, typer.Option(help="Languages for --multi30k and --tokenizer words.")] = "en-de",
    task: Annotated[str, typer.Option(help="Train on generated data: copy or numbers.")] = "",
    prepare: Annotated[
        str, typer.Option(help="moses: train on lower-cased, Moses-tokenised text of --pair's languages.")
    ] = "",
    alignments: Annotated[
        str, typer.Option(help="Word alignments of --src and --tgt, a line each as in 0-0 1-2: guides the attention.")
    ] = "",
    preset: Preset = "tiny",
    tokenizer: Annotated[
        str,
        typer.Option(
            help="bpe or unigram (joint SentencePiece model), or words (spaCy's rules). Default: bpe; copy: words."
        ),
    ] = "",
    vocab_size: VocabSize = 8000,
    teacher: Annotated[
        Path | None,
        typer.Option(
            parser=folder,
            metavar="<path>",
            help="Run folder of a trained model whose probabilities to learn; its vocabulary is taken over.",
        ),
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option(
            "--from",
            parser=folder,
            metavar="<path>",
            help="Run folder of a trained model to go on with: it decides model and vocabulary.",
        ),
    ] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(help=f"Size of a micro-batch in padded tokens. Default: {TrainConfig.batch_tokens}.")
    ] = None,
    updates: Annotated[
        int | None, typer.Option(help=f"Number of optimizer steps. Default: {TrainConfig.updates}.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help=f"Seed of weights, data order and dropout. Default: {TrainConfig.seed}.")
    ] = None,
    config: ConfigOption = None,
    settings: SettingsOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out, with its own settings.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the run in --out.")] = False,
    json: Json = False,
) -> None:
    """Train a model. Ctrl-C saves it; --resume continues, and ends at the same weights as an uninterrupted run.

    docs/train.md lists the settings of model and training.
    """
    from ..train.data import DataConfig
    from ..train.runs import RunSettings, only_process, resume_run, start_run

    data = DataConfig(src, tgt, valid_src, valid_tgt, multi30k, pair, task, prepare, alignments)
    flags = {"batch_tokens": batch_tokens, "updates": updates, "seed": seed}
    model_values, train_values = merge_settings(config, settings, {k: v for k, v in flags.items() if v is not None})
    if resume:
        takes = ("out", "resume", "updates", "teacher", "json")
        options = [option.name or "" for option in context.command.params if option.name not in takes]
        refuse(context, options, "--resume takes everything but --updates from the run")
    elif start:
        refuse(context, ["preset", "tokenizer", "vocab_size"], "--from gives the model and its vocabulary")
    elif teacher:
        refuse(context, ["tokenizer", "vocab_size"], "--teacher gives the model its own vocabulary")
    with only_process(out):
        if resume:
            trainer = resume_run(out, updates, teacher)
        else:
            run = RunSettings(preset, tokenizer, vocab_size, model_values, train_values, teacher, start)
            trainer = start_run(out, data, run, force)
        figures = trainer.run()
    if figures:
        emit(figures, json, f"{out}: " + "  ".join(f"{k} {_short(v)}" for k, v in figures.items()))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        sys.stdout.flush()
        os._exit(0)  # under torchrun, gloo's threads sometimes abort a process at the normal exit of Python


def refuse(context: typer.Context, names: Sequence[str], why: str) -> None:
    """Raise ConfigError if the command line has one of these options."""
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if option.name in names and source and source.name == "COMMANDLINE":
            raise ConfigError(f"{why}: leave out {option.opts[0]}")


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
