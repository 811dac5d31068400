"""What a model is and how it is trained: frozen dataclasses, checked when made. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from ..base.errors import ConfigError, unknown
from ..base.settings import at_least, at_most, check_types, from_dict

PAD_ID, BOS_ID, EOS_ID, UNK_ID = 1, 2, 3, 0
"""Ids of the special tokens in our own tokenizers, and the defaults for others."""

MAX_SEED = 2**63
"""Seeds are less than this: torch takes signed 64-bit integers."""

BATCH_TOKENS = 4096
"""Padded source tokens of a batch, unless the caller or the engine sets it."""

WINDOW_BYTES = 16
"""Bytes of input read ahead for each token of a batch, so that lines of similar length share a batch: some 4 batches,
at 4 bytes a token."""

MOST_OF_MODEL = {
    "src_vocab": 1 << 24,
    "tgt_vocab": 1 << 24,
    "d_model": 1 << 16,
    "d_ff": 1 << 20,
    "heads": 1 << 12,
    "encoder_layers": 1 << 11,
    "decoder_layers": 1 << 11,
    "max_positions": 1 << 20,
    "relative_buckets": 1 << 16,
    "relative_distance": 1 << 30,
}
"""Upper bounds far above published models, so that a wrong number gives an error message before memory runs out."""
MOST_OF_TRAINING = {
    **dict.fromkeys(("updates", "warmup", "cooldown", "valid_every", "average", "patience", "bleu_sentences"), 10**9),
    "batch_tokens": 1 << 24,
    "accumulate": 1 << 20,
    "keep_beams": 64,
    "max_tokens": MOST_OF_MODEL["max_positions"],
}
MOST_SAMPLED = 512
"""sentencepiece draws from at most so many best ways to split a line."""

NormPosition = Literal["pre", "post"]
NormKind = Literal["standard", "annotated", "rms"]
FeedForwardKind = Literal["plain", "gated"]
PositionKind = Literal["sinusoidal", "learned", "relative", "none"]
CellKind = Literal["attention", "ssru"]
Sharing = Literal["none", "decoder", "all"]
Activation = Literal["relu", "gelu", "gelu_tanh", "gelu_sigmoid", "silu"]
Sides = Literal["both", "encoder", "decoder"]
Precision = Literal["fp32", "bf16"]
Quantize = Literal["none", "int8"]
Keep = Literal["average", "last", "ema", "loss", "bleu"]


@dataclass(frozen=True)
class Side:
    """Sizes of the encoder or of the decoder."""

    width: int
    """Of the residual stream."""
    ff_width: int
    heads: int
    head_dim: int
    layers: int
    final_norm: bool


@dataclass(frozen=True)
class ModelConfig:
    """One encoder-decoder Transformer of the "Attention Is All You Need" family.

    Source: Vaswani et al. 2017; Rush et al., "The Annotated Transformer".
    """

    src_vocab: int
    """Entries of the source embedding."""
    tgt_vocab: int
    """Entries of the target embedding and of the output."""
    d_model: int = 512
    """Width of the residual stream."""
    d_ff: int = 2048
    """Width of the feed-forward layers."""
    heads: int = 8
    """Attention heads."""
    head_dim: int = 0
    """Width of one head; 0: d_model / heads, which must be whole."""
    encoder_layers: int = 6
    """Layers of the encoder."""
    decoder_layers: int = 6
    """Layers of the decoder; 0: a module of the user's own that has an encoder alone."""
    encoder_d_model: int = 0
    """The encoder's d_model; 0: the decoder's."""
    encoder_d_ff: int = 0
    """The encoder's d_ff; 0: the decoder's."""
    encoder_heads: int = 0
    """The encoder's heads; 0: the decoder's."""
    encoder_head_dim: int = 0
    """The encoder's head_dim; 0: the decoder's if width and heads are equal, else d_model / heads."""
    decoder_cell: CellKind = "attention"
    """What looks at earlier target tokens in a decoder layer. `ssru`: instead of self-attention, a recurrent cell with
    one vector of state (Kim et al. 2019)."""
    dropout: float = 0.1
    """Probability of dropping a residual or embedding element in training."""
    attention_dropout: float = 0.1
    """Probability of dropping an attention weight in training."""
    activation_dropout: float = 0.1
    """Probability of dropping a hidden element of the feed-forward layers in training."""
    norm_position: NormPosition = "pre"
    """`pre`: x + f(norm(x)); `post`: norm(x + f(x))."""
    final_norm: bool = True
    """A norm after the last layer."""
    final_norm_sides: Sides = "both"
    """Which of encoder and decoder has that norm."""
    norm: NormKind = "standard"
    """`standard`: biased variance, eps inside the root; `annotated`: unbiased deviation, eps added outside it; `rms`:
    root mean square, nothing subtracted, no bias."""
    norm_eps: float = 1e-5
    """Added to the variance (`rms`: the mean square), or with `annotated` to the deviation."""
    qk_norm: bool = False
    """A norm of each head's queries and keys, with a learned gain for all heads. See `network.Attention`."""
    embedding_norm: bool = False
    """A norm after the sum of embeddings and positions."""
    scale_embeddings: bool = True
    """Multiply embeddings by the square root of d_model."""
    pad_embedding_zero: bool = True
    """The padding embedding starts at zero. Training does not change it, except through an output projection that
    shares the table."""
    positions: PositionKind = "sinusoidal"
    """`sinusoidal` and `learned` are added to embeddings. `relative`: scores of self-attention get a learned bias by
    the distance of query and key, as in T5."""
    relative_buckets: int = 32
    """Buckets of distances; each has a bias per head."""
    relative_distance: int = 128
    """Distances from here on share the last bucket."""
    relative_per_layer: bool = False
    """Each layer has its own biases, as in UMT5; otherwise the layers of a side share them."""
    position_base: float = 10000.0
    """Base of the sinusoids' wavelengths."""
    max_positions: int = 512
    """Longest source and target in tokens, special tokens included."""
    share_embeddings: Sharing = "all"
    """Which tables are the same. `decoder`: target embedding and output projection; `all`: the source embedding too."""
    output_bias: bool = False
    """The output projection has a bias."""
    activation: Activation = "relu"
    """Of the feed-forward layers. `gelu_tanh`: gelu approximated by tanh; `gelu_sigmoid`: x * sigmoid(1.702 * x)."""
    ff: FeedForwardKind = "plain"
    """`plain`: down(activation(up(x))); `gated`: down(activation(gate(x)) * up(x))."""
    pad_id: int = PAD_ID
    """Fills sources and targets up."""
    bos_id: int = BOS_ID
    """First decoder input, unless start_id is set."""
    eos_id: int = EOS_ID
    """Ends every target."""
    start_id: int = -1
    """First decoder input; -1 becomes `bos_id`."""
    module_parameters: int = 0
    """Parameters of a module of the user's own, whose config states only vocabularies, ids, positions and cache sizes.
    0: `network.Transformer`, as described here."""

    def __post_init__(self) -> None:
        check_types(self)
        for name, most in MOST_OF_MODEL.items():
            at_least(self, name, 0 if name == "decoder_layers" and self.module_parameters > 0 else 1)
            at_most(self, name, most)
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"model.{name}={getattr(self, name)}: must be at least 0 and less than 1")
        at_least(self, "module_parameters", 0)
        if not self.final_norm and self.final_norm_sides != "both":
            raise ConfigError(
                f"model.final_norm_sides={self.final_norm_sides}: model.final_norm=false leaves no norm there"
            )
        few = self.relative_buckets < 4 or self.relative_distance <= self.relative_buckets // 2
        if self.positions == "relative" and few:
            raise ConfigError(
                f"model.relative_buckets={self.relative_buckets}, model.relative_distance={self.relative_distance}: "
                "needs at least 4 buckets, and a distance above half as many"
            )
        if self.decoder_cell == "ssru" and (self.positions == "relative" or self.module_parameters):
            raise ConfigError(
                "model.decoder_cell=ssru: is for our own model, whose positions are not relative: those are of "
                "self-attention; use positions=sinusoidal"
            )
        if self.norm_eps < 0:
            raise ConfigError(f"model.norm_eps={self.norm_eps}: must be at least 0")
        if self.position_base <= 0:
            raise ConfigError(f"model.position_base={self.position_base}: must be above 0")
        for name in ("head_dim", "encoder_d_model", "encoder_d_ff", "encoder_heads", "encoder_head_dim"):
            at_least(self, name, 0)
            at_most(self, name, MOST_OF_MODEL[name.removeprefix("encoder_").replace("head_dim", "d_model")])
        for prefix, side in (("", self.decoder), ("encoder_", self.encoder)):
            if not side.head_dim:
                raise ConfigError(
                    f"model.{prefix}heads={side.heads} does not divide model.{prefix}d_model={side.width}: "
                    f"choose one of {_divisors(side.width)}, or set {prefix}head_dim"
                )
            if side.width % 2 and self.positions == "sinusoidal":
                raise ConfigError(f"model.{prefix}d_model={side.width}: sinusoidal positions need an even width")
        if self.share_embeddings == "all" and self.encoder.width != self.decoder.width:
            raise ConfigError(
                f"model.share_embeddings=all needs equal widths, got encoder {self.encoder.width} and decoder "
                f"{self.decoder.width}: use share_embeddings=decoder"
            )
        if self.share_embeddings == "all" and self.src_vocab != self.tgt_vocab:
            raise ConfigError(
                f"model.share_embeddings=all needs equal vocabularies, got source {self.src_vocab} and "
                f"target {self.tgt_vocab}: use share_embeddings=decoder or a joint vocabulary"
            )
        if self.start_id == -1:
            object.__setattr__(self, "start_id", self.bos_id)
        smallest = min(self.src_vocab, self.tgt_vocab)
        for name in ("pad_id", "bos_id", "eos_id", "start_id"):
            if not 0 <= getattr(self, name) < smallest:
                raise ConfigError(f"model.{name}={getattr(self, name)} is outside the vocabulary of {smallest}")

    @property
    def parameters(self) -> int:
        """Number of trained parameters; shared ones count once."""
        if self.module_parameters:
            return self.module_parameters
        encoder, decoder = self.encoder, self.decoder
        norms = 1 if self.norm == "rms" else 2  # weights, and biases
        layers = encoder.layers * (self._attention(encoder, encoder) + self._ff(encoder) + 2 * norms * encoder.width)
        cross = self._attention(decoder, encoder)
        recurrent = decoder.width * (2 * decoder.width + 1)
        own = recurrent if self.decoder_cell == "ssru" else self._attention(decoder, decoder)
        own += self._ff(decoder)
        layers += decoder.layers * (own + cross + 3 * norms * decoder.width)
        tables = {"none": 2, "decoder": 1}.get(self.share_embeddings, 1) * self.tgt_vocab * decoder.width
        tables += 0 if self.share_embeddings == "all" else self.src_vocab * encoder.width
        width = encoder.width + decoder.width
        tables += self.max_positions * width * (self.positions == "learned")
        tables += self.relative_buckets * sum(side.heads * self.relative_tables(side) for side in (encoder, decoder))
        ends = norms * sum(side.width * (side.final_norm + self.embedding_norm) for side in (encoder, decoder))
        return layers + tables + ends + self.tgt_vocab * self.output_bias

    def relative_tables(self, side: Side) -> int:
        """Tables of relative position biases in the encoder or the decoder."""
        return (side.layers if self.relative_per_layer else 1) * (self.positions == "relative")

    def _attention(self, side: Side, source: Side) -> int:
        inner, gains = side.heads * side.head_dim, 2 * side.head_dim * self.qk_norm
        return 2 * side.width * inner + 2 * source.width * inner + 3 * inner + side.width + gains

    def _ff(self, side: Side) -> int:
        into = 2 if self.ff == "gated" else 1
        return into * (side.width + 1) * side.ff_width + (side.ff_width + 1) * side.width

    @cached_property
    def decoder(self) -> Side:
        """The decoder's sizes; the caches' heads among them."""
        final_norm = self.final_norm and self.final_norm_sides != "encoder"
        return _side(self.d_model, self.d_ff, self.heads, self.head_dim, self.decoder_layers, final_norm)

    @cached_property
    def encoder(self) -> Side:
        """The encoder's sizes."""
        width, heads = self.encoder_d_model or self.d_model, self.encoder_heads or self.heads
        same = width == self.d_model and heads == self.heads
        head_dim = self.encoder_head_dim or (self.head_dim if same else 0)
        final_norm = self.final_norm and self.final_norm_sides != "decoder"
        return _side(width, self.encoder_d_ff or self.d_ff, heads, head_dim, self.encoder_layers, final_norm)


def _side(width: int, ff_width: int, heads: int, head_dim: int, layers: int, final_norm: bool) -> Side:
    """`head_dim` is 0 if it is neither set nor a whole share of the width."""
    return Side(width, ff_width, heads, head_dim or (0 if width % heads else width // heads), layers, final_norm)


@dataclass(frozen=True)
class TrainConfig:
    """How a model is trained; defaults follow Vaswani et al. 2017 at a small scale."""

    seed: int = 1
    """Seed of weights, data order and dropout."""
    updates: int = 8000
    """Optimizer steps."""
    batch_tokens: int = 4096
    """Padded tokens of one micro-batch, the larger of source and target side."""
    accumulate: int = 1
    """Micro-batches of one update, per process."""
    lr: float = 1e-3
    """Learning rate at the end of the warm-up."""
    warmup: int = 1000
    """Updates in which the learning rate grows linearly; then it falls with the inverse square root."""
    cooldown: int = 0
    """Last updates, in which the learning rate falls linearly to zero as well."""
    label_smoothing: float = 0.1
    """Share of the target probability that is spread over the vocabulary (Szegedy et al. 2016)."""
    label_smoothing_end: float = -1.0
    """Label smoothing of the last update, to which it goes linearly; -1: it stays the same."""
    dropout_start: float = 1.0
    """Factor of all dropout probabilities in the first update, from which it goes linearly to `dropout_end`."""
    dropout_end: float = 1.0
    """Factor of all dropout probabilities in the last update."""
    rdrop: float = 0.0
    """Weight of R-Drop (Liang et al. 2021): two passes with other dropout must agree; 0: one pass. Try 1 to 5."""
    teacher_weight: float = 0.5
    """With `--teacher`: share of the loss that is the cross-entropy with the teacher's probabilities, from 0 to 1."""
    teacher_temperature: float = 1.0
    """Divides the logits of both models in that share (Hinton et al. 2015); above 1: more even probabilities."""
    alignment_weight: float = 0.1
    """With `--alignments`: weight of the attention's cross-entropy with them (Chen et al. 2016)."""
    src_sampling: float = 0.0
    """Source lines get other pieces in each epoch; 0: always the best ones. With `bpe`, the probability of leaving out
    a merge (Provilkov et al. 2020), such as 0.1; with `unigram`, the exponent of the probabilities (Kudo 2018)."""
    tgt_sampling: float = 0.0
    """The same for target lines."""
    sampling_nbest: int = -1
    """With `unigram`, pieces are drawn from so many best ways to split a line; -1: from all ways."""
    clip_norm: float = 1.0
    """Largest gradient norm; 0 switches clipping off."""
    precision: Precision = "fp32"
    """`bf16`: matmuls in bfloat16; faster only on processors with bfloat16 arithmetic."""
    quantize: Quantize = "none"
    """`int8`: train and validate with weights and inputs of products rounded to 8 bits, as recipe `native-int8-trained`
    rounds them, and learn the scales of inputs (Esser et al. 2020)."""
    valid_every: int = 500
    """Updates between two validations. Each validation saves."""
    average: int = 10
    """Saved steps whose mean becomes the final weights."""
    ema: float = 0.0
    """Decay of a mean of the weights of all updates, such as 0.999; 0: no such mean is made."""
    keep: Keep = "average"
    """Final weights: the mean of the last saved steps, the last step, or the mean by `ema`. `loss` and `bleu`: of
    these the one with the best loss or BLEU on the whole validation text (chrF where BLEU is not known)."""
    keep_beams: int = 1
    """Beams of the translations that the last validation makes, and that `keep = "bleu"` compares; 1: greedy."""
    patience: int = 0
    """Validations without a better loss after which training stops; 0: never."""
    bleu_sentences: int = 500
    """Sentences that each validation translates for BLEU; 0: none. The last validation translates all."""
    max_tokens: int = 128
    """Longer training pairs are left out, and counted."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("updates", "batch_tokens", "accumulate", "warmup", "valid_every", "average", "max_tokens"):
            at_least(self, name, 1)
        at_least(self, "keep_beams", 1)
        for name in ("cooldown", "clip_norm", "patience", "bleu_sentences", "rdrop", "alignment_weight"):
            at_least(self, name, 0)
        for name, most in MOST_OF_TRAINING.items():
            at_most(self, name, most)
        if not 0 <= self.seed < MAX_SEED:
            raise ConfigError(f"train.seed={self.seed}: must be at least 0 and less than 2^63")
        for name in ("lr", "teacher_temperature"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"train.{name}={getattr(self, name)}: must be above 0")
        for name in ("label_smoothing", "ema"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"train.{name}={getattr(self, name)}: must be at least 0 and less than 1")
        if self.label_smoothing_end != -1 and not 0 <= self.label_smoothing_end < 1:
            raise ConfigError(f"train.label_smoothing_end={self.label_smoothing_end}: must be -1, or from 0 to below 1")
        for name in ("dropout_start", "dropout_end", "src_sampling", "tgt_sampling", "teacher_weight"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"train.{name}={getattr(self, name)}: must be from 0 to 1")
        if self.sampling_nbest != -1 and not 2 <= self.sampling_nbest <= MOST_SAMPLED:
            raise ConfigError(f"train.sampling_nbest={self.sampling_nbest}: must be -1, or from 2 to {MOST_SAMPLED}")
        if self.quantize != "none" and self.precision != "fp32":
            raise ConfigError("train.quantize=int8 computes in fp32: leave out train.precision=bf16")
        if self.keep == "ema" and not self.ema:
            raise ConfigError("train.keep=ema needs such a mean: set train.ema=0.999 as well")


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"d_model": 128, "d_ff": 256, "heads": 4, "encoder_layers": 4, "decoder_layers": 4},
    "small": {"d_model": 256, "d_ff": 1024, "heads": 4, "encoder_layers": 4, "decoder_layers": 4},
    "base": {"d_model": 512, "d_ff": 2048, "heads": 8, "encoder_layers": 6, "decoder_layers": 6},
    "big": {"d_model": 1024, "d_ff": 4096, "heads": 16, "encoder_layers": 6, "decoder_layers": 6, "dropout": 0.3},
}


def preset(name: str, src_vocab: int, tgt_vocab: int, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """The named preset with some fields replaced. Raises ConfigError for unknown names."""
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    if "module_parameters" in (overrides or {}):
        raise ConfigError("model.module_parameters is of modules of your own: leave it out")
    values = {"src_vocab": src_vocab, "tgt_vocab": tgt_vocab, **PRESETS[name], **(overrides or {})}
    return from_dict(ModelConfig, values, "model")


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, min(number, 64) + 1) if number % d == 0)
