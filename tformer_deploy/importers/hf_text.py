"""Tokenizers of Hugging Face folders, as lists of pieces and merge rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import MOST_OF_MODEL
from ..errors import ArtifactError, ConfigError
from ..headers import TOKENIZER_BYTES
from ..text import ByteBpe, PieceList, Specials, Tokenizer, Tokenizers, WordBpe
from ..text.pieces import processor
from .base import ImportOptions
from .hf_rebuilt import byte_level_space, entries_of, merges_of, sentencepiece_model
from .vocabularies import read_entries
from .weights import file_in, read_json_file

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

    @property
    def specials(self) -> Specials:
        """Of the target."""
        return self.tokenizers.target.specials


@dataclass(frozen=True)
class Folder:
    """A folder, with what its config files say."""

    path: Path
    options: ImportOptions
    settings: Mapping[str, Any]
    """generation_config.json, or what stands for it."""
    config: Mapping[str, Any]

    def id_of(self, name: str, default: int = -1) -> int:
        """A special id: of the search, else of the model."""
        for values in (self.settings, self.config):
            found = values.get(f"{name}_token_id")
            found = found[0] if isinstance(found, list) and found else found
            if type(found) is int:
                return found
        return default

    def content(self, name: str) -> bytes:
        """A file."""
        path = file_in(self.path, name)
        if path.stat().st_size > TOKENIZER_BYTES:
            raise ArtifactError(f"{path} has more than {TOKENIZER_BYTES} bytes: is it a tokenizer?")
        return path.read_bytes()

    def first(self, *names: str) -> str:
        """The first of some files that is there. Raises ArtifactError."""
        for name in names:
            if (self.path / name).is_file():
                return name
        raise ArtifactError(f"{self.path} has no {' and no '.join(names)}: download its tokenizer's files too")

    @property
    def tokenizer_config(self) -> Mapping[str, Any]:
        """tokenizer_config.json, if there is one."""
        path = self.path / "tokenizer_config.json"
        return read_json_file(path) if path.is_file() else {}

    @property
    def rebuilt(self) -> bool:
        """Whether tokenizer.json is all that there is of a sentencepiece model."""
        return not any(self.path.glob("*.model"))

    def sentencepiece(self, *names: str) -> tuple[bytes, list[str]]:
        """A sentencepiece model and its pieces. Raises ArtifactError."""
        if self.rebuilt:
            path = self.path / self.first(*names, "tokenizer.json")
            tokenizer = read_json_file(path)
            return sentencepiece_model(tokenizer, path), entries_of(tokenizer, path)
        model = self.content(self.first(*names))
        made = processor(model)
        return model, [made.id_to_piece(i) for i in range(made.get_piece_size())]

    def specials(self, entries: list[str], others: list[int]) -> Specials:
        """Special ids; the unknown token is not shown, as transformers does not."""
        unk = next((i for i, entry in enumerate(entries) if entry == "<unk>"), -1)
        if unk < 0:
            raise ArtifactError(f"{self.path}: its vocabulary has no <unk>: copy it again")
        bos = self.id_of("bos")
        hidden = sorted({unk, *others})
        return Specials(
            self.id_of("pad"), bos if 0 <= bos < len(entries) else -1, self.id_of("eos"), unk, tuple(hidden)
        )

    def added(self) -> dict[str, int]:
        """Tokens beside the vocabulary, with their ids. Raises ArtifactError for what cannot be ids."""
        found: dict[str, int] = {}
        try:
            if (self.path / "added_tokens.json").is_file():
                found |= read_json_file(self.path / "added_tokens.json")
            if (self.path / "tokenizer.json").is_file():
                listed = read_json_file(self.path / "tokenizer.json").get("added_tokens", [])
                found |= {each["content"]: each["id"] for each in listed}
            decoder = self.tokenizer_config.get("added_tokens_decoder") or {}
            found |= {each["content"]: int(i) for i, each in decoder.items()}
            bad = [token for token, i in found.items() if not 0 <= i < MOST_OF_MODEL["src_vocab"]]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ArtifactError(f"{self.path}: its added tokens are damaged ({error!r:.60}): copy it again") from None
        if bad:
            raise ArtifactError(
                f"{self.path}: the added token {bad[0]!r:.40} has the id {found[bad[0]]}: copy it again"
            )
        return found

    def additional(self) -> list[str]:
        """Additional special tokens in order."""
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            if (self.path / name).is_file():
                found = read_json_file(self.path / name)
                tokens = found.get("additional_special_tokens") or found.get("extra_special_tokens") or []
                if tokens:
                    return [token["content"] if isinstance(token, Mapping) else str(token) for token in tokens]
        return []

    def languages(self, ids: Mapping[str, int], spell: Callable[[str], tuple[str, ...]]) -> dict[str, tuple[str, int]]:
        """`src` and `tgt` by the options: the entry and its id. Raises ConfigError for what is missing or unknown."""
        if not ids:
            raise ArtifactError(
                f"{self.path} does not say the ids of its languages: "
                "load its tokenizer once with transformers 4, save_pretrained it there, and import again"
            )
        found = {}
        for side, asked in (("src", self.options.src_lang), ("tgt", self.options.tgt_lang)):
            name = next((each for each in spell(asked) if each in ids), "")
            if not name:
                some = ", ".join(sorted(ids)[:8])
                raise ConfigError(
                    f"--{side}-lang '{asked}': the model needs one of its {len(ids)} languages, such as {some}"
                )
            found[side] = name, ids[name]
        return found


def read_text(
    path: Path, kind: str, options: ImportOptions, settings: Mapping[str, Any], config: Mapping[str, Any]
) -> Text:
    """The tokenizers of a folder of a model type. Raises ArtifactError, ConfigError."""
    folder = Folder(path, options, settings, config)
    readers: dict[str, Callable[[Folder], Text]] = {
        "marian": _marian,
        "m2m_100": _many_languages,
        "mbart": _many_languages,
        "plbart": _many_languages,
        "fsmt": _fsmt,
        "bart": _bytes,
        "blenderbot": _bytes,
        "blenderbot-small": _no_text,
    }
    reader = readers.get(kind, _sentencepiece)
    for flag, asked, chosen_by in (
        ("--src-lang", options.src_lang, (_many_languages,)),
        ("--tgt-lang", options.tgt_lang, (_many_languages, _marian)),
    ):
        if asked and reader not in chosen_by:
            raise ConfigError(f"{flag} {asked}: not used by models of type {kind}: leave it out")
    return reader(folder)


def _no_text(folder: Folder) -> Text:
    raise ConfigError(f"{folder.path}: the tokenizer of blenderbot-small is not known")


def _marian(folder: Folder) -> Text:
    """Two sentencepiece models, one vocabulary or two; `>>fra<<` before a source says the language."""
    models = [folder.content(f"{side}.spm") for side in ("source", "target")]
    names = "vocab.json", folder.first("target_vocab.json", "vocab.json")
    entries = [read_entries(folder.path / name) for name in names]
    codes = {entry: i for i, entry in enumerate(entries[0]) if entry.startswith(">>") and entry.endswith("<<")}
    made = [PieceList(m, e, folder.specials(e, [])) for m, e in zip(models, entries, strict=True)]
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
    return Text(Tokenizers(made[0], made[1], prefix), start, before=before, notes=notes)


def _many_languages(folder: Folder) -> Text:
    """M2M100, NLLB, mBART, PLBart: a language's code stands beside a source and begins an output."""
    kind = folder.config["model_type"]
    model, pieces = folder.sentencepiece("sentencepiece.bpe.model", "spiece.model")
    if kind == "m2m_100" and (folder.path / "vocab.json").is_file():
        entries = read_entries(folder.path / "vocab.json")
        known = {
            token: len(entries) + i for i, token in enumerate(t for t in folder.additional() if t.startswith("__"))
        }
        spell: Callable[[str], tuple[str, ...]] = lambda code: (f"__{code}__",)  # noqa: E731
    else:
        entries = pieces if folder.rebuilt else [*FAIRSEQ, *pieces[3:]]
        known = {token: i for token, i in folder.added().items() if token not in FAIRSEQ}
        unnumbered = [token for token in folder.additional() if token not in known]
        # Older transformers wrote no ids. Those of NLLB are not those that transformers 5 gives.
        if kind != "m2m_100" and unnumbered and not folder.rebuilt and len(entries) not in known.values():
            known = {token: len(entries) + i for i, token in enumerate([*unnumbered, "<mask>"])} | known
        spell = lambda code: (code, f"__{code}__", f"{code}_XX", f"__{code.lower()}__")  # noqa: E731
    with_added(entries, known)
    languages = {token: i for token, i in known.items() if token != "<mask>"}
    tokenizer = PieceList(model, entries, folder.specials(entries, sorted(known.values())))
    eos, start, first = tokenizer.specials.eos, folder.id_of("decoder_start"), ()
    chosen = folder.languages(languages, spell)
    (src, src_id), (tgt, tgt_id) = chosen["src"], chosen["tgt"]
    if kind != "m2m_100" and folder.id_of("forced_bos") < 0 and not _is_mbart50(folder):
        # The code ends a source, and is the first decoder input.
        around: dict[str, tuple[int, ...]] = {"suffix": (eos, src_id)}
        start = tgt_id
    else:
        around = {"prefix": (src_id,), "suffix": (eos,)}
        start, first = (start if start >= 0 else eos), (tgt_id,)  # type: ignore[assignment]
    return Text(Tokenizers(tokenizer, tokenizer, **around), start, first, src, tgt)


def _is_mbart50(folder: Folder) -> bool:
    return any("MBart50" in str(each.get("tokenizer_class")) for each in (folder.tokenizer_config, folder.config))


def _bytes(folder: Folder) -> Text:
    """BART and Blenderbot: byte-level BPE."""
    space = blenderbot = folder.config["model_type"] == "blenderbot"
    if (folder.path / "vocab.json").is_file():
        entries = read_entries(folder.path / "vocab.json")
        merges = _merges(folder.path / folder.first("merges.txt"))
    else:
        path = folder.path / folder.first("vocab.json", "tokenizer.json")
        tokenizer_json = read_json_file(path)
        entries, merges = entries_of(tokenizer_json, path), merges_of(tokenizer_json)
        space = byte_level_space(tokenizer_json, path)
    space = bool(folder.tokenizer_config.get("add_prefix_space", space))
    known = {token: i for token, i in folder.added().items() if i >= len(entries)}
    with_added(entries, known)
    others = [i for i, entry in enumerate(entries) if entry in ("<mask>", "<s>", *known)]
    tokenizer = ByteBpe(entries, merges, folder.specials(entries, others), space=space)
    specials = tokenizer.specials
    around = {} if blenderbot else {"prefix": (entries.index("<s>"),), "suffix": (specials.eos,)}
    first = folder.id_of("forced_bos")
    start = folder.id_of("decoder_start", specials.bos if blenderbot else specials.eos)
    return Text(Tokenizers(tokenizer, tokenizer, **around), start, (first,) if first >= 0 else ())


def _fsmt(folder: Folder) -> Text:
    """BPE over words that Moses' tokenizer has split: text must come split."""
    merges = [" ".join(rule.split()[:2]) for rule in _merges(folder.path / folder.first("merges.txt"))]
    made: list[Tokenizer] = []
    for side in ("src", "tgt"):
        entries = read_entries(folder.path / f"vocab-{side}.json")
        made.append(WordBpe(entries, merges, folder.specials(entries, []), inner="", final="</w>"))
    start = folder.id_of("decoder_start", made[1].specials.eos)
    notes = ["text must be split by Moses' tokenizer, as transformers does it with sacremoses"]
    return Text(Tokenizers(made[0], made[1]), start, notes=notes)


def _sentencepiece(folder: Folder) -> Text:
    """T5, mT5, UMT5 and Pegasus: one sentencepiece model; Pegasus counts from 103."""
    model, pieces = folder.sentencepiece("spiece.model")
    if folder.config["model_type"] == "pegasus" and not folder.rebuilt:
        unknown = [f"<unk_{i}>" for i in range(2, 103)]
        pieces = ["<pad>", "</s>", "<mask_1>", "<mask_2>", *unknown, *pieces[2:]]
    known = {token: i for token, i in folder.added().items() if i >= len(pieces)}
    with_added(pieces, known)
    others = [i for i, piece in enumerate(pieces) if piece.startswith(("<extra_id_", "<mask_", "<unk_")) or piece == ""]
    tokenizer = PieceList(model, pieces, folder.specials(pieces, [*others, *known.values()]))
    first = folder.id_of("forced_bos")
    start = folder.id_of("decoder_start", tokenizer.specials.pad)
    return Text(Tokenizers(tokenizer, tokenizer), start, (first,) if first >= 0 else ())


def with_added(entries: list[str], added: Mapping[str, int]) -> None:
    """Put added tokens where their ids are; what is between is empty."""
    entries += [""] * (max(added.values(), default=len(entries) - 1) + 1 - len(entries))
    for token, i in added.items():
        entries[i] = token


def _merges(path: Path) -> list[str]:
    """Merge rules, one a line. Raises ArtifactError."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{path} is not UTF-8: {error}: copy it again") from None
    return [line for line in lines if line and not line.startswith("#version")]
