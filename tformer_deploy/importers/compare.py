"""Whether an imported model is the original: encoder states, log-probabilities, tokens, ids and text."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode

from ..base.errors import ArtifactError, TformerError
from ..bundle.text import Tokenizers
from ..decoding import Batch, Step, decode, over_defaults
from ..engines.eager import EagerEngine
from ..model.config import ModelConfig
from ..model.network import Transformer
from ..translate.batches import make_batch
from .base import Original

LIMIT = 1e-4
"""Largest difference of an encoder state or a log-probability; between sums of a beam that are equally good. More is
allowed where the original itself is further from fp64, and both agree there."""
ROUNDING = 10
"""Allowed difference in fp32, as a multiple of the original's own largest difference from fp64: where values cancel,
sums in another order differ by as much."""
SENTENCES, BATCH, MOST_TOKENS, MOST_STEPS = 200, 64, 64, 64
NUMBERS = 1 << 26
"""Log-probabilities per batch (256 MiB in fp32): large vocabularies get smaller batches."""
BEAMS = (1, 4, 5)
TIES = 0.05
"""Largest share of ties among the outputs; more would hide a difference."""
LINES = (
    "A man in a blue shirt is standing on a ladder .",
    "Is it 3.5 or 42 % ?",
    "NASA and the EU have agreed , or ONE of them has .",
    "Zwei junge Männer stehen in der Nähe .",
    "Ça va très bien , señor !",
    "a",
)
"""Lines whose ids are compared if the user gives no text. Moses' tokenizer leaves them unchanged."""
UNLIKE = ("repetition_penalty",)
"""Decoding defaults that the original applies to logits, not log-probabilities: outputs are compared without them."""
Floats64 = NDArray[np.float64]


@contextmanager
def errors_of(name: str) -> Iterator[None]:
    """Report exceptions of the original's code as its own. Raises ArtifactError."""
    try:
        yield
    except (TformerError, ModuleNotFoundError):
        raise
    except Exception as error:
        said = str(error).partition("\n")[0]
        raise ArtifactError(
            f"{name} itself fails, {type(error).__name__}: {said:.200}: mend what it reads, or import with --no-compare"
        ) from error


class Named:
    """An original whose errors carry its name."""

    def __init__(self, original: Original) -> None:
        self._original, self.name = original, original.name

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._original, name)

        def named(*given: Any) -> Any:
            with errors_of(self.name):
                return call(*given)

        return named


@dataclass
class Comparison:
    """What was compared, and what differed."""

    original: str
    """What it was compared with; empty: not compared."""
    reason: str = ""
    """Why it was not compared."""
    sentences: int = 0
    memory: float | None = None
    """Largest difference of an encoder state; None where the original does not show them."""
    log_probs: float = 0.0
    """Largest difference of a log-probability."""
    rounding: float = 0.0
    """Largest difference between the original's log-probabilities in fp32 and fp64; 0 if not measured."""
    tokens: dict[str, str] = field(default_factory=dict)
    """Search -> number of equal outputs."""
    ties: int = 0
    """Outputs that differ, but where two candidates were within the limit of each other."""
    lines: int = 0
    """Lines whose ids were compared, and the text of their outputs."""
    failures: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether there are no failures."""
        return not self.failures

    def to_json(self) -> dict[str, Any]:
        """For a header."""
        return asdict(self)

    def __str__(self) -> str:
        if not self.original:
            return f"NOT COMPARED with the original: {self.reason}"
        searches = ", ".join(f"{name} {equal} equal" for name, equal in self.tokens.items()) or "no search to compare"
        text = f", ids and text of {self.lines} lines" if self.lines else ", no text"
        ties = f", {self.ties} ties" if self.ties else ""
        memory = "" if self.memory is None else f"encoder within {self.memory:.1e}, "
        rounding = f" (rounded there by up to {self.rounding:.1e})" if self.rounding else ""
        return (
            f"compared with {self.original}: {self.sentences} sentences, {memory}"
            f"log-probabilities within {self.log_probs:.1e}{rounding}; {searches}{ties}{text}"
        )


def compare(
    original: Original, model: Transformer, tokenizers: Tokenizers, decoding: Mapping[str, Any], lines: Sequence[str]
) -> Comparison:
    """Compare a model with its original, on lines and on random ids."""
    found = Comparison(original.name)
    original = Named(original)
    sources = [tokenizers.source_ids(line) for line in lines[:SENTENCES]]
    for line in lines[:SENTENCES] or LINES:
        theirs, ids = original.source_ids(line), tokenizers.source_ids(line)
        if theirs is not None:
            found.lines += 1
            if theirs != ids:
                found.failures.append(f"'{line:.60}' is {theirs} there and {ids} here")
    longest, empty = min(model.config.max_positions, MOST_TOKENS), tokenizers.source_ids("")
    sources = [ids for ids in sources if ids != empty and len(ids) <= longest]  # which some originals refuse
    sources += random_sources(model.config, tokenizers, max(20, 60 - len(sources)), longest)
    sources.sort(key=len)
    found.sentences = len(sources)
    batches = [make_batch(some, model.config.pad_id) for some in _batches(sources, model.config)]
    apart, limit = _compare_numbers(original, model, batches, found)
    sides = _Sides(original, model, tokenizers, decoding)
    for beams in BEAMS:
        outputs = _compare_tokens(sides, sources, beams, limit)
        name = "greedy" if beams == 1 else f"beams {beams}"
        if outputs.total:
            found.tokens[name], found.ties = f"{outputs.equal} of {outputs.total}", found.ties + outputs.ties
        found.failures += outputs.failures
        if outputs.ties > max(1, outputs.total * TIES):
            found.failures.append(
                f"{name}: {outputs.ties} of {outputs.total} outputs are ties, more than chance explains"
            )
    found.failures = [*apart, *found.failures]
    return found


def random_sources(config: ModelConfig, tokenizers: Tokenizers, count: int, longest: int) -> list[list[int]]:
    """Sources of random ids, as long as 1 to `longest` tokens, as their tokenizer begins and ends them."""
    rng = np.random.default_rng(1)
    words = np.setdiff1d(np.arange(min(config.src_vocab, tokenizers.source.size)), tokenizers.source.specials.ids)
    around = len(tokenizers.source_ids(""))
    ends = tokenizers.suffix if tokenizers.suffix is not None else (tokenizers.source.specials.eos,)
    sizes = rng.integers(1, max(2, longest - around + 1), count)
    return [[*tokenizers.prefix, *rng.choice(words, size).tolist(), *ends] for size in sizes]


def _batches(sources: list[list[int]], config: ModelConfig) -> Iterator[list[list[int]]]:
    size = max(1, min(BATCH, NUMBERS // (MOST_TOKENS * config.tgt_vocab)))
    for begin in range(0, len(sources), size):
        yield sources[begin : begin + size]


class _Numbers(Protocol):
    """What an original and our model both compute, see `base.Original`."""

    def memory(self, src_ids: torch.Tensor, src_lengths: torch.Tensor) -> torch.Tensor | None: ...

    def log_probs(self, src_ids: torch.Tensor, src_lengths: torch.Tensor, tgt_ids: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class _Ours:
    """Our model."""

    model: Transformer

    def memory(self, src_ids: torch.Tensor, src_lengths: torch.Tensor) -> torch.Tensor:
        return self.model.encode(src_ids, src_lengths)

    def log_probs(self, src_ids: torch.Tensor, src_lengths: torch.Tensor, tgt_ids: torch.Tensor) -> torch.Tensor:
        return self.model(src_ids, src_lengths, tgt_ids).log_softmax(-1)  # type: ignore[no-any-return]


def _compare_numbers(
    original: Original, model: Transformer, batches: Sequence[Batch], found: Comparison
) -> tuple[list[str], float]:
    """What is wrong with encoder states and log-probabilities, and the limit of the latter.

    Where fp32 is further apart than LIMIT, fp64 decides whether that is rounding: there both must be the same.
    """
    config = model.config
    found.memory, found.log_probs = _apart(_Ours(model), original, batches, config)
    names = ("encoder states", "log-probabilities")
    values, limits, failures = (found.memory or 0.0, found.log_probs), [LIMIT, LIMIT], []
    if not all(value <= LIMIT for value in values) and (exact := original.in_double()):
        with KeepDouble():
            memory, found.rounding = _apart(original, exact, batches, config)
            same = _apart(_Ours(copy.deepcopy(model).double()), exact, batches, config)
        limits = [max(LIMIT, ROUNDING * own) for own in (memory or 0.0, found.rounding)]
        for name, value in zip(names, same, strict=True):
            if not (value or 0.0) <= LIMIT:
                failures.append(f"{name} differ by {value:.1e} in fp64 too")
    for name, value, limit in zip(names, values, limits, strict=True):
        if not value <= limit:
            failures.insert(0, f"{name} differ by {value:.1e}, more than {limit:.1e}")
    return failures, limits[1]


class KeepDouble(TorchFunctionMode):
    """Keep fp64 where code casts to fp32 for more precision than fp16: T5's norms, softmax in other models."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a PyTorch function without casts from fp64 to fp32."""
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if function is torch.Tensor.float:
                return args[0].clone()  # the caller may write to it
            args = [torch.float64 if each is torch.float32 else each for each in args]
            kwargs = {name: torch.float64 if each is torch.float32 else each for name, each in kwargs.items()}
        return function(*args, **kwargs)


@torch.inference_mode()
def _apart(
    ours: _Numbers, theirs: _Numbers, batches: Sequence[Batch], config: ModelConfig
) -> tuple[float | None, float]:
    """Largest differences of encoder states and of teacher-forced log-probabilities, along random targets."""
    memory, largest = None, 0.0
    for batch in batches:
        src_ids, lengths = torch.from_numpy(batch.src_ids).long(), torch.from_numpy(batch.src_lengths)
        real = torch.arange(src_ids.shape[1]) < lengths[:, None]
        states = theirs.memory(src_ids, lengths), ours.memory(src_ids, lengths)
        if states[0] is not None and states[1] is not None:
            memory = _larger(memory or 0.0, _largest(states[1][real], states[0][real]))
        generator = torch.Generator().manual_seed(int(lengths.sum()))
        size = min(src_ids.shape[1] + 2, config.max_positions)
        targets = torch.randint(config.tgt_vocab, (len(src_ids), size), generator=generator)
        # Some originals mask what is padding, and to some the start is no token.
        targets[(targets == config.pad_id) | (targets == config.start_id)] = config.eos_id
        targets[:, 0] = config.start_id
        log_probs = (side.log_probs(src_ids, lengths, targets) for side in (ours, theirs))
        largest = _larger(largest, _largest(*log_probs))
    return memory, largest


def _larger(a: float, b: float) -> float:
    """The larger number; NaN if one is, which Python's max may lose."""
    return float(np.maximum(a, b))


def _largest(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference, leaving out pairs that are both masked (below -1e6); NaN if a value is NaN."""
    difference = (a - b).abs()
    return float(torch.where((a < -1e6) & (b < -1e6), 0, difference).max()) if len(a) else 0.0


@dataclass(frozen=True)
class _Sides:
    """What is compared."""

    original: Original
    model: Transformer
    tokenizers: Tokenizers
    decoding: Mapping[str, Any]
    """The defaults of the source."""


@dataclass
class _Outputs:
    """How many outputs of a search were equal; none were compared if the original has no such search."""

    equal: int = 0
    total: int = 0
    ties: int = 0
    failures: list[str] = field(default_factory=list)


def _compare_tokens(sides: _Sides, sources: list[list[int]], beams: int, limit: float) -> _Outputs:
    """Outputs of a search; what is within `limit` is equally good."""
    original, model, decoding, found = sides.original, sides.model, sides.decoding, _Outputs()
    most = min(model.config.max_positions - 2, MOST_STEPS, decoding.get("max_tokens", MOST_STEPS))
    shortest = min(decoding.get("min_tokens", 0), most)
    decoding = {name: value for name, value in decoding.items() if name not in UNLIKE}
    options = over_defaults(decoding, {"beams": beams, "max_tokens": most, "min_tokens": shortest})
    with EagerEngine(model) as engine:
        for some in _batches(sources, model.config):
            batch = make_batch(some, model.config.pad_id)
            src_ids, lengths = torch.from_numpy(batch.src_ids).long(), torch.from_numpy(batch.src_lengths)
            theirs = original.generate(src_ids, lengths, beams, most)
            if theirs is None:
                return _Outputs()
            gaps = np.full(len(theirs), np.inf)
            ours = decode(engine, batch, options, on_step=partial(_note_gaps, gaps, beams))
            for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
                found.total, found.equal = found.total + 1, found.equal + (a[0].ids == b)
                if a[0].ids == b:
                    text, here = original.text(b), sides.tokenizers.target_text(b)
                    if text is not None and here.strip() != text.strip():
                        found.failures.append(f"ids {b} are {text!r} there and {here!r} here")
                elif gaps[i] <= limit or _tie(model, src_ids[i : i + 1, : lengths[i]], a[0].ids, b, limit):
                    found.ties += 1
                else:
                    found.failures.append(f"beams {beams}, source {some[i]}: {b} there, {a[0].ids} here")
    return found


def _note_gaps(gaps: Floats64, beams: int, step: Step) -> None:
    """Record each sentence's smallest gap between neighbouring candidates: how near it came to another decision."""
    values = step.values[:, : beams + 1]
    if values.shape[1] > 1:
        with np.errstate(invalid="ignore"):
            least = np.nan_to_num(values[:, :-1] - values[:, 1:], nan=np.inf).min(1)
        gaps[step.sentences] = np.minimum(gaps[step.sentences], least)


@torch.inference_mode()
def _tie(model: Transformer, src_ids: torch.Tensor, ours: list[int], theirs: list[int], limit: float) -> bool:
    """Whether the first different tokens of two outputs are equally good."""
    config = model.config
    scores = []
    for ids in (ours, theirs):
        tokens = torch.tensor([[config.start_id, *ids, config.eos_id]])
        log_probs = model(src_ids, torch.tensor([src_ids.shape[1]]), tokens[:, :-1]).log_softmax(-1)
        scores.append(log_probs[0].gather(1, tokens[0, 1:, None])[:, 0])
    first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return abs(float(scores[0][first] - scores[1][first])) <= limit
