"""Configs of our model: each option with another value, and mixes of them."""

from __future__ import annotations

EVERYTHING: dict[str, object] = {
    "norm": "rms",
    "qk_norm": True,
    "ff": "gated",
    "activation": "gelu",
    "embedding_norm": True,
    "head_dim": 12,
    "output_bias": True,
    "encoder_d_model": 24,
    "encoder_d_ff": 40,
    "encoder_heads": 3,
    "encoder_head_dim": 16,
    "encoder_layers": 3,
    "share_embeddings": "decoder",
    "start_id": 3,
}
T5: dict[str, object] = {
    "norm": "rms",
    "ff": "gated",
    "activation": "gelu_tanh",
    "positions": "relative",
    "relative_buckets": 8,
    "relative_distance": 12,
    "head_dim": 12,
}
OTHERS: dict[str, object] = {
    "activation": "gelu_sigmoid",
    "positions": "relative",
    "relative_per_layer": True,
    "final_norm_sides": "encoder",
    "norm_position": "post",
    "encoder_layers": 3,
}


SSRU: dict[str, object] = {"decoder_cell": "ssru", "norm_position": "post", "final_norm": False}
"""Not among CONFIGS: not every target and layout has it."""
ONE_LAYER: dict[str, object] = {"encoder_layers": 1, "decoder_layers": 1}
CONFIGS: dict[str, dict[str, object]] = {
    "pre-norm": {},
    "post-norm": {"norm_position": "post", "final_norm": False},
    "post-norm with final norms, gelu, learned positions": {
        **ONE_LAYER,
        "norm_position": "post",
        "activation": "gelu",
        "positions": "learned",
    },
    "pre-norm without a final norm, a prime vocabulary, another base": {
        **ONE_LAYER,
        "final_norm": False,
        "position_base": 500.0,
        "src_vocab": 1009,
        "tgt_vocab": 1009,
    },
    "a final norm of the decoder, gated": {
        **ONE_LAYER,
        "final_norm_sides": "decoder",
        "ff": "gated",
        "activation": "silu",
    },
    "annotated, nothing shared": {
        **ONE_LAYER,
        "norm": "annotated",
        "norm_eps": 1e-6,
        "share_embeddings": "none",
        "tgt_vocab": 45,
        "output_bias": True,
    },
    "annotated post-norm, a large eps": {
        **ONE_LAYER,
        "norm": "annotated",
        "norm_eps": 1e-3,
        "norm_position": "post",
        "final_norm": False,
    },
    "no positions, rms norm, many blocks": {
        **ONE_LAYER,
        "positions": "none",
        "norm": "rms",
        "norm_eps": 1e-6,
        "src_vocab": 4096,
        "tgt_vocab": 4096,
        "output_bias": True,
    },
    "gelu by sigmoid, gated, width 36, one head": {
        **ONE_LAYER,
        "activation": "gelu_sigmoid",
        "ff": "gated",
        "d_model": 36,
        "heads": 1,
        "d_ff": 20,
    },
    "silu, plain embeddings, width 24, decoder shared, another start": {
        **ONE_LAYER,
        "activation": "silu",
        "scale_embeddings": False,
        "norm_eps": 1e-12,
        "d_model": 24,
        "heads": 3,
        "d_ff": 40,
        "share_embeddings": "decoder",
        "tgt_vocab": 101,
        "pad_embedding_zero": False,
        "start_id": 3,
    },
    "norm of embeddings": {**ONE_LAYER, "embedding_norm": True, "norm_position": "post", "final_norm": False},
    "norms of queries and keys": {**ONE_LAYER, "qk_norm": True, "norm_position": "post", "final_norm": False},
    "every option": EVERYTHING,
    "T5": T5,
    "relative positions of each layer": OTHERS,
    "small heads, uneven depths": {"head_dim": 4, "encoder_layers": 3, "decoder_layers": 1, "d_ff": 1},
}
