"""The Transformer, all of it: encode, forward (teacher-forced) and step (cached keys and values).

Sizes: B batch, S source length, T target length, K beams, R = B*K rows, H heads, D head size, V vocabulary, d width.
Sources are right-padded and described by lengths, so that a mask cannot be forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import cpu_training
from .config import ModelConfig, Side
from .positions import distance_buckets, sinusoids
from .seq2seq import Cache, KeysValues, Layers, keep, length_mask
from .ssru import Ssru

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_sigmoid": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
}


class AnnotatedLayerNorm(nn.Module):
    """Layer norm as published in The Annotated Transformer: unbiased deviation, eps added outside the root."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis of x."""
        centred = x - x.mean(-1, keepdim=True)
        # Not x.std(): its exported form recomputes the mean, and its gradient is NaN where a row is constant.
        deviation = torch.linalg.vector_norm(centred, dim=-1, keepdim=True) / math.sqrt(x.shape[-1] - 1)
        return self.weight * centred / (deviation + self.eps) + self.bias  # type: ignore[no-any-return]


def make_norm(config: ModelConfig, width: int) -> nn.Module:
    """The norm that the config names."""
    kinds: dict[str, type[nn.Module]] = {"standard": nn.LayerNorm, "annotated": AnnotatedLayerNorm, "rms": nn.RMSNorm}
    return kinds[config.norm](width, eps=config.norm_eps)


def make_head_norm(config: ModelConfig, size: int) -> nn.Module:
    """A norm of queries or keys (..., D), without a bias, if the config has one.

    RMSNorm as in Gemma 3 where the model's norms are, else LayerNorm as in ViT-22B (Dehghani et al. 2023; flax's
    `normalize_qk`). Both normalize each head, before positions are applied, with one gain for all heads.
    """
    if not config.qk_norm:
        return nn.Identity()
    eps = config.norm_eps
    return nn.RMSNorm(size, eps) if config.norm == "rms" else nn.LayerNorm(size, eps, bias=False)


class Attention(nn.Module):
    """Multi-head attention whose keys and values are made apart from its queries, so that they can be cached."""

    def __init__(self, config: ModelConfig, side: Side, source_width: int) -> None:
        super().__init__()
        self.heads, self.head_dim, self.dropout = side.heads, side.head_dim, config.attention_dropout
        inner = side.heads * side.head_dim
        self.query = nn.Linear(side.width, inner)
        self.key, self.value = nn.Linear(source_width, inner), nn.Linear(source_width, inner)
        self.out = nn.Linear(inner, side.width)
        self.query_norm, self.key_norm = (make_head_norm(config, side.head_dim) for _ in range(2))

    def split(self, x: Tensor) -> Tensor:
        """(B, T, H*D) -> (B, T, H, D)."""
        return x.view(x.shape[0], x.shape[1], self.heads, self.head_dim)

    def queries(self, x: Tensor) -> Tensor:
        """Queries of x: (B, H, T, D)."""
        return self.query_norm(self.split(self.query(x))).transpose(1, 2)  # type: ignore[no-any-return]

    def keys_values(self, x: Tensor) -> KeysValues:
        """Keys and values of x: two of (B, H, T, D)."""
        return self.key_norm(self.split(self.key(x))).transpose(1, 2), self.split(self.value(x)).transpose(1, 2)

    def attend(self, q: Tensor, keys_values: KeysValues, mask: Tensor | None, causal: bool = False) -> Tensor:
        """Queries (B, H, T, D) over keys and values (B, H, S, D) -> (B, H, T, D).

        mask is true where allowed, or numbers to add to the scores, see `RelativeBias`.
        """
        k, v = keys_values
        dropout = self.dropout if self.training else 0.0
        if self.training and (causal or (mask is not None and mask.dtype == torch.bool)) and cpu_training.usable(q):
            return cpu_training.attend(q, k, v, mask, dropout)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, dropout_p=dropout)

    def weights(self, x: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        """Attention weights of x (B, T, d) over keys (B, H, S, D), returned to the user; `attend` computes its own."""
        scores = self.queries(x) @ keys.transpose(2, 3) / math.sqrt(self.head_dim)
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        return scores.softmax(-1)

    def forward(self, x: Tensor, keys_values: KeysValues, mask: Tensor | None, causal: bool = False) -> Tensor:
        """Attend from x (B, T, d) to keys and values; returns (B, T, d)."""
        mixed = self.attend(self.queries(x), keys_values, mask, causal)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class RelativeBias(nn.Module):
    """Relative position bias added to attention scores.

    A learned number for each head and bucket of distances, of each layer or of all. Source: Raffel et al. 2020 (T5).
    """

    def __init__(self, config: ModelConfig, side: Side, causal: bool) -> None:
        super().__init__()
        self.layers, self.most, count = side.layers, config.max_positions - 1, config.relative_tables(side)
        self.tables = nn.ParameterList(torch.empty(config.relative_buckets, side.heads) for _ in range(count))
        buckets = None
        if count:
            distances = torch.arange(-self.most, self.most + 1)
            buckets = distance_buckets(distances, config.relative_buckets, config.relative_distance, causal)
        self.buckets: Tensor
        self.register_buffer("buckets", buckets, persistent=False)

    def forward(self, distances: Tensor, mask: Tensor | None) -> Sequence[Tensor | None]:
        """distances (B, T, S), mask (B, 1, T, S) -> each layer's mask, with numbers (B, H, T, S) if there are any."""
        places = (distances + self.most).clamp(0, 2 * self.most)
        # The inner lookup has no inputs but constants: runtimes do it when they load.
        found = (F.embedding(places, F.embedding(self.buckets, table)) for table in self.tables)  # (B, T, S, H)
        masks = [biased(mask, bias.permute(0, 3, 1, 2)) for bias in found] or [mask]
        return masks * (self.layers // len(masks))


class FeedForward(nn.Module):
    """Two linear layers around an activation; a gated one multiplies it with a third. Source: Shazeer 2020."""

    def __init__(self, config: ModelConfig, side: Side) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(side.width, side.ff_width), nn.Linear(side.ff_width, side.width)
        self.gate = nn.Linear(side.width, side.ff_width) if config.ff == "gated" else None
        self.activation, self.dropout = ACTIVATIONS[config.activation], config.activation_dropout

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d) -> (B, T, d)."""
        hidden = self.activation(self.gate(x)) * self.up(x) if self.gate else self.activation(self.up(x))
        return self.down(cpu_training.drop(hidden, self.dropout, self.training))  # type: ignore[no-any-return]


class Residual(nn.Module):
    """Norm, dropout and residual sum around a sublayer."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        self.norm, self.pre, self.dropout = make_norm(config, width), config.norm_position == "pre", config.dropout

    def before(self, x: Tensor) -> Tensor:
        """The sublayer's input."""
        return self.norm(x) if self.pre else x  # type: ignore[no-any-return]

    def after(self, x: Tensor, y: Tensor) -> Tensor:
        """Add the sublayer's output y to the stream x."""
        x = cpu_training.add_dropped(x, y, self.dropout, self.training)
        return x if self.pre else self.norm(x)  # type: ignore[no-any-return]


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        side, d = config.encoder, config.encoder.width
        self.attention, self.attention_residual = Attention(config, side, d), Residual(config, d)
        self.ff, self.ff_residual = FeedForward(config, side), Residual(config, d)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x (B, S, d), mask (B, 1 or H, S, S)."""
        y = self.attention_residual.before(x)
        x = self.attention_residual.after(x, self.attention(y, self.attention.keys_values(y), mask))
        return self.ff_residual.after(x, self.ff(self.ff_residual.before(x)))


class DecoderLayer(nn.Module):
    """Causal self-attention or a recurrent cell, cross-attention and feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        side, d, self.recurrent = config.decoder, config.decoder.width, config.decoder_cell == "ssru"
        if self.recurrent:
            self.cell, self.cell_residual = Ssru(d), Residual(config, d)
        else:
            self.attention, self.attention_residual = Attention(config, side, d), Residual(config, d)
        self.cross, self.cross_residual = Attention(config, side, config.encoder.width), Residual(config, d)
        self.ff, self.ff_residual = FeedForward(config, side), Residual(config, d)

    def forward(
        self,
        x: Tensor,
        cross: KeysValues,
        cross_mask: Tensor,
        mask: Tensor | None = None,
        seen: Layers | None = None,
    ) -> Tensor:
        """All target positions at once: x (B, T, d), cross two of (B, H, S, D), cross_mask (B, 1, T, S).

        mask (1, H, T, T): None where it is no more than causal. `seen`: as in `rest`.
        """
        if self.recurrent:
            x = self.cell_residual.after(x, self.cell(self.cell_residual.before(x)))
            return self.rest(x, cross, cross_mask, seen)
        y = self.attention_residual.before(x)
        own = self.attention(y, self.attention.keys_values(y), mask, causal=mask is None)
        x = self.attention_residual.after(x, own)
        return self.rest(x, cross, cross_mask, seen)

    def step(
        self,
        x: Tensor,
        cache: Cache,
        layer: int,
        bias: Tensor | None,
        cross: KeysValues,
        mask: Tensor,
        seen: Layers | None = None,
    ) -> Tensor:
        """One position of every row: x (B, K, d), cross two of (B, H, S, D), mask (B, 1, K, S) -> (B, K, d).

        bias (1 or R, H, 1, T) is of self-attention.
        """
        if self.recurrent:
            rows = self.cell_residual.before(x).flatten(0, 1)  # (R, d)
            y = self.cell.step(rows, partial(cache.replace, layer)).view_as(x)
            return self.rest(self.cell_residual.after(x, y), cross, mask, seen)
        rows = self.attention_residual.before(x).reshape(-1, 1, x.shape[2])  # (R, 1, d)
        keys_values, earlier = cache.extend(layer, *self.attention.keys_values(rows))
        y = self.attention(rows, keys_values, biased(earlier, bias)).view_as(x)
        return self.rest(self.attention_residual.after(x, y), cross, mask, seen)

    def rest(self, x: Tensor, cross: KeysValues, cross_mask: Tensor, seen: Layers | None = None) -> Tensor:
        """Cross-attention and feed-forward. Beams are query positions here, so cross K/V are never repeated.

        `seen` receives `attention` (B, K, S), the mean over heads.
        """
        y = self.cross_residual.before(x)
        if seen is not None:
            seen["attention"] = self.cross.weights(y, cross[0], cross_mask).mean(1)
        x = self.cross_residual.after(x, self.cross(y, cross, cross_mask))
        return self.ff_residual.after(x, self.ff(self.ff_residual.before(x)))


class Transformer(nn.Module):
    """The whole model. Build it with `init_weights` to train, or load a checkpoint's weights into it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, self.dropout = config, config.dropout
        source, d, pad = (
            config.encoder.width,
            config.decoder.width,
            config.pad_id if config.pad_embedding_zero else None,
        )
        self.tgt_embedding = nn.Embedding(config.tgt_vocab, d, padding_idx=pad)
        shared = config.share_embeddings == "all"
        self.src_embedding = self.tgt_embedding if shared else nn.Embedding(config.src_vocab, source, padding_idx=pad)
        self.output = nn.Linear(d, config.tgt_vocab, bias=config.output_bias)
        if config.share_embeddings != "none":
            self.output.weight = self.tgt_embedding.weight
        self.src_positions: Tensor | None
        self.tgt_positions: Tensor | None
        if config.positions == "learned":
            self.src_positions = nn.Parameter(torch.empty(config.max_positions, source))
            self.tgt_positions = nn.Parameter(torch.empty(config.max_positions, d))
        elif config.positions == "sinusoidal":
            tables = {width: sinusoids(config.max_positions, width, config.position_base) for width in {source, d}}
            self.register_buffer("src_positions", tables[source], persistent=False)
            self.register_buffer("tgt_positions", tables[d], persistent=False)
        else:
            self.src_positions = self.tgt_positions = None
        self.encoder_relative = RelativeBias(config, config.encoder, causal=False)
        self.decoder_relative = RelativeBias(config, config.decoder, causal=True)
        self.src_embedding_norm = make_norm(config, source) if config.embedding_norm else nn.Identity()
        self.tgt_embedding_norm = make_norm(config, d) if config.embedding_norm else nn.Identity()
        self.encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))
        self.decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers))
        self.encoder_norm = make_norm(config, source) if config.encoder.final_norm else nn.Identity()
        self.decoder_norm = make_norm(config, d) if config.decoder.final_norm else nn.Identity()

    def init_weights(self, seed: int) -> Transformer:
        """Xavier-uniform matrices, zero biases, embeddings of deviation 1/sqrt(d) so that tied outputs start small."""
        generator = torch.Generator().manual_seed(seed)
        tables = {id(self.src_embedding.weight), id(self.tgt_embedding.weight)}
        for name, parameter in self.named_parameters():
            if id(parameter) in tables or name.endswith("_positions"):
                nn.init.normal_(parameter, 0.0, parameter.shape[1] ** -0.5, generator=generator)
            elif parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        if self.config.pad_embedding_zero:
            with torch.no_grad():
                self.src_embedding.weight[self.config.pad_id].zero_()
                self.tgt_embedding.weight[self.config.pad_id].zero_()
        return self

    def embed(self, ids: Tensor, table: nn.Embedding, positions: Tensor | None, norm: nn.Module) -> Tensor:
        """ids (B, T) plus positions (T, d), (1, d) or (B, T, d) -> (B, T, d)."""
        x = table(ids)
        if self.config.scale_embeddings:
            x = x * math.sqrt(x.shape[-1])
        x = x if positions is None else x + positions
        return cpu_training.drop(norm(x), self.dropout, self.training)

    def encode(self, src_ids: Tensor, src_lengths: Tensor, layers: Layers | None = None) -> Tensor:
        """src_ids (B, S), src_lengths (B) -> memory (B, S, d); `layers` receives every layer's output."""
        count = src_ids.shape[1]
        mask = length_mask(src_lengths, count, count)
        x = self.embed(src_ids, self.src_embedding, first(self.src_positions, count), self.src_embedding_norm)
        keep(layers, "encoder_embedding", x)
        masks = self.encoder_relative(all_distances(src_ids), mask)
        for i, (layer, mask) in enumerate(zip(self.encoder, masks, strict=True)):
            x = keep(layers, f"encoder_layer_{i}", layer(x, mask))
        return keep(layers, "memory", self.encoder_norm(x))

    def cross_keys_values(self, memory: Tensor) -> list[KeysValues]:
        """Cross-attention keys and values of every decoder layer, projected once: L times two of (B, H, S, D)."""
        return [layer.cross.keys_values(memory) for layer in self.decoder]  # type: ignore[union-attr,operator]

    def decode(self, memory: Tensor, src_lengths: Tensor, tgt_ids: Tensor, seen: Layers | None = None) -> Tensor:
        """Teacher-forced: memory (B, S, d), tgt_ids (B, T) beginning with bos -> hidden states (B, T, d).

        `seen` receives `attention` (B, T, S) of the last layer, the mean over heads.
        """
        mask = length_mask(src_lengths, memory.shape[1], tgt_ids.shape[1])
        positions = first(self.tgt_positions, tgt_ids.shape[1])
        x = self.embed(tgt_ids, self.tgt_embedding, positions, self.tgt_embedding_norm)
        distances = all_distances(tgt_ids)
        causal = distances[:, None] >= 0 if self.config.positions == "relative" else None
        masks = self.decoder_relative(distances, causal)
        last = len(self.decoder) - 1
        for i, (layer, cross, own) in enumerate(zip(self.decoder, self.cross_keys_values(memory), masks, strict=True)):
            x = layer(x, cross, mask, own, seen if i == last else None)
        return self.decoder_norm(x)  # type: ignore[no-any-return]

    def forward(
        self, src_ids: Tensor, src_lengths: Tensor, tgt_ids: Tensor, project: bool = True, seen: Layers | None = None
    ) -> Tensor:
        """Teacher-forced logits (B, T, V) of the token after each of tgt_ids (B, T), which begins with bos.

        Not projected: the hidden states (B, T, d) that `output` makes them of. `seen`: as in `decode`.
        """
        hidden = self.decode(self.encode(src_ids, src_lengths), src_lengths, tgt_ids, seen)
        return self.output(hidden) if project else hidden  # type: ignore[no-any-return]

    def step(
        self,
        tokens: Tensor,
        position: Tensor,
        src_lengths: Tensor,
        cross: list[KeysValues],
        cache: Cache,
        layers: Layers | None = None,
    ) -> Tensor:
        """One decoding step: hidden states (B, K, d) for `output`. See `Seq2Seq.step`."""
        mask = length_mask(src_lengths, cross[0][0].shape[2], tokens.shape[1])
        positions = None if self.tgt_positions is None else F.embedding(position, self.tgt_positions)
        x = self.embed(tokens, self.tgt_embedding, positions, self.tgt_embedding_norm)
        keep(layers, "decoder_embedding", x)
        last, biases = len(self.decoder) - 1, [None] * len(self.decoder)
        if self.config.positions == "relative":
            biases = self.decoder_relative(cache.distances[:, None], None)
        for i, (layer, layer_cross, bias) in enumerate(zip(self.decoder, cross, biases, strict=True)):
            x = layer.step(x, cache, i, bias, layer_cross, mask, layers if i == last else None)  # type: ignore[operator]
            keep(layers, f"decoder_layer_{i}", x)
        return keep(layers, "hidden", self.decoder_norm(x))


def biased(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """The bias, with -inf where the mask is false; without a bias the mask itself."""
    if mask is None or bias is None:
        return mask if bias is None else bias
    return torch.where(mask, bias, -math.inf)


def all_distances(ids: Tensor) -> Tensor:
    """Distances (1, T, T) between the positions of ids (B, T): query minus key."""
    places = torch.arange(ids.shape[1], device=ids.device)
    return (places[:, None] - places)[None]


def first(positions: Tensor | None, count: int) -> Tensor | None:
    """The first `count` rows of a table, or None."""
    return None if positions is None else positions[:count]
