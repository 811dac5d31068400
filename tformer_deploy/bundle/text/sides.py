"""The tokenizers of a model: source and target, their files, and the special tokens around a source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...base.errors import ArtifactError, ConfigError, unknown
from ...base.headers import TOKENIZER_BYTES, read_bytes, read_json
from ...model.config import MOST_OF_MODEL, ModelConfig
from .base import OUR_SPECIALS, SPECIALS, Specials, Tokenizer
from .bpe import ByteBpe, WordBpe
from .pieces import PieceList, SentencePiece
from .words import Words
from .wrapped import Around, Wrapped


@dataclass(frozen=True)
class Tokenizers:
    """Tokenizers of source and target; the only place where special tokens are added and removed."""

    source: Tokenizer
    target: Tokenizer
    prefix: tuple[int, ...] = ()
    """Ids that every source begins with, such as a language code."""
    suffix: tuple[int, ...] | None = None
    """Ids that every source ends with; None: the source's eos."""

    def source_ids(self, text: str) -> list[int]:
        """Input of the encoder: the line's ids between prefix and suffix."""
        prefix, suffix = self.around
        return [*prefix, *self.source.encode(text), *suffix]

    @property
    def around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What every source begins and ends with."""
        return self.prefix, (self.source.specials.eos,) if self.suffix is None else self.suffix

    def target_ids(self, text: str) -> list[int]:
        """Target of the decoder: the line's ids and eos. Its input is the same after the start token."""
        return [*self.target.encode(text), self.target.specials.eos]

    def target_text(self, ids: Sequence[int]) -> str:
        """Text of output ids; a model may have more entries than its tokenizer."""
        size = self.target.size
        return self.target.decode([i for i in ids if i < size])

    def settled_text(self, ids: Sequence[int]) -> str:
        """The part of `target_text` that further ids cannot change, so without an incomplete UTF-8 character."""
        text = self.target_text(ids).rstrip("\ufffd")
        return self.target.settled(text) if isinstance(self.target, Wrapped) else text

    def save(self, directory: Path) -> dict[str, Any]:
        """Write the files; returns the description for a header."""
        around = {"prefix": list(self.prefix)} if self.prefix else {}
        around |= {"suffix": list(self.suffix)} if self.suffix is not None else {}
        if self.source is self.target:
            joint = self.source.save(directory, "tokenizer")
            return {"source": {**joint, **around}, "target": joint}
        source, target = self.source.save(directory, "source"), self.target.save(directory, "target")
        return {"source": {**source, **around}, "target": target}


def require_fit(config: ModelConfig, tokenizers: Tokenizers, where: str = "") -> None:
    """Raise ConfigError where a model has fewer entries than its tokenizers, or other special ids than the target's."""
    for side, tokenizer in (("src_vocab", tokenizers.source), ("tgt_vocab", tokenizers.target)):
        entries = max(tokenizer.size, tokenizer.specials.ids[-1] + 1)
        if getattr(config, side) < entries:
            ours = f"{where}model.{side}={getattr(config, side)}"
            raise ConfigError(f"{ours} is smaller than the tokenizer's {entries} entries: give the model as many")
    around = (*tokenizers.prefix, *(tokenizers.suffix or ()))
    if any(not 0 <= i < config.src_vocab for i in around):
        raise ConfigError(
            f"{where}what stands around a source, ids {around}, is not in model.src_vocab={config.src_vocab}"
        )
    for name in ("pad", "bos", "eos"):
        ours, theirs = getattr(config, f"{name}_id"), getattr(tokenizers.target.specials, name)
        if theirs not in (ours, -1):
            raise ConfigError(
                f"{where}model.{name}_id={ours}, but the target tokenizer's {name} is {theirs}: "
                "give the model the tokenizer's"
            )


def load_tokenizers(directory: Path, description: Mapping[str, Any]) -> Tokenizers:
    """Read what `Tokenizers.save` wrote. Raises ArtifactError."""
    own = {key: value for key, value in description["source"].items() if key not in ("prefix", "suffix")}
    prefix, suffix = (description["source"].get(key) for key in ("prefix", "suffix"))
    source = _load(directory, own)
    target = source if description["target"] == own else _load(directory, description["target"])
    return Tokenizers(source, target, tuple(prefix or ()), None if suffix is None else tuple(suffix))


def tokenizer_files(description: Mapping[str, Any]) -> list[str]:
    """Names of the files that a description refers to."""
    sides = description["source"], description["target"]
    return sorted({side[key] for side in sides for key in ("file", "entries") if key in side})


def _load(directory: Path, description: Mapping[str, Any]) -> Tokenizer:
    name, kind = description["file"], description.get("kind")
    content = read_bytes(directory, name, TOKENIZER_BYTES)
    if kind == Wrapped.kind:
        inner = {key: value for key, value in description.items() if key not in ("of", "around")}
        made = _load(directory, {**inner, "kind": description["of"]})
        try:
            return Wrapped(made, Around.of(description["around"]), content if name.endswith(".model") else b"")
        except ArtifactError as error:
            raise ArtifactError(f"{directory / name} is damaged ({error}): copy or make the folder again") from None
    specials = Specials.of(description["specials"]) if "specials" in description else None
    how = {key: value for key, value in description.items() if key in ("regex", "lower", "space", "inner", "final")}
    try:
        if kind == "sentencepiece":
            return SentencePiece(content, specials or OUR_SPECIALS)
        if kind == "words":
            listed = name.endswith(".json")
            words = _strings(directory, name, "entries") if listed else content.decode("utf-8").split("\n")[:-1]
            return Words(words, description.get("language"), specials, **how)
        if kind == "pieces":
            return PieceList(content, _strings(directory, description["entries"], "entries"), specials or OUR_SPECIALS)
        if kind in (ByteBpe.kind, WordBpe.kind):
            make = ByteBpe if kind == ByteBpe.kind else WordBpe
            lists = _strings(directory, name, "entries"), _strings(directory, name, "merges")
            return make(*lists, specials or OUR_SPECIALS, **how)
    except (UnicodeDecodeError, ArtifactError, ConfigError, TypeError) as error:  # TypeError: settings of another kind
        raise ArtifactError(f"{directory / name} is damaged ({error}): copy or make the folder again") from None
    raise ArtifactError(f"{directory / name}: unknown tokenizer kind '{kind}'")


def _strings(directory: Path, name: str, key: str) -> list[str]:
    """A list of texts in a JSON file. Raises ArtifactError."""
    content = read_json(directory, name, TOKENIZER_BYTES)
    found = content.get(key) if isinstance(content, dict) else None
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise ArtifactError(f"it has no list of texts called '{key}'")
    return found


def train_tokenizers(
    kind: str, src: Sequence[str], tgt: Sequence[str], vocab_size: int, languages: tuple[str | None, str | None]
) -> Tokenizers:
    """Learn the tokenizers of a corpus: `bpe` or `unigram`, one for both sides, or `words`, one per language."""
    if vocab_size <= len(SPECIALS):
        raise ConfigError(f"--vocab-size {vocab_size}: must be larger than the {len(SPECIALS)} special tokens")
    if vocab_size > (most := MOST_OF_MODEL["src_vocab"]):
        raise ConfigError(f"--vocab-size {vocab_size}: must be at most {most}")
    if kind in ("bpe", "unigram"):
        joint: Tokenizer = SentencePiece.train([*src, *tgt], vocab_size, kind)
        return Tokenizers(joint, joint)
    if kind != "words":
        raise unknown("tokenizer", kind, ("bpe", "unigram", "words"))
    if languages[0] == languages[1]:
        joint = Words.train([*src, *tgt], languages[0], vocab_size)
        return Tokenizers(joint, joint)
    return Tokenizers(Words.train(src, languages[0], vocab_size), Words.train(tgt, languages[1], vocab_size))
