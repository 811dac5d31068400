"""What calibrates is never what is checked; translations decide in the check of an export."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from tformer_deploy.base.errors import ConfigError, DataError
from tformer_deploy.bundle.manifest import open_bundle
from tformer_deploy.bundle.recipe import load_recipe
from tformer_deploy.check import CheckOptions, Corpus, Gate
from tformer_deploy.engines.eager import EagerEngine
from tformer_deploy.export import calibrate
from tformer_deploy.export import checked as module
from tformer_deploy.export.calibrate import ROOM, fp32_layers, input_ranges, parts_off, round_model
from tformer_deploy.export.checked import Texts, calibration_from, calibration_split, export_checked

from .command import failed_line, run_here
from .conftest import (
    calibration_sources,
    random_model,
    random_sources,
    small_config,
    variant_engine,
    write_checkpoint,
)
from .params import long_but
from .test_seq2seq import make_parallel

EOS = 3


def corpus(*sources: list[int]) -> Corpus:
    return Corpus("lines.txt", [list(source) for source in sources], CheckOptions())


def numbered(count: int) -> Corpus:
    return corpus(*([5 + i // 50, 5 + i % 50, EOS] for i in range(count)))


@pytest.mark.parametrize(("count", "calibrating"), [(2, 1), (3, 1), (12, 6), (600, 256)])
def test_a_text_is_split(count: int, calibrating: int) -> None:
    """Into at most half of it, from all its parts, the same each time; no sentence is on both sides."""
    found, text = calibration_split(numbered(count)), numbered(count)
    assert len(found.sources) == calibrating and len(found.places) == count - calibrating
    checked = [text.sources[i] for i in found.places]
    assert not [source for source in found.sources if source in checked]
    assert text.sources[0] in found.sources and found == calibration_split(numbered(count))
    if count > 500:
        assert [text.sources.index(source) for source in found.sources][-1] > 590
    few = "; fewer than 64 may miss how large values get: add text with --calibrate" if calibrating < 64 else ""
    others = f"checked with {count - calibrating} others"
    assert found.line == f"calibrated with {calibrating} sentences of lines.txt, {others}{few}"


def test_equal_lines_stay_on_one_side() -> None:
    found = calibration_split(corpus([5, EOS], [6, EOS], [5, EOS], [6, EOS], [6, EOS]))
    assert found.sources == [[5, EOS]] and found.places == [1, 3, 4]
    with pytest.raises(DataError, match=r"lines.txt: one sentence cannot both calibrate and be checked: add lines"):
        calibration_split(corpus([5, EOS], [5, EOS]))


def test_text_of_its_own_leaves_out_what_is_checked() -> None:
    found = calibration_from(
        Corpus("more.txt", [[5, EOS], [7, EOS], [8, EOS]], CheckOptions()), corpus([5, EOS], [6, EOS])
    )
    assert found.sources == [[7, EOS], [8, EOS]] and found.places == [0, 1]
    assert found.line.startswith("calibrated with 2 sentences of more.txt, none of which is checked; fewer than 64")
    with pytest.raises(DataError, match=r"--calibrate: every line of lines.txt is checked as well: give other text"):
        calibration_from(corpus([5, EOS]), corpus([5, EOS], [6, EOS]))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose traces are made once for all tests."""
    return write_checkpoint(tmp_path_factory.mktemp("small") / "run", small_config())


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"w{5 + n} w{6 + n} w{40 - n}\n" for n in range(12)) + "\n")
    return path


@pytest.mark.parametrize("kind", long_but(["split", "own", "generated"], "split"))
def test_an_export_never_checks_what_calibrated(
    kind: str, small: Path, lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, list[list[int]]] = {}
    ranges, noise, reference = module.input_ranges, calibrate.layer_noise, Gate.reference

    def watch_ranges(model: Any, sources: Any) -> Any:
        seen["ranges"] = sources
        return ranges(model, sources)

    def watch_noise(model: Any, recipe: Any, measured: Any, sources: Any) -> Any:
        seen["noise"] = sources
        return noise(model, recipe, measured, sources)

    def watch_reference(self: Gate, corpus: Corpus, allowed: Any = None) -> Any:
        seen["checked"] = corpus.sources
        return reference(self, corpus, allowed)

    monkeypatch.setattr(module, "input_ranges", watch_ranges)
    monkeypatch.setattr(calibrate, "layer_noise", watch_noise)
    monkeypatch.setattr(Gate, "reference", watch_reference)
    other = tmp_path / "other.txt"
    other.write_text("".join(f"w{50 - n} w{7 + n}\n" for n in range(9)) + lines.read_text())
    texts = {"split": Texts(lines), "own": Texts(lines, None, other), "generated": Texts()}[kind]
    report = export_checked(small, tmp_path / "bundle", ["fp32", "int8"], texts)
    calibrated, checked = ({tuple(source) for source in seen[side]} for side in ("ranges", "checked"))
    assert calibrated and checked and not calibrated & checked and seen["noise"] == seen["ranges"]
    assert (len(calibrated), len(checked)) == {"split": (6, 6), "own": (9, 12)}.get(kind, (16, 17))
    assert report.calibration.startswith("calibrated with ") and report.calibration in str(report)
    assert json.loads((tmp_path / "bundle/check.json").read_text())["calibration"] == report.calibration


def test_recipes_that_round_alike() -> None:
    int8, latency = (load_recipe(name).rounding for name in ("int8", "int8-latency"))
    assert int8 == load_recipe("native-int8").rounding == load_recipe("native-int8-bf16-cache").rounding != latency


@pytest.mark.long
def test_recipes_that_round_alike_are_measured_once(
    small: Path, lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def measure(model: Any, recipe: Any, *rest: Any) -> Any:
        measured.append(recipe)
        return calibrate.measure(model, recipe, *rest)

    monkeypatch.setattr(module, "measure", measure)
    same = tmp_path / "same.toml"
    same.write_text('target = "ort-cpu"\nprecision = "int8"\ncache = "static"\n')
    export_checked(small, tmp_path / "bundle", ["int8", str(same)], lines)
    manifest = json.loads((tmp_path / "bundle/manifest.json").read_text())
    assert len(measured) == 1 and len({str(each["limits"]) for each in manifest["variants"].values()}) == 1


def test_a_layer_that_never_runs_stays_as_it_is() -> None:
    """As a head that only training reads."""
    model = random_model(small_config(encoder_layers=1, decoder_layers=1))
    model.spare = torch.nn.Linear(4, 4)
    rounded = cast(torch.nn.Module, round_model(model, load_recipe("int8"), input_ranges(model, [[5, 6, 3]])))
    weights = dict(rounded.named_parameters())
    assert torch.equal(weights["spare.weight"], model.spare.weight)
    assert not torch.equal(weights["encoder.0.ff.up.weight"], model.get_parameter("encoder.0.ff.up.weight"))


@pytest.mark.parametrize("limits", [{"scores": 0.3}, {"encoder": 0.03}], ids=str)
def test_what_rounding_harms_stays_in_fp32_until_the_rest_fits(limits: dict[str, float]) -> None:
    config = small_config(encoder_layers=1, decoder_layers=1, share_embeddings="none", norm_position="post")
    model, sources = random_model(config).eval(), [[5 + n, 6, 7 + n, 3] for n in range(8)]
    for name in ("query", "key"):
        model.get_parameter(f"decoder.0.attention.{name}.weight").data *= 8
    model.get_parameter("tgt_embedding.weight").data[:, 3] *= 20  # leaves few integers for the others of each row
    wide = load_recipe("int8")
    recipe = dataclasses.replace(wide, tolerance=dataclasses.replace(wide.tolerance, **limits))
    ranges = input_ranges(model, sources)

    def off(fp32: Sequence[str]) -> float:
        with torch.inference_mode():
            both: list[Any] = [model, round_model(model, recipe, {**ranges, **dict.fromkeys(fp32)})]
            return max(parts_off(both, recipe, sources))

    assert fp32_layers(cast(Any, model), wide, ranges, sources) == [] and off([]) > 1
    found = fp32_layers(cast(Any, model), recipe, ranges, sources)
    assert off(found) <= ROOM and 0 < len(found) < len(ranges) and "embeddings" in found and "output" not in found


@pytest.mark.long
def test_nothing_is_taken_out_where_nothing_is_calibrated(small: Path, lines: Path, tmp_path: Path) -> None:
    report = export_checked(small, tmp_path / "bundle", ["fp32", "fp32-cpu"], lines)
    assert report.sentences == 12 and not report.calibration


@pytest.mark.long
def test_translations_decide_in_an_export(small: Path, lines: Path, tmp_path: Path) -> None:
    """They are those of the lines that are left to check."""
    tgt = tmp_path / "lines.tgt"
    tgt.write_text(lines.read_text().replace("w", "v"))
    report = export_checked(small, tmp_path / "bundle", ["fp32", "int8"], Texts(lines, tgt))
    assert report.sentences == 6 and all(set(each.quality) == {"greedy", "beam", "sampling"} for each in report.engines)
    recipe = tmp_path / "strict.toml"
    int4 = 'target = "ort-cpu"\nprecision = "int4"\ngroup_size = 256\ncache = "static"\n'
    recipe.write_text(f"{int4}[tolerance]\nbleu = 0.0\n")
    made = tmp_path / "made.txt"
    done = run_here("translate", tmp_path / "bundle", "--variant", "fp32", stdin=lines.read_bytes())
    made.write_bytes(done.stdout)
    recipes = ("--recipe", recipe, "--recipe", "fp32-cpu")
    done = run_here("export", small, "--out", tmp_path / "strict", *recipes, "--src", lines, "--tgt", made, "--json")
    assert re.fullmatch(
        r"error: variant strict left out: (greedy|beam): BLEU differs by \d+\.\d\d, more than 0 \(tolerance.bleu\) "
        r"over 6 sentences: 1,000 say more; .*: calibrate with .*--calibrate.*, or widen the limit .* of your own",
        failed_line(done, 3),
    )
    said = json.loads(done.stdout)
    assert said["bundle"] == str(tmp_path / "strict") and not said["check"]["passed"]
    assert list(said["check"]["left_out"]) == ["strict"] and len(said["check"]["engines"]) == 3
    kept = open_bundle(tmp_path / "strict")
    assert list(kept.variants) == ["fp32-cpu"] and kept.default == "fp32-cpu"
    assert not list((tmp_path / "strict").rglob("*strict*"))
    stored = json.loads((tmp_path / "strict/check.json").read_text())
    assert stored["passed"] and [engine["engine"] for engine in stored["engines"]] == ["ort", "ort:fp32-cpu"]
    assert stored["left_out"] == said["check"]["left_out"]
    assert run_here("translate", tmp_path / "strict", stdin=lines.read_bytes()).stdout == made.read_bytes()


def test_texts_that_do_not_belong_together_are_refused(small: Path, lines: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("w5\n")
    cases: list[tuple[Texts, str, type[Exception], str]] = [
        (Texts(None, lines), "int8", ConfigError, "--tgt needs the sources it translates: add --src"),
        (Texts(lines, None, short), "fp32-cpu", ConfigError, "--calibrate: no recipe quantizes: leave it out, or add"),
        (Texts(lines, short), "int8", ConfigError, "lines.txt has 13 lines, .*short.txt 1: they must be parallel"),
        (Texts(short), "int8", DataError, "short.txt: one sentence cannot both calibrate and be checked"),
        (Texts(lines, None, lines), "int8", DataError, "every line of lines.txt is checked as well"),
    ]
    for texts, recipe, kind, message in cases:
        with pytest.raises(kind, match=message):
            export_checked(small, tmp_path / "bundle", ["fp32", recipe], texts)
        assert not (tmp_path / "bundle").exists()


@pytest.mark.long
def test_the_command_takes_the_texts(small: Path, lines: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("".join(f"w{50 - n} w{7 + n}\n" for n in range(9)))
    texts = ("--src", lines, "--tgt", lines, "--calibrate", other)
    done = run_here("export", small, "--out", tmp_path / "bundle", "--recipe", "fp32", "--recipe", "int8", *texts)
    assert done.returncode == 0, done.stderr
    assert b"calibrated with 9 sentences of other.txt, none of which is checked" in done.stdout
    assert b"greedy BLEU: eager" in done.stdout


def test_what_encodes_is_rounded_by_channels_whatever_its_name(tmp_path: Path) -> None:
    """As the encoder's graph has it, of a module of the user's own too: `decoder.0.cross_k` runs there."""
    model, recipe = make_parallel(small_config()), load_recipe("int4")
    (src_ids, lengths), ranges = random_sources(6, 11), input_ranges(model, calibration_sources(model.config))
    encoding = {name for name, each in ranges.items() if each and each.encodes}
    assert {"encoder.0.q", "decoder.0.cross_k", "decoder.1.cross_v"} <= encoding
    assert not {"decoder.0.k", "decoder.0.cross_q", "decoder.0.down", "output"} & encoding
    found = []
    with (
        variant_engine(model, tmp_path, recipe) as graphs,  # type: ignore[arg-type]
        EagerEngine(round_model(model, recipe, ranges)) as rounded,
        EagerEngine(model) as exact,
    ):
        for engine in (graphs, rounded, exact):
            state = engine.encode(src_ids, lengths)
            found.append(np.concatenate([each[0].ravel() for each in engine.cross_keys_values(state)]))
    ours, theirs, unrounded = found
    assert np.abs(ours - theirs).mean() < 0.1 * np.abs(unrounded - theirs).mean()
