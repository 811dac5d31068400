"""How to decode: one frozen dataclass. `docs/decoding.md` has the exact meaning of every field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..base.errors import ConfigError
from ..base.settings import check_types, from_dict
from ..model.config import MAX_SEED

LengthNorm = Literal["power", "gnmt"]
Stop = Literal["count", "estimate", "exact"]

MOST = 1 << 31
"""Counts are less than this."""
_SEARCH = ("length_norm", "length_penalty", "coverage_penalty", "stop", "patience")
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")


@dataclass(frozen=True)
class DecodeOptions:
    """Greedy search unless `beams` is above 1 or `sampling` is set."""

    max_tokens: int = 256
    """Longest output, end token included; the model's positions are a limit of their own."""
    min_tokens: int = 0
    """Shortest output, end token included."""
    max_ratio: float = 0.0
    """Longest output per source token, special tokens included on both sides; 0: no such limit."""
    min_ratio: float = 0.0
    """Shortest output per source token."""
    n_best: int = 1
    """Outputs per source: the best of a beam, or independent samples."""

    beams: int = 1
    """Hypotheses that are kept per sentence."""
    length_norm: LengthNorm = "power"
    """Divide a score by n^a (`power`) or ((5+n)/6)^a (`gnmt`); n counts the end token. Source: Wu et al. 2016."""
    length_penalty: float = 1.0
    """The exponent a; 0 compares plain sums."""
    coverage_penalty: float = 0.0
    """Weight of the coverage penalty of Wu et al. 2016; needs a graph that returns attention."""
    stop: Stop = "count"
    """`count`: `patience` x beams outputs have ended; `estimate`: no live hypothesis would beat the worst kept output
    if it ended now; `exact`: none can beat it at any length."""
    patience: float = 1.0
    """Source: Kasai et al. 2022."""

    sampling: bool = False
    """Draw tokens instead of searching."""
    temperature: float = 1.0
    top_k: int = 0
    """Draw from the k best tokens; 0: from all."""
    top_p: float = 1.0
    """Draw from the fewest best tokens that reach this probability. Source: Holtzman et al. 2020."""
    min_p: float = 0.0
    """Draw from tokens of at least this share of the best one's probability. Source: Nguyen et al. 2024."""
    seed: int = 0

    repetition_penalty: float = 1.0
    """Factor on the log-probability of a token that the output already has. Source: Keskar et al. 2019."""
    no_repeat_ngram: int = 0
    """No n-gram of this size twice in an output; 0: no such rule."""
    suppress: tuple[int, ...] = ()
    """Token ids that are never produced."""
    end_ids: tuple[int, ...] = ()
    """Token ids that end an output; none: the model's eos."""
    endless: bool = False
    """No token ends an output, so that each reaches its limit: for measurements."""
    first_ids: tuple[int, ...] = ()
    """Token ids that every output begins with, such as a language code."""
    first_adds_zero: bool = False
    """`first_ids` add 0 to sums instead of their log-probabilities, as `forced_bos_token_id` of transformers."""
    forced_end: bool = False
    """An output of the longest length ends there by an end token that adds 0, as by its `forced_eos_token_id`."""
    align: bool = False
    """Report the source position of every token; needs a graph that returns attention."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("max_tokens", "n_best", "beams"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("max_tokens", "min_tokens", "n_best", "beams", "top_k", "no_repeat_ngram"):
            self._require(name, getattr(self, name) < MOST, f"less than {MOST}")
        for name in ("min_tokens", "max_ratio", "min_ratio", "top_k", "no_repeat_ngram", "coverage_penalty"):
            self._require(name, getattr(self, name) >= 0, "at least 0")
        for name, most in {"max_ratio": 1e300, "min_ratio": 1e300, "coverage_penalty": 1e6, "patience": 1e6}.items():
            self._require(name, getattr(self, name) <= most, f"at most {most:g}")
        for name in ("temperature", "repetition_penalty"):
            self._require(name, 1e-3 <= getattr(self, name) <= 1e3, "between 0.001 and 1000")
        self._require("length_penalty", abs(self.length_penalty) <= 10, "between -10 and 10")
        self._require("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        self._require("min_p", 0 <= self.min_p < 1, "at least 0 and less than 1")
        self._require("seed", 0 <= self.seed < MAX_SEED, f"at least 0 and less than {MAX_SEED}")
        self._require("patience", self.patience * self.beams >= 0.5, f"at least {0.5 / self.beams}")
        self._require("min_tokens", self.min_tokens <= self.max_tokens, f"at most max_tokens={self.max_tokens}")
        least = len(self.first_ids) + (self.forced_end and not self.endless)
        self._require("max_tokens", self.max_tokens >= least, f"at least {least}, for first_ids and the forced end")
        if self.sampling:
            self._require("beams", self.beams == 1, "1 with sampling: n_best is the number of samples")
        else:
            self._require("n_best", self.n_best <= self.beams, f"at most beams={self.beams}, or used with sampling")
        for name in _SEARCH if self.sampling else _SAMPLING:
            default = type(self).__dataclass_fields__[name].default
            rule = f"{default} {'with' if self.sampling else 'without'} sampling"
            self._require(name, getattr(self, name) == default, rule)
        if self.stop != "count":
            self._require("patience", self.patience == 1, "1 unless stop is 'count'")

    def _require(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ConfigError(f"{name}={getattr(self, name)}: must be {rule}")

    def ends(self, eos_id: int) -> tuple[int, ...]:
        """The tokens that end an output of a model with that end token."""
        return () if self.endless else self.end_ids or (eos_id,)

    @property
    def plain(self) -> bool:
        """Whether no rule changes the log-probability of a token that it allows."""
        return self.repetition_penalty == 1 and not self.forced_end and not (self.first_adds_zero and self.first_ids)

    @property
    def rows(self) -> int:
        """Rows that a sentence takes on the device."""
        return self.n_best if self.sampling else self.beams

    @property
    def attention(self) -> bool:
        """Whether the search reads attention weights."""
        return self.align or self.coverage_penalty > 0

    @property
    def greedy(self) -> bool:
        """Whether one best token a step is all that the search reads."""
        return self.beams == 1 and not self.sampling and self.stop == "count" and self.patience < 1.5


def over_defaults(defaults: Mapping[str, Any], asked: Mapping[str, Any]) -> DecodeOptions:
    """The options that are asked for, and a model's defaults for the others.

    Defaults of a beam do not hold for sampling, nor where nobody asks for a beam above 1. Raises ConfigError.
    """
    ranked = not asked.get("sampling") and asked.get("beams", defaults.get("beams", 1)) != 1
    kept = {name: value for name, value in defaults.items() if ranked or name not in (*_SEARCH, "beams", "n_best")}
    return from_dict(DecodeOptions, {**kept, **asked}, "decoding")
