"""config.json and generation_config.json for Hugging Face's runtimes, and what these cannot say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...base.errors import TformerError
from ...decoding import DecodeOptions
from ...importers.hf_generation import NEUTRAL, SAMPLING, STOPS, TECHNICAL, TYPES
from ...importers.run import source_of
from ...importers.weights import read_json_file
from ...model.checkpoint import Checkpoint
from ...model.config import ModelConfig
from .layout import Source

KNOWN = ("marian", "bart", "mbart", "m2m_100", "blenderbot", "t5", "mt5")
"""Model types that optimum and transformers.js both know; any other model is called Marian, whose config is plain."""
OF_SEARCH = {*TYPES, *NEUTRAL, *SAMPLING, *TECHNICAL, "do_sample", "early_stopping", "max_length", "prefix"}
"""Keys of a config.json that optimum would take for settings of the search."""
OF_FILES = ("_name_or_path", "dtype", "torch_dtype", "transformers_version", "quantization_config")
"""Keys that tell how the original's weights are stored."""


def config_json(source: Source) -> dict[str, Any]:
    """The original's config.json where the model was imported from one, else a Marian's with the model's sizes.

    Runtimes read heads and widths for the sizes of caches, and the ids; the graphs need none of it.
    """
    config = source.config
    ids = {
        "pad_token_id": config.pad_id,
        "bos_token_id": config.bos_id,
        "eos_token_id": config.eos_id,
        "decoder_start_token_id": config.start_id,
    }
    found = original(source) or marian(config)
    return {**found, "is_encoder_decoder": True, "use_cache": True, "vocab_size": config.tgt_vocab, **ids}


def original(source: Source) -> dict[str, Any]:
    """The config.json that a model was imported from, if both runtimes make the caches' sizes of it; else nothing."""
    folder, config = original_folder(source), source.config
    if folder is None:
        return {}
    values = read_json_file(folder / "config.json")
    sides = config.encoder, config.decoder
    whole = all(side.width == side.heads * side.head_dim for side in sides) and sides[0].heads == sides[1].heads
    if values.get("model_type") not in KNOWN or not whole:
        return {}
    return {name: value for name, value in values.items() if name not in OF_SEARCH and name not in OF_FILES}


def original_folder(source: Source) -> Path | None:
    """The Hugging Face folder that a checkpoint was imported from, if it is still there."""
    if not isinstance(source.checkpoint, Checkpoint):
        return None
    try:
        kind, path, _ = source_of(source.checkpoint)
    except TformerError:  # trained here, or the folder is gone
        return None
    return path if kind == "hf" and path.is_dir() else None


def marian(config: ModelConfig) -> dict[str, Any]:
    """A Marian's config.json with the decoder's heads on both sides, as caches of either have them."""
    heads = config.decoder
    sides = (("encoder", config.encoder), ("decoder", config.decoder))
    return {
        "model_type": "marian",
        "architectures": ["MarianMTModel"],
        "d_model": heads.heads * heads.head_dim,
        "num_hidden_layers": config.encoder_layers,
        **{f"{name}_layers": side.layers for name, side in sides},
        **{f"{name}_ffn_dim": side.ff_width for name, side in sides},
        **{f"{name}_attention_heads": heads.heads for name, _ in sides},
        "decoder_vocab_size": config.tgt_vocab,
        "max_position_embeddings": config.max_positions,
        "scale_embedding": config.scale_embeddings,
        "share_encoder_decoder_embeddings": config.share_embeddings == "all",
        "tie_word_embeddings": config.share_embeddings != "none",
    }


def generation_json(source: Source, beams: bool) -> dict[str, Any]:
    """The checkpoint's decoding options as transformers calls them; with `beams` also those of beam search."""
    options, config = source.options, source.config
    ends = options.ends(config.eos_id)
    never = [[token] for token in options.suppress] + [list(words) for words in options.bad_words]
    found: dict[str, Any] = {
        "decoder_start_token_id": config.start_id,
        "pad_token_id": config.pad_id,
        "bos_token_id": config.bos_id,
        "eos_token_id": ends[0] if len(ends) == 1 else list(ends),
        "max_length": min(options.max_tokens, config.max_positions) + 1,  # theirs counts the start token
    }
    if options.min_tokens > 1:
        found["min_new_tokens"] = options.min_tokens - 1  # theirs does not count the end token
    if never:
        found["bad_words_ids"] = never
    if options.no_repeat_ngram:
        found["no_repeat_ngram_size"] = options.no_repeat_ngram
    if options.first_ids:
        found["forced_bos_token_id"] = options.first_ids[0]
    if options.forced_end:
        found["forced_eos_token_id"] = found["eos_token_id"]
    if beams:
        stops = {ours: theirs for theirs, ours in STOPS.items()}
        found |= {"num_beams": options.beams, "early_stopping": stops[options.stop]}
        found["length_penalty"] = options.length_penalty
    return found


def refused(source: Source, beams: bool) -> Iterator[str]:
    """What generation_config.json cannot say, or says with another meaning; with `beams` also for beam search."""
    options, config = source.options, source.config
    if config.decoder_cell != "attention":
        yield f"model.decoder_cell={config.decoder_cell}: its caches are keys and values"
    usual = DecodeOptions()
    names = ["max_ratio", "min_ratio", "repetition_penalty", "sampling", "endless"]
    names += ["length_norm", "coverage_penalty", "patience"] if beams else []
    for name in names:
        if getattr(options, name) != getattr(usual, name):
            yield f"{name}={getattr(options, name)}"
    if len(options.first_ids) > 1:
        yield f"first_ids={list(options.first_ids)}: one id can be forced"
    elif options.first_ids and beams and not options.first_adds_zero:
        yield f"first_ids={list(options.first_ids)} without first_adds_zero"
    ends = options.ends(config.eos_id)
    if hidden := [i for i in ends if i in options.suppress or (i,) in options.bad_words]:
        yield f"suppress={hidden}, an end token"
    if not config.decoder_layers or not getattr(source.checkpoint, "encodes", True):
        yield "a module without an encoder and a decoder of their own"
