"""A folder of a Hugging Face tokenizer: its files, its special tokens, and those that were added."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..base.errors import ArtifactError, ConfigError
from ..bundle.text import AddedToken, Around, Specials, Tokenizer, Wrapped
from ..bundle.text.wrapped import normalizer
from ..model.config import MOST_OF_MODEL
from .base import ImportOptions
from .hf_rebuilt import entries_of, sentencepiece_model, steps
from .vocabularies import put_entries, read_pieces
from .weights import file_in, read_json_file

PYTHON = ("MarianTokenizer", "M2M100Tokenizer", "PLBartTokenizer", "FSMTTokenizer")
"""Classes that split text in Python; all others do it with the library `tokenizers`."""
BYTES = ("BartTokenizer", "RobertaTokenizer", "BlenderbotTokenizer")
"""Classes of byte-level BPE."""
EDGES = ("PegasusTokenizer", "NllbTokenizer", "MBart50Tokenizer")
"""Classes that keep a space before an added token as a piece."""
BACKENDS = ("TokenizersBackend", "PythonBackend", "PreTrainedTokenizer")
"""Generic classes, which follow tokenizer.json."""
DEFAULTS = {
    "marian": "MarianTokenizer",
    "m2m_100": "NllbTokenizer",
    "mbart": "MBartTokenizer",
    "plbart": "PLBartTokenizer",
    "fsmt": "FSMTTokenizer",
    "bart": "RobertaTokenizer",
    "blenderbot": "BlenderbotTokenizer",
    "pegasus": "PegasusTokenizer",
    "t5": "T5Tokenizer",
    "mt5": "T5Tokenizer",
}
"""Of model types, where no file says the class."""
IDS: dict[str, tuple[tuple[str, ...], tuple[Any, ...]]] = {
    "sp_model_kwargs": (PYTHON, ({}, None)),
    "legacy": (("PLBartTokenizer",), (True, None)),
    "do_lower_case": (("FSMTTokenizer",), (False, None)),
    "offset": (("PegasusTokenizer",), (103,)),
    "mask_token_sent": (("PegasusTokenizer",), ("<mask_1>",)),
    "bos_token": (("NllbTokenizer",), ("<s>",)),
    "pad_token": (("NllbTokenizer",), ("<pad>",)),
    "unk_token": ((*EDGES, "MBartTokenizer", "T5Tokenizer"), ("<unk>", None)),
}
"""Keys of tokenizer_config.json that change ids in some classes, and the values that are supported."""
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class Folder:
    """A folder, with what its config files say."""

    path: Path
    kind: str
    """The model's type."""
    options: ImportOptions
    settings: Mapping[str, Any]
    """generation_config.json, or config.json in its place."""
    config: Mapping[str, Any]

    def id_of(self, name: str, default: int = -1) -> int:
        """A special id: of the search, else of the model."""
        for values in (self.settings, self.config):
            found = values.get(f"{name}_token_id")
            found = found[0] if isinstance(found, list) and found else found
            if type(found) is int:
                return found
        return default

    def first(self, *names: str) -> str:
        """The first of some files that is there. Raises ArtifactError."""
        for name in names:
            if (self.path / name).is_file():
                return name
        raise ArtifactError(f"{self.path} has no {' and no '.join(names)}: download its tokenizer's files too")

    @cached_property
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
        return read_pieces(file_in(self.path, self.first(*names)))

    def specials(self, entries: list[str], others: list[int]) -> Specials:
        """Special ids; the unknown token is not shown, as transformers does not."""
        name = self.token("unk_token", "<unk>") if self.tokenizer_class in PYTHON else "<unk>"
        if name not in entries:
            raise ArtifactError(f"{self.path}: its vocabulary has no {name}: copy it again")
        unk, eos = entries.index(name), self.token("eos_token", "")
        if eos in entries and entries.index(eos) != self.id_of("eos"):
            raise ConfigError(
                f"{self.path}/tokenizer_config.json: eos_token '{eos}' is {entries.index(eos)}, but the model's "
                f"eos_token_id is {self.id_of('eos')}: give both the same token"
            )
        bos = self.id_of("bos")
        hidden = sorted({unk, *others})
        return Specials(
            self.id_of("pad"), bos if 0 <= bos < len(entries) else -1, self.id_of("eos"), unk, tuple(hidden)
        )

    @property
    def tokenizer_class(self) -> str:
        """The tokenizer class that transformers uses for the folder."""
        if self.kind == "umt5":
            return BACKENDS[0]
        stated = self.tokenizer_config.get("tokenizer_class") or self.config.get("tokenizer_class")
        m2m = self.kind == "m2m_100" and (self.path / "vocab.json").is_file()
        default = "M2M100Tokenizer" if m2m else DEFAULTS.get(self.kind, "")
        return str(stated or default).removesuffix("Fast")

    def require_known_keys(self) -> None:
        """Raise ConfigError for a key of tokenizer_config.json that changes ids in an unsupported way."""
        for key, (classes, known) in IDS.items():
            value = self.tokenizer_config.get(key, known[0])
            value = value.get("content") if isinstance(value, Mapping) and "content" in value else value
            if self.tokenizer_class in classes and value not in known:
                raise ConfigError(
                    f"{self.path}/tokenizer_config.json: {key}={value!r:.60} changes the ids of "
                    f"{self.tokenizer_class} in a way that is not known: it must be {known[0]!r}"
                )

    @cached_property
    def tokenizer_json(self) -> Mapping[str, Any]:
        """tokenizer.json, if there is one."""
        path = self.path / "tokenizer.json"
        return read_json_file(path) if path.is_file() else {}

    def token(self, name: str, default: str) -> str:
        """A special token by its role, such as `eos_token`."""
        for file in ("special_tokens_map.json", "tokenizer_config.json"):
            found = (read_json_file(self.path / file) if (self.path / file).is_file() else {}).get(name)
            default = str(found["content"] if isinstance(found, Mapping) and "content" in found else found or default)
        return default

    def listed(self) -> dict[str, dict[str, Any]]:
        """Tokens beside the vocabulary: `id`, and the flags of `tokenizers.AddedToken`.

        Raises ArtifactError for what is damaged.
        """
        found: dict[str, dict[str, Any]] = {}
        try:
            names = {*SPECIAL, *(key for key in self.tokenizer_config if key.endswith("_token"))}
            special = {self.token(name, "") for name in names} | {*self.additional()}
            if (self.path / "added_tokens.json").is_file():
                for token, i in read_json_file(self.path / "added_tokens.json").items():
                    found[token] = {"id": i, "special": token in special, "normalized": token not in special}
            for each in self.tokenizer_json.get("added_tokens", []):
                found[each["content"]] = dict(each)
            for i, each in (self.tokenizer_config.get("added_tokens_decoder") or {}).items():
                found[each["content"]] = {**each, "id": int(i)}
            for token, each in found.items():
                each["special"] = bool(each.get("special", False)) or token in special
            bad = [token for token, each in found.items() if not 0 <= each["id"] < MOST_OF_MODEL["src_vocab"]]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ArtifactError(f"{self.path}: its added tokens are damaged ({error!r:.60}): copy it again") from None
        if bad:
            raise ArtifactError(
                f"{self.path}: the added token {bad[0]!r:.40} has the id {found[bad[0]]['id']}: copy it again"
            )
        return found

    def added(self, special: bool | None = None) -> dict[str, int]:
        """Tokens beside the vocabulary, with their ids: all, special ones or others."""
        return {token: each["id"] for token, each in self.listed().items() if special in (None, each["special"])}

    def wrapped(self, tokenizer: Tokenizer, own: int, model: bytes = b"") -> Tokenizer:
        """A tokenizer with what transformers does around it; `own` are the entries of its own rules.

        Raises ArtifactError.
        """
        python, normal = self.tokenizer_class in PYTHON, self._normal(model)
        tokens = []
        for token, each in self.listed().items():
            if each["special"] or not token:
                continue
            if each["id"] >= tokenizer.size or tokenizer.pieces([each["id"]])[0] not in (token, normal(token)):
                raise ArtifactError(
                    f"{self.path}: the added token {token!r:.40} is not entry {each['id']}: copy it again"
                )
            flags = {name: bool(each.get(name)) for name in ("lstrip", "rstrip", "single_word", "normalized")}
            tokens.append(AddedToken(each["id"], **flags, piece=not python and each["id"] < own))
        if python and self.tokenizer_config.get("split_special_tokens"):
            tokens = []
        normalize, edges = self._normalizes() if tokens and model and not python else (False, False)
        around = Around(tuple(tokens), bool(tokens) and python, normalize, edges, self._cleans())
        return Wrapped(tokenizer, around, model) if tokens or around.clean_up else tokenizer

    def own_special(self) -> list[str]:
        """Special tokens that no model of the kind has by itself."""
        named = {self.token(name, "") for name in SPECIAL} | {"<s>", "<pad>", "</s>", "<unk>", "<mask>"}
        usual = ("<extra_id_", "<mask_", "<unk_", ">>")
        return [token for token in self.added(special=True) if token not in named and not token.startswith(usual)]

    def add(self, entries: list[str], added: Mapping[str, int], model: bytes) -> None:
        """Put added tokens behind a vocabulary, as outputs of transformers have them: normalized ones are changed."""
        put_entries(entries, added)
        listed, normal = self.listed(), self._normal(model)
        for token, i in added.items():
            if listed.get(token, {}).get("normalized") and not listed[token]["special"]:
                entries[i] = normal(token)

    def _normal(self, model: bytes) -> Callable[[str], str]:
        """What is done to normalized tokens."""
        if not model or self.tokenizer_class in PYTHON or not self.added(special=False):
            return lambda token: token
        normalize, edges = self._normalizes()
        return normalizer(model, Around(normalize=normalize, edges=edges))

    def _cleans(self) -> bool:
        """Whether transformers takes spaces out of outputs: not of BPE by the library `tokenizers`."""
        kind, stated = self.tokenizer_class, self.tokenizer_config
        bpe = kind in ("NllbTokenizer", *BYTES) or (
            kind in BACKENDS and self.tokenizer_json.get("model", {}).get("type") == "BPE"
        )
        although = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
        asked = stated.get("clean_up_tokenization_spaces", kind == "PLBartTokenizer")
        return bool(asked and (not bpe or stated.get(although)))

    def _normalizes(self) -> tuple[bool, bool]:
        """Whether tokens are looked for in normalized text, and whether a space before one is a piece."""
        kind = self.tokenizer_class
        if kind not in BACKENDS or not self.tokenizer_json:
            return kind != "MBartTokenizer", kind in EDGES
        tokenizer = self.tokenizer_json
        normalizer = list(steps(tokenizer.get("normalizer"), "normalizers"))
        before = list(steps(tokenizer.get("pre_tokenizer"), "pretokenizers"))
        if any(step.get("prepend_scheme") == "first" for step in before):
            raise ConfigError(
                f"{self.path}/tokenizer.json: added tokens beside prepend_scheme 'first' are not known: "
                "it must be 'always'"
            )
        strips = any(step["type"] == "Strip" and step.get("strip_right", True) for step in normalizer)
        splits = any(step["type"] == "WhitespaceSplit" for step in before)
        return any(step["type"] == "Precompiled" for step in normalizer), not (strips or splits)

    def additional(self) -> list[str]:
        """Additional special tokens in order."""
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            if (self.path / name).is_file():
                found = read_json_file(self.path / name)
                tokens = found.get("additional_special_tokens") or found.get("extra_special_tokens") or []
                tokens = [*tokens.values()] if isinstance(tokens, Mapping) else tokens
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
