"""Model folders of Sockeye 3: params.best (or a params file), config, version, vocab.src.0.json, vocab.trg.0.json.

Keys and values are stored side by side, head by head. Refused: SSRU decoders, LHUC, factors, k-nearest neighbours,
quantized parameters. Models for vocabulary selection and length ratios are left out.
Source: sockeye 3.1, sockeye/model.py, sockeye/transformer.py, sockeye/layers.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from ..base.errors import ArtifactError
from ..base.settings import from_dict
from ..model.config import ModelConfig
from .base import Imported, ImportOptions, Parameters
from .seen import Seen
from .toolkit import (
    MOST_POSITIONS,
    Settings,
    both_sides,
    equal,
    parse_yaml,
    read_text,
    sharing,
)
from .vocabularies import Vocabulary, coded_tokenizers, ids_of, notes_of, read_entries, require_rows
from .weights import Weights, read_weights

ACTIVATIONS = {"relu": "relu", "swish1": "silu", "gelu": "gelu"}
SPECIALS = ("<pad>", "<s>", "</s>", "<unk>")
SOURCE, TARGET, OUTPUT = "embedding_source.embedding.weight", "embedding_target.embedding.weight", "output_layer.weight"


def recognises(seen: Seen) -> bool:
    """Whether it is a folder of theirs, or a params file in it."""
    folder = seen.path if seen.path.is_dir() else seen.path.parent
    known = seen.path.is_dir() or TARGET in seen.names
    return known and all((folder / name).is_file() for name in ("config", "version", "vocab.src.0.json"))


def read(path: Path, options: ImportOptions) -> Imported:
    """See `base.Imported`."""
    folder = path if path.is_dir() else path.parent
    version = read_text(folder / "version").strip()
    if not version.startswith("3."):
        raise ArtifactError(f"{folder} is of Sockeye {version:.20}: only version 3 is supported")
    found = parse_yaml(read_text(folder / "config"), str(folder / "config"))
    settings = Settings(str(folder / "config"), found if isinstance(found, dict) else {})
    settings.only("lhuc", False)
    settings.only("dtype", "float32", "float16", "bfloat16")
    for side in ("source", "target"):
        settings.section(f"config_embed_{side}").only("factor_configs", None, [])
    file = folder / "params.best" if path.is_dir() else path
    weights = read_weights(file)
    weights.ignore(*(name for name in weights if name.startswith(("nvs.", "length_ratio."))))
    sides: list[Vocabulary] = []
    for file, table in ((folder / "vocab.src.0.json", SOURCE), (folder / "vocab.trg.0.json", TARGET)):
        entries = read_entries(file)
        require_rows(entries, file, weights.shape(table)[0], padded=True)  # to a multiple of some number
        sides.append(Vocabulary.named(entries, file, SPECIALS))
    values = {**_values(weights, settings), **ids_of(sides[1].specials)}
    config = from_dict(ModelConfig, {**values, **options.model}, "model")
    made = Parameters(weights, config)
    _fill(made)
    tokenizers = coded_tokenizers(options, sides)
    return Imported(
        config,
        made,
        tokenizers,
        not_compared="Sockeye is not run here: compare some outputs with sockeye-translate's",
        notes=notes_of(tokenizers),
    )


def _values(weights: Weights, settings: Settings) -> dict[str, Any]:
    """Fields of the model's config."""
    sides = {side: settings.section(f"config_{side}") for side in ("encoder", "decoder")}
    alike: list[tuple[Any, ...]] = []
    for side in sides.values():
        side.only("decoder_type", "transformer")
        side.only("use_lhuc", False)
        side.only("block_prepended_cross_attention", False)
        around = side.get("preprocess_sequence", "n"), side.get("postprocess_sequence", "dr")
        kind = {("n", "r"): "pre", ("", "rn"): "post"}.get((around[0].replace("d", ""), around[1].replace("d", "")))
        if not kind:
            raise side.refused("preprocess_sequence, postprocess_sequence", around)
        alike.append((kind, side.activation("act_type", ACTIVATIONS), side.get("use_glu", False)))
    if alike[0] != alike[1]:
        raise ArtifactError(f"{settings.where}: encoder {alike[0]} and decoder {alike[1]} differ: not supported")
    sizes = [
        {
            "d_model": sides[side].count("model_size"),
            "d_ff": sides[side].count("feed_forward_num_hidden"),
            "heads": sides[side].count("attention_heads"),
            "layers": sides[side].count("num_layers"),
        }
        for side in ("decoder", "encoder")
    ]
    tables = [weights.shape(f"{side}.pos_embedding.weight")[0] for side in sides]
    return {
        "src_vocab": weights.shape(SOURCE)[0],
        "tgt_vocab": weights.shape(TARGET)[0],
        **both_sides(*sizes),
        "norm_position": alike[0][0],
        "norm_eps": 1e-6,
        "final_norm": alike[0][0] == "pre",
        "positions": "learned",
        "max_positions": min(MOST_POSITIONS, *tables),
        "share_embeddings": sharing(equal(weights, TARGET, OUTPUT), equal(weights, SOURCE, TARGET)),
        "output_bias": True,
        "activation": alike[0][1],
        "ff": "gated" if alike[0][2] else "plain",
        "pad_embedding_zero": False,
    }


def _fill(made: Parameters) -> None:
    """All parameters."""
    config = made.config
    made.put("src_embedding.weight", SOURCE)
    made.put("tgt_embedding.weight", TARGET)
    made.linear("output", "output_layer")
    norm = "pre" if config.norm_position == "pre" else "post"
    for short, name, side in (("src", "encoder", config.encoder), ("tgt", "decoder", config.decoder)):
        made.put(f"{short}_positions", f"{name}.pos_embedding.weight", lambda table: table[: config.max_positions])
        if config.final_norm:
            made.norm(f"{name}_norm", f"{name}.final_process.layer_norm")
        for i in range(side.layers):
            ours, theirs = f"{name}.{i}", f"{name}.layers.{i}"
            part = "self_attention" if name == "encoder" else "autoregr_layer"
            for kind, place in (("query", -1), ("key", 0), ("value", 1)):
                _attention(made, f"{ours}.attention.{kind}", f"{theirs}.{part}.ff_in", place, side.heads)
            _attention(made, f"{ours}.attention.out", f"{theirs}.{part}.ff_out")
            made.norm(f"{ours}.attention_residual.norm", f"{theirs}.{norm}_{part}.layer_norm")
            if name == "decoder":
                _attention(made, f"{ours}.cross.query", f"{theirs}.enc_attention.ff_q")
                for kind, place in (("key", 0), ("value", 1)):
                    _attention(made, f"{ours}.cross.{kind}", f"{theirs}.enc_attention.ff_kv", place, side.heads)
                _attention(made, f"{ours}.cross.out", f"{theirs}.enc_attention.ff_out")
                made.norm(f"{ours}.cross_residual.norm", f"{theirs}.{norm}_enc_attention.layer_norm")
            made.linear(f"{ours}.ff.{'gate' if config.ff == 'gated' else 'up'}", f"{theirs}.ff.ff1")
            if config.ff == "gated":
                made.linear(f"{ours}.ff.up", f"{theirs}.ff.linear")
            made.linear(f"{ours}.ff.down", f"{theirs}.ff.ff2")
            made.norm(f"{ours}.ff_residual.norm", f"{theirs}.{norm}_ff.layer_norm")


def _attention(made: Parameters, ours: str, theirs: str, place: int | None = None, heads: int = 1) -> None:
    """A matrix, or a part of one: queries (-1), then keys (0) and values (1) of head after head. Biases are zeros."""
    inner, width = made.shapes[f"{ours}.weight"]

    def part(w: Tensor) -> Tensor:
        if place is None or len(w) not in (2 * inner, 3 * inner):
            return w
        if place < 0:
            return w[:inner]
        return w[-2 * inner :].reshape(heads, 2, -1, width)[:, place].reshape(inner, width)

    made.put(f"{ours}.weight", f"{theirs}.weight", part)
    made.fill(f"{ours}.bias")
