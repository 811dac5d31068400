"""A tformer checkpoint as a CTranslate2 model, through its specification API. Tokens are the ids, as text.

Needs ctranslate2, numpy and safetensors; runs apart from tformer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from ctranslate2.specs import TransformerSpec
from ctranslate2.specs.common_spec import Activation
from ctranslate2.specs.transformer_spec import TransformerDecoderSpec, TransformerEncoderSpec
from safetensors.numpy import load_file

ACTIVATIONS = {
    "relu": Activation.RELU,
    "gelu": Activation.GELU,
    "gelu_tanh": Activation.GELUTanh,
    "gelu_sigmoid": Activation.GELUSigmoid,
    "silu": Activation.SWISH,
}


def convert(checkpoint: Path, out: Path) -> None:
    """Write CTranslate2 models of the checkpoint's weights to `out`: float32, and int8, which loads fastest as int8."""
    for precision, quantization in (("float32", None), ("int8", "int8")):
        spec = make_spec(checkpoint)
        spec.validate()
        spec.optimize(quantization)
        (out / precision).mkdir(parents=True, exist_ok=True)
        spec.save(str(out / precision))


def make_spec(checkpoint: Path) -> TransformerSpec:
    """The checkpoint as CTranslate2 describes a model."""
    header = json.loads((checkpoint / "checkpoint.json").read_text())
    config, weights = header["model"], load_file(checkpoint / header["weights"])
    pre_norm, relative = config["norm_position"] == "pre", config["positions"] == "relative"
    if config["norm"] not in ("standard", "rms"):
        sys.exit(f"CTranslate2 has no {config['norm']} layer norm: take a checkpoint with model.norm standard or rms")
    if relative and config["relative_per_layer"]:
        sys.exit("CTranslate2 has one bias for all layers: take a checkpoint with model.relative_per_layer=false")
    if config["final_norm"] and not pre_norm:
        sys.exit("CTranslate2 has no final norm after post-norm layers: take a checkpoint with model.final_norm=false")
    how = {
        "pre_norm": pre_norm,
        "relative_attention_bias": relative,
        "activation": ACTIVATIONS[config["activation"]],
        "layernorm_embedding": config.get("embedding_norm", False),
        "ffn_glu": config.get("ff") == "gated",
        "rms_norm": config["norm"] == "rms",
    }
    # Older checkpoints say less; 0: as the decoder's, or width / heads.
    own = {name: config.get(name) or 0 for name in ("head_dim", "encoder_d_model", "encoder_heads", "encoder_head_dim")}
    same = not (own["encoder_d_model"] or own["encoder_heads"])
    encoder_heads = own["encoder_heads"] or config["heads"]
    encoder_head_dim = own["encoder_head_dim"] or (own["head_dim"] if same else 0)
    encoder = {"head_dim": encoder_head_dim or None, "no_final_norm": not has_final_norm(config, "encoder"), **how}
    decoder = {"head_dim": own["head_dim"] or None, "no_final_norm": not has_final_norm(config, "decoder"), **how}
    spec = TransformerSpec(
        TransformerEncoderSpec(config["encoder_layers"], encoder_heads, **encoder),
        TransformerDecoderSpec(config["decoder_layers"], config["heads"], **decoder),
    )
    spec.config.layer_norm_epsilon = config["norm_eps"]
    fill(spec, config, weights)
    tokens = [str(i) for i in range(max(config["src_vocab"], config["tgt_vocab"]))]
    spec.register_source_vocabulary(tokens[: config["src_vocab"]])
    spec.register_target_vocabulary(tokens[: config["tgt_vocab"]])
    spec.config.bos_token, spec.config.eos_token = str(config["bos_id"]), str(config["eos_id"])
    spec.config.decoder_start_token, spec.config.unk_token = str(config.get("start_id", config["bos_id"])), "0"
    return spec


def fill(spec: Any, config: dict[str, Any], weights: dict[str, Any]) -> None:
    """Put our tensors where CTranslate2 expects them."""
    target = weights["tgt_embedding.weight"]
    source = weights.get("src_embedding.weight", target)
    sides = (
        ("encoder", spec.encoder, spec.encoder.embeddings[0], source, "src"),
        ("decoder", spec.decoder, spec.decoder.embeddings, target, "tgt"),
    )
    for name, side, embeddings, table, short in sides:
        embeddings.weight = table
        side.scale_embeddings = config["scale_embeddings"]
        if config["positions"] != "relative":
            side.position_encodings.encodings = position_table(config, weights, short, table.shape[1])
        if config.get("embedding_norm"):
            norm(side.layernorm_embedding, weights, f"{short}_embedding_norm")
        if has_final_norm(config, name):
            norm(side.layer_norm, weights, f"{name}_norm")
        for i, layer in enumerate(side.layer):
            fill_layer(layer, weights, f"{name}.{i}", name == "decoder")
            if config["positions"] == "relative":
                layer.self_attention.relative_attention_bias = weights[f"{name}_relative.tables.0"]
                layer.self_attention.relative_attention_max_distance = np.int32(config["relative_distance"])
    spec.decoder.projection.weight = weights.get("output.weight", target)
    if config["output_bias"]:
        spec.decoder.projection.bias = weights["output.bias"]


def fill_layer(layer: Any, weights: dict[str, Any], name: str, decoder: bool) -> None:
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


def linear(spec: Any, weights: dict[str, Any], *names: str) -> None:
    """One linear layer, or several side by side."""
    spec.weight = np.concatenate([weights[f"{name}.weight"] for name in names])
    spec.bias = np.concatenate([weights[f"{name}.bias"] for name in names])


def norm(spec: Any, weights: dict[str, Any], name: str) -> None:
    """Gain and, if it has one, bias of a layer norm."""
    spec.gamma = weights[f"{name}.weight"]
    if f"{name}.bias" in weights:
        spec.beta = weights[f"{name}.bias"]


def has_final_norm(config: dict[str, Any], side: str) -> bool:
    """Whether a norm follows the last layer of a side; older checkpoints have both or none."""
    return bool(config["final_norm"]) and config.get("final_norm_sides", "both") in ("both", side)


def position_table(config: dict[str, Any], weights: dict[str, Any], side: str, width: int) -> Any:
    """What is added to embeddings (positions, width)."""
    if config["positions"] == "none":
        return np.zeros((config["max_positions"], width), np.float32)
    learned = weights.get(f"{side}_positions")
    return sinusoids(config, width) if learned is None else learned


def sinusoids(config: dict[str, Any], width: int) -> Any:
    """The position table (positions, width). Source: Vaswani et al. 2017, 3.5."""
    frequency = config["position_base"] ** (-np.arange(0, width, 2, dtype=np.float64) / width)
    angles = np.arange(config["max_positions"])[:, None] * frequency
    return np.stack((np.sin(angles), np.cos(angles)), -1).reshape(len(angles), width).astype(np.float32)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
