"""A bundle from a stranger: it may not write, delete or read outside itself, nor hang the process."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tformer_deploy.base.files import sha256
from tformer_deploy.bundle.manifest import changing
from tformer_deploy.bundle.shortlist import Settings, add_shortlist

from .command import failed_line, run_here

Manifest = dict[str, Any]
Change = Callable[[Manifest, Path], object]
VERBS = ("inspect", "translate", "check", "shortlist", "build")


@pytest.fixture(scope="module")
def with_lists(variants_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with everything that a manifest can name. Read only."""
    out = tmp_path_factory.mktemp("lists") / "bundle"
    shutil.copytree(variants_bundle, out)
    text = [f"w{i} w{i + 1}" for i in range(4, 50)]
    with changing(out) as opened:
        add_shortlist(opened, text, text, Settings())
    return out


@pytest.fixture
def place(with_lists: Path, run: Path, tmp_path: Path) -> Iterator[Path]:
    """A folder with a bundle to harm, and files of somebody else, which stay as they are."""
    shutil.copytree(with_lists, tmp_path / "bundle")
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "lines").write_text("w5 w6\n")
    before = others(tmp_path)
    yield tmp_path
    assert (tmp_path / "victim").read_text() == "mine" and others(tmp_path) == before


def others(folder: Path) -> set[Path]:
    """What is neither the bundle nor the run."""
    return {path for path in folder.rglob("*") if path.relative_to(folder).parts[0] not in ("bundle", "run")}


def harm(place: Path, change: Change) -> None:
    path = place / "bundle/manifest.json"
    manifest = json.loads(path.read_text())
    before = json.dumps(manifest)
    change(manifest, place)
    if json.dumps(manifest) != before:
        path.write_text(json.dumps(manifest))


def refused(verb: str, place: Path) -> str:
    bundle, lines = place / "bundle", place / "lines"
    options: dict[str, list[object]] = {
        "check": ["--checkpoint", place / "run"],
        "shortlist": ["--src", lines, "--tgt", lines],
        "build": ["--src", lines, "--profile", "1x1x8x8"],
        "translate": ["--shortlist", "--variant", "int8-latency"],
    }
    return failed_line(run_here(verb, bundle, *options.get(verb, []), stdin=b"w5 w6\n"))


def name_file(name: str) -> Change:
    """A file of that name with the right hash."""

    def change(manifest: Manifest, place: Path) -> None:
        manifest["files"][name.format(place)] = sha256(place / "victim")

    return change


def name_shortlist(name: str) -> Change:
    def change(manifest: Manifest, place: Path) -> None:
        manifest["shortlist"]["file"] = name.format(place)
        manifest["files"].setdefault(name.format(place), sha256(place / "victim"))

    return change


def name_tokenizer(name: str) -> Change:
    def change(manifest: Manifest, place: Path) -> None:
        for side in manifest["tokenizer"].values():
            side["file"] = name.format(place)
        manifest["files"][name.format(place)] = sha256(place / "victim")

    return change


def name_variant(name: str) -> Change:
    def change(manifest: Manifest, place: Path) -> None:
        manifest["variants"][name.format(place)] = manifest["variants"]["int8"]

    return change


def replace_file(make: Callable[[Path, Path], object]) -> Change:
    """Something else in the place of a graph."""

    def change(manifest: Manifest, place: Path) -> None:
        path = place / "bundle/int8-latency/encoder.onnx"
        path.unlink()
        make(path, place)

    return change


NAMES: dict[str, Change] = {
    **{
        f"file {name}": name_file(name) for name in ("../victim", "{0}/victim", "int8/../../victim", "a.onnx/../b.onnx")
    },
    "file with a line end": name_file("a.onnx\n"),
    "file of half a character": name_file("\ud800.onnx"),
    "variant with a line end": name_variant("int8\n"),
    "file hidden": name_file(".victim.onnx"),
    "file deep": name_file("a/b/c.onnx"),
    "file of another kind": name_file("setup.py"),
    **{
        f"lists {name}": name_shortlist(name) for name in ("../victim", "{0}/victim", "tokenizer.words", "encoder.onnx")
    },
    **{f"tokenizer {name}": name_tokenizer(name) for name in ("../victim", "{0}/victim", "../victim.words")},
    **{f"variant {name}": name_variant(name) for name in ("../outside", "{0}/outside", "a@cuda", ".", "", "a/b")},
    "link that leaves": replace_file(lambda path, place: path.symlink_to(place / "victim")),
    "link to a device": replace_file(lambda path, place: path.symlink_to("/dev/zero")),
    "link to /proc": replace_file(lambda path, place: path.symlink_to("/proc/kmsg")),
    "pipe": replace_file(lambda path, place: os.mkfifo(path)),
    "folder": replace_file(lambda path, place: path.mkdir()),
}


@pytest.mark.parametrize("change", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("verb", VERBS)
def test_names_of_files_that_are_no_own_ones(verb: str, change: Change, place: Path) -> None:
    harm(place, change)
    line = refused(verb, place)
    words = "is damaged: ", "lies outside", "is no regular file", "is a link, a pipe or a device", "has the name"
    assert "bundle" in line and any(each in line for each in words)


def test_another_models_tokenizer(place: Path) -> None:
    """The right hash in the manifest does not help: the graphs say which tokenizer belongs to them."""
    path = place / "bundle/tokenizer.words"
    words = path.read_text().split("\n")
    path.write_text("\n".join([*words[:4], *reversed(words[4:-1]), ""]))
    harm(place, lambda manifest, place: manifest["files"].update({path.name: sha256(path)}))
    line = failed_line(run_here("translate", place / "bundle", stdin=b"w5\n"))
    assert "manifest.json was edited: decoder_step.onnx is of another model, recipe or tokenizer" in line
    done = run_here("check", place / "bundle", "--checkpoint", place / "run")
    assert "has other tokenizers than" in failed_line(done, 3)


def test_what_is_written_goes_through_no_link(place: Path) -> None:
    """Not even where the name of the file can be told before."""
    text = place / "lines"
    text.write_text("".join(f"w{i} w{i + 1}\n" for i in range(4, 50)))
    harm(place, lambda manifest, place: manifest.pop("shortlist"))
    for path in (place / "bundle").glob("shortlist-*.bin"):
        path.unlink()
        path.symlink_to(place / "victim")
    assert "is a link, a pipe or a device" in refused("shortlist", place)


@pytest.mark.parametrize("name", ["metrics.jsonl", "metrics.png", "weights", "train", "tokenizer.words"])
@pytest.mark.parametrize("verb", ["train", "init"])
def test_runs_are_not_written_through_links(verb: str, name: str, place: Path) -> None:
    run, outside = place / "run", place / "run-outside"
    outside.mkdir()
    (outside / "step-0000001.safetensors").write_text("mine")
    path = run / name
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(outside if name in ("weights", "train") else place / "victim")
    options = ["--task", "copy"] if verb == "train" else ["--preset", "tiny", "--vocab-size", 60]
    assert "is a link" in failed_line(run_here(verb, "--out", run, "--force", *options))
    assert (outside / "step-0000001.safetensors").read_text() == "mine"
    shutil.rmtree(outside)


DEEP = "[" * 100_000 + "]" * 100_000


def set_to(path: str, value: Any) -> Change:
    """Another value at a place such as `model.heads`; None takes it away."""

    def change(manifest: Manifest, place: Path) -> None:
        *parents, last = path.split(".")
        for name in parents:
            manifest = manifest[name]
        if value is None:
            del manifest[last]
        else:
            manifest[last] = value

    return change


WRONG = {
    "recipe": ["x", {}, 3, [], None],
    "recipe.axes": ["x", {"batch": 3}, {"batch": {"min": 5, "opt": 1, "max": 2}}, None],
    "recipe.opset": [99, "23", 1e400],
    "versions": [[], "x", {"torch": 3}, None],
    "model": [[], "x", None],
    "model.d_model": ["32", 0, -1, 10**30, None],
    "model.heads": [5, True],
    "files": [[], {}, {"encoder.onnx": "short"}, None],
    "graphs": [3, {}, None],
    "graphs.encoder.kind": ["encoder", "encoder/0", 1, None],
    "graphs.encoder.inputs": [{}, [{"name": "x"}], None],
    "default": ["a@cuda", "nowhere", 3],
    "variants": [[], {"int8": {}}, {"int8": {"recipe": 3}}],
    "tokenizer": [{}, {"source": 3, "target": 3}, None],
    "tokenizer.source.kind": ["magic", 3, None],
    "tokenizer.source.language": [["en"], 3, "../x", "english"],
    "shortlist": [{}, "x", {"file": "encoder.onnx"}],
    "shortlist.tokens": ["many", 10**400, None],
    "checkpoint": [{}, [], None],
    "checkpoint.path": [3, None],
    "checkpoint.weights_sha256": ["0", None],
    "tokenizer.source.specials": [{}, {"pad": 1, "bos": 2, "eos": -1, "unk": 0}, 3, None],
    "version": [0, -1, True, 1.0, "1", 3, None],
    "format": ["other", None],
}


@pytest.mark.parametrize(
    ("path", "value"), [(path, value) for path, values in WRONG.items() for value in values], ids=str
)
def test_values_of_another_kind(path: str, value: Any, place: Path) -> None:
    harm(place, set_to(path, value))
    line = refused("inspect", place)
    assert "manifest.json" in line


@pytest.mark.parametrize("file", ["manifest.json", "check.json"])
@pytest.mark.parametrize(
    "content",
    [DEEP, '{"a":' * 100_000, "\ud800", "nonsense", "[]", "{}", '{"passed": 3, "sentences": 1}'],
    ids=lambda x: x[:9],
)
def test_reports_and_manifests_that_are_none(file: str, content: str, place: Path) -> None:
    path = place / "bundle" / file
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    if file != "manifest.json":
        harm(place, lambda manifest, place: manifest["files"].update({file: sha256(path)}))
    assert file in refused("inspect", place)


def test_a_file_that_is_too_large_is_not_read(place: Path) -> None:
    with (place / "bundle/manifest.json").open("r+b") as file:
        file.truncate(1 << 40)  # a hole: it takes no room
    assert "bytes, more than" in refused("inspect", place)
