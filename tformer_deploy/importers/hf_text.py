"""Tokenizers of Hugging Face folders, as lists of pieces and merge rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..base.errors import ArtifactError, ConfigError
from ..bundle.text import ByteBpe, PieceList, Specials, Tokenizer, Tokenizers, WordBpe
from . import toolkit
from .base import ImportOptions
from .hf_folder import BACKENDS, BYTES, DEFAULTS, Folder
from .hf_rebuilt import around_text, byte_level_space, entries_of, merges_of, steps
from .vocabularies import put_entries, read_entries, read_pieces
from .weights import file_in

FAIRSEQ = ("<s>", "<pad>", "</s>", "<unk>")
"""What stands before a sentencepiece model's pieces in models of fairseq, which lose their first three."""


@dataclass
class Text:
    """What a folder says of text."""

    tokenizers: Tokenizers
    start_id: int
    """First decoder input."""
    first_ids: tuple[int, ...] = ()
    """What every output begins with."""
    src_lang: str = ""
    """The languages by the names that the folder has for them."""
    tgt_lang: str = ""
    before: str = ""
    """What transformers wants to see before a source."""
    notes: list[str] = field(default_factory=list)
    special: list[str] = field(default_factory=list)
    """Special tokens of somebody's own: in a text they are what they name for transformers, and text here."""

    @property
    def specials(self) -> Specials:
        """Of the target."""
        return self.tokenizers.target.specials


def read_text(
    path: Path, kind: str, options: ImportOptions, settings: Mapping[str, Any], config: Mapping[str, Any]
) -> Text:
    """The tokenizers of a folder of a model type. Raises ArtifactError, ConfigError."""
    folder = Folder(path, kind, options, settings, config)
    reader = _reader(folder)
    for flag, asked, chosen_by in (
        ("--src-lang", options.src_lang, (_many_languages,)),
        ("--tgt-lang", options.tgt_lang, (_many_languages, _marian)),
    ):
        if asked and reader not in chosen_by:
            raise ConfigError(f"{flag} {asked}: not used by models of type {kind}: leave it out")
    folder.require_known_keys()
    text = reader(folder)
    if reader != _many_languages and (own := folder.own_special()):
        shown = ", ".join(own[:8])
        text.special = own
        text.notes.append(
            "special tokens in a text are text here, transformers reads them as what they name, so lines with them are "
            f"not compared: {shown}"
        )
    return text


def _reader(folder: Folder) -> Callable[[Folder], Text]:
    """By the tokenizer's class, which need not be that of the model's type. Raises ConfigError for others."""
    languages = ("M2M100Tokenizer", "NllbTokenizer", "MBartTokenizer", "MBart50Tokenizer", "PLBartTokenizer")
    readers: dict[str, Callable[[Folder], Text]] = {
        "MarianTokenizer": _marian,
        "FSMTTokenizer": _fsmt,
        "T5Tokenizer": _sentencepiece,
        "PegasusTokenizer": _sentencepiece,
        **dict.fromkeys(languages, _many_languages),
        **dict.fromkeys(BYTES, _bytes),
    }
    name = folder.tokenizer_class
    if name in BACKENDS:
        model = folder.tokenizer_json.get("model", {}).get("type", "BPE")
        before = steps(folder.tokenizer_json.get("pre_tokenizer"), "pretokenizers")
        name = DEFAULTS.get(folder.kind, "T5Tokenizer")
        if readers[name] in (_bytes, _sentencepiece) and folder.tokenizer_json:
            bytewise = model == "BPE" and any(step["type"] == "ByteLevel" for step in before)
            name = "RobertaTokenizer" if bytewise else "T5Tokenizer" if model in ("BPE", "Unigram") else model
    if name not in readers:
        raise ConfigError(
            f"{folder.path}: its text is split by {name}, which cannot be imported: "
            f"it must be one of {', '.join(sorted(readers))}; docs/your-model.md says how a model goes without text"
        )
    return readers[name]


def _marian(folder: Folder) -> Text:
    """Two sentencepiece models, one vocabulary or two; `>>fra<<` before a source says the language."""
    models = [read_pieces(file_in(folder.path, f"{side}.spm"))[0] for side in ("source", "target")]
    apart = folder.tokenizer_config.get("separate_vocabs", (folder.path / "target_vocab.json").is_file())
    names = "vocab.json", folder.first("target_vocab.json") if apart else "vocab.json"
    entries = [read_entries(folder.path / name) for name in names]
    own = len(entries[0])
    codes = {entry: i for i, entry in enumerate(entries[0]) if entry.startswith(">>") and entry.endswith("<<")}
    _add(folder, entries)
    specials = [folder.specials(e, _special(folder, e)) for e in entries]
    made = [PieceList(m, e, s) for m, e, s in zip(models, entries, specials, strict=True)]
    prefix: tuple[int, ...] = ()
    before = ""
    if folder.options.tgt_lang:
        asked = folder.options.tgt_lang.strip("<>")
        if f">>{asked}<<" not in codes:
            raise ConfigError(f"--tgt-lang {asked}: the model has {', '.join(sorted(codes)[:20]) or 'one language'}")
        prefix, before = (codes[f">>{asked}<<"],), f">>{asked}<< "
    missing = codes and not prefix
    notes = ["sources carry no language: say which with --tgt-lang, such as " + min(codes)[2:-2]] if missing else []
    start = folder.id_of("decoder_start", folder.id_of("pad"))
    source, target = (folder.wrapped(each, own) for each in made)
    return Text(Tokenizers(source, target, prefix), start, before=before, notes=notes)


def _add(folder: Folder, entries: list[list[str]]) -> None:
    """Put added tokens into the vocabularies of both sides. Raises ConfigError where these are two."""
    if not folder.added(special=False):
        return
    if entries[0] != entries[1]:
        raise ConfigError(f"{folder.path}: added tokens beside two vocabularies cannot be imported: leave them out")
    for each in entries:
        put_entries(each, {token: i for token, i in folder.added().items() if i >= len(each)})


def _special(folder: Folder, entries: list[str]) -> list[int]:
    """Ids of special tokens that were added."""
    return [i for token, i in folder.added(special=True).items() if i < len(entries) and entries[i] == token]


def _many_languages(folder: Folder) -> Text:
    """M2M100, NLLB, mBART, PLBart: a language's code stands beside a source and begins an output."""
    kind, legacy = folder.tokenizer_class, bool(folder.tokenizer_config.get("legacy_behaviour"))
    model, pieces = folder.sentencepiece("sentencepiece.bpe.model", "spiece.model")
    if kind == "M2M100Tokenizer":
        entries = read_entries(folder.path / folder.first("vocab.json"))
        known = {
            token: len(entries) + i for i, token in enumerate(t for t in folder.additional() if t.startswith("__"))
        }
        spell: Callable[[str], tuple[str, ...]] = lambda code: (f"__{code}__",)  # noqa: E731
    else:
        entries = pieces if folder.rebuilt else [*FAIRSEQ, *pieces[3:]]
        known = {token: i for token, i in folder.added(special=True).items() if token not in FAIRSEQ}
        unnumbered = [token for token in folder.additional() if token not in known]
        # Older transformers wrote no ids. Those of NLLB are not those that transformers 5 gives.
        if folder.kind != "m2m_100" and unnumbered and not folder.rebuilt and len(entries) not in known.values():
            known = {token: len(entries) + i for i, token in enumerate([*unnumbered, "<mask>"])} | known
        spell = lambda code: (code, f"__{code}__", f"{code}_XX", f"__{code.lower()}__")  # noqa: E731
    own = len(entries)
    folder.add(entries, known | {t: i for t, i in folder.added(special=False).items() if i >= own}, model)
    languages = {token: i for token, i in known.items() if token != "<mask>"}
    made = PieceList(model, entries, folder.specials(entries, sorted(known.values())))
    eos, start, first = made.specials.eos, folder.id_of("decoder_start"), ()
    chosen = folder.languages(languages, spell)
    (src, src_id), (tgt, tgt_id) = chosen["src"], chosen["tgt"]
    around: dict[str, tuple[int, ...]] = {"prefix": (src_id,), "suffix": (eos,)}
    if legacy and kind == "NllbTokenizer":
        around = {"suffix": (eos, src_id)}
    if folder.kind != "m2m_100" and kind != "MBart50Tokenizer":
        # The code ends a source, and is the first decoder input.
        around, start = {"suffix": (eos, src_id)}, tgt_id
    else:
        start, first = (start if start >= 0 else eos), (tgt_id,)  # type: ignore[assignment]
    tokenizer = folder.wrapped(made, own, model)
    return Text(Tokenizers(tokenizer, tokenizer, **around), start, first, src, tgt)


def _bytes(folder: Folder) -> Text:
    """Byte-level BPE: BART, Blenderbot, and T5 with such a tokenizer."""
    space = blenderbot = folder.tokenizer_class == "BlenderbotTokenizer"
    if (folder.path / "vocab.json").is_file() and folder.tokenizer_class not in BACKENDS:
        entries = read_entries(folder.path / "vocab.json")
        merges = _merges(folder.path / folder.first("merges.txt"))
    else:
        path = folder.path / folder.first("vocab.json", "tokenizer.json")
        tokenizer_json = folder.tokenizer_json
        entries, merges = entries_of(tokenizer_json, path), merges_of(tokenizer_json)
        space = byte_level_space(tokenizer_json, path)
    if folder.tokenizer_class not in BACKENDS:
        space = bool(folder.tokenizer_config.get("add_prefix_space", space))
    own = len(entries)
    put_entries(entries, {token: i for token, i in folder.added().items() if i >= own})
    first, end = (folder.token(name, default) for name, default in (("cls_token", "<s>"), ("sep_token", "</s>")))
    if missing := [token for token in (first, end) if token not in entries]:
        raise ArtifactError(f"{folder.path}: its vocabulary has no {missing[0]}: copy it again")
    hidden = [i for i, entry in enumerate(entries) if entry in ("<mask>", "<s>", first, end)]
    made = ByteBpe(entries, merges, folder.specials(entries, [*hidden, *_special(folder, entries)]), space=space)
    specials = made.specials
    around: dict[str, tuple[int, ...]] = {"prefix": (entries.index(first),), "suffix": (entries.index(end),)}
    if blenderbot:
        around = {}
    elif folder.tokenizer_class in BACKENDS:
        around = around_text(folder.tokenizer_json, folder.path / "tokenizer.json")
    forced = folder.id_of("forced_bos")
    start = folder.id_of("decoder_start", specials.bos if blenderbot else specials.eos)
    tokenizer = folder.wrapped(made, own)
    return Text(Tokenizers(tokenizer, tokenizer, **around), start, (forced,) if forced >= 0 else ())


def _fsmt(folder: Folder) -> Text:
    """BPE over words that Moses' tokenizer has split: text must come split."""
    merges = [" ".join(rule.split()[:2]) for rule in _merges(folder.path / folder.first("merges.txt"))]
    entries = [read_entries(folder.path / f"vocab-{side}.json") for side in ("src", "tgt")]
    own = len(entries[0])
    _add(folder, entries)
    made: list[Tokenizer] = []
    for each in entries:
        tokenizer = WordBpe(each, merges, folder.specials(each, _special(folder, each)), inner="", final="</w>")
        made.append(folder.wrapped(tokenizer, own))
    start = folder.id_of("decoder_start", made[1].specials.eos)
    notes = ["text must be split by Moses' tokenizer, as transformers does it with sacremoses"]
    return Text(Tokenizers(made[0], made[1]), start, notes=notes)


def _sentencepiece(folder: Folder) -> Text:
    """T5, mT5, UMT5 and Pegasus: one sentencepiece model; Pegasus counts from 103."""
    model, pieces = folder.sentencepiece("spiece.model")
    if folder.tokenizer_class == "PegasusTokenizer" and not folder.rebuilt:
        unknown = [f"<unk_{i}>" for i in range(2, 103)]
        pieces = ["<pad>", "</s>", "<mask_1>", "<mask_2>", *unknown, *pieces[2:]]
    own = len(pieces)
    folder.add(pieces, {token: i for token, i in folder.added().items() if i >= own}, model)
    others = [i for i, piece in enumerate(pieces) if piece.startswith(("<extra_id_", "<mask_", "<unk_")) or piece == ""]
    made = PieceList(model, pieces, folder.specials(pieces, [*others, *_special(folder, pieces)]))
    tokenizer = folder.wrapped(made, own, model)
    first = folder.id_of("forced_bos")
    start = folder.id_of("decoder_start", tokenizer.specials.pad)
    return Text(Tokenizers(tokenizer, tokenizer), start, (first,) if first >= 0 else ())


def _merges(path: Path) -> list[str]:
    """Merge rules, one a line. Raises ArtifactError."""
    lines = toolkit.read_text(path).split("\n")
    return [line for line in lines if line and not line.startswith("#version")]
