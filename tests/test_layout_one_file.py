"""Layout `one-file`: the search in the graph beside `decoding` over eager PyTorch, with every rule."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from tformer_deploy.decoding import DecodeOptions, Hypothesis, decode
from tformer_deploy.engines.eager import EagerEngine
from tformer_deploy.export.layouts.layout import Source
from tformer_deploy.export.layouts.one_file import BAKED, DESCRIPTION, FILE, make_graph, refuse, write
from tformer_deploy.export.layouts.one_file.feeding import feed_of, feed_sources
from tformer_deploy.export.layouts.written import open_layout_source, outputs_of, write_layout
from tformer_deploy.importers.base import ImportOptions
from tformer_deploy.importers.run import import_checkpoint
from tformer_deploy.model.network import Transformer
from tformer_deploy.translate.batches import make_batch

from .conftest import ending_model, random_sources
from .hf_folders import FOLDERS, LINES, OPTIONS

long = pytest.mark.long
FAMILIES = ("marian", "bart", "t5", "m2m_100", "pegasus", "mbart")
RULES: list[dict[str, Any]] = [
    {},
    {"beams": 3, "n_best": 3},
    {"beams": 5, "n_best": 5, "length_penalty": 0.3, "max_tokens": 9},
    {"min_tokens": 6},
    {"beams": 4, "min_tokens": 5, "max_tokens": 12},
    {"no_repeat_ngram": 1},
    {"no_repeat_ngram": 2, "beams": 4},
    {"no_repeat_ngram": 3, "repetition_penalty": 1.3},
    {"repetition_penalty": 1.7, "beams": 4, "n_best": 2, "length_penalty": -0.5},
    {"suppress": (3,), "max_tokens": 10},
    {"suppress": (5, 9, 17, 20), "beams": 4},
    {"bad_words": ((7,), (8, 9), (11, 12, 13), (6, 6))},
    {"bad_words": ((7, 7), (9, 5), (20,)), "beams": 4, "n_best": 4},
    {"first_ids": (6, 9)},
    {"first_ids": (7,), "beams": 4, "n_best": 4, "no_repeat_ngram": 2, "min_tokens": 4},
]
CONSTANTS: list[dict[str, Any]] = [
    {"stop": "estimate", "length_norm": "gnmt", "length_penalty": 0.8},
    {"stop": "exact", "length_penalty": 1.4, "forced_end": True, "max_tokens": 8},
    {"patience": 1.6, "end_ids": (3, 5, 8), "max_ratio": 1.3, "min_ratio": 0.4},
    {"first_ids": (6,), "first_adds_zero": True, "forced_end": True, "max_tokens": 7},
    {"endless": True, "max_tokens": 9},
]
"""With options that are in the file."""


@pytest.fixture(scope="module")
def model() -> Transformer:
    return ending_model(24)


@pytest.fixture(scope="module")
def session(model: Transformer, tmp_path_factory: pytest.TempPathFactory) -> onnxruntime.InferenceSession:
    return saved(model, DecodeOptions(), tmp_path_factory.mktemp("one") / FILE)


def saved(model: Transformer, options: DecodeOptions, path: Path) -> onnxruntime.InferenceSession:
    onnx.save_model(make_graph(model, options), path)
    onnx.checker.check_model(path, full_check=True)
    return onnxruntime.InferenceSession(path)


def sources(count: int = 9) -> list[list[int]]:
    ids, lengths = random_sources(count, 11)
    return [row[:length].tolist() for row, length in zip(ids, lengths, strict=True)]


def require_equal(found: Sequence[Any], expected: Sequence[Sequence[Hypothesis]], n_best: int) -> None:
    """Ids, lengths, ends, scores and values of all outputs."""
    ids, lengths, finished, scores, values = found
    assert ids.shape[:2] == (len(expected), n_best)
    for b, hypotheses in enumerate(expected):
        assert (values[b] > -np.inf).sum() == len(hypotheses)
        for n, each in enumerate(hypotheses):
            assert ids[b, n, : lengths[b, n]].tolist() == each.ids, (b, n)
            assert (ids[b, n, lengths[b, n] :] == 1).all() and finished[b, n] == each.finished
            assert abs(scores[b, n] - each.score) < 1e-4 and abs(values[b, n] - each.value) < 1e-4


@long
@pytest.mark.parametrize("rules", RULES, ids=str)
def test_inputs_are_the_rules_of_decoding(
    rules: dict[str, Any], model: Transformer, session: onnxruntime.InferenceSession
) -> None:
    options = DecodeOptions(**rules)
    with EagerEngine(model) as engine:
        expected = decode(engine, make_batch(sources(), 1), options)
    found = session.run(None, {**feed_sources(sources(), 1), **feed_of(options)})
    require_equal(found, expected, options.n_best)
    assert len({len(each[0].ids) for each in expected}) > 1 or rules.get("suppress") == (3,)


@long
@pytest.mark.parametrize("rules", CONSTANTS, ids=str)
def test_constants_are_the_rules_of_decoding(rules: dict[str, Any], model: Transformer, tmp_path: Path) -> None:
    options = DecodeOptions(beams=4, n_best=3, **rules)
    session = saved(model, options, tmp_path / FILE)
    for each in (options, dataclasses.replace(options, beams=1, n_best=1, patience=1.0, stop="count")):
        with EagerEngine(model) as engine:
            expected = decode(engine, make_batch(sources(), 1), each)
        require_equal(session.run(None, {**feed_sources(sources(), 1), **feed_of(each)}), expected, each.n_best)


@long
def test_sentences_have_limits_and_first_tokens_of_their_own(
    model: Transformer, session: onnxruntime.InferenceSession
) -> None:
    prefixes = [[4, 5, 6], [], [9], [7, 7], [], [8], [9, 4, 5, 6], [], [11]]
    most, least = [5, 9, 24, 3, 12, 8, 6, 24, 10], [0, 4, 9, 3, 0, 8, 0, 1, 2]
    first = np.full((9, 4), -1, np.int32)
    for row, prefix in zip(first, prefixes, strict=True):
        row[: len(prefix)] = prefix
    limits = {"max_tokens": np.array(most, np.int32), "min_tokens": np.array(least, np.int32), "first_ids": first}
    for beams in (1, 4):
        asked = {**feed_of(DecodeOptions(beams=beams)), **limits}
        found = session.run(None, {**feed_sources(sources(), 1), **asked})
        with EagerEngine(model) as engine:
            expected = []
            for i, source in enumerate(sources()):
                options = DecodeOptions(beams=beams, max_tokens=most[i], min_tokens=least[i])
                expected += decode(engine, make_batch([source], 1, prefixes=[prefixes[i]]), options)
        require_equal(found, expected, 1)


@long
@pytest.mark.parametrize("name", FAMILIES)
def test_imported_families(name: str, tmp_path: Path) -> None:
    """With the folder's own decoding options."""
    given = ImportOptions(**OPTIONS.get(name, {}))
    import_checkpoint("hf", FOLDERS[name](tmp_path / name), tmp_path / "run", given, LINES[:20])
    text = tmp_path / "text"
    text.write_text("\n".join(LINES[:200]) + "\n", encoding="utf-8")
    report = write_layout(tmp_path / "run", tmp_path / "out", "one-file", text)
    assert [proof.equal + proof.ties for proof in report.proofs] == [200, 200] and not report.left_out
    source = open_layout_source(tmp_path / "run")
    lines = [source.tokenizers.source_ids(line) for line in LINES[:40]]
    with EagerEngine(source.checkpoint.load_model()) as engine:
        found = {tuple(each.ids) for each in outputs_of(engine, lines, DecodeOptions(max_tokens=24))}
    assert len(found) > 20, "nearly all sources have the same output, so that equal outputs show little"


MODULE = """
from tests.user_models import tutorial

def make():
    return tutorial()
"""


@long
def test_a_module_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(MODULE)
    report = write_layout(Path(f"{tmp_path}/own.py:make"), tmp_path / "out", "one-file")
    assert all(proof.equal == proof.sentences for proof in report.proofs)


@long
def test_the_file_says_what_it_was_made_with(run: Path, tmp_path: Path) -> None:
    report = write_layout(run, tmp_path / "out", "one-file")
    assert [proof.beams for proof in report.proofs] == [1, 4]
    session = onnxruntime.InferenceSession(tmp_path / "out" / FILE)
    about = json.loads(session.get_modelmeta().custom_metadata_map["tformer.generate"])
    assert about == json.loads((tmp_path / "out" / DESCRIPTION).read_text())
    assert about["constants"].keys() == set(BAKED)
    usual = {name: np.array(each["value"], each["type"]) for name, each in about["inputs"].items()}
    assert {"src_ids", "src_lengths", *usual} == {value.name for value in session.get_inputs()}
    options = open_layout_source(run).options
    for name, value in feed_of(options).items():
        assert value.dtype == usual[name].dtype and np.array_equal(value, usual[name])


SCRIPT = """
import { readFileSync } from "node:fs";
const [name, folder, given] = process.argv.slice(1);
const ort = await import(name);
if (name === "onnxruntime-web") ort.env.wasm.numThreads = 1;
const session = await ort.InferenceSession.create(new Uint8Array(readFileSync(`${folder}/generate.onnx`)));
const { inputs, pad_id } = JSON.parse(readFileSync(`${folder}/generate.json`, "utf8"));
const ARRAYS = { int32: Int32Array, float32: Float32Array, float64: Float64Array };
const tensor = (type, value) => {
  const sizes = [];
  for (let at = value; Array.isArray(at); at = at[0]) sizes.push(at.length);
  return new ort.Tensor(type, ARRAYS[type].from(value.flat(Infinity)), sizes);
};
const feed = Object.fromEntries(Object.entries(inputs).map(([name, { type, value }]) => [name, tensor(type, value)]));
const sources = JSON.parse(given), longest = Math.max(...sources.map(ids => ids.length));
feed.src_ids = tensor("int32", sources.map(ids => [...ids, ...Array(longest - ids.length).fill(pad_id)]));
feed.src_lengths = tensor("int32", sources.map(ids => ids.length));
const outputs = [];
for (const beams of [1, 4]) {
  const { ids, lengths } = await session.run({ ...feed, beams: tensor("int32", [beams]) });
  const size = ids.dims[1] * ids.dims[2];
  outputs.push(sources.map((_, b) => [...ids.data.slice(b * size, b * size + lengths.data[b * ids.dims[1]])]));
}
console.log(JSON.stringify(outputs));
"""


def install(package: str, folder: Path) -> None:
    """A package of npm, in a folder."""
    if not shutil.which("npm"):
        pytest.skip("npm is not installed: install Node.js")
    (folder / "package.json").write_text("{}")
    # The libraries for processors are in the packages; what their scripts fetch is for GPUs.
    command = ["npm", "install", "--silent", "--ignore-scripts", f"{package}@1.30.0"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    if done.returncode:
        pytest.skip(f"{package} cannot be installed: {done.stderr.strip()[-200:]}")


def eager_ids(source: Source, beams: int) -> list[list[int]]:
    """The best outputs of the sources."""
    options = dataclasses.replace(source.options, beams=beams)
    with EagerEngine(source.checkpoint.load_model()) as engine:
        return [each[0].ids for each in decode(engine, make_batch(sources(), 1), options)]


@long
@pytest.mark.parametrize("package", ["onnxruntime-node", "onnxruntime-web"])
def test_javascript(package: str, run: Path, tmp_path: Path) -> None:
    """The same tokens in Node's ONNX Runtime, and in that of browsers, which is WebAssembly."""
    install(package, tmp_path)
    source = open_layout_source(run)
    write(source, tmp_path)
    node = ["node", "--input-type=module", "--eval", SCRIPT, package, str(tmp_path), json.dumps(sources())]
    done = subprocess.run(node, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [eager_ids(source, beams) for beams in (1, 4)]


def test_what_it_cannot_say_is_refused(run: Path) -> None:
    source = open_layout_source(run)
    assert not list(refuse(source))
    other = Source(source.checkpoint, DecodeOptions(beams=2, coverage_penalty=0.5))
    assert list(refuse(other)) == ["coverage_penalty=0.5: it reads no attention"]
