"""tformer prepare"""

from __future__ import annotations

import json as jsonlib
from typing import Annotated

import typer

from .lines import utf8_output, windows
from .options import Json
from .root import app

WINDOW_BYTES = 1 << 16


@app.command(epilog="Example: tformer prepare --language en < test.en | tformer translate bundles/en-de > test.tok.de")
def prepare(
    language: Annotated[str, typer.Option(help="Language of the text, such as en.")],
    json: Json = False,
) -> None:
    """Print standard input as `tformer train --prepare moses` reads its text: lower-cased and Moses-tokenised.

    A model that was trained on such text expects it, and answers with such text.
    """
    from ..train.moses import Moses

    moses, out = Moses(language), utf8_output()
    for lines in windows(WINDOW_BYTES):
        for line in lines:
            text = moses.prepared(line)
            print(jsonlib.dumps({"text": text}, ensure_ascii=False) if json else text, file=out)
        out.flush()
