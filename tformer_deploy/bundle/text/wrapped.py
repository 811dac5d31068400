"""What transformers adds to a tokenizer: added tokens, and spaces that are removed from outputs."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...base.errors import ArtifactError
from .base import Tokenizer

SPACE = "\u2581"
CLEANED = {
    **{f" {mark}": mark for mark in ".?!,"},
    " ' ": "'",
    **{f" {end}": end for end in ("n't", "'m", "'s", "'ve", "'re")},
}
"""Replacements of transformers in outputs, in this order."""
WHITE = "\t\n\x0b\x0c\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
"""Unicode's white space; Python's `isspace` has four more."""
LETTERS = ((0x24B6, 0x24E9), (0x1F130, 0x1F149), (0x1F150, 0x1F169), (0x1F170, 0x1F189))
"""Ranges of symbols that Unicode counts as alphabetic."""
RAW = b"\x1a\x06\x18\x00\x20\x00\x28\x00"
"""For a sentencepiece model whose normalizer changes characters only, not spaces."""


@dataclass(frozen=True)
class AddedToken:
    """An added token, which is matched in text as it is; fields as in `tokenizers.AddedToken`."""

    id: int
    lstrip: bool = False
    rstrip: bool = False
    """Whether it takes the white space on its left, on its right."""
    single_word: bool = False
    """Not matched inside a word."""
    normalized: bool = False
    """Matched in normalized text."""
    piece: bool = False
    """Ordinary tokenization may produce it too."""

    def to_json(self) -> dict[str, Any]:
        """For a description."""
        return {name: value for name, value in asdict(self).items() if value is not False}


@dataclass(frozen=True)
class Around:
    """Processing before and after a tokenizer."""

    tokens: tuple[AddedToken, ...] = ()
    python: bool = False
    """Split as by transformers' slow tokenizers in Python, not as by the library `tokenizers`."""
    normalize: bool = False
    """Normalize text with the sentencepiece model."""
    edges: bool = False
    """Several spaces are one, and one at a part's end is a piece."""
    clean_up: bool = False
    """Remove spaces before punctuation in outputs."""

    @classmethod
    def of(cls, description: dict[str, Any]) -> Around:
        """Read a description."""
        tokens = tuple(AddedToken(**each) for each in description.get("tokens", ()))
        return cls(**{**description, "tokens": tokens})

    def to_json(self) -> dict[str, Any]:
        """The reverse of `of`."""
        named = {name: value for name, value in asdict(self).items() if value is True}
        return {**({"tokens": [each.to_json() for each in self.tokens]} if self.tokens else {}), **named}


class Wrapped:
    """Another tokenizer, for the parts of a text between added tokens."""

    kind = "transformers"

    def __init__(self, inner: Tokenizer, around: Around, model: bytes = b"") -> None:
        """`model`: a sentencepiece model, which normalizes text."""
        self._inner, self._around, self.specials = inner, around, inner.specials
        self._normal = normalizer(model, around)
        plain: dict[str, AddedToken] = {}
        later: dict[str, AddedToken] = {}
        for token in around.tokens:
            if not 0 <= token.id < inner.size or token.id in inner.specials.ids:
                raise ArtifactError(f"the added token {token.id} is not an entry that text can give")
            text = inner.pieces([token.id])[0]
            if around.python or not token.normalized:
                plain.setdefault(text, token)
            else:
                later.setdefault(self._normal(text), token)
        self._plain, self._later = _Matches(plain), _Matches(later)
        self._only = {token.id for token in around.tokens if not (token.piece or around.python)}
        self._edge = [inner.specials.unk if (found := inner.id_of(SPACE)) is None else found]

    @property
    def size(self) -> int:
        """Size of the vocabulary."""
        return self._inner.size

    def encode(self, text: str) -> list[int]:
        """Ids of a line."""
        ids: list[int] = []
        for part in self._parts(text):
            if isinstance(part, int):
                ids.append(part)
                continue
            ids += [self.specials.unk if i in self._only else i for i in self._inner.encode(part)]
            ids += self._edge if self._around.edges and part.endswith(" ") else []
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The line of some ids."""
        return self.decode_as(ids, self._around.clean_up)

    def decode_as(self, ids: Sequence[int], clean_up: bool) -> str:
        """The same, with or without spaces before punctuation."""
        text = self._inner.decode(ids)
        return cleaned(text) if clean_up else text

    def settled(self, text: str) -> str:
        """The part of `text` that further ids cannot change: spaces after the last word may be removed."""
        return text[: max(text.rfind(" "), 0)] if self._around.clean_up else text

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Entries of ids."""
        return self._inner.pieces(ids)

    def id_of(self, piece: str) -> int | None:
        """Id of an entry; None if there is no such entry."""
        return self._inner.id_of(piece)

    def save(self, directory: Path, stem: str) -> dict[str, Any]:
        """Write the other tokenizer's files."""
        description = self._inner.save(directory, stem)
        return {**description, "kind": self.kind, "of": description["kind"], "around": self._around.to_json()}

    def _parts(self, text: str) -> Iterator[str | int]:
        if self._around.python:
            yield from self._plain.split_by_python(text)
            return
        for part in self._plain.split(text):
            if isinstance(part, int):
                yield part
            else:
                yield from self._later.split(self._normal(part))


class _Matches:
    """Finds texts in another: from the left, the longest first."""

    def __init__(self, tokens: dict[str, AddedToken]) -> None:
        self._tokens = {text: token for text, token in tokens.items() if text}
        texts = sorted(self._tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts)) if texts else "(?!)")

    def split(self, text: str) -> Iterator[str | int]:
        """Parts of a text and ids of added tokens, as by `tokenizers`."""
        at = 0
        for found in self._pattern.finditer(text):
            token, (start, end) = self._tokens[found[0]], found.span()
            if token.single_word and (_in_word(text[start - 1 : start]) or _in_word(text[end : end + 1])):
                continue
            while token.lstrip and start > at and text[start - 1] in WHITE:
                start -= 1
            while token.rstrip and end < len(text) and text[end] in WHITE:
                end += 1
            if at < start:
                yield text[at:start]
            yield token.id
            at = end
        if at < len(text):
            yield text[at:]

    def split_by_python(self, text: str) -> Iterator[str | int]:
        """The same as by slow tokenizers: a token that is not a single word joins the part beside it."""
        parts, at = [], 0
        for found in self._pattern.finditer(text):
            parts += [text[at : found.start()], found[0]]
            at = found.end()
        parts = [part for part in [*parts, text[at:]] if part]
        for i in range(len(parts)):
            token = self._tokens.get(parts[i])
            if token is None:
                continue
            left, right = parts[i - 1] if i else "", parts[i + 1] if i + 1 < len(parts) else ""
            if token.rstrip and right:
                parts[i + 1] = right.lstrip()
            if token.lstrip and left:
                parts[i - 1] = left.rstrip()
            if token.single_word and left and left[-1] != " ":
                parts[i - 1], parts[i] = parts[i - 1] + parts[i], ""
            elif token.single_word and right and right[0] != " ":
                parts[i + 1], parts[i] = parts[i] + parts[i + 1], ""
        for part in filter(None, parts):
            yield self._tokens[part].id if part in self._tokens else part


def cleaned(text: str) -> str:
    """A line without the spaces that transformers removes."""
    for old, new in CLEANED.items():
        text = text.replace(old, new)
    return text


def is_word(c: str) -> bool:
    r"""Whether a character is a part of words: `\w` of regular expressions, as Unicode's TR 18 has it."""
    kind = unicodedata.category(c)
    named = kind[0] in "LM" or kind in ("Nd", "Nl", "Pc") or c in "\u200c\u200d"
    return named or any(first <= ord(c) <= last for first, last in LETTERS)


def _in_word(c: str) -> bool:
    return bool(c) and is_word(c)


def normalizer(model: bytes, around: Around) -> Callable[[str], str]:
    """The normalizer of text in which normalized tokens are matched."""
    from .pieces import processor

    spaces = re.compile(" {2,}") if around.edges else re.compile("(?!)")
    if not (around.normalize and model):
        return lambda text: spaces.sub(" ", text)
    characters = processor(model + RAW)
    return lambda text: spaces.sub(" ", str(characters.normalize(text)))
