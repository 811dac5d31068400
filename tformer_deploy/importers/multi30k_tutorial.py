"""Checkpoints of LZHMS/TransformerPractice, a Multi30K tutorial with the layers of The Annotated Transformer."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from .annotated import Names, read_names
from .base import Imported, ImportOptions
from .seen import Seen

NAMES = Names(
    ("encoder.emb.tok_emb", "decoder.emb.tok_emb"),
    ("encoder.emb.pos_emb.pe", "decoder.emb.pos_emb.pe"),
    "cross_attn",
    ("linear_1", "linear_2"),
    scaled=False,
)


def recognises(seen: Seen) -> bool:
    """Whether a file has its names."""
    return "encoder.emb.tok_emb.weight" in seen.names


def read(path: Path, options: ImportOptions) -> Imported:
    """See `base.Imported`. Words are split by spaCy's rules: `language` is needed where that is another than en-de."""
    language = options.language or ("" if options.split_regex else "en-de")
    imported = read_names(path, dataclasses.replace(options, language=language), NAMES)
    tokenizers = imported.tokenizers
    line_end = tokenizers.source.id_of("\n")
    if line_end is not None:  # the tutorial's lines keep it, so that it is a word of every source
        suffix = (line_end, tokenizers.source.specials.eos)
        imported.tokenizers = dataclasses.replace(tokenizers, suffix=suffix)
    return imported
