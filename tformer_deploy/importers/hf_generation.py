"""Defaults of `generate` in transformers to options of our search."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig

SAME = {"no_repeat_ngram_size": "no_repeat_ngram", "num_beams": "beams", "length_penalty": "length_penalty"}
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
"""What has no counterpart, and the value that changes nothing."""
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
"""How transformers computes and reports: no output depends on it."""


def decoding_defaults(
    settings: Mapping[str, Any], first_ids: tuple[int, ...], config: ModelConfig
) -> tuple[dict[str, Any], list[str]]:
    """Fields of DecodeOptions, and notes on what was left out."""
    found: dict[str, Any] = {}
    beams = settings.get("num_beams") or 1
    for theirs, ours in SAME.items():
        if settings.get(theirs) is not None and (beams > 1 or ours == "no_repeat_ngram"):
            found[ours] = settings[theirs]
    if beams > 1:
        found["stop"] = STOPS.get(settings.get("early_stopping") or False, "estimate")
        found["length_penalty"] = float(found.get("length_penalty", 1.0))
    # Their lengths count the start token, ours the end token; numbers of new tokens count neither and both.
    longest = settings.get("max_new_tokens") or (settings.get("max_length") or 0) - 1
    shortest = settings["min_new_tokens"] + 1 if settings.get("min_new_tokens") else settings.get("min_length")
    if longest > 0:
        found["max_tokens"] = min(int(longest), config.max_positions)
    if shortest:
        found["min_tokens"] = min(int(shortest), found.get("max_tokens", config.max_positions))
    suppress = [*(settings.get("suppress_tokens") or []), *(words[0] for words in _banned(settings))]
    if suppress:
        found["suppress"] = sorted(set(map(int, suppress)))
    if first_ids:
        found |= {"first_ids": list(first_ids), "first_adds_zero": True}
    ends = settings.get("eos_token_id")
    if isinstance(ends, list) and ends != [config.eos_id]:
        found["end_ids"] = ends
    if settings.get("forced_eos_token_id") in (config.eos_id, [config.eos_id]):
        found["forced_end"] = True
    if settings.get("repetition_penalty") not in (None, 1.0):
        found["repetition_penalty"] = float(settings["repetition_penalty"])
    return found, _notes(settings, neutral_settings(settings, config.eos_id))


def neutral_settings(settings: Mapping[str, Any], eos_id: int) -> dict[str, Any]:
    """What `generate` must be called with so that it does what our search can do."""
    found = {**NEUTRAL, **dict.fromkeys(TECHNICAL), "do_sample": False, "repetition_penalty": 1.0}
    if settings.get("bad_words_ids") is not None:
        found["bad_words_ids"] = _banned(settings) or None
    if settings.get("forced_eos_token_id") not in (eos_id, [eos_id]):
        found["forced_eos_token_id"] = None
    if (settings.get("num_beams") or 1) == 1:  # no defaults of a beam are taken
        found |= {"early_stopping": True, "length_penalty": 1.0}
    return found


def _banned(settings: Mapping[str, Any]) -> list[list[int]]:
    return [words for words in settings.get("bad_words_ids") or [] if len(words) == 1]


def _notes(settings: Mapping[str, Any], neutral: Mapping[str, Any]) -> list[str]:
    """On what is left out, and on what is another thing here."""
    notes = []
    for name in (*NEUTRAL, "forced_eos_token_id"):
        if settings.get(name) is not None and name in neutral and settings[name] != neutral[name]:
            reason = f": {REASONS[name]}" if name in REASONS else ""
            notes.append(f"{name}={settings[name]} has no counterpart and is left out{reason}")
    if len(_banned(settings)) < len(settings.get("bad_words_ids") or []):
        notes.append("bad_words_ids of several tokens have no counterpart and are left out")
    if settings.get("repetition_penalty") not in (None, 1.0):
        notes.append(
            "repetition_penalty acts on log-probabilities here, there on the start token too, and on logits in a "
            "greedy search: outputs are compared without it"
        )
    if settings.get("do_sample"):
        given = "".join(f", {name}={settings[name]}" for name in SAMPLING if settings.get(name) is not None)
        notes.append(f"do_sample=True{given}: left out, ask for --sample and its options")
    return notes
