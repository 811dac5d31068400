"""Our tokenizers as Hugging Face's files: tokenizer.json, or the files of MarianTokenizer.

tokenizer.json says what the library `tokenizers` and transformers.js do. For sentencepiece models it is a translation:
both find the same pieces in usual text, but need not at ties. MarianTokenizer runs the sentencepiece model itself.
"""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...base.files import write_json
from ...base.headers import TOKENIZER_BYTES, read_bytes, read_json
from ...base.notes import note
from ...bundle.text import Specials, Tokenizer, Tokenizers
from ...bundle.text.words import compiled

SPACE = "\u2581"
BPE = 2
NORMAL, USER_DEFINED = 1, 4
"""A type of models and types of pieces in sentencepiece's format."""
ABSENT = 100.0
"""How much less than the least score an entry gets that a sentencepiece model lacks, so that no other text finds it."""
END = "</w>"
Json = dict[str, Any]


class Unsayable(Exception):
    """Why a tokenizer cannot be written as tokenizer.json."""


def write_tokenizers(tokenizers: Tokenizers, folder: Path, marian: bool) -> None:
    """Write the tokenizer of both sides, or the source's, and the target's into `target/`.

    `marian`: as MarianTokenizer where it can be. What cannot be said gets no file, and a note.
    """
    sides = {folder: tokenizers.source}
    if tokenizers.target is not tokenizers.source:
        sides[folder / "target"] = tokenizers.target
    with tempfile.TemporaryDirectory() as temporary:
        descriptions = {path: each.save(Path(temporary), f"side{i}") for i, (path, each) in enumerate(sides.items())}
        if marian and _as_marian(tokenizers, Path(temporary), list(descriptions.values()), folder):
            return
        for path, tokenizer in sides.items():
            around = (tokenizers.prefix, tokenizers.suffix) if path == folder else ((), None)
            eos = (tokenizer.specials.eos,)
            try:
                made = tokenizer_json(
                    tokenizer, Path(temporary), descriptions[path], (around[0], eos if around[1] is None else around[1])
                )
            except Unsayable as why:
                note(f"warning: no tokenizer files, programs must feed ids: {why}")
                return
            path.mkdir(exist_ok=True)
            write_json(path / "tokenizer.json", made)
            write_json(path / "tokenizer_config.json", _settings(tokenizer, "PreTrainedTokenizerFast"))


def tokenizer_json(
    tokenizer: Tokenizer, saved: Path, description: Mapping[str, Any], around: tuple[Sequence[int], Sequence[int]]
) -> Json:
    """A tokenizer whose files are in `saved` as tokenizer.json, with ids before and behind a text. Raises Unsayable."""
    kind = description.get("of", description["kind"])
    entries = tokenizer.pieces(range(tokenizer.size))
    files = {key: str(description[key]) for key in ("file", "entries") if key in description}
    if kind in ("sentencepiece", "pieces"):
        parts = _of_sentencepiece(read_bytes(saved, files["file"], TOKENIZER_BYTES), entries, tokenizer.specials.unk)
    elif kind == "byte-bpe":
        merges = read_json(saved, files["file"], TOKENIZER_BYTES)["merges"]
        parts = _of_bytes(entries, merges, bool(description.get("space")))
    elif kind == "bpe":
        merges = read_json(saved, files["file"], TOKENIZER_BYTES)["merges"]
        parts = _of_words_bpe(entries, merges, description, tokenizer.specials)
    else:
        parts = _of_words(entries, description, tokenizer.specials.unk)
    added = _added(tokenizer, entries, description.get("around", {}).get("tokens", ()))
    added += parts.pop("added", [])
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(added, key=lambda token: token["id"]),
        **parts,
        "post_processor": _template(entries, *around),
    }


def _as_marian(tokenizers: Tokenizers, saved: Path, descriptions: Sequence[Mapping[str, Any]], folder: Path) -> bool:
    """Write source.spm, target.spm and vocab.json, if both sides are sentencepiece models and sources end in eos."""
    plain = all(each["kind"] in ("sentencepiece", "pieces") for each in descriptions)
    source, target = tokenizers.source, tokenizers.target
    if not plain or tokenizers.prefix or tokenizers.suffix not in (None, (source.specials.eos,)):
        return False
    vocabularies = [each.pieces(range(each.size)) for each in (source, target)]
    if any(len(set(each)) < len(each) for each in vocabularies):
        return False
    for side, description in zip(("source", "target"), (descriptions[0], descriptions[-1]), strict=True):
        (folder / f"{side}.spm").write_bytes(read_bytes(saved, str(description["file"]), TOKENIZER_BYTES))
    apart = vocabularies[0] != vocabularies[1]
    for name, vocabulary in zip(("vocab", *(("target_vocab",) if apart else ())), vocabularies, strict=False):
        write_json(folder / f"{name}.json", {piece: i for i, piece in enumerate(vocabulary)})
    settings = {**_settings(source, "MarianTokenizer"), "source_lang": "source", "target_lang": "target"}
    write_json(folder / "tokenizer_config.json", {**settings, "separate_vocabs": apart})
    return True


def _settings(tokenizer: Tokenizer, name: str) -> Json:
    """tokenizer_config.json."""
    specials = tokenizer.specials
    ids = {"pad": specials.pad, "bos": specials.bos, "eos": specials.eos, "unk": specials.unk}
    tokens = {f"{key}_token": tokenizer.pieces([i])[0] for key, i in ids.items() if 0 <= i < tokenizer.size}
    return {"tokenizer_class": name, **tokens, "clean_up_tokenization_spaces": False, "padding_side": "right"}


def _added(tokenizer: Tokenizer, entries: Sequence[str], others: Sequence[Mapping[str, Any]]) -> list[Json]:
    """Special tokens, and those that transformers added."""
    flags = ("lstrip", "rstrip", "single_word", "normalized")
    found = [
        {"id": i, "content": entries[i], **dict.fromkeys(flags, False), "special": True}
        for i in tokenizer.specials.ids
        if i < len(entries) and entries[i]
    ]
    return found + [
        {"id": each["id"], "content": entries[each["id"]], **{flag: each.get(flag, False) for flag in flags}}
        | {"special": False}
        for each in others
    ]


def _template(entries: Sequence[str], before: Sequence[int], behind: Sequence[int]) -> Json:
    """The ids around a text."""
    part = [{"SpecialToken": {"id": entries[i], "type_id": 0}} for i in before]
    end = [{"SpecialToken": {"id": entries[i], "type_id": 0}} for i in behind]
    tokens = {entries[i]: {"id": entries[i], "ids": [i], "tokens": [entries[i]]} for i in (*before, *behind)}
    single = [*part, {"Sequence": {"id": "A", "type_id": 0}}, *end]
    pair = [*part, *({"Sequence": {"id": name, "type_id": 0}} for name in "AB"), *end]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}


def _of_sentencepiece(content: bytes, entries: Sequence[str], unk: int) -> Json:
    """Unigram or BPE over a sentencepiece model's pieces."""
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto.FromString(content)
    normal, rules = model.normalizer_spec, model.trainer_spec
    if rules.model_type not in (1, BPE) or not normal.add_dummy_prefix or rules.treat_whitespace_as_suffix:
        raise Unsayable("the sentencepiece model is of an unusual kind")
    steps: list[Json] = []
    if normal.precompiled_charsmap:
        charsmap = base64.b64encode(normal.precompiled_charsmap).decode("ascii")
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if normal.remove_extra_whitespaces:
        steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    scores = {piece.piece: piece.score for piece in model.pieces if piece.type in (NORMAL, USER_DEFINED)}
    space = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": True}
    own = {piece.piece for piece in model.pieces if piece.type == USER_DEFINED}
    flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized", "special"), False)
    added = [{"id": i, "content": entry, **flags} for i, entry in enumerate(entries) if entry in own]
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": space,
        "decoder": space,
        "model": (_bpe if rules.model_type == BPE else _unigram)(entries, scores, unk, rules.byte_fallback),
        "added": added,
    }


def _unigram(entries: Sequence[str], scores: Mapping[str, float], unk: int, bytewise: bool) -> Json:
    least = min(scores.values(), default=0.0)
    vocab = [[entry, 0.0 if i == unk else scores.get(entry, least - ABSENT)] for i, entry in enumerate(entries)]
    return {"type": "Unigram", "unk_id": unk, "vocab": vocab, "byte_fallback": bytewise}


def _bpe(entries: Sequence[str], scores: Mapping[str, float], unk: int, bytewise: bool) -> Json:
    ids = {entry: i for i, entry in enumerate(entries)}
    if missing := [piece for piece in scores if piece not in ids]:
        raise Unsayable(f"the vocabulary has no {missing[0]!r}, which the sentencepiece model may merge")
    rules = [
        [piece[:i], piece[i:]]
        for piece in sorted(scores, key=lambda piece: -scores[piece])
        for i in range(1, len(piece))
        if piece[:i] in scores and piece[i:] in scores
    ]
    return _bpe_model(ids, rules, unk_token=entries[unk], fuse_unk=True, byte_fallback=bytewise)


def _bpe_model(ids: Mapping[str, int], merges: Sequence[Sequence[str]], **how: Any) -> Json:
    usual: Json = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    usual |= {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {"type": "BPE", **usual, **how, "vocab": dict(ids), "merges": [list(rule) for rule in merges]}


def _of_bytes(entries: Sequence[str], merges: Sequence[str], space: bool) -> Json:
    """Byte-level BPE, as GPT-2 has it."""
    how = {"type": "ByteLevel", "add_prefix_space": space, "trim_offsets": True, "use_regex": True}
    ids = {entry: i for i, entry in enumerate(entries)}
    known = _known(ids, [rule.split(" ") for rule in merges])
    first = {"type": "Strip", "content": " ", "start": 1, "stop": 0}  # the space that was put before the text
    back = {"type": "Sequence", "decoders": [how, first]} if space else how
    return {"normalizer": None, "pre_tokenizer": how, "decoder": back, "model": _bpe_model(ids, known)}


def _known(ids: Mapping[str, int], merges: Sequence[Sequence[str]]) -> Sequence[Sequence[str]]:
    """The merge rules. Raises Unsayable where the vocabulary lacks a symbol of one, which the library refuses."""
    for rule in merges:
        for symbol in (*rule, "".join(rule)):
            if symbol not in ids:
                raise Unsayable(f"its vocabulary has no {symbol!r}, which a merge rule reads or makes")
    return merges


def _of_words_bpe(entries: Sequence[str], merges: Sequence[str], how: Mapping[str, Any], specials: Specials) -> Json:
    """subword-nmt's BPE: a symbol at a word's end is called with `</w>`, whatever the vocabulary calls it."""
    inner, final = str(how["inner"]), str(how["final"])
    if not inner and not final:
        raise Unsayable("its vocabulary does not say which symbols end a word")
    ids: dict[str, int] = {entries[i]: i for i in specials.ids}
    for i, entry in enumerate(entries):
        if i in specials.ids:
            continue
        goes_on, ends = bool(inner) and entry.endswith(inner), bool(final) and entry.endswith(final)
        if goes_on or not (inner or ends):
            ids.setdefault(entry.removesuffix(inner), i)
        if ends or not (final or goes_on):
            ids.setdefault(entry.removesuffix(final) + END, i)
    known = _known(ids, [rule.split(" ") for rule in merges])
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "decoder": {"type": "BPEDecoder", "suffix": END},
        "model": _bpe_model(ids, known, unk_token=entries[specials.unk], end_of_word_suffix=END),
    }


def _of_words(entries: Sequence[str], how: Mapping[str, Any], unk: int) -> Json:
    """A list of words."""
    if how.get("language"):
        raise Unsayable(f"spaCy's rules for '{how['language']}' split its text")
    before: Json = {"type": "WhitespaceSplit"}
    if how.get("regex"):
        pattern = {"Regex": compiled(str(how["regex"])).pattern}
        before = {"type": "Split", "pattern": pattern, "behavior": "Removed", "invert": True}
    return {
        "normalizer": {"type": "Lowercase"} if how.get("lower") else None,
        "pre_tokenizer": before,
        "decoder": {"type": "Fuse"} if how.get("regex") else None,
        "model": {
            "type": "WordLevel",
            "vocab": {entry: i for i, entry in enumerate(entries)},
            "unk_token": entries[unk],
        },
    }
