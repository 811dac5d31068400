"""Checkpoints of OpenNMT-py: a .pt file with `opt`, `vocab`, `model` and `generator`.

Pre-norm Transformers with the table of positions that the file holds. Files of versions 1 and 2 keep their vocabulary
in torchtext's objects, which are not loaded: convert them with tools/convertv2_v3.py of OpenNMT-py 3. Refused: relative
positions, rotary, alibi, average attention, copy attention, features, fewer keys than queries, LoRA, quantized layers.
Source: OpenNMT-py 3.5, onmt/model_builder.py, onmt/encoders/transformer.py, onmt/decoders/transformer.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..base.errors import ArtifactError
from ..base.settings import from_dict
from ..model.config import ModelConfig
from .base import Imported, ImportOptions, Parameters
from .seen import Seen
from .toolkit import (
    MOST_POSITIONS,
    LayerNames,
    Settings,
    both_sides,
    equal,
    options_of,
    put_layer,
    sharing,
)
from .vocabularies import Vocabulary, coded_tokenizers, ids_of, notes_of, require_rows
from .weights import Weights, load_parts, state_dict

PARTS = ("opt", "vocab", "model", "generator")
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "silu": "silu", "gated-gelu": "gelu"}
ONLY: dict[str, tuple[Any, ...]] = {
    "model_task": ("seq2seq",),
    "encoder_type": ("transformer",),
    "decoder_type": ("transformer",),
    "self_attn_type": ("scaled-dot", "scaled-dot-flash"),
    "position_encoding": (True,),
    "max_relative_positions": (0,),
    "relative_positions_buckets": (0,),
    "copy_attn": (False,),
    "num_kv": (0,),
    "multiquery": (False,),
    "parallel_residual": (False,),
    "layer_norm": ("standard", "rms"),
    "generator_function": ("softmax",),
    "lora_layers": ([],),
    "lora_embedding": (False,),
    "quant_layers": ([],),
    "num_experts": (0,),
    "sliding_window": (0,),
    "coverage_attn": (False,),
}
SPECIALS = ("<blank>", "<s>", "</s>", "<unk>")
TABLE = "embeddings.make_embedding.emb_luts.0.weight"
PE = "embeddings.make_embedding.pe.pe"
LAYERS = {"encoder": "encoder.transformer.{}", "decoder": "decoder.transformer_layers.{}"}


def recognises(seen: Seen) -> bool:
    """Whether a file has its parts."""
    return seen.parts >= {*PARTS}


def read(path: Path, options: ImportOptions) -> Imported:
    """See `base.Imported`."""
    try:
        parts = load_parts(path)
    except ArtifactError as error:
        if "torchtext" not in str(error):
            raise
        raise ArtifactError(f"{path} is of OpenNMT-py 1 or 2: convert it with its tools/convertv2_v3.py") from None
    if lacking := [name for name in PARTS if name not in parts]:
        raise ArtifactError(f"{path} has no '{lacking[0]}': is it a checkpoint of OpenNMT-py?")
    settings = Settings(str(path), options_of(parts["opt"], f"{path}: opt"))
    for name, supported in ONLY.items():
        settings.only(name, *supported)
    model, generator = (state_dict(path, parts[name]) for name in ("model", "generator"))
    named = {f"generator.{name.removeprefix('0.')}": tensor for name, tensor in generator.items()}
    weights = Weights.of(path, {**model, **named})
    if features := next((name for name in weights if "emb_luts.1." in name), ""):
        raise ArtifactError(f"{path}: source features, {features}, are not supported")
    words = options_of(parts["vocab"], f"{path}: vocab")
    if not all(_is_words(words.get(side)) for side in ("src", "tgt")):
        raise ArtifactError(f"{path} has no lists of words: is it of OpenNMT-py 3?")
    for short, side in (("src", "encoder"), ("tgt", "decoder")):
        require_rows(words[short], path, weights.shape(f"{side}.{TABLE}", 2)[0], padded=True)
    source, target = (Vocabulary.named(words[side], path, SPECIALS) for side in ("src", "tgt"))
    tokenizers = coded_tokenizers(options, (source, target), suffix=())
    if (start := words.get("decoder_start_token", "<s>")) not in words["tgt"]:
        raise ArtifactError(f"{path}: decoder_start_token={start!r} is not in the vocabulary")
    values = {**_values(weights, settings), "start_id": words["tgt"].index(start), **ids_of(target.specials)}
    config = from_dict(ModelConfig, {**values, **options.model}, "model")
    made = Parameters(weights, config)
    _fill(made)
    return Imported(
        config,
        made,
        tokenizers,
        not_compared="OpenNMT-py is not run here: compare some outputs with onmt_translate's",
        notes=notes_of(tokenizers),
    )


def _is_words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def _values(weights: Weights, settings: Settings) -> dict[str, Any]:
    """Fields of the model's config."""
    heads = settings.count("heads", 8)
    sizes = [
        {
            "d_model": weights.shape(f"{side}.{TABLE}", 2)[1],
            "d_ff": weights.shape(f"{LAYERS[side].format(0)}.feed_forward.w_1.weight")[0],
            "heads": heads,
            "layers": weights.layers(f"{LAYERS[side]}.feed_forward.w_1.weight"),
        }
        for side in ("decoder", "encoder")
    ]
    source, target, output = f"encoder.{TABLE}", f"decoder.{TABLE}", "generator.weight"
    return {
        "src_vocab": weights.shape(source)[0],
        "tgt_vocab": weights.shape(target)[0],
        **both_sides(*sizes),
        "norm": "rms" if settings.get("layer_norm", "standard") == "rms" else "standard",
        "norm_eps": settings.get("norm_eps", 1e-6),
        "positions": "learned",
        "max_positions": min(MOST_POSITIONS, *(weights.shape(f"{side}.{PE}")[0] for side in ("encoder", "decoder"))),
        "share_embeddings": sharing(equal(weights, target, output), equal(weights, source, target)),
        "output_bias": "generator.bias" in weights,
        "activation": settings.activation("pos_ffn_activation_fn", ACTIVATIONS),
        "ff": "gated" if f"{LAYERS['decoder'].format(0)}.feed_forward.w_3.weight" in weights else "plain",
        "pad_embedding_zero": False,
    }


def _fill(made: Parameters) -> None:
    """All parameters."""
    config = made.config
    made.linear("output", "generator")
    for short, name, side in (("src", "encoder", config.encoder), ("tgt", "decoder", config.decoder)):
        made.put(f"{short}_embedding.weight", f"{name}.{TABLE}")
        made.put(f"{short}_positions", f"{name}.{PE}", lambda pe: pe[: config.max_positions, 0])
        made.norm(f"{name}_norm", f"{name}.layer_norm")
        names = LayerNames(
            ("linear_query", "linear_keys", "linear_values", "final_linear"),
            "self_attn",
            "layer_norm" if name == "encoder" else "layer_norm_1",
            "context_attn",
            "layer_norm_2",
            "feed_forward.w_3" if config.ff == "gated" else "feed_forward.w_1",
            "feed_forward.w_2",
            "feed_forward.layer_norm",
            "feed_forward.w_1" if config.ff == "gated" else "",
        )
        for i in range(side.layers):
            put_layer(made, f"{name}.{i}", LAYERS[name].format(i), names)
