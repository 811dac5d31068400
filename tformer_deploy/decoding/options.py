"""How to decode: one frozen dataclass. `docs/decoding.md` has the exact meaning of every field.

`make spec` writes schemas/options.json, the options of C++ and the table in docs/decoding.md from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, Self

from ..base.errors import ConfigError
from ..base.settings import MOST_FLOAT, check_types, from_dict
from ..model.config import MAX_SEED

LengthNorm = Literal["power", "gnmt"]
Stop = Literal["count", "estimate", "exact"]
SearchKind = Literal["", "search", "sampling"]

MOST = 1 << 31
"""Counts are less than this: C++ has them in 32 bits."""


@dataclass(frozen=True)
class Bounds:
    """A range of numbers: `least` and `most` are inclusive, `above` and `below` exclusive."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None

    def hold(self, value: float) -> bool:
        """Whether a number is within the range."""
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    @cached_property
    def rule(self) -> str:
        """As in `at least 0 and less than 1`; empty: any number."""
        if self.least is not None and self.most is not None:
            return f"between {self.least:g} and {self.most:g}"
        words = (("at least", self.least), ("above", self.above), ("at most", self.most), ("less than", self.below))
        return " and ".join(f"{word} {_shown(bound)}" for word, bound in words if bound is not None)


def _shown(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def option(default: Any, text: str, of: SearchKind = "", **bounds: float) -> Any:
    """A field: its default, its help text, the only search that reads it ("": all do), and its bounds."""
    return field(default=default, metadata={"text": text, "of": of, "bounds": Bounds(**bounds)})


@dataclass(frozen=True)
class DecodeOptions:
    """Greedy search unless `beams` is above 1 or `sampling` is set."""

    max_tokens: int = option(256, "Longest output, end token included.", least=1, below=MOST)
    min_tokens: int = option(0, "Shortest output, end token included.", least=0, below=MOST)
    max_ratio: float = option(0.0, "Longest output per source token; 0: no such limit.", least=0, most=MOST_FLOAT)
    min_ratio: float = option(0.0, "Shortest output per source token.", least=0, most=MOST_FLOAT)
    n_best: int = option(1, "Outputs per source: the best of a beam, or independent samples.", least=1, below=MOST)

    beams: int = option(1, "Hypotheses that are kept per sentence; 1: greedy search.", least=1, below=MOST)
    length_norm: LengthNorm = option(
        "power", "Scores are divided by n^a (power) or ((5+n)/6)^a (gnmt, Wu et al. 2016).", "search"
    )
    length_penalty: float = option(1.0, "The exponent a; 0 compares plain sums.", "search", least=-10, most=10)
    coverage_penalty: float = option(
        0.0, "Weight of the coverage penalty (Wu et al. 2016); needs attention.", "search", least=0, most=1e6
    )
    stop: Stop = option(
        "count",
        "When a beam ends. count: patience x beams outputs have ended; estimate: no hypothesis would beat the worst "
        "kept output if it ended now; exact: none can beat it at any length.",
        "search",
    )
    patience: float = option(
        1.0,
        "Factor on the outputs that stop=count waits for (Kasai et al. 2022); at least 0.5 / beams.",
        "search",
        most=1e6,
    )

    sampling: bool = option(False, "Draw tokens instead of searching.")
    temperature: float = option(1.0, "Log-probabilities are divided by it.", "sampling", least=1e-3, most=1e3)
    top_k: int = option(0, "Draw from the k best tokens; 0: from all.", "sampling", least=0, below=MOST)
    top_p: float = option(
        1.0,
        "Draw from the fewest best tokens that reach this probability (Holtzman et al. 2020).",
        "sampling",
        above=0,
        most=1,
    )
    min_p: float = option(
        0.0,
        "Draw from tokens of at least this share of the best one's probability (Nguyen et al. 2024).",
        "sampling",
        least=0,
        below=1,
    )
    seed: int = option(0, "Seed of the random numbers.", "sampling", least=0, below=MAX_SEED)

    repetition_penalty: float = option(
        1.0,
        "Factor on the log-probability of a token that the output already has (Keskar et al. 2019).",
        least=1e-3,
        most=1e3,
    )
    no_repeat_ngram: int = option(0, "No n-gram of this size twice in an output; 0: no such rule.", least=0, below=MOST)
    suppress: tuple[int, ...] = option((), "Token ids that are never produced.")
    bad_words: tuple[tuple[int, ...], ...] = option((), "Sequences of token ids that are never produced, as in 5,6/7.")
    end_ids: tuple[int, ...] = option((), "Token ids that end an output; none: the model's eos.")
    endless: bool = option(False, "No token ends an output, so that each reaches its limit: for measurements.")
    first_ids: tuple[int, ...] = option((), "Token ids that every output begins with, such as a language code.")
    first_adds_zero: bool = option(
        False, "first_ids add 0 to sums instead of their log-probabilities, as transformers' forced_bos_token_id."
    )
    forced_end: bool = option(
        False, "An output of the longest length ends in an end token that adds 0, as transformers' forced_eos_token_id."
    )
    align: bool = option(False, "Report the source position of every token; needs attention.")

    def __post_init__(self) -> None:
        check_types(self)
        for each in fields(self):
            value, bounds = getattr(self, each.name), each.metadata["bounds"]
            self._require(each.name, not bounds.rule or bounds.hold(value), bounds.rule)
        self._require("bad_words", all(self.bad_words), "sequences of one token id at least")
        self._require("patience", self.patience * self.beams >= 0.5, f"at least {0.5 / self.beams}")
        self._require("min_tokens", self.min_tokens <= self.max_tokens, f"at most max_tokens={self.max_tokens}")
        least = len(self.first_ids) + (self.forced_end and not self.endless)
        self._require("max_tokens", self.max_tokens >= least, f"at least {least}, for first_ids and the forced end")
        if self.sampling:
            self._require("beams", self.beams == 1, "1 with sampling: n_best is the number of samples")
        else:
            self._require("n_best", self.n_best <= self.beams, f"at most beams={self.beams}, or used with sampling")
        for each in fields(self):
            if each.metadata["of"] == ("search" if self.sampling else "sampling"):
                rule = f"{each.default} {'with' if self.sampling else 'without'} sampling"
                self._require(each.name, getattr(self, each.name) == each.default, rule)
        if self.stop != "count":
            self._require("patience", self.patience == 1, "1 unless stop is 'count'")

    def _require(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            value = getattr(self, name)
            shown = json.dumps(value, separators=(",", ":")) if isinstance(value, tuple) else value
            raise ConfigError(f"{name}={shown}: must be {rule}")

    def ends(self, eos_id: int) -> tuple[int, ...]:
        """The tokens that end an output; `eos_id` is the model's own."""
        return () if self.endless else self.end_ids or (eos_id,)

    @property
    def plain(self) -> bool:
        """Whether allowed tokens keep their log-probabilities, so that sums before and after the rules are equal."""
        return self.repetition_penalty == 1 and not self.forced_end and not (self.first_adds_zero and self.first_ids)

    @property
    def rows(self) -> int:
        """Rows of a sentence in a batch: its beams or samples."""
        return self.n_best if self.sampling else self.beams

    @property
    def attention(self) -> bool:
        """Whether the search reads attention weights."""
        return self.align or self.coverage_penalty > 0

    @property
    def outputs_wanted(self) -> int:
        """Outputs that stop="count" waits for: patience x beams, rounded."""
        return int(self.patience * self.beams + 0.5)

    @property
    def greedy(self) -> bool:
        """Whether the search reads only the best token of each step."""
        return self.beams == 1 and not self.sampling and self.stop == "count" and self.outputs_wanted == 1

    @property
    def streamable(self) -> bool:
        """Whether every token is final as soon as it is chosen: one row, whose outputs are not ranked."""
        return self.rows == 1 and (self.greedy or self.sampling)

    def to_json(self) -> str:
        """For the C++ library."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Decoding:
    """The options of a translator, checked once, and the values that they were made from."""

    options: DecodeOptions
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The model's own, by field of `DecodeOptions`."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """What the user set over them."""

    @classmethod
    def over(cls, defaults: Mapping[str, Any], asked: Mapping[str, Any]) -> Self:
        """See `over_defaults`."""
        return cls(over_defaults(defaults, asked), defaults, asked)

    def changed(self, asked: Mapping[str, Any]) -> Self:
        """With other values for some options. Raises ConfigError."""
        return self.over(self.defaults, {**self.asked, **asked})


def over_defaults(defaults: Mapping[str, Any], asked: Mapping[str, Any]) -> DecodeOptions:
    """The options that a user asks for, and a model's defaults for the others.

    Defaults of beam search do not apply to sampling and greedy search. Raises ConfigError.
    """
    beam_search = not asked.get("sampling") and asked.get("beams", defaults.get("beams", 1)) != 1
    of_beams = {"beams", "n_best", *(each.name for each in fields(DecodeOptions) if each.metadata["of"] == "search")}
    applied = {name: value for name, value in defaults.items() if beam_search or name not in of_beams}
    return from_dict(DecodeOptions, {**applied, **asked}, "decoding")
