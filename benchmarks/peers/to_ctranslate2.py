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
from safetensors.numpy import load_file

ACTIVATIONS = {"relu": Activation.RELU, "gelu": Activation.GELU, "silu": Activation.SWISH}


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
    if config["norm"] != "standard" or not np.isclose(config["norm_eps"], 1e-5):
        sys.exit("CTranslate2's layer norm is the standard one with eps 1e-5: take another checkpoint")
    spec = TransformerSpec.from_config(
        (config["encoder_layers"], config["decoder_layers"]),
        config["heads"],
        pre_norm=config["norm_position"] == "pre",
        no_final_norm=not config["final_norm"],
        activation=ACTIVATIONS[config["activation"]],
    )
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
        positions = weights.get(f"{short}_positions")
        side.position_encodings.encodings = sinusoids(config) if positions is None else positions
        if config["final_norm"]:
            norm(side.layer_norm, weights, f"{name}_norm")
        for i, layer in enumerate(side.layer):
            fill_layer(layer, weights, f"{name}.{i}", name == "decoder")
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
    linear(layer.ffn.linear_0, weights, f"{name}.ff.up")
    linear(layer.ffn.linear_1, weights, f"{name}.ff.down")
    norm(layer.ffn.layer_norm, weights, f"{name}.ff_residual.norm")


def linear(spec: Any, weights: dict[str, Any], *names: str) -> None:
    """One linear layer, or several side by side."""
    spec.weight = np.concatenate([weights[f"{name}.weight"] for name in names])
    spec.bias = np.concatenate([weights[f"{name}.bias"] for name in names])


def norm(spec: Any, weights: dict[str, Any], name: str) -> None:
    """Gain and bias of a layer norm."""
    spec.gamma, spec.beta = weights[f"{name}.weight"], weights[f"{name}.bias"]


def sinusoids(config: dict[str, Any]) -> Any:
    """The position table (positions, d). Source: Vaswani et al. 2017, 3.5."""
    width = config["d_model"]
    frequency = config["position_base"] ** (-np.arange(0, width, 2, dtype=np.float64) / width)
    angles = np.arange(config["max_positions"])[:, None] * frequency
    return np.stack((np.sin(angles), np.cos(angles)), -1).reshape(len(angles), width).astype(np.float32)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
