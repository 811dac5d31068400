"""Checkpoints of JoeyNMT: a .ckpt file with config.yaml, src_vocab.txt and trg_vocab.txt beside it.

Refused: recurrent models, residual factors (alpha) other than 1, encoders and decoders with their norms at different
places, vocabularies of characters. Source: joeynmt 2.3, joeynmt/model.py, joeynmt/transformer_layers.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ..base.errors import ArtifactError, ConfigError
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
    parse_yaml,
    put_layer,
    read_text,
    sharing,
)
from .vocabularies import Vocabulary, coded_tokenizers, ids_of, notes_of, read_entries, require_rows
from .weights import Weights, load_parts, state_dict

ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "silu"}
SPECIALS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
SOURCE, TARGET, OUTPUT = "src_embed.lut.weight", "trg_embed.lut.weight", "decoder.output_layer.weight"


def recognises(seen: Seen) -> bool:
    """Whether it is a file with its part beside a config.yaml."""
    return "model_state" in seen.parts and (seen.path.parent / "config.yaml").is_file()


def read(path: Path, options: ImportOptions) -> Imported:
    """See `base.Imported`."""
    where = path.parent / "config.yaml"
    found = parse_yaml(read_text(where), str(where))
    settings = Settings(str(where), found if isinstance(found, dict) else {})
    tensors = load_parts(path).get("model_state")
    if not isinstance(tensors, dict):
        raise ArtifactError(f"{path} has no model_state: is it a checkpoint of JoeyNMT?")
    weights = Weights.of(path, state_dict(path, tensors))
    values = _values(weights, settings.section("model"))
    data = settings.section("data")
    lower = {data.section(side).get("lowercase", False) for side in ("src", "trg")}
    for side in ("src", "trg"):
        data.section(side).only("level", "bpe", "word")
    if len(lower) > 1:
        raise ArtifactError(f"{where}: lowercase of one side alone is not supported")
    if lower == {True} and options.src_codes:
        advice = "lower-case text before, and write lowercase: false there"
        raise ConfigError(f"{where}: lowercase=True is not supported with --src-codes: {advice}")
    symbols = Settings(str(where), data.values.get("special_symbols") or {})
    names = [symbols.get(name, usual) for name, usual in SPECIALS.items()]
    sides: list[Vocabulary] = []
    for side, named, table in zip(("src", "trg"), options.vocabularies, (SOURCE, TARGET), strict=True):
        file = named or path.parent / f"{side}_vocab.txt"
        entries = read_entries(file)
        require_rows(entries, file, weights.shape(table)[0])
        sides.append(Vocabulary.named(entries, file, names))
    config = from_dict(ModelConfig, {**values, **ids_of(sides[1].specials), **options.model}, "model")
    made = Parameters(weights, config)
    _fill(made)
    if lower == {True}:
        options = replace(options, lower=True)
    tokenizers = coded_tokenizers(options, sides)
    return Imported(
        config,
        made,
        tokenizers,
        not_compared="JoeyNMT is not run here: compare some outputs with joeynmt translate's",
        notes=notes_of(tokenizers),
    )


def _values(weights: Weights, model: Settings) -> dict[str, Any]:
    """Fields of the model's config."""
    sides = {side: model.section(side) for side in ("encoder", "decoder")}
    norms, scales, activations = [], [], []
    for name, side in sides.items():
        side.only("type", "transformer")
        side.only("alpha", 1.0)
        final = f"{name}.layer_norm.weight" in weights  # version 1 does not say where norms are: before, and at the end
        norms.append(side.only("layer_norm", *(("pre", "post") if final or name == "encoder" else ("post", "pre"))))
        scales.append(side.section("embeddings").get("scale", False))
        activations.append(side.activation("activation", ACTIVATIONS))
        if (norms[-1] == "pre") != final:
            raise ArtifactError(f"{weights.where}: {name}.layer_norm does not fit layer_norm={norms[-1]}")
    for name, both in (("layer_norm", norms), ("embeddings: scale", scales), ("activation", activations)):
        if both[0] != both[1]:
            raise ArtifactError(f"{model.where}: {name} of encoder and decoder differ, {both}: not supported")
    sizes = [
        {
            "d_model": weights.shape(table, 2)[1],
            "d_ff": weights.shape(f"{side}.layers.0.feed_forward.pwff_layer.0.weight")[0],
            "heads": sides[side].count("num_heads", 8),
            "layers": weights.layers(f"{side}.layers.{{}}.feed_forward.pwff_layer.0.weight"),
        }
        for side, table in (("decoder", TARGET), ("encoder", SOURCE))
    ]
    return {
        "src_vocab": weights.shape(SOURCE)[0],
        "tgt_vocab": weights.shape(TARGET)[0],
        **both_sides(*sizes),
        "norm_position": norms[0],
        "norm_eps": 1e-6,
        "final_norm": norms[0] == "pre",
        "scale_embeddings": scales[0],
        "positions": "learned",
        "max_positions": min(MOST_POSITIONS, *(weights.shape(f"{side}.pe.pe", 3)[1] for side in sides)),
        "share_embeddings": sharing(equal(weights, TARGET, OUTPUT), equal(weights, SOURCE, TARGET)),
        "activation": activations[0],
        "pad_embedding_zero": False,
    }


def _fill(made: Parameters) -> None:
    """All parameters."""
    config = made.config
    made.put("src_embedding.weight", SOURCE)
    made.put("tgt_embedding.weight", TARGET)
    made.linear("output", "decoder.output_layer")
    for short, name, side in (("src", "encoder", config.encoder), ("tgt", "decoder", config.decoder)):
        made.put(f"{short}_positions", f"{name}.pe.pe", lambda pe: pe[0, : config.max_positions])
        if config.final_norm:
            made.norm(f"{name}_norm", f"{name}.layer_norm")
        names = LayerNames(
            ("q_layer", "k_layer", "v_layer", "output_layer"),
            "src_src_att" if name == "encoder" else "trg_trg_att",
            "layer_norm" if name == "encoder" else "x_layer_norm",
            "src_trg_att",
            "dec_layer_norm",
            "feed_forward.pwff_layer.0",
            "feed_forward.pwff_layer.3",
            "feed_forward.layer_norm",
        )
        for i in range(side.layers):
            put_layer(made, f"{name}.{i}", f"{name}.layers.{i}", names)
