"""The interface of tokenizers, and their special ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from ...base.errors import ArtifactError
from ...model.config import BOS_ID, EOS_ID, PAD_ID, UNK_ID

SPECIALS = ("<unk>", "<pad>", "<bos>", "<eos>")
"""The first entries of vocabularies learned here; sentencepiece calls the last two `<s>` and `</s>`."""


@dataclass(frozen=True)
class Specials:
    """Ids of a vocabulary's special tokens; the defaults are those of vocabularies learned here."""

    pad: int = PAD_ID
    """-1: none; likewise `bos`."""
    bos: int = BOS_ID
    eos: int = EOS_ID
    """Ends every line."""
    unk: int = UNK_ID
    """Stands for unknown text. Shown in text, unless it is also in `others`."""
    others: tuple[int, ...] = ()
    """Further ids that text never produces and that are not shown in text: language codes, masks."""

    @classmethod
    def of(cls, description: Mapping[str, Any]) -> Self:
        """Read a description."""
        return cls(**{**description, "others": tuple(description.get("others", ()))})

    @property
    def ids(self) -> list[int]:
        """All special ids, in order."""
        return sorted({self.pad, self.bos, self.eos, self.unk, *self.others} - {-1})

    @property
    def hidden(self) -> set[int]:
        """Special ids that are not shown in text."""
        return ({self.pad, self.bos, self.eos} - {self.unk}) | {*self.others}

    def to_json(self) -> dict[str, Any]:
        """The reverse of `of`."""
        return {name: value for name, value in asdict(self).items() if value != ()}


OUR_SPECIALS = Specials()


class Tokenizer(Protocol):
    """Converts text of one language to ids without special tokens, and back."""

    specials: Specials

    @property
    def size(self) -> int:
        """Size of the vocabulary."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of a line."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, without special tokens."""
        ...

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Vocabulary entries of ids, special tokens included."""
        ...

    def id_of(self, piece: str) -> int | None:
        """Id of a vocabulary entry; None if there is no such entry."""
        ...

    def save(self, directory: Path, stem: str) -> dict[str, Any]:
        """Write the files that `load_tokenizers` needs; returns its description for a header."""
        ...


def require_entries(entries: Sequence[str], specials: Specials) -> None:
    """Raise ArtifactError where a special id is beyond the list of entries."""
    if not 0 <= specials.ids[0] <= specials.ids[-1] < len(entries):
        raise ArtifactError(f"a vocabulary of {len(entries)} entries has no special token {specials.ids[-1]}")


def ids_of(entries: Sequence[str], specials: Specials) -> dict[str, int]:
    """Ids of the entries that text may produce; text that contains "</s>" must not end a sentence."""
    special = set(specials.ids)
    return {entry: i for i, entry in enumerate(entries) if i not in special}
