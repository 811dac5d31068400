"""tformer bleu"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..base.errors import DataError
from .options import Json
from .root import app, emit


@app.command(epilog="Example: tformer bleu test.de --reference test_2016_flickr.de.gz --language de")
def bleu(
    output: Annotated[Path, typer.Argument(help="Translations, one a line, plain or .gz.")],
    reference: Annotated[Path, typer.Option(help="Translations to compare with, as usual text.")],
    language: Annotated[str, typer.Option(help="Language of both, such as de.")],
    prepared: Annotated[
        bool, typer.Option("--prepared", help="The output is of a model trained with --prepare moses.")
    ] = False,
    json: Json = False,
) -> None:
    """Print BLEU of translations as papers computed it, beside sacrebleu's.

    Published scores on lower-cased, Moses-tokenised text, by multi-bleu.perl, are not to be compared with sacrebleu's.
    """
    from ..base.lines import read_lines
    from ..train.metrics import published_bleu
    from ..train.moses import Moses

    made, expected = read_lines(output), read_lines(reference)
    if len(made) != len(expected) or not made:
        raise DataError(f"{output} has {len(made)} lines, {reference} {len(expected)}: they must be parallel")
    moses = Moses(language)
    tokens = made if prepared else [moses.prepared(line) for line in made]
    text = [moses.joined(line) for line in made] if prepared else made
    scores = published_bleu(tokens, [moses.prepared(line) for line in expected], text, expected)
    if prepared:
        del scores["sacrebleu"]  # of text without capitals
    emit(scores, json, "\n".join(f"{value:6.2f}  {LABELS[name]}" for name, value in scores.items()))


LABELS = {
    "multi_bleu": "lower-cased, Moses tokens, as multi-bleu.perl (sacrebleu: tok none, not smoothed)",
    "sacrebleu_lc": "sacrebleu, lower-cased (13a)",
    "sacrebleu": "sacrebleu (13a)",
}
