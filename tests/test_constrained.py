"""Constrained beams and searches under rules of the caller, on tables of log-probabilities."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from tformer_deploy.base.errors import ConfigError, LimitError
from tformer_deploy.decoding import DecodeOptions, Hypothesis, decode
from tformer_deploy.decoding.constrained import Asked, decode_constrained
from tformer_deploy.decoding.constraints import Constraint, DisjunctiveConstraint, PhrasalConstraint, Progress
from tformer_deploy.decoding.guided import HfRules, decode_guided

from .plain_decoding import EOS, VOCAB, TableEngine, Tokens, make_batch

SOURCES: list[Tokens] = [(5, 6, 7), (9,), (8, 8)]
START = TableEngine().config.start_id
ENDS = np.array([EOS], np.int32)


def constrained(engine: TableEngine, constraints: list[Constraint], **options: Any) -> list[list[Hypothesis]]:
    chosen = DecodeOptions(**{"max_tokens": 6, "beams": 4, **options})
    rules = HfRules(chosen, ENDS, chosen.max_tokens)
    return decode_constrained(engine, make_batch(SOURCES), Asked(constraints, chosen, engine.config.start_id, rules))


def contains(output: list[int], phrase: list[int]) -> bool:
    return any(output[i : i + len(phrase)] == phrase for i in range(len(output)))


def test_progress_counts_one_phrase_at_a_time() -> None:
    constraints = [PhrasalConstraint([1, 2]), DisjunctiveConstraint([[3], [2, 1, 0]])]
    assert Progress.of(constraints, [0]).following() == [1, 3, 2]
    begun = Progress.of(constraints, [1])
    assert (begun.following(), begun.bank, begun.done) == ([2], 3 - (2 - 1), False)
    assert Progress.of(constraints, [1, 0]).bank == 0
    # The token that breaks a phrase does not begin another one.
    assert Progress.of(constraints, [1, 3]).following() == [3, 2, 1]
    one = Progress.of(constraints, [1, 2])
    assert (one.complete, one.bank, one.following()) == (1, 3, [3, 2])
    assert Progress.of(constraints, [1, 2, 3]).done
    assert Progress.of(constraints, [2, 1, 0, 1, 2, 4]).done


def test_two_constraints_of_the_same_phrase_need_it_twice() -> None:
    twice = [PhrasalConstraint([1]), PhrasalConstraint([1])]
    assert not Progress.of(twice, [1]).done
    assert Progress.of(twice, [1, 0, 1]).done


@pytest.mark.parametrize(
    ("constraints", "phrases"),
    [
        ([PhrasalConstraint([2])], [[[2]]]),
        ([PhrasalConstraint([1, 3])], [[[1, 3]]]),
        ([PhrasalConstraint([1, 3]), PhrasalConstraint([2, 2])], [[[1, 3]], [[2, 2]]]),
        ([DisjunctiveConstraint([[3, 0], [1, 1, 2]]), PhrasalConstraint([2])], [[[3, 0], [1, 1, 2]], [[2]]]),
    ],
    ids=["one token", "two tokens", "two phrases", "alternatives"],
)
def test_finished_outputs_have_what_is_asked(constraints: list[Constraint], phrases: list[list[list[int]]]) -> None:
    for seed, stop in itertools.product(range(6), ("count", "estimate", "exact")):
        for found in constrained(TableEngine(seed), constraints, n_best=3, stop=stop):
            assert len(found) == 3
            assert [each.value for each in found] == sorted((each.value for each in found), reverse=True)
            for each in found:
                if each.finished:
                    assert all(any(contains(each.ids, one) for one in choice) for choice in phrases)
                else:
                    assert len(each.ids) == 6


@pytest.mark.parametrize("phrase", [[2], [1, 3]], ids=str)
@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_a_beam_as_wide_as_all_hypotheses_finds_the_best(phrase: list[int], penalty: float) -> None:
    engine = TableEngine(3)
    options = {"max_tokens": 4, "beams": 350, "stop": "exact", "length_penalty": penalty}
    found = constrained(engine, [PhrasalConstraint(phrase)], **options)
    others = [token for token in range(VOCAB) if token != EOS]
    for source, [best] in zip(SOURCES, found, strict=True):
        values = {}
        for length in range(1, 5):
            for ids in itertools.product(others, repeat=length):
                ended = [(*ids, EOS)] if length < 4 else [ids]
                # Not every output with the phrase counts: a token that breaks it does not begin it again.
                for output in ended if Progress.of([PhrasalConstraint(phrase)], ids).done else []:
                    steps = [engine.log_probs(source, output[:i])[token] for i, token in enumerate(output)]
                    values[output] = float(sum(steps)) / len(output) ** penalty
        expected = max(values, key=lambda output: values[output])
        assert (*best.ids, *([EOS] if best.finished else [])) == expected
        assert best.value == pytest.approx(values[expected], abs=1e-5)


def test_a_sentence_alone_gets_what_it_gets_in_a_batch() -> None:
    constraints: list[Constraint] = [PhrasalConstraint([1, 3]), PhrasalConstraint([2])]
    together = constrained(TableEngine(1), constraints)
    engine, chosen = TableEngine(1), DecodeOptions(max_tokens=6, beams=4)
    asked = Asked(constraints, chosen, engine.config.start_id, HfRules(chosen, ENDS, 6))
    for source, expected in zip(SOURCES, together, strict=True):
        assert decode_constrained(engine, make_batch([source]), asked) == [expected]


@pytest.mark.parametrize(
    "options", [{}, {"beams": 3, "n_best": 3}, {"sampling": True, "n_best": 2, "seed": 4}], ids=str
)
def test_rules_that_change_nothing_give_the_usual_search(options: dict[str, Any]) -> None:
    engine, chosen = TableEngine(2), DecodeOptions(max_tokens=6, end_ids=(EOS,), **options)
    rules = HfRules(chosen, ENDS, 6)
    assert decode_guided(engine, make_batch(SOURCES), rules, engine.config.start_id) == decode(
        engine, make_batch(SOURCES), chosen
    )


def test_a_function_says_which_tokens_follow() -> None:
    seen = []

    def allowed(sentence: int, output: Any) -> list[int]:
        seen.append((sentence, output.tolist()))
        return [1, 2] if len(output) < 4 else [EOS]

    engine, chosen = TableEngine(2), DecodeOptions(max_tokens=6, end_ids=(EOS,), beams=2)
    outputs = decode_guided(engine, make_batch(SOURCES), HfRules(chosen, ENDS, 6, allowed=allowed), START)
    assert all(len(best.ids) == 3 and set(best.ids) <= {1, 2} and best.finished for [best] in outputs)
    assert {sentence for sentence, _ in seen} == {0, 1, 2}
    assert {output[0] for _, output in seen} == {START}, "the start token comes first"
    with pytest.raises(ConfigError, match="prefix_allowed_tokens_fn gave no token after"):
        decode_guided(engine, make_batch(SOURCES), HfRules(chosen, ENDS, 6, allowed=lambda *_: []), START)


def test_what_is_refused() -> None:
    for make, message in (
        (lambda: PhrasalConstraint([]), "give at least one token id"),
        (lambda: PhrasalConstraint([-1]), "-1 is no token id"),
        (lambda: DisjunctiveConstraint([[1], [1, 2]]), "no phrase may be the beginning of another one"),
        (lambda: constrained(TableEngine(), [PhrasalConstraint([1])], beams=1), "give num_beams=2 or more"),
    ):
        with pytest.raises(ConfigError, match=message):
            make()
    with pytest.raises(LimitError, match="99"):
        constrained(TableEngine(), [PhrasalConstraint([99])])
