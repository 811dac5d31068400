"""The C++ runtime as an engine of the check: it passes and fails as `ort` does."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tformer_deploy.base.errors import LimitError
from tformer_deploy.bundle.manifest import open_bundle
from tformer_deploy.bundle.recipe import Tolerance
from tformer_deploy.bundle.shortlist import Settings, add_shortlist
from tformer_deploy.check import CheckOptions, Gate, Reference, make_corpus
from tformer_deploy.check.parity import check
from tformer_deploy.check.recording import Run, record
from tformer_deploy.check.reference import make_reference
from tformer_deploy.decoding import Batch, DecodeOptions, Hypothesis, decode
from tformer_deploy.engines import make_engine
from tformer_deploy.engines.base import Floats, Ints
from tformer_deploy.translate.opening import TranslatorOptions, open_translator

from .command import failed_line, printed, run_here, run_process
from .conftest import random_sources
from .cpp_library import ROOT
from .mutations import BEYOND, MUTATIONS, break_graph, changed, plus, scale_one_weight
from .params import long_but
from .plain_decoding import EOS, TableEngine, TableState

pytest.importorskip("tformer_native", reason="tformer-native is not installed: make native")
from tformer_deploy.engines.cpp import CppEngine

SMALL = CheckOptions(max_tokens=8, beams=3, n_best=3, invariance=4, walks=4)
OWN = "the runtime's own search differs from ours [0-9]+ times, the first: "
FLAGS = ("--max-tokens", 6, "--beams", 2, "--invariance", 2, "--threads", 1)


def gate_of(bundle: Path, run: Path, shortlist: bool = False) -> Gate:
    return Gate(open_bundle(bundle), run, threads=1, shortlist=shortlist)


def reference_of(gate: Gate) -> Reference:
    return gate.reference(make_corpus(gate.bundle.config, gate.bundle.recipe, gate.bundle.tokenizers(), None, SMALL))


@pytest.fixture(scope="module")
def reference(bundle: Path, run: Path) -> Reference:
    """Eager's side of a small check; the bundles of the tests have the same weights."""
    return reference_of(gate_of(bundle, run))


def both(bundle: Path, run: Path, reference: Reference, variant: str = "", shortlist: bool = False) -> tuple[Any, Any]:
    """What the check says of a variant in Python and in C++."""
    names = [f"{backend}:{variant}".rstrip(":") for backend in ("ort", "cpp")]
    python, cpp = gate_of(bundle, run, shortlist).run(names, reference).engines
    return python, cpp


def figures(report: Any) -> dict[str, Any]:
    """All that a report says of an engine's outputs, but for what is not of the C++ runtime: names, layers, time."""
    return {**vars(report), "engine": "", "layers": [], "late_layers": [], "seconds": 0, "blame": ""}


# What is right


@pytest.mark.long
def test_the_demo_passes() -> None:
    demo = ROOT / ".demo" / "bundle"
    if not demo.is_dir():
        pytest.skip("no .demo/bundle: make demo")
    report = json.loads(printed(run_here("check", demo, "--backend", "cpp", "--threads", 1, "--json"))[0])
    assert report["passed"] and [each["engine"] for each in report["engines"]] == ["cpp", "cpp:int8"]
    for each in report["engines"]:
        assert each["scores_max"] > 0 and not each["failures"]
        assert {row["mode"] for row in each["outputs"]} == {"greedy", "beam", "sampling"}


def test_workers_share_a_model(variants_bundle: Path) -> None:
    """Each has an engine of its own, over the same sessions."""
    lines = [" ".join(f"w{4 + (7 * i + j) % 50}" for j in range(1 + i % 9)) for i in range(40)]
    found = []
    for workers in (1, 3):
        options = TranslatorOptions(variants_bundle, "cpp", threads=1, workers=workers, batch_tokens=24)
        with open_translator(options) as translator:
            found.append([result.ids for result in translator.translate(lines)])
    assert found[0] == found[1] and len(found[0]) == len(lines)


@pytest.mark.parametrize("variant", long_but(["", "fp32-cpu", "int8", "int8-latency", "int4"], "", "int8"))
def test_every_figure_is_that_of_python(variant: str, variants_bundle: Path, run: Path, reference: Reference) -> None:
    """To the last bit, as both run one ONNX Runtime with one thread."""
    if not variant:
        python, cpp = both(variants_bundle, run, reference)
        assert cpp.passed and figures(cpp) == figures(python)
        return
    python, cpp = both(variants_bundle, run, reference, variant)
    assert cpp.passed, cpp.failures
    assert figures(cpp) == figures(python) and "joined" in {row.variant for row in cpp.invariance}


@pytest.mark.long
def test_attention_is_compared(attention_bundle: Path, run: Path) -> None:
    gate = gate_of(attention_bundle, run)
    python, cpp = both(attention_bundle, run, reference_of(gate))
    assert cpp.passed and cpp.attention_max == python.attention_max > 0


def test_shortlists_are_checked(variants_bundle: Path, run: Path, tmp_path: Path) -> None:
    listed = tmp_path / "bundle"
    shutil.copytree(variants_bundle, listed)
    rng = np.random.default_rng(3)
    sides = [[" ".join(f"w{n}" for n in rng.integers(4, 60, 6)) for _ in range(80)] for _ in range(2)]
    add_shortlist(open_bundle(listed), *sides, Settings(best=2, frequent=4))
    python, cpp = both(listed, run, reference_of(gate_of(listed, run, True)), "fp32-cpu", True)
    assert cpp.passed and figures(cpp) == figures(python) and cpp.scores_mean > 0
    arguments = ("--checkpoint", run, "--shortlist", "--backend", "cpp", "--variant", "fp32-cpu")
    assert printed(run_here("check", listed, *FLAGS, *arguments))[-1] == "passed"


def test_translations_are_those_of_ort(variants_bundle: Path) -> None:
    for variant in ("fp32", "int8"):
        flags = ("--variant", variant, "--beams", 3, "--n-best", 2, "--threads", 1)
        found = [
            printed(run_here("translate", variants_bundle, "--backend", backend, *flags, stdin=b"w5 w6 w7\n\nw8\n"))
            for backend in ("cpp", "ort")
        ]
        assert found[0] == found[1] and len(found[0]) == 5


def test_states_live_side_by_side(bundle: Path) -> None:
    """Two at a time, with steps in turns, give what each gives alone; those that nobody uses are freed."""
    sources = [random_sources(3, 6, seed) for seed in (1, 2)]
    tokens = np.full((3, 1), 5, np.int32)
    with make_engine("cpp", open_bundle(bundle), threads=1) as running:
        alone = []
        for ids, lengths in sources:
            state = running.encode(ids, lengths)
            alone.append([running.step(tokens, state, full=True).log_probs for _ in range(3)])
        states = [running.encode(ids, lengths) for ids, lengths in sources]
        for step in range(3):
            for state, expected in zip(states, alone, strict=True):
                np.testing.assert_array_equal(running.step(tokens, state, full=True).log_probs, expected[step])
        ids, lengths = sources[0]
        with pytest.raises(LimitError, match=r"25 tokens exceeds the limit of 24"):
            running.encode(np.full((1, 25), 5, np.int32), np.array([25], np.int32))
        with pytest.raises(LimitError, match="does not return attention"):
            running.step(tokens, states[0], attention=True)
        with pytest.raises(LimitError, match="cannot add sentences to a running batch"):
            running.admit(states[0], ids, lengths)


# What is wrong with a bundle

BROKEN = (
    *("encoder mask", "encoder outputs, 0", "step mask", "step cross K and V, 0", "step NaN", "step caches"),
    *("rows constant", "worst tokens", "scores of the best", "scores in hundredths"),
    *("encoder K and V, 1", "encoder NaN", "step positions", "output weight", "rows reversed", "ids off by one"),
)


@pytest.mark.parametrize("case", long_but(BROKEN, "encoder mask", "step NaN", "worst tokens"))
def test_broken_graphs_fail_as_in_python(
    case: str, bundle: Path, run: Path, reference: Reference, tmp_path: Path
) -> None:
    graph, mutate, _ = MUTATIONS[case]
    python, cpp = both(break_graph(bundle, tmp_path / "bundle", graph, mutate), run, reference)
    count = len(python.failures)
    assert cpp.failures[:count] == python.failures
    # Rows that have ended, and lists in a wrong order, show where both searches do not have to read the same.
    assert all(re.match(OWN, line) for line in cpp.failures[count:])
    cpp.failures = cpp.failures[:count]
    assert repr(figures(cpp)) == repr(figures(python)), "as text, since NaN is not equal to itself"
    assert cpp.blame == "the layer is not known: the C++ engine shows no layers: --backend ort finds them"


@pytest.mark.parametrize("variant", long_but(["", "fp32-cpu"], ""))
@pytest.mark.parametrize("case", long_but([*BEYOND], "rows of a step"))
def test_faults_of_large_sizes_alone_are_found(
    case: str, variant: str, variants_bundle: Path, run: Path, reference: Reference, tmp_path: Path
) -> None:
    graph, mutate, line = BEYOND[case]
    broken = break_graph(variants_bundle, tmp_path / "bundle", f"{variant}/{graph}".lstrip("/"), mutate)
    python, cpp = both(broken, run, reference, variant)
    assert any(re.match(line, failure) for failure in cpp.failures), cpp.failures
    assert cpp.failures == python.failures


def test_a_slight_fault_of_a_lossy_variant_is_found(
    variants_bundle: Path, run: Path, reference: Reference, tmp_path: Path
) -> None:
    norm = changed("decoder_norm.bias", plus(0.1))
    python, cpp = both(
        break_graph(variants_bundle, tmp_path / "bundle", "int8/decoder_step", norm), run, reference, "int8"
    )
    assert cpp.failures == [line for line in python.failures if not line.startswith("layer ")]
    assert cpp.blame.startswith("constant decoder_norm.bias")


def test_the_command_fails(bundle: Path, run: Path, tmp_path: Path) -> None:
    broken = break_graph(bundle, tmp_path / "bundle", "decoder_step", scale_one_weight)
    done = run_here("check", broken, "--checkpoint", run, "--backend", "cpp", *FLAGS)
    assert done.returncode == 3 and b"FAILED: scores differ by" in done.stdout
    assert done.stdout.splitlines()[-1] == b"failed"
    damaged = tmp_path / "damaged"
    shutil.copytree(bundle, damaged)
    (damaged / "encoder.onnx").write_bytes(b"")
    assert "encoder.onnx does not match its SHA-256" in failed_line(run_here("check", damaged, "--backend", "cpp"))


# What is wrong with a runtime


Where = Callable[[int, DecodeOptions], bool]


class Searching(TableEngine):
    """A table with a search of its own, whose outputs `change` makes others `where` sentences and options are so."""

    searches, batch_tokens = False, 4096

    def __init__(self, change: Any, where: Where = lambda sentences, options: True) -> None:
        super().__init__(7, vocab=9)
        self.change, self.where = change, where

    def search(self, batch: Batch, options: Any, *_: Any, **__: Any) -> list[list[Hypothesis]]:
        found = decode(self, batch, options, strict=False)
        if self.where(len(batch.src_ids), options):
            found = [[self.change(output) for output in outputs] for outputs in found]
        return found

    def cross_keys_values(self, state: TableState) -> list[Floats]:
        return [np.zeros((len(state.sources), 1, state.width, 1), np.float32)]


CHANGES: dict[str, Any] = {
    "a token": lambda h: replace(h, ids=[*h.ids[:-1], 0]),
    "the end": lambda h: replace(h, end_id=None if h.end_id else EOS),
    "the last bit of a score": lambda h: replace(h, score=float(np.nextafter(h.score, 0))),
    "the last bit of a value": lambda h: replace(h, value=float(np.nextafter(h.value, 0))),
}


@pytest.mark.parametrize("options", [{}, {"beams": 2, "n_best": 2}, {"sampling": True, "n_best": 2}], ids=str)
def test_another_search_is_found(options: dict[str, Any]) -> None:
    ids, lengths = random_sources(4, 6)
    batch, asked = Batch(ids, lengths), DecodeOptions(max_tokens=5, **options)

    def same(output: Hypothesis) -> Hypothesis:
        return output

    for change, apart in [(same, 0), *((change, 4) for change in CHANGES.values())]:
        run = Run()
        record(Searching(change), batch, range(4), asked, run)
        assert len(run.outputs) == 4 and len(run.own_search) == apart
        assert all(line.startswith(f"sentence {i + 1}, 4 at once: [(") for i, line in enumerate(run.own_search))


@pytest.mark.parametrize(
    ("where", "line"),
    [
        (lambda sentences, options: options.sampling, r"sampling, sentence \d+, "),
        (lambda sentences, options: sentences == 1, r"greedy, sentence \d+, 1 at once"),
        (lambda sentences, options: sentences > 9, r"greedy \(large\), sentence 1, \d\d at once"),
        (lambda sentences, options: options.beams == 3, "wide beam, sentence "),
    ],
    ids=["sampling", "alone", "large", "wide"],
)
def test_another_search_fails_wherever_it_is(where: Where, line: str) -> None:
    sizes = {"max_tokens": 4, "beams": 2, "n_best": 2, "invariance": 2, "batch_tokens": 16, "wide": 3}
    options = CheckOptions(**sizes, large_tokens=64, vocabulary=False)  # type: ignore[arg-type]
    sources = [[*range(5, 5 + i % 3 + 1), EOS] for i in range(9)]
    right = Searching(lambda output: output)
    reference = make_reference(right, sources, options, {"corpus": "table", "weights_sha256": "", "machine": {}})
    for change, failures in ((CHANGES["the last bit of a score"], [OWN + line]), (lambda output: output, [])):
        found, _ = check(Searching(change, where), "table", reference, Tolerance(), set())
        assert len(found.failures) == len(failures) and all(map(re.match, failures, found.failures)), found.failures


def test_rows_that_are_mixed_up_are_found(
    bundle: Path, run: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    reorder = CppEngine.reorder

    def reversed_rows(self: CppEngine, state: Any, parents: Ints, sentences: Ints | None = None) -> None:
        reorder(self, state, np.ascontiguousarray(parents[:, ::-1]), sentences)

    monkeypatch.setattr(CppEngine, "reorder", reversed_rows)
    (found,) = gate_of(bundle, run).run(["cpp"], reference).engines
    assert not found.passed and re.match(OWN + "(beam|sampling)", found.failures[-1])
    assert any(line.startswith("beam: ") for line in found.failures)


def test_an_onnxruntime_that_is_not_there_is_one_line(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFORMER_ONNXRUNTIME", "/nowhere/libonnxruntime.so")
    line = failed_line(run_process("check", bundle, "--backend", "cpp", *FLAGS))
    assert "ONNX Runtime cannot be loaded (/nowhere/libonnxruntime.so: " in line and "pip install onnxruntime" in line


def test_other_versions_and_benchmarks_are_refused(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run_here("bench", bundle, "--backend", "cpp", "--seconds", 0, "--rounds", 1)
    assert "bench does not measure the C++ runtime: use ort" in failed_line(done)
    assert "--device cuda: the C++ runtime runs on processors" in failed_line(
        run_here("check", bundle, "--backend", "cpp", "--device", "cuda")
    )
    monkeypatch.setattr("tformer_deploy.engines.native.native_version", "9.9.9")
    line = failed_line(run_here("check", bundle, "--backend", "cpp"))
    assert re.search(r"tformer-native is of version 9\.9\.9, this is \d.*: install the wheel", line)
