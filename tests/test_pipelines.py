"""`pipeline` and `generate`: rules of arguments and records; token for token what transformers 4 gives."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tformer_deploy
from tformer_deploy import TformerForSeq2SeqLM, pipeline
from tformer_deploy.base.errors import ConfigError, DataError
from tformer_deploy.decoding import DecodeOptions, Decoding
from tformer_deploy.engines.eager import EagerEngine
from tformer_deploy.importers.hf_generation import settings_of
from tformer_deploy.importers.weights import read_json_file
from tformer_deploy.model.checkpoint import open_checkpoint
from tformer_deploy.pipelines import cache
from tformer_deploy.pipelines.arguments import Model, plan, settings_of_bundle
from tformer_deploy.pipelines.model import Opening
from tformer_deploy.translate.translator import Translator

ROOT = Path(__file__).parent.parent
BUNDLE = ROOT / "tests/bundles/v2/copy"
MODEL = Model(start_id=2, pad_id=1, eos_id=3, positions=64)


def options(**arguments: Any) -> DecodeOptions:
    return plan(arguments, MODEL, {}).options


def test_lengths_are_those_of_transformers() -> None:
    assert options().max_tokens == 19, "max_length=20 counts the start token"
    assert options(max_length=9).max_tokens == 8
    assert options(max_length=9, max_new_tokens=5).max_tokens == 5
    assert options(max_new_tokens=500).max_tokens == 64
    assert options(min_length=4).min_tokens == 4
    assert options(min_new_tokens=4).min_tokens == 5
    assert plan({"min_length": 30}, MODEL, {}).never_ends


def test_arguments_become_options() -> None:
    found = options(num_beams=4, early_stopping="never", length_penalty=2.0, num_return_sequences=3)
    assert (found.beams, found.stop, found.length_penalty, found.n_best) == (4, "exact", 2.0, 3)
    assert options(num_beams=2).stop == "estimate"
    found = options(do_sample=True, temperature=0.5, num_return_sequences=2, seed=7)
    assert (found.sampling, found.temperature, found.top_k, found.n_best, found.seed) == (True, 0.5, 50, 2, 7)
    found = options(bad_words_ids=[[3], [4], [5, 6]], suppress_tokens=[9], forced_bos_token_id=8)
    assert (found.suppress, found.bad_words, found.first_ids) == ((4, 9), ((5, 6),), (8,))
    assert options(eos_token_id=[3, 5], forced_eos_token_id=[3, 5]).forced_end
    assert plan({"decoder_start_token_id": 2}, MODEL, {}).guided is False
    assert plan({"decoder_start_token_id": 5}, MODEL, {}).guided is True
    words = plan({"num_beams": 2, "force_words_ids": [[4], [[5], [6, 7]]]}, MODEL, {}).constraints
    assert [type(each).__name__ for each in words] == ["PhrasalConstraint", "DisjunctiveConstraint"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beem": 2}, "unknown argument of generate 'num_beem': did you mean 'num_beams'"),
        ({"penalty_alpha": 0.6}, "generate: penalty_alpha is not supported here"),
        ({"num_beam_groups": 2}, "generate: num_beam_groups is not supported here"),
        ({"logits_processor": [1]}, "generate: logits_processor is not supported here"),
        ({"do_sample": True, "num_beams": 2}, "do_sample=True with num_beams above 1 is not supported"),
        ({"num_return_sequences": 2}, "num_return_sequences=2: must be at most num_beams=1"),
        ({"repetition_penalty": 1.2}, "repetition_penalty without num_beams acts on logits"),
        ({"output_scores": True}, "output_scores without num_beams are logits"),
        ({"force_words_ids": [[1]]}, "need a beam: give num_beams=2 or more"),
        ({"force_words_ids": 5, "num_beams": 2}, "give a list of lists of token ids"),
        ({"constraints": [5], "num_beams": 2}, "int is neither PhrasalConstraint nor DisjunctiveConstraint"),
        ({"early_stopping": "soon", "num_beams": 2}, "early_stopping='soon': must be one of"),
        ({"forced_eos_token_id": 9}, "must be eos_token_id=[3]"),
        ({"max_length": 1}, "must be at least 2"),
    ],
    ids=str,
)
def test_what_cannot_be_followed_is_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        plan(arguments, MODEL, {})


def test_neutral_values_and_speed_are_no_reason_to_refuse() -> None:
    assert options(num_beam_groups=1, diversity_penalty=0.0, use_cache=True, penalty_alpha=None) == options()


def test_a_bundle_keeps_its_own_defaults() -> None:
    decoding = {"beams": 3, "max_tokens": 30, "stop": "estimate", "first_ids": [7], "first_adds_zero": True}
    settings, others = settings_of_bundle({**decoding, "length_norm": "gnmt"})
    found = plan(settings, MODEL, others).options
    assert (found.beams, found.max_tokens, found.stop, found.first_ids) == (3, 30, "estimate", (7,))
    assert found.length_norm == "gnmt"
    assert plan({**settings, "num_beams": 1}, MODEL, others).options.length_norm == "power"


def test_records_have_the_shapes_of_transformers() -> None:
    with pipeline("summarization", model=BUNDLE) as summarize, tformer_deploy.load(BUNDLE) as translator:
        texts = ["3 1 4", "6 5"]
        expected = [result.text for result in translator.translate(texts)]
        assert summarize(texts[0]) == [{"summary_text": expected[0]}]
        assert summarize(texts) == [{"summary_text": text} for text in expected]
        assert list(summarize(iter(texts))) == [[{"summary_text": text}] for text in expected]
        several = summarize(texts, num_beams=3, num_return_sequences=2)
        assert [len(each) for each in several] == [2, 2]
        [record] = summarize(texts[0], return_tensors=True)
        assert record["summary_token_ids"][0] == translator.engine.config.start_id
        rows = summarize(texts, return_tensors=True, batch_size=2)
        assert len({len(row["summary_token_ids"]) for row in rows}) == 1
        with pytest.raises(DataError, match="5 is no text"):
            summarize([5])
    with pytest.raises(ConfigError, match="task 'fill-mask': must be translation"):
        pipeline("fill-mask", model=BUNDLE)
    with pytest.raises(ConfigError, match="there is no such folder"):
        pipeline("summarization", model="t5-small")


def test_torch_in_torch_out() -> None:
    with TformerForSeq2SeqLM.from_pretrained(BUNDLE) as model:
        config = model.translator.engine.config
        ids = np.array([[5, 6, 7, config.eos_id], [8, config.eos_id, config.pad_id, config.pad_id]])
        mask = (ids != config.pad_id).astype(int)
        arrays = model.generate(ids, mask, num_beams=2, return_dict_in_generate=True, output_scores=True)
        tensors = model.generate(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), num_beams=2)
        assert isinstance(tensors, torch.Tensor)
        assert tensors.tolist() == arrays.sequences.tolist()
        assert arrays.sequences.dtype == np.int64
        assert (arrays.sequences[:, 0] == config.start_id).all()
        assert arrays.sequences_scores.shape == (2,)
        with pytest.raises(ConfigError, match="beam_indices is not given here"):
            _ = arrays.beam_indices
        with pytest.raises(DataError, match="only padding on the right is supported"):
            model.generate(ids, mask[:, ::-1])
        sampled = [model.generate(ids, mask, do_sample=True, seed=seed).tolist() for seed in (1, 1)]
        assert sampled[0] == sampled[1]


# Against transformers 4, in an environment of its own.

LANGUAGES = {
    "m2m_100": ("en", "de"),
    "mbart": ("en_XX", "de_DE"),
    "mbart50": ("en_XX", "de_DE"),
    "nllb": ("eng_Latn", "deu_Latn"),
}
ENDS = {"marian": 0, "bart": 2, "t5": 1, "mbart": 2, "mbart50": 2, "pegasus": 1, "m2m_100": 2, "nllb": 2}
PACKAGES = ["transformers==4.57.6", "torch==2.13.0", "sentencepiece", "sacremoses", "protobuf"]
CONSTRAINED = "transformers==4.56.2"
"""The last one with constrained beam search in itself: 4.57 fetches the same code from the Hub."""
TEXTS = ["A little girl climbing into a wooden playhouse.", "Two men", "Several men in hard hats are operating it."]


def generating(end: int) -> list[dict[str, Any]]:
    """Arguments of `generate`."""
    begin, following = list(range(10, 90)), [[40, 41, 42, end], [50, 51, 52, 53]]
    long = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 14, "length_penalty": 0.6}
    return [
        {"num_beams": 1},
        {"num_beams": 4},
        {**long, "early_stopping": True},
        {"num_beams": 1, "max_new_tokens": 12, "min_length": 6},
        {"num_beams": 4, "max_length": 15, "min_new_tokens": 5, "no_repeat_ngram_size": 2},
        {"num_beams": 4, "max_new_tokens": 12, "early_stopping": "never", "length_penalty": 2.0},
        {"num_beams": 1, "max_new_tokens": 10, "suppress_tokens": [20, 21, 22], "bad_words_ids": [[30], [31, 32]]},
        {"num_beams": 4, "max_new_tokens": 10, "forced_bos_token_id": 33},
        *({"num_beams": beams, "max_new_tokens": 10, "decoder_start_token_id": 35} for beams in (1, 4)),
        {"num_beams": 4, "max_new_tokens": 10, "repetition_penalty": 1.7},
        *({"num_beams": beams, "max_new_tokens": 10, "begin_suppress_tokens": begin} for beams in (1, 3)),
        *({"num_beams": beams, "max_new_tokens": 8, "allowed": following} for beams in (1, 3)),
    ]


CONSTRAINTS: list[dict[str, Any]] = [
    {"num_beams": beams, "max_new_tokens": longest, "num_return_sequences": several, **words}
    for beams, longest, several in ((4, 12, 1), (5, 16, 3))
    for words in (
        {"force_words_ids": [[60]]},
        {"force_words_ids": [[60, 61], [70]]},
        {"force_words_ids": [[[60, 61], [62, 63, 64], [60, 65]]]},
        {"force_words_ids": [[44, 45, 46], [[50], [51, 52]], [53]], "length_penalty": 0.5},
        {"force_words_ids": [[60, 61], [60, 61]], "early_stopping": True, "min_length": 7, "no_repeat_ngram_size": 3},
    )
]
TAGGED = [
    ">>fra<< Two men",
    ">>deu<<Two men",
    "Two men",
    ">>xyz<< Two men",
    "Two >>fra<< men",
    ">>fra<< Two >>deu<< men",
]
"""Target languages, known and unknown, in texts for a Marian model of several."""
PIPELINED: list[dict[str, Any]] = [
    {},
    {"num_beams": 1, "max_new_tokens": 9},
    {"num_return_sequences": 2, "num_beams": 4, "max_new_tokens": 9},
    {"max_new_tokens": 12, "clean_up_tokenization_spaces": True, "truncation": True},
]


def nllb(path: Path) -> Path:
    """M2M100's model with NLLB's tokenizer."""
    from . import hf_folders

    model = hf_folders.fairseq_pieces()
    vocab = ["<s>", "<pad>", "</s>", "<unk>", *hf_folders.entries(model)[3:]]
    codes = ["eng_Latn", "deu_Latn", "fra_Latn"]
    numbered = {**dict(enumerate(vocab[:4])), **dict(enumerate([*codes, "<mask>"], len(vocab)))}
    tokenizer = {
        "tokenizer_class": "NllbTokenizer",
        "added_tokens_decoder": {str(i): {"content": token, "special": True} for i, token in numbered.items()},
        "additional_special_tokens": codes,
        "src_lang": codes[0],
    }
    made = hf_folders.of_bart("M2M100", len(vocab) + 4, 2, activation_function="relu", scale_embedding=True)
    files = {"sentencepiece.bpe.model": model, "tokenizer_config.json": tokenizer}
    return hf_folders.write(path, made, files, tables=0.3, layers=1.6, loud=2.5)


def mbart50(path: Path) -> Path:
    """A model of mBART-50: a language's code begins a source and an output."""
    from transformers.models.mbart50.tokenization_mbart50 import FAIRSEQ_LANGUAGE_CODES

    from . import hf_folders

    model = hf_folders.fairseq_pieces()
    vocab = ["<s>", "<pad>", "</s>", "<unk>", *hf_folders.entries(model)[3:]]
    codes = [*FAIRSEQ_LANGUAGE_CODES, "<mask>"]
    added = {str(len(vocab) + i): {"content": code, "special": True} for i, code in enumerate(codes)}
    made = hf_folders.of_bart("MBart", len(vocab) + len(codes), 2, activation_function="relu", scale_embedding=True)
    tokenizer = {"tokenizer_class": "MBart50Tokenizer", "src_lang": "en_XX", "added_tokens_decoder": added}
    files = {"sentencepiece.bpe.model": model, "tokenizer_config.json": tokenizer}
    return hf_folders.write(path, made, files, tables=0.3)


def cases_of(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What is asked of both, and of the one with constraints."""
    name, end, draw = folder.name, ENDS[folder.name], random.Random(3)
    rows = [[*(draw.randrange(8, 100) for _ in range(count)), end] for count in (3, 7, 5, 9)]
    most = max(map(len, rows))
    ids, mask = [row + [1] * (most - len(row)) for row in rows], [[1] * len(r) + [0] * (most - len(r)) for r in rows]
    common = {"folder": str(folder), "input_ids": ids, "attention_mask": mask, "task": "generate"}
    task = "translation" if name in (*LANGUAGES, "marian") else "summarization"
    pair = dict(zip(("src_lang", "tgt_lang"), LANGUAGES.get(name, ()), strict=False))
    back = dict(zip(("tgt_lang", "src_lang"), LANGUAGES.get(name, ()), strict=False))
    texts = {"folder": str(folder), "task": task}
    usual = [{**common, "arguments": each} for each in generating(end)]
    usual += [{**texts, "texts": TEXTS, "arguments": {**pair, **each}} for each in PIPELINED]
    usual.append({**texts, "texts": TEXTS[0], "arguments": {**pair, "max_new_tokens": 9}})
    usual.append({**texts, "texts": TAGGED if name == "marian" else TEXTS, "arguments": {**back, "max_new_tokens": 9}})
    return usual, [{**common, "values": True, "arguments": each} for each in CONSTRAINTS]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    from . import hf_folders

    root = tmp_path_factory.mktemp("folders")
    made = {**hf_folders.FOLDERS, "nllb": nllb, "mbart50": mbart50}
    return [made[name](root / name) for name in ENDS]


@pytest.fixture(scope="module")
def references(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Of each folder, (case, what transformers 4 gives)."""
    home = tmp_path_factory.mktemp("transformers4")
    subprocess.run([sys.executable, "-m", "venv", home / "venv"], check=True, timeout=300)
    install = [home / "venv/bin/pip", "install", "-q", "--no-compile", "--disable-pip-version-check"]
    older = home / "older"
    for packages in (PACKAGES, ["--no-deps", "--target", older, CONSTRAINED]):
        done = subprocess.run([*install, *packages], capture_output=True, text=True, timeout=900)
        if done.returncode:
            pytest.skip(f"transformers 4 cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, list[Any]] = {folder.name: [] for folder in folders}
    asked = [cases_of(folder) for folder in folders]
    for number, path in enumerate(("", str(older))):
        cases = [case for each in asked for case in each[number]]
        (home / "cases.json").write_text(json.dumps(cases))
        command = [home / "venv/bin/python", ROOT / "tests/pipeline_reference.py", "cases.json", "found.json"]
        environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr[-2000:]
        answer = json.loads((home / "found.json").read_text())
        assert answer["version"].startswith("4.5")
        for case, result in zip(cases, answer["found"], strict=True):
            found[Path(case["folder"]).name].append((case, result))
    return found


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Models are opened without an export: every engine gives the tokens of eager PyTorch, as its check shows."""
    memo: dict[Opening, TformerForSeq2SeqLM] = {}

    def opened(opening: Opening) -> TformerForSeq2SeqLM:
        if opening not in memo:
            folder, run = opening.folder, tmp_path / str(len(memo))
            cache._import(cache.Source(folder, "fp32", opening.src_lang, opening.tgt_lang, compare=False), run)
            checkpoint, config = open_checkpoint(run), read_json_file(folder / "config.json")
            said = {name: config[name] for name in cache.CONFIG if config.get(name) is not None}
            prepared = cache.Prepared(run, settings_of(folder, config), said)
            engine, decoding = EagerEngine(checkpoint.load_model()), Decoding.over(checkpoint.decoding, {})
            memo[opening] = TformerForSeq2SeqLM(
                Translator(engine, checkpoint.tokenizers, decoding).open(), prepared, {}
            )
        return memo[opening]

    monkeypatch.setattr(TformerForSeq2SeqLM, "opened", opened)


def ours(case: dict[str, Any]) -> Any:
    arguments = dict(case["arguments"])
    if case["task"] != "generate":
        return pipeline(case["task"], model=case["folder"])(case["texts"], **arguments)
    if allowed := arguments.pop("allowed", None):
        arguments["prefix_allowed_tokens_fn"] = lambda number, output: allowed[len(output) % 2]
    named = dict(zip(("src_lang", "tgt_lang"), LANGUAGES.get(Path(case["folder"]).name, ()), strict=False))
    model = TformerForSeq2SeqLM.from_pretrained(case["folder"], **named)
    ids, mask = np.array(case["input_ids"]), np.array(case["attention_mask"])
    if not case.get("values"):
        return model.generate(ids, mask, **arguments).tolist()
    found = model.generate(ids, mask, return_dict_in_generate=True, output_scores=True, **arguments)
    return found.sequences.tolist(), found.sequences_scores.tolist()


def padded_alike(*both: list[list[int]]) -> list[list[list[int]]]:
    """Sequences without the padding at their ends, which depends on the longest."""
    return [[list(itertools.dropwhile(lambda token: token == 1, reversed(each))) for each in rows] for rows in both]


@pytest.mark.long
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", ENDS)
def test_tokens_and_texts_are_those_of_transformers_4(name: str, references: dict[str, list[Any]]) -> None:
    assert len(references[name]) == len(generating(0)) + len(PIPELINED) + 2 + len(CONSTRAINTS)
    for case, expected in references[name]:
        found = ours(case)
        if not case.get("values"):
            assert found == expected, case["arguments"]
            continue
        # Outputs that a forced end forbids have the value -inf, and no order among themselves.
        allowed = [math.isfinite(value) for value in found[1]]
        assert any(allowed)
        for is_allowed, ids, theirs in zip(allowed, *padded_alike(found[0], expected), strict=True):
            assert not is_allowed or ids == theirs, case["arguments"]


@pytest.mark.long
def test_a_folder_is_exported_once_and_a_damaged_cache_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from . import hf_folders

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = hf_folders.FOLDERS["t5"](tmp_path / "t5")
    config = json.loads((folder / "config.json").read_text())
    config["task_specific_params"] = {"summarization": {"prefix": "summarize: ", "max_length": 12, "num_beams": 2}}
    (folder / "config.json").write_text(json.dumps(config))
    made: list[Any] = []
    for _ in range(2):
        with pipeline("summarization", model=folder, compare=False) as summarize:
            assert (summarize.prefix, summarize.defaults["num_beams"]) == ("summarize: ", 2)
            made.append(summarize(TEXTS))
    assert capsys.readouterr().err.count("was exported to") == 1
    [entry] = (tmp_path / "cache/tformer/pipelines").iterdir()
    graph = entry / "bundle/decoder_step.onnx"
    graph.write_bytes(graph.read_bytes()[:-9])
    with pipeline("summarization", model=folder, compare=False) as summarize:
        made.append(summarize(TEXTS))
    assert capsys.readouterr().err.count("was exported to") == 1
    assert made[0] == made[1] == made[2]
    # Where nothing that exports can be imported, what has been exported is opened.
    code = f"""
import sys, json
sys.modules.update(dict.fromkeys(("torch", "onnx", "onnxscript", "safetensors", "transformers")))
from tformer_deploy import pipeline
with pipeline("summarization", model={str(folder)!r}, compare=False) as summarize:
    print(json.dumps(summarize({TEXTS})))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and json.loads(done.stdout) == made[0], done.stderr
