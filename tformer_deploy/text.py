"""Text to ids and back: a joint sentencepiece model, or the word-level tokenizer of the classic tutorials."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from .config import BOS_ID, EOS_ID, MOST_OF_MODEL, PAD_ID, UNK_ID, ModelConfig
from .errors import ArtifactError, ConfigError, missing_extra, unknown
from .files import atomic_file
from .headers import TOKENIZER_BYTES, read_bytes

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
    """What has no entry of its own; the only one that is shown in text."""

    @property
    def ids(self) -> list[int]:
        """All of them, in order."""
        return sorted({self.pad, self.bos, self.eos, self.unk} - {-1})

    @property
    def hidden(self) -> set[int]:
        """Those that stand for no text."""
        return {self.pad, self.bos, self.eos} - {self.unk}


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


class SentencePiece:
    """A sentencepiece model; the bytes are kept as they are, so that every copy is the same file."""

    def __init__(self, model: bytes, specials: Specials = OUR_SPECIALS) -> None:
        from sentencepiece import SentencePieceProcessor

        try:
            if not model:
                raise RuntimeError("it is empty")
            self._processor = SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise ArtifactError(f"the sentencepiece model is damaged: {error}") from None
        if (unk := int(self._processor.unk_id())) != specials.unk:
            raise ArtifactError(f"the sentencepiece model has its unknown token at {unk}, not at {specials.unk}")
        self._model, self.specials = model, specials

    @classmethod
    def train(cls, lines: Iterable[str], vocab_size: int) -> SentencePiece:
        """Learn BPE pieces. Raises ConfigError where the lines do not hold `vocab_size` of them."""
        from sentencepiece import SentencePieceTrainer

        buffer = io.BytesIO()
        try:
            SentencePieceTrainer.Train(
                sentence_iterator=iter(lines),
                model_writer=buffer,
                model_type="bpe",
                vocab_size=vocab_size,
                character_coverage=1.0,
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
        """Entries of the vocabulary."""
        return int(self._processor.get_piece_size())

    def encode(self, text: str) -> list[int]:
        """Ids of a line."""
        return list(self._processor.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        """The line of some ids."""
        return str(self._processor.decode([int(i) for i in ids if i not in self.specials.hidden]))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Entries of some ids."""
        return [str(self._processor.id_to_piece(int(i))) for i in ids]

    def id_of(self, piece: str) -> int | None:
        """The id of an entry, if there is such an entry."""
        found = int(self._processor.piece_to_id(piece))
        unk = self.specials.unk
        return found if found != unk or piece == self._processor.id_to_piece(unk) else None

    def save(self, directory: Path, stem: str) -> dict[str, Any]:
        """Write `<stem>.model`."""
        with atomic_file(directory / f"{stem}.model") as temporary:
            temporary.write_bytes(self._model)
        return {"kind": "sentencepiece", "file": f"{stem}.model", "specials": asdict(self.specials)}


class Words:
    """One id a word: split by the default rules of a blank spaCy pipeline, or at spaces if no language is named."""

    def __init__(self, words: Sequence[str], language: str | None, specials: Specials | None = None) -> None:
        if specials is None and tuple(words[: len(SPECIALS)]) != SPECIALS:
            raise ArtifactError(f"a word list must begin with {' '.join(SPECIALS)}")
        self._words, self._language, self.specials = list(words), language, specials or OUR_SPECIALS
        if self.specials.ids[-1] >= len(words):
            raise ArtifactError(f"a word list of {len(words)} entries has no special token {self.specials.ids[-1]}")
        # Without the special tokens: a text that holds "<eos>" must not end a sentence.
        self._ids = {word: i for i, word in enumerate(words) if i not in self.specials.ids}
        self._split = _splitter(language)

    @classmethod
    def train(cls, lines: Iterable[str], language: str | None, max_size: int) -> Words:
        """Keep the most frequent words, ties in the order of first appearance."""
        split = _splitter(language)
        counts = Counter(word for line in lines for word in split(line))
        words = [word for word, _ in counts.most_common(max_size - len(SPECIALS))]
        return cls([*SPECIALS, *words], language)

    @property
    def size(self) -> int:
        """Entries of the vocabulary."""
        return len(self._words)

    def encode(self, text: str) -> list[int]:
        """Ids of a line; unknown words become `<unk>`."""
        return [self._ids.get(word, self.specials.unk) for word in self._split(text)]

    def decode(self, ids: Sequence[int]) -> str:
        """Words joined by spaces."""
        return " ".join(self._words[i] for i in ids if i not in self.specials.hidden)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Entries of some ids."""
        return [self._words[i] for i in ids]

    def id_of(self, piece: str) -> int | None:
        """The id of an entry, if there is such an entry."""
        specials = {self._words[i]: i for i in self.specials.ids}
        return specials.get(piece, self._ids.get(piece))

    def save(self, directory: Path, stem: str) -> dict[str, Any]:
        """Write `<stem>.words`, one a line."""
        with atomic_file(directory / f"{stem}.words") as temporary:
            temporary.write_text("\n".join(self._words) + "\n", encoding="utf-8")
        named = {"kind": "words", "file": f"{stem}.words", "language": self._language}
        return {**named, "specials": asdict(self.specials)}


def _splitter(language: str | None) -> Any:
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


@dataclass(frozen=True)
class Tokenizers:
    """Both sides of a model's text; the one place where special tokens are added and removed."""

    source: Tokenizer
    target: Tokenizer

    def source_ids(self, text: str) -> list[int]:
        """What the encoder sees: the line's ids and the source's eos."""
        return [*self.source.encode(text), self.source.specials.eos]

    def target_ids(self, text: str) -> list[int]:
        """What the decoder must produce: the line's ids and eos. Its input is the same behind the start token."""
        return [*self.target.encode(text), self.target.specials.eos]

    def target_text(self, ids: Sequence[int]) -> str:
        """The line that some produced ids stand for; a model may have more entries than its tokenizer."""
        size = self.target.size
        return self.target.decode([i for i in ids if i < size])

    def save(self, directory: Path) -> dict[str, Any]:
        """Write the files; returns the description for a header."""
        if self.source is self.target:
            joint = self.source.save(directory, "tokenizer")
            return {"source": joint, "target": joint}
        return {"source": self.source.save(directory, "source"), "target": self.target.save(directory, "target")}


def require_fit(config: ModelConfig, tokenizers: Tokenizers, where: str = "") -> None:
    """Raise ConfigError where a model lacks an entry of its tokenizers, or has other special ids than the target's."""
    for side, tokenizer in (("src_vocab", tokenizers.source), ("tgt_vocab", tokenizers.target)):
        entries = max(tokenizer.size, tokenizer.specials.ids[-1] + 1)
        if getattr(config, side) < entries:
            ours = f"{where}model.{side}={getattr(config, side)}"
            raise ConfigError(f"{ours} is smaller than the tokenizer's {entries} entries: give the model as many")
    for name in ("pad", "bos", "eos"):
        ours, theirs = getattr(config, f"{name}_id"), getattr(tokenizers.target.specials, name)
        if theirs not in (ours, -1):
            raise ConfigError(
                f"{where}model.{name}_id={ours}, but the target tokenizer's {name} is {theirs}: "
                "give the model the tokenizer's"
            )


def load_tokenizers(directory: Path, description: dict[str, Any]) -> Tokenizers:
    """Read what `Tokenizers.save` wrote. Raises ArtifactError."""
    source = _load(directory, description["source"])
    shared = description["target"] == description["source"]
    return Tokenizers(source, source if shared else _load(directory, description["target"]))


def tokenizer_files(description: dict[str, Any]) -> list[str]:
    """Names of the files that a description refers to."""
    return sorted({description["source"]["file"], description["target"]["file"]})


def _load(directory: Path, description: dict[str, Any]) -> Tokenizer:
    name = description["file"]
    content, kind = read_bytes(directory, name, TOKENIZER_BYTES), description.get("kind")
    specials = Specials(**description["specials"]) if "specials" in description else None
    try:
        if kind == "sentencepiece":
            return SentencePiece(content, specials or OUR_SPECIALS)
        if kind == "words":
            return Words(content.decode("utf-8").split("\n")[:-1], description.get("language"), specials)
    except (UnicodeDecodeError, ArtifactError) as error:
        raise ArtifactError(f"{directory / name} is damaged ({error}): copy or make the folder again") from None
    raise ArtifactError(f"{directory / name}: unknown tokenizer kind '{kind}'")


def train_tokenizers(
    kind: str, src: Sequence[str], tgt: Sequence[str], vocab_size: int, languages: tuple[str | None, str | None]
) -> Tokenizers:
    """Learn the tokenizers of a corpus: `bpe`, one for both sides, or `words`, one a language."""
    if vocab_size <= len(SPECIALS):
        raise ConfigError(f"--vocab-size {vocab_size}: must be larger than the {len(SPECIALS)} special tokens")
    if vocab_size > (most := MOST_OF_MODEL["src_vocab"]):
        raise ConfigError(f"--vocab-size {vocab_size}: must be at most {most}")
    if kind == "bpe":
        joint: Tokenizer = SentencePiece.train([*src, *tgt], vocab_size)
        return Tokenizers(joint, joint)
    if kind != "words":
        raise unknown("tokenizer", kind, ("bpe", "words"))
    if languages[0] == languages[1]:
        joint = Words.train([*src, *tgt], languages[0], vocab_size)
        return Tokenizers(joint, joint)
    return Tokenizers(Words.train(src, languages[0], vocab_size), Words.train(tgt, languages[1], vocab_size))
