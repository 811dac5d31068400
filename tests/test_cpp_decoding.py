"""The search of libtformer against Python's, over the same tables: tokens, order, sums and values to the last bit."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tformer_deploy.base.errors import TformerError
from tformer_deploy.decoding import DecodeOptions, Hypothesis, Step, decode, over_defaults, score

from .cpp_programs import Talk, program
from .plain_decoding import EOS, VOCAB, Sentence, TableEngine, Tokens, make_batch, smooth
from .test_decoding import ALLOWED, Chooser, fitting, make_trie

seeds = st.integers(0, 2**40)


@pytest.fixture(scope="module")
def table() -> Iterator[Talk]:
    with Talk(program("decode_table")) as talk:
        yield talk


def bits(value: float) -> int:
    return int(struct.unpack("<Q", struct.pack("<d", value))[0])


def shown(found: Sequence[Sequence[Hypothesis]]) -> list[Any]:
    return [
        [
            [h.ids, bits(h.score), h.finished, bits(h.value), h.alignment, -1 if h.end_id is None else h.end_id]
            for h in sentence
        ]
        for sentence in found
    ]


def shown_step(step: Step) -> list[list[int]]:
    """What a step found, sentence by sentence: a beam's candidates that are possible, or tokens that were drawn."""
    rows = []
    for i, b in enumerate(step.sentences.tolist()):
        for n, token in enumerate(step.tokens[i].tolist()):
            rank = n if step.samples is None else int(step.samples[i, n])
            if token >= 0 and (step.samples is not None or step.values[i, n] > -np.inf):
                value, plain = float(step.values[i, n]), float(step.scores[i, n])
                rows.append([b, int(step.parents[i, n]), token, bits(value), bits(plain), rank])
    return rows


def needed(step: list[list[int]], options: DecodeOptions) -> list[list[int]]:
    """Of a beam's candidates, the first K and the first K that go on; C++ does not list all others."""
    if options.sampling:
        return step
    found = []
    for b in sorted({row[0] for row in step}):
        own = [row[:-1] for row in step if row[0] == b]
        found += own[: options.beams]
        found += [row for row in own if row[2] not in options.ends(EOS)][: options.beams]
    return found


def options_of(options: DecodeOptions) -> dict[str, Any]:
    return dataclasses.asdict(options)


def in_cpp(table: Talk, engine: TableEngine, case: Mapping[str, Any]) -> Any:
    """What C++ finds, its questions answered by the engine's table."""
    table.send(
        {
            "vocab": engine.config.tgt_vocab,
            "eos": EOS,
            "positions": engine.limits.tgt_tokens,
            "lists": engine.lists,
            "strict": False,
            "allowed": None,
            **case,
        }
    )
    while "source" in (line := table.line()):
        key = tuple(line["source"]), tuple(line["output"])
        table.send(engine.log_probs(*key).tobytes() + engine.looks(*key).tobytes())
    return line


def check_case(table: Talk, sentences: Sequence[Sentence], engine: TableEngine) -> None:
    options, allowed = sentences[0].options, sentences[0].allowed
    sources, prefixes = [s.source for s in sentences], [s.prefix for s in sentences]
    numbers = [s.number for s in sentences]
    steps: list[Step] = []
    engine.asked.clear()
    batch = make_batch(sources, numbers, prefixes)
    expected = decode(engine, batch, options, make_trie(allowed), steps.append, strict=False)
    case = {"options": options_of(options), "sources": sources, "numbers": numbers, "prefixes": prefixes}
    found = in_cpp(table, engine, {**case, "allowed": allowed})
    assert found.get("found") == shown(expected), found
    assert found["asked"] == engine.asked
    for ours, theirs in zip(found["steps"], steps, strict=True):
        assert needed(ours, options) == needed(shown_step(theirs), options)


@pytest.mark.parametrize("options", [Chooser.beam_options, Chooser.sampling_options], ids=["beams", "samples"])
@settings(max_examples=300)
@given(seed=seeds)
def test_searches(options: Callable[[Chooser], DecodeOptions], table: Talk, seed: int) -> None:
    """Greedy search is a beam of one."""
    chooser = Chooser(seed)
    sentences = chooser.sentences(options(chooser))
    engine = sentences[0].engine
    check_case(table, sentences, engine)
    check_case(table, sentences, TableEngine(engine.seed, engine.table, engine.limits.tgt_tokens, lists=False))


@settings(max_examples=200)
@given(seeds)
def test_searches_that_join_each_other(table: Talk, seed: int) -> None:
    """Each finds what Python finds alone; one that leaves on its way harms nobody."""
    chooser = Chooser(seed)
    requests, expected = [], []
    engine = chooser.sentences(chooser.beam_options())[0].engine
    for _ in range(chooser.one(2, 3, 5)):
        options = chooser.one(chooser.beam_options, chooser.sampling_options)()
        sentences = chooser.sentences(options, engine)
        options = sentences[0].options
        sides = [s.source for s in sentences], [s.number for s in sentences], [s.prefix for s in sentences]
        allowed = sentences[0].allowed
        expected.append(shown(decode(engine, make_batch(*sides), options, make_trie(allowed), strict=False)))
        named = dict(zip(("sources", "numbers", "prefixes"), sides, strict=True))
        requests.append({"options": options_of(options), "allowed": allowed, **named})
    begins = [chooser.one(0, 0, 1, 2, 5, 9) for _ in requests]
    retire = {"0": begins[0] + chooser.one(1, 2, 4)} if chooser.one(True, False) else {}
    found = in_cpp(table, engine, {"requests": requests, "begins": begins, "retire": retire})["found"]
    assert found[1:] == expected[1:]
    assert found[0] == expected[0] or (found[0] is None and retire)


@pytest.mark.parametrize("fault", ["admit", "admit, lost", "reorder", "step"])
def test_an_error_of_the_engine_ends_all_that_run(table: Talk, fault: str) -> None:
    """But where nobody could join, and the state is as it was. Others may join then."""
    engine, options, sources = TableEngine(4), DecodeOptions(min_tokens=4), [(4, 5), (6,), (7, 8, 9)]
    case = {"options": options_of(options), "allowed": None, "numbers": [], "prefixes": []}
    expected: list[Any] = [shown(decode(engine, make_batch([each]), options, strict=False)) for each in sources]
    found = in_cpp(table, engine, {"requests": [{**case, "sources": [each]} for each in sources], "fault": fault})
    if fault != "admit":
        expected[:2] = ["the engine stopped"] * 2
    if fault == "reorder":
        expected[0] = None  # it was to leave
    assert found == {"thrown": "the engine stopped", "found": expected}


@pytest.mark.long
@settings(max_examples=20)
@given(seeds)
@example(seed=166435649)  # a token that is suppressed twice
def test_a_larger_vocabulary_long_outputs_and_wide_beams(table: Talk, seed: int) -> None:
    """Attention of many steps is summed, and heaps are full."""
    chooser = Chooser(seed)
    engine = LongEngine(seed % 1000)
    changes = {
        "coverage_penalty": chooser.one(0.0, 0.3),
        "max_tokens": chooser.one(12, 40),
        "min_tokens": chooser.one(0, 12),
        "align": True,
    }
    sentence = chooser.sentences(chooser.beam_options())[0]
    beams = chooser.one(1, 5, 33)
    options = dataclasses.replace(sentence.options, **changes, beams=beams, n_best=beams, patience=1.0)
    sources: list[Tokens] = [(4,), (5, 6), (7, 8, 9)]
    check_case(table, fitting([Sentence(engine, source, options, i) for i, source in enumerate(sources)]), engine)
    changes["coverage_penalty"] = 0.0
    drawn = dataclasses.replace(chooser.sampling_options(), **changes, top_k=chooser.one(0, 10, 150), top_p=0.9)
    check_case(table, fitting([Sentence(engine, source, drawn, i) for i, source in enumerate(sources)]), engine)


class LongEngine(TableEngine):
    """200 tokens, 40 positions, attention that is no round number."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, smooth, 40, vocab=200)

    def looks(self, source: Tokens, output: Tokens) -> Any:
        rng = np.random.default_rng([self.seed, *source, 97, *output])
        return self._looks.setdefault((source, output), rng.random(len(source), np.float32) / 8)


def test_allowed_outputs_and_a_beam_of_all(table: Talk) -> None:
    for stop in ("count", "estimate", "exact"):
        options = DecodeOptions(max_tokens=4, beams=350, n_best=350, stop=stop)
        engine = TableEngine(3)
        check_case(table, [Sentence(engine, source, options, allowed=ALLOWED) for source in ((5, 6, 7), (9,))], engine)
        check_case(table, [Sentence(engine, (8, 9), options)], engine)


def test_scores_of_given_targets(table: Talk) -> None:
    engine, sources = TableEngine(4), [(4, 5), (6,), (7, 8, 9)]
    for targets in ([[1, 2, EOS], [EOS], [0, 0, 1, 2, 3]], [[0], [1], [2]]):
        expected = score(engine, make_batch(sources), targets)
        case = {"options": {}, "sources": sources, "numbers": [], "prefixes": [], "targets": targets}
        assert in_cpp(table, engine, case) == {"scores": [[bits(x) for x in each] for each in expected]}
    for bad in ([[], [1], [1]], [[1] * 8, [1], [1]], [[1], [VOCAB], [1]]):
        with pytest.raises(TformerError) as error:
            score(engine, make_batch(sources), bad)
        case = {"options": {}, "sources": sources, "numbers": [], "prefixes": [], "targets": bad}
        assert in_cpp(table, engine, case) == {"error": str(error.value), "status": 3}


@pytest.mark.parametrize("number", [np.nan, -np.inf])
def test_what_is_no_number_is_an_error_that_names_the_request(table: Talk, number: float) -> None:
    def broken(rng: np.random.Generator, vocab: int) -> Any:
        return np.full(vocab, number, np.float32) if rng.random() < 0.2 else smooth(rng, vocab)

    engine = TableEngine(2, broken)
    sources = [(i, 4) for i in range(4, 12)]
    for options in (DecodeOptions(), DecodeOptions(beams=3), DecodeOptions(sampling=True, n_best=2)):
        with pytest.raises(TformerError) as error:
            decode(engine, make_batch(sources, range(7, 15)), options)
        case = {"options": options_of(options), "sources": sources, "numbers": list(range(7, 15)), "prefixes": []}
        assert in_cpp(table, engine, {**case, "strict": True}) == {"error": str(error.value), "status": 6}


def test_a_search_that_is_cancelled_takes_no_further_step(table: Talk) -> None:
    case = {"sources": [(4,), (5, 6)], "numbers": [], "prefixes": []}
    for options in ({"min_tokens": 6}, {"sampling": True, "min_tokens": 6}):
        asked: list[Tokens] = []
        engine = CountingEngine(asked)
        said = in_cpp(table, engine, {**case, "options": options, "steps": 3})
        assert said == {"error": "the translation was cancelled", "status": 8}
        assert {len(output) for output in asked} == {0, 1, 2}


class CountingEngine(TableEngine):
    """Notes which outputs it is asked for."""

    def __init__(self, asked: list[Tokens]) -> None:
        super().__init__(1)
        self.outputs = asked

    def log_probs(self, source: Tokens, output: Tokens) -> Any:
        self.outputs.append(output)
        return super().log_probs(source, output)


REFUSED: list[tuple[dict[str, Any], Tokens]] = [
    ({"suppress": (VOCAB,)}, ()),
    ({"end_ids": (-1,)}, ()),
    ({"first_ids": (9,)}, ()),
    ({}, (7,)),
    ({}, (1, EOS)),
    ({"first_ids": (2,), "end_ids": (2,)}, ()),
    ({"max_tokens": 2}, (1, 2, 3)),
    ({"max_tokens": 3, "first_ids": (0,)}, (1, 2, 3)),
    ({"max_tokens": 3, "forced_end": True}, (1, 2, 3)),
    ({"max_ratio": 2.0}, (1, 2, 3)),
    ({}, (1,) * 8),
    ({"beams": 5000}, ()),
    ({"sampling": True, "n_best": 5000}, ()),
]


@pytest.mark.parametrize(("changes", "prefix"), REFUSED, ids=str)
def test_options_that_do_not_fit_the_model(table: Talk, changes: dict[str, Any], prefix: Tokens) -> None:
    engine, options = TableEngine(), DecodeOptions(**changes)
    with pytest.raises(TformerError) as error:
        decode(engine, make_batch([(4,)], (), [prefix]), options)
    case = {"options": options_of(options), "sources": [(4,)], "numbers": [], "prefixes": [prefix]}
    assert in_cpp(table, engine, case) == {"error": str(error.value), "status": 3}


BAD: list[dict[str, Any]] = [
    *({name: 0} for name in ("max_tokens", "beams", "n_best", "temperature", "repetition_penalty", "top_p")),
    *({name: -1} for name in ("min_tokens", "max_ratio", "top_k", "no_repeat_ngram", "coverage_penalty", "seed")),
    *({name: 1 << 31} for name in ("max_tokens", "n_best", "beams", "no_repeat_ngram")),
    {"n_best": 3, "beams": 2},
    {"min_tokens": 9, "max_tokens": 8},
    {"first_ids": [1, 2], "max_tokens": 1},
    {"first_ids": [1], "forced_end": True, "max_tokens": 1},
    {"max_ratio": 1e301},
    {"coverage_penalty": 1e7},
    {"length_penalty": -11},
    {"bad_words": [[]]},
    {"bad_words": [4]},
    {"length_penalty": 10.5},
    {"length_norm": "gmnt"},
    {"stop": "never"},
    {"patience": 0.1, "beams": 4},
    {"patience": 0.01, "beams": 3},
    {"patience": 2.0, "stop": "exact"},
    {"sampling": True, "beams": 2},
    {"sampling": True, "temperature": 0},
    {"sampling": True, "temperature": 1e-5},
    {"sampling": True, "length_norm": "gnmt"},
    {"sampling": True, "length_penalty": 0},
    {"sampling": True, "coverage_penalty": 0.2},
    {"sampling": True, "stop": "exact"},
    {"sampling": True, "patience": 2.0},
    {"sampling": True, "min_p": 1},
    {"seed": 1},
    {"temperature": 0.5},
    {"top_p": 0.5},
    {"repetition_penalty": 1e39},
    {"beam": 4},
    {"beams": 2.0},
    {"align": 1},
    {"stop": 1},
    {"beams": 1 << 63},
    {"sampling": True, "seed": 1 << 63},
]


def test_whole_numbers_are_compared_exactly(table: Talk) -> None:
    """Near 2^63 a double has only each 1,024th."""
    for seed in (2**63 - 512, 2**63 - 1):
        options = over_defaults({}, {"sampling": True, "seed": seed})
        engine = TableEngine(5)
        check_case(table, [Sentence(engine, (5, 6), options)], engine)
    for name in ("max_tokens", "beams"):
        assert "error" not in table.ask({"options": {name: 2**31 - 1}})


@pytest.mark.parametrize("changes", BAD, ids=str)
def test_options_that_make_no_sense(table: Talk, changes: dict[str, Any]) -> None:
    with pytest.raises(TformerError) as error:
        over_defaults({}, changes)
    said = table.ask({"options": changes})
    if changes == {"align": 1} or changes == {"stop": 1} or changes == {"beams": 2.0}:  # words of another language
        assert said["status"] == 1 and said["error"].startswith(f"{next(iter(changes))}=")
    else:
        assert said == {"error": str(error.value), "status": 1}


def test_defaults_of_a_beam_do_not_hold_for_sampling(table: Talk) -> None:
    whole = {"beams": 4, "n_best": 2, "length_norm": "gnmt", "max_tokens": 9, "stop": "exact"}
    for defaults in (whole, {"stop": "estimate"}, {}):
        for asked in ({}, {"beams": 1}, {"sampling": True}, {"beams": 3}, {"sampling": True, "n_best": 3}):
            expected = over_defaults(defaults, asked)
            said = {name: getattr(expected, name) for name in ("beams", "n_best", "stop")}
            assert table.ask({"defaults": defaults, "options": asked}) == said, (defaults, asked)


def test_settings_of_the_command_line(table: Talk) -> None:
    for name, text, value in [
        ("beams", "4", 4),
        ("max_ratio", "1.5", 1.5),
        ("align", "True", True),
        ("end_ids", "3, 4", [3, 4]),
        ("end_ids", "", []),
        ("bad_words", "", []),
        ("stop", "exact", "exact"),
        ("seed", "+7", 7),
        ("seed", "9223372036854775807", 2**63 - 1),
    ]:
        assert table.ask({"setting": [name, text]}) == {"value": value}
    for name, text, message in [
        ("beams", "4.0", "decoding.beams=4.0: must be a whole number"),
        ("align", "1", "decoding.align=1: must be true or false"),
        ("top_p", "", "decoding.top_p=: must be a number"),
        ("end_ids", "3,", "decoding.end_ids=: must be a whole number"),
        ("beam", "4", "unknown key of [decoding] 'beam': did you mean 'beams'? valid: "),
    ]:
        said = table.ask({"setting": [name, text]})
        assert said["status"] == 1 and said["error"].startswith(message)
