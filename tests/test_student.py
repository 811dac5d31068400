"""`tformer student`: all steps from a teacher to a measured student, their continuation, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tformer_deploy import load
from tformer_deploy.base.errors import ArtifactError, ConfigError
from tformer_deploy.base.files import write_json
from tformer_deploy.bundle.manifest import open_bundle
from tformer_deploy.bundle.text import SPECIALS, Tokenizers, Words
from tformer_deploy.model.checkpoint import (
    HEADER,
    load_tensors,
    model_tensors,
    open_checkpoint,
    save_checkpoint,
    save_tensors,
)
from tformer_deploy.train import metrics
from tformer_deploy.train.metrics import read_metrics, text_figures
from tformer_deploy.train.run_files import STATE, read_state
from tformer_deploy.train.student import steps
from tformer_deploy.train.student.record import RECORD, Record, Step

from .command import Done, failed_line, printed, run_here
from .conftest import ending_model
from .kills import snapshots
from .test_check_html import Page, svgs

COPY = Path(__file__).parent / "bundles/v2/copy"
SIZES = {"d_model": 16, "d_ff": 16, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "max_positions": 16}
SETTINGS = {"updates": 4, "valid_every": 2, "average": 1, "bleu_sentences": 4, "batch_tokens": 400, "max_tokens": 16}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text of words that the teachers know; a translation is its source backwards."""
    folder = tmp_path_factory.mktemp("text")
    for name, first, count in (("train", 4, 40), ("valid", 6, 8), ("test", 9, 5)):
        lines = [[f"w{4 + (first + i * j) % 20}" for j in range(1, 4 + i % 3)] for i in range(count)]
        if name == "test":
            lines.append([f"w{i}" for i in range(4, 24)])  # too long for both models
        (folder / f"{name}.src").write_text("".join(" ".join(line) + "\n" for line in lines))
        (folder / f"{name}.tgt").write_text("".join(" ".join(line[::-1]) + "\n" for line in lines))
    return folder


def words(teacher: Path, text: Path, out: Path, *more: object) -> list[object]:
    sides = [word for side in ("valid-src", "valid-tgt") for word in (f"--{side}", text / side.replace("-", "."))]
    sections = {"model": SIZES, "train": SETTINGS}
    sets = [f"{section}.{key}={value}" for section, values in sections.items() for key, value in values.items()]
    off = [word for name in ("max_copied", "max_ratio", "max_repeats") for word in ("--filter", f"{name}=0")]
    own = [*sides, *off, *(word for each in sets for word in ("--set", each)), "--rounds", 1]
    return ["student", teacher, "--src", text / "train.src", *own, "--out", out, *more]


def made(teacher: Path, text: Path, out: Path, *more: object) -> Done:
    return run_here(*words(teacher, text, out, *more))


@pytest.fixture(scope="module")
def student(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A whole folder, and the report that the command printed. Read only."""
    out = tmp_path_factory.mktemp("student") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "plot", lambda *paths: None)
        done = again((out, {}), text, "--json")
    assert done.returncode == 0, done.stderr
    return out, json.loads(done.stdout)


def again(student: tuple[Path, Any], text: Path, *more: object, recipe: object = "fp32") -> Done:
    """The same command, with other options."""
    own = ("--tokenizer", "bpe", "--vocab-size", 30, "--recipe", recipe, "--beams", 2)
    tests = ("--test-src", text / "test.src", "--test-tgt", text / "test.tgt")
    return made(COPY, text, student[0], *own, *tests, *more)


def test_the_report_has_the_figures_of_the_single_verbs(student: tuple[Path, dict[str, Any]], text: Path) -> None:
    out, report = student
    assert json.loads((out / "report/report.json").read_text()) == report
    assert report["distillation"] == json.loads((out / "text/report.json").read_text())
    assert report["metrics"] == read_metrics(out / "run/metrics.jsonl")
    assert report["parameters"]["student"] == open_checkpoint(out / "run").config.parameters
    rows = {(row["text"], row["model"], row["beams"]): row for row in report["quality"]}
    assert len(rows) == len(report["quality"]) == 8
    for (name, model, beams), row in rows.items():
        part = {"validation": "valid", "test": "test"}[name]
        src, tgt = ((text / f"{part}.{side}").read_text().splitlines() for side in ("src", "tgt"))
        outputs = {}
        for each, bundle in (("teacher", COPY), ("student", out / "bundle")):
            with load(bundle) as translator:
                results = translator.results(src, refused=lambda *_: None, beams=beams)
                outputs[each] = [result.text for result in results]
        assert row["reference"] == text_figures(outputs[model], tgt) and row["sentences"] == len(src)
        to_teacher = {} if model == "teacher" else text_figures(outputs["student"], outputs["teacher"])
        assert row["teacher"] == to_teacher and row["refused"] == (name == "test")
    teacher, own = report["engines"]
    names = ("manifest.json", "tokenizer.model", "encoder.onnx", "decoder_step.onnx", "weights.data")
    files = [out / "bundle" / name for name in names]
    assert own["disk_mib"] == pytest.approx(sum(path.stat().st_size for path in files) / 2**20)
    assert [teacher["engine"], own["engine"]] == ["teacher: ort", "student: ort"]
    assert [(row["engine"], row["beams"]) for row in report["speed"]] == [
        (model, beams) for beams in (1, 2) for model in ("teacher", "student")
    ]
    assert all(row["sentences"] == 8 and row["sentences_per_s"] > 0 for row in report["speed"])
    assert {"processor", "python", "tformer_deploy", "onnxruntime"} <= report["machine"].keys()


def test_the_page_and_the_table_say_the_same(student: tuple[Path, dict[str, Any]], text: Path) -> None:
    lines = printed(again(student, text))
    page = (student[0] / "report/report.html").read_text()
    shown = Page(page).text
    assert len(svgs(page)) == 2
    for row in student[1]["quality"]:
        value = f"{row['reference']['chrf']:.2f}"
        assert value in shown and any(value in line.split() for line in lines)
    assert lines[0].startswith("40 of 40 lines distilled") and lines[-1].endswith("report written")


def test_what_is_made_is_not_made_again(student: tuple[Path, dict[str, Any]], text: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in student[0].rglob("*")}
    done = again(student, text, "--json")
    assert json.loads(done.stdout) == student[1]
    assert done.stderr.decode().splitlines() == [
        f"{student[0] / name}: made already" for name in ("text", "run", "bundle", "report")
    ]
    assert before == {path: path.stat().st_mtime_ns for path in student[0].rglob("*")}


@pytest.mark.parametrize(
    ("words", "step", "was"),
    [
        (["--choose", "chrf"], "", "--choose chrf compares with reference translations"),
        (["--beams", 3], "text", "with --beams 2"),
        (["--filter", "max_repeats=2"], "text", "with another --filter"),
        (["--src", "test.src"], "text", "with another --src"),
        (["--preset", "small"], "run", "with --preset tiny"),
        (["--vocab-size", 31], "run", "with --vocab-size 30"),
        (["--set", "model.norm_position=post"], "run", "without --set model.norm_position"),
        (["--set", "train.updates=9"], "run", "with --set train.updates 4"),
        (["--valid-tgt", "valid.src"], "run", "with another --valid-tgt"),
        (["--recipe", "int8"], "bundle", "with another --recipe"),
    ],
)
def test_another_option_is_refused(
    student: tuple[Path, dict[str, Any]], text: Path, words: list[Any], step: str, was: str
) -> None:
    done = again(student, text, *(text / word if "." in str(word) and "=" not in str(word) else word for word in words))
    *others, line = done.stderr.decode().splitlines()
    assert done.returncode == 1 and all(each.endswith("made already") for each in others)
    if step:
        what = "give that, or another --out, or --force to make it and what follows it again"
        assert line == f"error: {student[0] / step} was made {was}: {what}"
    else:
        assert was in line


def test_damage_is_named(student: tuple[Path, dict[str, Any]], text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(student[0], out)
    (out / "bundle/decoder_step.onnx").write_bytes(b"")
    done = again((out, {}), text)
    assert done.returncode == 1 and done.stderr.decode().splitlines()[-1].endswith(
        "does not match its SHA-256 as recorded; copy or make it again, or add --force to make it and "
        "what follows it again"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--test-src", "test.src"], "--test-src and --test-tgt belong together"),
        (["--valid-tgt", "test.tgt"], "they must be translations"),
        (["--backend", "trt"], "--backend trt: bundles of new models do not run on it"),
        (["--backend", "cpp"], "--backend cpp: bundles of new models do not run on it"),
        (["--tokenizer", "words"], "tokenizer of a student 'words'"),
        (["--preset", "huge"], "preset 'huge'"),
        (["--set", "model.heads=3"], "heads"),
        (["--set", "train.lr=-1"], "train.lr=-1.0: must be above 0"),
        (["--recipe", "fp31"], "fp31"),
        (["--recipe", "native-int8-trained"], "takes steps that training learns: add --set train.quantize=int8"),
        (["--set", "train.teacher_weight=0.5"], "is a bundle: train.teacher_weight needs the run folder that it is of"),
        (["--set", "train.teacher_weight=0.5", "--vocab-size", 9], "leave out --vocab-size"),
        (["--src", "missing.src"], "missing.src"),
        (["--tgt", "test.tgt", "--tgt", "test.tgt"], "give one for each"),
    ],
)
def test_what_cannot_work_is_refused_at_once(text: Path, tmp_path: Path, words: list[Any], message: str) -> None:
    more = [text / word if str(word).endswith((".src", ".tgt")) else word for word in words]
    assert message in failed_line(made(COPY, text, tmp_path / "out", *more))
    assert not (tmp_path / "out").exists()


def test_a_source_without_a_line_is_refused_at_once(text: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.src").touch()
    line = failed_line(made(COPY, text, tmp_path / "out", "--src", tmp_path / "empty.src"))
    assert line.endswith("empty.src has no line: name text to translate with --src")


def test_a_damaged_record_is_given_up_by_force(tmp_path: Path) -> None:
    (tmp_path / RECORD).write_text("{")
    with pytest.raises(ArtifactError, match=f"{RECORD} is damaged .*, or add --force to make all steps again"):
        Record(tmp_path, False)
    assert Record(tmp_path, True).steps == {}


def test_a_step_that_made_nothing_takes_other_options(tmp_path: Path) -> None:
    def fail(folder: Path, replaces: bool, continued: bool) -> dict[str, Any]:
        (folder / "translated").mkdir(parents=True)
        raise ConfigError("the input has no line")

    record = Record(tmp_path, False)
    with pytest.raises(ConfigError, match="no line"):
        record.run(Step("text", fail, []), {"--src": "a"})
    assert record.run(Step("text", lambda *_: {"lines": 3}, []), {"--src": "b"})["lines"] == 3


def test_a_teacher_that_is_none_is_refused(text: Path, tmp_path: Path) -> None:
    assert "is not a checkpoint: there is no such folder" in failed_line(made(tmp_path / "no", text, tmp_path / "out"))
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text("{}")
    assert "tformer import" in failed_line(made(tmp_path / "hf", text, tmp_path / "out"))
    assert "lies in the folder that is made" in failed_line(made(tmp_path / "out/run", text, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    """A run folder of random weights, many of whose outputs end."""
    model = ending_model(24)
    words = Words([*SPECIALS, *(f"w{i}" for i in range(4, model.config.src_vocab))], None)
    save_tensors(tmp_path / "teacher/weights/random.safetensors", model_tensors(model))
    where = tmp_path / "teacher", model.config, Tokenizers(words, words)
    save_checkpoint(*where, tmp_path / "teacher/weights/random.safetensors", {})
    return tmp_path / "teacher"


def same_weights(one: Path, other: Path) -> bool:
    a, b = (load_tensors(open_checkpoint(folder).weights) for folder in (one, other))
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


@pytest.mark.long
def test_a_kill_at_any_step_loses_nothing(teacher: Path, text: Path, tmp_path: Path) -> None:
    """With a run folder as teacher, whose probabilities the student learns too. A folder may be moved in between."""
    here, more = tmp_path / "here", ("--set", "train.teacher_weight=0.5", "--recipe", "fp32")
    here.mkdir()
    with snapshots(here, tmp_path / "states") as states:
        done = made(teacher, text, here / "out", *more)
    assert done.returncode == 0, done.stderr
    ours = open_checkpoint(here / "out/run")
    assert ours.config.tgt_vocab == open_checkpoint(teacher).config.tgt_vocab
    assert read_state(here / "out/run")["teacher"]["run"] == str(teacher)
    marks = ["teacher/manifest.json", "text/translated/job.json", "text/train.src", f"run/{STATE}", f"run/{HEADER}"]
    marks += ["bundle/manifest.json", "report/report.json", "report/report.html"]
    first = {next(n for n, state in enumerate(states) if (state / "out" / mark).exists()) for mark in marks}
    trained = [n for n, state in enumerate(states) if (state / "out/run" / STATE).exists()]
    for number in sorted({0, *first, trained[len(trained) // 4]}):
        out = states[number] / "out"
        done = made(teacher, text, out, *more)
        assert done.returncode == 0, done.stderr
        assert same_weights(out / "run", here / "out/run")
        for name in ("train.src", "train.tgt"):
            assert (out / "text" / name).read_bytes() == (here / "out/text" / name).read_bytes()
        assert open_bundle(out / "bundle").weights_sha256 == ours.weights_sha256
        assert [path for path in states[number].rglob(".*")] == []


@pytest.mark.long
def test_force_makes_a_step_and_what_follows_again(
    student: tuple[Path, dict[str, Any]], text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(student[0], out)
    kept = (out / "text/train.tgt").stat().st_mtime_ns
    done = again((out, {}), text, "--set", "model.decoder_cell=ssru", "--force", recipe="int8")
    assert done.returncode == 0, done.stderr
    assert (
        f"{out / 'text'}: made already" in done.stderr.decode() and (out / "text/train.tgt").stat().st_mtime_ns == kept
    )
    report = json.loads((out / "report/report.json").read_text())
    assert (
        open_checkpoint(out / "run").config.decoder_cell == "ssru" and report["parameters"] != student[1]["parameters"]
    )
    assert report["engines"][1]["engine"] == "student: ort:int8"
    (tmp_path / "strict.toml").write_text(
        'target = "ort-cpu"\nprecision = "int8"\ncache = "static"\n[tolerance]\nscores = 1e-9\ntokens = false\n'
    )
    strict: dict[str, Any] = {"recipe": tmp_path / "strict.toml"}
    done = again((out, {}), text, "--set", "model.decoder_cell=ssru", "--force", **strict)
    assert done.returncode == 3 and b"error: variant strict left out: " in done.stderr
    assert b"student: ort " in done.stdout and open_bundle(out / "bundle").variants == {}
    done = again((out, {}), text, "--set", "model.decoder_cell=ssru", **strict)
    assert done.returncode == 3 and b"begun" not in done.stderr


@pytest.mark.parametrize(("step", "kept"), [("distill", []), ("start_run", ["text"])])
def test_ctrl_c_says_how_to_go_on(
    student: tuple[Path, Any], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, kept: list[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out"
    if kept:
        shutil.copytree(student[0] / "text", out / "text")
        record = json.loads((student[0] / RECORD).read_text())
        write_json(out / RECORD, {**record, "steps": {name: record["steps"][name] for name in kept}})
    monkeypatch.setattr(steps, step, interrupted)
    done = again((out, {}), text)
    assert done.returncode == 130 and done.stderr.decode().splitlines() == [
        *(f"{out / name}: made already" for name in kept),
        f"{out / ('run' if kept else 'text')}: begun",
        f"stopped: what is made stays in {out}: run the same command again",
    ]
