"""What every tokenizer is, and which of its ids are special."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from ...base.errors import ArtifactError
from ...model.config import BOS_ID, EOS_ID, PAD_ID, UNK_ID

SPECIALS = ("<unk>", "<pad>", "<bos>", "<eos>")
"""The first entries of the vocabularies that we learn; sentencepiece calls the last two `<s>` and `</s>`."""


@dataclass(frozen=True)
class Specials:
    """Ids of a vocabulary's special tokens; the defaults are ours, and those of descriptions that name none."""

    pad: int = PAD_ID
    """-1: there is none; of `bos` too."""
    bos: int = BOS_ID
    eos: int = EOS_ID
    """Ends every line."""
    unk: int = UNK_ID
    """What has no entry of its own. Shown in text, unless it is one of `others` too."""
    others: tuple[int, ...] = ()
    """More that no text gives and that are not shown in text: language codes, masks."""

    @classmethod
    def of(cls, description: Mapping[str, Any]) -> Self:
        """What a description says."""
        return cls(**{**description, "others": tuple(description.get("others", ()))})

    @property
    def ids(self) -> list[int]:
        """All of them, in order."""
        return sorted({self.pad, self.bos, self.eos, self.unk, *self.others} - {-1})

    @property
    def hidden(self) -> set[int]:
        """Those that stand for no text."""
        return ({self.pad, self.bos, self.eos} - {self.unk}) | {*self.others}

    def to_json(self) -> dict[str, Any]:
        """The reverse of `of`."""
        return {name: value for name, value in asdict(self).items() if value != ()}


OUR_SPECIALS = Specials()


class Tokenizer(Protocol):
    """Text of one language to ids without special tokens, and back."""

    specials: Specials

    @property
    def size(self) -> int:
        """Entries of the vocabulary."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of a line."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The line of some ids, special tokens left out."""
        ...

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary's entries of some ids, special tokens included."""
        ...

    def id_of(self, piece: str) -> int | None:
        """The id of an entry of the vocabulary, if there is such an entry."""
        ...

    def save(self, directory: Path, stem: str) -> dict[str, Any]:
        """Write the file that `load_tokenizer` needs; returns its description for a header."""
        ...


def require_entries(entries: Sequence[str], specials: Specials) -> None:
    """Raise ArtifactError where a list of entries is too short for its special ids."""
    if not 0 <= specials.ids[0] <= specials.ids[-1] < len(entries):
        raise ArtifactError(f"a vocabulary of {len(entries)} entries has no special token {specials.ids[-1]}")


def ids_of(entries: Sequence[str], specials: Specials) -> dict[str, int]:
    """The id of each entry that text may give; a text that holds "</s>" must not end a sentence."""
    special = set(specials.ids)
    return {entry: i for i, entry in enumerate(entries) if i not in special}
