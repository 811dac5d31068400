"""The C++ runtime's own engine: the gate on every option, the same bits in any batch, hostile programs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tformer_deploy import load
from tformer_deploy.base.errors import ArtifactError, ConfigError, MissingExtra
from tformer_deploy.bundle.contract import PROGRAM
from tformer_deploy.bundle.manifest import MANIFEST, hashes, open_bundle
from tformer_deploy.bundle.recipe import Recipe
from tformer_deploy.bundle.shortlist import Settings, add_shortlist
from tformer_deploy.check import CheckOptions, Gate, make_corpus
from tformer_deploy.check.restricted import with_shortlist
from tformer_deploy.engines import encoder_names, engine_name, expand, make_encoder, make_engine
from tformer_deploy.engines.base import Engine, Floats
from tformer_deploy.engines.eager import EagerEngine
from tformer_deploy.export.checked import export_checked
from tformer_deploy.model.checkpoint import open_checkpoint
from tformer_deploy.model.network import Attention

from . import test_native_models
from .configs import EVERYTHING, OTHERS, T5
from .conftest import random_sources, small_config, write_checkpoint, write_lines
from .cpp_library import Model, built
from .cpp_library import Translator as CppTranslator
from .params import long_but
from .program_mutations import PROGRAM_NUMBERS, ProgramMutation, break_program
from .test_cpp import in_python

pytest.importorskip("tformer_native", reason="tformer-native is not installed: make native")
RECIPES = ("native-fp32", "native-bf16", "native-int8", "native-int4", "native-int8-bf16-cache")
EXACT, ROUNDED, CACHED = RECIPES[0], RECIPES[2], RECIPES[4]
ANNOTATED: dict[str, object] = {
    "norm": "annotated",
    "norm_eps": 1e-3,
    "activation": "silu",
    "head_dim": 7,
    "decoder_layers": 1,
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of the small model with both programs. Read only."""
    folder = tmp_path_factory.mktemp("native")
    run = write_checkpoint(folder / "run", small_config())
    report = export_checked(run, folder / "bundle", RECIPES, write_lines(folder / "text"), memory=True)
    assert [each.engine for each in report.engines] == ["ort", *(f"native:{name}" for name in sorted(RECIPES))]
    exact = next(each for each in report.engines if each.engine == f"native:{EXACT}")
    assert exact.attention_max is not None and exact.attention_max < 1e-5
    assert exact.memory and exact.memory.largest < 1e-5
    return folder / "bundle"


@pytest.fixture(scope="module")
def listed(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with lists of about a dozen tokens. Read only."""
    out = tmp_path_factory.mktemp("listed") / "bundle"
    shutil.copytree(exported, out)
    rng = np.random.default_rng(3)
    sides = [[" ".join(f"w{n}" for n in rng.integers(4, 60, 6)) for _ in range(80)] for _ in range(2)]
    add_shortlist(open_bundle(out), *sides, Settings(best=2, frequent=4))
    return out


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    long_but({"everything": EVERYTHING, "t5": T5, "others": OTHERS, "annotated": ANNOTATED}, "annotated"),
)
def test_options_pass_the_gate(options: dict[str, object], tmp_path: Path) -> None:
    run, text = write_checkpoint(tmp_path / "run", small_config(**options)), write_lines(tmp_path / "text")
    report = export_checked(run, tmp_path / "bundle", [EXACT, ROUNDED], text)
    assert report.passed and len(report.engines) == 3, str(report)


def test_programs_in_bf16_pass_without_loosened_limits(exported: Path) -> None:
    bundle = open_bundle(exported)
    gate = Gate(bundle, exported.parent / "run", threads=1, loosened=False)
    options = CheckOptions(max_tokens=8, beams=3, n_best=3, invariance=2, walks=4)
    reference = gate.reference(make_corpus(bundle.config, bundle.recipe, bundle.tokenizers(), None, options))
    (found,) = gate.run(["native:native-bf16"], reference).engines
    assert found.passed, found.failures
    assert found.tolerance == bundle.variants["native-bf16"].tolerance and not found.loosened


def steps(engine: Engine, ids: Any, lengths: Any, beams: int = 3, count: int = 6) -> list[Floats]:
    """Log-probabilities and attention of some steps in which rows move, by a rule that knows no neighbours: (B, K, V),
    (B, K, S) each."""
    state = engine.encode(ids, lengths)
    batch, found = len(lengths), []
    tokens = np.full((batch, 1), 2, np.int32)
    for step in range(count):
        scores = engine.step(tokens, state, full=True, attention=True)
        assert scores.log_probs is not None and scores.attention is not None
        found += [scores.log_probs.copy(), scores.attention[:, :, : ids.shape[1]].copy()]
        parents = (np.arange(beams) + step) % tokens.shape[1]
        tokens = np.ascontiguousarray(scores.ids[:, parents, 0] + np.arange(beams, dtype=np.int32) % 5, np.int32)
        engine.reorder(state, (np.arange(batch)[:, None] * scores.ids.shape[1] + parents).astype(np.int32))
    return found


@pytest.mark.parametrize("shortlist", [False, True], ids=["all tokens", "shortlist"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_scores_depend_on_nothing_but_their_sentence(recipe: str, shortlist: bool, listed: Path) -> None:
    """Alone, in a batch, with padding, on one thread or three: the same bits."""
    bundle, (ids, lengths) = open_bundle(listed), random_sources(5, 20)
    with (
        make_engine(f"native:{recipe}", bundle, None, 1, shortlist) as one,
        make_engine(f"native:{recipe}", bundle, None, 3, shortlist) as three,
    ):
        together = steps(one, ids, lengths)
        for other in (
            steps(three, ids, lengths),
            steps(three, np.pad(ids, ((0, 0), (0, 3)), constant_values=1), lengths),
        ):
            assert all(np.array_equal(a, b[:, :, : a.shape[2]]) for a, b in zip(together, other, strict=True))
        for row, length in enumerate(lengths):
            alone = steps(one, ids[row : row + 1, :length], lengths[row : row + 1])
            assert all(np.array_equal(a[row, :, : b.shape[2]], b[0]) for a, b in zip(together, alone, strict=True))


def test_caches_hold_the_nearest_numbers_in_bf16(exported: Path) -> None:
    bundle, (ids, lengths) = open_bundle(exported), random_sources(5, 20)
    with make_engine(f"native:{ROUNDED}", bundle) as whole, make_engine(f"native:{CACHED}", bundle) as half:
        exact, found = (engine.cross_keys_values(engine.encode(ids, lengths)) for engine in (whole, half))
    for each, other in zip(exact, found, strict=True):
        assert np.array_equal(torch.from_numpy(each).bfloat16().float().numpy(), other)


def test_steps_over_caches_in_bf16_are_those_of_eager(tmp_path: Path) -> None:
    """Of PyTorch whose keys and values are rounded, over more steps than caches have room for at first."""
    changes: dict[str, object] = {"encoder_layers": 1, "decoder_layers": 1, "max_positions": 40}
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "run", small_config(**changes)))
    model, tokens = checkpoint.load_model().eval(), list[Any]()
    batch, count = test_native_models.batch_of(model.config), model.config.max_positions
    with EagerEngine(model) as eager:
        exact = test_native_models.steps(eager, batch, tokens, count)
        for each in model.decoder.modules():
            if isinstance(each, Attention):
                for layer in (each.key, each.value):
                    layer.register_forward_hook(lambda _layer, _inputs, made: made.bfloat16().float())
        rounded = test_native_models.steps(eager, batch, tokens, count)
    recipe = Recipe("native", cache="static", cache_precision="bf16")
    test_native_models.export_programs(checkpoint, tmp_path / "bundle", {}, {"half": recipe})
    with make_engine("native:half", open_bundle(tmp_path / "bundle", graphs=False), threads=1) as engine:
        found = test_native_models.steps(engine, batch, tokens, count)
    assert test_native_models.apart(found, rounded) < 0.05 * test_native_models.apart(exact, rounded)


@pytest.mark.parametrize("case", long_but(PROGRAM_NUMBERS, "cross scale"))
def test_what_rounding_hides_is_seen_without(case: tuple[str, ProgramMutation], exported: Path, tmp_path: Path) -> None:
    variant, mutate = case
    broken = open_bundle(break_program(exported, tmp_path / "bundle", variant, mutate))
    gate = Gate(broken, exported.parent / "run", threads=1)
    options = CheckOptions(max_tokens=8, beams=3, n_best=3, invariance=0, large_tokens=0)
    reference = gate.reference(make_corpus(broken.config, broken.recipe, broken.tokenizers(), None, options))
    (found,) = gate.run([f"native:{variant}"], reference).engines
    assert found.constants and not found.constants.wrong
    assert any(line.startswith("without its rounding: ") for line in found.failures), found.failures


def test_lists_pass_the_gate(listed: Path, exported: Path) -> None:
    """Against eager PyTorch over the same lists."""
    gate = Gate(open_bundle(listed), exported.parent / "run", threads=1, shortlist=True)
    options = CheckOptions(max_tokens=8, beams=3, n_best=3, invariance=4, walks=4)
    bundle = gate.bundle
    reference = gate.reference(make_corpus(bundle.config, bundle.recipe, bundle.tokenizers(), None, options))
    names = [f"native:{name}" for name in with_shortlist(bundle, ["native"], [])]
    assert names == [f"native:{name}" for name in RECIPES]
    report = gate.run(names, reference)
    assert report.passed, report.failures
    exact = report.engines[0]
    assert all(each.equal == each.sentences for each in (*exact.outputs, *exact.invariance)) and exact.scores_max < 1e-5
    with gate.engine(names[0]) as engine:
        assert not engine.admits  # a sentence that joins would need rows that the list has not


def test_backends_run_those_of_the_variants_that_they_have(run: Path, tmp_path: Path) -> None:
    report = export_checked(run, tmp_path / "bundle", ["int8", "native-int8"], write_lines(tmp_path / "text"))
    assert report.passed
    bundle = open_bundle(tmp_path / "bundle")
    add_shortlist(bundle, ["w5 w6"] * 9, ["w7 w8"] * 9, Settings(best=2, frequent=4))
    bundle, both = open_bundle(tmp_path / "bundle"), ["ort", "native"]
    for backends, variants, expected in (
        (both, [], ["ort:int8", "native:native-int8"]),
        (["cpp:int8"], [], ["cpp:int8"]),
        (["native", "ort:int8"], [], ["native:native-int8", "ort:int8"]),
        (both, ["int8"], ["ort:int8"]),
    ):
        chosen = with_shortlist(bundle, backends, variants)
        assert expand(backends, chosen, bundle) == expected
        assert all(make_engine(name, bundle, shortlist=True) for name in expected)
    assert expand(both, ["int8"], bundle) == ["ort:int8"]
    assert expand(both, ["native-int8", "fp32"], bundle) == ["ort", "native:native-int8"]
    with pytest.raises(ConfigError, match=r"unknown variant 'int4': .*valid: fp32, int8, native-int8"):
        expand(both, ["int4"], bundle)
    with pytest.raises(ConfigError, match="--shortlist: eager has no graphs for it: leave out --backend eager"):
        with_shortlist(bundle, ["native", "eager"], [])


@pytest.mark.parametrize("recipe", [EXACT, CACHED])
@pytest.mark.parametrize("shortlist", [False, True], ids=["all tokens", "shortlist"])
def test_the_library_and_python_align_alike(shortlist: bool, recipe: str, listed: Path) -> None:
    """The C++ search and Python's over the same steps, with attention: outputs, scores and alignments."""
    asked, lines = {"align": True, "beams": 3, "coverage_penalty": 0.2}, [f"w{n} w{n + 7} w9" for n in range(4, 12)]
    chosen: Any = {"backend": "native", "variant": recipe, "threads": 1, "shortlist": shortlist}
    with Model(listed, **chosen) as model, CppTranslator(model, **asked) as translator:
        found = translator.translate(lines)
    with load(listed, **chosen, **asked) as reference:
        assert found == in_python(reference, lines)
    assert all(len(each[0].alignment) == len(each[0].ids) > 0 for each in found)


def test_the_encoder_alone(exported: Path) -> None:
    """Its vectors depend on nothing but their sentence; the gate has compared them with eager's."""
    bundle, (ids, lengths) = open_bundle(exported), random_sources(4, 9)
    assert encoder_names(bundle) == ["ort", *(f"native:{name}" for name in sorted(RECIPES))]
    with make_encoder("native", bundle, threads=2) as encoder:
        found = encoder.memory(ids, lengths)
        assert found.shape == (4, 9, bundle.config.encoder.width)
        for row, length in enumerate(lengths):
            alone = encoder.memory(ids[row : row + 1, :length], lengths[row : row + 1])
            assert np.array_equal(found[row, :length], alone[0])


@pytest.mark.parametrize("recipe", [EXACT, CACHED])
def test_sentences_join_and_leave(recipe: str, exported: Path) -> None:
    """A sentence that joins others at another step, in the place of one that left, gets what it gets alone."""
    ids, lengths = random_sources(3, 12)
    with make_engine(f"native:{recipe}", open_bundle(exported), threads=2) as engine:
        alone = [steps(engine, ids[i : i + 1, :n], lengths[i : i + 1], 1, 4)[::2] for i, n in enumerate(lengths)]
        state, tokens = engine.encode(ids[:2], lengths[:2]), np.full((2, 1), 2, np.int32)
        assert engine.admits
        for step in range(2):
            scores = engine.step(tokens, state, full=True)
            assert np.array_equal(scores.log_probs, np.concatenate([alone[0][step], alone[1][step]]))  # type: ignore[arg-type]
            tokens = scores.ids[:, :, 0].copy()
        engine.reorder(state, np.array([[1]], np.int32), np.array([1], np.int32))
        engine.admit(state, ids[2:, : lengths[2]], lengths[2:])
        tokens = np.array([[tokens[1, 0]], [2]], np.int32)
        for step in range(2):
            scores = engine.step(tokens, state, full=True)
            assert np.array_equal(scores.log_probs, np.concatenate([alone[1][2 + step], alone[2][step]]))  # type: ignore[arg-type]
            tokens = scores.ids[:, :, 0].copy()


def test_best_tokens_are_those_of_all_scores(exported: Path) -> None:
    ids, lengths = random_sources(4, 9)
    with make_engine("native:native-int8", open_bundle(exported), threads=2) as engine:
        state = engine.encode(ids, lengths)
        full = engine.step(np.full((4, 1), 2, np.int32), state, full=True)
        order = np.argsort(-full.log_probs, axis=-1, kind="stable")[..., : full.ids.shape[2]]  # type: ignore[operator]
        assert np.array_equal(full.ids, order)
        assert np.array_equal(full.scores, np.take_along_axis(full.log_probs, order, -1))  # type: ignore[arg-type]
        assert np.allclose(np.exp(full.log_probs).sum(-1), 1, atol=1e-5)  # type: ignore[arg-type]


ALONE = """
import time, sys
from pathlib import Path
from tformer_deploy import load
with load(sys.argv[1], backend="native", variant="native-fp32", threads=3) as translator:
    translator.translate(["w5 w6 w7", "w5"])
    maps, before = Path("/proc/self/maps").read_text(), time.process_time()
    time.sleep(0.5)
    print("weights.data" in maps, "onnxruntime" in maps, "torch" in sys.modules, time.process_time() - before < 0.2)
"""


def test_onnxruntime_is_not_opened_and_idle_threads_sleep(exported: Path) -> None:
    """An engine that nobody asks takes no time of the processor."""
    done = subprocess.run([sys.executable, "-c", ALONE, exported], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False", "False", "True"]


def test_names_and_refusals(exported: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no program for native: export it again and add --recipe native-int8"):
        make_engine("native", open_bundle(bundle))
    with pytest.raises(ConfigError, match=r"has no program for native"):
        engine_name("native", "native-int8", open_bundle(bundle))
    with pytest.raises(ConfigError, match=r"unknown backend 'ort:native-int8'"):
        make_engine("ort:native-int8", open_bundle(exported))
    with pytest.raises(ConfigError, match=r"has no shortlist: tformer shortlist"):
        make_engine("native:native-int8", open_bundle(exported), shortlist=True)
    monkeypatch.delitem(sys.modules, "tformer_deploy.engines.native", raising=False)
    monkeypatch.setitem(sys.modules, "tformer_native", None)
    with pytest.raises(MissingExtra, match=r"tformer-native is not installed: install the wheel that was released"):
        export_checked(exported.parent / "run", tmp_path / "out", RECIPES)
    assert not (tmp_path / "out").exists()


def edited(exported: Path, folder: Path, edit: Callable[[Any], object]) -> Path:
    """A copy of the bundle whose fp32 program is another, with the right hashes."""
    shutil.copytree(exported, folder)
    path = folder / "native-fp32" / PROGRAM
    program = json.loads(path.read_text())
    edit(program)
    path.write_text(json.dumps(program))
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, "files": hashes(folder)}))
    return folder


def step_of(program: Any) -> Any:
    return program["graphs"]["decoder_step"]


def apart(step: Any) -> None:
    """Have the first self-attention read its queries from another value than its keys."""
    first = next(each for each in step["code"] if each["op"] == "self")
    first["q"] = [0, 0, first["q"][2]]


EDITS: dict[str, tuple[Callable[[Any], object], str]] = {
    "version": (lambda p: p.update(version=2), "is a program of version 2, this tformer runs 1"),
    "format": (lambda p: p.update(format="other"), "it is no program"),
    "list": (lambda p: p.update(graphs=[]), "no graph 'encoder'"),
    "offset": (lambda p: p["arrays"][0].update(offset=1 << 40), "offset is 1099511627776"),
    "alignment": (lambda p: p["arrays"][0].update(offset=4), "is not at a multiple of 64"),
    "shape": (lambda p: p["arrays"][0]["shape"].append(1 << 50), "size is 1125899906842624"),
    "dtype": (lambda p: p["arrays"][0].update(dtype="float64"), "has an unknown dtype"),
    "width": (lambda p: step_of(p)["widths"].__setitem__(0, 1 << 30), "a width is 1073741824"),
    "register": (lambda p: step_of(p)["code"][1].update(x=[999, 0, 32]), "x is 999"),
    "columns": (lambda p: step_of(p)["code"][1].update(x=[0, 8, 32]), "x is 32"),
    "unwritten": (lambda p: step_of(p)["code"][1].update(x=[5, 0, 32]), "x reads what nothing has written"),
    "twice": (lambda p: step_of(p)["code"][1].update(out=0), "out is written twice"),
    "operation": (lambda p: step_of(p)["code"][1].update(op="jump"), 'op is "jump"'),
    "order": (lambda p: step_of(p)["code"].reverse(), "reads what nothing has written"),
    "end": (lambda p: step_of(p)["code"].pop(), "the step lacks layers or its end"),
    "layer": (lambda p: step_of(p)["code"][3].update(layer=7), "layer is 7"),
    "heads": (lambda p: step_of(p)["code"][3].update(heads=2, size=16), "it has other heads than the model"),
    "heads of a norm": (lambda p: step_of(p)["code"][1].update(heads=3), "heads do not divide its width"),
    "strides": (lambda p: apart(step_of(p)), "q, k and v are of values of different widths"),
    "numbers": (lambda p: step_of(p)["code"][1].update(eps="0"), "eps is no number"),
    "model": (
        lambda p: p["metadata"].update({"tformer.weights_sha256": "0"}),
        "is of another model, recipe or tokenizer",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_hostile_program_is_refused_in_one_line(name: str, exported: Path, tmp_path: Path) -> None:
    edit, expected = EDITS[name]
    folder = edited(exported, tmp_path / "bundle", edit)
    with pytest.raises(ArtifactError) as refused, make_engine("native:native-fp32", open_bundle(folder), threads=1):
        pass
    assert expected in str(refused.value) and "\n" not in str(refused.value)


def test_changed_weights_are_refused(exported: Path, tmp_path: Path) -> None:
    shutil.copytree(exported, tmp_path / "bundle")
    with (tmp_path / "bundle/native-fp32/weights.data").open("r+b") as file:
        file.write(b"other")
    with (
        pytest.raises(ArtifactError, match=r"weights\.data.*"),
        make_engine("native:native-fp32", open_bundle(tmp_path / "bundle", graphs=False), threads=1),
    ):
        pass


def test_no_kernel_runs_before_the_processor_is_asked() -> None:
    """A table that is not a constant would be filled when the library loads, by instructions that may be missing."""
    objects = sorted((built() / "src/kernels").rglob("*.o"))
    assert {path.name.partition(".")[0] for path in objects} >= {"portable", "avx2", "avx512", "amx"}
    for path in objects:
        symbols = subprocess.run(["nm", path], check=True, capture_output=True, text=True).stdout
        assert path.name.startswith("choose") or "_GLOBAL__sub_I" not in symbols, path
