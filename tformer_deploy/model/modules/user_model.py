"""How a user describes a module of their own: `UserModel`, what `FILE.py:FUNCTION` returns."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...base.errors import ArtifactError, ConfigError
from ...bundle.text import SentencePiece, Specials, Tokenizer, Tokenizers, Words
from ...bundle.text.pieces import processor
from ..config import ModelConfig

Vocabulary = Tokenizer | Sequence[str] | str | Path | None
"""A tokenizer; the entries in order of their ids, for text that is split at spaces; the file of a sentencepiece model
(.model) or one with an entry a line; None: entries are called w0, w1 and so on."""


@dataclass(frozen=True)
class UserModel:
    """A module of your own and how to call it. Sizes: B sentences, S source length, T target length, V vocabulary.

    Functions get the module as their first argument, so that they can be called with a copy. `src_mask` is true at
    tokens, false at padding. Give `forward`; or `encode` and `decode`; or, for `tformer encode`, `encode` alone without
    the fields of a target. A module that follows `seq2seq.Seq2Seq` needs none of them: its config has the rest.
    """

    module: nn.Module
    src_vocab: int = 0
    """Entries of the source embedding."""
    tgt_vocab: int = 0
    """Entries of the output."""
    max_positions: int = 0
    """Longest source and target in tokens, special tokens included."""
    pad_id: int = -1
    """Padding of shorter sources in a batch."""
    start_id: int = -1
    """First token of the decoder's input."""
    eos_id: int = -1
    """Ends every target, and every source unless `source_suffix` is set; not needed with `encode` alone and that."""
    unk_id: int = -1
    """Id of unknown words; -1: `pad_id`."""
    forward: Callable[[Any, Tensor, Tensor, Tensor], Tensor] | None = None
    """(module, src_ids (B, S), src_mask (B, S), tgt_ids (B, T)) -> logits (B, T, V) of the token after each."""
    encode: Callable[[Any, Tensor, Tensor], Tensor] | None = None
    """(module, src_ids (B, S), src_mask (B, S)) -> memory (B, S, d)."""
    decode: Callable[[Any, Tensor, Tensor, Tensor], Tensor] | None = None
    """(module, memory (B, S, d), src_mask (B, S), tgt_ids (B, T)) -> logits (B, T, V)."""
    layers: str = ""
    """Name of the decoder's list of layers in the module, such as `decoder.layers`: steps then cache the inputs of each
    self-attention, and run the layers on the last token only."""
    self_attention: str = ""
    """Name of the self-attention in such a layer, such as `self_attn`."""
    source: Vocabulary = None
    target: Vocabulary = None
    source_prefix: tuple[int, ...] = ()
    """Ids that every source begins with."""
    source_suffix: tuple[int, ...] | None = None
    """Ids that every source ends with; None: `eos_id`."""
    decoding: Mapping[str, Any] = field(default_factory=dict)
    """Default decoding options, such as `{"beams": 4}`."""

    def __post_init__(self) -> None:
        if not isinstance(self.module, nn.Module):
            raise ConfigError(f"UserModel(module={self.module!r:.60}): must be a torch.nn.Module")
        given = [name for name in ("forward", "encode", "decode") if getattr(self, name) is not None]
        for name in given:
            if not callable(getattr(self, name)):
                raise ConfigError(f"UserModel({name}=...): must be a function, such as a lambda")
        sizes = ("src_vocab", "tgt_vocab", "max_positions")
        if self.follows_protocol(given):
            named = [name for name in (*sizes, "layers", "self_attention") if getattr(self, name)]
            named += [name for name in ("pad_id", "start_id", "eos_id") if getattr(self, name) != -1]
            if named:
                raise ConfigError(f"UserModel({named[0]}=...): leave it out, the module's own config says it")
            return
        if given not in (["forward"], ["encode", "decode"], ["encode"]):
            raise ConfigError(
                f"UserModel({', '.join(f'{name}=...' for name in given) or 'module'}): "
                "give forward, both encode and decode, or encode alone"
            )
        if self.alone:
            self._require_no_target()
        for name in [each for each in sizes if each != "tgt_vocab"] if self.alone else sizes:
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ConfigError(f"UserModel({name}={getattr(self, name)!r}): must be a whole number of at least 1")
        for name in self._needed_ids:
            if type(getattr(self, name)) is not int or getattr(self, name) < 0:
                raise ConfigError(f"UserModel({name}={getattr(self, name)!r}): give the token's id")
        if bool(self.layers) != bool(self.self_attention):
            raise ConfigError("UserModel: give layers and self_attention together, or none of them")

    @property
    def alone(self) -> bool:
        """Whether it is an encoder without a decoder."""
        return self.encode is not None and self.decode is None and self.forward is None

    @property
    def _needed_ids(self) -> tuple[str, ...]:
        ends = () if self.source_suffix else ("eos_id",)
        return ("pad_id", *ends) if self.alone else ("pad_id", "start_id", "eos_id")

    def _require_no_target(self) -> None:
        """Raise ConfigError for a field that an encoder alone does not have."""
        values = {"tgt_vocab": 0, "start_id": -1, "layers": "", "self_attention": "", "target": None, "decoding": {}}
        if wrong := [name for name, usual in values.items() if getattr(self, name) != usual]:
            raise ConfigError(f"UserModel({wrong[0]}=...): leave it out beside encode alone, or give decode as well")

    def follows_protocol(self, given: Sequence[str]) -> bool:
        """Whether the module itself is exported, as a `Seq2Seq`."""
        return not given and not lacking(self.module)

    def config(self, caches: int, width: int, memory_width: int) -> ModelConfig:
        """What graphs depend on: vocabularies, ids, positions, memory's width, and caches of one head of a width."""
        last = self.eos_id if self.eos_id >= 0 else (self.source_suffix or (self.pad_id,))[-1]
        return ModelConfig(
            src_vocab=self.src_vocab,
            tgt_vocab=self.src_vocab if self.alone else self.tgt_vocab,
            d_model=width,
            d_ff=1,
            encoder_d_model=memory_width,
            heads=1,
            head_dim=width,
            encoder_layers=1,
            decoder_layers=caches,
            final_norm=False,
            positions="learned",
            max_positions=self.max_positions,
            share_embeddings="none",
            pad_id=self.pad_id,
            bos_id=self.start_id if self.start_id >= 0 else (*self.source_prefix, last)[0],
            eos_id=last,
            module_parameters=sum(parameter.numel() for parameter in self.module.parameters()),
        )

    def tokenizers(self, config: ModelConfig, folder: Path) -> Tokenizers:
        """The tokenizers of both sides; files are named as seen from `folder`. Raises TformerError."""
        unk = config.pad_id if self.unk_id < 0 else self.unk_id
        specials = Specials(config.pad_id, config.start_id, config.eos_id, unk)
        source = _tokenizer(self.source, config.src_vocab, specials, folder)
        same = self.alone or (self.source is self.target and config.src_vocab == config.tgt_vocab)
        target = source if same else _tokenizer(self.target, config.tgt_vocab, specials, folder)
        suffix = None if self.source_suffix is None else tuple(self.source_suffix)
        return Tokenizers(source, target, tuple(self.source_prefix), suffix)


PROTOCOL = ("config", "output", "encode", "cross_keys_values", "step")


def lacking(module: object) -> list[str]:
    """Members of `seq2seq.Seq2Seq` that an object lacks."""
    return [name for name in PROTOCOL if not hasattr(module, name)]


def _tokenizer(given: Vocabulary, size: int, specials: Specials, folder: Path) -> Tokenizer:
    if given is None:
        entries = [f"w{i}" for i in range(size)]
        for name in ("unk", "pad", "bos", "eos"):
            if 0 <= getattr(specials, name) < size:
                entries[getattr(specials, name)] = f"<{name}>"
        return Words(entries, None, specials)
    if isinstance(given, str | Path):
        path = folder / given
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ArtifactError(f"{path}: {error.strerror}: name the file of a vocabulary") from None
        if path.suffix == ".model":
            unk = int(processor(content).unk_id())
            return SentencePiece(content, Specials(specials.pad, specials.bos, specials.eos, unk))
        try:
            text = io.StringIO(content.decode("utf-8"), newline=None).read()  # every kind of line end becomes \n
            return Words(text.removesuffix("\n").split("\n"), None, specials)
        except UnicodeDecodeError as error:
            raise ArtifactError(f"{path} is not UTF-8: {error}: save it as UTF-8") from None
    if isinstance(given, Sequence):
        if not all(isinstance(entry, str) for entry in given):
            raise ConfigError("a vocabulary must be a list of texts, in the order of their ids")
        return Words(given, None, specials)
    return given
