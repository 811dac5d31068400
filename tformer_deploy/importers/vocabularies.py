"""Vocabularies of all formats: their files, the order of entries, special tokens, and the tokenizers made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.errors import ArtifactError, ConfigError
from ..base.headers import TOKENIZER_BYTES, content, parse_json, readable
from ..bundle.text import ByteBpe, PieceList, Specials, Tokenizer, Tokenizers, WordBpe, Words
from ..bundle.text.pieces import processor
from ..model.config import MOST_OF_MODEL
from ..train.data import split_pair
from .base import ImportOptions
from .pickles import load_plain_pickle
from .toolkit import read_text

NAMES = {
    "pad": ("<pad>", "<blank>", "[PAD]", "<PAD>", "PAD"),
    "bos": ("<bos>", "<sos>", "<s>", "[BOS]", "[CLS]", "<SOS>", "<BOS>"),
    "eos": ("<eos>", "</s>", "[EOS]", "[SEP]", "<EOS>"),
    "unk": ("<unk>", "[UNK]", "<UNK>", "UNK"),
}
"""Usual names of special tokens, where a format has no names of its own."""
SPLIT = "the source names no codes: lines are split at spaces, so give text as the model was trained on, or --src-codes"


@dataclass(frozen=True)
class Vocabulary:
    """One side of a model."""

    entries: Sequence[str]
    """In the order of their ids."""
    specials: Specials
    codes: Path | None = None
    """A sentencepiece model or BPE codes, where the options name none."""

    @classmethod
    def named(cls, entries: Sequence[str], where: Path, names: Sequence[str], codes: Path | None = None) -> Vocabulary:
        """With a toolkit's names of padding, begin, end and unknown; it must have an end and an unknown."""
        pad, bos, eos, unk = (id_of(entries, name) for name in names)
        for name, i in ((names[2], eos), (names[3], unk)):
            if i < 0:
                raise ArtifactError(f"{where}: the vocabulary has no '{name}': is it of another format?")
        return cls(entries, Specials(pad, bos, eos, unk), codes)

    def tokenizer(self, codes: Path | None, lower: bool) -> Tokenizer:
        """Codes are a sentencepiece model or BPE rules; without them, lines are split at spaces.

        Raises ArtifactError, and ConfigError for codes of lower-cased text: their tokenizers do not change it.
        """
        if codes is None:
            return Words(self.entries, None, self.specials, lower=lower)
        if lower:
            raise ConfigError(f"--lower: {codes} splits text as it is: leave it out, and lower-case text before")
        if codes.suffix in (".model", ".spm"):
            return PieceList(read_pieces(codes)[0], self.entries, self.specials)
        lines = [line for line in read_text(codes).split("\n") if line.strip()]
        # subword-nmt's version 0.1 had the word's end as a symbol of its own; some tools add how often a pair was seen.
        if not lines or not lines[0].startswith("#version: 0.2"):
            raise ArtifactError(
                f"{codes} is neither a .model of sentencepiece nor BPE codes with #version: 0.2: if fastBPE wrote it, "
                "put that line first"
            )
        merges = [" ".join(line.split(" ")[:2]) for line in lines[1:]]
        # Byte-level BPE writes a space as U+0120, which is rare in any text.
        bytewise = sum(entry.startswith("\u0120") for entry in self.entries) > len(self.entries) // 10
        return (ByteBpe if bytewise else WordBpe)(self.entries, merges, self.specials)


# --- files ----------------------------------------------------------------------------------------------------------


def read_pieces(path: Path) -> tuple[bytes, list[str]]:
    """A sentencepiece model and its pieces. Raises ArtifactError."""
    model = content(path, TOKENIZER_BYTES)
    try:
        made = processor(model)
    except ArtifactError as error:
        raise ArtifactError(f"{path}: {error}: copy it again") from None
    return model, [made.id_to_piece(i) for i in range(made.get_piece_size())]


def vocabulary_files(options: ImportOptions, what: str = "the vocabulary") -> tuple[Path, Path]:
    """The source's and the target's, where the options must name them. Raises ConfigError."""
    source, target = options.vocabularies
    if source is None or target is None:
        raise ConfigError(f"the file has no words: name {what} with --vocab, or --src-vocab and --tgt-vocab")
    return source, target


def read_entries(path: Path) -> list[str]:
    """The entries of a vocabulary in the order of their ids.

    A text file has one a line; JSON and plain pickles a list, a dict of ids, or either under `itos` or `stoi`.
    Raises ArtifactError.
    """
    if path.suffix in (".pkl", ".pickle") or _begins(path, b"\x80"):
        loaded = load_plain_pickle(path)
    elif path.suffix == ".json":
        try:
            loaded = parse_json(read_text(path))
        except ValueError as error:
            raise ArtifactError(f"{path} is damaged: {error}: write a word a line instead") from None
    else:
        return read_text(path).removesuffix("\n").split("\n")
    for key in ("itos", "stoi", "vocab"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), list | Mapping):
            loaded = loaded[key]
            break
    return in_order(loaded, path)


def _begins(path: Path, begin: bytes) -> bool:
    """Whether a file begins so; no UTF-8 begins with 80, and every pickle since 2003 does."""
    with readable(path).open("rb") as file:
        return file.read(len(begin)) == begin


def in_order(loaded: Any, where: Path) -> list[str]:
    """A list of words, or a dict of ids by its ids; an id without a word is an empty entry. Raises ArtifactError."""
    if isinstance(loaded, Mapping):
        if not all(type(i) is int for i in loaded.values()):
            raise ArtifactError(f"{where} is not a vocabulary: its values are no ids")
        if not loaded or max(loaded.values()) >= MOST_OF_MODEL["src_vocab"] or min(loaded.values()) < 0:
            raise ArtifactError(f"{where} is not a vocabulary: its ids are not 0, 1, 2 and so on")
        entries: list[str] = []
        put_entries(entries, {str(word): i for word, i in loaded.items()})
        return entries
    if not isinstance(loaded, list) or not all(isinstance(word, str) for word in loaded):
        raise ArtifactError(f"{where} is not a vocabulary: it holds no list of words and no dict of ids")
    return loaded


def put_entries(entries: list[str], ids: Mapping[str, int]) -> None:
    """Put words where their ids are; entries between them are empty."""
    entries += [""] * (max(ids.values(), default=-1) + 1 - len(entries))
    for word, i in ids.items():
        entries[i] = word


def require_rows(entries: Sequence[str], where: Path, rows: int, padded: bool = False) -> None:
    """Raise ArtifactError for a vocabulary of another size than its embedding, which some toolkits pad with rows."""
    if len(entries) > rows or (len(entries) < rows and not padded):
        raise ArtifactError(
            f"{where}: the vocabulary has {len(entries)} entries, the embedding {rows}: is it another one?"
        )


# --- special tokens -------------------------------------------------------------------------------------------------


def id_of(entries: Sequence[str], *names: str) -> int:
    """The id of the first name that is an entry; -1: none is."""
    return next((entries.index(name) for name in names if name in entries), -1)


def specials_of(entries: Sequence[str], where: Path, model: Mapping[str, Any]) -> Specials:
    """Special ids by their usual names; what has none may be in `model`, fields of ModelConfig.

    Where nothing is called unknown, unknown words are padding, as in `UserModel`. A first token without a name is a
    word as others are. Raises ConfigError where there is no end, or nothing for unknown words.
    """
    named = {kind: id_of(entries, *names) for kind, names in NAMES.items()}
    pad, eos = (named[kind] if named[kind] >= 0 else model.get(f"{kind}_id", -1) for kind in ("pad", "eos"))
    unk = named["unk"] if named["unk"] >= 0 else pad
    for kind, i in (("eos", eos), ("unk", unk)):
        if i < 0:
            field = "model.eos_id=ID, padding's where no token ends an output" if kind == "eos" else "model.pad_id=ID"
            names = " or ".join(NAMES[kind])
            raise ConfigError(f"{where}: no entry is called {names}: add it to the vocabulary, or --set {field}")
    return Specials(pad, named["bos"], eos, unk)


def ids_of(specials: Specials, model: Mapping[str, Any] | None = None) -> dict[str, int]:
    """The ids of the model's config. Padding and first token that the vocabulary lacks are ids that it has.

    With `model`, what outputs begin with must be known: by its name, or there. Raises ConfigError.
    """
    bos = specials.bos
    if bos < 0:
        bos = specials.eos if model is None else model.get("bos_id", model.get("start_id", -1))
    if bos < 0:
        names = " or ".join(NAMES["bos"])
        raise ConfigError(f"no entry of the target vocabulary is called {names}: name it with --set model.bos_id=ID")
    return {"pad_id": specials.pad if specials.pad >= 0 else specials.unk, "bos_id": bos, "eos_id": specials.eos}


def decoding_of(specials: Specials) -> tuple[dict[str, Any], list[str]]:
    """Decoding options of a vocabulary, and notes."""
    if specials.eos != specials.pad:
        return {}, []
    return {"endless": True}, ["no token ends an output: say how long they are, as in --max-tokens 9"]


# --- tokenizers -----------------------------------------------------------------------------------------------------


def coded_tokenizers(
    options: ImportOptions,
    sides: Sequence[Vocabulary],
    prefix: tuple[int, ...] = (),
    suffix: tuple[int, ...] | None = None,
) -> Tokenizers:
    """Those of a toolkit's two vocabularies; one for both sides where they are the same."""
    source, target = sides
    src_codes, tgt_codes = options.src_codes or source.codes, options.tgt_codes or options.src_codes or target.codes
    if src_codes is None and options.tgt_codes is not None:
        raise ConfigError("--tgt-codes: name --src-codes too")
    made = source.tokenizer(src_codes, options.lower)
    if (list(source.entries), source.specials, src_codes) == (list(target.entries), target.specials, tgt_codes):
        return Tokenizers(made, made, prefix, suffix)
    return Tokenizers(made, target.tokenizer(tgt_codes, options.lower), prefix, suffix)


def notes_of(tokenizers: Tokenizers) -> list[str]:
    """What the user should know about text."""
    return [SPLIT] if isinstance(tokenizers.source, Words) else []


def word_tokenizers(options: ImportOptions, sizes: tuple[int, int]) -> Tokenizers:
    """Word-level tokenizers of the files that options name, for embeddings of these sizes.

    Raises ConfigError and ArtifactError where there are no files, or they do not fit.
    """
    paths = vocabulary_files(options)
    if options.language and options.split_regex:
        raise ConfigError("--language and --split-regex both split words: leave one out")
    languages = split_pair(options.language, "--language") if options.language else (None, None)
    made: list[Words] = []
    for path, size, language in zip(paths, sizes, languages, strict=True):
        entries = read_entries(path)
        require_rows(entries, path, size)
        if made and path == paths[0] and language == languages[0]:
            made.append(made[0])
        else:
            specials = specials_of(entries, path, options.model)
            made.append(Words(entries, language, specials, regex=options.split_regex or None, lower=options.lower))
    source = made[0].specials
    prefix = (source.bos,) if source.bos >= 0 else ()
    ends = made[0].pieces([source.eos])[0] in NAMES["eos"]
    return Tokenizers(made[0], made[1], prefix, None if ends else ())
