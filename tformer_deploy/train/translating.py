"""Translations of validation text, by eager PyTorch and our own search."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..bundle.text import Tokenizers
from ..decoding.options import DecodeOptions
from ..engines.eager import EagerEngine
from ..model.network import Transformer
from ..translate.translator import Translator

PORTION = 100
"""Lines that a validation translates between two looks at Ctrl-C: a few batches."""


def translated(
    model: Transformer, tokenizers: Tokenizers, lines: Sequence[str], beams: int, go_on: Callable[[int], bool]
) -> list[str]:
    """Translations of lines; only the first ones if `go_on`, which is told how many are made, says so."""
    made: list[str] = []
    with Translator(EagerEngine(model), tokenizers, DecodeOptions(beams=beams)) as translator:
        for first in range(0, len(lines), PORTION):
            if not go_on(len(made)):
                break
            made += [result.text for result in translator.translate(lines[first : first + PORTION])]
    return made
