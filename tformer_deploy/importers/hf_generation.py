"""Defaults of `generate` in transformers to options of our search."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base.errors import ArtifactError
from ..model.config import ModelConfig
from .weights import read_json_file

NUMBER = (int, float)
TYPES: dict[str, Any] = {
    **dict.fromkeys(("num_beams", "no_repeat_ngram_size", "max_length", "max_new_tokens"), int),
    **dict.fromkeys(("min_length", "min_new_tokens", "forced_bos_token_id", "decoder_start_token_id"), int),
    **dict.fromkeys(("length_penalty", "repetition_penalty"), NUMBER),
    **dict.fromkeys(("eos_token_id", "forced_eos_token_id"), (int, list)),
    **dict.fromkeys(("suppress_tokens", "bad_words_ids"), list),
}
TOKENIZERS = ("pad_token_id", "eos_token_id")
STOPS = {True: "count", False: "estimate", "never": "exact"}
NEUTRAL = {
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "exponential_decay_length_penalty": None,
    "diversity_penalty": 0.0,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "penalty_alpha": None,
    "dola_layers": None,
    "constraints": None,
    "force_words_ids": None,
    "forced_decoder_ids": None,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "guidance_scale": None,
    "renormalize_logits": False,
    "remove_invalid_values": False,
    "watermarking_config": None,
    "token_healing": False,
    "stop_strings": None,
    "max_time": None,
}
"""Settings without a counterpart here, and their neutral values."""
REASONS = {
    "num_return_sequences": "ask for --n-best",
    "renormalize_logits": "a beam's scores are not normalised again after suppressed tokens, so near ties may differ",
}
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
TECHNICAL = (
    "return_dict_in_generate",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "output_logits",
    "cache_implementation",
    "cache_config",
    "max_cache_len",
    "compile_config",
    "continuous_batching_config",
    "low_memory",
    "prefill_chunk_size",
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
    "use_mtp",
)
"""Settings that change no output: how transformers computes and reports."""


def settings_of(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """What `generate` reads of a folder: generation_config.json alone where there is one, else its config.json."""
    file = path / "generation_config.json"
    if file.is_file():
        return {name: value for name, value in read_json_file(file).items() if value is not None}
    found = {name: value for name, value in config.items() if value is not None}
    part = next((value for name in ("decoder", "generator", "text_config") if (value := config.get(name))), None)
    if found.get("force_bos_token_to_be_generated"):
        found["forced_bos_token_id"] = found.get("bos_token_id")
    return {**part, **found} if isinstance(part, Mapping) else found


def ends_of(settings: Mapping[str, Any]) -> list[int]:
    """The tokens that end an output."""
    return _listed(settings.get("eos_token_id"))


def ids_of(settings: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The special ids by their keys: of the tokenizer as config.json has them, of the search as `generate` does."""
    found = {
        **{name: settings.get(name) if config.get(name) is None else config[name] for name in TOKENIZERS},
        "bos_token_id": settings.get("bos_token_id", config.get("bos_token_id")),
        "decoder_start_token_id": settings.get("decoder_start_token_id", settings.get("bos_token_id")),
        "forced_bos_token_id": settings.get("forced_bos_token_id"),
    }
    return {name: value for name, value in found.items() if value is not None}


def require_usable(path: Path, settings: Mapping[str, Any], start: bool) -> None:
    """Raise ArtifactError for settings with which no output would begin, with `start`, or end; and for wrong types."""
    file = path / "generation_config.json"
    file = file if file.is_file() else path / "config.json"
    for name, kind in TYPES.items():
        if name in settings and not isinstance(settings[name], kind):
            raise ArtifactError(f"{file}: {name}={settings[name]!r:.40} is of a wrong type: copy it again")
    if not ends_of(settings):
        raise ArtifactError(f"{file} has no eos_token_id, so that no output would end: add it")
    if start and not {"decoder_start_token_id", "bos_token_id"} & settings.keys():
        raise ArtifactError(f"{file} has no decoder_start_token_id, with which each output begins: add it")


def decoding_defaults(
    settings: Mapping[str, Any], first_ids: tuple[int, ...], config: ModelConfig
) -> tuple[dict[str, Any], list[str]]:
    """Fields of DecodeOptions, and notes on what was left out."""
    found: dict[str, Any] = {
        "stop": STOPS.get(settings.get("early_stopping", False), "estimate"),
        "length_penalty": float(settings.get("length_penalty", 1.0)),
    }
    if settings.get("num_beams", 1) > 1:
        found["beams"] = settings["num_beams"]
    if settings.get("no_repeat_ngram_size"):
        found["no_repeat_ngram"] = settings["no_repeat_ngram_size"]
    # Their lengths count the start token, ours the end token; numbers of new tokens count neither and both.
    longest = settings.get("max_new_tokens") or settings.get("max_length", 0) - 1
    shortest = settings["min_new_tokens"] + 1 if settings.get("min_new_tokens") else settings.get("min_length")
    if longest > 0:
        found["max_tokens"] = min(int(longest), config.max_positions)
    if shortest:
        found["min_tokens"] = min(int(shortest), found.get("max_tokens", config.max_positions))
    banned = _banned(settings)
    suppress = [*(settings.get("suppress_tokens") or []), *(words[0] for words in banned if len(words) == 1)]
    if bad_words := [list(map(int, words)) for words in banned if len(words) > 1]:
        found["bad_words"] = bad_words
    if suppress:
        found["suppress"] = sorted(set(map(int, suppress)))
    if first_ids:
        found |= {"first_ids": list(first_ids), "first_adds_zero": True}
    ends = ends_of(settings)
    if ends != [config.eos_id]:
        found["end_ids"] = ends
    if ends and _listed(settings.get("forced_eos_token_id")) == ends:
        found["forced_end"] = True
    if settings.get("repetition_penalty", 1.0) != 1.0:
        found["repetition_penalty"] = float(settings["repetition_penalty"])
    return found, _notes(settings, left_out(settings))


def left_out(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Neutral values of the settings that our search lacks, or that change what `generate` returns."""
    neutral = {**NEUTRAL, **dict.fromkeys(TECHNICAL), "do_sample": False, "repetition_penalty": 1.0}
    found = {name: value for name, value in neutral.items() if settings.get(name, value) != value}
    if _listed(settings.get("forced_eos_token_id")) not in ([], ends_of(settings)):
        found["forced_eos_token_id"] = None
    return found


def _listed(ids: Any) -> list[int]:
    """A list of ids from a list, one id or null."""
    return [] if ids is None else [*ids] if isinstance(ids, list) else [ids]


def _banned(settings: Mapping[str, Any]) -> list[list[int]]:
    """Sequences of tokens that are never produced; `generate` never takes an end token for one."""
    ends = [[end] for end in ends_of(settings)]
    return [words for words in settings.get("bad_words_ids", []) if words not in ends]


def task_note(config: Mapping[str, Any]) -> list[str]:
    """A note if config.json has `task_specific_params`."""
    tasks = config.get("task_specific_params")
    if not isinstance(tasks, Mapping) or not tasks:
        return []
    found = f"task_specific_params ({', '.join(map(str, tasks))}) of config.json are left out, as generate does"
    return [f"{found}: ask for their options, and write their prefix before a text"]


def _notes(settings: Mapping[str, Any], neutral: Mapping[str, Any]) -> list[str]:
    """Notes on settings that are left out or mean something else here."""
    notes = []
    for name in (*NEUTRAL, "forced_eos_token_id"):
        if name in neutral:
            reason = f": {REASONS[name]}" if name in REASONS else ""
            notes.append(f"{name}={settings[name]} has no counterpart and is left out{reason}")
    if "repetition_penalty" in neutral:
        notes.append(
            "repetition_penalty acts on log-probabilities here, there on the start token too, and on logits in a "
            "greedy search: outputs are compared without it"
        )
    if settings.get("do_sample"):
        given = "".join(f", {name}={settings[name]}" for name in SAMPLING if settings.get(name) is not None)
        notes.append(f"do_sample=True{given}: left out, ask for --sample and its options")
    return notes
