"""`tformer distill`: which of a teacher's outputs become training data, and which lines are left out, by reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tformer_deploy import load
from tformer_deploy.base.errors import ConfigError
from tformer_deploy.train.metrics import sentence_quality
from tformer_deploy.translate.distill import REASONS, Filters, best_of, scripts_of, why_left_out

from .command import Done, failed_line, run_here

COPY = Path(__file__).parent / "bundles/v2/copy"
LINES = ["w5 w6 w7", "", "w8 w9 w10 w11 w12 w13", "w20 w21"]


def distilled(out: Path, *words: object) -> Done:
    return run_here("distill", COPY, "--out", out, *words)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "lines.src"
    path.write_text("".join(f"{line}\n" for line in LINES))
    return path


def test_the_teachers_outputs_become_parallel_text(text: Path, tmp_path: Path) -> None:
    """Those that `translate` gives, of the lines that stay; the same command again translates nothing."""
    off = [word for name in ("max_copied", "max_ratio", "max_repeats") for word in ("--filter", f"{name}=0")]
    report = json.loads(distilled(tmp_path / "out", "--src", text, *off, "--json").stdout)
    src, tgt = ((tmp_path / "out" / name).read_text().splitlines() for name in ("train.src", "train.tgt"))
    with load(COPY) as teacher:
        results = teacher.translate([line for line in LINES if line])
    assert [(s, t) for s, t in zip(src, tgt, strict=True)] == [
        (line, result.text)
        for line, result in zip((line for line in LINES if line), results, strict=True)
        if result.finished and result.text
    ]
    assert report["lines"] == 4 and report["kept"] + sum(report["left_out"].values()) == 4
    assert report["left_out"]["no text"] == 1 and list(report["left_out"]) == list(REASONS)
    assert json.loads((tmp_path / "out/report.json").read_text()) == report
    again = json.loads(distilled(tmp_path / "out", "--src", text, *off, "--json").stdout)
    assert {**again, "seconds": 0} == {**report, "seconds": 0}


@pytest.mark.parametrize("metric", ["bleu", "chrf"])
def test_the_output_nearest_to_its_reference_is_chosen(text: Path, tmp_path: Path, metric: str) -> None:
    with load(COPY) as teacher:
        results = teacher.translate(LINES, beams=3, n_best=3)
    references = [([result, *result.alternatives][-1]).text for result in results]  # the third
    (tmp_path / "lines.tgt").write_text("".join(f"{line}\n" for line in references))
    off = ["--filter", "max_copied=0", "--filter", "max_ratio=0"]
    how = ["--tgt", tmp_path / "lines.tgt", "--beams", 3, "--n-best", 3, "--choose", metric]
    report = json.loads(distilled(tmp_path / "out", "--src", text, *how, *off, "--json").stdout)
    first, chosen = report["quality"].values()
    assert report["other_than_first"] and chosen["chrf"] > first["chrf"]
    made = dict(
        zip(*((tmp_path / "out" / name).read_text().splitlines() for name in ("train.src", "train.tgt")), strict=True)
    )
    for line, result, reference in zip(LINES, results, references, strict=True):
        if line in made:
            best = max(sentence_quality(metric, each.text, reference) for each in (result, *result.alternatives))
            assert sentence_quality(metric, made[line], reference) == best


GOOD: dict[str, Any] = {"finished": True, "score": -2.0, "ids": [5, 6, 7, 2]}


@pytest.mark.parametrize(
    ("source", "output", "record", "filters", "reason"),
    [
        ("a small red house", "ein kleines rotes Haus", {}, {}, ""),
        ("", "ein Haus", {}, {}, "no text"),
        ("a house", "", {}, {}, "failed"),
        ("a house", "ein Haus", {"finished": False}, {}, "cut off"),
        ("a house", "ein Haus", {}, {"min_score": -0.4}, "score"),
        ("a house", "ein Haus", {}, {"min_score": -0.6}, ""),
        ("a house", "ein Haus, in dem viele Leute wohnen", {}, {}, "length"),
        ("a house", "ein Haus, in dem viele Leute wohnen", {}, {"max_ratio": 0.0}, ""),
        ("a", "abcdefghi", {}, {}, ""),
        ("Mr Smith in New York", "Mr Smith in New York", {}, {}, "copied"),
        ("Mr Smith in New York", "Mr Smith in New York", {}, {"max_copied": 0.0}, ""),
        ("he says no and no and no", "er " + "sagt nein und " * 4, {}, {"max_ratio": 0.0}, "repeated"),
        ("a house with a garden", "этот дом и сад", {}, {}, "script"),
        ("a house with a garden", "этот дом и сад", {}, {"min_script": 0.0}, ""),
        ("12 + 34 = 46", "12 + 34 = 46 .", {}, {"max_copied": 0.0}, ""),
    ],
)
def test_lines_are_left_out_for_one_reason(
    source: str, output: str, record: dict[str, Any], filters: dict[str, Any], reason: str
) -> None:
    scripts = scripts_of(["Das ist ein Haus.", "Es hat einen Garten, und π ist 3."])
    assert scripts == {"LATIN"}
    assert why_left_out(source, output, {**GOOD, **record}, Filters(**filters), scripts) == reason


def test_without_a_reference_the_teacher_decides() -> None:
    record = {"text": "a", "alternatives": [{"text": "b"}]}
    assert best_of(record, "", "bleu") is record and best_of(record, "b", "score") is record
    assert best_of(record, "b", "chrf") == {"text": "b"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--choose", "blue"], "unknown choice 'blue': did you mean 'bleu'"),
        (["--choose", "bleu"], "--choose bleu compares with reference translations: give --tgt"),
        (
            ["--choose", "bleu", "--tgt", "lines"],
            "--choose bleu needs outputs to choose from: add --beams 4 --n-best 4",
        ),
        (["--filter", "min_scor=-1"], "did you mean 'min_score'"),
        (["--filter", "min_score"], "--filter min_score: write NAME=VALUE"),
        (["--filter", "min_score=1"], "is a log-probability: must be below 0"),
        (["--filter", "max_ratio=0.5"], "max_ratio=0.5: must be at least 1, or 0 for no such filter"),
        (["--filter", "min_script=3"], "min_script=3.0: is a share: give at most 1"),
        (["--tgt", "short"], "--src has 4 lines, --tgt 1: they must be translations"),
        (["--tgt", "lines", "--tgt", "lines"], "1 files of --src and 2 of --tgt: give one for each"),
        (
            ["--filter", "max_ratio=1.0", "--max-tokens", "1"],
            "no line is left of 4 (1 no text, 1 failed, 2 cut off): loosen the filters",
        ),
    ],
)
def test_what_is_refused(text: Path, tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "short").write_text("w5\n")
    files = {"lines": str(text), "short": str(tmp_path / "short")}
    assert message in failed_line(
        distilled(tmp_path / "out", "--src", text, *(files.get(word, word) for word in words))
    )
    assert not (tmp_path / "out/train.src").exists()


def test_files_of_other_kinds_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_repeats"):
        Filters(max_repeats=-1)
