"""A result as a line of text or JSON."""

from __future__ import annotations

import json
from dataclasses import asdict

from ..decoding import DecodeOptions
from .translator import Result

_SPACES = str.maketrans("\n\r", "  ")


def one_line(text: str) -> str:
    """A text in one line: a line feed or carriage return, which some models can write, becomes a space."""
    return text.translate(_SPACES)


def printed(number: int, result: Result, options: DecodeOptions, as_json: bool = False) -> str:
    """A result for machines, or as Marian writes it; `number` of the source, from 0."""
    if as_json:
        return json.dumps(asdict(result), ensure_ascii=False)
    lines = []
    for each in (result, *result.alternatives):
        text = one_line(each.text)
        fields = [text]
        if options.n_best > 1:
            fields = [str(number), text, f"{each.score:.6f}"]
        if options.align:
            fields.append(" ".join(f"{source}-{target}" for target, source in enumerate(each.alignment)))
        lines.append(" ||| ".join(fields))
    return "\n".join(lines)
