"""The model against independent references: published formulas, torch's own layers, and itself without a cache."""

from __future__ import annotations

import itertools
import math
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from tformer_deploy.bundle.contract import layer_names
from tformer_deploy.model.config import ModelConfig, preset
from tformer_deploy.model.network import (
    ACTIVATIONS,
    AnnotatedLayerNorm,
    Attention,
    DecoderLayer,
    EncoderLayer,
    Residual,
    Transformer,
    make_norm,
    sinusoids,
)
from tformer_deploy.model.seq2seq import GrowingCache, StaticCache, log_probs

from .attention import attention_weights

PAD, BOS, EOS, VOCAB = 1, 2, 3, 13
M = TypeVar("M", bound=nn.Module)


def tiny(**changes: Any) -> ModelConfig:
    sizes = {"d_model": 16, "d_ff": 24, "heads": 4, "encoder_layers": 2, "decoder_layers": 2, "max_positions": 24}
    return ModelConfig(**{"src_vocab": VOCAB, "tgt_vocab": VOCAB, **sizes, **changes})


def randomised(module: M, seed: int = 0) -> M:
    """Move every parameter, so that biases and norm weights matter; double precision shows small mistakes."""
    generator = torch.Generator().manual_seed(seed)
    module.double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return module


def make_model(seed: int = 0, **changes: Any) -> Transformer:
    return randomised(Transformer(tiny(**changes)).init_weights(seed), seed)


def words(*shape: int, seed: int = 0) -> Tensor:
    """Random ids that are no special tokens."""
    return torch.randint(4, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def targets(*shape: int, seed: int = 0) -> Tensor:
    ids = words(*shape, seed=seed)
    ids[..., 0] = BOS
    return ids


def close(ours: Tensor, reference: Tensor) -> None:
    torch.testing.assert_close(ours, reference, atol=1e-10, rtol=1e-10)


# Size and initial weights


def test_base_has_the_published_number_of_parameters() -> None:
    d, vocab = 512, 8000
    model = Transformer(preset("base", vocab, vocab))  # not on the meta device: its first use takes two seconds
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert trainable == 168 * d**2 + 196 * d + vocab * d == 44_140_544 + 512 * vocab


@pytest.mark.parametrize(("sharing", "tables"), [("all", 1), ("decoder", 2), ("none", 3)])
def test_sharing_decides_how_many_vocabulary_tables_there_are(sharing: str, tables: int) -> None:
    shapes = [parameter.shape for parameter in Transformer(tiny(share_embeddings=sharing)).parameters()]
    assert shapes.count(torch.Size([VOCAB, 16])) == tables


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "relative"])
@pytest.mark.parametrize("sharing", ["none", "all"])
def test_initial_weights_depend_on_the_seed_alone(sharing: str, positions: str) -> None:
    def build(global_seed: int, seed: int) -> dict[str, Tensor]:
        torch.manual_seed(global_seed)
        return Transformer(tiny(share_embeddings=sharing, positions=positions)).init_weights(seed).state_dict()

    first, again, other = build(0, 1), build(9, 1), build(0, 2)
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]), name
        assert tensor.dim() < 2 or not torch.equal(tensor, other[name]), name


# Cached decoding


def decode_step_by_step(model: Transformer, src: Tensor, lengths: Tensor, tgt: Tensor) -> Tensor:
    """Log-probabilities (B, K, T, V) of targets (B, K, T), one position a call."""
    heads, head_dim = model.config.decoder.heads, model.config.decoder.head_dim
    cross = model.cross_keys_values(model.encode(src, lengths))
    empty = torch.zeros(tgt.shape[0] * tgt.shape[1], heads, 0, head_dim, dtype=torch.float64)
    past = [(empty, empty)] * model.config.decoder_layers
    scores = []
    for t in range(tgt.shape[2]):
        cache = GrowingCache(past)
        best = log_probs(model, model.step(tgt[:, :, t], torch.tensor([t]), lengths, cross, cache))
        past = cache.present
        assert all(part.shape == (empty.shape[0], heads, t + 1, head_dim) for layer in past for part in layer)
        scores.append(best)
    return torch.stack(scores, 2)


def decode_in_buffers(
    model: Transformer, src: Tensor, lengths: Tensor, tgt: Tensor, in_place: bool, one_place: bool
) -> Tensor:
    """The same over static caches, where a sentence begins a step after the one before it.

    `one_place`: all rows write the same place of their buffers, whatever position that is of their targets.
    """
    side, (batch, beams, count) = model.config.decoder, tgt.shape
    cross = model.cross_keys_values(model.encode(src, lengths))
    capacity = count + batch
    junk = torch.full((batch * beams, side.heads, capacity, side.head_dim), 7.0, dtype=torch.float64)
    past = [(junk, junk)] * side.layers
    found = torch.zeros(*tgt.shape, model.config.tgt_vocab, dtype=torch.float64)
    own = torch.arange(beams)[None, :, None].expand(batch, beams, capacity)
    for t in range(count + batch - 1):
        at = (t - torch.arange(batch)).clamp(0, count - 1)
        tokens = tgt.gather(2, at[:, None, None].expand(batch, beams, 1))[:, :, 0]
        rows = at.repeat_interleave(beams)
        place, first = (torch.tensor([t]), t - rows[:, None]) if one_place else (rows, None)
        cache = StaticCache(past, place, first, own if in_place else None)
        scores = log_probs(model, model.step(tokens, rows.view(batch, beams), lengths, cross, cache))
        past = cache.present
        for b in range(batch):
            if b <= t < b + count:
                found[b, :, at[b]] = scores[b]
    return found


def assert_step_equals_forward(model: Transformer) -> None:
    beams, src, lengths = 3, words(2, 6), torch.tensor([6, 3])
    tgt = targets(2, beams, 5)
    rows = tgt.flatten(0, 1)  # row = sentence * beams + beam
    with torch.no_grad():
        logits = model(src.repeat_interleave(beams, 0), lengths.repeat_interleave(beams), rows)
        close(decode_step_by_step(model, src, lengths, tgt).flatten(0, 1), logits.log_softmax(-1))
        for how in itertools.product((False, True), (False, True)):
            close(decode_in_buffers(model, src, lengths, tgt, *how).flatten(0, 1), logits.log_softmax(-1))


@pytest.mark.parametrize("sharing", ["none", "decoder", "all"])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@pytest.mark.parametrize("norm", ["standard", "annotated"])
@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_cached_step_equals_forward(norm_position: str, norm: str, positions: str, sharing: str) -> None:
    for activation in ACTIVATIONS:
        assert_step_equals_forward(
            make_model(
                norm_position=norm_position,
                norm=norm,
                positions=positions,
                share_embeddings=sharing,
                activation=activation,
            )
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"output_bias": True},
        {"final_norm": False},
        {"positions": "none"},
        {"positions": "relative", "relative_buckets": 4, "relative_distance": 4},
        {"positions": "relative", "relative_per_layer": True, "encoder_layers": 1, "decoder_layers": 3},
        {"final_norm_sides": "encoder"},
        {"final_norm_sides": "decoder", "norm_position": "post"},
        {"scale_embeddings": False, "pad_embedding_zero": False},
        {"encoder_layers": 1, "decoder_layers": 3, "heads": 1},
        {"src_vocab": VOCAB + 4, "share_embeddings": "decoder"},
    ],
    ids=str,
)
def test_cached_step_equals_forward_for_the_other_options(changes: dict[str, Any]) -> None:
    assert_step_equals_forward(make_model(**changes))


# Published formulas


@pytest.mark.parametrize("base", [10000.0, 500.0])
def test_sinusoids_equal_the_annotated_transformer(base: float) -> None:
    count, width = 40, 16
    table = [[0.0] * width for _ in range(count)]
    for position, i in itertools.product(range(count), range(0, width, 2)):
        div_term = math.exp(i * -(math.log(base) / width))
        table[position][i] = math.sin(position * div_term)
        table[position][i + 1] = math.cos(position * div_term)
    # The package computes in single precision: 40 * 2^-24.
    torch.testing.assert_close(sinusoids(count, width, base), torch.tensor(table), atol=3e-6, rtol=0)


def test_relative_positions_are_a_table_a_side_or_layer() -> None:
    for per_layer, tables in ((False, 1), (True, 2)):
        model = make_model(positions="relative", relative_per_layer=per_layer, relative_buckets=6, relative_distance=9)
        assert model.src_positions is None and model.tgt_positions is None
        for side in (model.encoder_relative, model.decoder_relative):
            assert [table.shape for table in side.tables] == [(6, 4)] * tables


def test_learned_positions_are_one_table_a_side() -> None:
    model = make_model(positions="learned")
    src, lengths, tgt = words(1, 4), torch.tensor([4]), targets(1, 3)
    with torch.no_grad():
        memory, logits = model.encode(src, lengths), model(src, lengths, tgt)
        model.tgt_positions.add_(noise(*model.tgt_positions.shape))
        assert torch.equal(model.encode(src, lengths), memory)
        assert not torch.allclose(model(src, lengths, tgt), logits)


@pytest.mark.parametrize(("scale", "factor"), [(True, 4.0), (False, 1.0)])
def test_embeddings_are_scaled_by_the_root_of_the_width(scale: bool, factor: float) -> None:
    model = make_model(scale_embeddings=scale, d_model=16)
    ids = words(2, 5)
    embedded = model.embed(ids, model.src_embedding, model.src_positions[:5], model.src_embedding_norm)
    close(embedded, factor * model.src_embedding.weight[ids] + model.src_positions[:5])


def published_norm(x: Tensor, a_2: Tensor, b_2: Tensor, eps: float = 1e-6) -> Tensor:
    """LayerNorm.forward of The Annotated Transformer."""
    mean = x.mean(-1, keepdim=True)
    std = x.std(-1, keepdim=True)
    return a_2 * (x - mean) / (std + eps) + b_2


@pytest.mark.parametrize("spread", [1.0, 1e-5])
def test_annotated_norm_equals_the_published_code(spread: float) -> None:
    norm = randomised(AnnotatedLayerNorm(16, 1e-6))
    x = 2 + spread * noise(3, 5, 16)
    close(norm(x), published_norm(x, norm.weight, norm.bias))


def test_annotated_norm_has_a_finite_gradient_on_constant_rows() -> None:
    norm = AnnotatedLayerNorm(16, 1e-6)
    x = torch.ones(2, 16, requires_grad=True)
    (norm(x) * torch.arange(16.0)).sum().backward()
    assert x.grad is not None and norm.weight.grad is not None
    assert x.grad.isfinite().all() and norm.weight.grad.isfinite().all()


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-10, 1e-12])
def test_standard_norm_adds_its_eps_inside_the_root(eps: float) -> None:
    norm = randomised(make_norm(tiny(norm_eps=eps), 16))
    x = math.sqrt(eps) * noise(4, 16)  # as large as eps itself
    biased = ((x - x.mean(-1, keepdim=True)) ** 2).mean(-1, keepdim=True)
    close(norm(x), norm.weight * (x - x.mean(-1, keepdim=True)) / torch.sqrt(biased + eps) + norm.bias)


def published_attention(module: Attention, query: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
    """MultiHeadedAttention.forward of The Annotated Transformer, mask 0 where forbidden."""
    batch, h, d_k = query.shape[0], module.heads, module.head_dim

    def project(layer: nn.Linear, x: Tensor) -> Tensor:
        return (x @ layer.weight.T + layer.bias).view(batch, -1, h, d_k).transpose(1, 2)

    q, k, v = project(module.query, query), project(module.key, memory), project(module.value, memory)
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(d_k)
    p_attn = scores.masked_fill(mask == 0, -1e9).softmax(dim=-1)
    x = torch.matmul(p_attn, v).transpose(1, 2).contiguous().view(batch, -1, h * d_k)
    return x @ module.out.weight.T + module.out.bias


def padding_mask(lengths: Tensor, size: int, queries: int) -> Tensor:
    """(B, 1, queries, size), true where a token is, written as a loop."""
    mask = torch.zeros(len(lengths), 1, queries, size, dtype=torch.bool)
    for sentence, length in enumerate(lengths.tolist()):
        mask[sentence, :, :, :length] = True
    return mask


def test_attention_equals_the_annotated_transformer() -> None:
    module = randomised(Attention(tiny(), tiny().decoder, 16))
    x, memory = noise(2, 5, 16), noise(2, 7, 16, seed=1)
    mask = padding_mask(torch.tensor([7, 2]), 7, 5)
    close(module(x, module.keys_values(memory), mask), published_attention(module, x, memory, mask))


def test_causal_attention_equals_the_annotated_transformer() -> None:
    module, x = randomised(Attention(tiny(), tiny().decoder, 16)), noise(2, 5, 16)
    subsequent = torch.triu(torch.ones(1, 1, 5, 5), diagonal=1) == 0
    ours = module(x, module.keys_values(x), None, causal=True)
    close(ours, published_attention(module, x, x, subsequent))


# torch's own layers


def copy_attention(ours: Attention, theirs: nn.MultiheadAttention) -> None:
    theirs.in_proj_weight.copy_(torch.cat([ours.query.weight, ours.key.weight, ours.value.weight]))
    theirs.in_proj_bias.copy_(torch.cat([ours.query.bias, ours.key.bias, ours.value.bias]))
    theirs.out_proj.load_state_dict(ours.out.state_dict())


def torch_layer(ours: Any, config: ModelConfig) -> Any:
    """The layer of torch.nn with the same weights."""
    kind = nn.TransformerEncoderLayer if isinstance(ours, EncoderLayer) else nn.TransformerDecoderLayer
    theirs: Any = kind(
        config.d_model,
        config.heads,
        config.d_ff,
        dropout=0.0,
        activation=config.activation,
        layer_norm_eps=config.norm_eps,
        batch_first=True,
        norm_first=config.norm_position == "pre",
        dtype=torch.float64,
    )
    residuals = [ours.attention_residual, ours.ff_residual]
    with torch.no_grad():
        copy_attention(ours.attention, theirs.self_attn)
        if isinstance(ours, DecoderLayer):
            residuals.insert(1, ours.cross_residual)
            copy_attention(ours.cross, theirs.multihead_attn)
        for number, residual in enumerate(residuals, 1):
            getattr(theirs, f"norm{number}").load_state_dict(residual.norm.state_dict())
        theirs.linear1.load_state_dict(ours.ff.up.state_dict())
        theirs.linear2.load_state_dict(ours.ff.down.state_dict())
    return theirs  # left in training mode, without dropout, so that torch takes no fused path


TORCH_OPTIONS = list(itertools.product(["pre", "post"], ["relu", "gelu"]))


@pytest.mark.parametrize(("norm_position", "activation"), TORCH_OPTIONS)
def test_encoder_layer_equals_torch(norm_position: str, activation: str) -> None:
    config = tiny(norm_position=norm_position, activation=activation)
    layer = randomised(EncoderLayer(config))
    x, lengths = noise(3, 6, 16), torch.tensor([6, 4, 1])
    forbidden = ~padding_mask(lengths, 6, 1)[:, 0, 0]
    reference = torch_layer(layer, config)(x, src_key_padding_mask=forbidden)
    close(layer(x, padding_mask(lengths, 6, 6)), reference)


@pytest.mark.parametrize(("norm_position", "activation"), TORCH_OPTIONS)
def test_decoder_layer_equals_torch(norm_position: str, activation: str) -> None:
    config = tiny(norm_position=norm_position, activation=activation)
    layer = randomised(DecoderLayer(config))
    x, memory, lengths = noise(3, 4, 16), noise(3, 6, 16, seed=1), torch.tensor([6, 4, 1])
    future = torch.ones(4, 4, dtype=torch.bool).triu(1)
    forbidden = ~padding_mask(lengths, 6, 1)[:, 0, 0]
    reference = torch_layer(layer, config)(x, memory, tgt_mask=future, memory_key_padding_mask=forbidden)
    close(layer(x, layer.cross.keys_values(memory), padding_mask(lengths, 6, 4)), reference)


@pytest.mark.parametrize("sharing", ["none", "all"])
@pytest.mark.parametrize(("norm_position", "activation"), TORCH_OPTIONS)
def test_whole_model_equals_torch_layers(norm_position: str, activation: str, sharing: str) -> None:
    model = make_model(norm_position=norm_position, activation=activation, share_embeddings=sharing)
    src, lengths, tgt = words(3, 6), torch.tensor([6, 4, 1]), targets(3, 4)
    forbidden = ~padding_mask(lengths, 6, 1)[:, 0, 0]
    future = torch.ones(4, 4, dtype=torch.bool).triu(1)

    memory = 4 * model.src_embedding.weight[src] + model.src_positions[:6]
    for layer in model.encoder:
        memory = torch_layer(layer, model.config)(memory, src_key_padding_mask=forbidden)
    memory = model.encoder_norm(memory)
    x = 4 * model.tgt_embedding.weight[tgt] + model.tgt_positions[:4]
    for layer in model.decoder:
        x = torch_layer(layer, model.config)(x, memory, tgt_mask=future, memory_key_padding_mask=forbidden)
    table = model.tgt_embedding.weight if sharing == "all" else model.output.weight
    close(model(src, lengths, tgt), model.decoder_norm(x) @ table.T)


# Masks


@settings(max_examples=12)
@given(lengths=st.lists(st.integers(1, 7), min_size=1, max_size=4), extra=st.integers(0, 3), seed=st.integers(0, 99))
def test_padding_and_neighbours_change_nothing(lengths: list[int], extra: int, seed: int) -> None:
    model = make_model(seed)
    src = words(len(lengths), max(lengths) + extra, seed=seed)  # the padding holds words: lengths alone must count
    tgt = targets(len(lengths), 4, seed=seed)
    with torch.no_grad():
        memory = model.encode(src, torch.tensor(lengths))
        logits = model(src, torch.tensor(lengths), tgt)
        for row, length in enumerate(lengths):
            alone = src[row : row + 1, :length], torch.tensor([length])
            close(memory[row : row + 1, :length], model.encode(*alone))
            close(logits[row : row + 1], model(*alone, tgt[row : row + 1]))


@settings(max_examples=12)
@given(length=st.integers(2, 8), seed=st.integers(0, 99), data=st.data())
def test_later_target_tokens_do_not_change_earlier_logits(length: int, seed: int, data: st.DataObject) -> None:
    model, src, lengths = make_model(seed), words(1, 5), torch.tensor([5])
    cut = data.draw(st.integers(1, length - 1))
    tgt = targets(1, length, seed=seed)
    changed = tgt.clone()
    changed[:, cut:] = EOS
    with torch.no_grad():
        before, after = model(src, lengths, tgt), model(src, lengths, changed)
    close(before[:, :cut], after[:, :cut])
    assert not torch.allclose(before[:, cut:], after[:, cut:])


@pytest.mark.parametrize("positions", ["sinusoidal", "relative"])
def test_attention_weights_are_distributions_over_what_is_visible(positions: str) -> None:
    model, lengths = make_model(positions=positions), torch.tensor([6, 2])
    weights = attention_weights(model, words(2, 6), lengths, targets(2, 4))
    sizes = {"encoder.{}.attention": (6, 6), "decoder.{}.attention": (4, 4), "decoder.{}.cross": (4, 6)}
    assert weights.keys() == {name.format(layer) for name in sizes for layer in (0, 1)}
    for pattern, size in sizes.items():
        for layer in (0, 1):
            found = weights[pattern.format(layer)]
            assert found.shape == (2, 4, *size)
            close(found.sum(-1), torch.ones_like(found[..., 0]))
            if pattern == "decoder.{}.attention":
                assert not found.triu(1).any()
            else:
                assert not found[1, ..., 2:].any() and found[1, ..., :2].all() and found[0].all()


def test_attention_weights_are_those_that_the_model_uses() -> None:
    """With values that are the identity of the source positions, cross-attention returns its own weights."""
    model = make_model(encoder_layers=1, decoder_layers=1, heads=1)
    src, lengths, tgt = words(1, 6), torch.tensor([4]), targets(1, 3)
    weights = attention_weights(model, src, lengths, tgt)["decoder.0.cross"]
    cross, seen = model.decoder[0].cross, []
    values = torch.eye(6, 16, dtype=torch.float64)[None, None]
    hook = cross.register_forward_pre_hook(
        lambda module, args: seen.append(module.attend(module.queries(args[0]), (args[1][0], values), args[2]))
    )
    with torch.no_grad():
        model(src, lengths, tgt)
    hook.remove()
    close(weights, seen[0][..., :6])


@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_step_gives_the_attention_of_its_last_layer(norm_position: str) -> None:
    """Mean over heads, of the same rows as a teacher-forced pass; padding has no weight."""
    model = make_model(norm_position=norm_position)
    src, lengths, tgt = words(2, 6), torch.tensor([6, 2]), targets(2, 3, 4)
    weights = attention_weights(model, src.repeat_interleave(3, 0), lengths.repeat_interleave(3), tgt.flatten(0, 1))
    expected = weights["decoder.1.cross"].mean(1).view(2, 3, 4, 6)
    cross = model.cross_keys_values(model.encode(src, lengths))
    past = [(torch.zeros(6, 4, 0, 4, dtype=torch.float64),) * 2] * 2
    for t in range(4):
        layers: dict[str, Tensor] = {}
        with torch.no_grad():
            cache = GrowingCache(past)
            model.step(tgt[:, :, t], torch.tensor([t]), lengths, cross, cache, layers)
            past = cache.present
        close(layers["attention"], expected[:, :, t])
        assert not layers["attention"][1, :, 2:].any()


@pytest.mark.parametrize("changes", [{}, {"norm_position": "post", "final_norm": False}], ids=["pre", "post"])
def test_layer_values_are_those_of_each_module(changes: dict[str, Any]) -> None:
    model = make_model(**changes)
    src, lengths = words(2, 5), torch.tensor([5, 3])
    seen: list[Tensor] = []
    for module in (*model.encoder, model.encoder_norm):
        module.register_forward_hook(lambda module, args, output: seen.append(output))
    encoder: dict[str, Tensor] = {}
    step: dict[str, Tensor] = {}
    with torch.no_grad():
        memory = model.encode(src, lengths, encoder)
        empty = torch.zeros(2, 4, 0, 4, dtype=torch.float64)
        cross = model.cross_keys_values(memory)
        cache = GrowingCache([(empty, empty)] * 2)
        hidden = model.step(targets(2, 1), torch.tensor([0]), lengths, cross, cache, step)
        assert torch.equal(step["hidden"], hidden)
        close(model.output(hidden).log_softmax(-1), log_probs(model, hidden))
        close(step["hidden"], model.decode(memory, lengths, targets(2, 1)))
    assert list(encoder) == ["encoder_embedding", "encoder_layer_0", "encoder_layer_1", "memory"]
    assert list(step) == ["decoder_embedding", "decoder_layer_0", "attention", "decoder_layer_1", "hidden"]
    assert set(layer_names("encoder", model.config)) <= set(encoder)
    assert set(layer_names("decoder_step", model.config)) <= set(step)
    for name, value in zip(list(encoder)[1:], seen, strict=True):
        assert torch.equal(encoder[name], value)
    embedded = model.embed(src, model.src_embedding, model.src_positions[:5], model.src_embedding_norm)
    close(encoder["encoder_embedding"], embedded)


# Padding embedding


@pytest.mark.parametrize("sharing", ["none", "decoder", "all"])
def test_padding_row_starts_at_zero(sharing: str) -> None:
    model = Transformer(tiny(share_embeddings=sharing)).init_weights(0)
    for table in (model.src_embedding.weight, model.tgt_embedding.weight):
        assert not table[PAD].any() and table[[0, *range(2, VOCAB)]].any(-1).all()
    kept = Transformer(tiny(share_embeddings=sharing, pad_embedding_zero=False)).init_weights(0)
    assert kept.src_embedding.weight[PAD].any() and kept.tgt_embedding.weight[PAD].any()


@pytest.mark.parametrize("zero", [True, False])
def test_padding_row_gets_no_gradient_through_the_lookup(zero: bool) -> None:
    model = Transformer(tiny(share_embeddings="none", pad_embedding_zero=zero)).init_weights(0)
    src, tgt = words(2, 5), targets(2, 4)
    src[:, 3:], tgt[:, 2:] = PAD, PAD
    logits = model(src, torch.tensor([5, 5]), tgt)  # padding ids inside the lengths, so that they are looked up
    F.cross_entropy(logits.flatten(0, 1), words(2, 4, seed=1).flatten()).backward()
    for table in (model.src_embedding.weight, model.tgt_embedding.weight):
        assert table.grad is not None and table.grad[PAD].any().item() is not zero


# Dropout


@pytest.mark.parametrize("kind", ["dropout", "attention_dropout", "activation_dropout"])
def test_each_dropout_acts_in_training_only(kind: str) -> None:
    off = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    batch = words(2, 5), torch.tensor([5, 3]), targets(2, 4)
    plain = make_model(**off)
    dropped = make_model(**{**off, kind: 0.5})
    with torch.no_grad():
        expected = plain(*batch)
        assert torch.equal(dropped(*batch), expected)
        torch.testing.assert_close(plain.train()(*batch), expected)  # its attention rounds otherwise
        torch.manual_seed(0)
        first, second = dropped.train()(*batch), dropped(*batch)
    assert not torch.allclose(first, expected) and not torch.allclose(first, second)


def test_dropout_acts_on_embeddings_and_on_what_sublayers_add() -> None:
    torch.manual_seed(0)
    residual = Residual(tiny(dropout=0.5), 16).train()
    added = residual.after(torch.zeros(50, 16), torch.ones(50, 16))
    assert set(added.flatten().tolist()) == {0.0, 2.0}  # dropped, or scaled up to keep the mean
    model = Transformer(tiny(dropout=0.5)).init_weights(0).train()
    positions = model.src_positions[:20]
    dropped = model.embed(words(2, 20), model.src_embedding, positions, model.src_embedding_norm) == 0
    assert 0.3 < dropped.float().mean() < 0.7
