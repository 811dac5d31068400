"""docs/decoding.md a second time: plain loops over tuples, one sentence, no cache. And an engine that is a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from tformer_deploy.decoding import Batch, DecodeOptions
from tformer_deploy.engines.base import Floats, Ints, Limits, Scores, check_request, check_step
from tformer_deploy.model.config import ModelConfig

EOS, VOCAB = 4, 5
Tokens = tuple[int, ...]


def smooth(rng: np.random.Generator, vocab: int) -> Floats:
    """Log-probabilities of which no two are equal."""
    x = rng.normal(0, 1.5, vocab)
    return np.asarray(x - np.log(np.exp(x).sum()), np.float32)


def coarse(rng: np.random.Generator, vocab: int) -> Floats:
    """Multiples of 1/4, of which many and their sums are equal, and some -inf."""
    x = rng.integers(1, 7, vocab) / -4
    return np.where(rng.random(vocab) < 0.15, -np.inf, x).astype(np.float32)


Table = Callable[[np.random.Generator, int], Floats]


@dataclass
class TableState:
    sources: list[Tokens]
    width: int
    outputs: list[Tokens]
    """Of every row, bos left out."""
    positions: list[int]
    """Of every sentence."""
    rows: int = 1


class TableEngine:
    """Log-probabilities and attention are random functions of the source and the output so far."""

    attention = admits = True
    precision = "fp32"

    def __init__(
        self, seed: int = 0, table: Table = smooth, positions: int = 7, lists: bool = True, vocab: int = VOCAB
    ) -> None:
        """Without `lists` it announces no best tokens, so that every step must ask for all."""
        self.config = ModelConfig(
            src_vocab=60, tgt_vocab=vocab, share_embeddings="none", pad_id=1, bos_id=0, eos_id=EOS, max_positions=64
        )
        self.limits = Limits(batch=64, src_tokens=16, tgt_tokens=positions, beams=4096)
        self.seed, self.table, self.lists, self.attention = seed, table, lists, True
        self._log_probs: dict[tuple[Tokens, Tokens], Floats] = {}
        self._looks: dict[tuple[Tokens, Tokens], Floats] = {}
        self.asked: list[bool] = []
        """Whether each step was asked for all log-probabilities."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *why: object) -> None: ...

    def log_probs(self, source: Tokens, output: Tokens) -> Floats:
        key = source, output
        if key not in self._log_probs:
            rng = np.random.default_rng([self.seed, *source, 99, *output])
            self._log_probs[key] = self.table(rng, self.config.tgt_vocab)
        return self._log_probs[key]

    def looks(self, source: Tokens, output: Tokens) -> Floats:
        """Attention, in quarters so that some are equal or 0."""
        key = source, output
        if key not in self._looks:
            rng = np.random.default_rng([self.seed, *source, 98, *output])
            self._looks[key] = (rng.integers(0, 4, len(source)) / 4).astype(np.float32)
        return self._looks[key]

    def encode(self, src_ids: Ints, src_lengths: Ints, outlook: Any = None) -> TableState:
        check_request(src_ids, src_lengths, self.config, self.limits)
        sources = [tuple(ids[:n].tolist()) for ids, n in zip(src_ids, src_lengths, strict=True)]
        return TableState(sources, src_ids.shape[1], [()] * len(sources), [0] * len(sources))

    def admit(self, state: TableState, src_ids: Ints, src_lengths: Ints, outlook: Any = None) -> None:
        new = self.encode(src_ids, src_lengths)
        state.sources += new.sources
        state.outputs += new.outputs * state.rows
        state.positions += new.positions
        state.width = max(state.width, new.width)

    def best(self, beams: int, state: Any = None) -> int:
        return min(2 * beams - 1, self.config.tgt_vocab) if self.lists else 0

    def step(self, tokens: Ints, state: TableState, full: bool = False, attention: bool = False) -> Scores:
        assert tokens.dtype == np.int32 and tokens.shape == (len(state.sources), state.rows)
        check_step(state.rows, max(state.positions), self.limits)
        for i, token in enumerate(tokens.ravel().tolist()):
            if state.positions[i // state.rows]:
                state.outputs[i] = (*state.outputs[i], token)
            else:
                assert token == self.config.start_id
        state.positions = [position + 1 for position in state.positions]
        self.asked.append(full)
        rows = [(state.sources[i // state.rows], output) for i, output in enumerate(state.outputs)]
        log_probs = np.array([self.log_probs(*row) for row in rows]).reshape(*tokens.shape, -1)
        ids = np.argsort(-log_probs, axis=2, kind="stable")[:, :, : max(1, self.best(state.rows))].astype(np.int32)
        looked = np.zeros((len(rows), state.width), np.float32)
        if attention:
            for row, (source, output) in zip(looked, rows, strict=True):
                row[: len(source)] = self.looks(source, output)
        return Scores(
            ids,
            np.take_along_axis(log_probs, ids, 2),
            log_probs if full else None,
            looked.reshape(*tokens.shape, -1) if attention else None,
        )

    def reorder(self, state: TableState, parents: Ints, sentences: Ints | None = None) -> None:
        kept = np.arange(len(state.sources)) if sentences is None else sentences
        assert (parents // state.rows == kept[:, None]).all(), "a row moved to another sentence"
        state.sources, state.positions = ([values[i] for i in kept] for values in (state.sources, state.positions))
        state.outputs = [state.outputs[i] for i in parents.ravel()]
        state.rows = parents.shape[1]

    def cross_keys_values(self, state: TableState) -> list[Floats]:
        return []

    def layers(self, src_ids: Ints, src_lengths: Ints, tgt_ids: Ints) -> dict[str, Floats]:
        return {}


def make_batch(sources: Sequence[Tokens], numbers: Sequence[int] = (), prefixes: Sequence[Tokens] = ()) -> Batch:
    ids = np.full((len(sources), max(map(len, sources))), 1, np.int32)
    for row, source in zip(ids, sources, strict=True):
        row[: len(source)] = source
    return Batch(ids, np.array([len(source) for source in sources], np.int32), numbers, prefixes)


@dataclass
class Output:
    """What the document says of one output; compares with a `Hypothesis`."""

    ids: Tokens
    score: float
    value: float
    finished: bool
    end_id: int | None
    alignment: list[int] = field(default_factory=list)

    def matches(self, found: Any) -> bool:
        return (
            (self.ids, self.finished, self.end_id, self.alignment)
            == (tuple(found.ids), found.finished, found.end_id, found.alignment)
            and math.isclose(self.score, found.score, rel_tol=0, abs_tol=1e-12)
            and math.isclose(self.value, found.value, rel_tol=0, abs_tol=1e-12)
        )


@dataclass
class Sentence:
    """One source and what applies to it."""

    engine: TableEngine
    source: Tokens
    options: DecodeOptions
    number: int = 0
    prefix: Tokens = ()
    allowed: Sequence[Tokens] | None = None
    steps: int = 0
    """How many `beam` took."""

    def __post_init__(self) -> None:
        options, size = self.options, len(self.source)
        self.ends = options.end_ids or (EOS,)
        self.forced = options.first_ids + self.prefix
        limits = [options.max_tokens, self.engine.limits.tgt_tokens]
        if options.max_ratio:
            limits.append(math.floor(options.max_ratio * size))
        self.longest = max(1, min(limits))
        self.shortest = min(self.longest, max(options.min_tokens, math.floor(options.min_ratio * size)))

    def plain(self, output: Tokens) -> list[float]:
        return list(map(float, self.engine.log_probs(self.source, output)))

    def ruled(self, output: Tokens) -> list[float]:
        """Rules 1 to 7."""
        options, step = self.options, len(output) + 1
        if options.forced_end and step == self.longest:
            complete = self.allowed is None or output[len(self.forced) :] in self.allowed
            return [0.0 if v in self.ends and complete else -math.inf for v in range(len(self.plain(output)))]
        if step <= len(self.forced):
            if options.first_adds_zero and step <= len(options.first_ids):
                return [0.0 if v == self.forced[step - 1] else -math.inf for v in range(len(self.plain(output)))]
            return [x if v == self.forced[step - 1] else -math.inf for v, x in enumerate(self.plain(output))]
        size = options.no_repeat_ngram
        grams = {output[i : i + size] for i in range(len(output) - size + 1)} if size else set()
        free = output[len(self.forced) :]
        scores = []
        for v, x in enumerate(self.plain(output)):
            if v in output:
                x = float(np.float32(x) * np.float32(options.repetition_penalty))
            forbidden = v in options.suppress or (v in self.ends and step < self.shortest)
            forbidden |= bool(size) and (*output, v)[-size:] in grams
            forbidden |= any((*output, v)[-len(words) :] == words for words in options.bad_words)
            if self.allowed is not None:
                continues = any(one[: len(free) + 1] == (*free, v) for one in self.allowed)
                forbidden |= not (continues or (v in self.ends and free in self.allowed))
            scores.append(-math.inf if forbidden else x)
        return scores

    def norm(self, n: int) -> float:
        return math.pow(n if self.options.length_norm == "power" else (5 + n) / 6, self.options.length_penalty)

    def output(self, tokens: Tokens, value: float, score: float) -> Output:
        """An output whose tokens may have an end token behind them."""
        end = tokens[-1] if tokens and tokens[-1] in self.ends else None
        ids = tokens if end is None else tokens[:-1]
        looks = [self.engine.looks(self.source, tokens[:i]).tolist() for i in range(len(tokens))]
        if not self.options.sampling:
            value /= self.norm(max(1, len(tokens)))
            if self.options.coverage_penalty:
                covered = [sum(look[s] for look in looks) for s in range(len(self.source))]
                logs = 0.0
                for c in covered:
                    logs += math.log(min(max(c, 1e-10), 1))
                value += self.options.coverage_penalty * logs
        align = [look.index(max(look)) for look in looks[: len(ids)]] if self.options.align else []
        return Output(ids, score, value, end is not None, end, align)

    def every_output(self, tokens: Tokens = (), value: float = 0.0, score: float = 0.0) -> Iterator[Output]:
        """All that the rules allow, by brute force."""
        plain = self.plain(tokens)
        for v, x in enumerate(self.ruled(tokens)):
            if x > -math.inf:
                more = (*tokens, v), value + x, score + plain[v]
                if v in self.ends or len(more[0]) == self.longest:
                    yield self.output(*more)
                else:
                    yield from self.every_output(*more)

    def beam(self, stop: bool = True) -> list[Output]:
        """Beam search; without `stop`, to the longest length."""
        width = self.options.beams
        live: list[tuple[Tokens, float, float]] = [((), 0.0, 0.0)]
        kept: list[Output] = []
        ended = 0
        for t in range(1, self.longest + 1):
            candidates = []
            for r, (output, value, score) in enumerate(live):
                plain = self.plain(output)
                for v, x in enumerate(self.ruled(output)):
                    if x > -math.inf:
                        candidates.append((-(value + x), r, -x, v, (*output, v), score + plain[v]))
            candidates.sort()
            for value, _, _, v, output, score in candidates[:width]:
                if v in self.ends or t == self.longest:
                    kept.append(self.output(output, -value, score))
                    ended += 1
            kept = sorted(kept, key=lambda one: -one.value)[:width]
            before = live
            live = [(output, -value, score) for value, _, _, v, output, score in candidates if v not in self.ends]
            live = live[:width]
            if t == self.longest or not live or (stop and self.stops(t, live, kept, ended)):
                break
        self.steps = t
        if not kept:
            kept = sorted((self.output(*row) for row in before), key=lambda one: -one.value)
        return kept[: self.options.n_best]

    def stops(self, t: int, live: list[tuple[Tokens, float, float]], kept: list[Output], ended: int) -> bool:
        options = self.options
        if options.stop == "count":
            return ended >= math.floor(options.patience * options.beams + 0.5)
        n = t
        if options.stop == "exact":
            n = self.longest if options.length_penalty > 0 else t + 1
        return len(kept) == options.beams and max(row[1] for row in live) / self.norm(n) <= kept[-1].value

    def samples(self) -> list[Output]:
        return [self.sample(m) for m in range(self.options.n_best)]

    def sample(self, m: int) -> Output:
        output: Tokens = ()
        score = 0.0
        while len(output) < self.longest and not (output and output[-1] in self.ends):
            token = self.token(self.ruled(output), uniform(self.options.seed, self.number, m, len(output)))
            if token is None:
                break
            score += self.plain(output)[token]
            output = (*output, token)
        return self.output(output, score, score)

    def token(self, scores: list[float], u: float) -> int | None:
        weights = filtered(scores, self.options)
        if not weights:
            return None
        last = 0.0
        for w in weights.values():
            last += w
        target, c = min(u * last, math.nextafter(last, 0)), 0.0
        for v, w in weights.items():
            c += w
            if c > target:
                return v
        raise AssertionError("the last one is above")


def filtered(scores: list[float], options: DecodeOptions) -> dict[int, float]:
    """Weights of the tokens that temperature, top_k, top_p and min_p leave, in the order of their ids."""
    x = {v: score / options.temperature for v, score in enumerate(scores)}
    best = sorted(x, key=lambda v: (-x[v], v))
    if options.top_k:
        best = best[: options.top_k]
    highest = x[best[0]]
    if highest == -math.inf:
        return {}
    w = {v: math.exp(x[v] - highest) for v in best}
    if options.top_p < 1:
        before, kept, total = 0.0, [], 0.0
        for v in sorted(best):
            total += w[v]
        for v in best:
            if not before < options.top_p * total:
                break
            kept.append(v)
            before += w[v]
        best = kept
    if options.min_p:
        best = [v for v in best if x[v] - highest >= math.log(options.min_p)]
    return {v: w[v] for v in sorted(best) if w[v] > 0}


def mix(z: int) -> int:
    """One output of SplitMix64."""
    z = (z + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def uniform(seed: int, request: int, sample: int, step: int) -> float:
    return (mix(mix(mix(mix(seed) ^ request) ^ sample) ^ step) >> 11) * 2.0**-53
