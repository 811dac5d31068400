"""Folders of CTranslate2, float32 and int8: model.bin, config.json, vocabularies of real tokens, tokenizers.

A folder holds no decoding options: docs/anywhere.md says which ones of `translate_batch` search as ours do.
Source: CTranslate2, python/ctranslate2/specs; its search: src/decoding.cc.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
from ctranslate2.specs import TransformerSpec
from ctranslate2.specs.common_spec import Activation
from ctranslate2.specs.transformer_spec import TransformerDecoderSpec, TransformerEncoderSpec

from ...base.machine import cores
from ...bundle.text import Tokenizers
from ...decoding import DecodeOptions
from ...model.checkpoint import Checkpoint
from ...model.config import ModelConfig
from ...model.positions import sinusoids
from .layout import Generate, Source
from .text_files import write_tokenizers
from .tokens import entries_of, unique

RUNTIME = "ctranslate2"
PRECISIONS = {"float32": True, "int8": False}
BEAMS = (1, 4)
ACTIVATIONS = {
    "relu": Activation.RELU,
    "gelu": Activation.GELU,
    "gelu_tanh": Activation.GELUTanh,
    "gelu_sigmoid": Activation.GELUSigmoid,
    "silu": Activation.SWISH,
}
BATCH = 32
AGAIN = "with beams, it normalizes again after tokens are forbidden"
"""In `log_softmax` of the scores that are left; ours keep each token's log-probability."""


@dataclass(frozen=True)
class Names:
    """The tokens of a model as CTranslate2 calls them: no two of a side are alike."""

    source: list[str]
    target: list[str]
    unk: str
    bos: str
    eos: str
    start: str
    adds_bos: bool = False
    adds_eos: bool = False
    """What it puts around a source itself."""


def refuse(source: Source) -> Iterable[str]:
    """See `Layout`."""
    if not isinstance(source.checkpoint, Checkpoint):
        yield "a module of your own: it writes the network of tformer_deploy.model alone"
        return
    config = source.config
    if config.norm == "annotated":
        yield "model.norm=annotated: its layer norms have the biased variance"
    if config.decoder_cell != "attention":
        yield f"model.decoder_cell={config.decoder_cell}: its decoders have self-attention"
    if config.qk_norm:
        yield "model.qk_norm=true: its cross-attention normalizes queries before it splits them into heads"
    if config.positions == "relative" and config.relative_per_layer:
        yield "model.relative_per_layer=true: it has one bias for all layers"
    if source.options.sampling:
        yield "sampling=true: its draws are others"


def nearest(options: DecodeOptions) -> tuple[DecodeOptions, list[str]]:
    """See `SearchesItself`."""
    plain = DecodeOptions()
    lacking = {
        "max_ratio": "one limit for all lines",
        "min_ratio": "one limit for all lines",
        "length_norm": "only power",
        "coverage_penalty": "its coverage is not compared",
        "repetition_penalty": "it changes scores before they are normalized",
        "forced_end": "an output of the longest length has no end token",
    }
    if options.stop != "count":
        lacking |= {"stop": "it waits for ended outputs, as count does"}
    if options.beams > 1:
        lacking |= dict.fromkeys(("min_tokens", "no_repeat_ngram", "suppress", "bad_words"), AGAIN)
    if options.first_ids and not options.first_adds_zero:
        lacking |= {"first_ids": "tokens of a target prefix add 0 there"}
    changed = {name: getattr(plain, name) for name in lacking if getattr(options, name) != getattr(plain, name)}
    lines = [f"{name}={json.dumps(getattr(options, name))}: {lacking[name]}" for name in changed]
    return replace(options, **changed), lines


def write(source: Source, folder: Path) -> None:
    """See `Layout`."""
    config, tokenizers = source.config, source.tokenizers
    assert isinstance(source.checkpoint, Checkpoint)
    weights = {name: tensor.numpy() for name, tensor in source.checkpoint.load_tensors().items()}
    save_models(config, weights, names_of(config, tokenizers), folder)
    for precision in PRECISIONS:
        write_tokenizers(tokenizers, folder / precision)


@contextmanager
def open_runtime(source: Source, folder: Path, precision: str) -> Iterator[Generate]:
    """See `Layout`."""
    names = names_of(source.config, source.tokenizers)
    path = str(folder / precision)
    translator = ctranslate2.Translator(path, "cpu", compute_type=precision, inter_threads=cores(), intra_threads=1)
    ids = {token: i for i, token in enumerate(names.target)}

    def generate(sources: Sequence[Sequence[int]], options: DecodeOptions) -> list[list[int]]:
        tokens = [tokens_of(each, names) for each in sources]
        prefix = [[names.target[i] for i in options.first_ids]] * len(tokens) if options.first_ids else None
        asked = asked_of(options, names)
        found = translator.translate_batch(tokens, prefix, max_batch_size=BATCH, **asked)
        return [[ids[token] for token in each.hypotheses[0]] for each in found]

    try:
        yield generate
    finally:
        translator.unload_model()


def tokens_of(ids: Sequence[int], names: Names) -> list[str]:
    """A source as it is given: without what CTranslate2 puts around it."""
    tokens = [names.source[i] for i in ids]
    ends = (names.bos if names.adds_bos else "", names.eos if names.adds_eos else "")
    assert (ends[0] in ("", tokens[0])) and (ends[1] in ("", tokens[-1])), tokens
    return tokens[bool(ends[0]) : len(tokens) - bool(ends[1])]


def asked_of(options: DecodeOptions, names: Names) -> dict[str, Any]:
    """Options of `translate_batch`; its lengths count no end token at the least, ours do."""
    never = [[names.target[i] for i in ids] for ids in (*((i,) for i in options.suppress), *options.bad_words)]
    return {
        "beam_size": options.beams,
        "patience": options.patience,
        "length_penalty": options.length_penalty,
        "no_repeat_ngram_size": options.no_repeat_ngram,
        "suppress_sequences": never or None,
        "end_token": [names.target[i] for i in options.end_ids] or None,
        "max_input_length": 0,
        "max_decoding_length": options.max_tokens,
        "min_decoding_length": max(0, options.min_tokens - 1),
    }


# --- tokens ---------------------------------------------------------------------------------------------------------


def names_of(config: ModelConfig, tokenizers: Tokenizers) -> Names:
    """The tokens of both sides; special ones have the target's names on both."""
    source, target = tokenizers.source, tokenizers.target
    theirs = unique(entries_of(target, config.tgt_vocab), [*target.specials.ids, config.eos_id, config.start_id])
    unk, eos = theirs[target.specials.unk], theirs[config.eos_id]
    prefix, suffix = tokenizers.around
    adds_bos = prefix == (source.specials.bos,)
    bos = theirs[target.specials.bos] if target.specials.bos >= 0 else theirs[config.start_id]
    fixed = {source.specials.unk: unk, **({prefix[0]: bos} if adds_bos else {})}
    adds_eos = suffix == (source.specials.eos,) and not {source.specials.eos} & fixed.keys()
    fixed |= {source.specials.eos: eos} if adds_eos else {}
    entries = entries_of(source, config.src_vocab)
    entries = [fixed.get(i, entry) for i, entry in enumerate(entries)]
    ours = unique(entries, [*fixed, *(i for i in source.specials.ids if i < len(entries))])
    return Names(ours, theirs, unk, bos, eos, theirs[config.start_id], adds_bos, adds_eos)


# --- models ---------------------------------------------------------------------------------------------------------


def save_models(config: ModelConfig, weights: Mapping[str, Any], names: Names, folder: Path) -> None:
    """Write `float32` and `int8`, which loads fastest as int8. `weights`: by our names, as numpy arrays."""
    for precision, quantization in (("float32", None), ("int8", "int8")):
        spec = make_spec(config, weights, names)
        spec.validate()
        spec.optimize(quantization)
        (folder / precision).mkdir(parents=True, exist_ok=True)
        spec.save(str(folder / precision))


def make_spec(config: ModelConfig, weights: Mapping[str, Any], names: Names) -> TransformerSpec:
    """A model as CTranslate2 describes it."""
    how = {
        "pre_norm": True,  # else there is no final norm, which its code runs after any layers
        "relative_attention_bias": config.positions == "relative",
        "activation": ACTIVATIONS[config.activation],
        "layernorm_embedding": config.embedding_norm,
        "ffn_glu": config.ff == "gated",
        "rms_norm": config.norm == "rms",
    }
    encoder, decoder = (
        {"head_dim": side.head_dim, "no_final_norm": not side.final_norm, **how}
        for side in (config.encoder, config.decoder)
    )
    spec = TransformerSpec(
        TransformerEncoderSpec(config.encoder_layers, config.encoder.heads, **encoder),
        TransformerDecoderSpec(config.decoder_layers, config.heads, **decoder),
    )
    spec.encoder.pre_norm = spec.decoder.pre_norm = config.norm_position == "pre"
    fill(spec, config, weights)
    spec.register_source_vocabulary(names.source)
    spec.register_target_vocabulary(names.target)
    spec.config.layer_norm_epsilon = config.norm_eps
    spec.config.unk_token, spec.config.bos_token, spec.config.eos_token = names.unk, names.bos, names.eos
    spec.config.decoder_start_token = names.start
    spec.config.add_source_bos, spec.config.add_source_eos = names.adds_bos, names.adds_eos
    return spec


def fill(spec: Any, config: ModelConfig, weights: Mapping[str, Any]) -> None:
    """Put our tensors where CTranslate2 expects them."""
    target = weights["tgt_embedding.weight"]
    source = weights.get("src_embedding.weight", target)
    sides = (
        ("encoder", spec.encoder, spec.encoder.embeddings[0], source, "src", config.encoder.final_norm),
        ("decoder", spec.decoder, spec.decoder.embeddings, target, "tgt", config.decoder.final_norm),
    )
    for name, side, embeddings, table, short, final_norm in sides:
        embeddings.weight = table
        side.scale_embeddings = config.scale_embeddings
        if config.positions != "relative":
            side.position_encodings.encodings = position_table(config, weights, short, table.shape[1])
        if config.embedding_norm:
            norm(side.layernorm_embedding, weights, f"{short}_embedding_norm")
        if final_norm:
            norm(side.layer_norm, weights, f"{name}_norm")
        for i, layer in enumerate(side.layer):
            fill_layer(layer, weights, f"{name}.{i}", name == "decoder")
            if config.positions == "relative":
                layer.self_attention.relative_attention_bias = weights[f"{name}_relative.tables.0"]
                layer.self_attention.relative_attention_max_distance = np.int32(config.relative_distance)
    spec.decoder.projection.weight = weights.get("output.weight", target)
    if config.output_bias:
        spec.decoder.projection.bias = weights["output.bias"]


def fill_layer(layer: Any, weights: Mapping[str, Any], name: str, decoder: bool) -> None:
    """Attention, cross-attention, feed-forward; each sublayer holds its norm."""
    attention = layer.self_attention
    linear(attention.linear[0], weights, *(f"{name}.attention.{part}" for part in ("query", "key", "value")))
    linear(attention.linear[1], weights, f"{name}.attention.out")
    norm(attention.layer_norm, weights, f"{name}.attention_residual.norm")
    if decoder:
        cross = layer.attention
        linear(cross.linear[0], weights, f"{name}.cross.query")
        linear(cross.linear[1], weights, f"{name}.cross.key", f"{name}.cross.value")
        linear(cross.linear[2], weights, f"{name}.cross.out")
        norm(cross.layer_norm, weights, f"{name}.cross_residual.norm")
    gated = f"{name}.ff.gate.weight" in weights
    linear(layer.ffn.linear_0, weights, f"{name}.ff.{'gate' if gated else 'up'}")
    if gated:
        linear(layer.ffn.linear_0_noact, weights, f"{name}.ff.up")
    linear(layer.ffn.linear_1, weights, f"{name}.ff.down")
    norm(layer.ffn.layer_norm, weights, f"{name}.ff_residual.norm")


def linear(spec: Any, weights: Mapping[str, Any], *names: str) -> None:
    """One linear layer, or several side by side."""
    spec.weight = np.concatenate([weights[f"{name}.weight"] for name in names])
    spec.bias = np.concatenate([weights[f"{name}.bias"] for name in names])


def norm(spec: Any, weights: Mapping[str, Any], name: str) -> None:
    """Gain and, if it has one, bias of a layer norm."""
    spec.gamma = weights[f"{name}.weight"]
    if f"{name}.bias" in weights:
        spec.beta = weights[f"{name}.bias"]


def position_table(config: ModelConfig, weights: Mapping[str, Any], side: str, width: int) -> Any:
    """What is added to embeddings (positions, width)."""
    if config.positions == "none":
        return np.zeros((config.max_positions, width), np.float32)
    learned = weights.get(f"{side}_positions")
    return sinusoids(config.max_positions, width, config.position_base).numpy() if learned is None else learned
