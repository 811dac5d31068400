"""`check` and `bench` with a shortlist: its graphs against eager PyTorch that may use no more than it allows."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from tformer_deploy.base.errors import ArtifactError, ConfigError
from tformer_deploy.bundle.manifest import open_bundle
from tformer_deploy.bundle.shortlist import Settings, add_shortlist, open_shortlist
from tformer_deploy.check import CheckOptions, Corpus, Gate, make_corpus
from tformer_deploy.check.restricted import RestrictedEngine, restrict, with_shortlist
from tformer_deploy.engines.base import Outlook
from tformer_deploy.engines.ort.library import has_vnni

from .command import run_here
from .conftest import random_sources
from .mutations import Mutation, break_graph, changed, round_scores, row, times

SMALL = CheckOptions(max_tokens=8, beams=3, n_best=3, invariance=4, walks=4)
EXACT = "fp32-cpu"


@pytest.fixture(scope="module")
def listed(variants_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The variants with lists of about a dozen tokens. Read only."""
    out = tmp_path_factory.mktemp("listed") / "bundle"
    shutil.copytree(variants_bundle, out)
    rng = np.random.default_rng(3)
    sides = [[" ".join(f"w{n}" for n in rng.integers(4, 60, 6)) for _ in range(80)] for _ in range(2)]
    add_shortlist(open_bundle(out), *sides, Settings(best=2, frequent=4))
    return out


def gate_of(bundle: Path, run: Path, shortlist: bool = True) -> Gate:
    return Gate(open_bundle(bundle), run, threads=1, shortlist=shortlist)


def corpus_of(gate: Gate) -> Corpus:
    return make_corpus(gate.bundle.config, gate.bundle.recipe, gate.bundle.tokenizers(), None, SMALL)


@pytest.mark.long
def test_every_variant_holds_its_limits_with_a_shortlist(listed: Path, run: Path) -> None:
    gate = gate_of(listed, run)
    names = [f"ort:{name}" for name in with_shortlist(gate.bundle, ["ort"], [])]
    assert names == ["ort:fp32-cpu", "ort:int8", "ort:int8-latency", "ort:int4"]
    reference = gate.reference(corpus_of(gate))
    plain = gate_of(listed, run, shortlist=False)
    usual = plain.reference(corpus_of(plain))
    assert reference.shortlist.startswith("shortlist-") and not usual.shortlist
    outputs = [[h.ids for h in side.observed.runs["beam"].outputs[5]] for side in (reference, usual)]
    assert outputs[0] != outputs[1], "the lists leave something out"
    report = gate.run([name for name in names if name != "ort:int8" or has_vnni()], reference)
    assert report.passed, report.failures
    assert f"with {reference.shortlist}: both sides score what it allows" in str(report)
    exact = report.engines[0]
    assert all(each.equal == each.sentences for each in (*exact.outputs, *exact.invariance)) and exact.scores_max < 1e-5
    assert exact.scores_count and exact.scores_mean > 0, "not all is minus infinity"


SHORT: dict[str, tuple[str, Mutation]] = {
    "a row of the table": ("short_rows", changed("output.weight", row(5, times(-1)))),
    "rounded scores": ("short_step", round_scores(1e-2, everywhere=True)),
    "rounded choice": ("short_step", round_scores(1e-2, everywhere=False)),
}


@pytest.mark.parametrize(("graph", "mutate"), SHORT.values(), ids=SHORT)
def test_what_is_wrong_with_a_shortlist_alone_is_found(
    graph: str, mutate: Mutation, listed: Path, run: Path, tmp_path: Path
) -> None:
    broken = break_graph(listed, tmp_path / "bundle", f"{EXACT}/{graph}", mutate)
    gate = gate_of(broken, run)
    (found,) = gate.run([f"ort:{EXACT}"], gate.reference(corpus_of(gate))).engines
    assert any(re.match(r"scores (differ|of the best)", line) for line in found.failures), found.failures
    assert found.encoder_max < 1e-5 and not found.passed


def test_a_reference_says_with_which_lists_it_was_made(listed: Path, run: Path, tmp_path: Path) -> None:
    path, flags = tmp_path / "eager.npz", ("--threads", 1, "--max-tokens", 6, "--beams", 2, "--invariance", 2)
    done = run_here("check", listed, "--checkpoint", run, *flags, "--shortlist", "--save-reference", path)
    assert done.returncode == 0, done.stderr
    done = run_here("check", listed, "--reference", path, "--variant", EXACT, "--shortlist", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["shortlist"] and [e["engine"] for e in report["engines"]] == ["ort:fp32-cpu"]
    done = run_here("check", listed, "--reference", path, "--variant", EXACT)
    assert done.returncode == 1 and b"the check with no shortlist: make it again as you check" in done.stderr


def test_a_check_with_a_shortlist_needs_graphs_and_lists(
    bundle: Path, variants_bundle: Path, listed: Path, run: Path
) -> None:
    opened = open_bundle(listed)
    with pytest.raises(ConfigError, match="--shortlist: eager has no graphs for it: leave out --backend eager"):
        with_shortlist(opened, ["ort", "eager"], [])
    with pytest.raises(ConfigError, match="has no variant for it: export it again, with --recipe int8"):
        with_shortlist(open_bundle(bundle), ["ort"], [])
    with pytest.raises(ConfigError, match="has no shortlist: tformer shortlist"):
        gate_of(variants_bundle, run)
    gate = gate_of(listed, run)
    reference = dataclasses.replace(gate.reference(corpus_of(gate)), shortlist="shortlist-000000000000.npz")
    with pytest.raises(ArtifactError, match=r"the reference was made with shortlist-0+.npz, the check"):
        gate.run([f"ort:{EXACT}"], reference)


def test_the_restricted_engine_allows_what_is_required(listed: Path, run: Path) -> None:
    plain = gate_of(listed, run, shortlist=False).plain_eager()
    lists = open_shortlist(open_bundle(listed), EXACT)
    src_ids, lengths = random_sources(3, 5)
    allowed = lists.allowed(src_ids, lengths)
    with RestrictedEngine(plain, lists) as engine:
        outside = int(np.flatnonzero(~allowed[1])[0])
        state = engine.encode(src_ids, lengths, Outlook(required=[[], [outside], []]))
        found = engine.step(np.full((3, 1), 2, np.int32), state, full=True)
        assert found.log_probs is not None
        assert np.isfinite(found.log_probs[1, 0, outside]) and not state.allowed[2].all()
        assert np.allclose(np.exp(found.log_probs.astype(np.float64)).sum(-1), 1, atol=1e-6)
        assert (np.isfinite(found.log_probs[:, 0]) == state.allowed).all()
        engine.reorder(state, np.array([[2]], np.int32), np.array([2], np.int32))
        again = engine.step(found.ids[2:, :, 0], state, full=True).log_probs
        assert again is not None and (np.isfinite(again[0, 0]) == allowed[2]).all()


def test_restricted_scores_are_renormalised() -> None:
    log_probs = np.log(np.array([[[0.5, 0.3, 0.2]]], np.float32))
    found = np.exp(restrict(log_probs, np.array([[True, False, True]])))
    assert np.allclose(found, [[[5 / 7, 0, 2 / 7]]])


def test_bench_measures_with_a_shortlist(listed: Path, variants_bundle: Path) -> None:
    sizes = ("--batch", 2, "--beam", 1, "--src-len", 5, "--new-tokens", 4, "--rounds", 1, "--seconds", 0)
    done = run_here("bench", listed, "--variant", EXACT, "--shortlist", *sizes, "--threads", 1, "--profile", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["shortlist"].startswith("shortlist-") and [e["engine"] for e in report["engines"]] == ["ort:fp32-cpu"]
    (point,) = report["points"]
    assert point["encoder_bound"] and not point["step_bound"], "what a step reads depends on its lists"
    assert point["kinds"]
    done = run_here("bench", variants_bundle, "--shortlist", *sizes)
    assert done.returncode == 1 and b"has no shortlist: tformer shortlist" in done.stderr
