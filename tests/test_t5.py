"""Models of the T5 family against transformers, on small random weights."""

from __future__ import annotations

import os
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers loads: random weights, nothing is fetched

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration, UMT5Config, UMT5ForConditionalGeneration
from transformers.activations import ACT2FN
from transformers.models.t5.modeling_t5 import T5Attention

from tformer_deploy.model.config import ModelConfig
from tformer_deploy.model.network import ACTIVATIONS, Attention, FeedForward, Transformer
from tformer_deploy.model.positions import distance_buckets
from tformer_deploy.model.seq2seq import GrowingCache

KINDS: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "T5": (T5Config, T5ForConditionalGeneration, {"feed_forward_proj": "relu"}),
    "Flan-T5": (
        T5Config,
        T5ForConditionalGeneration,
        {"feed_forward_proj": "gated-gelu", "scale_decoder_outputs": False},
    ),
    "UMT5": (UMT5Config, UMT5ForConditionalGeneration, {"feed_forward_proj": "gated-gelu"}),
}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("gelu_tanh", "gelu_new"), ("gelu_tanh", "gelu_pytorch_tanh"), ("gelu_sigmoid", "quick_gelu"), ("silu", "silu")],
)
def test_activations_equal_transformers(ours: str, theirs: str) -> None:
    x = torch.linspace(-9, 9, 500, dtype=torch.float64)
    torch.testing.assert_close(ACTIVATIONS[ours](x), ACT2FN[theirs](x), atol=1e-12, rtol=1e-12)


@settings(max_examples=60)
@given(st.integers(4, 64), st.integers(0, 400), st.booleans())
def test_buckets_equal_transformers(count: int, further: int, causal: bool) -> None:
    far, furthest = 600, count // 2 + 1 + further
    buckets = {"relative_attention_num_buckets": count, "relative_attention_max_distance": furthest}
    config = T5Config(d_model=8, d_kv=8, num_heads=1, is_decoder=causal, **buckets)
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    theirs.relative_attention_bias.weight.data = torch.arange(float(count))[:, None]  # a bucket's number is its bias
    bias = theirs.compute_bias(1, 2 * far + 1, past_seen_tokens=far)[0, 0, 0]  # of the keys around one query
    distances = far - torch.arange(2 * far + 1)
    assert torch.equal(distance_buckets(distances, count, furthest, causal), bias.long())


def make(kind: str) -> tuple[Transformer, Any]:
    """Our model with the weights of theirs, which are random and large enough to matter."""
    config_kind, model_kind, changes = KINDS[kind]
    sizes = {"vocab_size": 40, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_heads": 4}
    buckets = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}
    theirs = model_kind(config_kind(num_layers=3, num_decoder_layers=2, **sizes, **buckets, **changes)).eval()
    generator = torch.Generator().manual_seed(3)
    for name, parameter in theirs.named_parameters():
        size = 1.0 if "relative" in name or "shared" in name else 0.2
        parameter.data.copy_(1.0 * (parameter.dim() < 2) + size * torch.randn(parameter.shape, generator=generator))
    config, gated, tied = theirs.config, "gated" in changes["feed_forward_proj"], kind != "Flan-T5"
    if not tied:  # whatever the config says, their class ties them
        theirs.lm_head.weight = nn.Parameter(0.2 * torch.randn(40, 32, generator=generator))
    ours = Transformer(
        ModelConfig(
            src_vocab=40,
            tgt_vocab=40,
            d_model=32,
            d_ff=48,
            heads=4,
            head_dim=12,
            encoder_layers=3,
            decoder_layers=2,
            norm="rms",
            norm_eps=config.layer_norm_epsilon,
            scale_embeddings=False,
            pad_embedding_zero=False,
            positions="relative",
            relative_buckets=8,
            relative_distance=12,
            relative_per_layer=kind == "UMT5",
            max_positions=64,
            share_embeddings="all" if tied else "none",
            activation="gelu_tanh" if gated else "relu",
            ff="gated" if gated else "plain",
            pad_id=0,
            eos_id=1,
            bos_id=2,
            start_id=0,
        )
    ).eval()
    with torch.no_grad():
        copy_weights(ours, theirs, tied)
    return ours.double(), theirs.double()


def copy_weights(ours: Transformer, theirs: Any, tied: bool) -> None:
    for side in (ours.encoder, ours.decoder):
        for bias in (parameter for name, parameter in side.named_parameters() if name.endswith("bias")):
            bias.zero_()
    ours.src_embedding.weight.copy_(theirs.shared.weight)
    ours.tgt_embedding.weight.copy_(theirs.shared.weight)
    ours.output.weight.copy_(theirs.lm_head.weight)
    for name in ("encoder", "decoder"):
        stack, tables = getattr(theirs, name), getattr(ours, f"{name}_relative").tables
        getattr(ours, f"{name}_norm").weight.copy_(stack.final_layer_norm.weight)
        for layer, block in zip(getattr(ours, name), stack.block, strict=True):
            own, *cross, last = block.layer
            copy_attention(layer.attention, own.SelfAttention, layer.attention_residual.norm, own.layer_norm)
            for each in cross:
                copy_attention(layer.cross, each.EncDecAttention, layer.cross_residual.norm, each.layer_norm)
            copy_ff(layer.ff, last.DenseReluDense)
            layer.ff_residual.norm.weight.copy_(last.layer_norm.weight)
        for table, block in zip(tables, stack.block, strict=False):
            table.copy_(block.layer[0].SelfAttention.relative_attention_bias.weight)
    if tied:  # their scale of outputs
        ours.decoder_norm.weight.mul_(ours.config.d_model**-0.5)


def copy_attention(ours: Attention, theirs: Any, norm: Any, their_norm: nn.Module) -> None:
    """Theirs does not scale its scores."""
    ours.query.weight.copy_(theirs.q.weight * ours.head_dim**0.5)
    for name, part in (("key", "k"), ("value", "v"), ("out", "o")):
        getattr(ours, name).weight.copy_(getattr(theirs, part).weight)
    norm.weight.copy_(their_norm.weight)


def copy_ff(ours: FeedForward, theirs: Any) -> None:
    if ours.gate:
        ours.gate.weight.copy_(theirs.wi_0.weight)
    ours.up.weight.copy_(theirs.wi_1.weight if ours.gate else theirs.wi.weight)
    ours.down.weight.copy_(theirs.wo.weight)


@pytest.mark.parametrize("kind", KINDS)
def test_models_equal_transformers(kind: str) -> None:
    """Encoder states, teacher-forced logits and those of cached steps, beyond the largest distance.

    In double precision, but for their norms.
    """
    ours, theirs = make(kind)
    generator = torch.Generator().manual_seed(0)
    src, tgt = (torch.randint(3, 40, (3, n), generator=generator) for n in (30, 25))
    tgt[:, 0], lengths = 0, torch.tensor([30, 17, 2])
    mask = (torch.arange(30) < lengths[:, None]).long()
    with torch.no_grad():
        expected = theirs(input_ids=src, attention_mask=mask, decoder_input_ids=tgt)
        memory = ours.encode(src, lengths)
        theirs_at = expected.encoder_last_hidden_state
        assert (memory - theirs_at)[mask.bool()].abs().max() <= 1e-5
        assert theirs_at[mask.bool()].std() > 0.5 and expected.logits.std() > 0.2
        assert (ours(src, lengths, tgt) - expected.logits).abs().max() <= 1e-5
        cross = ours.cross_keys_values(memory)
        empty = torch.zeros(3, 4, 0, 12, dtype=torch.float64)
        past = [(empty, empty)] * 2
        for t in range(25):
            cache = GrowingCache(past)
            hidden = ours.step(tgt[:, t : t + 1], torch.tensor([t]), lengths, cross, cache)
            past = cache.present
            assert (ours.output(hidden)[:, 0] - expected.logits[:, t]).abs().max() <= 1e-5
