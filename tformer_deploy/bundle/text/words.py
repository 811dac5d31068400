"""Word-level tokenizers: split at spaces, by spaCy's rules for a language, or by a regular expression."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ...base.errors import ArtifactError, ConfigError, missing_extra
from ...base.files import atomic_file, write_json
from .base import OUR_SPECIALS, SPECIALS, Specials, ids_of, require_entries

Splitter = Callable[[str], list[str]]
ONLY_PYTHON = re.compile(r"\(\?(?![:=!])|\\.|\[\[|&&|\|\||~~|[*+?}]\+")
"""Parts of a regular expression that other languages lack or read otherwise."""
EVERYWHERE = re.compile(r"\\[dwsDWS]|\\[^\w\s]")
"""Escapes that they all have."""


class Words:
    """A list of words."""

    def __init__(
        self,
        words: Sequence[str],
        language: str | None,
        specials: Specials | None = None,
        regex: str | None = None,
        lower: bool = False,
    ) -> None:
        """`language`: spaCy's rules split; `regex`: each match is a word, and words are joined without spaces."""
        if specials is None and tuple(words[: len(SPECIALS)]) != SPECIALS:
            raise ArtifactError(f"a word list must begin with {' '.join(SPECIALS)}")
        self._words, self._language, self.specials = list(words), language, specials or OUR_SPECIALS
        self._regex, self._lower = regex, lower
        require_entries(words, self.specials)
        self._ids = ids_of(words, self.specials)
        self._split = splitter(language, regex)

    @classmethod
    def train(cls, lines: Iterable[str], language: str | None, max_size: int) -> Words:
        """Keep the most frequent words, ties in the order of first appearance."""
        split = splitter(language)
        counts = Counter(word for line in lines for word in split(line))
        words = [word for word, _ in counts.most_common(max_size - len(SPECIALS))]
        return cls([*SPECIALS, *words], language)

    @property
    def size(self) -> int:
        """Size of the vocabulary."""
        return len(self._words)

    def encode(self, text: str) -> list[int]:
        """Ids of a line; unknown words become `<unk>`."""
        words = self._split(text.lower() if self._lower else text)
        return [self._ids.get(word, self.specials.unk) for word in words]

    def begins(self, text: str) -> list[int]:
        """Where each id of `encode` begins in a line, in characters."""
        found, place = [], 0
        for word in self._split(text):
            found.append(text.index(word, place))
            place = found[-1] + len(word)
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """Words joined by spaces, or without if a regular expression splits."""
        between = " " if self._regex is None else ""
        return between.join(self._words[i] for i in ids if i not in self.specials.hidden)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Entries of ids."""
        return [self._words[i] for i in ids]

    def id_of(self, piece: str) -> int | None:
        """Id of an entry; None if there is no such entry."""
        specials = {self._words[i]: i for i in self.specials.ids}
        return specials.get(piece, self._ids.get(piece))

    def save(self, directory: Path, stem: str) -> dict[str, Any]:
        """Write `<stem>.words`, one per line, or `<stem>.json` if a word contains a line break."""
        lines = not any("\n" in word for word in self._words)
        name = f"{stem}.words" if lines else f"{stem}.json"
        if lines:
            with atomic_file(directory / name) as temporary:
                temporary.write_text("\n".join(self._words) + "\n", encoding="utf-8")
        else:
            write_json(directory / name, {"entries": self._words})
        named = {"kind": "words", "file": name, "language": self._language}
        how = {**({"regex": self._regex} if self._regex else {}), **({"lower": True} if self._lower else {})}
        return {**named, **how, "specials": self.specials.to_json()}


def splitter(language: str | None, regex: str | None = None) -> Splitter:
    """The function that splits a line into words. Raises ConfigError for unknown rules."""
    if regex is not None:
        return compiled(regex).findall
    if language is None:
        return str.split
    try:
        import spacy
    except ModuleNotFoundError as error:
        raise missing_extra(error) from None
    try:
        rules = spacy.blank(language).tokenizer
    except ImportError:
        raise ConfigError(f"spaCy has no rules for language '{language}': use a code such as en or de") from None
    return lambda text: [token.text for token in rules(text) if not token.is_space]


def compiled(regex: str) -> re.Pattern[str]:
    """A regular expression that every language reads alike; `\\d`, `\\w` and `\\s` are ASCII only.

    Raises ConfigError.
    """
    plain = EVERYWHERE.sub("x", regex)
    if found := ONLY_PYTHON.search(plain):
        raise ConfigError(
            f"regular expression {regex!r:.80}: '{found[0]}' is not the same in every language: rewrite it"
        )
    try:
        pattern = re.compile(regex, re.ASCII)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"regular expression {regex!r:.80}: {error}") from None
    if pattern.groups:
        raise ConfigError(f"regular expression {regex!r:.80}: write groups as (?:...)")
    if pattern.match(""):
        raise ConfigError(f"regular expression {regex!r:.80} matches nothing at all: have it match characters")
    return pattern
