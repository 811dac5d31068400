"""Layout `optimum`: its graphs beside PyTorch, its settings, its folder in ONNX Runtime and in optimum-onnx."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray

from tformer_deploy.base.errors import ConfigError
from tformer_deploy.check.generated import generated_sources
from tformer_deploy.decoding import DecodeOptions
from tformer_deploy.engines.eager import EagerEngine
from tformer_deploy.export.layouts import hf_graphs
from tformer_deploy.export.layouts.hf_config import generation_json
from tformer_deploy.export.layouts.hf_graphs import DECODER, ENCODER, MERGED, WITH_PAST, make_graph, save_graph
from tformer_deploy.export.layouts.hf_precisions import lowered
from tformer_deploy.export.layouts.hf_tokenizer import write_tokenizers
from tformer_deploy.export.layouts.layout import Source
from tformer_deploy.export.layouts.optimum import refuse
from tformer_deploy.export.layouts.written import open_layout_source, outputs_of, write_layout
from tformer_deploy.importers.base import ImportOptions
from tformer_deploy.importers.hf_generation import decoding_defaults
from tformer_deploy.importers.run import import_checkpoint
from tformer_deploy.model.checkpoint import open_checkpoint
from tformer_deploy.model.network import Transformer

from .command import failed_line, run_here
from .configs import CONFIGS
from .conftest import random_model, random_sources, small_config
from .hf_folders import FOLDERS, LINES, OPTIONS

ROOT = Path(__file__).parent.parent
DEMO = ROOT / ".demo/run"
FAMILIES = ("marian", "bart", "m2m_100", "mbart", "t5", "pegasus", "fsmt", "blenderbot")
OPTIMUM = ("optimum-onnx==0.1.0", "transformers==4.57.6", "onnxruntime", "sentencepiece", "sacremoses")
Arrays = dict[str, NDArray[Any]]
long = pytest.mark.long


def saved(
    model: Transformer, folder: Path, *names: str, precision: str = "fp32"
) -> dict[str, onnxruntime.InferenceSession]:
    """Sessions of some graphs of a model."""
    for name in names:
        save_graph(lowered(make_graph(name, model), precision), folder / f"{name}.onnx", "0")
    return {name: onnxruntime.InferenceSession(folder / f"{name}.onnx") for name in names}


def fed(session: onnxruntime.InferenceSession, given: Arrays) -> Arrays:
    """What a graph makes of those arrays that it reads; caches that are not given are of no position."""
    inputs = session.get_inputs()
    rows = len(given["input_ids"])
    empty = {each.name: np.zeros((rows, each.shape[1], 0, each.shape[3]), np.float32) for each in inputs[3:-1]}
    feeds = {**empty, **given}
    names = [each.name for each in session.get_outputs()]
    return dict(zip(names, session.run(names, {each.name: feeds[each.name] for each in inputs}), strict=True))


def past_of(outputs: Arrays) -> Arrays:
    return {name.replace("present", "past_key_values"): each for name, each in outputs.items() if name != "logits"}


def teacher_forced(model: Transformer, source: NDArray[np.int32], lengths: NDArray[np.int32], target: Any) -> Any:
    with torch.inference_mode():
        return model(*map(torch.from_numpy, (source, lengths)), torch.from_numpy(target)).numpy()


@long
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_graphs_give_the_logits_of_pytorch(config: dict[str, Any], tmp_path: Path) -> None:
    """In one call, in two, and token by token; the merged decoder's caches may hold anything that it must not read."""
    model = random_model(small_config(**config)).eval()
    sessions = saved(model, tmp_path, ENCODER, DECODER, WITH_PAST, MERGED)
    source, lengths = random_sources(3, 7)
    mask = (np.arange(7) < lengths[:, None]).astype(np.int64)
    target = np.random.default_rng(1).integers(4, 20, (3, 6))
    wanted = teacher_forced(model, source, lengths, target)
    memory = fed(sessions[ENCODER], {"input_ids": source.astype(np.int64), "attention_mask": mask})
    fixed = {"encoder_attention_mask": mask, "encoder_hidden_states": memory["last_hidden_state"]}

    whole = fed(sessions[DECODER], {"input_ids": target, **fixed})
    assert np.allclose(whole["logits"], wanted, atol=2e-5)
    first = fed(sessions[DECODER], {"input_ids": target[:, :2], **fixed})
    then = fed(sessions[WITH_PAST], {"input_ids": target[:, 2:], **fixed, **past_of(first)})
    assert np.allclose(np.concatenate((first["logits"], then["logits"]), 1), wanted, atol=2e-5)
    assert not any(".encoder." in name for name in then) and sorted(whole) == sorted(first)

    heads = model.config.decoder
    junk = {name: np.full((3, heads.heads, 1, heads.head_dim), 9, np.float32) for name in past_of(first)}
    for past in ({}, junk):  # what transformers.js and older programs give
        found = []
        caches: Arrays = past
        for step, token in enumerate(target.T):
            branch = {"use_cache_branch": np.array([step > 0])}
            outputs = fed(sessions[MERGED], {"input_ids": token[:, None], **fixed, **branch, **caches})
            found.append(outputs["logits"])
            new = past_of(outputs)
            made = [each for name, each in new.items() if ".encoder." in name]
            assert all(each.shape[2] == (0 if step else 7) for each in made)  # they are not made again
            caches = new | ({name: each for name, each in caches.items() if ".encoder." in name} if step else {})
        assert np.allclose(np.concatenate(found, 1), wanted, atol=2e-5)


def test_large_weights_lie_beside_their_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_graphs, "MOST_BYTES", 10_000)
    model = random_model(small_config(encoder_layers=1)).eval()
    session = saved(model, tmp_path, ENCODER)[ENCODER]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["encoder_model.onnx", "encoder_model.onnx_data"]
    source, lengths = random_sources(2, 5)
    mask = (np.arange(5) < lengths[:, None]).astype(np.int64)
    found = fed(session, {"input_ids": source.astype(np.int64), "attention_mask": mask})["last_hidden_state"]
    with torch.inference_mode():
        wanted = model.encode(torch.from_numpy(source), torch.from_numpy(lengths)).numpy()
    assert np.allclose(found[mask > 0], wanted[mask > 0], atol=2e-5)


def source_with(run: Path, **options: Any) -> Source:
    return Source(open_checkpoint(run), DecodeOptions(**options))


def test_settings_mean_the_same_when_they_are_read_again(run: Path) -> None:
    """`importers.hf_generation` reads what transformers reads; test_transformers.py shows that it means the same."""
    options = DecodeOptions(
        beams=4,
        max_tokens=20,
        min_tokens=3,
        length_penalty=0.6,
        stop="exact",
        no_repeat_ngram=3,
        suppress=(1, 9),
        bad_words=((5, 6), (7, 8, 9)),
        first_ids=(11,),
        first_adds_zero=True,
        forced_end=True,
        end_ids=(3, 12),
    )
    source = source_with(run, **dataclasses.asdict(options))
    written = generation_json(source, beams=True)
    assert not list(refuse(source)) and written["decoder_start_token_id"] == 2
    read, notes = decoding_defaults(json.loads(json.dumps(written)), (written["forced_bos_token_id"],), source.config)
    assert DecodeOptions(**{name: tuples(value) for name, value in read.items()}) == options and not notes


def tuples(value: Any) -> Any:
    return tuple(map(tuples, value)) if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"beams": 2, "length_norm": "gnmt"}, "length_norm=gnmt"),
        ({"beams": 2, "patience": 2.0}, "patience=2.0"),
        ({"beams": 2, "coverage_penalty": 0.2}, "coverage_penalty=0.2"),
        ({"max_ratio": 2.0}, "max_ratio=2.0"),
        ({"repetition_penalty": 1.2}, "repetition_penalty=1.2"),
        ({"sampling": True}, "sampling=True"),
        ({"endless": True}, "endless=True"),
        ({"first_ids": (5,)}, r"first_ids=\[5\] without first_adds_zero"),
        ({"first_ids": (5, 6), "first_adds_zero": True}, r"first_ids=\[5, 6\]: one id can be forced"),
        ({"suppress": (3,)}, r"suppress=\[3\], an end token"),
    ],
)
def test_what_the_settings_cannot_say_is_refused(
    options: dict[str, Any], said: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_with(run, **options)
    monkeypatch.setattr("tformer_deploy.export.layouts.written.open_layout_source", lambda _: source)
    with pytest.raises(ConfigError, match=f"layout optimum cannot say {said}.*choose another layout"):
        write_layout(run, tmp_path / "out", "optimum")
    assert not (tmp_path / "out").exists()


def test_a_layout_has_its_own_precisions(run: Path, tmp_path: Path) -> None:
    done = run_here("export", run, "--layout", "optimum", "--recipe", "int8", "--out", tmp_path / "out")
    assert "--recipe: not with --layout" in failed_line(done)


def imported(name: str, folder: Path) -> Path:
    """A run folder of a random model of a family; the original stays beside it."""
    FOLDERS[name](folder / "hf")
    options = ImportOptions(**OPTIONS.get(name, {}))  # type: ignore[arg-type]
    import_checkpoint("hf", folder / "hf", folder / "run", options, comparing=False)
    return folder / "run"


@long
@pytest.mark.parametrize("name", FAMILIES)
def test_an_imported_family_is_equal_and_keeps_its_files(name: str, tmp_path: Path) -> None:
    run = imported(name, tmp_path)
    report = write_layout(run, tmp_path / "out", "optimum")
    assert all(each.equal == each.sentences > 10 for each in report.proofs) and len(report.proofs) == 4
    config, original = (json.loads((tmp_path / each / "config.json").read_text()) for each in ("out", "hf"))
    # T5's heads are wider than its model, which optimum cannot know; transformers.js has no Pegasus and no FSMT.
    plain = name in ("t5", "pegasus", "fsmt")
    assert config["model_type"] == ("marian" if plain else original["model_type"])
    files = sorted(each.name for each in (tmp_path / "hf").iterdir() if each.suffix not in (".safetensors",))
    assert set(files) <= {each.name for each in (tmp_path / "out").iterdir()}


@pytest.fixture(scope="module")
def optimum(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with optimum-onnx, which needs an older transformers than ours."""
    if given := os.environ.get("TFORMER_OPTIMUM_PYTHON"):
        return Path(given)
    folder = tmp_path_factory.mktemp("optimum")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True, timeout=300)
    install = [folder / "venv/bin/pip", "install", "-q", "--no-compile", "--disable-pip-version-check"]
    torch_version = f"torch=={torch.__version__.partition('+')[0]}"
    done = subprocess.run([*install, torch_version, *OPTIMUM], capture_output=True, text=True, timeout=1200)
    if done.returncode:
        pytest.skip(f"optimum's environment cannot be made: {done.stderr.strip().splitlines()[-1]}")
    return folder / "venv/bin/python"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model as a folder, proven in plain ONNX Runtime."""
    if not DEMO.is_dir():
        pytest.skip("there is no .demo: make demo")
    out = tmp_path_factory.mktemp("demo") / "model"
    report = write_layout(DEMO, out, "optimum")
    assert all(each.equal == each.sentences for each in report.proofs)
    return out


@long
def test_the_loop_of_the_page_gives_eagers_tokens(demo: Path) -> None:
    page = (ROOT / "docs/anywhere.md").read_text(encoding="utf-8")
    [program] = [each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "encoder_model.onnx" in each]
    here: dict[str, Any] = {}
    exec(program.replace("en-de-onnx", str(demo)), here)
    source = open_layout_source(DEMO)
    sources = [source.tokenizers.source_ids(line) for line in ("twenty-two", "nine hundred and one", "one million")]
    with EagerEngine(source.checkpoint.load_model()) as eager:
        wanted = [each.ids for each in outputs_of(eager, sources, DecodeOptions(max_tokens=64))]
    assert [here["generate"](ids) for ids in sources] == wanted
    assert source.tokenizers.target_text(wanted[0]) == "zweiundzwanzig"


@long
def test_a_module_of_the_users_own_is_equal(tmp_path: Path) -> None:
    """Its masks are of numbers, which older operators cannot say; its caches are hidden states."""
    file = tmp_path / "module.py"
    file.write_text("from tests.user_models import tutorial\nmake = lambda: tutorial(hooks=True)\n")
    report = write_layout(Path(f"{file}:make"), tmp_path / "out", "optimum")
    assert all(each.equal == each.sentences > 10 for each in report.proofs) and len(report.proofs) == 4
    graph = onnx.load(tmp_path / "out/decoder_model_merged.onnx")
    assert graph.opset_import[0].version == 23
    file.write_text("from tests.user_models import tutorial\nmake = tutorial\n")
    with pytest.raises(ConfigError, match="cannot say a module without an encoder and a decoder of their own"):
        write_layout(Path(f"{file}:make"), tmp_path / "forward", "optimum")


GENERATE = """
import json, sys, torch
from optimum.onnxruntime import ORTModelForSeq2SeqLM
from transformers import AutoTokenizer

request = json.load(open(sys.argv[1]))
found = []
for merged, beams in request["runs"]:
    model = ORTModelForSeq2SeqLM.from_pretrained(request["folder"], use_merged=merged)
    ends, rows = [model.generation_config.eos_token_id], []
    for source in request["sources"]:
        ids = torch.tensor([source])
        # A row of padding beside it, as batches have them.
        pad = torch.full((1, 2), model.generation_config.pad_token_id)
        batch = torch.cat((torch.cat((ids, pad), 1), torch.cat((ids[:, :1], ids[:, -1:], ids), 1)))
        mask = torch.ones_like(batch)
        mask[0, -2:] = 0
        out = model.generate(input_ids=batch, attention_mask=mask, num_beams=beams, max_length=request["max_length"])
        ids = out[0].tolist()[1:]
        rows.append(ids[: next((i for i, each in enumerate(ids) if each in ends), len(ids))])
    found.append(rows)
tokenizer = AutoTokenizer.from_pretrained(request["folder"])
texts = [tokenizer(line)["input_ids"] for line in request["lines"]]
json.dump([found, texts], open(sys.argv[2], "w"))
"""


@long
@pytest.mark.parametrize("name", ["trained here", "marian", "bart", "t5"])
def test_optimum_generates_the_tokens_of_eager_pytorch(
    name: str, optimum: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Both kinds of decoder, greedy and with 4 beams, and the tokenizer's files."""
    run, folder = DEMO, tmp_path / "out"
    if name == "trained here":
        folder = request.getfixturevalue("demo")
    else:
        run = imported(name, tmp_path)
        write_layout(run, folder, "optimum")
    source = open_layout_source(run)
    sources = generated_sources(source.config.src_vocab, source.config.eos_id, 12, 0)[:6]
    lines = LINES[:40] if name != "trained here" else ["twenty-two", "nine hundred and one", "  seven  "]
    runs = [[merged, beams] for merged in (True, False) for beams in (1, 4)]
    asked = {"folder": str(folder), "sources": sources, "lines": lines, "runs": runs, "max_length": 25}
    (tmp_path / "request.json").write_text(json.dumps(asked))
    command = [optimum, "-c", GENERATE, tmp_path / "request.json", tmp_path / "found.json"]
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "ORT_DISABLE_TELEMETRY": "1"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found, texts = json.loads((tmp_path / "found.json").read_text())
    with EagerEngine(source.checkpoint.load_model()) as eager:
        for (_, beams), outputs in zip(runs, found, strict=True):
            options = dataclasses.replace(source.options, beams=beams, max_tokens=24)
            assert outputs == [each.ids for each in outputs_of(eager, sources, options)]
    language = name == "marian"  # which users of transformers write before a text
    assert texts == [source.tokenizers.source_ids(line)[language:] for line in lines]


def test_tokenizers_that_no_file_can_say_leave_ids(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("spacy")
    from tformer_deploy.bundle.text import SPECIALS, Tokenizers, Words

    words = Words([*SPECIALS, "one", "two"], "en")
    write_tokenizers(Tokenizers(words, words), tmp_path, marian=True)
    assert not list(tmp_path.iterdir())
    assert "warning: no tokenizer files, programs must feed ids: spaCy's rules for 'en'" in capsys.readouterr().err
