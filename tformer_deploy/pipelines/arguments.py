"""Arguments of transformers' `generate` to options of our search. What we cannot do is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..base.errors import ConfigError, unknown
from ..base.settings import from_dict
from ..decoding import DecodeOptions
from ..decoding.constraints import Constraint, DisjunctiveConstraint, PhrasalConstraint

DEFAULTS: dict[str, Any] = {
    "max_length": 20,
    "max_new_tokens": None,
    "min_length": 0,
    "min_new_tokens": None,
    "num_beams": 1,
    "num_return_sequences": 1,
    "do_sample": False,
    "early_stopping": False,
    "length_penalty": 1.0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "min_p": None,
    "seed": 0,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "decoder_start_token_id": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "prefix_allowed_tokens_fn": None,
    "force_words_ids": None,
    "constraints": None,
    "return_dict_in_generate": False,
    "output_scores": False,
}
"""What `generate` takes here, and transformers' defaults; `seed` is ours."""
NEUTRAL: dict[str, Any] = {
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "exponential_decay_length_penalty": None,
    "diversity_penalty": 0.0,
    "num_beam_groups": 1,
    "penalty_alpha": None,
    "dola_layers": None,
    "forced_decoder_ids": None,
    "sequence_bias": None,
    "guidance_scale": None,
    "renormalize_logits": False,
    "remove_invalid_values": False,
    "watermarking_config": None,
    "token_healing": False,
    "stop_strings": None,
    "max_time": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_logits": None,
    "decoder_input_ids": None,
    "logits_processor": None,
    "stopping_criteria": None,
    "streamer": None,
    "assistant_model": None,
    "negative_prompt_ids": None,
    "inputs_embeds": None,
    "encoder_outputs": None,
    "custom_generate": None,
    "prompt_lookup_num_tokens": None,
}
"""Arguments that we do not have, and the values with which they change nothing."""
SPEED = (
    "use_cache",
    "cache_implementation",
    "cache_config",
    "compile_config",
    "disable_compile",
    "low_memory",
    "return_legacy_cache",
    "synced_gpus",
    "trust_remote_code",
)
"""Arguments that change how transformers computes and nothing of the result."""
STOPS = {True: "count", False: "estimate", "never": "exact"}


@dataclass(frozen=True)
class Plan:
    """How to decode."""

    options: DecodeOptions
    start_id: int
    pad_id: int
    end_ids: tuple[int, ...]
    constraints: list[Constraint] = field(default_factory=list)
    begin_suppress: tuple[int, ...] = ()
    allowed: Any = None
    never_ends: bool = False
    guided: bool = False
    """Whether our own loop decodes, because an engine's own search cannot follow the arguments."""

    @property
    def fill_id(self) -> int:
        """What stands behind outputs. Beam search of transformers 4.57 takes the end token where padding has id 0."""
        beams = self.options.beams > 1 and not self.constraints
        return self.pad_id or (self.end_ids[0] if beams and self.end_ids else 0)


@dataclass(frozen=True)
class Model:
    """What a plan reads of a model."""

    start_id: int
    pad_id: int
    eos_id: int
    positions: int


def known_settings(found: Mapping[str, Any]) -> dict[str, Any]:
    """What `generate` reads of a folder's settings. Settings that change nothing are left out."""
    names = DEFAULTS.keys() | NEUTRAL.keys()
    return {name: value for name, value in found.items() if name in names and value is not None}


def settings_of_bundle(decoding: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A bundle's defaults as arguments of `generate`, and those options that it has no arguments for."""
    names = {
        "beams": "num_beams",
        "min_tokens": "min_length",
        "length_penalty": "length_penalty",
        "repetition_penalty": "repetition_penalty",
        "no_repeat_ngram": "no_repeat_ngram_size",
        "suppress": "suppress_tokens",
        "bad_words": "bad_words_ids",
        "end_ids": "eos_token_id",
    }
    found: dict[str, Any] = {"max_length": DecodeOptions().max_tokens + 1}
    found |= {theirs: decoding[ours] for ours, theirs in names.items() if ours in decoding}
    left = {name: value for name, value in decoding.items() if name not in names}
    if "max_tokens" in left:
        found["max_length"] = left.pop("max_tokens") + 1
    stops = {ours: theirs for theirs, ours in STOPS.items()}
    found["early_stopping"] = stops[left.pop("stop", "count")]
    if len(left.get("first_ids", ())) == 1 and left.get("first_adds_zero"):
        [found["forced_bos_token_id"]] = left.pop("first_ids")
        left.pop("first_adds_zero")
    return found, left


def require_known(arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError for arguments that `generate` does not have, or that we cannot follow."""
    for name, value in arguments.items():
        if name in DEFAULTS or name in SPEED or (name in NEUTRAL and _changes_nothing(name, value)):
            continue
        if name in NEUTRAL:
            raise ConfigError(f"generate: {name} is not supported here: leave it out, or use transformers")
        raise unknown("argument of generate", name, [*DEFAULTS, *NEUTRAL])


def _changes_nothing(name: str, value: Any) -> bool:
    return value is None or (isinstance(value, bool | int | float) and value == NEUTRAL[name])


def plan(arguments: Mapping[str, Any], model: Model, others: Mapping[str, Any]) -> Plan:
    """The plan of merged settings and arguments; `others`: fields of DecodeOptions besides. Raises ConfigError."""
    require_known(arguments)
    given = {**DEFAULTS, **{name: value for name, value in arguments.items() if value is not None}}
    ends = tuple(_ids("eos_token_id", given["eos_token_id"])) or (model.eos_id,)
    longest, shortest, never = _lengths(given, model)
    constraints = constraints_of(given)
    beams, samples = int(given["num_beams"]), bool(given["do_sample"])
    found: dict[str, Any] = {
        **(others if beams > 1 else {name: value for name, value in others.items() if name not in SEARCH}),
        "max_tokens": longest,
        "min_tokens": min(shortest, longest),
        "n_best": int(given["num_return_sequences"]),
        "end_ids": list(ends),
        "repetition_penalty": float(given["repetition_penalty"]),
        "no_repeat_ngram": int(given["no_repeat_ngram_size"]),
        **_banned(given, ends),
        **_forced(given, ends),
    }
    _refuse_pairs(given, beams, samples, constraints)
    if samples:
        found |= {"sampling": True, "temperature": float(given["temperature"]), "top_k": int(given["top_k"])}
        found |= {"top_p": float(given["top_p"]), "min_p": float(given["min_p"] or 0), "seed": int(given["seed"])}
    elif beams > 1:
        stop = STOPS[_among("early_stopping", given["early_stopping"], STOPS)]
        found |= {"beams": beams, "length_penalty": float(given["length_penalty"]), "stop": stop}
    start = model.start_id if given["decoder_start_token_id"] is None else int(given["decoder_start_token_id"])
    begin = tuple(_ids("begin_suppress_tokens", given["begin_suppress_tokens"]))
    allowed = given["prefix_allowed_tokens_fn"]
    guided = bool(begin or allowed or never) or start != model.start_id or found["repetition_penalty"] != 1
    # transformers counts the start among an output's n-grams, our search does not.
    size, again = found["no_repeat_ngram"], start not in found["suppress"]
    guided |= size > 0 and again and (size == 1 or start not in ends)
    pad = model.pad_id if given["pad_token_id"] is None else int(given["pad_token_id"])
    options = from_dict(DecodeOptions, found, "generate")
    return Plan(options, start, pad, ends, constraints, begin, allowed, never, guided)


SEARCH = ("length_norm", "coverage_penalty", "patience", "stop", "length_penalty")
"""Fields of DecodeOptions that only a beam reads."""


def _lengths(given: Mapping[str, Any], model: Model) -> tuple[int, int, bool]:
    """Longest, shortest, and whether no output may end; their lengths count the start token, ours the end token."""
    longest = int(given["max_new_tokens"] or given["max_length"] - 1)
    if longest < 1:
        raise ConfigError(f"max_length={given['max_length']}: must be at least 2: it counts the start token")
    shortest = int(given["min_length"] or 0)
    if given["min_new_tokens"] is not None:
        shortest = max(shortest, int(given["min_new_tokens"]) + 1)
    return min(longest, model.positions), shortest, shortest > longest


def _refuse_pairs(given: Mapping[str, Any], beams: int, samples: bool, constraints: list[Constraint]) -> None:
    """Raise ConfigError for arguments that do not go together, here or in transformers."""
    if samples and beams > 1:
        raise ConfigError("generate: do_sample=True with num_beams above 1 is not supported here: leave one out")
    if not samples and given["num_return_sequences"] > beams:
        wanted = given["num_return_sequences"]
        raise ConfigError(f"num_return_sequences={wanted}: must be at most num_beams={beams}, or used with do_sample")
    if constraints and (beams < 2 or samples):
        raise ConfigError("force_words_ids and constraints need a beam: give num_beams=2 or more, without do_sample")
    if given["repetition_penalty"] != 1 and beams < 2:
        raise ConfigError(
            "repetition_penalty without num_beams acts on logits in transformers, which our engines do not give: "
            "leave it out, or give num_beams=2 or more"
        )
    if given["output_scores"] and beams < 2:
        raise ConfigError(
            "output_scores without num_beams are logits in transformers, which our engines do not give: leave it out"
        )


def _banned(given: Mapping[str, Any], ends: tuple[int, ...]) -> dict[str, Any]:
    """`suppress` and `bad_words`; transformers never takes an end token alone for a bad word."""
    words = [list(map(int, each)) for each in given["bad_words_ids"] or ()]
    words = [each for each in words if each not in [[end] for end in ends]]
    alone = [*_ids("suppress_tokens", given["suppress_tokens"]), *(each[0] for each in words if len(each) == 1)]
    return {"suppress": sorted(set(alone)), "bad_words": [each for each in words if len(each) > 1]}


def _forced(given: Mapping[str, Any], ends: tuple[int, ...]) -> dict[str, Any]:
    """The token that begins an output, and the end at the longest length."""
    found: dict[str, Any] = {}
    if given["forced_bos_token_id"] is not None:
        found |= {"first_ids": [int(given["forced_bos_token_id"])], "first_adds_zero": True}
    if last := _ids("forced_eos_token_id", given["forced_eos_token_id"]):
        if set(last) != set(ends):
            raise ConfigError(f"forced_eos_token_id={last}: must be eos_token_id={list(ends)}")
        found["forced_end"] = True
    return found


def constraints_of(given: Mapping[str, Any]) -> list[Constraint]:
    """`constraints`, ours or objects of transformers, and those of `force_words_ids`. Raises ConfigError."""
    found: list[Constraint] = []
    for each in given.get("constraints") or ():
        name, tokens = type(each).__name__, getattr(each, "token_ids", None)
        if isinstance(each, Constraint):
            found.append(each)
        elif name == "PhrasalConstraint" and tokens:
            found.append(PhrasalConstraint(tokens))
        elif name == "DisjunctiveConstraint" and tokens:
            found.append(DisjunctiveConstraint(tokens))
        else:
            raise ConfigError(f"constraints: {name} is neither PhrasalConstraint nor DisjunctiveConstraint")
    words = given.get("force_words_ids")
    if words is not None and (not isinstance(words, list) or not words or not all(isinstance(w, list) for w in words)):
        raise ConfigError(f"force_words_ids={words!r:.60}: give a list of lists of token ids")
    for each in words or ():
        choice = bool(each) and isinstance(each[0], list)
        found.append(DisjunctiveConstraint(each) if choice else PhrasalConstraint(each))
    return found


def _ids(name: str, value: Any) -> list[int]:
    """A list of ids from a list, one id or None."""
    if value is None:
        return []
    values = value.tolist() if hasattr(value, "tolist") else value
    try:
        return [int(each) for each in (values if isinstance(values, list | tuple) else [values])]
    except (TypeError, ValueError):
        raise ConfigError(f"{name}={value!r:.60}: give token ids") from None


def _among(name: str, value: Any, known: Mapping[Any, Any]) -> Any:
    if value not in known:
        raise ConfigError(f"{name}={value!r:.40}: must be one of {', '.join(map(repr, known))}")
    return value
