"""A result as text or JSON."""

from __future__ import annotations

import json
from dataclasses import asdict

from ..decoding import DecodeOptions
from .translator import Result

_SPACES = str.maketrans("\n\r", "  ")


def one_line(text: str) -> str:
    """A text with line feeds and carriage returns, which some models produce, replaced by spaces."""
    return text.translate(_SPACES)


def printed(number: int, result: Result, options: DecodeOptions, as_json: bool = False) -> str:
    """A line of JSON, or lines in Marian's format for n-best lists; `number`: of the source, from 0."""
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
