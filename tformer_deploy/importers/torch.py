"""State dicts of a module around torch.nn.Transformer, as tutorials write it.

Neither the norm's place nor the activation nor the heads are in such a file: options say them, where they are not the
defaults of torch.nn.Transformer.
"""

from __future__ import annotations

import copy
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..base.errors import ConfigError
from ..base.settings import from_dict
from ..model.config import ModelConfig
from ..model.network import ACTIVATIONS
from ..model.positions import sinusoids
from .annotated import assumed_positions, positions, shared
from .base import Imported, ImportOptions, Parameters, listed
from .seen import Seen
from .vocabularies import decoding_of, ids_of, word_tokenizers
from .weights import WRAPPERS, Weights, read_weights

CORE = "encoder.layers.0.self_attn.in_proj_weight"
PARTS = {
    "src_embedding": ("src", "source", "enc", "input"),
    "tgt_embedding": ("tgt", "trg", "target", "dec", "output"),
    "output": ("generator", "output", "fc_out", "fc", "out", "linear", "head", "proj"),
    "positions": ("pos_embedding", "pe", "wpe", "pos", "position", "posemb", "posenc"),
}
"""Parts that --part can name, and the words in tensor names that they are guessed by."""
WHOLE = ("pe", "wpe", "pos")
"""Words that only count as a whole part of a name: `peptide` and `composer` hold them too."""


def recognises(seen: Seen) -> bool:
    """Whether a file has its names."""
    return any(name.endswith(CORE) for name in seen.names)


def read(path: Path, options: ImportOptions) -> Imported:
    """See `base.Imported`."""
    weights = read_weights(path, *WRAPPERS)
    parts = Parts.find(weights, options)
    width = weights.shape(parts.tgt, 2)[1]
    tokenizers = word_tokenizers(options, (weights.shape(parts.src)[0], weights.shape(parts.tgt)[0]))
    specials, core = tokenizers.target.specials, parts.core
    finals = [side for side in ("encoder", "decoder") if f"{core}{side}.norm.weight" in weights]
    known, table = positions(weights, parts.positions)
    values: dict[str, Any] = {
        "src_vocab": weights.shape(parts.src)[0],
        "tgt_vocab": weights.shape(parts.tgt)[0],
        "d_model": width,
        "d_ff": weights.shape(f"{core}decoder.layers.0.linear1.weight")[0],
        "encoder_d_ff": weights.shape(f"{core}encoder.layers.0.linear1.weight")[0],
        "heads": options.heads or 8,
        "encoder_layers": weights.layers(core + "encoder.layers.{}.linear1.weight"),
        "decoder_layers": weights.layers(core + "decoder.layers.{}.linear1.weight"),
        "norm_position": "post",
        "final_norm": bool(finals),
        **({"final_norm_sides": finals[0]} if len(finals) == 1 else {}),
        "share_embeddings": shared(weights, parts.src, parts.tgt, parts.output),
        "output_bias": parts.output.replace(".weight", ".bias") in weights,
        "pad_embedding_zero": False,
        **known,
        **ids_of(specials, options.model),
        **options.model,
    }
    config = from_dict(ModelConfig, values, "model")
    made = Parameters(weights, config)
    made.put("src_embedding.weight", parts.src)
    made.put("tgt_embedding.weight", parts.tgt)
    made.linear("output", parts.output.removesuffix(".weight"))
    weights.ignore(parts.src, parts.output, parts.positions)
    if table is not None and config.positions == "learned":
        for ours in ("src_positions", "tgt_positions"):
            made.make(ours, lambda: table[: config.max_positions])
    for side, count in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        for i in range(count):
            _put_layer(made, f"{side}.{i}", f"{core}{side}.layers.{i}", crosses=side == "decoder")
        if side in finals:
            made.norm(f"{side}_norm", f"{core}{side}.norm")
    chosen = f"norm_position {config.norm_position}, {config.activation}, {config.heads} heads"
    scaled = "scaled" if config.scale_embeddings else "plain"
    note = (
        f"the file does not say these: {chosen}, {scaled} embeddings; set others with --heads and --set model.KEY=VALUE"
    )
    assumed = assumed_positions(weights, parts.positions, options)
    decoding, notes = decoding_of(specials)
    original = partial(TorchOriginal, weights, parts, config)
    return Imported(config, made, tokenizers, decoding, original, notes=[note, *assumed, *notes])


class Parts:
    """Names of a wrapper's tensors."""

    def __init__(self, core: str, src: str, tgt: str, output: str, positions: str) -> None:
        self.core, self.src, self.tgt, self.output, self.positions = core, src, tgt, output, positions

    @classmethod
    def find(cls, weights: Weights, options: ImportOptions) -> Parts:
        """By --part, else the one whose name and shape fit. Raises ConfigError where none does, or several do."""
        if wrong := set(options.parts) - {*PARTS, "transformer"}:
            raise ConfigError(f"--part {min(wrong)}: must be one of {', '.join(PARTS)}, transformer")
        cores = [name.removesuffix(CORE) for name in weights if name.endswith(CORE)]
        core = f"{options.parts['transformer']}." if "transformer" in options.parts else (cores or [""])[0]
        width = weights.shape(f"{core}{CORE}", 2)[1]
        outside = [name for name in weights if not name.startswith((f"{core}encoder.", f"{core}decoder."))]
        tables = [name for name in outside if weights.shape(name)[1:] == (width,)]
        asked = {name: part for part, given in options.parts.items() for name in (given, f"{given}.weight")}
        guessed = {
            name
            for name in outside
            if len(weights.shape(name)) > 2 or any(_named(name, word) for word in PARTS["positions"])
        }
        places = [name for name in outside if asked.get(name, "positions" if name in guessed else "") == "positions"]
        tables = [name for name in tables if name not in places]
        found = {}
        for part in ("output", "src_embedding", "tgt_embedding"):
            found[part] = _one(part, tables, options)
            if part == "output" and len(tables) > 2:
                tables = [name for name in tables if name != found[part]]
        positions = _one("positions", places, options) if places or "positions" in options.parts else ""
        return cls(core, found["src_embedding"], found["tgt_embedding"], found["output"], positions)


def _named(name: str, word: str) -> bool:
    name = name.lower()
    return word in (name.replace(".", "_").split("_") if word in WHOLE else name)


def _one(part: str, names: list[str], options: ImportOptions) -> str:
    """The name of a part. Raises ConfigError."""
    if part in options.parts:
        asked = options.parts[part]
        found = [name for name in names if name in (asked, f"{asked}.weight")]
    else:
        found = next((hits for word in PARTS[part] if (hits := [n for n in names if _named(n, word)])), [])
        found = names if not found and len(names) == 1 else found
    if len(found) != 1:
        what = f"could be {listed(found)}" if found else f"is none of {listed(names) or 'the tensors'}"
        raise ConfigError(f"the {part} {what}: name it with --part {part}=NAME")
    return found[0]


def _put_layer(made: Parameters, ours: str, theirs: str, crosses: bool) -> None:
    """A layer of torch.nn.TransformerEncoder or TransformerDecoder."""
    made.packed_attention(f"{ours}.attention", f"{theirs}.self_attn")
    if crosses:
        made.packed_attention(f"{ours}.cross", f"{theirs}.multihead_attn")
    made.linear(f"{ours}.ff.up", f"{theirs}.linear1")
    made.linear(f"{ours}.ff.down", f"{theirs}.linear2")
    for i, part in enumerate(("attention", "cross", "ff") if crosses else ("attention", "ff"), 1):
        made.norm(f"{ours}.{part}_residual.norm", f"{theirs}.norm{i}")


class TorchOriginal:
    """torch.nn.Transformer itself, between the file's embeddings and output; it has no search. See `base.Original`."""

    def __init__(self, weights: Weights, parts: Parts, config: ModelConfig) -> None:
        self.name = f"torch.nn.Transformer of torch {torch.__version__}"
        self.config = config
        how: Any = {
            "d_model": config.d_model,
            "nhead": config.heads,
            "dropout": 0.0,
            "activation": ACTIVATIONS[config.activation],
            "norm_first": config.norm_position == "pre",
            "layer_norm_eps": config.norm_eps,
            "batch_first": True,
            "bias": f"{parts.core}encoder.layers.0.linear1.bias" in weights,
        }
        norms = {
            side: nn.LayerNorm(config.d_model, config.norm_eps, bias=how["bias"])
            if f"{parts.core}{side}.norm.weight" in weights
            else None
            for side in ("encoder", "decoder")
        }
        encoder = nn.TransformerEncoderLayer(dim_feedforward=config.encoder.ff_width, **how)
        decoder = nn.TransformerDecoderLayer(dim_feedforward=config.decoder.ff_width, **how)
        self.core = nn.ModuleDict(
            {
                "encoder": nn.TransformerEncoder(encoder, config.encoder_layers, norms["encoder"], False, False),
                "decoder": nn.TransformerDecoder(decoder, config.decoder_layers, norms["decoder"]),
            }
        )
        names = [name for name in weights if name.startswith((f"{parts.core}encoder.", f"{parts.core}decoder."))]
        self.core.load_state_dict({name.removeprefix(parts.core): weights.take(name) for name in names})
        self.core.eval()
        self.tables = [weights.take(name) for name in (parts.src, parts.tgt, parts.output)]
        bias = parts.output.replace(".weight", ".bias")
        self.bias = weights.take(bias) if bias in weights else None
        shape = config.max_positions, config.d_model
        if config.positions == "none":
            self.positions = torch.zeros(shape)
        elif parts.positions:
            self.positions = weights.take(parts.positions).reshape(-1, config.d_model)
        else:
            self.positions = sinusoids(*shape, config.position_base)

    def in_double(self) -> TorchOriginal:
        """See `base.Original`."""
        exact = copy.copy(self)
        exact.core = copy.deepcopy(self.core).double()
        exact.tables, exact.positions = [table.double() for table in self.tables], self.positions.double()
        exact.bias = None if self.bias is None else self.bias.double()
        return exact

    def _embed(self, ids: Tensor, table: Tensor) -> Tensor:
        scale = math.sqrt(self.config.d_model) if self.config.scale_embeddings else 1.0
        return F.embedding(ids, table) * scale + self.positions[: ids.shape[1]]

    def memory(self, src_ids: Tensor, src_lengths: Tensor) -> Tensor:
        """See `base.Original`."""
        padding = torch.arange(src_ids.shape[1]) >= src_lengths[:, None]
        return self.core["encoder"](self._embed(src_ids, self.tables[0]), src_key_padding_mask=padding)  # type: ignore[no-any-return]

    def log_probs(self, src_ids: Tensor, src_lengths: Tensor, tgt_ids: Tensor) -> Tensor:
        """See `base.Original`."""
        padding = torch.arange(src_ids.shape[1]) >= src_lengths[:, None]
        hidden = self.core["decoder"](
            self._embed(tgt_ids, self.tables[1]),
            self.memory(src_ids, src_lengths),
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(tgt_ids.shape[1], dtype=self.positions.dtype),
            tgt_is_causal=True,
            memory_key_padding_mask=padding,
        )
        return F.linear(hidden, self.tables[2], self.bias).log_softmax(-1)

    def generate(self, src_ids: Tensor, src_lengths: Tensor, beams: int, max_tokens: int) -> None:
        """See `base.Original`."""

    def source_ids(self, text: str) -> None:
        """See `base.Original`."""

    def text(self, ids: list[int]) -> None:
        """See `base.Original`."""
