"""Layout `transformers-js`: its graphs in each precision, its tokenizers, its folder in Node and in a browser."""

from __future__ import annotations

import functools
import http.server
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tformer_deploy.base.errors import EngineError, MissingExtra
from tformer_deploy.bundle.text import SPECIALS, ByteBpe, SentencePiece, Specials, Tokenizers, WordBpe, Words
from tformer_deploy.decoding import DecodeOptions
from tformer_deploy.engines.eager import EagerEngine
from tformer_deploy.export.layouts.hf_config import generation_json
from tformer_deploy.export.layouts.hf_tokenizer import write_tokenizers
from tformer_deploy.export.layouts.layout import Source
from tformer_deploy.export.layouts.transformers_js import PRECISIONS, SUFFIXES, open_runtime, refuse
from tformer_deploy.export.layouts.written import open_layout_source, outputs_of, write_layout
from tformer_deploy.model.checkpoint import open_checkpoint

from .browser import BROWSER, needs_browser
from .conftest import random_model, small_config
from .hf_folders import FOLDERS, LINES, SENTENCES
from .npm import folder_with
from .test_layout_optimum import DEMO, imported, saved

PACKAGE = "@huggingface/transformers@4.3.1"
FAMILIES = ("marian", "bart", "m2m_100", "mbart", "t5", "pegasus")
long = pytest.mark.long
tokenizers = pytest.importorskip("tokenizers")


@pytest.mark.parametrize("precision", [pytest.param(each, marks=long) for each in PRECISIONS])
def test_precisions_are_near_fp32(precision: str, tmp_path: Path) -> None:
    """Logits of the merged decoder without and with a cache; inputs, outputs and caches are fp32 in all."""
    model = random_model(small_config(decoder_layers=1)).eval()
    [session] = saved(model, tmp_path, "decoder_model_merged", precision=precision).values()
    assert {each.type for each in session.get_outputs()} == {"tensor(float)"}
    memory = np.random.default_rng(1).normal(size=(2, 5, 32)).astype(np.float32)
    target = np.random.default_rng(2).integers(4, 20, (2, 4))
    import torch

    with torch.inference_mode():
        lengths = torch.tensor([5, 5])
        hidden = model.decode(torch.from_numpy(memory), lengths, torch.from_numpy(target))
        wanted = model.output(hidden).numpy()
    caches = [each.name for each in session.get_inputs() if each.name.startswith("past")]
    given = {"encoder_attention_mask": np.ones((2, 5), np.int64), "encoder_hidden_states": memory}
    given |= {name: np.zeros((2, 4, 0, 8), np.float32) for name in caches}
    found = []
    for step, token in enumerate(target.T):
        feeds = {"input_ids": token[:, None], "use_cache_branch": np.array([step > 0]), **given}
        names = [each.name for each in session.get_outputs()]
        logits, *present = session.run(names, feeds)
        for name, value in zip(names[1:], present, strict=True):
            if step == 0 or ".decoder." in name:
                given[name.replace("present", "past_key_values")] = value
        found.append(logits)
    error = np.abs(np.concatenate(found, 1) - wanted).max() / np.abs(wanted).max()
    least, most = {"fp32": (0, 1e-6), "fp16": (1e-6, 4e-3), "q8": (1e-3, 0.06), "q4": (1e-3, 0.4)}[precision]
    assert least <= error <= most


@long
def test_the_weights_of_precisions_have_their_sizes(tmp_path: Path) -> None:
    """Of a table that is tied, fp32 and fp16 hold one copy."""
    model = random_model(small_config(encoder_layers=1, src_vocab=4096, tgt_vocab=4096)).eval()
    sizes = {}
    for precision in ("fp32", "q8"):
        saved(model, tmp_path, "encoder_model", precision=precision)
        sizes[precision] = (tmp_path / "encoder_model.onnx").stat().st_size
    table = 4096 * 32
    assert 4 * table < sizes["fp32"] < 4.7 * table and table < sizes["q8"] < 1.6 * table


def test_greedy_search_needs_no_settings_of_beams(run: Path) -> None:
    options = DecodeOptions(beams=4, length_norm="gnmt", length_penalty=0.6, first_ids=(5,))
    source = Source(open_checkpoint(run), options)
    assert not list(refuse(source))
    written = generation_json(source, beams=False)
    assert written["forced_bos_token_id"] == 5 and not {"num_beams", "length_penalty"} & written.keys()
    assert list(refuse(Source(open_checkpoint(run), DecodeOptions(max_ratio=2.0)))) == ["max_ratio=2.0"]


def test_what_is_not_installed_is_named(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_layout_source(run)
    monkeypatch.chdir(tmp_path)
    if shutil.which("node"):
        with (
            pytest.raises(MissingExtra, match="transformers is not installed here: npm install @huggingface/"),
            open_runtime(source, tmp_path, "fp32") as generate,
        ):
            generate([[4, 3]], DecodeOptions())
    monkeypatch.setenv("PATH", "")
    with (
        pytest.raises(MissingExtra, match=r"Node\.js is not installed: install it from nodejs\.org, then npm install"),
        open_runtime(source, tmp_path, "fp32"),
    ):
        pass


# The same text, whoever splits it.


def both(tokenizer: Any) -> Tokenizers:
    return Tokenizers(tokenizer, tokenizer)


def letters(text: Sequence[str]) -> list[str]:
    return sorted({letter for line in text for letter in line if letter != " "})


def sentencepiece_bpe() -> Tokenizers:
    return both(SentencePiece.train(SENTENCES, 180))


def words() -> Tokenizers:
    entries = [*SPECIALS, *sorted({word for line in SENTENCES[:6] for word in line.split()})]
    return both(Words(entries, None))


def characters() -> Tokenizers:
    specials = Specials(pad=1, bos=2, eos=3, unk=0)
    entries = [*SPECIALS, *letters(SENTENCES)]
    return both(Words(entries, None, specials, regex="[^ ]", lower=False))


def byte_bpe(space: bool = False) -> Tokenizers:
    made = tokenizers.ByteLevelBPETokenizer()
    specials = ["<s>", "<pad>", "</s>", "<unk>"]
    made.train_from_iterator(SENTENCES, vocab_size=400, special_tokens=specials, show_progress=False)
    model = json.loads(made.to_str())["model"]
    entries = sorted(model["vocab"], key=model["vocab"].get)
    merges = [rule if isinstance(rule, str) else " ".join(rule) for rule in model["merges"]]
    tokenizer = ByteBpe(entries, merges, Specials(pad=1, bos=0, eos=2, unk=3), space)
    return Tokenizers(tokenizer, tokenizer, prefix=(0,), suffix=(2,))


def subwords(inner: str, final: str) -> Tokenizers:
    merges = ["t h", "i n", "th e</w>", "e r</w>", "i n</w>"]
    parts = [*letters(SENTENCES), "th", "in"]
    ends = [*letters(SENTENCES), "the", "er", "in"]
    entries = [*SPECIALS, *(f"{part}{inner}" for part in parts), *(f"{end}{final}" for end in ends)]
    return both(WordBpe(entries, merges, Specials(), inner=inner, final=final))


KINDS = {
    "sentencepiece": sentencepiece_bpe,
    "words": words,
    "a regular expression": characters,
    "bytes": byte_bpe,
    "bytes behind a space": lambda: byte_bpe(space=True),
    "subword-nmt": lambda: subwords("@@", ""),
    "fsmt": lambda: subwords("", "</w>"),
}


@pytest.mark.parametrize("name", KINDS)
def test_tokenizer_json_splits_as_ours(name: str, tmp_path: Path) -> None:
    """The library `tokenizers`, on lines whose characters and words it knows, and on some that it does not."""
    ours = KINDS[name]()
    write_tokenizers(ours, tmp_path, marian=False)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    lines = [*LINES[:200], "  two   spaces ", "Ein Ärger: ½, 100 %!"]
    assert [theirs.encode(line).ids for line in lines] == [ours.source_ids(line) for line in lines]
    ids = [each for line in LINES[:200] if 0 not in (each := ours.target.encode(line))]  # an unknown token is not shown
    assert len(ids) > 20 and [theirs.decode(each) for each in ids] == [ours.target_text(each) for each in ids]
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert theirs.token_to_id(settings["eos_token"]) == ours.source.specials.eos


@long
@pytest.mark.parametrize("name", FOLDERS)
def test_tokenizer_json_splits_as_imported_tokenizers(name: str, tmp_path: Path) -> None:
    """The models of sentencepiece that importers know, with ids of their own and languages."""
    ours = open_checkpoint(imported(name, tmp_path)).tokenizers
    (tmp_path / "out").mkdir()
    write_tokenizers(ours, tmp_path / "out", marian=False)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "out/tokenizer.json"))
    assert [theirs.encode(line).ids for line in LINES] == [ours.source_ids(line) for line in LINES]
    apart = tmp_path / "out/target/tokenizer.json"
    target = tokenizers.Tokenizer.from_file(str(apart)) if apart.is_file() else theirs
    ids = [each for line in LINES if ours.target.specials.unk not in (each := ours.target.encode(line))]
    assert len(ids) > 100 and [target.decode(each) for each in ids] == [ours.target_text(each) for each in ids]


def test_two_vocabularies_are_two_tokenizers(tmp_path: Path) -> None:
    source, target = (Words([*SPECIALS, *text.split()], None) for text in ("one two", "eins zwei drei"))
    write_tokenizers(Tokenizers(source, target), tmp_path, marian=False)
    sides = [tokenizers.Tokenizer.from_file(str(tmp_path / f"{side}tokenizer.json")) for side in ("", "target/")]
    assert sides[0].encode("two one").ids == [5, 4, 3] and sides[1].decode([4, 6]) == "eins drei"


def test_rules_that_the_library_would_refuse_leave_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = [*SPECIALS, *"ab", "ab"]
    tokenizer = WordBpe(entries, ["a b", "a c</w>"], Specials(), inner="", final="</w>")
    write_tokenizers(both(tokenizer), tmp_path, marian=False)
    assert not list(tmp_path.iterdir())
    assert "programs must feed ids: its vocabulary has no 'c</w>', which a merge rule" in capsys.readouterr().err


# In Node.


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose node_modules has transformers.js."""
    return folder_with([PACKAGE], tmp_path_factory)


def in_node(packages: Path, script: str, *arguments: object) -> Any:
    command = ["node", "--input-type=module", "--eval", script, *map(str, arguments)]
    done = subprocess.run(command, cwd=packages, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


TEXTS = """
import { readFileSync } from "node:fs";
import { AutoTokenizer, env } from "@huggingface/transformers";
env.allowRemoteModels = false;
const [folder, file] = process.argv.slice(-2);
const tokenizer = await AutoTokenizer.from_pretrained(folder, { local_files_only: true });
const { lines, ids } = JSON.parse(readFileSync(file, "utf-8"));
console.log(JSON.stringify([lines.map(line => tokenizer.encode(line)),
                            ids.map(each => tokenizer.decode(each, { skip_special_tokens: true }))]));
"""


@long
@pytest.mark.parametrize("name", KINDS)
def test_transformers_js_splits_as_ours(name: str, packages: Path, tmp_path: Path) -> None:
    ours = KINDS[name]()
    write_tokenizers(ours, tmp_path, marian=False)
    ids = [each for line in LINES[:100] if 0 not in (each := ours.target.encode(line))]
    (tmp_path / "request.json").write_text(json.dumps({"lines": LINES[:100], "ids": ids}))
    found, texts = in_node(packages, TEXTS, tmp_path, tmp_path / "request.json")
    assert found == [ours.source_ids(line) for line in LINES[:100]]
    assert texts == [ours.target_text(each) for each in ids]


@long
@pytest.mark.parametrize("name", FAMILIES)
def test_an_imported_family_is_equal_in_node(
    name: str, packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = imported(name, tmp_path)
    monkeypatch.chdir(packages)
    report = write_layout(run, tmp_path / "out", "transformers-js")
    assert [each.precision for each in report.proofs] == list(PRECISIONS)
    assert report.proofs[0].equal == report.proofs[0].sentences > 10
    assert report.proofs[1].equal >= 0.8 * report.proofs[1].sentences


PIPELINE = """
import { env, pipeline } from "@huggingface/transformers";
env.allowRemoteModels = false;
const translate = await pipeline("translation", process.argv.at(-1), { dtype: "q8", local_files_only: true });
const found = [];
for (const text of ["twenty-two", "nine hundred and one"]) found.push((await translate(text))[0].translation_text);
console.log(JSON.stringify(found));
"""


@pytest.fixture(scope="module")
def demo(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model as a folder, proven in Node."""
    if not DEMO.is_dir():
        pytest.skip("there is no .demo: make demo")
    out = tmp_path_factory.mktemp("demo") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(packages)
        report = write_layout(DEMO, out, "transformers-js")
    exact, *others = report.proofs
    assert exact.equal == exact.sentences and all(each.equal > 0.5 * each.sentences for each in others)
    return out


@long
def test_the_demo_translates_in_node(demo: Path, packages: Path) -> None:
    names = {
        f"onnx/{name}{end}.onnx" for name in ("encoder_model", "decoder_model_merged") for end in SUFFIXES.values()
    }
    names |= {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tformer-layout.json"}
    assert {each.relative_to(demo).as_posix() for each in demo.rglob("*") if each.is_file()} == names
    assert in_node(packages, PIPELINE, demo) == ["zweiundzwanzig", "neunhunderteins"]


@long
def test_a_damaged_graph_is_said_in_one_line(demo: Path, packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(packages)
    source = open_layout_source(DEMO)
    graph = demo / "onnx/decoder_model_merged_q4.onnx"
    whole = graph.read_bytes()
    graph.write_bytes(whole[:1000])
    try:
        with (
            open_runtime(source, demo, "q4") as generate,
            pytest.raises(EngineError, match=r"transformers\.js cannot run .*, q4: .*Error"),
        ):
            generate([[4, 3]], DecodeOptions())
    finally:
        graph.write_bytes(whole)


# In a browser.

WEB = "/node_modules/@huggingface/transformers/dist/transformers.min.js"
PAGE = """<!doctype html><title>waiting</title><script type="module">
  try {
    const { AutoModelForSeq2SeqLM, Tensor, env } = await import(WEB);
    env.allowRemoteModels = false; env.allowLocalModels = true; env.localModelPath = "/models/";
    env.backends.onnx.wasm.wasmPaths = "/node_modules/onnxruntime-web/dist/";
    const model = await AutoModelForSeq2SeqLM.from_pretrained("demo", { dtype: "DTYPE", device: "wasm" });
    const found = [];
    for (const source of SOURCES) {
      const ids = BigInt64Array.from(source, BigInt), dims = [1, source.length];
      const out = await model.generate({ input_ids: new Tensor("int64", ids, dims),
        attention_mask: new Tensor("int64", ids.map(() => 1n), dims), max_length: 25 });
      found.push(out.tolist()[0].map(Number));
    }
    document.body.textContent = JSON.stringify(found); document.title = "done";
  } catch (error) { document.body.textContent = String(error.stack ?? error); document.title = "failed"; }
</script><body></body>"""


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def site(demo: Path, packages: Path, tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder with the packages and the model, and the address at which it is served."""
    (tmp_path / "node_modules").symlink_to(packages / "node_modules")
    (tmp_path / "models").mkdir()
    (tmp_path / "models/demo").symlink_to(demo)
    Handler.extensions_map[".mjs"] = "text/javascript"
    handler = functools.partial(Handler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield tmp_path, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@long
@needs_browser
@pytest.mark.parametrize("precision", ["fp32", "q8", "q4"])
def test_a_browser_generates_the_tokens_of_eager(precision: str, site: tuple[Path, str]) -> None:
    """In headless Chromium's WebAssembly, which q8 is made for."""
    api = pytest.importorskip("playwright.sync_api")
    folder, address = site
    source = open_layout_source(DEMO)
    lines = ["twenty-two", "nine hundred and one", "one", "six thousand and forty-four"]
    sources = [source.tokenizers.source_ids(line) for line in lines]
    page = PAGE.replace("DTYPE", precision).replace("SOURCES", json.dumps(sources)).replace("WEB", json.dumps(WEB))
    (folder / "index.html").write_text(page)
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        opened = browser.new_page()
        opened.goto(f"{address}/index.html")
        opened.wait_for_function("document.title !== 'waiting'", timeout=120_000)
        text = opened.locator("body").text_content()
        assert opened.title() == "done", text
        browser.close()
    with EagerEngine(source.checkpoint.load_model()) as eager:
        wanted = [each.ids for each in outputs_of(eager, sources, DecodeOptions(max_tokens=24))]
    found = [[i for i in ids[1:] if i != source.config.eos_id] for ids in json.loads(text)]
    if precision == "q4":  # which rounds more than the demo's small model takes
        assert len(found) == len(wanted)
    else:
        assert found == wanted
