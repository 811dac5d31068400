"""State dicts of The Annotated Transformer and its relatives. Source: Rush et al., harvardnlp/annotated-transformer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base.errors import ArtifactError
from ..base.settings import from_dict
from ..model.config import ModelConfig
from ..model.positions import sinusoids
from .base import Imported, ImportOptions, Parameters
from .seen import Seen
from .toolkit import equal, sharing
from .vocabularies import decoding_of, ids_of, word_tokenizers
from .weights import WRAPPERS, Weights, read_weights

LINEARS = ("linears.0", "linears.1", "linears.2", "linears.3")
BASES = (10000.0, 1000.0)
"""Of the positions' wavelengths, as found in relatives."""


@dataclass(frozen=True)
class Names:
    """Where a relative's tensors are."""

    embeddings: tuple[str, str]
    positions: tuple[str, str]
    cross: str
    feed_forward: tuple[str, str]
    scaled: bool
    """Embeddings are multiplied by the root of their width."""


HARVARD = Names(
    ("src_embed.0.lut", "tgt_embed.0.lut"), ("src_embed.1.pe", "tgt_embed.1.pe"), "src_attn", ("w_1", "w_2"), True
)


def recognises(seen: Seen) -> bool:
    """Whether a file has its names."""
    return "src_embed.0.lut.weight" in seen.names


def read(path: Path, options: ImportOptions) -> Imported:
    """See `base.Imported`."""
    return read_names(path, options, HARVARD)


def read_names(path: Path, options: ImportOptions, names: Names) -> Imported:
    """A relative whose tensors have other names."""
    weights = read_weights(path, *WRAPPERS)
    src, tgt = (f"{name}.weight" for name in names.embeddings)
    tokenizers = word_tokenizers(options, (weights.shape(src)[0], weights.shape(tgt)[0]))
    specials = tokenizers.target.specials
    norm = "annotated" if "encoder.norm.a_2" in weights else "standard"
    known, table = positions(weights, names.positions[0])
    values = {
        "src_vocab": weights.shape(src)[0],
        "tgt_vocab": weights.shape(tgt)[0],
        "d_model": weights.shape(tgt, 2)[1],
        "d_ff": weights.shape(f"encoder.layers.0.feed_forward.{names.feed_forward[0]}.weight")[0],
        "heads": options.heads or 8,
        "encoder_layers": weights.layers("encoder.layers.{}.self_attn.linears.0.weight"),
        "decoder_layers": weights.layers("decoder.layers.{}.self_attn.linears.0.weight"),
        "norm": norm,
        "norm_eps": 1e-6 if norm == "annotated" else 1e-5,
        "scale_embeddings": names.scaled,
        "share_embeddings": shared(weights, src, tgt, "generator.proj.weight"),
        "output_bias": "generator.proj.bias" in weights,
        "pad_embedding_zero": False,
        **known,
        **ids_of(specials, options.model),
        **options.model,
    }
    config = from_dict(ModelConfig, values, "model")
    made = Parameters(weights, config)
    made.put("src_embedding.weight", src)
    made.put("tgt_embedding.weight", tgt)
    weights.ignore(src, *names.positions, "generator.proj.weight")
    made.linear("output", "generator.proj")
    if table is not None and config.positions == "learned":
        for ours in ("src_positions", "tgt_positions"):
            made.make(ours, lambda: table[: config.max_positions])
    if config.final_norm:
        for side in ("encoder", "decoder"):
            put_norm(made, f"{side}_norm", f"{side}.norm")
    for side, count in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        for i in range(count):
            put_layer(made, f"{side}.{i}", f"{side}.layers.{i}", names, crosses=side == "decoder")
    notes = [] if options.heads else ["8 attention heads were assumed: say --heads if there are others"]
    notes += assumed_positions(weights, names.positions[0], options)
    reason = "the notebook's code is not a package; compare some outputs with your notebook's"
    decoding, more = decoding_of(specials)
    return Imported(config, made, tokenizers, decoding, not_compared=reason, notes=[*notes, *more])


def put_layer(made: Parameters, ours: str, theirs: str, names: Names, crosses: bool) -> None:
    """A layer of the encoder or decoder; without attention of its own over the source, self-attention's is both."""
    made.attention(f"{ours}.attention", f"{theirs}.self_attn", LINEARS)
    sublayers = ["attention"]
    if crosses:
        own = f"{theirs}.{names.cross}"
        made.attention(
            f"{ours}.cross", own if f"{own}.linears.0.weight" in made.weights else f"{theirs}.self_attn", LINEARS
        )
        sublayers.append("cross")
    for part, name in zip(("up", "down"), names.feed_forward, strict=True):
        made.linear(f"{ours}.ff.{part}", f"{theirs}.feed_forward.{name}")
    for j, sublayer in enumerate([*sublayers, "ff"]):
        put_norm(made, f"{ours}.{sublayer}_residual.norm", f"{theirs}.sublayer.{j}.norm")


def put_norm(made: Parameters, ours: str, theirs: str) -> None:
    """A norm by the names of the notebook, or of torch."""
    annotated = f"{theirs}.a_2" in made.weights
    made.norm(ours, theirs, *(("a_2", "b_2") if annotated else ("weight", "bias")))


def positions(weights: Weights, name: str) -> tuple[dict[str, Any], Tensor | None]:
    """Fields of the config for a table (1, M, d) or (M, d), and the table itself where it is not computed anew.

    A file without one has the notebook's.
    """
    if name not in weights:
        return {"max_positions": 5000}, None
    table = weights.take(name).reshape(-1, weights.shape(name)[-1])
    count, width = table.shape
    for base in BASES:
        if width % 2 == 0 and torch.equal(sinusoids(count, width, base), table):
            return {"max_positions": count, "position_base": base}, None
    return {"max_positions": count, "positions": "learned"}, table


def assumed_positions(weights: Weights, name: str, options: ImportOptions) -> list[str]:
    """A note where neither the file nor the options say the positions: a model without any has no table either."""
    if name in weights or "positions" in options.model:
        return []
    return ["no table of positions in the file: sinusoidal assumed; --set model.positions=none if there are none"]


def shared(weights: Weights, src: str, tgt: str, output: str) -> str:
    """Which tables are the same. Raises ArtifactError where there is no output."""
    if output not in weights:
        raise ArtifactError(f"{weights.where} has no tensor '{output}': save the state dict of the whole model")
    return sharing(equal(weights, tgt, output), equal(weights, src, tgt))
