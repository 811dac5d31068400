"""Serving through the C API: lines that join others on their way get what they get alone, from any thread."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import GraphProto, numpy_helper

from tformer_deploy.bundle.manifest import open_bundle

from .conftest import VOCAB, small_config
from .cpp_library import CppError, Model, Output, Serving, Translator
from .mutations import break_graph

USAGE, LIMIT, TEXT, NOT_NUMBERS = 1, 3, 4, 6
CLOSE = 1e-4
"""Between batches the order of sums differs."""
ASKED: list[dict[str, Any]] = [
    {},
    {"beams": 4, "n_best": 4},
    {"beams": 2, "repetition_penalty": 1.2},
    {"sampling": True, "n_best": 2, "seed": 7},
]


@pytest.fixture(scope="module")
def model(variants_bundle: Path) -> Iterator[Model]:
    """In few bits a sum's last digit may change how a number is rounded; `tformer check` compares those."""
    with Model(variants_bundle, variant="fp32-cpu") as opened:
        yield opened


def requests_of(count: int) -> list[tuple[str, dict[str, Any]]]:
    """Lines of every length, and options of each."""
    chooser = random.Random(4)
    lines = [" ".join(f"w{chooser.randrange(4, VOCAB)}" for _ in range(chooser.randrange(1, 20))) for _ in range(count)]
    return [(line if i % 9 else "", {"max_tokens": 20, **ASKED[i % len(ASKED)]}) for i, line in enumerate(lines)]


def alone(model: Model, number: int, line: str, asked: dict[str, Any]) -> list[Output]:
    with Translator(model, **asked) as translator:
        found: list[Output] = translator.translate([line], first=number)[0]
        return found


def assert_same(model: Model, requests: list[tuple[str, dict[str, Any]]], found: dict[int, Any]) -> None:
    assert sorted(found) == list(range(len(requests)))
    for number, (line, asked) in enumerate(requests):
        expected = alone(model, number, line, asked)
        assert [each.ids for each in found[number]] == [each.ids for each in expected], (line, asked)
        for one, other in zip(found[number], expected, strict=True):
            assert (one.text, one.finished) == (other.text, other.finished)
            assert abs(one.score - other.score) < CLOSE


def drain(serving: Serving, found: dict[int, Any]) -> None:
    while (taken := serving.take()) is not None:
        found[taken[0]] = taken[1]


def test_lines_that_one_thread_admits_while_another_steps(model: Model) -> None:
    """And a third takes what has ended."""
    requests, found = requests_of(60), dict[int, Any]()
    admitted, stepped = threading.Event(), threading.Event()
    with Serving(model) as serving:

        def admit() -> None:
            try:
                for number, (line, asked) in enumerate(requests):
                    serving.admit(line, number, **asked)
            finally:  # what fails is seen in what was found
                admitted.set()

        def step() -> None:
            try:
                while not admitted.is_set():
                    serving.step()
                while serving.step():
                    pass
            finally:
                stepped.set()

        threads = [threading.Thread(target=work) for work in (admit, step)]
        for thread in threads:
            thread.start()
        while not stepped.is_set():
            drain(serving, found)
        for thread in threads:
            thread.join()
        drain(serving, found)
    assert_same(model, requests, found)


def test_lines_that_join_at_every_step(model: Model) -> None:
    """Long after the first, so that places are given up and caches move; options of all hold where a line has none."""
    requests, found = requests_of(40), dict[int, Any]()
    with Serving(model, max_tokens=20) as serving:
        for number, (line, asked) in enumerate(requests):
            serving.admit(line, number, **{name: value for name, value in asked.items() if name != "max_tokens"})
            serving.step()
            drain(serving, found)
        while serving.step():
            drain(serving, found)
        drain(serving, found)
    assert_same(model, requests, found)


def test_more_lines_than_there_is_room_for_wait(model: Model, variants_bundle: Path) -> None:
    most = open_bundle(variants_bundle).variants["fp32-cpu"].axes.batch.max
    requests, found = [(f"w{4 + i % 50} w9", {"max_tokens": 5}) for i in range(most + 20)], dict[int, Any]()
    with Serving(model, max_tokens=5) as serving:
        for number, (line, _) in enumerate(requests):
            serving.admit(line, number)
        assert serving.step() >= 20
        while serving.step():
            drain(serving, found)
        drain(serving, found)
    assert_same(model, requests, found)


def test_lines_that_are_given_up_leave_and_harm_nobody(model: Model) -> None:
    requests = [(line or "w5", {**asked, "min_tokens": 12}) for line, asked in requests_of(9)]
    found = dict[int, Any]()
    with Serving(model) as serving:
        for number, (line, asked) in enumerate(requests):
            serving.admit(line, number, **asked)
        serving.retire(8)  # while it waits
        for _ in range(3):
            serving.step()
        for number in (1, 4, 6, 77):
            serving.retire(number)
        serving.admit(requests[4][0], 4, **requests[4][1])  # once more
        while serving.step():
            pass
        serving.retire(0)  # when it has ended
        drain(serving, found)
        assert sorted(found) == [2, 3, 4, 5, 7]
        for number, outputs in found.items():
            assert [each.ids for each in outputs] == [each.ids for each in alone(model, number, *requests[number])]
        assert serving.step() == 0


def test_what_cannot_be_served_is_refused_at_once(model: Model, variants_bundle: Path) -> None:
    with Serving(model) as serving:
        for line, asked, status, words in (
            (b"\xff", {}, TEXT, "line 3: not UTF-8"),
            ("w5 " * 30, {}, LIMIT, "line 3: a source of 31 tokens exceeds the limit of 24"),
            ("w5", {"beams": 0}, USAGE, "beams=0: must be at least 1"),
            ("w5", {"beams": 1000}, LIMIT, "1000 beams exceed the engine's limit"),
            ("w5", {"align": True}, LIMIT, "does not return attention"),
            ("w5", {"backend": "ort"}, USAGE, "backend is not an option of one line: set it for the model or for all"),
            ("w5", {"beams": 1, "workers": 2}, USAGE, "workers is not an option of one line"),
            ("w5", {"coverage_penalty": 0.2}, LIMIT, "does not return attention"),
            (
                "w5",
                {"first_ids": [5, 6], "max_ratio": 0.5},
                LIMIT,
                "line 3: 2 forced tokens do not fit into 1",
            ),
            ("w5", {"first_ids": [5, 6], "max_tokens": 1}, USAGE, "max_tokens=1: must be at least 2, for first_ids"),
        ):
            with pytest.raises(CppError, match=words) as refused:
                serving.admit(line, 3, **asked)
            assert refused.value.status == status
        serving.admit("w5", 3)
        with pytest.raises(CppError, match="line 3 is known already: give each a number of its own"):
            serving.admit("w6", 3)
        while serving.step():
            pass
        assert [serving.take() is None for _ in range(2)] == [False, True]
    with Model(variants_bundle, variant="fp32") as other, pytest.raises(CppError) as refused:
        Serving(other)
    assert refused.value.status == LIMIT
    assert str(refused.value) == (
        "this engine cannot add sentences to a running batch: use a variant of target ort-cpu, native or trt, "
        "without a shortlist"
    )


def test_misspelled_options_are_told_what_there_is(variants_bundle: Path) -> None:
    for name, words in (
        ("thread", "did you mean 'threads'"),
        ("beam", "did you mean 'beams'"),
        ("back_end", "backend, "),
    ):
        with pytest.raises(CppError, match=f"unknown option '{name}': .*{words}.*variant.*workers") as refused:
            Model(variants_bundle, **{name: 1})
        assert refused.value.status == USAGE


@pytest.mark.parametrize("together", [False, True])
def test_a_line_that_the_engine_refuses_fails_alone(together: bool, variants_bundle: Path, tmp_path: Path) -> None:
    """Those on their way have begun without it, or begin beside it."""

    def shorten(graph: GraphProto) -> None:
        (table,) = (tensor for tensor in graph.initializer if list(tensor.dims) == [VOCAB, small_config().d_model])
        table.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(table)[:20].copy(), table.name))

    broken = break_graph(variants_bundle, tmp_path / "bundle", "fp32-cpu/encoder", shorten)
    requests, found = [("w5 w6", {"max_tokens": 9}), ("w7 w30", {}), ("w8", {"beams": 2})], dict[int, Any]()
    with Model(broken, variant="fp32-cpu") as model:
        with Serving(model) as serving:
            for number, (line, asked) in enumerate(requests):
                serving.admit(line, number, **asked)
                if not together:
                    serving.step()
            while serving.step():
                pass
            drain(serving, found)
        error = found.pop(1)
        assert isinstance(error, CppError) and "indices" in str(error)
        found[1] = alone(model, 1, "w9", {})
        assert_same(model, [requests[0], ("w9", {}), requests[2]], found)


def test_a_damaged_graph_for_joining_is_found_before_a_line_is_served(variants_bundle: Path, tmp_path: Path) -> None:
    broken = tmp_path / "bundle"
    shutil.copytree(variants_bundle, broken)
    with (broken / "fp32-cpu/slots_step.onnx").open("ab") as file:
        file.write(b"x")
    with Model(broken, variant="fp32-cpu") as model, pytest.raises(CppError, match=r"slots_step\.onnx"):
        Serving(model)


def test_a_line_whose_scores_are_no_numbers_fails_alone(variants_bundle: Path, tmp_path: Path) -> None:
    """Others go on beside it, and in its place."""

    def spoil(graph: GraphProto) -> None:
        (table,) = (tensor for tensor in graph.initializer if list(tensor.dims) == [VOCAB, small_config().d_model])
        values = numpy_helper.to_array(table).copy()
        values[20] = np.nan
        table.CopyFrom(numpy_helper.from_array(values, table.name))

    broken = break_graph(variants_bundle, tmp_path / "bundle", "fp32-cpu/encoder", spoil)
    requests, found = [("w5 w6", {"max_tokens": 9}), ("w7 w20", {}), ("w8", {"beams": 2})], dict[int, Any]()
    with Model(broken, variant="fp32-cpu") as model:
        with Serving(model) as serving:
            for number, (line, asked) in enumerate(requests):
                serving.admit(line, number, **asked)
            serving.step()
            drain(serving, found)
            error = found.pop(1)
            assert isinstance(error, CppError) and error.status == NOT_NUMBERS and not error.outputs
            assert str(error).startswith("line 1: NaN or infinite log-probabilities at token 1")
            serving.admit("w9 w10", 1, max_tokens=7)
            while serving.step():
                drain(serving, found)
            drain(serving, found)
        assert_same(model, [requests[0], ("w9 w10", {"max_tokens": 7}), requests[2]], found)
