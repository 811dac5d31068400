"""Tokenizers of sentencepiece: its own ids, or those of a list of pieces."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ...base.errors import ArtifactError, ConfigError
from ...base.files import atomic_file, write_json
from ...base.lines import LINE_BYTES
from ...model.config import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from .base import OUR_SPECIALS, Specials, ids_of, require_entries


class SentencePiece:
    """A sentencepiece model; its bytes are kept unchanged, so that every copy has the same hash."""

    def __init__(self, model: bytes, specials: Specials = OUR_SPECIALS) -> None:
        self._processor = processor(model)
        if (unk := int(self._processor.unk_id())) != specials.unk:
            raise ArtifactError(f"the sentencepiece model has its unknown token at {unk}, not at {specials.unk}")
        self._model, self.specials = model, specials

    @classmethod
    def train(cls, lines: Iterable[str], vocab_size: int, kind: str = "bpe") -> SentencePiece:
        """Learn pieces of a kind, `bpe` or `unigram`. Raises ConfigError where the lines have fewer than that."""
        from sentencepiece import SentencePieceTrainer

        buffer = io.BytesIO()
        try:
            SentencePieceTrainer.Train(
                sentence_iterator=iter(lines),
                model_writer=buffer,
                model_type=kind,
                vocab_size=vocab_size,
                character_coverage=1.0,
                max_sentence_length=LINE_BYTES,  # else longer lines are skipped, and their characters are unknown
                unk_id=UNK_ID,
                pad_id=PAD_ID,
                bos_id=BOS_ID,
                eos_id=EOS_ID,
                minloglevel=2,
            )
        except RuntimeError as error:
            reason = str(error).rsplit("] ", 1)[-1]
            raise ConfigError(f"--vocab-size {vocab_size} does not fit the training text: {reason}") from None
        return cls(buffer.getvalue())

    @property
    def size(self) -> int:
        """Size of the vocabulary."""
        return int(self._processor.get_piece_size())

    def encode(self, text: str) -> list[int]:
        """Ids of a line."""
        return list(self._processor.encode(text))

    def begins(self, text: str) -> list[int]:
        """Where each id of `encode` begins in a line, in characters; one of a space may begin before it."""
        return [int(piece.begin) for piece in self._processor.encode(text, out_type="immutable_proto").pieces]

    def sampled(self, lines: Sequence[str], seed: int, alpha: float, nbest: int = -1) -> list[list[int]]:
        """Ids of lines in pieces drawn at random: the same for the same seed. 0 <= seed < 2^32 - 1.

        `alpha`: of BPE the probability of leaving out a merge, of unigram models the exponent of the probabilities of
        the `nbest` best ways to split a line (-1: of all ways).
        """
        from sentencepiece import set_random_generator_seed

        # Each thread has a generator of its own, which takes the seed once, when it is first used: hence a new thread.
        set_random_generator_seed(seed)
        options = {"enable_sampling": True, "alpha": alpha, "nbest_size": nbest}
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(lambda: [list(self._processor.encode(line, **options)) for line in lines]).result()

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""
        return str(self._processor.decode([int(i) for i in ids if i not in self.specials.hidden]))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Entries of ids."""
        return [str(self._processor.id_to_piece(int(i))) for i in ids]

    def id_of(self, piece: str) -> int | None:
        """Id of an entry; None if there is no such entry."""
        found = int(self._processor.piece_to_id(piece))
        unk = self.specials.unk
        return found if found != unk or piece == self._processor.id_to_piece(unk) else None

    def save(self, directory: Path, stem: str) -> dict[str, Any]:
        """Write `<stem>.model`."""
        with atomic_file(directory / f"{stem}.model") as temporary:
            temporary.write_bytes(self._model)
        return {"kind": "sentencepiece", "file": f"{stem}.model", "specials": self.specials.to_json()}


class PieceList:
    """A sentencepiece model splits text; ids are indices into a list of pieces that may differ from the model's own.

    Pieces are looked up by their text, also those that the model does not know itself.
    """

    def __init__(self, model: bytes, entries: Sequence[str], specials: Specials) -> None:
        self._processor, self._model = processor(model), model
        self._entries, self.specials = list(entries), specials
        require_entries(self._entries, specials)
        self._ids = ids_of(self._entries, specials)

    @property
    def size(self) -> int:
        """Size of the list."""
        return len(self._entries)

    def encode(self, text: str) -> list[int]:
        """Ids of a line; a piece that is not in the list is unknown."""
        return [self._ids.get(piece, self.specials.unk) for piece in self._processor.encode_as_pieces(text)]

    def decode(self, ids: Sequence[int]) -> str:
        """Pieces joined, with spaces where `\u2581` is."""
        pieces = [self._entries[i] for i in ids if i not in self.specials.hidden]
        return joined_bytes(pieces).replace("\u2581", " ").strip(" ")

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Entries of ids."""
        return [self._entries[i] for i in ids]

    def id_of(self, piece: str) -> int | None:
        """Id of an entry; None if there is no such entry."""
        return self._entries.index(piece) if piece in self._entries else None

    def save(self, directory: Path, stem: str) -> dict[str, Any]:
        """Write `<stem>.model` and `<stem>.json`."""
        with atomic_file(directory / f"{stem}.model") as temporary:
            temporary.write_bytes(self._model)
        write_json(directory / f"{stem}.json", {"entries": self._entries})
        files = {"file": f"{stem}.model", "entries": f"{stem}.json"}
        return {"kind": "pieces", **files, "specials": self.specials.to_json()}


def processor(model: bytes) -> Any:
    """Load a sentencepiece model from its bytes. Raises ArtifactError."""
    from sentencepiece import SentencePieceProcessor

    try:
        if not model:
            raise RuntimeError("it is empty")
        return SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise ArtifactError(f"the sentencepiece model is damaged: {error}") from None


def joined_bytes(pieces: Sequence[str]) -> str:
    """Concatenated pieces; runs of byte pieces such as `<0xE2>` are decoded as UTF-8."""
    text = b""
    for piece in pieces:
        byte = re.fullmatch(r"<0x([0-9A-F]{2})>", piece)
        text += bytes.fromhex(byte[1]) if byte else piece.encode("utf-8", "replace")
    return text.decode("utf-8", "replace")
