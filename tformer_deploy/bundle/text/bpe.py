"""Byte-pair encoding without a library: over the bytes of a text, or over the characters of its words."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from ...base.errors import ArtifactError
from ...base.files import write_json
from .base import Specials, ids_of, require_entries

KEPT_SYMBOLS = 64
"""Longer words are not cached, as there may be very many."""


class Bpe:
    """Merges pairs of symbols of a word, the first rule first. Source: Sennrich et al. 2016."""

    kind = ""

    def __init__(self, entries: Sequence[str], merges: Sequence[str], specials: Specials, **how: Any) -> None:
        """merges: rules such as `a b`, in order."""
        self._entries, self._merges, self.specials, self._how = list(entries), list(merges), specials, how
        require_entries(self._entries, specials)
        pairs = [tuple(rule.split(" ")) for rule in self._merges]
        if wrong := next((rule for rule, pair in zip(self._merges, pairs, strict=True) if len(pair) != 2), ""):
            raise ArtifactError(f"the merge rule {wrong!r:.40} is not two symbols")
        self._ranks: dict[tuple[str, ...], int] = {}
        for rank, pair in enumerate(pairs):
            self._ranks.setdefault(pair, rank)
        self._ids = ids_of(self._entries, specials)
        self._kept = lru_cache(maxsize=1 << 16)(self._merge)

    @property
    def size(self) -> int:
        """Size of the vocabulary."""
        return len(self._entries)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Entries of ids."""
        return [self._entries[i] for i in ids]

    def id_of(self, piece: str) -> int | None:
        """Id of an entry; None if there is no such entry."""
        return self._entries.index(piece) if piece in self._entries else None

    def save(self, directory: Path, stem: str) -> dict[str, Any]:
        """Write `<stem>.json`."""
        write_json(directory / f"{stem}.json", {"entries": self._entries, "merges": self._merges})
        return {"kind": self.kind, "file": f"{stem}.json", **self._how, "specials": self.specials.to_json()}

    def _merge(self, symbols: tuple[str, ...]) -> tuple[str, ...]:
        """The symbols of a word after all merges."""
        row = list(symbols)  # "": merged into the symbol before it
        before, behind = list(range(-1, len(row) - 1)), list(range(1, len(row) + 1))
        places: dict[int, list[int]] = {}  # rule -> indices of its left symbols
        ranks: list[int] = []  # a heap

        def find(left: int) -> None:
            if left >= 0 and behind[left] < len(row):
                rank = self._ranks.get((row[left], row[behind[left]]))
                if rank is not None:
                    if rank not in places:
                        heappush(ranks, rank)
                    places.setdefault(rank, []).append(left)

        for left in range(len(row)):
            find(left)
        while ranks:
            rank = heappop(ranks)
            made = []
            for left in sorted(places.pop(rank)):
                right = behind[left]
                if right == len(row) or self._ranks.get((row[left], row[right])) != rank:
                    continue  # one of the two is already merged
                row[left], row[right] = row[left] + row[right], ""
                behind[left] = behind[right]
                if behind[left] < len(row):
                    before[behind[left]] = left
                made += [before[left], left]
            for left in made:
                find(left)
        return tuple(symbol for symbol in row if symbol)

    def _merged(self, symbols: tuple[str, ...]) -> tuple[str, ...]:
        """The same with a cache."""
        return self._kept(symbols) if len(symbols) <= KEPT_SYMBOLS else self._merge(symbols)

    def _known(self, symbols: Sequence[str]) -> list[int]:
        return [self._ids.get(symbol, self.specials.unk) for symbol in symbols]


class ByteBpe(Bpe):
    """Over UTF-8 bytes, each shown as a printable character, as GPT-2 and BART do. Source: Radford et al. 2019."""

    kind = "byte-bpe"

    def __init__(self, entries: Sequence[str], merges: Sequence[str], specials: Specials, space: bool = False) -> None:
        """`space`: a text, or a part of one, begins with a space if it does not already."""
        super().__init__(entries, merges, specials, **({"space": True} if space else {}))
        self._space = space

    def encode(self, text: str) -> list[int]:
        """Ids of a line."""
        ids = []
        for word in byte_words(f" {text}" if self._space and text and text[0] != " " else text):
            ids += self._known(self._merged(tuple(BYTES[byte] for byte in word.encode("utf-8", "replace"))))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""
        entries = (self._entries[i] for i in ids if i not in self.specials.hidden)
        line = b"".join(_bytes_of(entry) for entry in entries).decode("utf-8", "replace")
        return line.removeprefix(" ") if self._space else line


class WordBpe(Bpe):
    """Over the characters of words between spaces, as subword-nmt does."""

    kind = "bpe"

    def __init__(
        self, entries: Sequence[str], merges: Sequence[str], specials: Specials, inner: str = "@@", final: str = ""
    ) -> None:
        """`inner` marks every piece of a word but the last, `final` the last one."""
        super().__init__(entries, merges, specials, inner=inner, final=final)
        self._inner, self._final = inner, final

    def encode(self, text: str) -> list[int]:
        """Ids of a line."""
        ids = []
        for word in text.split():
            *symbols, last = self._merged((*word[:-1], f"{word[-1]}</w>"))
            ids += self._known(
                [*(f"{symbol}{self._inner}" for symbol in symbols), last.removesuffix("</w>") + self._final]
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""
        pieces = [self._entries[i] for i in ids if i not in self.specials.hidden]
        if self._final:
            return "".join(pieces).replace(self._final, " ").strip()
        return " ".join(pieces).replace(f"{self._inner} ", "").removesuffix(self._inner)


def byte_words(text: str) -> Iterator[str]:
    """The words of a text as GPT-2 splits it: contractions, letters, digits or others, each with a space before it.

    The same as `'(?:s|t|re|ve|m|ll|d)| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+`.
    """
    start = 0
    while start < len(text):
        end = start
        contraction = next((s for s in ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d") if text.startswith(s, start)), "")
        if contraction:
            end += len(contraction)
        else:
            first = start + (text[start] == " " and start + 1 < len(text) and _kind(text[start + 1]) != "space")
            kind, end = _kind(text[first]), first
            while end < len(text) and _kind(text[end]) == kind:
                end += 1
            if kind == "space" and end < len(text) and end - start > 1:
                end -= 1  # the last one belongs to the next word
        yield text[start:end]
        start = end


def _bytes_of(entry: str) -> bytes:
    """The bytes that an entry stands for; an entry with any other character is text as it is."""
    if all(c in UNBYTES for c in entry):
        return bytes(UNBYTES[c] for c in entry)
    return entry.encode("utf-8", "replace")


def _kind(character: str) -> str:
    if character.isspace() and not "\x1c" <= character <= "\x1f":  # white space only in Python
        return "space"
    return {"L": "letter", "N": "number"}.get(unicodedata.category(character)[0], "other")


def _byte_symbols() -> dict[int, str]:
    """A printable character for each byte: its own if it is printable, else one from U+0100 on."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(ord("\u00ae"), 256)]
    others = [byte for byte in range(256) if byte not in own]
    return {**{byte: chr(byte) for byte in own}, **{byte: chr(256 + i) for i, byte in enumerate(others)}}


BYTES = _byte_symbols()
UNBYTES = {symbol: byte for byte, symbol in BYTES.items()}
