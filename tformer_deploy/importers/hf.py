"""Hugging Face folders: Marian, M2M100, NLLB, Pegasus, Blenderbot, FSMT, BART, mBART, PLBart, T5, mT5, UMT5."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base.errors import ArtifactError, ConfigError
from ..base.settings import from_dict
from ..model.config import ModelConfig
from .base import Imported, ImportOptions, Parameters
from .hf_generation import decoding_defaults, ids_of, left_out, require_usable, settings_of, task_note
from .hf_original import HfOriginal
from .hf_tables import Tables, of_whole_model
from .hf_text import read_text
from .seen import Seen
from .toolkit import sines
from .weights import Weights, read_folder, read_json_file

ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "gelu_sigmoid",
    "silu": "silu",
    "swish": "silu",
}
ATTENTION = ("q_proj", "k_proj", "v_proj", "out_proj")
T5_ATTENTION = ("q", "k", "v", "o")
NAMES = "model.", ("model.", "lm_head.", "final_logits_bias")
"""An optional prefix of tensor names, and the prefixes of the model's own names."""
T5_NAMES = "transformer.", ("shared.", "encoder.", "decoder.", "lm_head.")
UNUSED = [f"model.{side}.{name}" for side in ("encoder", "decoder") for name in ("version", "embed_positions.weights")]
"""Tensors in old folders of BART and M2M100 that transformers ignores."""
UNBIASED = ("m2m_100", "fsmt")
"""Models without `final_logits_bias`, whatever a file has."""
T5_FAMILY = {"t5": "relu", "mt5": "gated-gelu", "umt5": "gated-gelu"}
"""With `feed_forward_proj` where config.json has none."""
IDS = {
    **dict.fromkeys(("m2m_100", "fsmt", "bart", "plbart", "mbart"), (1, 2)),
    **dict.fromkeys(("pegasus", *T5_FAMILY), (0, 1)),
    "blenderbot": (0, 2),
    "marian": (58100, 0),
}
"""`pad_token_id` and `eos_token_id` where config.json has none."""
FREE = ("max_positions", "dropout", "attention_dropout", "activation_dropout")
"""Fields of ModelConfig that may be set: config.json decides all others, or its folder's weights and tokenizer do."""
T5_POSITIONS = 512
"""Longest source and target by default: relative positions have no limit. T5 was trained with 512."""


@dataclass(frozen=True)
class Family:
    """What a model type's code fixes and its config does not say."""

    norm_position: str
    table: str
    """Positions: `halves` (Marian's), `fairseq`, or `learned` behind `offset` rows."""
    offset: int = 0
    embedding_norm: bool = False
    activation: str = "gelu"
    """This and the next: `activation_function` and `scale_embedding` where config.json has none."""
    scaled: bool = False

    @property
    def final_norm(self) -> bool:
        """Whether there is a norm after the last layer: in pre-norm models."""
        return self.norm_position == "pre"


FAMILIES = {
    "marian": Family("post", "halves"),
    "pegasus": Family("pre", "halves"),
    "m2m_100": Family("pre", "fairseq", activation="relu", scaled=True),
    "fsmt": Family("post", "fairseq", activation="relu", scaled=True),
    "blenderbot": Family("pre", "learned"),
    "bart": Family("post", "learned", 2, embedding_norm=True),
    "plbart": Family("post", "learned", 2, embedding_norm=True, scaled=True),
    "mbart": Family("pre", "learned", 2, embedding_norm=True),
}
NO_TEXT = ("whisper", "speech_to_text", "speech-encoder-decoder", "speecht5", "vision-encoder-decoder", "pix2struct")
NO_TEXT_KEYS = ("num_mel_bins", "num_channels", "image_size", "vision_config", "audio_config")
"""Model types whose source is no text, and keys of a config.json that say the same."""


def recognises(seen: Seen) -> bool:
    """Whether a folder has a config of a known model type. Raises ArtifactError for another one."""
    config = seen.path / "config.json"
    if not config.is_file():
        return False
    values = read_json_file(config)
    if isinstance(values.get("model_type"), str):
        require_known(seen.path, values)
        return True
    return False


NO_GRAPH = ("led", "prophetnet")
"""Encoder-decoders of text whose code torch.export does not take; docs/your-model.md names them."""


def require_known(path: Path, config: Mapping[str, Any]) -> None:
    """Raise ArtifactError for a model type that is not imported, with the way that is open to it."""
    kind = config.get("model_type")
    if kind in (*FAMILIES, *T5_FAMILY):
        return
    if not isinstance(kind, str):
        raise ArtifactError(f"{path / 'config.json'} names no model_type: copy it again")
    parts = [config, *(value for value in config.values() if isinstance(value, dict))]
    if kind in NO_TEXT or any(key in part for key in NO_TEXT_KEYS for part in parts):
        way = "its source is sound or an image, which tformer cannot export"
    elif config.get("is_encoder_decoder") is False or "CausalLM" in str(config.get("architectures")):
        way = "it is no encoder-decoder"
    elif kind in NO_GRAPH:
        way = "nor can it be exported as a module of your own: its code chooses by values, which no graph has"
    else:
        way = "if it is an encoder-decoder of text, export it as a module of your own, see docs/your-model.md"
    known = ", ".join((*FAMILIES, *T5_FAMILY))
    raise ArtifactError(f"{path}: model type '{kind}' cannot be imported, only {known}: {way}")


def read(path: Path, options: ImportOptions) -> Imported:
    """See `base.Imported`."""
    values = read_json_file(path / "config.json")
    require_known(path, values)
    kind = str(values["model_type"])
    pad, eos = IDS[kind]
    stated = Stated(path, {"pad_token_id": pad, "eos_token_id": eos, **values})
    if wrong := sorted(options.model.keys() - FREE):
        raise ConfigError(f"--set model.{wrong[0]}: config.json says it; {', '.join(FREE)} can be set")
    weights = of_whole_model(read_folder(path), *(T5_NAMES if kind in T5_FAMILY else NAMES))
    weights.ignore(*UNUSED)
    settings = settings_of(path, values)
    others = {name: value for name, value in values.items() if not name.endswith("_token_id")}
    text = read_text(path, kind, options, ids_of(settings, stated.values), others)
    forced = settings.get("forced_bos_token_id")
    first_ids = text.first_ids or (() if forced is None else (forced,))
    # What a user of transformers gives `generate` for a language.
    asked = {"forced_bos_token_id": text.first_ids[0]} if text.first_ids else {"decoder_start_token_id": text.start_id}
    asked = asked if text.tgt_lang else {}
    require_usable(path, settings, start="decoder_start_token_id" not in asked)
    ids = {"pad_id": text.specials.pad, "eos_id": text.specials.eos, "start_id": text.start_id}
    ids["bos_id"] = text.specials.bos if text.specials.bos >= 0 else text.start_id
    config, made = (_t5 if kind in T5_FAMILY else _bart)(stated, weights, {**ids, **options.model})
    decoding, notes = decoding_defaults(settings, first_ids, config)
    notes = [*text.notes, *notes, *task_note(values)]
    return Imported(
        config,
        made,
        text.tokenizers,
        decoding,
        lambda: HfOriginal(path, text, asked, left_out(settings)),
        notes=notes,
        other_ids=text.special,
    )


@dataclass(frozen=True)
class Stated:
    """A config.json."""

    path: Path
    values: Mapping[str, Any]

    def number(self, *names: str) -> int:
        """A whole number under one of its names. Raises ArtifactError."""
        for name in names:
            if type(self.values.get(name)) is int:
                return int(self.values[name])
        raise ArtifactError(f"{self.path / 'config.json'} has no whole number '{names[0]}': copy it again")

    def activation(self, name: str) -> str:
        """What our model calls an activation. Raises ConfigError."""
        if name not in ACTIVATIONS:
            raise ConfigError(f"{self.path}: activation '{name}' is not one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]


def _bart(stated: Stated, weights: Weights, given: Mapping[str, Any]) -> tuple[ModelConfig, Parameters]:
    """Config and parameters of BART and its relatives."""
    family = FAMILIES[str(stated.values["model_type"])]
    tables = Tables.of(weights, "model.", stated.values)
    side = {"encoder": "encoder_", "decoder": ""}
    sizes = {
        f"{ours}{name}": stated.number(f"{theirs}_{key}")
        for theirs, ours in side.items()
        for name, key in (("heads", "attention_heads"), ("d_ff", "ffn_dim"))
    }
    learned = {f"model.{theirs}.embed_positions.weight" for theirs in side} if family.table == "learned" else set()
    rows = [weights.shape(name)[0] - family.offset for name in learned]
    biased = stated.values["model_type"] not in UNBIASED and "final_logits_bias" in weights
    bias = biased and bool(weights.take("final_logits_bias").any())
    values = {
        **tables.values(weights),
        **sizes,
        "d_model": stated.number("d_model"),
        "encoder_layers": stated.number("encoder_layers"),
        "decoder_layers": stated.number("decoder_layers"),
        "norm_position": family.norm_position,
        "final_norm": family.final_norm,
        "embedding_norm": family.embedding_norm,
        "scale_embeddings": bool(stated.values.get("scale_embedding", family.scaled)),
        "activation": stated.activation(str(stated.values.get("activation_function", family.activation))),
        "positions": "learned",
        "max_positions": min(rows, default=0) or stated.number("max_position_embeddings"),
        "output_bias": bias,
        "pad_embedding_zero": False,
        **given,
    }
    config = from_dict(ModelConfig, values, "model")
    made = Parameters(weights, config)
    tables.put(made)
    if bias:
        made.put("output.bias", "final_logits_bias", lambda b: b.reshape(-1))
    weights.ignore("final_logits_bias")
    for ours, theirs in (("src", "encoder"), ("tgt", "decoder")):
        _positions(made, family, f"{ours}_positions", f"model.{theirs}.embed_positions.weight", stated)
        if family.embedding_norm:
            made.norm(f"{ours}_embedding_norm", f"model.{theirs}.layernorm_embedding")
        if family.final_norm:
            made.norm(f"{theirs}_norm", f"model.{theirs}.layer_norm")
    for name, count in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        for i in range(count):
            ours, theirs = f"{name}.{i}", f"model.{name}.layers.{i}"
            made.attention(f"{ours}.attention", f"{theirs}.self_attn", ATTENTION)
            made.norm(f"{ours}.attention_residual.norm", f"{theirs}.self_attn_layer_norm")
            if name == "decoder":
                made.attention(f"{ours}.cross", f"{theirs}.encoder_attn", ATTENTION)
                made.norm(f"{ours}.cross_residual.norm", f"{theirs}.encoder_attn_layer_norm")
            made.linear(f"{ours}.ff.up", f"{theirs}.fc1")
            made.linear(f"{ours}.ff.down", f"{theirs}.fc2")
            made.norm(f"{ours}.ff_residual.norm", f"{theirs}.final_layer_norm")
    return config, made


def _positions(made: Parameters, family: Family, ours: str, theirs: str, stated: Stated) -> None:
    """A table of positions: the file's own, or what the family computes."""
    count, width = made.shapes[ours]
    first = family.offset if family.table == "learned" else stated.number("pad_token_id") + 1
    if family.table == "halves":
        first = 0
    stored = theirs in made.weights and made.weights.shape(theirs)[0] >= first + count
    if family.table == "learned" or stored:
        made.put(ours, theirs, lambda table: table[first : first + count])
        return
    made.weights.ignore(theirs)
    halves = family.table == "halves"
    made.make(ours, lambda: marian_sines(count, width) if halves else sines(first, count, width))


def marian_sines(count: int, width: int) -> Tensor:
    """(count, width): the wavelengths of Vaswani et al. 2017, sines in the first half, cosines in the second."""
    position = torch.arange(count, dtype=torch.float64)[:, None]
    angles = position / 10000 ** (2 * torch.arange((width + 1) // 2, dtype=torch.float64) / width)
    return torch.cat((angles.sin(), angles[:, : width // 2].cos()), 1).float()


def _t5(stated: Stated, weights: Weights, given: Mapping[str, Any]) -> tuple[ModelConfig, Parameters]:
    """T5 and its relatives: RMS norm, relative positions, no biases."""
    kind, values = str(stated.values["model_type"]), stated.values
    projection = str(values.get("feed_forward_proj", T5_FAMILY[kind]))
    gate, _, name = projection.rpartition("-")
    if gate not in ("", "gated"):
        raise ConfigError(f"{stated.path}: feed_forward_proj '{projection}' is not known")
    name = "gelu_new" if (gate, name) == ("gated", "gelu") else name
    tables = Tables.of(weights, "", stated.values)
    # mT5 never scales what the output reads, UMT5 always; T5 where its output was tied.
    old = values.get("tie_word_embeddings") is not False
    scaled = {"mt5": False, "umt5": True}.get(kind, bool(values.get("scale_decoder_outputs", old)))
    width, layers = stated.number("d_model"), stated.number("num_layers")
    fields = {
        **tables.values(weights),
        "d_model": width,
        "d_ff": stated.number("d_ff"),
        "heads": stated.number("num_heads"),
        "head_dim": stated.number("d_kv"),
        "encoder_layers": layers,
        "decoder_layers": stated.number("num_decoder_layers") if values.get("num_decoder_layers") else layers,
        "norm": "rms",
        "norm_eps": float(values.get("layer_norm_epsilon", 1e-6)),
        "scale_embeddings": False,
        "pad_embedding_zero": False,
        "positions": "relative",
        "relative_buckets": stated.number("relative_attention_num_buckets"),
        "relative_distance": int(values.get("relative_attention_max_distance", 128)),
        "relative_per_layer": kind == "umt5",
        "max_positions": T5_POSITIONS,
        "activation": stated.activation(name),
        "ff": "gated" if gate else "plain",
        **given,
    }
    config = from_dict(ModelConfig, fields, "model")
    made = Parameters(weights, config)
    tables.put(made)
    for side, count in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        for i in range(count):
            _put_t5_layer(made, side, i)
        made.norm(f"{side}_norm", f"{side}.final_layer_norm")
    if scaled:
        scaling: Callable[[Tensor], Tensor] = lambda w: w * width**-0.5  # noqa: E731
        made.put("decoder_norm.weight", "decoder.final_layer_norm.weight", scaling)
    return config, made


def _put_t5_layer(made: Parameters, side: str, i: int) -> None:
    """All parameters of a layer, and its table of relative positions if it has one."""
    ours, theirs = f"{side}.{i}", f"{side}.block.{i}.layer"
    scale = math.sqrt(made.config.head_dim)  # T5 does not divide scores by it
    made.attention(f"{ours}.attention", f"{theirs}.0.SelfAttention", T5_ATTENTION, scale)
    made.norm(f"{ours}.attention_residual.norm", f"{theirs}.0.layer_norm")
    last = 1
    if side == "decoder":
        last = 2
        made.attention(f"{ours}.cross", f"{theirs}.1.EncDecAttention", T5_ATTENTION, scale)
        made.norm(f"{ours}.cross_residual.norm", f"{theirs}.1.layer_norm")
        made.weights.ignore(f"{theirs}.1.EncDecAttention.relative_attention_bias.weight")
    dense, gated = f"{theirs}.{last}.DenseReluDense", made.config.ff == "gated"
    if gated:
        made.linear(f"{ours}.ff.gate", f"{dense}.wi_0")
    made.linear(f"{ours}.ff.up", f"{dense}.wi_1" if gated else f"{dense}.wi")
    made.linear(f"{ours}.ff.down", f"{dense}.wo")
    made.norm(f"{ours}.ff_residual.norm", f"{theirs}.{last}.layer_norm")
    if i == 0 or made.config.relative_per_layer:
        made.put(f"{side}_relative.tables.{i}", f"{theirs}.0.SelfAttention.relative_attention_bias.weight")
