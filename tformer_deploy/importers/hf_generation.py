"""Defaults of `generate` in transformers to options of our search."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig

SAME = {"no_repeat_ngram_size": "no_repeat_ngram", "num_beams": "beams", "length_penalty": "length_penalty"}
STOPS = {True: "count", False: "estimate", "never": "exact"}
UNKNOWN = {
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "exponential_decay_length_penalty": None,
    "diversity_penalty": 0.0,
    "num_beam_groups": 1,
    "penalty_alpha": None,
    "constraints": None,
    "force_words_ids": None,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "typical_p": 1.0,
    "guidance_scale": None,
}
"""What has no counterpart, and where it changes nothing."""


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
    banned = [words for words in settings.get("bad_words_ids") or [] if len(words) == 1]
    suppress = [*(settings.get("suppress_tokens") or []), *(words[0] for words in banned)]
    if suppress:
        found["suppress"] = sorted(set(map(int, suppress)))
    if first_ids:
        found |= {"first_ids": list(first_ids), "first_adds_zero": True}
    ends = settings.get("eos_token_id")
    if isinstance(ends, list) and ends != [config.eos_id]:
        found["end_ids"] = ends
    if settings.get("forced_eos_token_id") == config.eos_id:
        found["forced_end"] = True
    notes = [f"{name}={settings[name]} has no counterpart and is left out" for name in _unknown(settings)]
    if len(banned) < len(settings.get("bad_words_ids") or []):
        notes.append("bad_words_ids of several tokens have no counterpart and are left out")
    if settings.get("repetition_penalty") not in (None, 1.0):
        found["repetition_penalty"] = float(settings["repetition_penalty"])
        notes.append("repetition_penalty acts on log-probabilities here, on logits in a greedy search there")
    if settings.get("do_sample"):
        notes.append("do_sample is left out: ask for --sample")
    return found, notes


def _unknown(settings: Mapping[str, Any]) -> list[str]:
    return [name for name, nothing in UNKNOWN.items() if settings.get(name) not in (None, nothing)]
