"""Models of Marian: an .npz or .bin file with settings in it, special:model.yml, and vocabularies, .yml or .spm.

Positions, norms and activations are Marian's own, not those of converters. The decoder starts from zeros: the model
gets one more entry, which is never produced. Decoders have self-attention or SSRU cells. Refused: average attention,
multi-source and RNN models, models from right to left, factored vocabularies, highway connections, feed-forward layers
of another depth than 2, settings that are not known.
Source: marian-dev, src/models/transformer.h; what it saves of the settings: src/models/encoder_decoder.cpp; positions:
src/tensors/cpu/tensor_operators.cpp.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..base.errors import ArtifactError
from ..base.settings import from_dict
from ..model.checkpoint import Steps
from ..model.config import ModelConfig
from .base import Imported, ImportOptions, Parameters
from .marian_file import Model, read_model
from .seen import Seen
from .toolkit import (
    MOST_POSITIONS,
    NEVER,
    Settings,
    both_sides,
    parse_yaml,
    read_text,
    rows,
    sharing,
    sines,
    with_start,
)
from .vocabularies import (
    Vocabulary,
    coded_tokenizers,
    ids_of,
    in_order,
    notes_of,
    read_pieces,
    require_rows,
    vocabulary_files,
)
from .weights import Weights

SETTINGS = "special:model.yml"
ACTIVATIONS = {"relu": "relu", "swish": "silu", "gelu": "gelu_sigmoid"}
OPERATIONS = ("postprocess-emb", "preprocess", "postprocess", "postprocess-top")
SPECIALS = ("<pad>", "<s>", "</s>", "<unk>")
ONLY: dict[str, tuple[Any, ...]] = {
    "type": ("transformer",),
    "transformer-decoder-autoreg": ("self-attention", "rnn"),
    "transformer-no-projection": (False,),
    "transformer-ffn-depth": (2,),
    "transformer-decoder-ffn-depth": (0, 2),
    "transformer-disable-position-embeddings": (False,),
    "transformer-pool": (False,),
    "transformer-no-bias": (False,),
    "transformer-no-affine": (False,),
    "transformer-attention-mask": ("default",),
    "lemma-dim-emb": (0,),
    "lemma-dependency": ("",),
    "factors-combine": ("sum", ""),
    "ulr": (False,),
    "right-left": (False,),
}
RECURRENT: dict[str, tuple[Any, ...]] = {
    "dec-cell": ("ssru",),
    "transformer-rnn-projection": (False,),
    "layer-normalization": (False,),
    "skip": (False,),
}
"""The same of models whose decoder layers have a recurrent cell instead of self-attention."""
UNUSED = (
    *("version", "dim-vocabs", "dim-emb", "transformer-dim-ffn", "transformer-decoder-dim-ffn"),
    *("tied-embeddings", "tied-embeddings-src", "tied-embeddings-all", "transformer-guided-alignment-layer"),
    *("dim-rnn", "enc-type", "enc-cell", "enc-cell-depth", "dec-cell", "dec-cell-base-depth", "dec-cell-high-depth"),
    *("skip", "layer-normalization", "bert-train-type-embeddings", "bert-type-vocab-size", "separator-symbol"),
    *("transformer-dim-aan", "transformer-aan-depth", "transformer-aan-activation", "transformer-aan-nogate"),
    *("ulr-dim-emb", "ulr-trainable-transformation", "factors-dim-emb", "transformer-rnn-projection"),
    "transformer-train-position-embeddings",  # transformer.h reads its older name alone
)
"""Settings that tensors show, or that change nothing in a model as `ONLY` says."""
OUTPUT = "none"
"""In the name of the factor of what a tied output reads."""
TRAINING = ("alignment", "weight")
"""Inputs of training alone."""


def recognises(seen: Seen) -> bool:
    """Whether it is a file with their settings."""
    return SETTINGS in seen.names


def read(path: Path, options: ImportOptions) -> Imported:
    """See `base.Imported`."""
    model = read_model(path)
    arrays = model.arrays
    if SETTINGS not in arrays:
        raise ArtifactError(f"{path} has no {SETTINGS}: is it a model of Marian?")
    text = arrays.pop(SETTINGS).tobytes().rstrip(b"\0").decode("utf-8", "replace")
    found = parse_yaml(text, f"{path}: {SETTINGS}")
    settings = Settings(str(path), found if isinstance(found, dict) else {})
    for name, supported in ONLY.items():
        settings.only(name, *supported)
    for name, supported in RECURRENT.items() if _recurrent(settings) else ():
        settings.only(name, *supported)
    inputs: list[Any] = settings.get("input-types", [])
    if [kind for kind in inputs if kind not in TRAINING] not in ([], ["sequence", "sequence"]):
        raise settings.refused("input-types", inputs)
    weights = Weights.of(path, {name: _tensor(array) for name, array in arrays.items()})
    tables = [weights.shape(name)[0] for name in _tables(weights)[:2]]
    files = vocabulary_files(options, "its .yml or .spm")
    source = _vocabulary(files[0], tables[0])
    target = source if (files[0], tables[0]) == (files[1], tables[1]) else _vocabulary(files[1], tables[1])
    tokenizers = coded_tokenizers(options, (source, target))
    values = {**_values(weights, settings), **ids_of(target.specials), **with_start(tables[0], tables[1])}
    config = from_dict(ModelConfig, {**values, **options.model}, "model")
    made = Parameters(weights, config)
    _fill(made, settings)
    settings.require_read(*UNUSED)
    return Imported(
        config,
        made,
        tokenizers,
        not_compared="Marian is not run here: compare some outputs with marian-decoder's",
        notes=notes_of(tokenizers),
        steps=_steps(model, made, _tables(weights)),
    )


def _steps(model: Model, made: Parameters, tables: tuple[str, str, str]) -> Steps | None:
    """The steps of 8 bits; None for a file without those of inputs."""
    named = dict(zip(("src_embedding", "tgt_embedding", "output"), tables, strict=True))  # which may be one tensor
    layers = {ours.removesuffix(".weight"): theirs for ours, theirs in made.sources.items()} | named
    weights = {ours: model.weights[theirs] for ours, theirs in layers.items() if theirs in model.weights}
    read = {**layers, "output": OUTPUT if OUTPUT in model.inputs else layers["output"]}
    inputs = {ours: model.inputs[theirs] for ours, theirs in read.items() if theirs in model.inputs}
    inputs = {ours: step for ours, step in inputs.items() if not ours.endswith("embedding")}  # which read ids
    return Steps(inputs, weights) if inputs else None


def _tensor(array: Any) -> torch.Tensor:
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _recurrent(settings: Settings) -> bool:
    return settings.get("transformer-decoder-autoreg", "self-attention") == "rnn"


def _tables(weights: Weights) -> tuple[str, str, str]:
    """Names of the source's and the target's embedding and of the output, which may be the same."""
    source, target = ("Wemb", "Wemb") if "Wemb" in weights else ("encoder_Wemb", "decoder_Wemb")
    outputs = (f"decoder_ff_logit_out_{kind}" for kind in ("Wt", "W"))
    return source, target, next((name for name in outputs if name in weights), target)


def _vocabulary(path: Path, rows: int) -> Vocabulary:
    """A sentencepiece model, which splits text too, or words with their ids."""
    if path.suffix == ".spm":
        _, entries = read_pieces(path)
    else:
        loaded = parse_yaml(read_text(path), str(path), texts=True)
        if not isinstance(loaded, dict) or not all(isinstance(i, str) and i.isdecimal() for i in loaded.values()):
            raise ArtifactError(f"{path} is no vocabulary of Marian: it has no word with a number on each line")
        entries = in_order({word: int(i) for word, i in loaded.items()}, path)[:rows]  # `dim-vocabs` may be smaller
    require_rows(entries, path, rows)
    if "" in entries:
        raise ArtifactError(f"{path} has no entry {entries.index('')}: is it another vocabulary?")
    return Vocabulary.named(entries, path, SPECIALS, codes=path if path.suffix == ".spm" else None)


def _values(weights: Weights, settings: Settings) -> dict[str, Any]:
    """Fields of the model's config."""
    emb, pre, post, top = (settings.get(f"transformer-{name}", "").replace("d", "") for name in OPERATIONS)
    kind = "r" if "r" in pre + post else "n"
    if (pre, post) not in ((kind, "a"), ("", f"a{kind}")) or {emb, top} - {"", kind}:
        raise settings.refused("transformer-" + ", -".join(OPERATIONS), (emb, pre, post, top))
    source, target, output = _tables(weights)
    learned = settings.get("transformer-train-positions", False)
    sizes = [
        {
            "d_model": weights.shape(table, 2)[1],
            "d_ff": weights.shape(f"{side}_l1_ffn_W1", 2)[1],
            "heads": settings.count("transformer-heads", 8),
            "layers": settings.count(f"{side[:3]}-depth"),
        }
        for side, table in (("decoder", target), ("encoder", source))
    ]
    return {
        **both_sides(*sizes),
        "decoder_cell": "ssru" if _recurrent(settings) else "attention",
        "norm": "rms" if kind == "r" else "standard",
        "norm_eps": 1e-6,
        "norm_position": "pre" if pre else "post",
        "final_norm": bool(top),
        "embedding_norm": bool(emb),
        "scale_embeddings": not learned,
        "positions": "learned",
        "max_positions": weights.shape("Wpos")[0] if learned else MOST_POSITIONS,
        "share_embeddings": sharing(output == target, source == target),
        "activation": settings.activation("transformer-ffn-activation", ACTIVATIONS, "swish"),
        "pad_embedding_zero": False,
    }


def _fill(made: Parameters, settings: Settings) -> None:
    """All parameters; matrices are stored transposed."""
    config, weights = made.config, made.weights
    source, target, output = _tables(weights)
    made.put("src_embedding.weight", source, rows(config.src_vocab))
    made.put("tgt_embedding.weight", target, rows(config.tgt_vocab))
    turned = output.endswith("_W")
    made.put("output.weight", output, lambda w: rows(config.tgt_vocab)(w.T if turned else w))
    bias = "decoder_ff_logit_out_b"
    if not settings.get("output-omit-bias", False) and bias in weights:
        made.put("output.bias", bias, lambda b: rows(config.tgt_vocab, NEVER)(b.flatten()))
    else:
        made.make("output.bias", lambda: rows(config.tgt_vocab, NEVER)(torch.zeros(config.tgt_vocab - 1)))
    tied: list[Any] = settings.get("transformer-tied-layers", [])
    for short, name, side in (("src", "encoder", config.encoder), ("tgt", "decoder", config.decoder)):
        if config.scale_embeddings:
            made.make(f"{short}_positions", lambda width=side.width: sines(0, config.max_positions, width))  # type: ignore[misc]
        else:
            made.put(f"{short}_positions", "Wpos", lambda table: table[: config.max_positions])
        _norm(made, f"{short}_embedding_norm", f"{name}_emb", "_pre")
        _norm(made, f"{name}_norm", f"{name}_top", "")
        suffix = "_pre" if config.norm_position == "pre" else ""
        for i in range(side.layers):
            ours, theirs = f"{name}.{i}", f"{name}_l{i + 1}"
            if name == "decoder" and tied:
                theirs = f"{name}_l{tied[i]}"
            if f"{ours}.cell.value.weight" in made.shapes:
                _linear(made, f"{ours}.cell.forget", f"{theirs}_rnn", "f")
                made.put(f"{ours}.cell.value.weight", f"{theirs}_rnn_W", lambda w: w.T)
                _norm(made, f"{ours}.cell_residual.norm", f"{theirs}_rnn_ffn", suffix)
            for part, their_part in (("attention", "self"), ("cross", "context")):
                if f"{ours}.{part}.query.weight" not in made.shapes:
                    continue
                for kind, letter in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "o")):
                    _linear(made, f"{ours}.{part}.{kind}", f"{theirs}_{their_part}", letter)
                _norm(made, f"{ours}.{part}_residual.norm", f"{theirs}_{their_part}_Wo", suffix)
            _linear(made, f"{ours}.ff.up", f"{theirs}_ffn", "1")
            _linear(made, f"{ours}.ff.down", f"{theirs}_ffn", "2")
            _norm(made, f"{ours}.ff_residual.norm", f"{theirs}_ffn_ffn", suffix)


def _linear(made: Parameters, ours: str, theirs: str, letter: str) -> None:
    made.put(f"{ours}.weight", f"{theirs}_W{letter}", lambda w: w.T)
    made.put(f"{ours}.bias", f"{theirs}_b{letter}", lambda b: b.flatten())


def _norm(made: Parameters, ours: str, theirs: str, suffix: str) -> None:
    if f"{ours}.weight" in made.shapes:
        kind = "rms" if made.config.norm == "rms" else "ln"
        made.put(f"{ours}.weight", f"{theirs}_{kind}_scale{suffix}", lambda w: w.flatten())
        if kind == "ln":
            made.put(f"{ours}.bias", f"{theirs}_{kind}_bias{suffix}", lambda b: b.flatten())
