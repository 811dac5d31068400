"""tformer score"""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated

import typer

from ..base.errors import DataError
from .lines import utf8_output
from .options import Backend, CheckpointOption, DeviceOption, Json, Threads, Variant
from .root import app, progress

WINDOW = 4000
"""Pairs that are read at a time: enough to sort them into batches by length."""


@app.command(epilog="Example: tformer score bundles/numbers --src lines.en --tgt lines.de --tokens")
def score(
    bundle: Annotated[Path, typer.Argument(help="Bundle.")],
    src: Annotated[Path, typer.Option(help="Source text, one sentence per line.")],
    tgt: Annotated[Path, typer.Option(help="Translations of --src, line by line.")],
    backend: Backend = "ort",
    variant: Variant = None,
    device: DeviceOption = "cpu",
    checkpoint: CheckpointOption = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Add every token and its log-probability.")] = False,
    threads: Threads = 0,
    json: Json = False,
) -> None:
    """Print the log-probability of each translation given its source: the sum over its tokens, eos included."""
    from ..base.lines import read_lines
    from ..translate.opening import TranslatorOptions, open_translator

    sources, targets = read_lines(src), read_lines(tgt)
    if len(sources) != len(targets):
        raise DataError(f"{src} has {len(sources)} lines, {tgt} {len(targets)}: they must be parallel")
    out = utf8_output()
    options = TranslatorOptions(bundle, backend, variant, device, checkpoint, threads)
    with open_translator(options) as translator, progress("lines", printing=True) as advance:
        for first in range(0, len(sources), WINDOW):
            source, target = sources[first : first + WINDOW], targets[first : first + WINDOW]
            for text, values in zip(target, translator.score(source, target, first), strict=True):
                total = sum(values)
                ids = translator.output_ids(text)
                pieces = list(zip(translator.tokenizers.target.pieces(ids), values, strict=True)) if tokens else []
                if json:
                    line = jsonlib.dumps({"score": total, "tokens": pieces}, ensure_ascii=False)
                else:
                    line = "\t".join([f"{total:.6f}", *(f"{piece} {value:.6f}" for piece, value in pieces)])
                print(line, file=out)
            out.flush()
            advance(len(source))
