"""A tokenizer's entries as texts by which another runtime can tell them apart."""

from __future__ import annotations

from collections.abc import Sequence

from ...bundle.text import Tokenizer


def entries_of(tokenizer: Tokenizer, size: int) -> list[str]:
    """All entries; a model may have more rows than its tokenizer, which have none."""
    return [*tokenizer.pieces(range(min(size, tokenizer.size))), *[""] * (size - tokenizer.size)]


def unique(entries: Sequence[str], first: Sequence[int]) -> list[str]:
    """Entries of which no two are alike, and none is empty.

    Of several that are, one of `first` keeps its name, else the last, which is the one that encoding gives.
    """
    kept = {entry: i for i, entry in enumerate(entries)} | {entries[i]: i for i in reversed(first)}
    found: list[str] = []
    for i, entry in enumerate(entries):
        name = entry
        while not name or kept.get(name, i) != i:
            name = f"<{name or i}>" if name != entry or not name else f"<{i}>"
        kept[name] = i
        found.append(name)
    return found
