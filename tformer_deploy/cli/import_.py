"""tformer import"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..base.errors import ConfigError
from ..base.notes import note
from ..importers.formats import FORMATS
from .options import Json, ModelSettings, among, folder, model_settings, named_values
from .root import app, emit


@app.command("import", epilog="Example: tformer import hf opus-mt-en-de --out runs/en-de --src lines.en")
def import_(
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="[FORMAT] PATH",
            help=f"Checkpoint file or folder. Give FORMAT if it is not recognized: {among(FORMATS)}.",
        ),
    ],
    out: Annotated[Path, typer.Option(parser=folder, metavar="<path>", help="Run folder to write.")],
    vocab: Annotated[Path | None, typer.Option(help="Vocabulary file of both sides.")] = None,
    src_vocab: Annotated[Path | None, typer.Option(help="Vocabulary file of the source.")] = None,
    tgt_vocab: Annotated[Path | None, typer.Option(help="Vocabulary file of the target.")] = None,
    src_codes: Annotated[Path | None, typer.Option(help="SentencePiece model or BPE codes of the source.")] = None,
    tgt_codes: Annotated[
        Path | None, typer.Option(help="SentencePiece model or BPE codes of the target. Default: the source's.")
    ] = None,
    heads: Annotated[
        int,
        typer.Option(min=0, show_default=False, help="Number of attention heads. Default: as the file states, or 8."),
    ] = 0,
    src_lang: Annotated[str, typer.Option(help="Source language of a multilingual model.")] = "",
    tgt_lang: Annotated[str, typer.Option(help="Target language of a multilingual model.")] = "",
    split_regex: Annotated[str, typer.Option(help="Regular expression; every match in the text is a word.")] = "",
    language: Annotated[
        str, typer.Option(help="Split words by spaCy's rules for these languages, such as de-en.")
    ] = "",
    lower: Annotated[bool, typer.Option("--lower", help="Lower-case the text.")] = False,
    part: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PART=NAME",
            help="Module of the file that is this part of the model (src_embedding, tgt_embedding, output, positions "
            "or transformer), as in src_embedding=embed.src; repeatable.",
        ),
    ] = None,
    settings: ModelSettings = None,
    src: Annotated[Path | None, typer.Option(help="Text to compare with, besides generated ids.")] = None,
    compare: Annotated[bool, typer.Option(help="Compare with the original code, if it is installed.")] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace the run in --out.")] = False,
    json: Json = False,
) -> None:
    """Convert another tool's checkpoint to a run folder, and compare it with the original code if that is installed.

    docs/import.md lists the formats and the options of each; other options are refused. Without a format, the content
    of PATH decides. No code in the files is executed.
    """
    if len(source) > 2:
        raise ConfigError(f"{' '.join(source)}: write [FORMAT] PATH")
    if src and not compare:
        raise ConfigError(f"--src {src} is text to compare with: leave it out, or --no-compare")
    from ..base.lines import read_lines
    from ..importers.base import ImportOptions
    from ..importers.run import import_checkpoint, recognised

    path = Path(source[-1])
    name = source[0] if len(source) == 2 else recognised(path)
    options = ImportOptions(
        vocab=vocab,
        src_vocab=src_vocab,
        tgt_vocab=tgt_vocab,
        src_codes=src_codes,
        tgt_codes=tgt_codes,
        heads=heads,
        src_lang=src_lang,
        tgt_lang=tgt_lang,
        split_regex=split_regex,
        language=language,
        lower=lower,
        parts=named_values("--part", part or []),
        model=model_settings(None, settings),
    )
    lines = read_lines(src) if src else []
    imported, comparison = import_checkpoint(name, path, out, options, lines, compare, force)
    for line in (*imported.notes, *([] if comparison.original else [str(comparison)])):
        note(line)
    result = {"out": str(out), "format": name, "parameters": imported.config.parameters}
    text = f"{out}: {name}, {imported.config.parameters:,} parameters" + (
        f"; {comparison}" if comparison.original else ""
    )
    emit({**result, "compared": comparison.to_json()}, json, text)
