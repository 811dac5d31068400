"""State dicts of bentrevett/pytorch-seq2seq, "Attention is All You Need": post-norm, learned positions."""

from __future__ import annotations

from pathlib import Path

from ..base.settings import from_dict
from ..model.config import ModelConfig
from .base import Imported, ImportOptions, Parameters
from .seen import Seen
from .vocabularies import decoding_of, ids_of, word_tokenizers
from .weights import WRAPPERS, read_weights

ATTENTION = ("fc_q", "fc_k", "fc_v", "fc_o")


def recognises(seen: Seen) -> bool:
    """Whether a file has its names."""
    return "encoder.tok_embedding.weight" in seen.names


def read(path: Path, options: ImportOptions) -> Imported:
    """See `base.Imported`."""
    weights = read_weights(path, *WRAPPERS)
    src_vocab, width = weights.shape("encoder.tok_embedding.weight", 2)
    tgt_vocab, decoder_width = weights.shape("decoder.tok_embedding.weight", 2)
    positions = [weights.shape(f"{side}.pos_embedding.weight")[0] for side in ("encoder", "decoder")]
    tokenizers = word_tokenizers(options, (src_vocab, tgt_vocab))
    specials = tokenizers.target.specials
    sizes = {
        "encoder_d_model": width if width != decoder_width else 0,
        "d_ff": weights.shape("decoder.layers.0.positionwise_feedforward.fc_1.weight")[0],
        "encoder_d_ff": weights.shape("encoder.layers.0.positionwise_feedforward.fc_1.weight")[0],
        "encoder_layers": weights.layers("encoder.layers.{}.self_attention.fc_q.weight"),
        "decoder_layers": weights.layers("decoder.layers.{}.self_attention.fc_q.weight"),
    }
    values = {
        "src_vocab": src_vocab,
        "tgt_vocab": tgt_vocab,
        "d_model": decoder_width,
        "heads": options.heads or 8,
        **sizes,
        "norm_position": "post",
        "final_norm": False,
        "positions": "learned",
        "max_positions": min(positions),
        "share_embeddings": "none",
        "output_bias": True,
        "pad_embedding_zero": False,
        **ids_of(specials, options.model),
        **options.model,
    }
    config = from_dict(ModelConfig, values, "model")
    made = Parameters(weights, config)
    for ours, side in (("src", "encoder"), ("tgt", "decoder")):
        made.put(f"{ours}_embedding.weight", f"{side}.tok_embedding.weight")
        made.put(f"{ours}_positions", f"{side}.pos_embedding.weight", lambda table: table[: config.max_positions])
    for side, count in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        for i in range(count):
            ours, theirs = f"{side}.{i}", f"{side}.layers.{i}"
            made.attention(f"{ours}.attention", f"{theirs}.self_attention", ATTENTION)
            made.norm(f"{ours}.attention_residual.norm", f"{theirs}.self_attn_layer_norm")
            if side == "decoder":
                made.attention(f"{ours}.cross", f"{theirs}.encoder_attention", ATTENTION)
                made.norm(f"{ours}.cross_residual.norm", f"{theirs}.enc_attn_layer_norm")
            made.linear(f"{ours}.ff.up", f"{theirs}.positionwise_feedforward.fc_1")
            made.linear(f"{ours}.ff.down", f"{theirs}.positionwise_feedforward.fc_2")
            made.norm(f"{ours}.ff_residual.norm", f"{theirs}.ff_layer_norm")
    made.linear("output", "decoder.fc_out")
    weights.ignore("encoder.scale", "decoder.scale")
    assumed = [] if options.heads else ["8 attention heads were assumed: say --heads if there are others"]
    decoding, notes = decoding_of(specials)
    return Imported(
        config,
        made,
        tokenizers,
        decoding,
        not_compared="the tutorial's code is not a package; compare some outputs with your notebook's",
        notes=[*assumed, *notes],
    )
