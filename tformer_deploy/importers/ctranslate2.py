"""Folders that a CTranslate2 converter wrote: model.bin of a TransformerSpec, config.json, vocabularies.

Weights may be float32, float16, bfloat16, int16 or int8, which are dequantized. Refused: relative positions, rotary,
alibi, several source features, shared keys and values. With --src-lang, sources begin with its token and end; with
--tgt-lang, outputs begin with its token.
Source: CTranslate2, src/layers/transformer.cc and src/layers/common.cc.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..base.errors import ArtifactError, ConfigError
from ..base.settings import from_dict
from ..bundle.text import Specials, Tokenizers
from ..model.config import ModelConfig
from .base import Imported, ImportOptions, Parameters
from .ctranslate2_file import TEXTS, Binary, read_binary
from .seen import Seen
from .toolkit import (
    MOST_POSITIONS,
    NEVER,
    Settings,
    both_sides,
    known_activation,
    rows,
    sharing,
    sines,
    with_start,
)
from .vocabularies import Vocabulary, coded_tokenizers, id_of, ids_of, notes_of, read_entries, require_rows
from .weights import Weights, file_in, read_json_file

ACTIVATIONS = ("relu", "gelu_tanh", "silu", "gelu", "gelu_sigmoid", "tanh", "sigmoid")
"""In the order of their numbers in a file."""
OFF = ("alibi", "multi_query_attention", "multi_query", "final_logit_softcapping")
"""Settings that must be off."""
READ = (
    *("num_heads", "pre_norm", "activation", "scale_embeddings", "start_from_zero_embedding", "head_dim"),
    *("queries_scale", "weight_scale", "with_source_bos", "with_source_eos", "with_target_bos", *TEXTS),
)
IGNORED = ("alignment_layer", "alignment_heads", "alibi_use_positive_positions", "scale_alibi", "embeddings_merge")
"""Settings without effect where the refused ones are off."""
SOURCE, TARGET = "encoder/embeddings_0/weight", "decoder/embeddings/weight"
OUTPUT, BIAS = "decoder/projection/weight", "decoder/projection/bias"


def recognises(seen: Seen) -> bool:
    """Whether it is a folder with a model.bin and vocabularies."""
    return (seen.path / "model.bin").is_file() and any(seen.path.glob("*vocabulary.*"))


def read(path: Path, options: ImportOptions) -> Imported:
    """See `base.Imported`."""
    found = read_binary(file_in(path, "model.bin"))
    described = Settings(str(path / "config.json"), _described(path, found.numbers))
    for name, value in found.numbers.items():
        kind = name.rpartition("/")[2]
        if kind not in READ + IGNORED and not (kind in OFF and not value):
            raise ArtifactError(f"{path / 'model.bin'}: {name}={value} is not supported")
    if strange := next((name for name in found.weights if "relative_" in name or "embeddings_1/" in name), ""):
        raise ArtifactError(f"{path / 'model.bin'}: {strange} is not supported")
    tokenizers, start = _tokenizers(path, found.weights, described, options)
    config = _config(found, described, tokenizers, start, options)
    made = Parameters(found.weights, config)
    _fill(made, found.numbers)
    lang = tokenizers.target.id_of(options.tgt_lang) if options.tgt_lang not in ("", start) else None
    first: dict[str, Any] = {} if lang is None else {"first_ids": [lang], "first_adds_zero": True}
    notes = notes_of(tokenizers)
    if tokenizers.suffix == ():
        notes.append("sources get no end token, as config.json says: if your program added one, set its add_source_eos")
    if (path / "vmap.txt").is_file():
        notes.append("vmap.txt is left out: docs/shortlist.md tells how to make a shortlist")

    def original() -> CTranslate2:
        return CTranslate2(path, config, described, options)

    return Imported(config, made, tokenizers, first, original, notes=notes)


def _described(path: Path, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """config.json; older models say the same in model.bin."""
    if (path / "config.json").is_file():
        return read_json_file(path / "config.json")
    tokens = {name: numbers[name] for name in TEXTS if name in numbers}
    start = tokens.get("bos_token", "<s>") if numbers.get("with_target_bos", 1) else tokens.get("eos_token", "</s>")
    around = {f"add_source_{end}": bool(numbers.get(f"with_source_{end}", 0)) for end in ("bos", "eos")}
    return {**tokens, **around, "decoder_start_token": start}


def _tokenizers(path: Path, weights: Weights, described: Settings, options: ImportOptions) -> tuple[Tokenizers, str]:
    """Tokenizers, and the token that the decoder starts with."""
    entries = _vocabulary(path, "source"), _vocabulary(path, "target")
    unk, bos, eos = (described.get(*each) for each in zip(TEXTS, ("<unk>", "<s>", "</s>"), strict=True))
    start = described.get("decoder_start_token", options.tgt_lang)
    if not start:
        raise ConfigError(f"{described.where}: decoder_start_token is null: name the first token with --tgt-lang")
    sides = []
    langs = options.src_lang, options.tgt_lang
    for words, table, lang, first in zip(entries, (SOURCE, TARGET), langs, ("", start), strict=True):
        if missing := [token for token in (unk, eos, lang, first) if token and token not in words]:
            raise ConfigError(f"{path}: the vocabulary has no '{missing[0]}': see config.json, --src-lang, --tgt-lang")
        require_rows(words, path, weights.shape(table, 2)[0])
        ids = id_of(words, "<blank>", "<pad>"), id_of(words, bos), id_of(words, eos), id_of(words, unk)
        others = {id_of(words, token) for token in (start, options.src_lang, options.tgt_lang)}
        sides.append(Vocabulary(words, Specials(*ids, tuple(sorted(others - {-1, *ids})))))
    begins = [bos] if described.get("add_source_bos", False) else []
    prefix = tuple(entries[0].index(token) for token in (*begins, options.src_lang) if token)
    # Models of many languages are from Hugging Face: their sources end, and nothing says so.
    ends = described.get("add_source_eos", False) or bool(options.src_lang)
    return coded_tokenizers(options, sides, prefix, None if ends else ()), start


def _vocabulary(path: Path, side: str) -> list[str]:
    files = [path / f"{name}_vocabulary{suffix}" for name in ("shared", side) for suffix in (".json", ".txt")]
    if not (found := next((file for file in files if file.is_file()), None)):
        raise ArtifactError(f"{path} has no {files[2].name}: models with several source features are not supported")
    return read_entries(found)


def _config(
    found: Binary, described: Settings, tokenizers: Tokenizers, start: str, options: ImportOptions
) -> ModelConfig:
    weights, numbers = found.weights, Settings(str(found.weights.where), found.numbers)
    (src_vocab, source), (tgt_vocab, target) = weights.shape(SOURCE, 2), weights.shape(TARGET, 2)
    activation = numbers.same("encoder/activation", "decoder/activation", 0)
    if not 0 <= activation < len(ACTIVATIONS):
        raise numbers.refused("activation", activation)
    if ("encoder/layer_norm/gamma" in weights) != ("decoder/layer_norm/gamma" in weights):
        raise ArtifactError(f"{weights.where}: layer_norm of one side alone is not supported")
    rms = "encoder/layer_0/ffn/layer_norm/beta" not in weights
    names = found.names
    tables = (f"{side}/position_encodings/encodings" for side in ("encoder", "decoder"))
    values = {
        "src_vocab": src_vocab,
        "tgt_vocab": tgt_vocab,
        **both_sides(_sizes(found, "decoder", target), _sizes(found, "encoder", source)),
        "norm_position": "pre" if numbers.same("encoder/pre_norm", "decoder/pre_norm", 1) else "post",
        "final_norm": "encoder/layer_norm/gamma" in weights,
        "norm": "rms" if rms else "standard",
        "norm_eps": described.get("layer_norm_epsilon", 1e-6 if rms else 1e-5),
        "embedding_norm": "encoder/layernorm_embedding/gamma" in weights,
        "scale_embeddings": _scaled(found.numbers, weights),
        "positions": "learned",
        "max_positions": min(weights.shape(name)[0] if name in weights else MOST_POSITIONS for name in tables),
        "share_embeddings": sharing(names[OUTPUT] == names[TARGET], names[SOURCE] == names[TARGET]),
        "output_bias": "decoder/projection/bias" in weights,
        "activation": known_activation(ACTIVATIONS[activation], f"{weights.where}: activation"),
        "ff": "gated" if "decoder/layer_0/ffn/linear_0_noact/weight" in weights else "plain",
        "pad_embedding_zero": False,
        **ids_of(tokenizers.target.specials),
        "start_id": tokenizers.target.id_of(start),
    }
    if numbers.get("decoder/start_from_zero_embedding", 0):
        values |= with_start(src_vocab, tgt_vocab)
    return from_dict(ModelConfig, {**values, **options.model}, "model")


def _sizes(found: Binary, side: str, width: int) -> dict[str, int]:
    numbers = Settings(str(found.weights.where), found.numbers)
    return {
        "d_model": width,
        "d_ff": found.weights.shape(f"{side}/layer_0/ffn/linear_0/weight")[0],
        "heads": numbers.get(f"{side}/num_heads", 8),
        "head_dim": numbers.get(f"{side}/layer_0/self_attention/head_dim", 0),
        "layers": found.weights.layers(f"{side}/layer_{{}}/self_attention/linear_0/weight"),
    }


def _scaled(numbers: Mapping[str, Any], weights: Weights) -> bool:
    """Whether embeddings are multiplied by the square root of their width: a flag, or the factor itself."""
    found = []
    for side, table in (("encoder", SOURCE), ("decoder", TARGET)):
        value, root = numbers.get(f"{side}/scale_embeddings", 1), math.sqrt(weights.shape(table, 2)[1])
        if isinstance(value, float) and min(abs(value - 1), abs(value - root)) > 1e-4 * root:
            raise ArtifactError(
                f"{weights.where}: {side}/scale_embeddings={value:g} is not supported, only {root:g}, 1"
            )
        found.append(abs(value - root) <= 1e-4 * root if isinstance(value, float) else bool(value))
    if found[0] != found[1]:
        raise ArtifactError(f"{weights.where}: scale_embeddings of one side alone is not supported")
    return found[0]


def _fill(made: Parameters, numbers: Mapping[str, Any]) -> None:
    """All parameters."""
    config = made.config
    made.put("src_embedding.weight", SOURCE, rows(config.src_vocab))
    made.put("tgt_embedding.weight", TARGET, rows(config.tgt_vocab))
    made.put("output.weight", OUTPUT, rows(config.tgt_vocab))
    if BIAS in made.weights:
        made.put("output.bias", BIAS, rows(config.tgt_vocab, NEVER))
    elif config.output_bias:
        made.make("output.bias", lambda: rows(config.tgt_vocab, NEVER)(torch.zeros(config.tgt_vocab - 1)))
    for short, name, side in (("src", "encoder", config.encoder), ("tgt", "decoder", config.decoder)):
        table = f"{name}/position_encodings/encodings"
        if table in made.weights:
            made.put(f"{short}_positions", table, lambda table: table[: config.max_positions])
        else:
            made.make(f"{short}_positions", lambda width=side.width: sines(1, config.max_positions, width))  # type: ignore[misc]
        _norm(made, f"{short}_embedding_norm", f"{name}/layernorm_embedding")
        _norm(made, f"{name}_norm", f"{name}/layer_norm")
        for i in range(side.layers):
            ours, theirs = f"{name}.{i}", f"{name}/layer_{i}"
            for part, their_part in (("attention", "self_attention"), ("cross", "attention")):
                if f"{ours}.{part}.query.weight" in made.shapes:
                    scale = numbers.get(f"{theirs}/{their_part}/queries_scale", side.head_dim**-0.5)
                    _attention(made, f"{ours}.{part}", f"{theirs}/{their_part}", scale * math.sqrt(side.head_dim))
            gated = config.ff == "gated"
            _linear(made, f"{ours}.ff.gate", f"{theirs}/ffn/linear_0") if gated else None
            _linear(made, f"{ours}.ff.up", f"{theirs}/ffn/linear_0{'_noact' if gated else ''}")
            _linear(made, f"{ours}.ff.down", f"{theirs}/ffn/linear_1")
            _norm(made, f"{ours}.ff_residual.norm", f"{theirs}/ffn/layer_norm")


def _attention(made: Parameters, ours: str, theirs: str, scale: float) -> None:
    """Query, key and value are one linear layer; of cross-attention, key and value are."""
    third = f"{theirs}/linear_2/weight" in made.weights
    for i, part in enumerate(("query", "key", "value")):
        number, block, blocks = (min(i, 1), max(i - 1, 0), 1 if i == 0 else 2) if third else (0, i, 3)
        _linear(made, f"{ours}.{part}", f"{theirs}/linear_{number}", block, blocks, scale if i == 0 else 1.0)
    _linear(made, f"{ours}.out", f"{theirs}/linear_{2 if third else 1}")
    _norm(made, f"{ours}_residual.norm", f"{theirs}/layer_norm")


def _linear(made: Parameters, ours: str, theirs: str, block: int = 0, blocks: int = 1, scale: float = 1.0) -> None:
    """Weight and bias, or one of several blocks of their rows."""
    count = made.weights.shape(f"{theirs}/weight")[0] // blocks

    def part(tensor: Tensor) -> Tensor:
        fits = len(tensor) == count * blocks  # what does not is named where it is written
        return tensor[block * count : (block + 1) * count] * scale if fits else tensor

    made.put(f"{ours}.weight", f"{theirs}/weight", part)
    if f"{theirs}/bias" in made.weights:
        made.put(f"{ours}.bias", f"{theirs}/bias", part)
    else:
        made.fill(f"{ours}.bias")


def _norm(made: Parameters, ours: str, theirs: str) -> None:
    if f"{ours}.weight" in made.shapes:
        made.put(f"{ours}.weight", f"{theirs}/gamma")
        if f"{ours}.bias" in made.shapes:
            made.put(f"{ours}.bias", f"{theirs}/beta")


class CTranslate2:
    """The folder as the ctranslate2 package runs it, in float32. It shows no encoder states."""

    def __init__(self, path: Path, config: ModelConfig, described: Settings, options: ImportOptions) -> None:
        import ctranslate2  # type: ignore[import-not-found,unused-ignore]

        self.name = f"ctranslate2 {ctranslate2.__version__}"
        try:
            self._translator = ctranslate2.Translator(str(path), "cpu", compute_type="float32")
        except (ValueError, RuntimeError) as error:
            raise ArtifactError(f"{self.name} refuses {path}: {error}: import it with --no-compare") from None
        self._sides = _vocabulary(path, "source"), _vocabulary(path, "target")
        self._config, self._first = config, [options.tgt_lang] if options.tgt_lang else []
        ends = [described.get(f"add_source_{end}", False) for end in ("bos", "eos")]
        self._begin, self._end = ends[0], -1 if ends[1] else None

    def in_double(self) -> None:
        """See `base.Original`."""

    def memory(self, src_ids: Tensor, src_lengths: Tensor) -> None:
        """See `base.Original`."""

    def log_probs(self, src_ids: Tensor, src_lengths: Tensor, tgt_ids: Tensor) -> Tensor:
        """See `base.Original`."""
        forced = [[self._sides[1][i] for i in row] for row in tgt_ids[:, 1:].tolist()]
        found = self._run(src_ids, src_lengths, forced, 1, len(forced[0]) + 1, return_logits_vocab=True)
        size = tgt_ids.shape[1]
        logits = torch.stack([torch.from_numpy(np.array(each.logits[0])).reshape(size, -1) for each in found])
        more = self._config.tgt_vocab - logits.shape[-1]
        return F.pad(logits.log_softmax(-1), (0, more), value=NEVER)

    def generate(self, src_ids: Tensor, src_lengths: Tensor, beams: int, max_tokens: int) -> list[list[int]] | None:
        """See `base.Original`."""
        if self._first and beams > 1:
            return None  # behind a forced token, theirs ends no beam but the best at once; ours has no such rule
        found = self._run(src_ids, src_lengths, [self._first] * len(src_ids), beams, max_tokens)
        ids = {token: i for i, token in reversed([*enumerate(self._sides[1])])}
        return [[ids[token] for token in each.hypotheses[0]] for each in found]

    def source_ids(self, text: str) -> None:
        """See `base.Original`."""

    def text(self, ids: list[int]) -> None:
        """See `base.Original`."""

    def _run(
        self, src_ids: Tensor, lengths: Tensor, forced: list[list[str]], beams: int, most: int, **how: bool
    ) -> Any:
        """Translate; what they add to sources is left out here."""
        sources = [
            [self._sides[0][i] for i in row[:n]] for row, n in zip(src_ids.tolist(), lengths.tolist(), strict=True)
        ]
        return self._translator.translate_batch(
            [source[self._begin : self._end] for source in sources],
            forced,
            beam_size=beams,
            max_decoding_length=most,
            min_decoding_length=0,  # a higher one divides what is forbidden among the other tokens; ours does not
            max_input_length=0,
            **how,
        )
