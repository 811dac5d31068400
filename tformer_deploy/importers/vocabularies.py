"""Vocabulary files of tutorials and toolkits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config import MOST_OF_MODEL
from ..data import split_pair
from ..errors import ArtifactError, ConfigError
from ..headers import parse_json
from ..text import Specials, Tokenizers, Words
from .base import ImportOptions
from .toolkit import read_text
from .weights import load_plain_pickle

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
    if path.suffix in (".pkl", ".pickle"):
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


def specials_of(entries: Sequence[str], where: Path) -> Specials:
    """Special ids by their usual names. Raises ConfigError where there is no unknown token or no end."""
    found = {}
    for kind, names in NAMES.items():
        ids = [entries.index(name) for name in names if name in entries]
        found[kind] = ids[0] if ids else -1
    for kind in ("eos", "unk"):
        if found[kind] < 0:
            raise ConfigError(f"{where}: no entry is called {' or '.join(NAMES[kind])}: add it to the vocabulary")
    return Specials(found["pad"], found["bos"], found["eos"], found["unk"])


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
            made.append(Words(entries, language, specials_of(entries, path), **how))  # type: ignore[arg-type]
    source = made[0].specials
    around = {"prefix": (source.bos,), "suffix": (source.eos,)} if begins and source.bos >= 0 else {}
    return Tokenizers(made[0], made[1], **around)
