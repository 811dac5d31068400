"""The interface of engines: encode once, step once a token, reorder rows; arguments and results are numpy arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import ge
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ..base import messages
from ..base.errors import LimitError
from ..bundle.plans import Profile
from ..bundle.recipe import Axes
from ..model.config import ModelConfig

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
State = Any
"""Caches and lengths between steps. Opaque; belongs to the engine that made it."""
FIRST_CAPACITY = 32
"""Target positions of a new cache of fixed capacity, enough for a usual sentence; a full one is doubled."""


@dataclass(frozen=True)
class Limits:
    """The largest request that an engine takes."""

    batch: int
    """Sentences."""
    src_tokens: int
    """Source length, special tokens included."""
    tgt_tokens: int
    """Decoding steps."""
    beams: int
    """Rows per sentence."""
    profiles: tuple[Profile, ...] = ()
    """The only combinations of sizes that are possible, where these are limited."""
    hint: str = ""
    """How to get a larger limit, where another export is not the way."""

    @classmethod
    def of(cls, axes: Axes) -> Self:
        """What the axes of a recipe allow, filled in from a model."""
        return cls(axes.batch.max, axes.src_len.max, axes.past_len.max + 1, axes.beams.max)

    @classmethod
    def eager(cls, config: ModelConfig) -> Self:
        """PyTorch's: the model's positions; else whatever fits into memory."""
        return cls(1 << 16, config.max_positions, config.max_positions, 1 << 16)

    def check_asked(self, asked: Mapping[str, Any]) -> None:
        """Raise LimitError for options that the user set and no plan has room for."""
        for name, most in {"max_tokens": self.tgt_tokens, "beams": self.beams}.items():
            if self.profiles and (asked.get(name) or 0) > most:
                fields = {"option": name, "value": asked[name], "limit": most, "remedy": self.hint}
                raise LimitError(messages.BEYOND_PLANS.format(**fields))

    def sentences(self, beams: int, src_tokens: int, tgt_tokens: int) -> int:
        """The largest batch of sentences with these sizes; 1 where no plan has them."""
        return max(self._batches(beams, src_tokens, tgt_tokens), default=1) if self.profiles else self.batch

    def have_plan(self, beams: int, src_tokens: int, tgt_tokens: int) -> bool:
        """Whether a sentence with these sizes fits into a profile, where these are limited."""
        return not self.profiles or bool(self._batches(beams, src_tokens, tgt_tokens))

    def _batches(self, *wanted: int) -> list[int]:
        """The batch sizes of the profiles that have these beams, source and target tokens."""
        return [p.batch for p in self.profiles if all(map(ge, (p.beams, p.src_len, p.capacity), wanted))]


@dataclass(frozen=True)
class Outlook:
    """What a search will ask of a state, for engines that choose sizes by it or execute steps speculatively."""

    beams: int = 0
    """Most rows of a sentence; 0: as many as the engine takes."""
    tokens: int = 0
    """Most steps; 0: as many as the engine takes."""
    end_id: int = -1
    """The token that ends an output; -1: none does."""
    required: Sequence[Sequence[int]] = ()
    """For each source, tokens that an engine with a shortlist must score besides; none: no others."""
    drawn: bool = False
    """Tokens are sampled, so that the next step's cannot be predicted."""

    def beside(self, other: Outlook) -> Outlook:
        """The outlook of two searches that share steps."""
        pairs = (self.beams, other.beams), (self.tokens, other.tokens)
        beams, tokens = (max(pair) if all(pair) else 0 for pair in pairs)
        end_id = self.end_id if self.end_id == other.end_id else -1
        return Outlook(beams, tokens, end_id, [*self.required, *other.required], self.drawn or other.drawn)


ANYTHING = Outlook()


@dataclass(frozen=True)
class Scores:
    """Scores of the next token of every row; the k > 0 best, best first, equal scores by the lower id."""

    ids: Ints
    """(B, K, k)"""
    scores: Floats
    """(B, K, k) log-probabilities."""
    log_probs: Floats | None = None
    """(B, K, V), only where asked for."""
    attention: Floats | None = None
    """(B, K, S), only where asked for: the last layer's cross-attention, mean over heads; 0 at padding."""


class Engine(Protocol):
    """Runs one model. Making the object is free, entering it takes the device, leaving gives it back."""

    config: ModelConfig
    limits: Limits
    precision: str
    """Of the weights."""
    attention: bool
    """Whether a step can return attention."""
    admits: bool
    """Whether sentences can join a state that has taken steps."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *why: object) -> None: ...

    def encode(self, src_ids: Ints, src_lengths: Ints, outlook: Outlook = ANYTHING) -> State:
        """src_ids (B, S) right-padded, src_lengths (B) -> the state of B sentences with one beam each."""
        ...

    def admit(self, state: State, src_ids: Ints, src_lengths: Ints, outlook: Outlook = ANYTHING) -> None:
        """Append sentences to those of the state, at their first step, with as many rows as the others have.

        `outlook` is that of all that then run; its `required` are of those that join.

        Raises LimitError beyond `limits`, and where the engine or its graphs cannot admit sentences; the state is then
        as before. After any other error it cannot be used.
        """
        ...

    def best(self, beams: int, state: State) -> int:
        """How many best tokens the next step returns per row, with that many beams."""
        ...

    def step(self, tokens: Ints, state: State, full: bool = False, attention: bool = False) -> Scores:
        """Feed the last token of every row, (B, K); `full` asks for all log-probabilities.

        Raises LimitError beyond `limits`, and for attention that the engine does not have.
        """
        ...

    def reorder(self, state: State, parents: Ints, sentences: Ints | None = None) -> None:
        """Make row i of the next step continue row parents[i], (B', K').

        Rows are counted over B*K of the last step, or as the last call of `reorder` after it left them. `sentences`
        (B') names the sentences that stay where some leave; parents must be rows of those. Sentences that are admitted
        later may take the places of those that left.
        """
        ...

    def cross_keys_values(self, state: State) -> list[Floats]:
        """The encoder's outputs, for comparison: 2L of (B, H, S, D)."""
        ...

    def layers(self, src_ids: Ints, src_lengths: Ints, tgt_ids: Ints) -> dict[str, Floats]:
        """Intermediate values of one batch, in order of computation, to find the first that differs.

        Teacher-forced: src_ids (B, S), src_lengths (B), tgt_ids (B, T) beginning with bos. Returns the encoder's values
        of `contract.layer_names` (B, S, d), `cross_k_0` and so on (B, H, S, D), the step's values (B, T, d) and
        `log_probs` (B, T, V); those that a graph does not have by name are left out.
        """
        ...


class Encoder(Protocol):
    """Runs the encoder alone. Entered and left as an `Engine`."""

    config: ModelConfig
    limits: Limits
    precision: str

    @property
    def encodes(self) -> bool:
        """Whether the model has an encoder of its own, as all have but modules that give `forward` alone."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *why: object) -> None: ...

    def memory(self, src_ids: Ints, src_lengths: Ints) -> Floats:
        """src_ids (B, S) right-padded, src_lengths (B) -> the encoder's output (B, S, d), anything at padding.

        Raises LimitError beyond `limits`.
        """
        ...


@dataclass(frozen=True)
class Batch:
    """Sources to decode together."""

    src_ids: Ints
    """(B, S) right-padded, as the encoder sees them."""
    src_lengths: Ints
    """(B)"""
    numbers: Sequence[int] = ()
    """Each source's number among all requests, which seeds its samples; none: its index in the batch."""
    prefixes: Sequence[Sequence[int]] = ()
    """Tokens that each output begins with, after `first_ids`."""


@dataclass
class Hypothesis:
    """One decoded output."""

    ids: list[int] = field(default_factory=list)
    """Tokens, without bos and end token."""
    end_id: int | None = None
    """The end token; None where a limit ended the output."""
    score: float = 0.0
    """Sum of the log-probabilities of ids and of the end token."""
    value: float = 0.0
    """The score after penalties, by which a beam is ranked."""
    alignment: list[int] = field(default_factory=list)
    """The source position, from 0, with the most attention of each of ids; only with `align`."""

    @property
    def finished(self) -> bool:
        """Ended by an end token, not by a limit."""
        return self.end_id is not None


class Options(Protocol):
    """`decoding.DecodeOptions`, which this room does not import."""

    def to_json(self) -> str:
        """All fields, for a runtime in another language."""
        ...


class Outputs(Protocol):
    """The only outputs that are allowed."""

    def outputs(self) -> Iterable[Sequence[int]]:
        """Their ids, without end tokens."""
        ...


Calls = list[tuple[str, float, float]]
"""Of an engine: name, begin and end, in seconds of `time.perf_counter`."""


@runtime_checkable
class Searches(Protocol):
    """An engine with a search of its own, whose results must equal those of ours over the engine's steps."""

    searches: bool
    """Whether `decoding.decode` uses it; `tformer check` compares both in any case."""
    batch_tokens: int
    """The best batch size for the model, in padded source tokens per beam."""

    def search(
        self,
        batch: Batch,
        options: Options,
        allowed: Outputs | None = None,
        strict: bool = True,
        calls: Calls | None = None,
    ) -> list[list[Hypothesis]]:
        """The outputs of each source. The engine's calls are appended to `calls`.

        `strict`: stop at NaN or infinite log-probabilities; else those are never chosen.

        Raises what `decoding.decode` does.
        """
        ...


@dataclass(frozen=True)
class Request:
    """What joins a running batch."""

    batch: Batch
    options: Options
    allowed: Outputs | None = None
    on_token: Callable[[int], None] | None = None
    """Called in `Running.step` with each token of a search of one source and one row, its end token among them."""


class Joined(Protocol):
    """A search that shares steps with others."""

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        ...

    def outputs(self) -> list[list[Hypothesis]]:
        """The outputs of each source, once it has ended. Raises the error that ended it."""
        ...


class Running(Protocol):
    """Continuous batching: searches join and leave between steps. `decoding.ContinuousBatch` is the reference."""

    def add(self, requests: Sequence[Request]) -> Sequence[Joined]:
        """Begin searches with the next step, in one call of the encoder.

        Raises LimitError or DataError for what they cannot have; those that run go on. Any other error of the engine
        may end those.
        """
        ...

    def remove(self, search: Any) -> None:
        """Stop a search, if it runs. Raises the engine's errors, which end all."""
        ...

    def step(self) -> None:
        """Decode the next token of every search. One that fails ends alone.

        Raises the engine's errors, which end all.
        """
        ...


@runtime_checkable
class Continues(Protocol):
    """An engine whose runtime has continuous batching of its own, whose results must equal those of ours."""

    @property
    def no_continuous(self) -> str:
        """Why `decoding.continuous` does not use it here; empty: it does."""
        ...

    def continuous(self) -> Running:
        """A batch that nobody has joined yet."""
        ...


def own_search(engine: object) -> Searches | None:
    """An engine's own search, where `decoding.decode` uses it."""
    return engine if isinstance(engine, Searches) and engine.searches else None


def own_batches(engine: object) -> Continues | None:
    """An engine's own continuous batching, where `decoding.continuous` uses it."""
    return engine if isinstance(engine, Continues) and not engine.no_continuous else None


class SameStep:
    """For engines whose sentences are all at the same step: they admit none."""

    admits = False

    def admit(self, state: State, src_ids: Ints, src_lengths: Ints, outlook: Outlook = ANYTHING) -> None:
        """See `Engine.admit`."""
        raise LimitError(messages.CANNOT_JOIN.format(targets="ort-cpu, native or trt"))


def check_request(src_ids: Ints, src_lengths: Ints, config: ModelConfig, limits: Limits) -> None:
    """Raise LimitError for sources that the model cannot take, before they reach a device."""
    batch, src_tokens = src_ids.shape
    if batch > limits.batch:
        raise LimitError(messages.TOO_MANY_SENTENCES.format(sentences=batch, limit=limits.batch))
    if src_tokens > limits.src_tokens:
        remedy = limits.hint or messages.LONGER_SOURCES
        raise LimitError(messages.SOURCE_TOO_LONG.format(tokens=src_tokens, limit=limits.src_tokens, remedy=remedy))
    if src_ids.size == 0 or src_lengths.min() < 1 or src_lengths.max() > src_tokens:
        raise LimitError(messages.WRONG_LENGTHS.format(width=src_tokens))
    if src_ids.min() < 0 or src_ids.max() >= config.src_vocab:
        bad = src_ids.min() if src_ids.min() < 0 else src_ids.max()
        raise LimitError(messages.SOURCE_ID.format(token=bad, size=config.src_vocab))


def check_step(beams: int, position: int, limits: Limits) -> None:
    """Raise LimitError for too many beams, and for a step beyond the last position."""
    if beams > limits.beams:
        remedy = limits.hint or messages.LARGER_BEAMS
        raise LimitError(messages.TOO_MANY_BEAMS.format(beams=beams, limit=limits.beams, remedy=remedy))
    if position >= limits.tgt_tokens:
        raise LimitError(messages.TOO_MANY_STEPS.format(step=position + 1, limit=limits.tgt_tokens))
