"""Variants of a bundle: how they are chosen and shipped, what is refused, and every command that takes --variant."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tformer_deploy import load
from tformer_deploy.base.errors import ArtifactError, ConfigError
from tformer_deploy.bundle.manifest import Exported, open_bundle, write_manifest
from tformer_deploy.bundle.recipe import load_recipe
from tformer_deploy.check import CheckOptions, Gate, Reference, make_corpus
from tformer_deploy.engines import engine_name, engine_names, expand, make_engine, threads_each
from tformer_deploy.engines.ort.in_place import InPlaceEngine
from tformer_deploy.engines.ort.standard import OrtEngine
from tformer_deploy.export.calibrate import input_ranges, layer_noise
from tformer_deploy.export.checked import choose, export_checked
from tformer_deploy.model.checkpoint import open_checkpoint
from tformer_deploy.translate.batches import LINES_EACH, suitable_workers

from .command import failed_line, printed, run_here
from .conftest import pretend_cores, small_config, write_checkpoint, write_lines
from .mutations import (
    BEYOND,
    CONSTANTS,
    LATE_POSITIONS,
    ROUNDING,
    UNMET,
    UNMET_JOINED,
    Change,
    Mutation,
    break_graph,
    change_output,
    change_tensor,
)
from .params import long_but

VARIANTS = ["fp32-cpu", "int8", "int8-latency", "int4"]
ORT_CPU = 'target = "ort-cpu"\ncache = "static"\n'
NAMES = Path(__file__).parent / "bundles/v2/names"


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


# Which recipes go together


@pytest.mark.parametrize(
    ("names", "folders"),
    [
        (["fp32"], [""]),
        (["fp32-attention"], [""]),
        (["fp32", "int8"], ["", "int8"]),
        (["int8", "fp32"], ["int8", ""]),
        (["int8", "int4", "fp32-attention"], ["int8", "int4", ""]),
        (["int8"], ["int8", ""]),
        (["int4", "int8"], ["int4", "int8", ""]),
    ],
)
def test_the_first_recipe_is_what_runs(names: list[str], folders: list[str], tmp_path: Path) -> None:
    """There are always standard graphs, by fp32 unless another recipe makes them."""
    config = small_config()
    chosen = choose(names, config)
    assert list(chosen) == folders
    standard = "fp32-attention" if "fp32-attention" in names else "fp32"
    assert chosen[""] == load_recipe(standard).for_model(config)
    assert all(chosen[name] == load_recipe(name).for_model(config) for name in folders if name)
    write_manifest(tmp_path, chosen, Exported(config, {}))
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["default"] == folders[0] and list(manifest["variants"]) == [name for name in folders if name]


def test_recipes_that_do_not_go_together(tmp_path: Path) -> None:
    for name in ("fp32.toml", "2nd one.toml", "-x.toml", ".hidden.toml", "a.b.toml", "mine.toml"):
        write(tmp_path / name, ORT_CPU)
    (tmp_path / "deeper").mkdir()
    write(tmp_path / "deeper/mine.toml", ORT_CPU + 'precision = "int8"\n')
    wrong = [
        (["fp32", "fp32-attention"], "recipe fp32-attention: the bundle has standard graphs already: leave one out"),
        (["fp32", "fp32"], "recipe fp32: the bundle has standard graphs already"),
        (
            ["int8", "fp32", "int8"],
            "recipe int8: the bundle has variant int8 already: leave one out or rename its file",
        ),
        (["mine.toml", "deeper/mine.toml"], "the bundle has variant mine already"),
        (["fp32.toml"], "a variant cannot be called 'fp32': rename the file"),
        (["2nd one.toml"], "a variant cannot be called '2nd one'"),
        (["-x.toml"], "a variant cannot be called '-x'"),
        (["a.b.toml"], "a variant cannot be called 'a.b'"),
        (["fp32", "int9"], "unknown recipe 'int9': did you mean 'int"),
    ]
    for names, message in wrong:
        paths = [str(tmp_path / name) if name.endswith(".toml") else name for name in names]
        with pytest.raises(ConfigError, match=re.escape(message)) as caught:
            choose(paths, small_config())
        assert "\n" not in str(caught.value)
    assert list(choose([str(tmp_path / "mine.toml"), "int8"], small_config())) == ["mine", "int8", ""]


# What lies in a bundle


def test_a_bundle_with_variants_describes_itself(variants_bundle: Path) -> None:
    opened = open_bundle(variants_bundle)
    assert (
        list(opened.variants) == VARIANTS
        and opened.default == ""
        and opened.recipe == choose(["fp32"], opened.config)[""]
    )
    assert all(opened.variants[name] == load_recipe(name).for_model(opened.config) for name in VARIANTS)
    in_ort, in_cpp = ([each, *(f"{each}:{name}" for name in VARIANTS)] for each in ("ort", "cpp"))
    assert engine_names(opened) == ["eager", "eager@cuda", *in_ort, *in_cpp, "openvino", "openvino:bf16"]
    sizes = {
        name: sum((variants_bundle / file).stat().st_size for file in opened.graph_files(name)) for name in VARIANTS
    }
    assert sizes["int4"] < sizes["int8"] < sizes["fp32-cpu"] and sizes["int8-latency"] < sizes["fp32-cpu"]
    assert {f"{name}/encoder.onnx" for name in VARIANTS} < set(opened.manifest["files"])
    report = json.loads((variants_bundle / "check.json").read_text())
    assert report["passed"] and [engine["engine"] for engine in report["engines"]] == in_ort
    limits = {engine["engine"]: (engine["precision"], engine["tolerance"]["tokens"]) for engine in report["engines"]}
    assert limits["ort"] == limits["ort:fp32-cpu"] == ("fp32", True)
    assert limits["ort:int8"] == limits["ort:int8-latency"] == ("int8", False) and limits["ort:int4"] == ("int4", False)


def edited(bundle: Path, copy: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of a bundle with another manifest."""
    shutil.copytree(bundle, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    edit(manifest)
    write(copy / "manifest.json", json.dumps(manifest))
    return copy


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no such default": (lambda m: m.update(default="int9"), "is damaged: it has no variant 'int9'"),
    "a number": (lambda m: m.update(default=8), "is damaged: default must be string"),
    "no hash": (lambda m: m["files"].pop("int8/encoder.onnx"), "is damaged: no hash of int8/encoder.onnx"),
    "a variant without files": (lambda m: m["variants"].update(more=m["variants"]["int8"]), "no hash of more/"),
    "a variant without a recipe": (lambda m: m["variants"]["int8"].pop("recipe"), "is damaged: variants.int8"),
    "a list": (lambda m: m.update(variants=["int8"]), "is damaged"),
    "nothing": (lambda m: m.update(variants={"int8": None}), "is damaged"),
}


@pytest.mark.parametrize(("edit", "message"), MANIFESTS.values(), ids=MANIFESTS)
def test_damaged_manifests_are_refused(
    edit: Callable[[dict[str, Any]], object], message: str, variants_bundle: Path, tmp_path: Path
) -> None:
    copy = edited(variants_bundle, tmp_path / "bundle", edit)
    with pytest.raises(ArtifactError, match=re.escape(message)) as caught:
        open_bundle(copy)
    assert "manifest.json" in str(caught.value) and "\n" not in str(caught.value)


def test_a_recipe_that_is_not_that_of_the_graphs_is_refused(variants_bundle: Path, tmp_path: Path) -> None:
    """The manifest has no hash, but what it says of a variant stands inside its graphs as well."""
    copy = edited(variants_bundle, tmp_path / "a", lambda m: m["variants"]["int8"]["recipe"].update(group_size=64))
    for variant in ("fp32", "int4"):
        with load(copy, variant=variant, threads=1):
            pass
    with pytest.raises(ArtifactError, match=r"manifest\.json was edited"):
        load(copy, variant="int8", threads=1)


def test_a_bundle_of_one_recipe_has_no_variants() -> None:
    opened = open_bundle(NAMES)
    assert opened.manifest["variants"] == {} == opened.variants and opened.default == ""
    names = ["eager", "eager@cuda", "ort", "cpp", "openvino", "openvino:bf16"]
    assert engine_names(opened) == names and opened.recipe.target == "onnx"
    with load(NAMES, variant="fp32", threads=1) as translator:
        assert translator.translate(["3 1 4"])[0].text == "drei eins vier"
    with pytest.raises(ConfigError, match=r"unknown variant 'int8': valid: fp32$"):
        load(NAMES, variant="int8")


# Which engine runs


def test_engines_by_backend_and_variant(variants_bundle: Path) -> None:
    opened = open_bundle(variants_bundle)
    opened.manifest["default"] = ""
    assert engine_name("ort", None, opened) == engine_name("ort", "fp32", opened) == "ort"
    assert engine_name("ort", "int8", opened) == "ort:int8" and engine_name("eager", None, opened) == "eager"
    with pytest.raises(ConfigError, match="unknown variant 'int88': did you mean 'int8'"):
        engine_name("ort", "int88", opened)
    for variant in ("int8", "fp32"):
        with pytest.raises(ConfigError, match=f"--variant {variant}: eager has no variants"):
            engine_name("eager", variant, opened)
    every = ["ort", *(f"ort:{name}" for name in VARIANTS)]
    assert expand(["ort"], [], opened) == every and expand(["eager", "ort"], [], opened) == ["eager", *every]
    assert expand(["cpp"], [], opened) == ["cpp", *(f"cpp:{name}" for name in VARIANTS)]
    assert expand(["ort", "cpp"], ["int8"], opened) == ["ort:int8", "cpp:int8"]
    with pytest.raises(ConfigError, match="--device cuda: the C\\+\\+ runtime runs on processors"):
        expand(["cpp"], [], opened, "cuda")
    assert expand(["ort", "ort"], ["int8", "fp32", "int8"], opened) == ["ort:int8", "ort"]
    with pytest.raises(
        ConfigError, match=r"--variant int8: --backend eager has no variants to choose: add --backend ort or cpp$"
    ):
        expand(["eager"], ["int8"], opened)
    assert expand(["cpp:int8"], ["int8"], opened) == ["cpp:int8"]
    for backends, variant, valid in ((["cpp:int8"], "int4", "int8"), (["ort", "cpp"], "native-int8", "fp32, .*int8")):
        with pytest.raises(ConfigError, match=f"unknown variant '{variant}': .*valid: {valid}"):
            expand(backends, [variant], opened)
    with pytest.raises(ConfigError, match="unknown backend 'otr': did you mean 'ort'"):
        expand(["otr"], [], opened)
    kinds = [type(make_engine(name, opened)) for name in ("ort", "ort:int8")]
    assert kinds == [OrtEngine, InPlaceEngine]
    with pytest.raises(ConfigError, match="unknown backend 'ort:int88': did you mean 'ort:int8'"):
        make_engine("ort:int88", opened)


def test_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cores(monkeypatch, 8)
    assert [threads_each(0, workers) for workers in (1, 2, 3, 8, 20)] == [8, 4, 2, 1, 1]
    assert [threads_each(3, workers) for workers in (1, 20)] == [3, 3], "what is asked for is what each gets"
    assert [suitable_workers(lines) for lines in (0, 1, 8 * LINES_EACH - 1, 8 * LINES_EACH)] == [1, 1, 1, 8]


# The check of variants


@pytest.fixture(scope="module")
def reference(variants_bundle: Path, run: Path) -> Reference:
    opened = open_bundle(variants_bundle)
    options = CheckOptions(max_tokens=6, beams=3, n_best=3, invariance=4, walks=8)
    corpus = make_corpus(opened.config, opened.recipe, opened.tokenizers(), None, options)
    return Gate(opened, run, threads=1).reference(corpus)


def scaled(factor: float) -> Change:
    return lambda weight: weight * np.float32(factor)


def scaled_queries(weight: np.ndarray) -> np.ndarray:
    """Of keys, values and queries side by side."""
    weight[:, 64:] *= np.float32(1.01)
    return weight


FAULTS = [
    ("fp32-cpu", "encoder", "encoder.1.ff.up.weight.transposed", scaled(1.01), "encoder_layer_1"),
    ("fp32-cpu", "encoder", "decoder.0.cross.key.bias", scaled(1.5), "cross_k_0"),
    ("fp32-cpu", "decoder_step", "tgt_positions", lambda table: np.roll(table, -1, 0), "token 1, decoder_embedding"),
    ("fp32-cpu", "decoder_step", "decoder.0.cross.query.weight.transposed", scaled(1.01), "decoder_layer_0"),
    ("fp32-cpu", "decoder_step", "decoder.1.attention.key.weight,*", scaled_queries, "token 2, decoder_layer_1"),
    ("fp32-cpu", "decoder_step", "output", scaled(1.01), "token 1, log_probs"),
    ("int8", "encoder", "encoder.1.ff.up.weight.scales", scaled(5), "encoder_layer_1"),
    ("int8", "decoder_step", "tgt_positions", scaled(-8), "token 1, decoder_embedding"),
    ("int8-latency", "decoder_step", "decoder.1.ff.down.weight.scales.groups", scaled(-4), "decoder_layer_1"),
]


@pytest.mark.parametrize(
    ("variant", "graph", "tensor", "change", "blame"),
    long_but(
        {f"{fault[0]}, {fault[-1]}": fault for fault in FAULTS},
        "fp32-cpu, cross_k_0",
        "int8, encoder_layer_1",
        unpack=True,
    ),
)
def test_broken_variants_fail_with_the_place_of_the_fault(
    variant: str,
    graph: str,
    tensor: str,
    change: Change,
    blame: str,
    variants_bundle: Path,
    run: Path,
    reference: Reference,
    tmp_path: Path,
) -> None:
    def mutate(found: onnx.GraphProto) -> None:
        change_output(found, change) if tensor == "output" else change_tensor(found, tensor, change)

    broken = break_graph(variants_bundle, tmp_path / "bundle", f"{variant}/{graph}", mutate)
    report = Gate(open_bundle(broken), run, threads=1).run([f"ort:{variant}", "ort"], reference)
    found, standard = report.engines
    assert not report.passed and found.failures and standard.passed
    assert re.fullmatch(rf"sentence \d+[,:] (token \d+, )?{blame}\b.*", found.blame), found.blame


# What their tolerance would let through; the others are in test_constants.py.
SLIGHT = ["int8, gain", "int8, norm bias", "int8, scale", "int8-latency, gain", "int4, gain", "int4, scale"]


@pytest.mark.parametrize("case", long_but(SLIGHT, "int8, norm bias"))
def test_slight_faults_of_lossy_variants_fail_and_are_named(
    case: str, variants_bundle: Path, run: Path, reference: Reference, tmp_path: Path
) -> None:
    variant, graph, mutate, named = CONSTANTS[case]
    broken = break_graph(variants_bundle, tmp_path / "bundle", f"{variant}/{graph}", mutate)
    report = Gate(open_bundle(broken), run, threads=1).run([f"ort:{variant}", "ort"], reference)
    found, standard = report.engines
    assert not found.passed and standard.passed
    assert found.constants and found.blame == found.constants.wrong[0]
    assert f"constant {named}".removesuffix(".weight") in found.blame, found.blame
    assert f"FAILED: {found.blame}" in str(report)


@pytest.mark.long
def test_constants_are_compared_where_the_checkpoint_is_at_hand(
    variants_bundle: Path, run: Path, reference: Reference, tmp_path: Path
) -> None:
    names = ["ort", *(f"ort:{name}" for name in VARIANTS)]
    for engine in Gate(open_bundle(variants_bundle), run, threads=1).run(names, reference).engines:
        assert engine.passed and engine.constants
        assert engine.constants.equal == engine.constants.compared > 70 and not engine.constants.skipped
    report = Gate(open_bundle(variants_bundle), tmp_path / "none", threads=1).run(["ort:int8"], reference)
    assert report.passed and report.engines[0].constants and report.engines[0].constants.compared == 0
    assert "constants         not compared: eager PyTorch needs the checkpoint, which is not at" in str(report)


@pytest.mark.parametrize("variant", long_but(VARIANTS, "int8"))
@pytest.mark.parametrize("case", long_but([*BEYOND], "rows of a step"))
def test_faults_of_large_sizes_alone_are_found_in_any_precision(
    case: str, variant: str, variants_bundle: Path, run: Path, reference: Reference, tmp_path: Path
) -> None:
    graph, mutate, line = BEYOND[case]
    broken = break_graph(variants_bundle, tmp_path / "bundle", f"{variant}/{graph}", mutate)
    (found,) = Gate(open_bundle(broken), run, threads=1).run([f"ort:{variant}"], reference).engines
    assert not any(row.failed for row in found.invariance)
    assert any(re.match(line, failure) for failure in found.failures), found.failures


@pytest.mark.long
def test_faults_of_joined_sentences_alone_are_found_in_8_bits(variants_bundle: Path, run: Path, tmp_path: Path) -> None:
    """Although a few near-ties may fall either way: 30 sentences, as a text of 60 lines leaves them to check."""
    opened = open_bundle(variants_bundle)
    lines = write(tmp_path / "lines.txt", "".join(f"w{5 + n} w{9 + n % 7}{' w8' * (n % 5)}\n" for n in range(30)))
    options = CheckOptions(max_tokens=6, beams=1, n_best=1, invariance=30, wide=0, large_tokens=0, vocabulary=False)
    corpus = make_corpus(opened.config, opened.recipe, opened.tokenizers(), lines, options)
    reference = Gate(opened, run, threads=1).reference(corpus)

    def mutate(found: onnx.GraphProto) -> None:
        change_tensor(found, "tgt_positions", lambda table: np.roll(table, 1, 0))

    broken = break_graph(variants_bundle, tmp_path / "bundle", "int8/slots_step", mutate)
    report = Gate(open_bundle(variants_bundle), run, threads=1).run(["ort:int8"], reference)
    assert report.passed and report.engines[0].own_usual < 1e-3
    (found,) = Gate(open_bundle(broken), run, threads=1).run(["ort:int8"], reference).engines
    assert all(row.variant == "joined" for row in found.invariance if row.failed)
    for line in (
        r"greedy \(joined\): \d+ of 30 sentences differ, more than 3 ",
        "own scores: half of them are others ",
    ):
        assert any(re.match(line, failure) for failure in found.failures), found.failures


QUICK = (("late history", "int8"), ("history of 4 beams", "fp32-cpu"))
"""The others are alike, and long."""


@pytest.mark.parametrize(
    ("case", "variant"),
    [
        pytest.param(case, variant, marks=[] if (case, variant) in QUICK else [pytest.mark.long])
        for case, (variants, *_) in UNMET.items()
        for variant in variants
        if variant
    ],
)
@pytest.mark.usefixtures("full_walks")
def test_faults_of_other_widths_batches_and_positions_are_found_in_any_precision(
    case: str, variant: str, variants_bundle: Path, run: Path, reference: Reference, tmp_path: Path
) -> None:
    _, mutate, named = UNMET[case]
    broken = break_graph(variants_bundle, tmp_path / "bundle", f"{variant}/decoder_step", mutate)
    (found,) = Gate(open_bundle(broken), run, threads=1).run([f"ort:{variant}"], reference).engines
    assert not any(row.failed for row in (*found.invariance, *found.sizes)) or not found.tolerance.tokens
    without = "(without its rounding: )?"
    assert any(re.match(f"{without}{named}", line) for line in found.failures), found.failures
    led = "rows of|many rows|full batches|late rows|joined rows"
    assert all(re.match(f"{without}({led})", line) for line in found.failures), found.failures


@pytest.mark.parametrize("mutate", long_but(UNMET_JOINED, "beams"))
def test_rows_that_join_others_are_led_too(
    mutate: Mutation, variants_bundle: Path, run: Path, reference: Reference, tmp_path: Path
) -> None:
    broken = break_graph(variants_bundle, tmp_path / "bundle", "int8/slots_step", mutate)
    (found,) = Gate(open_bundle(broken), run, threads=1).run(["ort:int8"], reference).engines
    assert any(line.startswith("joined rows of ") for line in found.failures), found.failures


def test_late_positions_are_held_to_calibration(limited: Path, run: Path, reference: Reference, tmp_path: Path) -> None:
    """Where scores may be 2 off, the embedding still shows each position that is another one."""
    broken = break_graph(limited, tmp_path / "bundle", "int8/decoder_step", LATE_POSITIONS)
    (found,) = Gate(open_bundle(broken), run, threads=1).run(["ort:int8"], reference).engines
    assert any(line.startswith("joined rows of 3 a sentence: ") for line in found.failures), "whose step is right"
    layer = r"layer decoder_embedding differs by .* at all positions that"
    assert any(re.match(layer, line) for line in found.failures), found.failures
    assert re.search(r"token 14, decoder_embedding", found.blame), found.blame


@pytest.fixture(scope="module")
def limited(variants_bundle: Path, run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle with what calibration measured of each layer. Read only."""
    checkpoint, opened = open_checkpoint(run), open_bundle(variants_bundle)
    model, lines = checkpoint.load_model(), (run.parent / "lines.txt").read_text().splitlines()
    sources = [checkpoint.tokenizers.source_ids(line) for line in lines]
    ranges = input_ranges(model, sources)

    def edit(manifest: dict[str, Any]) -> None:
        for name in ("int8", "int8-latency", "int4"):
            manifest["variants"][name]["limits"] = layer_noise(model, opened.variants[name], ranges, sources)

    return edited(variants_bundle, tmp_path_factory.mktemp("limited") / "bundle", edit)


@pytest.mark.long
def test_layers_of_lossy_variants_are_held_to_calibration(limited: Path, run: Path, reference: Reference) -> None:
    names = ["ort:int8", "ort:int8-latency", "ort:int4"]
    report = Gate(open_bundle(limited), run, threads=1).run(names, reference)
    assert report.passed, report.failures
    for found in report.engines:
        layers = [layer for layer in found.layers if layer.limit is not None]
        assert [layer.name for layer in layers][::4] == ["encoder_embedding", "decoder_embedding"]
        # The limit is a few times what the engine's own kernels do, not many times.
        assert all(layer.limit and layer.limit / 40 < layer.noise < layer.limit for layer in layers)
    assert "10 with a limit from calibration, at most" in str(report)
    (without,) = Gate(open_bundle(limited), run, threads=1).run(["ort"], reference).engines
    assert without.passed and all(layer.limit is None for layer in without.layers)


@pytest.mark.parametrize(("variant", "graph", "mutate", "layer"), long_but(ROUNDING, next(iter(ROUNDING)), unpack=True))
def test_wrong_rounding_is_beyond_the_limit_of_its_layer(
    variant: str,
    graph: str,
    mutate: Mutation,
    layer: str,
    limited: Path,
    run: Path,
    reference: Reference,
    tmp_path: Path,
) -> None:
    broken = break_graph(limited, tmp_path / "bundle", f"{variant}/{graph}", mutate)
    (found,) = Gate(open_bundle(broken), run, threads=1).run([f"ort:{variant}"], reference).engines
    assert any(re.match(f"layer {layer} differs by .* more than 3 times", line) for line in found.failures), found


def test_a_variant_that_mixes_rows_up_fails_in_any_precision(
    variants_bundle: Path, run: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its decisions need not be eager's, but they must be its own in every batch."""
    encode = InPlaceEngine.encode

    def shifted(self: InPlaceEngine, src_ids: Any, src_lengths: Any, outlook: Any) -> Any:
        state = encode(self, src_ids, src_lengths, outlook)
        state.src_lengths[:] = np.roll(state.src_lengths, 1)
        return state

    monkeypatch.setattr(InPlaceEngine, "encode", shifted)
    (found,) = Gate(open_bundle(variants_bundle), run, threads=1).run(["ort:int8"], reference).engines
    assert any(re.match(r"(greedy|beam|sampling) \((alone|neighbours|shuffled)\): ", line) for line in found.failures)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose traces are made once for all tests."""
    return write_checkpoint(tmp_path_factory.mktemp("small") / "run", small_config())


@pytest.mark.long
def test_a_variant_may_have_narrower_axes(small: Path, tmp_path: Path) -> None:
    axes = "[axes]\nsrc_len = { min = 1, opt = 2, max = 4 }\nbeams = { min = 1, opt = 2, max = 2 }\n"
    assert export_checked(
        small, tmp_path / "bundle", ["fp32", str(write(tmp_path / "narrow.toml", ORT_CPU + axes))]
    ).passed


@pytest.mark.long
def test_a_variant_called_ort_does_not_loosen_the_standard_graphs(small: Path, tmp_path: Path) -> None:
    loose = write(tmp_path / "ort.toml", f"{ORT_CPU}[tolerance]\nscores = 0.5\n")
    report = export_checked(small, tmp_path / "bundle", ["fp32", str(loose)], write(tmp_path / "lines.txt", "w5 w6\n"))
    assert [engine.tolerance.scores for engine in report.engines] == [1e-4, 0.5]


# The commands


TEXT = b"w5 w6 w7\n\nw8\nw9 w10 w11 w12 w13\nw5\n"


@pytest.fixture(scope="module")
def shipped(small: Path) -> Path:
    """A bundle whose default is a variant, as the command makes it."""
    folder = small.parent
    write_lines(folder / "lines.txt")
    recipes = ("--recipe", "int8", "--recipe", "fp32", "--recipe", "int4")
    done = run_here("export", small, "--out", folder / "bundle", "--src", folder / "lines.txt", *recipes)
    lines = printed(done)
    assert lines[-1] == f"{folder / 'bundle'}: bundle written" and lines.count("passed") == 3
    assert [line for line in lines if line.endswith("against eager PyTorch")] == [
        "ort, fp32, against eager PyTorch",
        "ort:int8, int8, against eager PyTorch",
        "ort:int4, int4, against eager PyTorch",
    ]
    return folder / "bundle"


def test_the_command_exports_variants_and_the_first_is_the_default(shipped: Path) -> None:
    opened = open_bundle(shipped)
    assert list(opened.variants) == ["int8", "int4"] and opened.default == "int8"
    outputs = {}
    for variant in (None, "int8", "int4", "fp32"):
        with load(shipped, variant=variant, threads=1, max_tokens=6) as translator:
            outputs[variant] = [(r.ids, r.score) for r in translator.translate(["w5 w6 w7", "w20 w30"])]
            kind = InPlaceEngine if variant != "fp32" else OrtEngine
            assert type(translator.engine) is kind
    assert outputs[None] == outputs["int8"] != outputs["fp32"] and outputs["int4"] != outputs["int8"]
    command = ("translate", shipped, "--threads", 1, "--max-tokens", 6, "--json")
    for variant in ("int8", "fp32"):
        made = printed(run_here(*command, "--variant", variant, stdin=b"w5 w6 w7\nw20 w30\n"))
        assert [(row["ids"], row["score"]) for row in map(json.loads, made)] == outputs[variant]
    assert printed(run_here(*command, stdin=TEXT)) == printed(run_here(*command, "--variant", "int8", stdin=TEXT))


def test_the_command_scores_with_variants(shipped: Path, tmp_path: Path) -> None:
    src, tgt = write(tmp_path / "src.txt", "w5 w6 w7\nw8\n"), write(tmp_path / "tgt.txt", "w9\nw10 w11\n")
    command = ("score", shipped, "--src", src, "--tgt", tgt, "--threads", 1)
    scores = {
        variant: [float(line) for line in printed(run_here(*command, *(["--variant", variant] if variant else [])))]
        for variant in ("", "int8", "int4", "fp32")
    }
    assert scores[""] == scores["int8"] != scores["fp32"]
    eager = [float(line) for line in printed(run_here(*command, "--backend", "eager"))]
    assert scores["fp32"] == pytest.approx(eager, abs=1e-4)
    for variant, limit in (("int8", 1.0), ("int4", 5.0)):
        assert scores[variant] == pytest.approx(eager, abs=3 * limit)


FLAGS = ("--max-tokens", 5, "--beams", 2, "--invariance", 2, "--threads", 1, "--json")


@pytest.mark.parametrize(
    ("arguments", "engines"),
    [
        ((), ["ort", "ort:int8", "ort:int4"]),
        (("--variant", "int8"), ["ort:int8"]),
        (("--variant", "fp32", "--variant", "int4"), ["ort", "ort:int4"]),
        (("--backend", "eager"), ["eager"]),
        (("--backend", "ort", "--backend", "eager", "--variant", "int8"), ["ort:int8", "eager"]),
    ],
)
def test_the_command_checks_variants(shipped: Path, arguments: tuple[str, ...], engines: list[str]) -> None:
    (line,) = printed(run_here("check", shipped, *FLAGS, *arguments))
    report = json.loads(line)
    assert report["passed"] and [engine["engine"] for engine in report["engines"]] == engines
    for engine in report["engines"]:
        assert engine["precision"] == (engine["engine"].partition(":")[2] or "fp32")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["translate", "--variant", "int88"], "unknown variant 'int88': did you mean 'int8'? valid: fp32, int4, int8"),
        (["translate", "--variant", ""], "unknown variant ''"),
        (["translate", "--variant", "int8", "--backend", "eager"], "eager has no variants"),
        (["translate", "--variant", "fp32", "--backend", "eager"], "eager has no variants"),
        (["translate", "--align", "--variant", "int8"], "does not return attention"),
        (["score", "--variant", "int"], "unknown variant 'int': did you mean 'int"),
        (["score", "--variant", "int8", "--backend", "eager"], "eager has no variants"),
        (["check", "--variant", "fp23"], "unknown variant 'fp23': did you mean 'fp32'?"),
        (["check", "--variant", "int8", "--backend", "eager"], "has no variants to choose: add --backend ort"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_variants_are_one_clear_line(shipped: Path, tmp_path: Path, command: list[str], words: str) -> None:
    lines = write(tmp_path / "lines.txt", "w5\n")
    files = ["--src", lines, "--tgt", lines] if command[0] == "score" else []
    done = run_here(command[0], shipped, *files, *command[1:], stdin=TEXT)
    assert words in failed_line(done) and done.stdout == b""


def test_the_command_refuses_recipes_that_do_not_go_together(shipped: Path, tmp_path: Path) -> None:
    recipes = ("--recipe", "int8", "--recipe", "int8")
    done = run_here("export", shipped.parent / "run", "--out", tmp_path / "out", *recipes)
    assert "the bundle has variant int8 already" in failed_line(done) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments", [[], ["--beams", "3", "--n-best", "2"], ["--sample", "--seed", "3"]], ids=" ".join
)
def test_workers_change_no_output(shipped: Path, arguments: list[str]) -> None:
    lines = "".join(f"w{5 + n % 40} w{9 + n % 7}{' w8' * (n % 5)}\n" * (n % 6 > 0) or "\n" for n in range(40)).encode()
    command = ("translate", shipped, "--max-tokens", 6, "--json", *arguments)
    alone = printed(run_here(*command, "--threads", 1, "--workers", 1, stdin=lines))
    assert len(alone) == 40
    for workers in (0, 2, 3):
        assert printed(run_here(*command, "--workers", workers, stdin=lines)) == alone
    assert run_here(*command, "--workers", -1, stdin=lines).returncode == 2


def test_variants_need_neither_torch_nor_onnx(shipped: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'onnx', 'onnxscript', 'safetensors'):\n"
        "    sys.modules[name] = None\n"
        "from tformer_deploy import load\n"
        "with load(sys.argv[1], variant='int4', threads=1, max_tokens=4) as translator:\n"
        "    print(len(translator.translate(['w5 w6'])[0].ids))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, shipped], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["4"], done.stderr


def test_an_engine_verifies_its_own_graphs(variants_bundle: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(variants_bundle, tmp_path / "bundle")
    (folder / "int8/encoder.onnx").write_bytes(b"")
    with load(folder, variant="fp32", max_tokens=4) as translator:
        assert translator.translate(["w5"])[0].ids
    with pytest.raises(ArtifactError, match=r"int8/encoder\.onnx does not match"):
        load(folder, variant="int8")
    with pytest.raises(ArtifactError, match=r"int8/encoder\.onnx does not match"):
        open_bundle(folder)
