"""The parity gate: it passes equal engines, names what is wrong with others, and is not to be fooled."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from math import comb
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnx
import pytest
from onnx import GraphProto, helper

from tformer_deploy import check as check_room
from tformer_deploy import cli, load
from tformer_deploy.base.errors import ArtifactError, ConfigError, DataError, EngineError, MissingExtra
from tformer_deploy.base.headers import read_arrays
from tformer_deploy.bundle.manifest import Bundle, hashes, open_bundle
from tformer_deploy.bundle.plans import Profile
from tformer_deploy.bundle.recipe import Tolerance, load_recipe, own_limits, recipe_folder
from tformer_deploy.check import (
    CheckOptions,
    Corpus,
    EngineReport,
    Gate,
    Reference,
    Report,
    load_reference,
    make_corpus,
)
from tformer_deploy.check.compare import Judge, relative
from tformer_deploy.check.generated import generated_sources
from tformer_deploy.check.memory import memory_rounding
from tformer_deploy.check.observe import Observation
from tformer_deploy.check.parity import check, eager_invariance, eager_rounding
from tformer_deploy.check.recording import Run, Trace
from tformer_deploy.check.reference import make_reference
from tformer_deploy.check.report import describe_divergence
from tformer_deploy.check.results import LATE, MANY, WIDTHS, Divergence, Outputs
from tformer_deploy.check.rounding import Rounding
from tformer_deploy.check.shares import allowed
from tformer_deploy.check.sizes import rows_apart, run_large, run_wide
from tformer_deploy.check.walks import late_scores
from tformer_deploy.decoding import Hypothesis
from tformer_deploy.engines.base import Engine, Floats, Ints, Limits, Scores
from tformer_deploy.engines.eager import EagerEngine
from tformer_deploy.model.checkpoint import open_checkpoint, save_checkpoint

from .command import run_here
from .conftest import random_model, small_config
from .mutations import (
    BEYOND,
    ENTRIES,
    MUTATIONS,
    UNMET,
    Mutation,
    break_graph,
    change_tensor,
    scale,
    scale_one_weight,
    spoil,
)
from .params import long_but
from .plain_decoding import EOS, TableEngine, TableState, Tokens

SMALL = CheckOptions(max_tokens=8, beams=3, n_best=3, invariance=4, walks=8)


def gate_of(bundle: Path, run: Path | None = None) -> Gate:
    return Gate(open_bundle(bundle), run, threads=1)


def corpus_of(bundle: Bundle, options: CheckOptions = SMALL) -> Corpus:
    return make_corpus(bundle.config, bundle.recipe, bundle.tokenizers(), None, options)


@pytest.fixture(scope="module")
def reference(bundle: Path, run: Path) -> Reference:
    """Eager's side of a small check."""
    gate = gate_of(bundle, run)
    found = gate.reference(corpus_of(gate.bundle))
    gate.rounding(found)
    return found


@pytest.fixture(scope="module")
def stored(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in a file. Read only."""
    path = tmp_path_factory.mktemp("reference") / "eager.npz"
    reference.save(path)
    return path


@pytest.fixture(scope="module")
def broken(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with one wrong matrix in its step. Read only."""
    return break_graph(bundle, tmp_path_factory.mktemp("broken") / "bundle", "decoder_step", scale_one_weight)


def all_equal(report: EngineReport) -> bool:
    rows = [*report.outputs, *report.invariance]
    return all(row.equal == row.sentences > 0 and not row.ties + row.failed + row.not_blamed for row in rows)


# Equal engines


def test_equal_engines_pass(bundle: Path, run: Path, reference: Reference) -> None:
    report = gate_of(bundle, run).run(["ort", "eager"], reference)
    assert report.passed and not report.failures and "\npassed" in str(report)
    assert [engine.engine for engine in report.engines] == ["ort", "eager"]
    for engine in report.engines:
        assert all_equal(engine) and not engine.blame
        assert [row.mode for row in engine.outputs] == ["greedy", "beam", "sampling"]
        assert [row.variant for row in engine.invariance[::3]] == ["alone", "neighbours", "shuffled", "padded"]
    ort, eager = report.engines
    assert 0 < ort.scores_max < 1e-5 and 0 < ort.encoder_max < 1e-5 and ort.scores_mean <= ort.scores_p999
    assert eager.scores_max == eager.encoder_max == 0
    positions = gate_of(bundle).bundle.config.max_positions
    assert report.tokens + positions == sum(step.sentences for step in ort.steps) and len(ort.steps) == positions
    assert ort.scores_count == (report.tokens + positions) * 64 and ort.attention_max is None
    assert [layer.name for layer in ort.layers][:2] == ["encoder_embedding", "encoder_layer_0"]
    assert (
        all(row.equal == row.sentences == 4 for row in report.eager_invariance) and len(report.eager_invariance) == 12
    )


def test_an_export_is_checked_and_keeps_the_report(bundle: Path) -> None:
    found = json.loads((bundle / "check.json").read_text())
    engine = found["engines"][0]
    assert found["passed"] and engine["passed"] and len(found["engines"]) == 1
    assert all(row["equal"] == row["sentences"] for row in (*engine["outputs"], *engine["invariance"]))
    assert {row["sentences"] for row in engine["outputs"]} == {len(generated_sources(60, 3, 24))}


# Graphs that were broken on purpose


@pytest.mark.parametrize(
    ("graph", "mutate", "blame"),
    long_but(MUTATIONS, "encoder mask", "step NaN", "step caches", "output weight", "rows reversed", unpack=True),
)
def test_broken_graphs_fail_with_the_place_of_the_fault(
    graph: str, mutate: Mutation, blame: str, bundle: Path, run: Path, reference: Reference, tmp_path: Path
) -> None:
    report = gate_of(break_graph(bundle, tmp_path / "bundle", graph, mutate), run).run(["ort"], reference)
    (found,) = report.engines
    assert not report.passed and found.failures
    assert re.fullmatch(rf"sentence \d+[,:] (token \d+, )?{blame}\b.*", found.blame), found.blame
    assert f"FIRST DIFFERENCE: {found.blame}" in str(report)
    if graph == "decoder_step":
        assert found.encoder_max < 1e-5, "the encoder is not to blame"


def test_a_fault_beyond_the_outputs_is_found(bundle: Path, run: Path, reference: Reference, tmp_path: Path) -> None:
    """Positions that no output reaches."""

    def mutate(graph: GraphProto) -> None:
        for name in [tensor.name for tensor in graph.initializer if "positions" in tensor.name]:
            change_tensor(
                graph, name, lambda table: np.where(np.arange(len(table))[:, None] < SMALL.max_tokens, table, 0)
            )

    report = gate_of(break_graph(bundle, tmp_path / "bundle", "decoder_step", mutate), run).run(["ort"], reference)
    (found,) = report.engines
    assert all(row.equal == row.sentences for row in found.outputs), "only the long target shows it"
    assert not report.passed and f"token {SMALL.max_tokens + 1}, decoder_embedding" in found.blame


@pytest.mark.parametrize(("graph", "mutate", "line"), long_but(ENTRIES, "target row", unpack=True))
def test_wrong_entries_are_found_without_the_checkpoint(
    graph: str, mutate: Mutation, line: str, bundle: Path, reference: Reference, tmp_path: Path
) -> None:
    broken = break_graph(bundle, tmp_path / "bundle", graph, mutate)
    (found,) = gate_of(broken, tmp_path / "nowhere").run(["ort"], reference).engines
    assert not found.passed and found.constants and "not at" in found.constants.skipped
    assert any(re.match(line, failure) for failure in found.failures), found.failures


@pytest.mark.long
def test_a_wrong_entry_of_a_text_that_lacks_it_is_found(bundle: Path, run: Path, tmp_path: Path) -> None:
    """And the layer at fault is looked for where it is."""
    lines = tmp_path / "lines.txt"
    lines.write_text("w5 w6 w7\n")
    gate = gate_of(bundle, run)
    corpus = make_corpus(gate.bundle.config, gate.bundle.recipe, gate.bundle.tokenizers(), lines, SMALL)
    reference = gate.reference(corpus)
    (found,) = gate.run(["ort"], reference).engines
    assert found.passed and [(each.side, each.count) for each in found.vocabulary] == [("source", 60), ("target", 60)]
    assert all(0 < each.largest < 1e-5 for each in found.vocabulary)
    graph, mutate, line = ENTRIES["source row"]
    (found,) = gate_of(break_graph(bundle, tmp_path / "bundle", graph, mutate), run).run(["ort"], reference).engines
    assert re.match(line, found.failures[0]) and found.failures[-1].startswith("constant output.weight of encoder.onnx")
    assert found.blame == "source entry 57, encoder_embedding"


@pytest.mark.parametrize(("graph", "mutate", "line"), long_but(BEYOND, "rows of a step", unpack=True))
def test_faults_of_large_sizes_alone_are_found(
    graph: str, mutate: Mutation, line: str, bundle: Path, run: Path, reference: Reference, tmp_path: Path
) -> None:
    """Of all that the usual batches and beams show, nothing is wrong."""
    report = gate_of(break_graph(bundle, tmp_path / "bundle", graph, mutate), run).run(["ort"], reference)
    (found,) = report.engines
    assert all(row.equal == row.sentences for row in (*found.outputs, *found.invariance)) and found.scores_max < 1e-5
    assert not report.passed and found.failures
    large = f"{line}|equal rows of a wide beam|wide beam: |target entry |rows of \\d+ beams: |many rows |full batches "
    assert all(re.match(large, failure) for failure in found.failures), found.failures
    assert any(re.match(line, failure) for failure in found.failures)
    assert found.blame


@pytest.mark.parametrize(
    "case",
    long_but([case for case, (variants, *_) in UNMET.items() if "" in variants], "4 beams of many", "late parents"),
)
def test_faults_of_other_widths_batches_and_positions_are_found(
    case: str, bundle: Path, run: Path, reference: Reference, tmp_path: Path
) -> None:
    """Of all that the usual outputs show, nothing is wrong."""
    _, mutate, named = UNMET[case]
    report = gate_of(break_graph(bundle, tmp_path / "bundle", "decoder_step", mutate), run).run(["ort"], reference)
    (found,) = report.engines
    assert all(row.equal == row.sentences for row in (*found.outputs, *found.invariance, *found.sizes))
    line = next((line for line in found.failures if re.match(named, line)), "")
    assert line and re.search("rows|batches", found.blame), (found.failures, found.blame)


@pytest.mark.long
def test_rows_of_every_width_number_and_position_are_led(bundle: Path, run: Path, reference: Reference) -> None:
    reference = dataclasses.replace(reference, options=dataclasses.replace(reference.options, walks=64))
    (found,) = gate_of(bundle, run).run(["ort"], reference).engines
    widths, many, late = ([w for w in found.walks if w.kind == kind] for kind in (WIDTHS, MANY, LATE))
    assert sorted(walk.width for walk in widths) == list(range(2, 31)), "as far as the axis goes"
    assert [(walk.width, walk.rows, walk.steps) for walk in many] == [(1, 3 * 1024, 3), (2, 5 * 1024, 3)]
    assert [(walk.width, walk.steps) for walk in late] == [(3, 24)], "as many as there are positions"
    assert all(walk.largest < 1e-5 and not walk.wrong and walk.limit == 1e-4 for walk in found.walks)
    text = str(gate_of(bundle, run).run(["ort"], reference))
    assert re.search(r"widths +29 from 2 to 30 beams, [\d,]+ rows as alone within \d", text)
    assert "late rows              24 tokens, " in text


def test_a_wide_beam_and_large_batches_are_compared(bundle: Path, run: Path, reference: Reference) -> None:
    (found,) = gate_of(bundle, run).run(["ort"], reference).engines
    wide, greedy, beam, text = found.sizes
    assert (text.mode, text.equal) == ("defaults", 8)
    assert reference.options.wide == 30, "half the vocabulary"
    assert (wide.mode, wide.variant, wide.sentences) == ("wide beam", "", 3) and found.rows_max is not None
    assert found.rows_max < 1e-5
    # The shortest 8 sentences have up to 8 tokens, and 4096 padded ones fit.
    assert (greedy.mode, greedy.variant, greedy.sentences) == ("greedy", "large", 4096 // 8)
    assert (beam.mode, beam.variant, beam.sentences) == ("beam", "large", 4096 // 3 // 8)
    assert all(row.equal == row.sentences for row in found.sizes)
    text = str(gate_of(bundle, run).run(["ort"], reference))
    assert "wide beam              3 of 3 equal, 0 ties" in text and "large, greedy          512 of 512 rows" in text


def test_sizes_stay_within_an_engine(bundle: Path, run: Path, reference: Reference) -> None:
    """Also where plans have few combinations of them."""
    engine = gate_of(bundle, run).eager()
    for profiles, has_wide, rows in (
        ((Profile(16, 3, 24, 24),), False, 16),
        ((Profile(40, 1, 12, 24), Profile(2, 30, 24, 24)), True, 40),
        ((Profile(4, 30, 4, 4),), False, 0),
    ):
        limits = dataclasses.replace(engine.limits, profiles=profiles)
        narrow = Within(engine, limits)
        wide = run_wide(narrow, reference.sources, reference.options)
        assert (wide is not None) == has_wide
        assert (
            rows_apart(narrow, reference.sources, reference.observed.runs["greedy"], reference.options) is not None
        ) == has_wide
        _, rounds = run_large(narrow, reference.sources, reference.options, "greedy")
        assert sum(len(each.outputs) for each in rounds) == rows


class Within:
    """An engine that refuses sizes that no profile has."""

    def __init__(self, engine: Any, limits: Limits) -> None:
        self.engine, self.limits = engine, limits

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def encode(self, src_ids: Ints, src_lengths: Ints, outlook: Any) -> Any:
        assert self.limits.sentences(outlook.beams, src_ids.shape[1], outlook.tokens) >= len(src_ids)
        return self.engine.encode(src_ids, src_lengths, outlook)


@pytest.mark.long
def test_wrong_attention_is_found(attention_bundle: Path, run: Path, tmp_path: Path) -> None:
    gate = gate_of(attention_bundle, run)
    reference = gate.reference(corpus_of(gate.bundle))
    (right,) = gate.run(["ort"], reference).engines
    assert right.passed and right.attention_max is not None and 0 < right.attention_max < 1e-5

    def mutate(graph: GraphProto) -> None:
        for node in graph.node:
            for n, name in enumerate(node.output):
                if name == "attention":
                    node.output[n] = "before"
        graph.node.append(helper.make_node("Mul", ["before", "before"], ["attention"]))

    broken = break_graph(attention_bundle, tmp_path / "bundle", "decoder_step", mutate)
    (found,) = gate_of(broken, run).run(["ort"], reference).engines
    assert [failure.split(" by ")[0] for failure in found.failures] == ["attention differs"]
    assert found.blame == "the output attention, where no layer differs"


def test_a_fault_that_greedy_search_never_meets_is_found(
    bundle: Path, run: Path, reference: Reference, tmp_path: Path
) -> None:
    """A wrong embedding of a token that only a beam takes."""
    runs = reference.observed.runs
    greedy = {token for outputs in runs["greedy"].outputs.values() for token in outputs[0].ids}
    fed = [token for outputs in runs["beam"].outputs.values() for output in outputs for token in output.ids[:-1]]
    token = next(token for token in fed if token not in greedy)

    def mutate(graph: GraphProto) -> None:
        name = next(node.input[0] for node in graph.node if "tokens" in node.input and node.op_type == "Gather")
        change_tensor(graph, name, lambda table: np.where(np.arange(len(table))[:, None] == token, -table, table))

    (found,) = (
        gate_of(break_graph(bundle, tmp_path / "bundle", "decoder_step", mutate), run).run(["ort"], reference).engines
    )
    assert found.scores_max < 1e-5 and any(failure.startswith("beam: ") for failure in found.failures)
    assert re.search(r"token \d+, decoder_embedding", found.blame), found.blame


def test_single_large_values_do_not_hide_a_difference() -> None:
    ours = np.ones((4, 8), np.float32)
    ours[:, 3] = 5000
    theirs = ours.copy()
    theirs[2, 5] += 1e-3
    assert relative(ours, theirs).argmax() == 2 * 8 + 5 and relative(ours, theirs).max() == pytest.approx(
        5e-4, rel=0.01
    )
    assert relative(ours * 0, ours * 0).max() == 0
    theirs[0, 0] = np.nan
    assert np.isnan(relative(ours, theirs).max())


# Ties

LENGTHS = (3, 1, 2, 4, 3, 2, 4, 1)
SOURCES = [[*np.random.default_rng(n).integers(5, 60, length).tolist(), EOS] for n, length in enumerate(LENGTHS)]
TABLE = CheckOptions(
    max_tokens=6,
    beams=2,
    n_best=2,
    invariance=8,
    batch_tokens=16,
    wide=0,
    large_tokens=0,
    vocabulary=False,
    walks=0,
)
Change = Callable[[Tokens, Tokens, Floats], Floats]


class Altered(TableEngine):
    """A table of 9 tokens, some of whose numbers are changed before anyone sees them."""

    def __init__(self, *changes: Change) -> None:
        super().__init__(7, vocab=9)
        self.changes = changes

    def log_probs(self, source: Tokens, output: Tokens) -> Floats:
        values = super().log_probs(source, output).copy()
        for change in self.changes:
            values = change(source, output, values)
        return values

    def cross_keys_values(self, state: TableState) -> list[Floats]:
        return [np.zeros((len(state.sources), 1, state.width, 1), np.float32)]


def table_check(
    eager: TableEngine,
    engine: TableEngine,
    tolerance: Tolerance | None = None,
    options: CheckOptions = TABLE,
    sources: list[list[int]] = SOURCES,
) -> EngineReport:
    about = {"corpus": "table", "weights_sha256": "", "machine": {}}
    reference = make_reference(eager, sources, options, about)
    limits = tolerance or Tolerance()
    return check(engine, "altered", reference, limits, eager_invariance(reference, EOS, limits)[1])[0]


def totals(report: EngineReport, mode: str, variant: str = "") -> Outputs:
    rows = [*report.outputs, *report.invariance]
    return next(row for row in rows if (row.mode, row.variant) == (mode, variant))


def at(sentence: int, step: int, change: Callable[[Floats, list[int]], None]) -> Change:
    """Change the numbers behind the first tokens of a sentence's greedy output; `change` gets the ids, best first."""
    plain, source = Altered(), tuple(SOURCES[sentence])
    prefix: Tokens = ()
    for _ in range(step):
        prefix += (int(plain.log_probs(source, prefix).argmax()),)

    def changed(where: Tokens, output: Tokens, values: Floats) -> Floats:
        if (where, output) == (source, prefix):
            change(values, np.argsort(-values, kind="stable").tolist())
        return values

    return changed


def bring_near(place: int, margin: float) -> Callable[[Floats, list[int]], None]:
    """Let the next best be `margin` below a place."""

    def change(values: Floats, order: list[int]) -> None:
        values[order[place + 1]] = values[order[place]] - np.float32(margin)

    return change


def lower(place: int, amount: float) -> Callable[[Floats, list[int]], None]:
    def change(values: Floats, order: list[int]) -> None:
        values[order[place]] -= np.float32(amount)

    return change


def test_a_greedy_choice_inside_the_measured_error_is_one_tie() -> None:
    """Although the two continuations have nothing in common."""
    near = at(2, 1, bring_near(0, 2e-5))
    report = table_check(Altered(near), Altered(near, at(2, 1, lower(0, 4e-5))))
    found = totals(report, "greedy")
    assert not report.failures and (found.ties, found.failed, found.equal) == (1, 0, len(SOURCES) - 1)
    assert report.scores_max == pytest.approx(4e-5, rel=0.02)
    (tie,) = [tie for tie in report.ties if tie.mode == "greedy"]
    assert (tie.sentence, tie.step) == (2, 1) and tie.margin == pytest.approx(2e-5, rel=0.05)


def test_a_greedy_choice_outside_the_measured_error_fails_and_says_where() -> None:
    near = at(2, 1, bring_near(0, 0.01))
    report = table_check(Altered(near), Altered(near, at(2, 1, lower(0, 0.02))))
    (found,) = [d for d in report.divergences if d.mode == "greedy"]
    expected = Altered(near).log_probs(tuple(SOURCES[2]), (int(Altered().log_probs(tuple(SOURCES[2]), ()).argmax()),))
    first, second = np.argsort(-expected)[:2]
    assert (found.eager_token, found.engine_token) == (first, second)
    line = next(failure for failure in report.failures if failure.startswith("greedy: 1 of 8"))
    numbers = f"eager {first} ({expected[first]:.6f}), engine {second} ({expected[second]:.6f}), margin 1.00e-02"
    assert f"sentence 3, token 2: {numbers}" in line and not report.ties


class Careless(Altered):
    """Its best tokens come from numbers that are less exact than those it shows."""

    def __init__(self, *changes: Change, worse: Change) -> None:
        super().__init__(*changes)
        self.rough = Altered(*changes, worse)

    def step(self, tokens: Ints, state: TableState, full: bool = False, attention: bool = False) -> Scores:
        found = super().step(tokens, state, full, attention)
        if full:
            return found
        rows = [(state.sources[i // state.rows], output) for i, output in enumerate(state.outputs)]
        log_probs = np.array([self.rough.log_probs(*row) for row in rows]).reshape(*tokens.shape, -1)
        ids = np.argsort(-log_probs, axis=2, kind="stable")[:, :, : found.ids.shape[2]].astype(np.int32)
        return Scores(ids, np.take_along_axis(log_probs, ids, 2))


def test_the_error_is_the_one_that_was_measured_not_the_one_allowed() -> None:
    near = at(2, 1, bring_near(0, 2e-5))
    report = table_check(Altered(near), Careless(near, worse=at(2, 1, lower(0, 4e-5))))
    assert report.scores_max == 0 and totals(report, "greedy").failed == 1 and report.failures


def test_a_beam_may_keep_either_of_two_candidates_inside_the_error() -> None:
    near = at(3, 0, bring_near(1, 2e-5))
    report = table_check(Altered(near), Altered(near, at(3, 0, lower(1, 4e-5))))
    assert not report.failures and totals(report, "greedy").equal == len(SOURCES)
    (tie,) = [tie for tie in report.ties if tie.mode == "beam"]
    assert (tie.sentence, tie.step) == (3, 0) and tie.margin == pytest.approx(2e-5, rel=0.05)
    far = at(3, 0, bring_near(1, 0.01))
    report = table_check(Altered(far), Altered(far, at(3, 0, lower(1, 0.02))))
    assert totals(report, "beam").failed == 1 and any(failure.startswith("beam: 1 of 8") for failure in report.failures)


def noise(amount: float) -> Change:
    """Errors of up to `amount` that depend on the number alone."""
    return lambda source, output, values: values + np.float32(amount) * np.sin(values * np.float32(1e4))


def test_noise_within_the_tolerance_only_makes_ties() -> None:
    rng = np.random.default_rng(2)
    sources = [[*rng.integers(5, 60, n % 4).tolist(), EOS] for n in range(150)]
    options = dataclasses.replace(TABLE, beams=4, n_best=4, invariance=0)
    limits = Tolerance(scores=0.011, ties=0.2)
    report = table_check(Altered(), Altered(noise(0.01)), limits, options, sources)
    assert not report.failures and 0.009 < report.scores_max < 0.0101
    assert {tie.mode for tie in report.ties} == {"greedy", "beam", "sampling"}
    assert all(tie.margin <= 0.0202 or tie.mode == "beam" for tie in report.ties)


def test_ties_have_a_cap() -> None:
    """Of greedy and of beam, each counted by itself; not of samples."""
    rng = np.random.default_rng(2)
    sources = [[*rng.integers(5, 60, n % 4).tolist(), EOS] for n in range(150)]
    options = dataclasses.replace(TABLE, beams=4, n_best=4, invariance=0)

    def found(ties: float) -> EngineReport:
        return table_check(Altered(), Altered(noise(0.01)), Tolerance(scores=0.011, ties=ties), options, sources)

    report = found(0.0)
    counts = {mode: totals(report, mode).ties for mode in ("greedy", "beam", "sampling")}
    assert 0 < counts["greedy"] < counts["beam"] and counts["sampling"]
    assert report.failures == [
        f"{mode}: {counts[mode]} of 150 sentences are ties, more than 0: more than chance explains (tolerance.ties)"
        for mode in ("greedy", "beam")
    ]
    share = counts["greedy"] / 150
    assert allowed(share, 150) < counts["beam"]
    (line,) = found(share).failures
    assert line.startswith("beam: ")
    assert not found(counts["beam"] / 150).failures


def test_a_share_of_the_sentences_may_differ_from_eager_where_the_limits_say_so() -> None:
    """As in bf16; rounded up, in each way of decoding, and listed."""
    far = at(2, 1, bring_near(0, 0.01))
    for unstable, passes in ((0.0, False), (0.01, True)):
        limits = Tolerance(scores=0.03, unstable=unstable, top1=0.9)
        report = table_check(Altered(far), Careless(far, worse=at(2, 1, lower(0, 0.02))), limits)
        assert totals(report, "greedy").failed == 1 and any(d.mode == "greedy" for d in report.divergences)
        assert any(line.startswith("greedy: 1 of 8") for line in report.failures) != passes


# The best token of every step


def worst_first(found: Scores) -> Scores:
    assert found.log_probs is not None
    ids = found.log_probs.argsort(-1)[..., : found.ids.shape[-1]].astype(np.int32)
    return dataclasses.replace(found, ids=ids, scores=np.take_along_axis(found.log_probs, ids, -1))


def test_the_best_tokens_must_be_the_best() -> None:
    """Of an engine that may decide otherwise too: its choice is compared with its own log-probabilities."""
    changes: list[Callable[[Scores], Scores]] = [
        worst_first,
        lambda found: dataclasses.replace(found, ids=(found.ids + 1) % 9),
        lambda found: dataclasses.replace(found, ids=found.ids + 9),
        lambda found: dataclasses.replace(found, scores=found.scores + np.float32(2e-4)),
    ]
    for wrong in changes:
        engine = Choosing(wrong)
        report = table_check(Altered(), engine, dataclasses.replace(LOSSY, top1=0.0))
        assert any(line.startswith("scores of the best tokens differ from the step's own") for line in report.failures)


class Choosing(Altered):
    """Its best tokens are changed where all log-probabilities are asked for."""

    admits = False

    def __init__(self, change: Callable[[Scores], Scores]) -> None:
        super().__init__()
        self.change = change

    def step(self, tokens: Ints, state: TableState, full: bool = False, attention: bool = False) -> Scores:
        found = super().step(tokens, state, full, attention)
        return self.change(found) if full else found


def test_the_best_token_must_be_eagers_in_a_share_of_the_steps() -> None:
    """A token that eager has as nearly as high counts as eager's."""
    far, near = at(2, 1, bring_near(0, 0.12)), at(2, 1, bring_near(0, 0.08))
    steps = table_check(Altered(), Altered()).top1
    assert (steps.steps, steps.equal, steps.share) == (37, 37, 1.0)
    for eager, agree in ((far, 36), (near, 37)):
        report = table_check(Altered(eager), Altered(eager, at(2, 1, lower(0, 0.2))), LOSSY)
        assert (report.top1.equal, report.top1.differ) == (36, 37 - agree) and not report.failures
        strict = dataclasses.replace(LOSSY, top1=1.0)
        report = table_check(Altered(eager), Altered(eager, at(2, 1, lower(0, 0.2))), strict)
        assert report.failures == (
            ["best token: 97.30% of 37 steps agree with eager's, fewer than 100.0% (tolerance.top1)"]
            if agree == 36
            else []
        )


# The judge, on decisions written by hand

EOS_ID = 3


def trace(*steps: list[tuple[int, int, float]], margins: list[list[float]] | None = None) -> Trace:
    """Candidates (parent, token, value) of each step."""
    parents, tokens, values = (np.array([[c[k] for c in step] for step in steps]) for k in range(3))
    return Trace(parents, tokens, values, np.array(margins) if margins else np.full(values.shape, np.inf))


def ended(*tokens: int, value: float, score: float = -1.0) -> Hypothesis:
    return Hypothesis(list(tokens), EOS_ID, score, value)


def verdict(
    ours: tuple[Trace, list[Hypothesis]],
    theirs: tuple[Trace, list[Hypothesis]],
    mode: str = "beam",
    error: float = 1e-5,
    tolerance: float = 1e-4,
) -> tuple[list[Divergence], list[Divergence], Outputs]:
    runs = [Run({0: outputs}, {0: steps}) for steps, outputs in (ours, theirs)]
    found = Outputs(mode)
    judge = Judge(Observation(), error, tolerance, 2, (EOS_ID,))
    ties, failures, _ = judge.compare(*runs, found)
    assert found.ties == len(ties) and found.sentences == found.equal + found.ties + found.failed == 1
    return ties, failures, found


BEAM = trace(
    [(0, EOS_ID, -1.0), (0, 7, -1.1), (0, 8, -1.2), (0, 9, -1.3)],
    [(0, EOS_ID, -2.00001), (1, EOS_ID, -2.00002), (0, 7, -3.0), (1, 7, -4.0)],
)
FIRST, SECOND, THIRD = ended(value=-1.0), ended(7, value=-1.000005), ended(8, value=-1.00001)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [([FIRST, SECOND], [SECOND, FIRST]), ([FIRST, SECOND], [FIRST, THIRD]), ([FIRST], [SECOND])],
    ids=["in the list", "at its end", "one best"],
)
def test_outputs_of_nearly_equal_values_may_change_places(ours: list[Hypothesis], theirs: list[Hypothesis]) -> None:
    """Also with one that is just below the last, which eager has dropped."""
    ties, failures, _ = verdict((BEAM, ours), (BEAM, theirs))
    assert not failures and ties[0].margin == pytest.approx(5e-6)
    _, failures, _ = verdict((BEAM, ours), (BEAM, theirs), error=2e-6)
    assert failures and "margin 5.00e-06" in describe_divergence(failures[0])


def test_an_output_that_eager_never_had_is_no_tie() -> None:
    _, failures, _ = verdict((BEAM, [FIRST, SECOND]), (BEAM, [FIRST, ended(9, value=-1.000005)]))
    assert failures[0].margin == np.inf


def test_a_candidate_named_twice_is_no_tie() -> None:
    twice = trace([(0, EOS_ID, -1.0), (0, 7, -1.1), (0, 7, -1.1), (0, 8, -1.2)])
    ours = trace([(0, EOS_ID, -1.0), (0, 7, -1.1), (0, 8, -1.1 - 1e-6), (0, 9, -1.3)])
    _, failures, _ = verdict((ours, [FIRST, SECOND]), (twice, [FIRST, FIRST]))
    assert failures[0].margin == np.inf


def test_candidates_that_decide_nothing_may_differ() -> None:
    """Beyond the rows that live on; the sentence's difference lies elsewhere."""
    other = Trace(BEAM.parents.copy(), BEAM.tokens.copy(), BEAM.values, BEAM.margins)
    other.tokens[0, 3] = 5
    ties, _, _ = verdict((BEAM, [FIRST, SECOND]), (other, [SECOND, FIRST]))
    assert len(ties) == 1 and ties[0].step == 0


SAMPLES = trace([(0, 7, -1.0), (0, 8, -1.5)], [(0, 5, -2.0), (1, 6, -2.5)], margins=[[0.5, 0.4], [1e-6, 0.3]])


def samples(first: int, second: int) -> tuple[Trace, list[Hypothesis]]:
    """Two samples that end with these tokens."""
    found = Trace(SAMPLES.parents, SAMPLES.tokens.copy(), SAMPLES.values, SAMPLES.margins)
    found.tokens[1] = first, second
    return found, [ended(7, first, value=0.0), ended(8, second, value=0.0)]


def test_a_tie_of_one_sample_excuses_no_other() -> None:
    ties, failures, _ = verdict(samples(5, 6), samples(9, 6), "sampling")
    assert not failures and (ties[0].step, ties[0].engine_token, ties[0].margin) == (1, 9, 1e-6)
    assert ties[0].eager_score == -1.0, "of the token, not the sum"
    for both in (samples(5, 9), samples(9, 9)):
        _, failures, _ = verdict(samples(5, 6), both, "sampling")
        assert (failures[0].step, failures[0].eager_token, failures[0].margin) == (1, 6, 0.3)
    _, failures, _ = verdict(samples(5, 6), samples(9, 6), "sampling", error=np.nan)
    assert failures, "an error that is not known excuses nothing"
    _, failures, _ = verdict(samples(5, 6), samples(9, 6), "sampling", error=1.0, tolerance=1e-7)
    assert failures, "nor does one beyond the tolerance"


@pytest.mark.parametrize(("score", "passes"), [(-1.00015, True), (-1.00025, False), (np.nan, False), (-np.inf, False)])
def test_scores_of_equal_outputs_count(score: float, passes: bool) -> None:
    """The limit is the tolerance for each of the two tokens; the better first output does not hide the second."""
    outputs = [ended(6, value=-0.9), ended(7, value=-1.0, score=score)]
    ties, failures, found = verdict((BEAM, [outputs[0], ended(7, value=-1.0)]), (BEAM, outputs))
    assert not ties and not failures and (found.equal, found.failed) == (int(passes), int(not passes))
    assert not found.score_max < 1e-4


# Scores


def test_a_small_systematic_error_passes_and_is_reported() -> None:
    report = table_check(Altered(), Altered(lambda source, output, values: values - np.float32(6e-5)))
    assert not report.failures and report.scores_mean == pytest.approx(6e-5, rel=0.02) == report.scores_max
    assert totals(report, "greedy").score_max == pytest.approx(6 * 6e-5, rel=0.02) and all_equal(report)


def test_right_tokens_with_wrong_scores_fail() -> None:
    raised = Careless(worse=lambda source, output, values: values + np.float32(2e-4))
    report = table_check(Altered(), raised)
    assert report.scores_max == 0 and not report.divergences
    assert [failure for failure in report.failures if re.match(r"(greedy|beam): 8 of 8 .* scores by ", failure)]


def test_nan_fails() -> None:
    spoiled = at(2, 1, lower(0, np.nan))
    report = table_check(Altered(), Altered(spoiled))
    assert np.isnan(report.scores_max) and totals(report, "greedy").failed == 1 and len(report.failures) >= 3


# Batches


class Wide(Altered):
    """Its padding leaks: it takes the pad ids for words."""

    def encode(self, src_ids: Ints, src_lengths: Ints, outlook: Any = None) -> TableState:
        return super().encode(src_ids, np.full_like(src_lengths, src_ids.shape[1]))


class Alone(Altered):
    """Wrong for a sentence that is alone."""

    amount = 1.0

    def encode(self, src_ids: Ints, src_lengths: Ints, outlook: Any = None) -> TableState:
        self.alone = len(src_ids) == 1
        return super().encode(src_ids, src_lengths)

    def log_probs(self, source: Tokens, output: Tokens) -> Floats:
        values = super().log_probs(source, output)
        values[len(output) % 2] += np.float32(self.amount * self.alone)
        return values


class Slightly(Alone):
    amount = 1e-3


class Shifted(Altered):
    """When a sentence ends, those behind it get its source."""

    def reorder(self, state: TableState, parents: Ints, sentences: Ints | None = None) -> None:
        sources = list(state.sources)
        super().reorder(state, parents, sentences)
        state.sources = sources[: len(state.sources)]


EVEN = [source for source in SOURCES if len(source) == 4] * 2
EVEN = [[*source[:2], 6 + n, EOS] for n, source in enumerate(EVEN)]
WRONG: dict[str, tuple[type[Altered], list[list[int]], int, set[str]]] = {
    "padding": (Wide, EVEN, 16, {"padded"}),
    "rows": (Alone, EVEN, 16, {"alone"}),
    "scores alone": (Slightly, EVEN, 16, {"alone"}),
    "neighbours": (Shifted, SOURCES, 1, {"neighbours", "shuffled", "joined"}),
}


@pytest.mark.parametrize(("kind", "sources", "batch_tokens", "variants"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_in_some_batches_only_is_found(
    kind: type[Altered], sources: list[list[int]], batch_tokens: int, variants: set[str]
) -> None:
    options = dataclasses.replace(TABLE, batch_tokens=batch_tokens)
    report = table_check(Altered(), kind(), options=options, sources=sources)
    assert not any(row.failed for row in report.outputs), "the usual batches are right"
    assert {row.variant for row in report.invariance if row.failed} == variants
    # The long target is alone at its end, so its scores may tell as well.
    named = [line for line in report.failures if not line.startswith("scores differ")]
    assert named and all(re.match(rf"\w+ \(({'|'.join(variants)})\): ", line) for line in named)
    if kind is not Slightly:
        assert any("the engine in its usual batch" in line for line in report.failures)


@pytest.mark.parametrize(("kind", "sources", "batch_tokens", "variants"), WRONG.values(), ids=WRONG)
def test_no_engine_is_blamed_for_what_eager_shows_too(
    kind: type[Altered], sources: list[list[int]], batch_tokens: int, variants: set[str]
) -> None:
    options = dataclasses.replace(TABLE, batch_tokens=batch_tokens)
    about = {"corpus": "table", "weights_sha256": "", "machine": {}}
    reference = make_reference(kind(), sources, options, about)
    shown, not_blamed = eager_invariance(reference, EOS, Tolerance())
    report, _ = check(kind(), "altered", reference, Tolerance(), not_blamed)
    assert not report.failures and not report.divergences
    assert {row.variant for row in report.invariance if row.not_blamed} == variants
    assert [row.failed for row in shown] == [row.not_blamed for row in report.invariance]


# Decisions that need not be eager's

LOSSY = Tolerance(encoder=0.5, scores=1.0, tokens=False, top1=0.5)


def test_decisions_may_differ_where_the_recipe_says_so() -> None:
    far = at(2, 1, lower(0, 0.9))
    strict = table_check(Altered(), Altered(far), dataclasses.replace(LOSSY, tokens=True, scores=0.001))
    assert totals(strict, "greedy").failed == 1 and any(d.mode == "greedy" for d in strict.divergences)
    report = table_check(Altered(), Altered(noise(0.5)), LOSSY)
    assert sum(row.failed for row in report.outputs) and not report.failures and not report.divergences
    assert 0.4 < report.scores_max <= 0.5 and all(row.equal == row.sentences for row in report.invariance)


def test_scores_have_a_limit_where_decisions_have_none() -> None:
    report = table_check(Altered(), Altered(noise(1.5)), LOSSY)
    assert [failure for failure in report.failures if re.match(r"scores differ by 1\.\d+e\+00", failure)]
    assert len(report.failures) == 1
    report = table_check(Altered(), Altered(at(2, 1, lower(0, np.nan))), LOSSY)
    assert any("scores differ by nan" in failure for failure in report.failures)


# "scores alone" is left out: a rounding that flips moves scores as much.
@pytest.mark.parametrize("case", [case for case in WRONG if case != "scores alone"])
def test_such_an_engine_is_held_to_itself(case: str) -> None:
    """Although it is far from eager, which excuses nothing."""
    kind, sources, batch_tokens, variants = WRONG[case]
    options = dataclasses.replace(TABLE, batch_tokens=batch_tokens)
    report = table_check(Altered(), kind(noise(0.2)), LOSSY, options, sources)
    assert {row.variant for row in report.invariance if row.failed} == variants
    named = [line for line in report.failures if not line.startswith("scores differ")]
    assert named and all(re.match(rf"\w+ \(({'|'.join(variants)})\): ", line) for line in named)
    assert all(d.variant for d in report.divergences)


def test_a_share_of_such_an_engine_may_be_unstable() -> None:
    """In each way of decoding, rounded up; what differs is listed."""

    class Once(Altered):
        """Wrong for one sentence where it is alone."""

        def encode(self, src_ids: Ints, src_lengths: Ints, outlook: Any = None) -> TableState:
            self.alone = len(src_ids) == 1
            return super().encode(src_ids, src_lengths)

        def log_probs(self, source: Tokens, output: Tokens) -> Floats:
            values = super().log_probs(source, output)
            values[len(output) % 2] += np.float32(3 * (self.alone and source == tuple(EVEN[1])))
            return values

    for unstable, passes in ((0.0, False), (0.01, True), (0.4, True)):
        limits = dataclasses.replace(LOSSY, scores=5.0, unstable=unstable)
        report = table_check(Altered(), Once(), limits, sources=EVEN)
        assert totals(report, "greedy", "alone").failed == 1 and (not report.failures) == passes
        assert any(d.variant == "alone" for d in report.divergences)
    limits = dataclasses.replace(LOSSY, scores=0.5, unstable=0.4)  # no share excuses what is further than any rounding
    report = table_check(Altered(), Once(), limits, sources=EVEN)
    assert [
        line
        for line in report.failures
        if re.match(r"\w+ \(alone\): .*, 1 by more than 0\.5 \(tolerance\.scores\)", line)
    ]


class Joined(Altered):
    """Its numbers of improbable tokens, which it hardly takes, are a little off where sentences joined others."""

    joined = False

    def encode(self, src_ids: Ints, src_lengths: Ints, outlook: Any = None) -> TableState:
        self.joined = False
        return super().encode(src_ids, src_lengths)

    def admit(self, state: TableState, src_ids: Ints, src_lengths: Ints, outlook: Any = None) -> None:
        super().admit(state, src_ids, src_lengths)
        self.joined = True

    def log_probs(self, source: Tokens, output: Tokens) -> Floats:
        values = super().log_probs(source, output)
        rng = np.random.default_rng([5, *source, 99, *output])
        off = rng.uniform(-0.04, 0.04, len(values)) * (values < np.sort(values)[-3])
        return (values + off * self.joined).astype(np.float32)


def test_near_ties_of_an_engine_with_itself_are_ties_by_its_noise_in_such_batches() -> None:
    rng = np.random.default_rng(6)
    sources = [[*rng.integers(5, 60, 1 + n % 4).tolist(), EOS] for n in range(30)]
    report = table_check(Altered(), Joined(), LOSSY, dataclasses.replace(TABLE, invariance=30), sources)
    joined = totals(report, "sampling", "joined")
    assert joined.ties and not joined.failed and report.passed, report.failures
    assert 0.035 < report.own_noise < 0.041 and all(tie.margin <= 0.082 for tie in report.ties)


def test_greedy_decisions_of_such_an_engine_have_its_own_margins() -> None:
    """Where its tokens are no longer eager's, whose scores say nothing of them."""

    def near(source: Tokens, output: Tokens, values: Floats) -> Floats:
        if source == tuple(SOURCES[2]) and len(output) == 1:
            values[1] = -np.inf
            values[1] = values.max() - np.float32(5e-4)
        return values

    engine = Slightly(at(2, 0, lower(0, 0.9)), near)  # alone, token 1 is 1e-3 higher
    options = dataclasses.replace(TABLE, batch_tokens=1024)
    report = table_check(Altered(), engine, dataclasses.replace(LOSSY, scores=9.0), options)
    ties = [d for d in report.ties if (d.sentence, d.mode, d.variant) == (2, "greedy", "alone")]
    assert report.passed, report.failures
    assert [(tie.step, round(tie.margin, 5)) for tie in ties] == [(1, 0.0005)]


@pytest.mark.parametrize("share", [0.01, 0.02, 0.15, 0.5])
def test_shares_of_a_few_are_what_chance_does_not_exceed(share: float) -> None:
    """The binomial distribution, by its definition."""
    part = Fraction(str(share))
    for count in (1, 8, 30, 89, 300):
        chances = [comb(count, n) * part**n * (1 - part) ** (count - n) for n in range(count + 1)]
        most = allowed(share, count)
        assert sum(chances[most + 1 :]) <= Fraction(1, 1000) < sum(chances[most:])
    assert [allowed(0.0, 30), allowed(1.0, 30), allowed(0.01, 0)] == [0, 30, 0]


# Text to text


def edited_manifest(bundle: Path, out: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    shutil.copytree(bundle, out)
    manifest = json.loads((out / "manifest.json").read_text())
    change(manifest)
    (out / "manifest.json").write_text(json.dumps({**manifest, "files": hashes(out)}))
    return out


OUTSIDE: dict[str, tuple[Callable[[dict[str, Any]], object], list[str]]] = {
    "first_ids": (
        lambda m: m.update(decoding={"first_ids": [7]}),
        ["default of decoding, first_ids: [7] in the bundle, not set in the checkpoint"],
    ),
    "beams": (
        lambda m: m.update(decoding={"beams": 3}),
        ["default of decoding, beams: 3 in the bundle, not set in the checkpoint"],
    ),
    "prefix": (
        lambda m: m["tokenizer"]["source"].update(prefix=[9]),
        [
            "tokenizer, source prefix: [9] in the bundle, not set in the checkpoint",
            "text: line 1, 'w50', is [9, 50, 3] to the bundle, [50, 3] to the checkpoint",
        ],
    ),
    "suffix": (
        lambda m: m["tokenizer"]["source"].update(suffix=[]),
        [
            "tokenizer, source suffix: [] in the bundle, not set in the checkpoint",
            "text: line 1, 'w50', is [50] to the bundle, [50, 3] to the checkpoint",
        ],
    ),
    "lower": (
        lambda m: [side.update(lower=True) for side in m["tokenizer"].values()],
        [
            "tokenizer, source lower: True in the bundle, not set in the checkpoint",
            "tokenizer, target lower: True in the bundle, not set in the checkpoint",
        ],
    ),
    "one side of a joint tokenizer": (
        lambda m: m["tokenizer"]["target"].update(lower=True),
        ["tokenizer, target lower: True in the bundle, not set in the checkpoint"],
    ),
}
"""What lies outside the graphs: a change of the manifest, and what must be said of it."""


@pytest.mark.parametrize(("change", "lines"), OUTSIDE.values(), ids=OUTSIDE)
def test_what_lies_outside_the_graphs_must_be_the_checkpoints(
    change: Callable[[dict[str, Any]], object], lines: list[str], bundle: Path, stored: Path, tmp_path: Path
) -> None:
    """With a reference alone, as with the checkpoint, which the reference was made of."""
    folder = edited_manifest(bundle, tmp_path / "bundle", change)
    (found,) = gate_of(folder, tmp_path / "nowhere").run(["ort"], load_reference(stored)).engines
    assert found.failures == lines and found.blame == lines[0]


def test_another_tokenizer_is_found_by_a_reference(bundle: Path, stored: Path, tmp_path: Path) -> None:
    """Two words exchanged, and the hashes made to fit, inside the graphs as well."""
    out = edited_manifest(bundle, tmp_path / "bundle", lambda m: m)
    words = out / json.loads((out / "manifest.json").read_text())["tokenizer"]["source"]["file"]
    words.write_text(words.read_text().replace("w50", "w_").replace("w51", "w50").replace("w_", "w51"))
    (out / "manifest.json").write_text(
        json.dumps({**json.loads((out / "manifest.json").read_text()), "files": hashes(out)})
    )
    opened = open_bundle(out)
    for graph in ("encoder", "decoder_step"):
        model = onnx.load(out / f"{graph}.onnx")
        entry = next(each for each in model.metadata_props if each.key == "tformer.tokenizers")
        entry.value = json.dumps(opened.tokenizer_hashes)
        onnx.save(model, out / f"{graph}.onnx")
    edited = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps({**edited, "files": hashes(out)}))
    (found,) = gate_of(out, tmp_path / "nowhere").run(["ort"], load_reference(stored)).engines
    assert found.blame.startswith(f"tokenizer, {words.name}: '") and "text: line 1, 'w50', is [51, 3]" in str(found)


@pytest.mark.parametrize("way", ["--checkpoint", "--reference"])
def test_another_tokenizer_is_a_check_that_failed(
    way: str, bundle: Path, run: Path, stored: Path, tmp_path: Path
) -> None:
    """With the hash of its file made to fit, but not the graphs, which name it as well."""
    out = edited_manifest(bundle, tmp_path / "bundle", lambda m: m)
    words = out / json.loads((out / "manifest.json").read_text())["tokenizer"]["source"]["file"]
    words.write_text(words.read_text().replace("w50", "w_").replace("w51", "w50").replace("w_", "w51"))
    edited = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps({**edited, "files": hashes(out)}))
    done = run_here("check", out, way, {"--checkpoint": run, "--reference": stored}[way])
    said = (done.stderr + done.stdout).decode()
    assert done.returncode == 3 and words.name in said and "source.words" not in said, said
    line = {"--checkpoint": f"{out} has other tokenizers than {run}, {words.name}: export", "--reference": "was edited"}
    assert line[way] in said


def with_defaults(bundle: Path, run: Path, folder: Path, decoding: dict[str, Any]) -> tuple[Path, Gate]:
    """A checkpoint, and the gate of a bundle, with default options."""
    checkpoint, other = open_checkpoint(run), folder / "run"
    shutil.copytree(run, other)
    weights = other / "weights/random.safetensors"
    save_checkpoint(other, checkpoint.config, checkpoint.tokenizers, weights, {}, decoding)
    return other, gate_of(edited_manifest(bundle, folder / "bundle", lambda m: m.update(decoding=decoding)), other)


def test_text_is_decoded_by_the_defaults_of_the_checkpoint(bundle: Path, run: Path, tmp_path: Path) -> None:
    """By eager and by each engine; a fault that only those options meet fails."""
    own = {"beams": 4, "n_best": 1, "length_penalty": 0.6, "first_ids": [8], "max_tokens": 6}
    other, gate = with_defaults(bundle, run, tmp_path, own)
    reference = gate.reference(corpus_of(gate.bundle, dataclasses.replace(SMALL, walks=0)))
    assert reference.defaults and reference.defaults.decoding == own and reference.options.own_beams == 4
    with load(tmp_path / "bundle", backend="eager", checkpoint=other) as translator:
        expected = translator.translate(reference.defaults.lines)
    assert [each.text for each in expected] == reference.defaults.texts and all(each.ids[0] == 8 for each in expected)
    mutate = UNMET["tokens of 4 beams"][1]
    broken = break_graph(tmp_path / "bundle", tmp_path / "broken", "decoder_step", mutate)
    (found,) = gate_of(broken, other).run(["ort"], reference).engines
    assert [line.split(": ")[0] for line in found.failures] == ["defaults"]
    assert found.blame.startswith("line 1 of text: every layer agrees"), found.blame


@pytest.mark.parametrize("beams", [1, 4])
def test_quality_is_that_of_what_translate_writes(beams: int, bundle: Path, run: Path, tmp_path: Path) -> None:
    """With a first token, such as the code of a language, and one that must not come; from a stored reference too."""
    own = {"beams": beams, "first_ids": [8], "suppress": [6], "length_penalty": 0.6, "max_tokens": 6}
    _, gate = with_defaults(bundle, run, tmp_path, own)
    lines = [f"w{i} w{i + 3} w{2 * i} w5" for i in range(4, 14)]
    (tmp_path / "lines.txt").write_text("\n".join(lines) + "\n")
    options = dataclasses.replace(SMALL, walks=0, invariance=0, large_tokens=0, seconds=0)
    corpus = make_corpus(
        gate.bundle.config, gate.bundle.recipe, gate.bundle.tokenizers(), tmp_path / "lines.txt", options
    )
    with load(tmp_path / "bundle") as translator:
        made = [each.text for each in translator.translate(lines)]
        plain = [each.text for each in translator.translate(lines, first_ids=(), suppress=())]
    assert made != plain
    reference = gate.reference(corpus)
    (found,) = gate.run(["ort"], reference, made).engines
    assert found.passed and set(found.quality) == {"defaults"}
    assert found.quality["defaults"]["eager"]["BLEU"] == pytest.approx(100)
    assert found.quality["defaults"]["engine"] == found.quality["defaults"]["eager"]
    reference.save(tmp_path / "eager.npz")
    stored = load_reference(tmp_path / "eager.npz")
    (again,) = gate_of(tmp_path / "bundle", tmp_path / "nowhere").run(["ort"], stored, made).engines
    assert again.quality == found.quality
    with pytest.raises(ArtifactError, match="--tgt: the reference has no translation by the model's default options"):
        gate_of(tmp_path / "bundle", tmp_path / "nowhere").run(
            ["ort"], dataclasses.replace(stored, translated=None), made
        )


# As many sentences as there is time for


@pytest.mark.long
def test_generated_sentences_are_as_many_as_time_allows(bundle: Path, run: Path, tmp_path: Path) -> None:
    """The report says what so many would show; beam search and sampling read the usual ones."""
    gate, usual = gate_of(bundle, run), len(generated_sources(60, 3, 24))
    options = dataclasses.replace(SMALL, walks=0, sentences=60)
    reference = gate.reference(corpus_of(gate.bundle, options))
    assert len(reference.sources) == 60 and reference.options.searched == usual
    reference.save(tmp_path / "eager.npz")
    report = gate.run(["ort"], load_reference(tmp_path / "eager.npz"))
    (found,) = report.engines
    assert [row.sentences for row in found.outputs] == [60, usual, usual] and report.passed
    assert str(report).startswith("generated sources: 60 sentences, ")
    assert "tokens of eager PyTorch; a fault in 1 of 20 sentences shows with 95%\n" in str(report)
    few = gate.reference(corpus_of(gate.bundle, dataclasses.replace(options, seconds=0)))
    assert len(few.sources) == usual and few.options.searched == 0


def test_what_may_differ_is_explained_where_it_stands() -> None:
    text = str(Report(8, 37, "table", "", {}, {}, {}, engines=[table_check(Altered(), Altered(noise(0.5)), LOSSY)]))
    lines = text.splitlines()
    sampling = next(n for n, line in enumerate(lines) if line.startswith("  sampling "))
    assert "may differ: rounded weights are another model, and a draw follows" in lines[sampling + 1]
    assert "may differ: rounded" not in str(
        Report(8, 37, "", "", {}, {}, {}, engines=[table_check(Altered(), Altered())])
    )


# Stored references


def report_of(report: Report) -> dict[str, Any]:
    """What must not depend on the machine and the hour."""
    found = report.to_json()
    for engine in found["engines"]:
        del engine["seconds"]
    return {key: value for key, value in found.items() if key not in ("machine", "reference")}


def test_a_stored_reference_gives_the_same_report(
    bundle: Path, broken: Path, run: Path, reference: Reference, stored: Path
) -> None:
    loaded = load_reference(stored)
    assert (loaded.sources, loaded.options, loaded.machine) == (reference.sources, reference.options, reference.machine)
    for folder in (bundle, broken):
        reports = [gate_of(folder, run).run(["ort"], each) for each in (reference, loaded)]
        assert report_of(reports[0]) == report_of(reports[1]) and reports[0].passed == (folder is bundle)


def rewrite(stored: Path, path: Path, **changes: Any) -> Path:
    """A copy with other entries in its header, or other arrays."""
    with np.load(stored) as file:
        arrays = {name: file[name] for name in file.files}
    header = json.loads(bytes(arrays["header"]))
    header |= {name: value for name, value in changes.items() if name in header}
    arrays |= {name: value for name, value in changes.items() if name not in header}
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "tformer-bundle"}, "is not a reference of tformer check"),
        ({"version": 6}, "has version 6, newer than 5: update"),
        ({"version": 4}, "has version 4, older than 5: make it again with --save-reference"),
        ({"options": {"beams": 0}}, "beams=0: must be at least 1"),
        ({"options": {"beems": 3}}, "beems"),
        ({"options": []}, "is damaged"),
        ({"layers": ["hidden"]}, "is damaged"),
        ({"greedy.sentences": np.arange(3)}, "is damaged"),
        ({"greedy.counts": np.zeros(17, int)}, "is damaged"),
        ({"probes.ranks": np.full(17, 3)}, "is damaged"),
        ({"padded.beam.sentences": np.zeros(0, int)}, "padded.beam has other sentences"),
        ({"sources.flat": np.zeros(4, int)}, "is damaged"),
        ({"wide beam.sentences": np.arange(2)}, "wide beam has other sentences"),
        ({"vocabulary.source": np.zeros((60, 3), np.float32)}, "its vocabularies have another form"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_edited_references_are_refused(changes: dict[str, Any], message: str, stored: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=message) as caught:
        load_reference(rewrite(stored, tmp_path / "edited.npz", **changes))
    assert "edited.npz" in str(caught.value) and "\n" not in str(caught.value)


def test_damaged_references_are_refused(stored: Path, reference: Reference, tmp_path: Path) -> None:
    whole, path = stored.read_bytes(), tmp_path / "damaged.npz"
    cuts = [whole[: len(whole) * n // 7] for n in range(7)]
    flips = [whole[:n] + bytes([whole[n] ^ 0x41]) + whole[n + 1 :] for n in range(40, len(whole), len(whole) // 40)]
    ends = [whole[:n] + bytes([whole[n] ^ 0x11]) + whole[n + 1 :] for n in range(len(whole) - 200, len(whole), 9)]
    for content in [*cuts, *flips, *ends, b"not a zip file", json.dumps({"format": "x"}).encode()]:
        path.write_bytes(content)
        try:
            found = load_reference(path)
        except ArtifactError as error:
            assert "damaged.npz" in str(error)
        else:  # a field that nobody reads, such as a date
            assert found.observed.probes[0].tolist() == reference.observed.probes[0].tolist()
    with pytest.raises(ArtifactError, match="no such reference: make one with tformer check --save-reference"):
        load_reference(tmp_path / "nowhere.npz")


def test_arrays_of_one_value_are_read_but_no_bomb(tmp_path: Path) -> None:
    """The margins of a thousand sentences' beams are all infinite, and compress to a 650th."""
    path, margins = tmp_path / "arrays.npz", np.full(300_000, np.inf, np.float32)
    np.savez_compressed(path, margins=margins, scores=np.random.default_rng(0).random(3000))
    assert np.array_equal(read_arrays(path)["margins"], margins)
    np.savez_compressed(path, margins=margins)
    with pytest.raises(ValueError, match=r"its \d+ bytes unpack to 1200128"):
        read_arrays(path)


def test_a_reference_of_other_weights_is_refused(bundle: Path, run: Path, reference: Reference) -> None:
    with pytest.raises(ArtifactError, match="of other weights"):
        gate_of(bundle, run).run(["ort"], dataclasses.replace(reference, weights_sha256="0" * 64))


WITHOUT_TORCH = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "onnx", "onnxscript", "safetensors"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from tformer_deploy.cli import main
main()
"""


def test_a_stored_reference_needs_neither_torch_nor_onnx(bundle: Path, broken: Path, stored: Path) -> None:
    for folder, code in ((bundle, 0), (broken, 3)):
        command = [sys.executable, "-c", WITHOUT_TORCH, "check", folder, "--reference", stored, "--threads", "1"]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)
        assert done.returncode == code and not done.stderr, done.stderr
        if code:
            assert "FAILED: scores differ by" in done.stdout
            line = next(line for line in done.stdout.splitlines() if "FIRST DIFFERENCE" in line)
            assert "the layer is not known" in line and "pip install '.[train]'" in line


def test_without_onnx_alone_the_sentence_is_known(
    broken: Path, run: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    def layers(*arguments: object) -> dict[str, Floats]:
        raise MissingExtra("the package 'onnx' is not installed: pip install '.[export]'")

    monkeypatch.setattr("tformer_deploy.engines.ort.standard.OrtEngine.layers", layers)
    (found,) = gate_of(broken, run).run(["ort"], reference).engines
    assert re.match(r"sentence \d+; the layer is not known: .*pip install .\.\[export\]", found.blame)


# The gate


def greedy_texts(bundle: Path, reference: Reference) -> list[str]:
    tokenizers, outputs = open_bundle(bundle).tokenizers(), reference.observed.runs["greedy"].outputs
    return [tokenizers.target_text(outputs[i][0].ids) for i in range(len(reference.sources))]


@pytest.mark.long
def test_translations_add_quality(bundle: Path, run: Path, reference: Reference, tmp_path: Path) -> None:
    made = greedy_texts(bundle, reference)
    good = gate_of(bundle, run).run(["ort"], reference, made)
    sides = good.engines[0].quality["greedy"]
    assert good.passed and sides["eager"] == sides["engine"] and sides["eager"]["BLEU"] == pytest.approx(100)
    assert set(sides["eager"]) == {"BLEU", "BLEU lower-cased", "chrF"} and set(good.engines[0].quality) == {
        "greedy",
        "beam",
        "sampling",
    }
    assert "greedy BLEU: eager 100.00, engine 100.00, difference +0.00" in str(good)
    worse = break_graph(bundle, tmp_path / "bundle", "decoder_step", scale("decoder.1.ff.up", 2.0))
    bad = gate_of(worse, run).run(["ort"], reference, made)
    assert any(re.match(r"greedy: BLEU differs by \d+\.\d\d", failure) for failure in bad.engines[0].failures)
    with pytest.raises(ConfigError, match=r"3 reference translations for \d+ sentences"):
        gate_of(bundle, run).run(["ort"], reference, made[:3])


@pytest.mark.long
def test_a_bundle_does_not_choose_its_own_limits(bundle: Path, run: Path, tmp_path: Path) -> None:
    """Graphs that are wrong, and a recipe, in them too, that accepts everything."""
    broken = break_graph(bundle, tmp_path / "broken", "encoder", scale("decoder.1.cross.value", 1.5))
    recipe = json.loads((broken / "manifest.json").read_text())["recipe"]
    recipe["tolerance"] |= {"encoder": 1e300, "scores": 1e300, "bleu": 1e300, "unstable": 1.0}
    for graph in ("encoder", "decoder_step"):
        model = onnx.load(broken / f"{graph}.onnx")
        next(each for each in model.metadata_props if each.key == "tformer.recipe").value = json.dumps(recipe)
        onnx.save(model, broken / f"{graph}.onnx")
    manifest = json.loads((broken / "manifest.json").read_text())
    (broken / "manifest.json").write_text(json.dumps({**manifest, "recipe": recipe, "files": hashes(broken)}))
    done = run_here("check", broken, "--checkpoint", run)
    assert done.returncode == 3 and b"LOOSENED" not in done.stdout and b"limits            encoder 1e-04" in done.stdout
    done = run_here("check", broken, "--checkpoint", run, "--loosened")
    assert b"LOOSENED" in done.stdout


@pytest.mark.long
def test_fp32_is_not_held_to_more_than_eager_can_say(
    bundle: Path, run: Path, reference: Reference, tmp_path: Path
) -> None:
    """What eager itself rounds by widens the limits of fp32, ten times at most."""
    own = reference.rounding
    assert own is not None
    assert 1e-8 < own.encoder < 1e-5 and 1e-8 < own.scores < 1e-5
    assert own.widen(Tolerance()) == Tolerance()
    off = break_graph(bundle, tmp_path / "off", "decoder_step", scale("output", 1.00003))
    gate = gate_of(off, run)
    gate.add_constants = lambda report, recipe: None  # type: ignore[method-assign]  # that finds it in any case
    for scores, passes in ((own.scores, False), (2e-4, True)):
        report = gate.run(["ort"], dataclasses.replace(reference, rounding=Rounding(own.encoder, scores)))
        assert report.passed is passes and f"and {scores:.1e} (scores)" in str(report)
        assert report.engines[0].loosened == [] and 1e-4 < report.engines[0].scores_max < 4e-4
    unknown = dataclasses.replace(reference, rounding=None)
    assert not gate.run(["ort"], unknown).passed and unknown.rounding == own
    assert Rounding(1.0, 1.0).widen(Tolerance()) == Tolerance(encoder=1e-3, scores=1e-3, memory=1e-3)
    assert Rounding(math.nan, math.nan).widen(Tolerance()) == Tolerance()


def test_eagers_rounding_is_that_of_random_late_rows_too(run: Path, reference: Reference) -> None:
    """Where it adds up: a student of Firefox rounds by 3e-4 there, by less than 5e-5 in its own translations."""
    eager = EagerEngine(open_checkpoint(run).load_model())
    exact = eager.in_double()
    with eager, exact:
        pairs = list(late_scores(eager, exact, reference.sources, reference.options))
    assert len(pairs) == eager.limits.tgt_tokens and reference.rounding
    apart = [float(np.abs(ours.astype(np.float64) - theirs).max()) for ours, theirs in pairs]
    assert 0 < max(apart) <= reference.rounding.scores


def test_the_rounding_of_a_module_that_has_no_fp64_is_not_known(reference: Reference) -> None:
    eager = EagerEngine(random_model(small_config()))

    def refuse() -> Engine:
        raise RuntimeError("expected scalar type Float but found Double")

    unknown = eager_rounding(reference, eager, refuse)
    assert not unknown and unknown.unknown == "RuntimeError: expected scalar type Float but found Double"
    assert memory_rounding(refuse, reference.sources, reference.observed.memory) == unknown  # type: ignore[arg-type]
    for rounding in (unknown, reference.rounding):
        report = Report(1, 1, "nothing", "", {}, {}, {}, rounding)
        assert ("rounds by up to" in str(report)) is (rounding is not unknown)


def test_why_the_rounding_is_not_known_is_noted(bundle: Path, run: Path, reference: Reference, tmp_path: Path) -> None:
    class InHalf(EagerEngine):
        def __enter__(self) -> Self:
            raise RuntimeError("expected scalar type\nFloat but found Double")

    half = InHalf(random_model(small_config()))
    unknown = memory_rounding(lambda: half, reference.sources, reference.observed.memory)
    assert not unknown and unknown == eager_rounding(reference, half, lambda: half)
    dataclasses.replace(reference, rounding=unknown).save(tmp_path / "eager.npz")
    report = gate_of(bundle, run).run(["eager"], load_reference(tmp_path / "eager.npz"))
    said = "its module stopped in fp64: RuntimeError: expected scalar type Float but found Double"
    assert [said in note for note in report.notes].count(True) == 1 and said in str(report) and report.passed


def test_an_engine_that_cannot_be_entered_fails_alone(bundle: Path, run: Path, reference: Reference) -> None:
    class Refusing(EagerEngine):
        def __enter__(self) -> Self:
            raise EngineError("ort: the device's memory is full")

    gate = gate_of(bundle, run)
    make = gate.engine
    gate.engine = lambda name: make(name) if name == "eager" else Refusing(random_model(small_config()))  # type: ignore[method-assign]
    report = gate.run(["eager", "ort"], reference)
    assert not report.passed and [engine.passed for engine in report.engines] == [True, False]
    assert report.engines[1].failures == ["ort: the device's memory is full"] and "memory is full" in str(report)


def test_attention_that_a_reference_lacks_is_said_in_a_line(bundle: Path, run: Path, reference: Reference) -> None:
    without = dataclasses.replace(reference, observed=dataclasses.replace(reference.observed, attention={}))
    with pytest.raises(
        ArtifactError, match=r"^the reference has no attention, which eager returns: make it again with"
    ):
        gate_of(bundle, run).run(["eager"], without)


def test_every_module_of_the_room_is_in_its_docstring() -> None:
    names = {path.stem for path in Path(str(check_room.__file__)).parent.glob("*.py")} - {"__init__"}
    assert names <= set(re.findall(r"`(\w+)`", check_room.__doc__ or ""))


def test_loosened_tolerances_are_shown(bundle: Path, run: Path, reference: Reference) -> None:
    opened = open_bundle(bundle)
    loose = dataclasses.replace(opened.recipe, tolerance=Tolerance(scores=0.5, bleu=3.0, tokens=False))
    report = Gate(dataclasses.replace(opened, recipe=loose), run, threads=1).run(["eager"], reference)
    assert report.passed and report.engines[0].loosened == ["scores", "bleu", "tokens"]
    limits = "encoder 1e-04, scores 5e-01 (LOOSENED), bleu 3e+00 (LOOSENED), tokens may differ (LOOSENED)"
    assert f"  limits            {limits}" in str(report)
    assert "options: max_tokens 8, beams 3, n_best 3, " in str(report) and "NOTE: with a beam" not in str(report)
    narrow = dataclasses.replace(report, options={**report.options, "beams": 1})
    assert "NOTE: with a beam of 1, beam search is not compared" in str(narrow)
    (found,) = report.to_json()["engines"]
    assert found["loosened"] == ["scores", "bleu", "tokens"] and found["tolerance"]["scores"] == 0.5


@pytest.mark.parametrize("name", sorted(file.stem for file in recipe_folder().glob("*.toml")))
def test_named_recipes_hold_what_their_precision_should(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.tolerance.wider(own_limits(recipe.target, recipe.precision, recipe.scales)) == []


def test_no_engine_and_no_sentence_fail(bundle: Path, run: Path, reference: Reference) -> None:
    gate = gate_of(bundle, run)
    assert not gate.run([], reference).passed
    empty = gate.run(["ort"], gate.reference(Corpus("nothing", [], SMALL)))
    assert not empty.passed and empty.engines[0].failures == ["the corpus has no sentence"]


def test_figures_that_are_no_numbers_are_null(bundle: Path, run: Path, reference: Reference, tmp_path: Path) -> None:
    spoiled = break_graph(bundle, tmp_path / "bundle", "decoder_step", spoil("decoder.0.attention.value"))
    report = gate_of(spoiled, run).run(["ort"], reference)
    text = json.dumps(report.to_json(), allow_nan=False)
    (engine,) = json.loads(text)["engines"]
    assert (
        not report.passed
        and not engine["passed"]
        and engine["scores_max"] is None
        and engine["steps"][0]["mean"] is None
    )
    assert engine["encoder_max"] < 1e-5 and any("scores differ by nan" in failure for failure in engine["failures"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0: must be at least 1"),
        ({"beams": 0}, "beams=0"),
        ({"n_best": 6}, "n_best=6: must be at most beams=5"),
        ({"n_best": 0}, "n_best=0"),
        ({"invariance": -1}, "invariance=-1: must be at least 0"),
        ({"batch_tokens": 0}, "batch_tokens=0"),
        ({"seed": -1}, "seed=-1"),
        ({"beams": 2.5}, "beams"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CheckOptions(**changes)


def test_a_recipe_without_beams_is_checked_without(bundle: Path, run: Path) -> None:
    opened = open_bundle(bundle)
    axes = dataclasses.replace(opened.recipe.axes, beams=dataclasses.replace(opened.recipe.axes.beams, max=1))
    gate = Gate(dataclasses.replace(opened, recipe=dataclasses.replace(opened.recipe, axes=axes)), run, threads=1)
    reference = gate.reference(corpus_of(opened))
    assert (
        list(reference.options.modes()) == ["greedy", "sampling"] and reference.options.modes()["sampling"].n_best == 1
    )
    assert gate.run(["eager"], reference).passed


def test_a_corpus_is_the_lines_with_text(bundle: Path, tmp_path: Path) -> None:
    opened, lines = open_bundle(bundle), tmp_path / "lines.txt"

    def read() -> Corpus:
        return make_corpus(opened.config, opened.recipe, opened.tokenizers(), lines)

    lines.write_text("w5 w6\n\nw7\n")
    assert read().sources == [[5, 6, 3], [7, 3]] and read().name == "lines.txt" and read().options == CheckOptions()
    lines.write_text("w5\n" + "w6 " * 30)
    with pytest.raises(DataError, match=r"lines.txt:2: a source of 31 tokens exceeds the limit of 24"):
        read()
    lines.write_text("\n\n")
    with pytest.raises(DataError, match="no line with text"):
        read()


def test_generated_sources_hold_a_small_vocabulary() -> None:
    for vocab, longest in ((60, 24), (9, 512), (5, 3), (4000, 512)):
        seen = {token for source in generated_sources(vocab, 3, longest) for token in source}
        assert set(range(4, vocab)) <= seen, (vocab, longest)


def test_generated_sources_cover_the_lengths() -> None:
    sources = generated_sources(100, 3, 512)
    lengths = [len(source) for source in sources]
    assert lengths[:16] == list(range(1, 17)) and lengths[-1] == 512 and len(lengths) <= 48
    assert all(source[-1] == 3 and max(source) < 100 for source in sources)
    assert sources == generated_sources(100, 3, 512)


# The command


@pytest.fixture
def tformer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command in this process: exit code, stdout, stderr."""

    def command(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tformer", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        return int(left.value.code or 0), *capsys.readouterr()

    return command


FLAGS = ("--max-tokens", 6, "--beams", 2, "--invariance", 2, "--threads", 1)


def test_the_command_passes_and_fails(tformer: Any, bundle: Path, broken: Path, run: Path, tmp_path: Path) -> None:
    code, out, _ = tformer("check", bundle, *FLAGS, "--backend", "ort", "--backend", "eager", "--json")
    report = json.loads(out)
    assert code == 0 and report["passed"] and [engine["engine"] for engine in report["engines"]] == ["ort", "eager"]
    assert report["options"] | {"max_tokens": 6, "beams": 2, "n_best": 2, "invariance": 2} == report["options"]
    page = tmp_path / "check.html"
    code, out, _ = tformer("check", broken, "--checkpoint", run, *FLAGS, "--html", page)
    assert code == 3 and "FAILED: scores differ by" in out and out.splitlines()[-1] == "failed"
    assert "FIRST DIFFERENCE: sentence " in out and "decoder_layer_0" in out
    assert page.read_text().startswith("<!DOCTYPE html>") and "decoder_layer_0" in page.read_text()


@pytest.mark.long
def test_the_command_keeps_references(tformer: Any, bundle: Path, broken: Path, tmp_path: Path) -> None:
    lines, path = tmp_path / "lines.txt", tmp_path / "eager.npz"
    lines.write_text("w5 w6 w7\n\nw8\n")
    code, out, _ = tformer("check", bundle, *FLAGS, "--src", lines, "--save-reference", path, "--json")
    assert code == 0 and json.loads(out) == {"reference": str(path)} and path.is_file()
    code, out, _ = tformer("check", bundle, "--reference", path, "--tgt", lines, "--json")
    report = json.loads(out)
    assert code == 0 and report["corpus"] == "lines.txt" and report["sentences"] == 2
    assert "chrF" in report["engines"][0]["quality"]["beam"]["engine"]
    assert tformer("check", broken, "--reference", path)[0] == 3
    code, _, error = tformer("check", bundle, "--reference", path, "--beams", 3)
    assert code == 1 and error.startswith("error: --reference brings its own") and len(error.splitlines()) == 1
    code, _, error = tformer("check", bundle, "--reference", lines)
    assert code == 1 and "lines.txt is damaged" in error and len(error.splitlines()) == 1
