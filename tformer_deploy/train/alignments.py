"""Word alignments for guided attention (Chen et al. 2016): lines of `0-0 1-2` become links between pieces."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..base.errors import ConfigError, DataError
from ..base.lines import read_lines
from ..bundle.text import SentencePiece, Tokenizer, Tokenizers, Words
from ..translate.batches import Ids

Links = list[tuple[int, int]]
"""Source word and target word, from 0, of each link of a line."""
WORD = re.compile(r"[^ \t]+")
LINK = re.compile(r"([0-9]{1,6})-([0-9]{1,6})")


def read_links(path: Path, src: Sequence[str], tgt: Sequence[str]) -> list[Links]:
    """The alignment of each pair of lines, whose words are split by spaces (Pharaoh's format). Raises DataError."""
    lines = read_lines(path)
    if len(lines) != len(src):
        raise DataError(f"{path} has {len(lines)} lines, the text {len(src)}: give the alignment of each")
    return [_links(f"{path}:{n}", *each) for n, each in enumerate(zip(lines, src, tgt, strict=True), 1)]


def _links(where: str, line: str, src: str, tgt: str) -> Links:
    found = []
    sizes = [len(WORD.findall(side)) for side in (src, tgt)]
    for part in line.split():
        if not (link := LINK.fullmatch(part)):
            raise DataError(f"{where}: '{part:.40}' is no link: write source and target word from 0, as in 0-0 1-2")
        i, j = int(link[1]), int(link[2])
        if i >= sizes[0] or j >= sizes[1]:
            raise DataError(f"{where}: {part} is beyond {sizes[0]} source and {sizes[1]} target words: align this text")
        found.append((i, j))
    return found


def piece_links(links: Links, src: str, tgt: str, tokenizers: Tokenizers) -> Ids:
    """Links (N, 2) between target position and source position of what model and loss see: all pieces of both words."""
    prefix, _ = tokenizers.around
    sources, targets = pieces_of_words(tokenizers.source, src), pieces_of_words(tokenizers.target, tgt)
    found = {(t, len(prefix) + s) for i, j in links for s in sources[i] for t in targets[j]}
    return np.array(sorted(found), np.int32).reshape(-1, 2)


def pieces_of_words(tokenizer: Tokenizer, text: str) -> dict[int, list[int]]:
    """The places of the pieces that begin in each word, or in the space before it."""
    assert isinstance(tokenizer, SentencePiece | Words)
    ends, found = [word.end() for word in WORD.finditer(text)], defaultdict(list)
    for place, begin in enumerate(tokenizer.begins(text)):
        word = next((n for n, end in enumerate(ends) if end > begin), len(ends) - 1)
        found[word].append(place)
    return found


def require_guidable(tokenizers: Tokenizers) -> None:
    """Raise ConfigError for tokenizers that do not say where a piece begins."""
    if not all(isinstance(each, SentencePiece | Words) for each in (tokenizers.source, tokenizers.target)):
        raise ConfigError(
            "--alignments needs pieces of sentencepiece, or words, which the teacher has not: leave it out"
        )
