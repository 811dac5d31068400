"""A result as a line of text or JSON."""

from __future__ import annotations

import json
from dataclasses import asdict

from .decoding import DecodeOptions
from .translate import Result


def printed(number: int, result: Result, options: DecodeOptions, as_json: bool = False) -> str:
    """A result for machines, or as Marian writes it; `number` of the source, from 0."""
    if as_json:
        return json.dumps(asdict(result), ensure_ascii=False)
    lines = []
    for each in (result, *result.alternatives):
        fields = [each.text]
        if options.n_best > 1:
            fields = [str(number), each.text, f"{each.score:.6f}"]
        if options.align:
            fields.append(" ".join(f"{source}-{target}" for target, source in enumerate(each.alignment)))
        lines.append(" ||| ".join(fields))
    return "\n".join(lines)
