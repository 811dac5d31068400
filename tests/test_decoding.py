"""Beam search and sampling: equal to brute force and to plain loops that follow the document."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tformer_deploy.base.errors import ConfigError, EngineError, LimitError
from tformer_deploy.decoding import Batch, DecodeOptions, Hypothesis, Step, Trie, decode, sampling
from tformer_deploy.decoding.sampling import draw, uniforms
from tformer_deploy.decoding.scoring import score as score_targets
from tformer_deploy.engines.eager import EagerEngine

from .conftest import random_model, small_config, variant_engine
from .params import long_but
from .plain_decoding import (
    EOS,
    VOCAB,
    Output,
    Sentence,
    TableEngine,
    Tokens,
    coarse,
    filtered,
    make_batch,
    mix,
    smooth,
    uniform,
)

pytestmark = pytest.mark.filterwarnings("error")


def make_trie(allowed: Sequence[Tokens] | None) -> Trie | None:
    return None if allowed is None else Trie(allowed)


def decode_all(engine: TableEngine, sentences: Sequence[Sentence]) -> list[list[Hypothesis]]:
    batch = make_batch([s.source for s in sentences], [s.number for s in sentences], [s.prefix for s in sentences])
    return decode(engine, batch, sentences[0].options, make_trie(sentences[0].allowed), strict=False)


def same(found: Sequence[Hypothesis], expected: Sequence[Output]) -> bool:
    return len(found) == len(expected) and all(b.matches(a) for a, b in zip(found, expected, strict=True))


# Beam search against brute force

BRUTE: list[dict[str, Any]] = [
    {"max_tokens": 5, "beams": 1400, "n_best": 1400},
    *({"length_penalty": a, "length_norm": norm} for a in (-1.3, 0, 0.6, 2) for norm in ("power", "gnmt")),
    {"coverage_penalty": 0.3, "align": True},
    {"min_tokens": 3, "max_tokens": 3},
    {"min_ratio": 1.4, "max_ratio": 1.7},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.7, "coverage_penalty": 2.0, "length_penalty": 0.0},
    *({"no_repeat_ngram": n} for n in (1, 2, 3)),
    {"suppress": (0, 2)},
    {"suppress": (EOS,)},
    {"bad_words": ((0,), (1, 2), (2, 2, 1))},
    {"bad_words": ((3, EOS), (1, 1)), "no_repeat_ngram": 3, "first_ids": (1,)},
    {"end_ids": (1, EOS)},
    {"end_ids": (2,), "min_tokens": 2},
    {"first_ids": (3,), "no_repeat_ngram": 1},
    {"first_ids": (3, 1), "first_adds_zero": True, "length_penalty": 2.0},
    {"forced_end": True, "max_tokens": 3},
    {"first_ids": (2, 2), "suppress": (2,), "repetition_penalty": 1.2, "no_repeat_ngram": 2, "min_tokens": 4},
]
ALLOWED = [(), (1,), (1, 2), (0, 0, 0), (3, 2, 1, 0), (3, 2, 2, 1, 1, 1, 1)]


@pytest.mark.parametrize("changes", BRUTE, ids=str)
def test_a_beam_as_wide_as_all_hypotheses_finds_the_best(changes: dict[str, Any]) -> None:
    """With every stop rule: fewer outputs than beams have ended before all have."""
    sources = [(5, 6, 7), (9,)]
    for stop, prefix, allowed in [("count", (), None), ("exact", (1,), None), ("estimate", (), ALLOWED)]:
        options = DecodeOptions(**{"max_tokens": 4, "beams": 350, "n_best": 350, "stop": stop, **changes})
        if set(prefix) & set(options.end_ids):
            prefix = ()
        engine = TableEngine(3)
        sentences = [Sentence(engine, source, options, prefix=prefix, allowed=allowed) for source in sources]
        for found, sentence in zip(decode_all(engine, sentences), sentences, strict=True):
            expected = sorted(sentence.every_output(), key=lambda output: -output.value)
            assert expected or "suppress" in changes
            assert same(found, expected or sentence.beam())


# Everything against plain loops


class Chooser:
    """Random options and sentences. From a seed, as hypothesis prefers the simplest, where search has little to do."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def one(self, *values: Any) -> Any:
        return values[self.rng.integers(len(values))]

    def several(self, values: Sequence[Any]) -> list[Any]:
        """Up to three of them."""
        return [values[i] for i in self.rng.choice(len(values), self.rng.integers(4), replace=False)]

    def seldom(self, usual: Any, *others: Any, chance: float = 0.25) -> Any:
        return self.one(*others) if self.rng.random() < chance else usual

    def tokens(self, longest: int, without: Tokens = ()) -> Tokens:
        """Some words, the end token not among them."""
        words = [v for v in range(VOCAB - 1) if v not in without]
        return tuple(self.rng.choice(words, self.rng.integers(longest + 1)).tolist())

    def common(self) -> dict[str, Any]:
        max_tokens = self.one(9, 8, 7, 6, 5, 3, 1)
        ends = self.one((), (EOS,), (3,), (2, EOS), (0, 1, EOS), (1, 2, 3, EOS))
        rules = (
            {} if self.rng.random() < 0.5 else self.full_rules(ends, max_tokens)
        )  # else the few best tokens are read
        return rules | {
            "max_tokens": max_tokens,
            "min_tokens": self.seldom(0, min(3, max_tokens), max_tokens),
            "max_ratio": self.seldom(0.0, 0.4, 1.5, 2.3),
            "min_ratio": self.seldom(0.0, 0.7, 1.2, 1e300),
            "suppress": self.seldom((), (0,), (1, EOS), (0, 1, 2, 3)),
            "end_ids": ends,
            "align": self.one(True, False),
        }

    def full_rules(self, ends: Tokens, max_tokens: int) -> dict[str, Any]:
        forced_end = self.seldom(False, True)
        return {
            "repetition_penalty": self.seldom(1.0, 1.3, 0.8, chance=0.5),
            "no_repeat_ngram": self.seldom(0, 1, 2, 3, chance=0.5),
            "bad_words": self.seldom((), tuple(self.tokens(n, ends) or (0,) for n in (2, 3)), chance=0.5),
            "first_ids": self.seldom((), self.tokens(2, ends))[: max_tokens - forced_end],
            "first_adds_zero": self.seldom(False, True),
            "forced_end": forced_end,
        }

    def beam_options(self) -> DecodeOptions:
        beams, stop = self.one(1, 2, 3, 4, 6), self.one("count", "estimate", "exact")
        return DecodeOptions(
            beams=beams,
            n_best=int(self.rng.integers(1, beams + 1)),
            length_norm=self.one("power", "gnmt"),
            length_penalty=self.one(-1.5, -0.5, 0.0, 0.6, 1.0, 2.0),
            coverage_penalty=self.seldom(0.0, 0.2, 2.0),
            stop=stop,
            patience=self.one(0.5, 1.0, 1.3, 2.5) if stop == "count" else 1.0,
            **self.common(),
        )

    def sampling_options(self) -> DecodeOptions:
        return DecodeOptions(
            sampling=True,
            n_best=self.one(1, 2, 3, 5),
            temperature=self.one(1.0, 0.3, 2.5),
            top_k=self.seldom(0, 1, 2, 3, 4, VOCAB, VOCAB + 3, chance=0.5),
            top_p=self.seldom(1.0, 0.1, 0.5, 0.95, chance=0.5),
            min_p=self.seldom(0.0, 0.05, math.exp(-0.5), math.exp(-0.25)),  # exactly the difference of coarse scores
            seed=self.one(0, 1, 2**62 + 3),
            **self.common(),
        )

    def sentences(self, options: DecodeOptions, engine: TableEngine | None = None) -> list[Sentence]:
        """A batch."""
        engine = engine or TableEngine(self.one(*range(100)), self.one(smooth, coarse), self.one(8, 8, 7, 5, 2))
        prefixed, allowed = (self.seldom(False, True, chance=0.15) for _ in range(2))
        outputs = [self.tokens(6) for _ in range(self.one(1, 5, 20))] if allowed else None
        first = self.one(0, 77, 10**6)
        sentences = []
        for i in range(self.one(1, 2, 3, 4)):
            source = tuple(self.rng.integers(4, 60, self.one(1, 2, 4, 5)).tolist())
            prefix = self.tokens(3, options.end_ids) if prefixed else ()
            sentences.append(Sentence(engine, source, options, first + i, prefix, outputs))
        return fitting(sentences)


def fitting(sentences: list[Sentence]) -> list[Sentence]:
    """The same, with as many forced tokens as there is room for."""
    options = sentences[0].options
    room = min(sentence.longest for sentence in sentences) - options.forced_end
    options = dataclasses.replace(options, first_ids=options.first_ids[:room])
    left = room - len(options.first_ids)
    return [dataclasses.replace(each, options=options, prefix=each.prefix[:left]) for each in sentences]


seeds = st.integers(0, 2**40)


def check_case(sentences: list[Sentence]) -> None:
    engine, count = sentences[0].engine, len(sentences)
    together = decode_all(engine, sentences)
    for sentence, found in zip(sentences, together, strict=True):
        expected = sentence.samples() if sentence.options.sampling else sentence.beam()
        assert same(found, expected), (found, expected)
    whole = TableEngine(engine.seed, engine.table, engine.limits.tgt_tokens, lists=False)
    assert decode_all(whole, sentences) == together, "best tokens and all tokens must decode alike"
    assert all(whole.asked)
    for sentence, found in zip(sentences, together, strict=True):
        engine.asked.clear()
        assert decode_all(engine, [sentence]) == [found]
        assert sentence.options.sampling or len(engine.asked) == sentence.steps
    if count > 1:
        order = np.random.default_rng(count).permutation(count).tolist()
        assert decode_all(engine, [sentences[i] for i in order]) == [together[i] for i in order]


@settings(max_examples=250)
@given(seeds)
def test_beam_search_equals_plain_loops(seed: int) -> None:
    """In a batch, alone and shuffled; from lists of best tokens and from all log-probabilities."""
    chooser = Chooser(seed)
    check_case(chooser.sentences(chooser.beam_options()))


@settings(max_examples=120)
@given(seeds)
def test_sampling_equals_plain_loops(seed: int) -> None:
    chooser = Chooser(seed)
    with mock.patch.multiple(sampling, _SLICE=chooser.one(1, 3, 64), _BEST=chooser.one(1, 2, 3, 1024)):
        check_case(chooser.sentences(chooser.sampling_options()))


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.7, 2.0])
@pytest.mark.parametrize("length_norm", ["power", "gnmt"])
def test_the_exact_rule_misses_nothing(length_penalty: float, length_norm: Any) -> None:
    early = 0
    for seed in range(12):
        engine = TableEngine(seed)
        options = DecodeOptions(beams=3, n_best=3, stop="exact", length_penalty=length_penalty, length_norm=length_norm)
        sentence = Sentence(engine, (7, 8), options)
        assert same(decode_all(engine, [sentence])[0], sentence.beam(stop=False))
        early += len(engine.asked) < engine.limits.tgt_tokens
    assert early or length_penalty > 1, "it must save steps"


def test_greedy_search_takes_the_best_token_at_every_step() -> None:
    engine = TableEngine(5)
    found = decode(engine, make_batch([(i, 4) for i in range(4, 20)]), DecodeOptions(max_tokens=6))
    for i, [hypothesis] in enumerate(found):
        output: Tokens = ()
        while len(output) < 6 and EOS not in output:
            output = (*output, int(engine.log_probs((4 + i, 4), output).argmax()))
        assert hypothesis.ids == [token for token in output if token != EOS]
        assert hypothesis.finished == (EOS in output) == (hypothesis.end_id == EOS)
    assert not any(engine.asked), "the engine's best tokens are enough"
    assert len({len(hypothesis.ids) for [hypothesis] in found}) > 2


def test_a_free_first_token_stays_in_the_score_of_greedy_search() -> None:
    """Of steps that need no ranking too."""
    engine, options = TableEngine(5), DecodeOptions(first_ids=(3,), first_adds_zero=True, max_tokens=6)
    sentences = [Sentence(engine, (i, 4), options) for i in range(4, 9)]
    for [found], sentence in zip(decode_all(engine, sentences), sentences, strict=True):
        assert same([found], sentence.beam()) and found.score < found.value * len(found.ids)


def test_a_beam_reads_all_tokens_at_the_first_step_only() -> None:
    engine = TableEngine(5, vocab=30)
    options = DecodeOptions(beams=4, max_tokens=7, min_tokens=3, suppress=(7,))
    decode(engine, make_batch([(4,), (5, 6)]), options)
    assert engine.asked == [True] + [False] * (len(engine.asked) - 1)
    assert len(engine.asked) > 3


def test_outputs_are_best_first_and_a_longer_list_begins_with_a_shorter_one() -> None:
    engine, batch = TableEngine(2), make_batch([(4, 5), (6,)])
    lists = [decode(engine, batch, DecodeOptions(beams=4, n_best=n)) for n in (1, 2, 3, 4)]
    for shorter, longer in itertools.pairwise(lists):
        assert [found[:-1] for found in longer] == shorter
    for found in lists[-1]:
        assert len(found) == 4
        assert [h.value for h in found] == sorted((h.value for h in found), reverse=True)


# Ties, limits, dead ends


def flat(rng: np.random.Generator, vocab: int) -> Any:
    return np.full(vocab, -1.5, np.float32)


@pytest.mark.parametrize("lists", [True, False])
def test_equal_values_go_to_the_lower_row_then_the_lower_id(lists: bool) -> None:
    engine, batch = TableEngine(0, flat, positions=3, lists=lists), make_batch([(4,)])
    assert decode(engine, batch, DecodeOptions())[0][0].ids == [0, 0, 0]
    found = decode(engine, batch, DecodeOptions(beams=3, n_best=3, length_penalty=0.0, end_ids=(1,)))[0]
    # First 0, the end token and 2 lead, and 0, 2 and 3 go on. All that leads later continues the first row.
    assert [(h.ids, h.finished, h.value) for h in found] == [
        ([], True, -1.5),
        ([0], True, -3.0),
        ([0, 0, 0], False, -4.5),
    ]
    found = decode(engine, batch, DecodeOptions(beams=3, n_best=3, length_penalty=1.0, end_ids=(1,), patience=9.0))[0]
    assert [(h.ids, h.value) for h in found] == [([], -1.5), ([0], -1.5), ([0, 0, 0], -1.5)], "equal ones: the earlier"


def test_the_limit_of_positions_ends_a_sentence() -> None:
    engine = TableEngine(1, positions=3)
    for changes in ({}, {"beams": 4, "stop": "exact"}, {"sampling": True, "n_best": 5}):
        for [hypothesis, *_] in decode(engine, make_batch([(4,), (5,), (6,)]), DecodeOptions(**changes, min_tokens=50)):
            assert len(hypothesis.ids) + hypothesis.finished == 3, "the shortest length is at most the longest"
    [[hypothesis]] = decode(engine, make_batch([(4,)]), DecodeOptions(suppress=(EOS,)))
    assert len(hypothesis.ids) == 3 and not hypothesis.finished and hypothesis.end_id is None


@pytest.mark.parametrize("ratio", [1e-9, 0.5, 1.5, 1e300])
def test_ratios_count_source_tokens(ratio: float) -> None:
    engine = TableEngine(1, positions=6)
    found = decode(engine, make_batch([(4,), (5,) * 3]), DecodeOptions(max_ratio=ratio, suppress=(EOS,)))
    assert [len(h.ids) for [h] in found] == [max(1, math.floor(min(ratio * n, 6))) for n in (1, 3)]


@pytest.mark.parametrize("changes", [{}, {"beams": 3, "n_best": 3}, {"sampling": True, "n_best": 2}], ids=str)
def test_where_nothing_is_allowed_the_output_so_far_is_returned(changes: dict[str, Any]) -> None:
    """At the first step, in the middle, and at the longest length."""
    engine, batch = TableEngine(4), make_batch([(4, 5), (6,)])
    for found in decode(engine, batch, DecodeOptions(suppress=tuple(range(VOCAB)), **changes)):
        assert all((h.ids, h.score, h.value, h.finished) == ([], 0, 0, False) for h in found)
    for longest in (3, 9):
        options = DecodeOptions(suppress=(EOS,), max_tokens=longest, **changes)
        for found in decode(engine, batch, options, Trie([(1, 2), (1, 3)])):
            assert len(found) == (options.n_best if options.sampling else min(2, options.beams))
            assert all(h.ids in ([1, 2], [1, 3]) and not h.finished and h.score < 0 for h in found)


def broken(rng: np.random.Generator, vocab: int) -> Any:
    return np.where(rng.random(vocab) < 0.7, np.nan, smooth(rng, vocab)).astype(np.float32)


@pytest.mark.parametrize("changes", [{}, {"beams": 3}, {"sampling": True}, {"sampling": True, "top_p": 0.9}], ids=str)
def test_log_probabilities_that_are_no_numbers_are_never_chosen(changes: dict[str, Any]) -> None:
    for seed, lists in itertools.product(range(8), (True, False)):
        engine, batch = TableEngine(seed, broken, lists=lists), make_batch([(4,), (5, 6)])
        found = decode(engine, batch, DecodeOptions(**changes), strict=False)
        assert all(len(h.ids) <= 7 and math.isfinite(h.score) for hypotheses in found for h in hypotheses)


@pytest.mark.parametrize("recipe", long_but(["eager", "fp32-cpu", "trt"], "eager", "fp32-cpu"))
@pytest.mark.parametrize("changes", [{}, {"beams": 3}, {"sampling": True}], ids=str)
def test_log_probabilities_that_are_no_numbers_are_refused(
    recipe: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Of one sentence of a batch, on whatever engine."""
    model = random_model(small_config(share_embeddings="none", max_positions=100)).eval()
    model.src_embedding.weight.data[7] = float("nan")
    engine = EagerEngine(model) if recipe == "eager" else variant_engine(model, tmp_path, recipe)
    with engine:
        fine, bad = (make_batch([(5, 6, 3), (word, 6, 3), (6, 3)], [40, 41, 42]) for word in (8, 7))
        options = DecodeOptions(max_tokens=4, **changes)
        assert len(decode(engine, fine, options)) == 3
        with pytest.raises(EngineError, match="request 42: NaN or infinite log-probabilities at token 1: val"):
            decode(engine, bad, options)
        assert decode(engine, bad, options, strict=False)[1][0].ids == []
        with pytest.raises(EngineError, match="request 42: NaN or infinite log-probabilities at token 1"):
            score_targets(engine, bad, [[5, 6], [5], [9]])


@pytest.mark.parametrize("changes", [{"sampling": True, "n_best": 3}, {"beams": 3}], ids=str)
def test_rows_that_only_fill_up_may_be_no_numbers(changes: dict[str, Any]) -> None:
    """They are fed padding beside others that go on."""
    model = random_model(small_config(share_embeddings="none", eos_id=3)).eval()
    model.tgt_embedding.weight.data[model.config.pad_id] = float("nan")
    batch = make_batch([(5, 6, 3), (8, 6, 3), (6, 3)], (), [(5,), (), (6, 7)])
    with EagerEngine(model) as engine:
        for seed in range(4):
            own = {**changes, "seed": seed} if "sampling" in changes else changes
            options = DecodeOptions(20, end_ids=tuple(range(8, 30)), suppress=(model.config.pad_id,), **own)
            assert decode(engine, batch, options) == decode(engine, batch, options, strict=False)


# Steps


@settings(max_examples=60)
@given(seeds)
def test_steps_tell_the_whole_search(seed: int) -> None:
    """The candidates of every step are enough to do the search again."""
    chooser = Chooser(seed)
    sentences = chooser.sentences(chooser.beam_options())
    options = sentences[0].options
    steps: list[Step] = []
    batch = make_batch([s.source for s in sentences], (), [s.prefix for s in sentences])
    found = decode(sentences[0].engine, batch, options, make_trie(sentences[0].allowed), steps.append, strict=False)
    live: dict[int, list[Tokens]] = {b: [()] for b in range(len(sentences))}
    ended: dict[int, list[tuple[Tokens, float, float]]] = {b: [] for b in live}
    stuck: dict[int, list[Tokens]] = {}
    for t, step in enumerate(steps, 1):
        assert set(step.sentences.tolist()) <= set(live)
        for i, b in enumerate(step.sentences.tolist()):
            sentence, following = sentences[b], []
            rows = zip(step.parents[i], step.tokens[i], step.values[i], step.scores[i], strict=True)
            for rank, (parent, token, value, score) in enumerate(rows):
                output = (*live[b][parent], int(token)) if value > -math.inf else ()
                ends = int(token) in sentence.ends
                if output and rank < options.beams and (ends or t == sentence.longest):
                    ended[b].append((output, float(value), float(score)))
                if output and not ends:
                    following.append(output)
            stuck[b], live[b] = live[b], following[: options.beams]
    for b, sentence in enumerate(sentences):
        best = sorted((sentence.output(*one) for one in ended[b]), key=lambda output: -output.value)
        if best:
            assert same(found[b], best[: options.n_best])
        else:
            assert {tuple(h.ids) for h in found[b]} <= set(stuck[b])


@settings(max_examples=40)
@given(seeds)
def test_steps_tell_every_sample(seed: int) -> None:
    chooser, steps = Chooser(seed), list[Step]()
    sentence = chooser.sentences(chooser.sampling_options())[0]
    [found] = decode(
        sentence.engine,
        make_batch([sentence.source], [sentence.number], [sentence.prefix]),
        sentence.options,
        make_trie(sentence.allowed),
        steps.append,
        strict=False,
    )
    drawn: dict[int, list[tuple[int, float]]] = {m: [] for m in range(len(found))}
    for step in steps:
        assert step.margins is not None and step.samples is not None
        assert step.samples.shape[1] == max(1, (step.samples >= 0).sum()), "ended rows leave at once"
        for m, token, score, margin in zip(
            step.samples[0], step.tokens[0], step.scores[0], step.margins[0], strict=True
        ):
            assert margin >= 0
            if token >= 0:
                drawn[int(m)].append((int(token), float(score)))
    for m, hypothesis in enumerate(found):
        ids = hypothesis.ids + ([hypothesis.end_id] if hypothesis.finished else [])
        assert [token for token, _ in drawn[m]] == ids
        assert not ids or drawn[m][-1][1] == hypothesis.score


# Sampling


def test_the_generator_is_splitmix64() -> None:
    """Known answers: the first outputs of the published generator for the seed 1234567."""
    outputs = [mix(1234567), mix(1234567 + 0x9E3779B97F4A7C15), mix(1234567 + 2 * 0x9E3779B97F4A7C15)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    numbers = np.array([0, 1, 2**40])
    for seed, step in [(0, 0), (1, 3), (2**63 - 1, 511)]:
        expected = [[uniform(seed, n, m, step) for m in range(4)] for n in numbers.tolist()]
        samples = np.tile(np.arange(4, dtype=np.int32), (len(numbers), 1))
        assert uniforms(seed, numbers, samples, step).tolist() == expected


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.4},
    {"temperature": 3.0, "top_k": 3},
    {"top_p": 0.8},
    {"min_p": 0.3, "temperature": 1.7},
    {"top_k": 4, "top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize("changes", FILTERS, ids=str)
def test_tokens_are_drawn_as_often_as_the_filters_say(changes: dict[str, Any]) -> None:
    """Exactly so for evenly spaced numbers; for the generator's, pairs of consecutive tokens by a chi-square test."""
    engine, options = (
        TableEngine(8),
        DecodeOptions(sampling=True, n_best=1000, max_tokens=2, suppress=(EOS,), **changes),
    )
    sentence = Sentence(engine, (5,), options)

    def shares(output: Tokens) -> dict[int, float]:
        weights = filtered(sentence.ruled(output), options)
        return {v: w / sum(weights.values()) for v, w in weights.items()}

    grid = (np.arange(2000)[None] + 0.5) / 2000
    scores = np.array(sentence.ruled(()), np.float32)
    tokens = draw(np.broadcast_to(scores, (1, 2000, VOCAB)), grid, options)[0][0].tolist()
    assert set(tokens) <= set(shares(()))
    assert all(abs(tokens.count(v) - 2000 * share) <= 1 for v, share in shares(()).items())

    counts = Counter(tuple(h.ids) for found in decode(engine, make_batch([(5,)] * 8), options) for h in found)
    expected = {(a, b): 8000 * p * q for a, p in shares(()).items() for b, q in shares((a,)).items()}
    assert set(counts) <= set(expected)
    chi_square = sum((counts[pair] - mean) ** 2 / mean for pair, mean in expected.items())
    freedom = len(expected) - 1
    assert chi_square <= freedom + 4 * math.sqrt(2 * freedom) + 4


def test_a_number_at_an_edge_draws_the_token_behind_it() -> None:
    scores = np.array([-np.inf, -1, -1, -np.inf], np.float32)
    numbers = np.array([[0, 0.4999, 0.5, 1 - 2.0**-53]])
    tokens, margins = draw(np.broadcast_to(scores, (1, 4, 4)), numbers, DecodeOptions(sampling=True))
    assert tokens.tolist() == [[1, 1, 2, 2]]
    assert margins[0, [0, 2, 3]] == pytest.approx([2, 0, 2])
    options = DecodeOptions(sampling=True, min_p=math.exp(-0.5))
    assert draw(np.array([[[-0.5, 0, -0.75]]], np.float32), np.zeros((1, 1)), options)[0] == 0, "at least min_p"


def test_the_last_forced_token_is_forced_in_greedy_search_too() -> None:
    engine, batch = TableEngine(1), make_batch([(4,), (5,)], (), [(0, 0), (1, 1, 1)])
    found = decode(engine, batch, DecodeOptions(max_tokens=6, min_tokens=6))
    assert [h.ids[:n] for [h], n in zip(found, (2, 3), strict=True)] == [[0, 0], [1, 1, 1]]
    assert engine.asked[:3] == [True] * 3 and not engine.asked[-1]


@pytest.mark.parametrize("changes", [{}, {"beams": 3, "n_best": 3}, {"sampling": True, "n_best": 2}], ids=str)
def test_as_much_may_be_forced_as_an_output_may_have(changes: dict[str, Any]) -> None:
    engine, batch = TableEngine(1), make_batch([(4,), (5,)], (), [(1, 2), (0, 0)])
    for found in decode(engine, batch, DecodeOptions(max_tokens=3, first_ids=(3,), **changes)):
        assert [h.ids[0] for h in found] == [3] * len(found) and not any(h.finished for h in found)
    ended = DecodeOptions(max_tokens=4, first_ids=(3,), forced_end=True, min_tokens=4, **changes)
    assert all(h.finished and len(h.ids) == 3 for found in decode(engine, batch, ended) for h in found)


@pytest.mark.parametrize("changes", [{}, {"beams": 3, "n_best": 3}, {"sampling": True, "n_best": 2}], ids=str)
def test_a_forced_end_ends_none_but_allowed_outputs(changes: dict[str, Any]) -> None:
    """An output that the limit cuts off is none of them, so that it is not finished."""
    options = DecodeOptions(max_tokens=3, forced_end=True, **changes)
    whole = decode(TableEngine(4), make_batch([(4, 5), (6,)]), options, Trie([(1, 2)]))
    assert all(h.finished and h.ids == [1, 2] for found in whole for h in found)
    cut = decode(TableEngine(4), make_batch([(4, 5), (6,)]), options, Trie([(1, 2, 3)]))
    assert all(not h.finished and h.ids == [1, 2] for found in cut for h in found)


def test_numbers_of_requests_choose_the_draws() -> None:
    engine, options = TableEngine(6), DecodeOptions(sampling=True, n_best=3)
    sources: list[Tokens] = [(4, 5), (6,), (4, 5), (7, 8, 9)]
    found = decode(engine, make_batch(sources, [10, 11, 12, 13]), options)
    assert found[0] != found[2], "another request, other draws"
    assert decode(engine, make_batch([sources[3], sources[0]], [13, 10]), options) == [found[3], found[0]]
    assert decode(engine, make_batch(sources), options) == decode(engine, make_batch(sources, range(4)), options)
    fewer = decode(engine, make_batch(sources, [10, 11, 12, 13]), dataclasses.replace(options, n_best=2))
    assert fewer == [samples[:2] for samples in found]


def test_the_best_of_one_is_greedy_search() -> None:
    batch = make_batch([(i,) for i in range(4, 12)])
    for table in (smooth, coarse):
        greedy = decode(TableEngine(6, table), batch, DecodeOptions())
        drawn = decode(TableEngine(6, table), batch, DecodeOptions(sampling=True, top_k=1, n_best=2, seed=3))
        assert [[h.ids for h in found] for found in drawn] == [[h.ids] * 2 for [h] in greedy]


@settings(max_examples=100)
@given(seeds)
def test_changes_within_the_margin_do_not_alter_a_draw(seed: int) -> None:
    chooser = Chooser(seed)
    options, table, rng = chooser.sampling_options(), chooser.one(smooth, coarse), chooser.rng
    for _ in range(5):
        vocab, trials = int(rng.integers(1, 8)), 40
        scores, u = table(rng, vocab), rng.random((1, 1))
        [[token]], [[margin]] = draw(scores[None, None], u, options)
        assert (token < 0) == (not np.isfinite(scores).any())
        assert margin >= 0
        # Half of the trials change by nothing or nearly the margin.
        changes = rng.random((trials, vocab))
        changes[: trials // 2] = np.round(changes[: trials // 2])
        changed = (scores + changes * min(margin, 5.0) * 0.999)[None]  # in float64: float32 would round the changes
        if margin > 1e-9:
            assert (draw(changed, np.broadcast_to(u, (1, trials)), options)[0] == token).all()


def test_margins_are_not_needlessly_small() -> None:
    """Of 1000 draws, those near another outcome are few: one in a thousand for a margin of 0.001, or so."""
    rng = np.random.default_rng(0)
    scores = np.stack([smooth(rng, 20) for _ in range(1000)])[:, None]
    for changes in FILTERS:
        margins = draw(scores, rng.random((1000, 1)), DecodeOptions(sampling=True, **changes))[1]
        assert (margins < 1e-3).mean() < 0.02
    assert (draw(scores, rng.random((1000, 1)), DecodeOptions(sampling=True, top_k=1))[1] > 1e-3).mean() > 0.98


@settings(max_examples=30)
@given(seeds)
def test_changes_within_the_margin_do_not_alter_a_draw_of_many(seed: int) -> None:
    """Where many tokens stand near the edge of a nucleus; changes push the sums below and above the draw apart."""
    chooser = Chooser(seed)
    rng, vocab, trials = chooser.rng, 200, 40
    options = DecodeOptions(sampling=True, top_p=chooser.one(0.3, 0.9, 0.95), temperature=chooser.one(1.0, 0.5, 2.0))
    scores = np.float32(chooser.one(0.2, 1.0, 3.0)) * smooth(rng, vocab)
    with mock.patch.object(sampling, "_BEST", chooser.one(20, 150, 1024)):
        for u in rng.random((10, 1, 1)):
            [[token]], [[margin]] = draw(scores[None, None], u, options)
            changes = np.round(rng.random((trials, vocab)))
            changes[:4] = np.arange(vocab) < token + np.array([[0], [1], [0], [1]])
            changes[2:4] = 1 - changes[2:4]
            changed = (scores + changes * min(margin, 5.0) * 0.999)[None]  # in float64: float32 would round the changes
            if margin > 1e-9:
                assert (draw(changed, np.broadcast_to(u, (1, trials)), options)[0] == token).all()


@pytest.mark.parametrize(("deviation", "most"), [(1, 0.55), (2, 0.3), (3, 0.08), (4, 0.01)])
def test_the_edge_of_a_nucleus_seldom_makes_a_margin_small(deviation: float, most: float) -> None:
    """Flat distributions have small margins without `top_p` too: 29, 15, 7 and 2 % of draws; its edge adds little."""
    rng = np.random.default_rng(0)
    scores = rng.normal(0, deviation, (200, 1, 32000)).astype(np.float32)
    margins = draw(scores, rng.random((200, 1)), DecodeOptions(sampling=True, top_p=0.95))[1]
    assert (margins < 2e-5).mean() <= most


# What is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0: must be at least 1"),
        ({"beams": 0}, "beams=0: must be at least 1"),
        ({"n_best": 0}, "n_best=0: must be at least 1"),
        ({"n_best": 3, "beams": 2}, "n_best=3: must be at most beams=2, or used with sampling"),
        ({"min_tokens": -1}, "min_tokens=-1: must be at least 0"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9: must be at most max_tokens=8"),
        ({"first_ids": (1, 2), "max_tokens": 1}, "max_tokens=1: must be at least 2, for first_ids and the forced end"),
        ({"first_ids": (1,), "forced_end": True, "max_tokens": 1}, "max_tokens=1: must be at least 2, for first_ids"),
        ({"max_ratio": -0.5}, "max_ratio=-0.5: must be between 0 and 1e+300"),
        ({"min_ratio": float("nan")}, "min_ratio=nan: must be a finite number"),
        ({"length_penalty": float("inf")}, "length_penalty=inf: must be a finite number"),
        ({"length_penalty": -11}, "length_penalty=-11.0: must be between -10 and 10"),
        ({"length_norm": "gmnt"}, "unknown length_norm 'gmnt': did you mean 'gnmt'"),
        ({"stop": "never"}, "unknown stop 'never'"),
        ({"coverage_penalty": -1}, "coverage_penalty=-1.0: must be between 0 and 1e+06"),
        ({"patience": 0.1, "beams": 4}, "patience=0.1: must be at least 0.125"),
        ({"patience": 2.0, "stop": "exact"}, "patience=2.0: must be 1 unless stop is 'count'"),
        ({"sampling": True, "beams": 2}, "beams=2: must be 1 with sampling: n_best is the number of samples"),
        ({"sampling": True, "temperature": 0}, "temperature=0.0: must be between 0.001 and 1000"),
        ({"sampling": True, "length_norm": "gnmt"}, "length_norm=gnmt: must be power with sampling"),
        ({"sampling": True, "length_penalty": 0}, "length_penalty=0.0: must be 1.0 with sampling"),
        ({"sampling": True, "coverage_penalty": 0.2}, "coverage_penalty=0.2: must be 0.0 with sampling"),
        ({"sampling": True, "stop": "exact"}, "stop=exact: must be count with sampling"),
        ({"sampling": True, "patience": 2.0}, "patience=2.0: must be 1.0 with sampling"),
        ({"sampling": True, "top_k": -1}, "top_k=-1: must be at least 0"),
        ({"sampling": True, "top_p": 0}, "top_p=0.0: must be above 0 and at most 1"),
        ({"sampling": True, "min_p": 1}, "min_p=1.0: must be at least 0 and less than 1"),
        ({"sampling": True, "seed": 2**63}, f"seed={2**63}: must be at least 0 and less than {2**63}"),
        ({"seed": 1}, "seed=1: must be 0 without sampling"),
        ({"temperature": 0.5}, "temperature=0.5: must be 1.0 without sampling"),
        ({"top_p": 0.5}, "top_p=0.5: must be 1.0 without sampling"),
        ({"repetition_penalty": 0}, "repetition_penalty=0.0: must be between 0.001 and 1000"),
        ({"repetition_penalty": 1e39}, "repetition_penalty=1e+39: must be between 0.001 and 1000"),
        ({"no_repeat_ngram": -1}, "no_repeat_ngram=-1: must be at least 0"),
        ({"suppress": (1.5,)}, "suppress=(1.5,): must be a list of whole numbers"),
        ({"beams": 2.0}, "beams=2.0: must be of type int"),
        ({"align": 1}, "align=1: must be of type bool"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        DecodeOptions(**changes)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "prefix", "message"),
    [
        ({"suppress": (VOCAB,)}, (), "token id 5 is outside the target vocabulary of 5"),
        ({"end_ids": (-1,)}, (), "token id -1 is outside"),
        ({"first_ids": (9,)}, (), "token id 9 is outside"),
        ({}, (7,), "token id 7 is outside"),
        ({}, (1, EOS), "a forced token is an end token"),
        ({"first_ids": (2,), "end_ids": (2,)}, (), "a forced token is an end token"),
        (
            {"max_tokens": 2},
            (1, 2, 3),
            "3 forced tokens do not fit into 2, the most that max_tokens, max_ratio and the m",
        ),
        ({"max_tokens": 3, "first_ids": (0,)}, (1, 2, 3), "4 forced tokens do not fit into 3"),
        ({"max_tokens": 3, "forced_end": True}, (1, 2, 3), "3 forced tokens and the forced end do not fit into 3"),
        ({"max_ratio": 2.0}, (1, 2, 3), "3 forced tokens do not fit into 2"),
        ({}, (1,) * 8, "8 forced tokens do not fit into 7"),
        ({"beams": 5000}, (), "5000 beams exceed the engine's limit of 4096: use fewer"),
        ({"sampling": True, "n_best": 5000}, (), "5000 samples exceed the engine's limit of 4096: use fewer"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_the_model_are_refused(changes: dict[str, Any], prefix: Tokens, message: str) -> None:
    batch: Batch = make_batch([(4,)], (), [prefix])
    with pytest.raises(LimitError) as error:
        decode(TableEngine(), batch, DecodeOptions(**changes))
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
