"""Vocabulary files of tutorials and toolkits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..base.errors import ArtifactError, ConfigError
from ..base.headers import parse_json, readable
from ..bundle.text import Specials, Tokenizers, Words
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
"""What special tokens are called."""


def read_entries(path: Path) -> list[str]:
    """The entries of a vocabulary in the order of their ids.

    A text file has one a line; JSON and plain pickles a list, a dict of ids, or either under `itos` or `stoi`.
    Raises ArtifactError.
    """
    if path.suffix in (".pkl", ".pickle") or _begins(path, b"\x80"):
        found = load_plain_pickle(path)
    elif path.suffix == ".json":
        try:
            found = parse_json(read_text(path))
        except ValueError as error:
            raise ArtifactError(f"{path} is damaged: {error}: write a word a line instead") from None
    else:
        return read_text(path).removesuffix("\n").split("\n")
    for key in ("itos", "stoi", "vocab"):
        if isinstance(found, Mapping) and isinstance(found.get(key), list | Mapping):
            found = found[key]
            break
    return _in_order(found, path)


def _begins(path: Path, begin: bytes) -> bool:
    """Whether a file begins so; no UTF-8 begins with 80, and every pickle since 2003 does."""
    with readable(path).open("rb") as file:
        return file.read(len(begin)) == begin


def _in_order(found: Any, path: Path) -> list[str]:
    if isinstance(found, Mapping):
        if not all(type(i) is int for i in found.values()):
            raise ArtifactError(f"{path} is not a vocabulary: its values are no ids")
        if not found or max(found.values()) >= MOST_OF_MODEL["src_vocab"] or min(found.values()) < 0:
            raise ArtifactError(f"{path} is not a vocabulary: its ids are not 0, 1, 2 and so on")
        entries = [""] * (max(found.values()) + 1)
        for word, i in found.items():
            entries[i] = str(word)
        return entries
    if not isinstance(found, list) or not all(isinstance(word, str) for word in found):
        raise ArtifactError(f"{path} is not a vocabulary: it holds no list of words and no dict of ids")
    return found


def specials_of(entries: Sequence[str], where: Path, model: Mapping[str, Any]) -> Specials:
    """Special ids by their usual names; what has none may be in `model`, fields of ModelConfig.

    An unknown word is padding where nothing is called unknown, as in `UserModel`. A first token without a name is a
    word as others are. Raises ConfigError where there is no end, or nothing for unknown words.
    """
    named = {
        kind: next((entries.index(name) for name in names if name in entries), -1) for kind, names in NAMES.items()
    }
    pad, eos = (named[kind] if named[kind] >= 0 else model.get(f"{kind}_id", -1) for kind in ("pad", "eos"))
    unk = named["unk"] if named["unk"] >= 0 else pad
    for kind, i in (("eos", eos), ("unk", unk)):
        if i < 0:
            field = "model.eos_id=ID, padding's where no token ends an output" if kind == "eos" else "model.pad_id=ID"
            names = " or ".join(NAMES[kind])
            raise ConfigError(f"{where}: no entry is called {names}: add it to the vocabulary, or --set {field}")
    return Specials(pad, named["bos"], eos, unk)


def ids_of(specials: Specials, model: Mapping[str, Any]) -> dict[str, int]:
    """The ids of the model's config. Raises ConfigError where nothing says what outputs begin with."""
    start = specials.bos if specials.bos >= 0 else model.get("bos_id", model.get("start_id", -1))
    if start < 0:
        names = " or ".join(NAMES["bos"])
        raise ConfigError(f"no entry of the target vocabulary is called {names}: name it with --set model.bos_id=ID")
    return {"pad_id": specials.pad if specials.pad >= 0 else specials.unk, "bos_id": start, "eos_id": specials.eos}


def decoding_of(specials: Specials) -> tuple[dict[str, Any], list[str]]:
    """Decoding options of a vocabulary, and notes."""
    if specials.eos != specials.pad:
        return {}, []
    return {"endless": True}, ["no token ends an output: say how long they are, as in --max-tokens 9"]


def word_tokenizers(
    options: ImportOptions, sizes: tuple[int, int], begins: bool, regex: str = "", lower: bool = False
) -> Tokenizers:
    """Word-level tokenizers of the files that options name; `sizes` are the embeddings', `begins`: sources have a bos.

    Raises ConfigError where there are no files, or they do not fit.
    """
    paths = options.src_vocab or options.vocab, options.tgt_vocab or options.vocab
    if paths[0] is None or paths[1] is None:
        raise ConfigError("the file has no words: name the vocabulary with --vocab, or --src-vocab and --tgt-vocab")
    if options.language and options.split_regex:
        raise ConfigError("--language and --split-regex both split words: leave one out")
    languages = split_pair(options.language, "--language") if options.language else (None, None)
    made: list[Words] = []
    for path, size, language in zip((paths[0], paths[1]), sizes, languages, strict=False):
        entries = read_entries(path)
        if len(entries) != size:
            raise ConfigError(f"{path} has {len(entries)} entries, the embedding {size}: is it another vocabulary?")
        how = {"regex": options.split_regex or regex or None, "lower": options.lower or lower}
        if made and path == paths[0] and language == languages[0]:  # type: ignore[index]
            made.append(made[0])
        else:
            made.append(Words(entries, language, specials_of(entries, path, options.model), **how))  # type: ignore[arg-type]
    source = made[0].specials
    prefix = (source.bos,) if begins and source.bos >= 0 else ()
    ends = made[0].pieces([source.eos])[0] in NAMES["eos"]
    return Tokenizers(made[0], made[1], prefix, None if ends else ())
