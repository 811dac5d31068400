"""Checkpoints of fairseq's translation task: a .pt file with `args` or `cfg`, and dict.SRC.txt, dict.TGT.txt beside it.

Pre- or post-norm, learned or sinusoidal positions, which are counted from the padding's id + 1. Refused: other tasks
than translation, adaptive softmax and inputs, cross-self-attention, scaled heads, decoders without their last norm.
Source: fairseq 0.12, fairseq/models/transformer, fairseq/modules/sinusoidal_positional_embedding.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from ..base.errors import ArtifactError, ConfigError
from ..base.settings import from_dict
from ..model.config import ModelConfig
from .base import Imported, ImportOptions, Parameters
from .seen import Seen
from .toolkit import (
    MOST_POSITIONS,
    LayerNames,
    Settings,
    both_sides,
    equal,
    options_of,
    put_layer,
    read_text,
    sharing,
    sines,
)
from .vocabularies import Vocabulary, coded_tokenizers, ids_of, notes_of, require_rows
from .weights import Weights, load_parts, state_dict

ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "silu", "gelu_accurate": "gelu_tanh", "gelu_fast": "gelu_tanh"}
SPECIALS = ("<pad>", "<s>", "</s>", "<unk>")
PAD = 1
ONLY: dict[str, tuple[Any, ...]] = {
    "task": ("translation",),
    "no_token_positional_embeddings": (False,),
    "adaptive_softmax_cutoff": (None, ""),
    "adaptive_input": (False,),
    "character_embeddings": (False,),
    "cross_self_attention": (False,),
    "no_cross_attention": (False,),
    "no_decoder_final_norm": (False,),
    "encoder_layers_to_keep": (None, ""),
    "decoder_layers_to_keep": (None, ""),
    "scale_fc": (False,),
    "scale_attn": (False,),
    "scale_heads": (False,),
    "lang_tok_replacing_bos_eos": (False,),
}
COPIES = re.compile(r"encoder\.layers\.\d+\.(in_proj|out_proj|fc1|fc2)_(weight|bias)")
"""Version 0.12 registers an encoder layer's matrices twice, and fills these when it loads a file."""
SIDES = ("encoder", "decoder")
OUTPUTS = ("decoder.output_projection.weight", "decoder.embed_out")


def recognises(seen: Seen) -> bool:
    """Whether a file has its parts."""
    return bool({"args", "cfg"} & seen.parts) and "model" in seen.parts


def read(path: Path, options: ImportOptions) -> Imported:
    """See `base.Imported`."""
    parts = load_parts(path)
    described, task = options_of(parts.get("args"), f"{path}: args"), {}
    if isinstance(cfg := parts.get("cfg"), dict) and not described:
        described, task = (options_of(cfg.get(name), f"{path}: cfg.{name}") for name in ("model", "task"))
    if not described or not isinstance(parts.get("model"), dict):
        raise ArtifactError(f"{path} has no args and no cfg.model: is it a checkpoint of fairseq?")
    settings = Settings(str(path), {"task": task.get("_name"), **task, **described})
    for name, supported in ONLY.items():
        settings.only(name, *supported)
    weights = Weights.of(path, _unpacked(state_dict(path, parts["model"])))
    files = zip(("source", "target"), options.vocabularies, strict=True)
    source, target = (_dictionary(path, settings, named, side) for side, named in files)
    for side, vocabulary in zip(SIDES, (source, target), strict=True):
        require_rows(vocabulary.entries, path, weights.shape(f"{side}.embed_tokens.weight")[0])
    ids = ids_of(target.specials)
    config = from_dict(ModelConfig, {**_values(weights, settings), **ids, **options.model}, "model")
    made = Parameters(weights, config)
    _fill(made)
    tokenizers = coded_tokenizers(options, (source, target))
    return Imported(
        config,
        made,
        tokenizers,
        {"suppress": [target.specials.pad], "min_tokens": 2},  # as its generator: no padding, and no empty output
        not_compared="fairseq is not run here: compare some outputs with fairseq-interactive's",
        notes=notes_of(tokenizers),
    )


def _unpacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Query, key and value by names of their own: older versions pack them. Copies for fast inference are left out."""
    found = {}
    for name, tensor in tensors.items():
        if "attn.in_proj_" in name:
            for part, rows in zip("qkv", tensor.chunk(3), strict=True):
                found[name.replace("in_proj_", f"{part}_proj.")] = rows
        elif not COPIES.fullmatch(name):
            found[name] = tensor
    return found


def _dictionary(path: Path, settings: Settings, named: Path | None, side: str) -> Vocabulary:
    """The words of dict.LANG.txt, or of the named file, behind the four that all dictionaries begin with."""
    lang = settings.get(f"{side}_lang", "")
    own = f"dict.{lang}.txt"
    if Path(own).name != own:
        raise ArtifactError(f"{path}: {side}_lang={lang!r:.40} is no language: copy it again")
    if not (found := named or path.parent / own).is_file():
        flag = "--src-vocab" if side == "source" else "--tgt-vocab"
        raise ConfigError(f"{found} is not there: name the {side} dictionary with {flag}")
    lines = read_text(found).removesuffix("\n").split("\n")
    words = [line.removesuffix(" #fairseq:overwrite").rpartition(" ")[0] for line in lines]
    if "" in words:
        raise ArtifactError(f"{found}: line {words.index('') + 1} is no word with a number: is it a dictionary?")
    return Vocabulary.named([SPECIALS[1], SPECIALS[0], *SPECIALS[2:], *words], found, SPECIALS)


def _values(weights: Weights, settings: Settings) -> dict[str, Any]:
    """Fields of the model's config."""
    sizes = [
        {
            "d_model": weights.shape(f"{side}.embed_tokens.weight", 2)[1],
            "d_ff": weights.shape(f"{side}.layers.0.fc1.weight")[0],
            "heads": settings.count(f"{side}_attention_heads"),
            "layers": weights.layers(f"{side}.layers.{{}}.fc1.weight"),
        }
        for side in ("decoder", "encoder")
    ]
    pre = settings.same("encoder_normalize_before", "decoder_normalize_before", False)
    source, target = (f"{side}.embed_tokens.weight" for side in SIDES)
    output = next((name for name in OUTPUTS if name in weights), target)
    most = [_positions(weights, settings, side) for side in SIDES]
    return {
        "src_vocab": weights.shape(source)[0],
        "tgt_vocab": weights.shape(target)[0],
        **both_sides(*sizes),
        "norm_position": "pre" if pre else "post",
        "final_norm": "decoder.layer_norm.weight" in weights,
        "embedding_norm": "decoder.layernorm_embedding.weight" in weights,
        "scale_embeddings": not settings.get("no_scale_embedding", False),
        "positions": "learned",
        "max_positions": min(most),
        "share_embeddings": sharing(equal(weights, target, output), equal(weights, source, target)),
        "activation": settings.activation("activation_fn", ACTIVATIONS),
        "pad_embedding_zero": False,
        "start_id": SPECIALS.index("</s>"),
    }


def _positions(weights: Weights, settings: Settings, side: str) -> int:
    """How many tokens a side may have; a table has rows for ids up to the padding's too."""
    if f"{side}.embed_positions.weight" in weights:
        return weights.shape(f"{side}.embed_positions.weight")[0] - PAD - 1
    most = settings.count(f"max_{'source' if side == 'encoder' else 'target'}_positions", MOST_POSITIONS)
    return min(most, MOST_POSITIONS)


def _fill(made: Parameters) -> None:
    """All parameters."""
    config, weights = made.config, made.weights
    names = LayerNames(
        ("q_proj", "k_proj", "v_proj", "out_proj"),
        "self_attn",
        "self_attn_layer_norm",
        "encoder_attn",
        "encoder_attn_layer_norm",
        "fc1",
        "fc2",
        "final_layer_norm",
    )
    for short, name, side in (("src", "encoder", config.encoder), ("tgt", "decoder", config.decoder)):
        made.put(f"{short}_embedding.weight", f"{name}.embed_tokens.weight")
        if f"{name}.embed_positions.weight" in weights:
            rows = slice(PAD + 1, PAD + 1 + config.max_positions)
            made.put(f"{short}_positions", f"{name}.embed_positions.weight", lambda table, rows=rows: table[rows])  # type: ignore[misc]
        else:
            made.make(f"{short}_positions", lambda width=side.width: sines(PAD + 1, config.max_positions, width))  # type: ignore[misc]
        for norm in ("layer_norm", "layernorm_embedding"):
            ours = f"{name}_norm" if norm == "layer_norm" else f"{short}_embedding_norm"
            if f"{name}.{norm}.weight" in weights and f"{ours}.weight" in made.shapes:
                made.norm(ours, f"{name}.{norm}")
        for i in range(side.layers):
            put_layer(made, f"{name}.{i}", f"{name}.layers.{i}", names)
        weights.ignore(f"{name}.version", f"{name}.embed_positions._float_tensor")
    made.put("output.weight", next((name for name in OUTPUTS if name in weights), "decoder.embed_tokens.weight"))
