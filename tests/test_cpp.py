"""libtformer and tformer-cpp against the Python package: the same tokens, scores, errors and words."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import resource
import shutil
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from ctypes import byref, c_size_t, c_uint64, c_void_p
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tformer_deploy import __version__, load
from tformer_deploy.base.errors import ConfigError, DataError, LimitError, NotNumbers, TformerError
from tformer_deploy.base.settings import from_dict
from tformer_deploy.bundle.contract import described, file_of, graphs_of
from tformer_deploy.bundle.recipe import recipe_from_dict
from tformer_deploy.bundle.text import ByteBpe, Specials, Tokenizers
from tformer_deploy.bundle.text.bpe import BYTES
from tformer_deploy.decoding import DecodeOptions, decode
from tformer_deploy.export.checked import export_checked
from tformer_deploy.model.checkpoint import model_tensors, save_checkpoint, save_tensors
from tformer_deploy.model.config import ModelConfig
from tformer_deploy.translate.batches import make_batch

from .command import run_here
from .conftest import needs_vnni, random_model, small_config
from .cpp_library import (
    ROOT,
    CppError,
    Ids,
    Model,
    Output,
    Serving,
    Text,
    Translator,
    built,
    library,
    onnxruntime,
    texts,
)
from .cpp_programs import program
from .mutations import behind, break_graph, changed, constant, row

BUNDLES = ROOT / "tests" / "bundles"
DEMO = ROOT / ".demo" / "bundle"
NUMBERS = [
    *("forty-two", "", "nine hundred and ninety-nine thousand, one hundred and seven", "  seven\r", "one million"),
    *("twelve thousand and two", "\x1c three ", "six hundred and sixty-six thousand", "eleven", "no number at all"),
]
USAGE, BUNDLE, LIMIT, TEXT, NOT_NUMBERS, NO_LIBRARY, CANCELLED = 1, 2, 3, 4, 6, 7, 8
SEARCHES: list[dict[str, Any]] = [
    {},
    {"beams": 4, "n_best": 4},
    {"beams": 3, "length_penalty": 0.6, "stop": "estimate", "no_repeat_ngram": 2},
    {"sampling": True, "n_best": 3, "seed": 5, "top_k": 5},
    {"sampling": True, "seed": 7, "temperature": 2.0, "repetition_penalty": 1.2},
]
ALIGNED: list[dict[str, Any]] = [{"align": True}, {"beams": 3, "align": True, "coverage_penalty": 0.2}]


def folders() -> Iterator[Path]:
    """The demo's bundle and every committed one."""
    yield DEMO
    yield from sorted(path.parent for path in BUNDLES.glob("v*/**/manifest.json"))


def cases() -> Iterator[tuple[Path, str, bool]]:
    """Each bundle, each of its variants that ONNX Runtime runs, without and with its shortlist."""
    for folder in folders():
        if not folder.is_dir():
            continue
        manifest = json.loads((folder / "manifest.json").read_text())
        for name, part in {"fp32": manifest, **manifest.get("variants", {})}.items():
            if part["recipe"].get("target") in ("trt", "native"):
                continue
            yield folder, name, False
            if part["recipe"].get("target") == "ort-cpu" and "shortlist" in manifest:
                yield folder, name, True


def lines_of(folder: Path) -> list[str]:
    answers = folder.with_suffix(".json")
    if answers.is_file():
        return [*json.loads(answers.read_text())["lines"], "", "1 2 3 4 5 6 7 8 9 10"]
    return NUMBERS if folder == DEMO else ["3 1 4 1 5 9 2", "", "7 7"]


def name_of(case: tuple[Path, str, bool]) -> str:
    folder, variant, shortlist = case
    return f"{folder.relative_to(ROOT)}:{variant}{'+shortlist' * shortlist}"


@cache
def demo(variant: str) -> Model:
    if not DEMO.is_dir():
        pytest.skip("no .demo/bundle: make demo")
    return Model(DEMO, variant=variant)


@cache
def demo_in_python(variant: str) -> Any:
    """An engine that is open, and tokenizers; translators of other options share them."""
    return load(DEMO, variant=variant, threads=1)


def in_python(translator: Any, lines: list[str]) -> list[list[Output]]:
    found = translator.translate(lines)
    return [
        [Output(r.ids, r.score, r.finished, r.alignment, r.text) for r in (each, *each.alternatives)] for each in found
    ]


@pytest.mark.parametrize("case", list(cases()), ids=name_of)
def test_every_variant_gives_the_same_tokens_and_scores(case: tuple[Path, str, bool]) -> None:
    """To the last bit, as both run one ONNX Runtime with one thread."""
    folder, variant, shortlist = case
    if shortlist:
        needs_vnni(variant)
    lines = lines_of(folder)
    aligned = (
        ALIGNED
        if variant == "fp32" and json.loads((folder / "manifest.json").read_text())["recipe"].get("attention")
        else []
    )
    with Model(folder, variant=variant, shortlist=shortlist) as model:
        for asked in (*SEARCHES, *aligned):
            with Translator(model, **asked) as translator:
                found = translator.translate(lines)
            with load(folder, variant=variant, threads=1, shortlist=shortlist, **asked) as reference:
                assert found == in_python(reference, lines), asked


OF_ALL: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(6, 20),
    "min_tokens": st.integers(0, 6),
    "max_ratio": st.sampled_from([0.0, 0.5, 1.0, 2.5]),
    "min_ratio": st.sampled_from([0.0, 0.5, 1.5]),
    "repetition_penalty": st.sampled_from([1.0, 1.3, 0.8]),
    "no_repeat_ngram": st.integers(0, 3),
    "bad_words": st.lists(st.lists(st.integers(4, 9), min_size=1, max_size=3), min_size=1, max_size=3),
    "suppress": st.lists(st.integers(0, 149), min_size=1, max_size=3),
    "end_ids": st.lists(st.integers(0, 149), min_size=1, max_size=2),
    "first_ids": st.lists(st.integers(4, 149), min_size=1, max_size=2),
    "first_adds_zero": st.booleans(),
    "forced_end": st.booleans(),
    "endless": st.booleans(),
}
OF_BEAMS: dict[str, st.SearchStrategy[Any]] = {
    "n_best": st.integers(1, 2),
    "length_norm": st.sampled_from(["power", "gnmt"]),
    "length_penalty": st.sampled_from([0.0, 0.6, 1.0, -1.0]),
}
OF_SAMPLING: dict[str, st.SearchStrategy[Any]] = {
    "n_best": st.integers(1, 4),
    "temperature": st.sampled_from([0.5, 1.0, 3.0]),
    "top_k": st.integers(0, 20),
    "top_p": st.sampled_from([0.3, 0.9, 1.0]),
    "min_p": st.sampled_from([0.0, 0.1]),
    "seed": st.integers(0, 2**40),
}
STOPS = {
    "stop": st.sampled_from(["count", "estimate", "exact"]),
    "patience": st.sampled_from([1.0, 2.0]),
}


def asked_of(required: dict[str, Any], *optional: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(required, optional={name: of for own in optional for name, of in own.items()})


options_asked = st.one_of(
    asked_of({}, OF_ALL),
    *(asked_of({"beams": st.integers(2, 6)}, OF_ALL, OF_BEAMS, {name: of}) for name, of in STOPS.items()),
    asked_of({"sampling": st.just(True)}, OF_ALL, OF_SAMPLING),
)
contradictions = asked_of({}, OF_ALL, OF_BEAMS, OF_SAMPLING, STOPS, {"beams": st.integers(1, 6)})


@settings(max_examples=int(os.environ.get("TFORMER_EXAMPLES", "120")))
@given(
    st.one_of(*[options_asked] * 7, contradictions),
    st.sampled_from(["fp32", "int8"]),
    st.lists(st.sampled_from(NUMBERS), max_size=6),
)
def test_any_options_give_the_same_tokens_and_scores(asked: dict[str, Any], variant: str, lines: list[str]) -> None:
    model, reference = demo(variant), demo_in_python(variant)
    try:
        expected: Any = in_python(reference.asking(**asked), lines)
    except ConfigError as error:
        with pytest.raises(CppError) as refused:
            Translator(model, **asked)
        assert refused.value.status == USAGE
        assert str(refused.value) == str(error)
        return
    except TformerError as error:
        with pytest.raises(CppError) as failed, Translator(model, **asked) as translator:
            translator.translate(lines)
        assert str(failed.value) == str(error)
        return
    with Translator(model, **asked) as translator:
        assert translator.translate(lines) == expected


def test_scores_of_given_targets() -> None:
    sources, targets = ["forty-two", "seven", "one million"], ["zweiundvierzig", "sieben", "eine Million"]
    for variant in ("fp32", "int8"):
        with Translator(demo(variant)) as translator, load(DEMO, variant=variant, threads=1) as reference:
            assert translator.score(sources, targets) == reference.score(sources, targets)


def test_scores_of_the_lines_before_a_bad_one_are_kept() -> None:
    sources, targets = ["forty-two", "seven"], ["zweiundvierzig", "sieben"]
    with Translator(demo("fp32"), max_line_bytes=400) as translator:
        good = [sum(each) for each in translator.score(sources, targets)]
        for more, words in (
            ((b"\xff", "acht"), "line 3: not UTF-8"),
            (("eight", b"\xff"), "line 3: not UTF-8"),
            (("eight", "acht " * 70), "line 3: a target of"),
        ):
            with pytest.raises(CppError, match=words) as failed:
                translator.score([*sources, more[0], "one"], [*targets, more[1], "eins"])
            assert [each[0].score for each in failed.value.outputs] == pytest.approx(good)
    found = run(DEMO, "--score", stdin=b"forty-two\tzweiundvierzig\nseven\tsieben\nx\t\xff\none\teins\n")
    assert found.returncode == 1 and b"line 3: not UTF-8" in found.stderr
    assert [sum(json.loads(line)) for line in found.stdout.splitlines()] == pytest.approx(good)


def test_an_empty_source_of_a_model_without_ends_is_named(tmp_path: Path) -> None:
    """It has no ids; scores of the lines before it are kept."""
    folder = shutil.copytree(DEMO, tmp_path / "bundle")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["tokenizer"]["source"]["suffix"] = []
    (folder / "manifest.json").write_text(json.dumps(manifest))
    sources, targets = ["seven", "", "one"], ["sieben", "acht", "eins"]
    said = "line 2: the source is empty, so that no target can be scored: leave the line out"
    with load(folder, threads=1) as reference:
        [expected] = reference.score(sources[:1], targets[:1])
        with pytest.raises(DataError, match=f"^{said}$"):
            reference.score(sources, targets)
    with Translator(Model(folder)) as translator:
        with pytest.raises(CppError, match=said) as failed:
            translator.score(sources, targets)
        assert [each[0].score for each in failed.value.outputs] == pytest.approx([sum(expected)])


def threads_now() -> int:
    """Of this process."""
    return len(list(Path("/proc/self/task").iterdir()))


def test_scores_come_from_all_workers() -> None:
    sources, targets = NUMBERS * 60, ["eine Million"] * len(NUMBERS) * 60
    with Translator(demo("fp32")) as translator:
        expected = [sum(each) for each in translator.score(sources, targets)]
    with Translator(demo("fp32"), workers=3) as translator:
        most, over = 0, threading.Event()

        def watch() -> None:
            nonlocal most
            while not over.is_set():
                most = max(most, threads_now())

        other = threading.Thread(target=watch)
        other.start()
        before = threads_now()
        found = [sum(each) for each in translator.score(sources, targets)]
        over.set()
        other.join()
    assert most == before + 2 and found == pytest.approx(expected)


def test_lines_that_are_served_need_one_engine_whatever_workers_are() -> None:
    with Model(BUNDLES / "v2" / "copy", backend="native", threads=2) as model:
        before = threads_now()
        with Serving(model, workers=5):
            assert threads_now() == before + 1


def test_a_call_that_fails_leaves_no_pointer_to_free() -> None:
    text, empty = Text(b"\xff", 1), Text(b"", 0)
    for call in (library().tformer_source_ids, library().tformer_target_ids):
        for model, own, status in ((demo("fp32").handle, text, TEXT), (None, empty, USAGE)):
            ids = Ids(ctypes.cast(8, ctypes.POINTER(ctypes.c_int32)), 3)
            assert call(model, own, byref(ids)) == status and not ids.data and ids.size == 0
            library().tformer_ids_free(byref(ids))
    for model, own in ((demo("fp32").handle, text), (None, empty)):
        id = ctypes.c_int32(5)
        assert library().tformer_target_entry(model, own, byref(id)) == USAGE and id.value == -1


@pytest.mark.parametrize("name", ["suppress", "end_ids", "first_ids"])
@pytest.mark.parametrize("id", [-5, -(2**33), 2**31, 9999999999])
def test_a_token_id_outside_the_vocabulary_is_named_as_given(name: str, id: int) -> None:
    refused_at_once({name: (4, id)}, f"token id {id} is outside")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"beams": 65}, "65 beams exceed the engine's limit of 64: use fewer"),
        ({"sampling": True, "n_best": 65}, "65 samples exceed the engine's limit of 64: use fewer"),
        ({"align": True}, "this variant does not return attention: export with"),
        ({"beams": 2, "coverage_penalty": 0.5}, "this variant does not return attention: export with"),
        ({"first_ids": (3,)}, "a forced token is an end token: leave it out"),
    ],
    ids=str,
)
def test_options_that_no_request_can_have(asked: dict[str, Any], words: str) -> None:
    refused_at_once(asked, words)


def refused_at_once(asked: dict[str, Any], words: str) -> None:
    """By what is made, not by its first request, in the same words, here and in Python."""
    with load(DEMO, variant="fp32", threads=1) as reference:
        with pytest.raises(LimitError, match=words) as expected:
            decode(reference.engine, make_batch([[4, 3]], reference.engine.config.pad_id), DecodeOptions(**asked))
        for refused in (lambda: load(DEMO, variant="fp32", threads=1, **asked), lambda: reference.asking(**asked)):
            with pytest.raises(LimitError) as found:
                refused()
            assert str(found.value) == str(expected.value)
    for kind in (Translator, Serving):
        with pytest.raises(CppError) as error:
            kind(demo("fp32"), **asked)
        assert (error.value.status, str(error.value)) == (LIMIT, str(expected.value))


def test_prefixes_allowed_outputs_and_streams() -> None:
    lines, begins = ["forty-two", "seven"], ["dreiund", ""]
    outputs = ["zweiundvierzig", "sieben", "acht"]
    with Translator(demo("fp32")) as translator, load(DEMO, variant="fp32", threads=1) as reference:
        found = [each[0].text for each in translator.translate(lines, begins)]
        assert found == [each.text for each in reference.translate(lines, begins)]
        pieces: list[str] = []
        assert translator.stream("forty-two", lambda piece: pieces.append(piece) is None)[0][0].text == "".join(pieces)
        assert len(pieces) > 1
        translator.allow(outputs)
        chosen = [each[0].text for each in translator.translate(lines)]
    with load(DEMO, variant="fp32", threads=1, allowed=outputs) as reference:
        assert chosen == [each.text for each in reference.translate(lines)]


def entry(word: str) -> int:
    return (BUNDLES / "v2/copy/tokenizer.words").read_text().splitlines().index(word)


def test_a_prefix_with_an_end_token_is_a_bad_line() -> None:
    """Whose length does not matter: results of the lines before it come first."""
    words = "line 3, prefix: a forced token is an end token: leave it out"
    with (
        Model(BUNDLES / "v2" / "copy", backend="native") as model,
        Translator(model, end_ids=str(entry("9")), max_tokens=8, batch_tokens=1) as translator,
        pytest.raises(CppError, match=words) as raised,
    ):
        translator.translate(["6", "8 8", "8 6 6 6"], ["", "8", "9"])
    assert raised.value.status == LIMIT and len(raised.value.outputs) == 2


@pytest.mark.parametrize(("forced_end", "most"), [(False, 3), (True, 4)])
def test_a_prefix_beyond_the_longest_output_is_a_bad_line(forced_end: bool, most: int) -> None:
    """In the words of Python's translator, see test_translate.py."""
    with (
        Model(BUNDLES / "v2" / "copy", backend="native") as model,
        Translator(model, max_tokens=most, forced_end=forced_end, batch_tokens=1) as translator,
        pytest.raises(CppError) as raised,
    ):
        translator.translate(["6", "", "8 8"], ["8 9 8", "8 9 8 9 8", "8 9 8 9"])
    assert raised.value.status == LIMIT and [each[0].text for each in raised.value.outputs] == ["8 9 8", ""]
    words = f"line 3: 4 forced tokens{' and the forced end' if forced_end else ''} do not fit into {most}, the most "
    assert str(raised.value).startswith(words)


def test_batches_and_workers_change_no_tokens() -> None:
    lines = NUMBERS * 4
    with Translator(demo("fp32"), beams=3) as translator:
        expected = [each[0].ids for each in translator.translate(lines)]
    for asked in ({"batch_tokens": 16}, {"workers": 3}, {"workers": 2, "batch_tokens": 40}):
        with Translator(demo("fp32"), beams=3, **asked) as translator:
            assert [each[0].ids for each in translator.translate(lines)] == expected


def test_a_bad_line_comes_after_the_results_of_those_before() -> None:
    with Translator(demo("fp32"), max_line_bytes=400) as translator:
        good = translator.translate(["seven", "eight"])
        for bad, status, words in (
            (b"\xff\xfe", TEXT, "line 3: not UTF-8"),
            (b"x" * 401, TEXT, "line 3: longer than 400 bytes: split it, or raise max_line_bytes"),
            (b"seven " * 66, LIMIT, "line 3: a source of"),
        ):
            with pytest.raises(CppError, match=words) as failed:
                translator.translate(["seven", "eight", bad, "nine"])
            assert failed.value.status == status and failed.value.outputs == good
    with pytest.raises(LimitError) as expected, load(DEMO, variant="fp32", threads=1) as reference:
        reference.translate(["seven " * 66])
    with Translator(demo("fp32")) as translator, pytest.raises(CppError) as found:
        translator.translate(["seven " * 66])
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("first", [2**63 - 2, 2**63 - 1, 2**63, 2**64 - 1])
def test_lines_have_numbers(first: int) -> None:
    with Translator(demo("fp32"), max_tokens=2) as translator:
        if first == 2**63 - 2:
            with pytest.raises(CppError, match=f"line {first + 1}: not UTF-8"):
                translator.translate([b"\xff"], first=first)
        for lines in [["seven"], ["seven"] * 2][first == 2**63 - 2 :]:
            with pytest.raises(CppError, match=f"first={first}: must be a whole number from 0 to {2**63 - 1} less the"):
                translator.translate(lines, first=first)


def test_ids_without_text() -> None:
    with Translator(demo("int8")) as translator, load(DEMO, variant="int8", threads=1) as reference:
        sources = [reference.tokenizers.source_ids(line) for line in ("seven", "forty-two")]
        assert [each[0].ids for each in translator.generate(sources)] == [r.ids for r in reference.generate(sources)]
        with pytest.raises(CppError, match="source 2: token id 150 is outside the source vocabulary of 150"):
            translator.generate([[4, 3], [150, 3]])


def test_callbacks_see_every_step_and_can_stop() -> None:
    with Translator(demo("fp32")) as translator:
        tokens: list[int] = []
        translator.on_step(lambda found: tokens.extend(each.token for each in found) is None)
        ids = translator.translate(["forty-two"])[0][0].ids
        assert tokens[: len(ids)] == ids
        translator.on_step(lambda found: False)
        with pytest.raises(CppError) as stopped:
            translator.translate(["forty-two"])
        assert stopped.value.status == CANCELLED
    with Translator(demo("fp32"), endless=True, max_tokens=60) as translator:
        steps = []
        translator.on_step(lambda found: steps.append(1) or library().tformer_cancel(translator.handle) or True)
        with pytest.raises(CppError) as stopped:
            translator.translate(["forty-two"])
        assert stopped.value.status == CANCELLED and len(steps) == 1


@pytest.mark.parametrize("workers", [1, 3])
def test_a_callback_that_stops_is_not_called_again(workers: int) -> None:
    """Nor is what it stopped returned, though it was the last step."""
    with Translator(demo("fp32"), max_tokens=1, workers=workers, batch_tokens=16) as translator:
        calls = []
        translator.on_step(lambda found: calls.append(1) is not None)
        with pytest.raises(CppError, match="cancelled") as stopped:
            translator.translate(["forty-two"] * 12)
        assert stopped.value.status == CANCELLED and len(calls) == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_a_callback_makes_no_other_call_of_its_translator(workers: int) -> None:
    """And another callback is that of the next call."""
    with Translator(demo("fp32"), workers=workers, batch_tokens=16) as translator:
        expected = translator.translate(["forty-two", "seven"])
        said, calls = set[str](), list[int]()

        def step(found: object) -> bool:
            calls.append(1)
            library().tformer_on_step(translator.handle, None, None)
            for call in (translator.generate, translator.allow):
                with pytest.raises(CppError, match="the translator is in a call: make none from a callback") as caught:
                    call([])
                said.add(str(caught.value))
            return True

        translator.on_step(step)
        assert translator.translate(["forty-two", "seven"]) == expected and len(calls) > 2 and len(said) == 1
        calls.clear()
        assert translator.translate(["forty-two", "seven"]) == expected and not calls


def test_a_size_without_data_is_refused() -> None:
    with Translator(demo("fp32")) as translator:
        results, text, ids = c_void_p(), Text(None, 5), Ids(None, 5)
        for call, lines in ("tformer_translate", [byref(text), None]), ("tformer_generate", [byref(ids)]):
            found = getattr(library(), call)(translator.handle, *lines, c_size_t(1), c_uint64(0), byref(results))
            assert found == USAGE
            assert b" is null: give one" in library().tformer_error()


def test_a_call_can_be_cancelled_while_it_splits_text() -> None:
    lines = texts(["nine hundred and ninety-nine thousand, one hundred and seven"] * 30_000)
    with Translator(demo("fp32"), max_tokens=1) as translator:
        for call in (library().tformer_translate, library().tformer_score):
            results, began, ended = c_void_p(), time.monotonic(), threading.Event()

            def cancel(ended: threading.Event = ended) -> None:  # again, as a call that begins forgets it
                while not ended.wait(0.03):
                    library().tformer_cancel(translator.handle)

            other = threading.Thread(target=cancel)
            other.start()
            second = None if call is library().tformer_translate else lines
            status = call(translator.handle, lines, second, c_size_t(len(lines)), c_uint64(0), byref(results))
            took = time.monotonic() - began
            ended.set()
            other.join()
            library().tformer_results_free(results)
            assert status == CANCELLED and took < 2
        assert translator.translate(["forty-two"]), "the next call is not stopped"


@pytest.mark.parametrize("workers", [1, 3])
def test_results_before_a_line_without_numbers_are_kept(workers: int, tmp_path: Path) -> None:
    """However the lines were put together, and in Python's words."""
    spoiled = changed("src_embedding.weight", row(entry("10"), lambda vector: vector * np.nan))
    folder = break_graph(BUNDLES / "v2" / "copy", tmp_path / "bundle", "encoder", spoiled)
    lines = ["3 8", "9 1 4 5 6 7 8", "5 3", "8 1 2", "7", "3 10", "9 10 8 7 6 5 4 3", "4 4 4"]
    asked = {"workers": workers, "beams": 2, "batch_tokens": 16}
    with Model(folder, variant="fp32") as model, Translator(model, **asked) as translator:
        with pytest.raises(CppError) as failed:
            translator.translate(lines, first=20)
        assert failed.value.outputs == translator.translate(lines[:5])
        with pytest.raises(CppError) as scored:
            translator.score(lines, lines)
    with load(folder, variant="fp32", threads=1, **asked) as reference:
        with pytest.raises(NotNumbers) as expected:
            list(reference.results(lines, first=20))
        with pytest.raises(NotNumbers) as expected_score:
            reference.score(lines, lines)
    assert (failed.value.status, str(failed.value)) == (NOT_NUMBERS, str(expected.value))
    assert (scored.value.status, str(scored.value)) == (NOT_NUMBERS, str(expected_score.value))


@pytest.mark.parametrize(
    "model",
    ["v2/copy ort fp32", "v2/copy ort int8", *(f"v2/copy native native-{each}" for each in ("fp32", "int8", "int4"))],
)
def test_memory_may_end_at_any_allocation(model: str) -> None:
    """Also while workers start. The bundle's tokenizers are word lists, as sentencepiece crashes there."""
    path, (bundle, backend, variant) = built() / "no_memory", model.split()
    if not path.is_file():
        pytest.skip(f"{path} was not built: make cpp")
    lines = ["3 8", "9 1 4", "5 3 8", "7", "1 2 3 4", "10"]
    environment = {**os.environ, "TFORMER_ONNXRUNTIME": onnxruntime()}
    found = subprocess.run(
        [path, BUNDLES / bundle, backend, variant, *lines], capture_output=True, text=True, env=environment, timeout=100
    )
    assert found.returncode == 0 and int(found.stdout.split()[0]) > 100, found


def test_one_model_many_threads() -> None:
    model, wrong = demo("int8"), []
    with Translator(model, beams=2) as translator:
        expected = translator.translate(NUMBERS)

    def work() -> None:
        with Translator(model, beams=2) as own:
            for _ in range(5):
                if own.translate(NUMBERS) != expected:
                    wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_model_may_be_closed_before_its_translators() -> None:
    model = Model(DEMO, variant="int8")
    with Translator(model) as translator:
        model.close()
        assert translator.translate(["seven"])[0][0].text == "sieben"


def run(*arguments: str | Path, stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess[bytes]:
    """tformer-cpp translate."""
    command = [built() / "examples" / "tformer-cpp", "translate", *arguments, "--threads", "1"]
    changed = {**os.environ, "TFORMER_ONNXRUNTIME": onnxruntime(), **environment}
    return subprocess.run(command, input=stdin, capture_output=True, env=changed, timeout=60)


def test_kernels_that_are_asked_for() -> None:
    words = (BUNDLES / "v2" / "copy", "--backend", "native", "--json")
    best, plain = (run(*words, *more, stdin=b"7 7\n4 5 6\n") for more in ([], ["--kernels", "portable"]))
    assert best.stdout and best.stdout == plain.stdout
    assert run(*words, "--kernels", "mmx").stderr.startswith(b"error: there are no kernels 'mmx', only amx, avx512, ")


def test_the_command_line_example_prints_what_tformer_translate_prints() -> None:
    text = "\n".join(NUMBERS).encode()
    demo("fp32")
    for flags in (
        [],
        ["--beams", "3", "--n-best", "2"],
        ["--sample", "--seed", "4"],
        ["--set", "max_tokens=2"],
        ["--max-tokens", "1", "--set", "max_tokens=20"],
        ["--sample", "--seed", "3", "--set", "seed=9", "--set", "sampling=false"],
        ["--stream"],
        ["--json", "--beams", "3", "--n-best", "3"],
        ["--first-token", "acht", "--suppress", "zig", "--suppress", "</s>", "--end-token", "und", "--json"],
        ["--set", "first_ids=4,5", "--end-token", "</s>", "--end-token", "en"],
    ):
        command = [ROOT / ".venv/bin/python", "-m", "tformer_deploy", "translate", DEMO, *flags, "--threads", "1"]
        expected = subprocess.run(command, input=text, capture_output=True, cwd=ROOT, check=True)
        found = run(DEMO, *flags, stdin=text)
        assert (found.returncode, found.stdout) == (0, expected.stdout), found.stderr


def test_the_command_line_example_maps_no_memory_for_each_copy_of_a_long_line() -> None:
    """sentencepiece copies it for each character that it does not know; page faults tell."""
    demo("fp32")
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt
    assert run(DEMO, stdin="漢".encode() * 50_000 + b"\n").returncode == 0
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt - before < 100_000


def test_the_command_line_example_says_what_is_wrong() -> None:
    demo("fp32")
    for arguments, code, words in (
        ([DEMO, "--variant", "int9"], 1, b"error: unknown variant 'int9': did you mean 'int8'?"),
        ([DEMO, "--variant", "trt"], 1, b"graphs for TensorRT"),
        ([DEMO, "--set", "beems=4"], 1, b"beems"),
        (
            [DEMO, "--suppress", "beems"],
            1,
            b"error: 'beems' is not in the vocabulary: tformer score --tokens shows how",
        ),
        ([DEMO, "--set", "beams=four"], 1, b"must be a whole number"),
        ([DEMO, "--shortlist"], 1, b"has no graphs for it"),
        ([DEMO, "--nothing"], 2, b"no such option: --nothing"),
        ([DEMO, "--beams", "0"], 1, b"beams"),
        *(
            ([DEMO, flag, value], 2, f"invalid value for '{flag}': '{value}' is not a whole number".encode())
            for flag in ("--beams", "--n-best", "--seed", "--max-tokens", "--threads")
            for value in ("x", "", "-", "2.0")
        ),
        ([], 2, b"missing argument BUNDLE"),
        *(
            ([DEMO, "--ids", *flag], 2, b"--ids is for lines without text")
            for flag in (["--stream"], ["--prefix", "f"])
        ),
        *(
            ([DEMO, "--score", *flag], 2, b"--score searches nothing: leave out")
            for flag in (["--ids"], ["--json"], ["--stream"], ["--prefix", "f"], ["--allowed", "f"])
        ),
        ([DEMO, "--prefix", DEMO], 1, bytes(DEMO) + b": no such file"),
        ([DEMO, "--allowed", "/nowhere"], 1, b"/nowhere: no such file"),
        ([DEMO, "--allowed", __file__ + ".gz"], 1, b".gz: no such file"),
        ([DEMO, "--onnxruntime", "/nowhere.so"], 1, b"ONNX Runtime cannot be loaded"),
        ([DEMO, "--onnxruntime", built() / "libtformer.so"], 1, b"is not ONNX Runtime"),
        ([DEMO, "--onnxruntime", "n" * 300], 1, b"nnn: cannot open shared object file: File name too long"),
    ):
        found = run(*arguments, stdin=b"seven\n")
        assert found.returncode == code and words in found.stderr and found.stderr.count(b"\n") == 1, found.stderr
    found = run(DEMO, stdin=b"seven\neight\n\xff\n")
    assert found.returncode == 1 and found.stdout == b"sieben\nacht\n" and b"line 3: not UTF-8" in found.stderr


@pytest.mark.parametrize(("version", "words"), [("1.30.0", "update it to 1.31.0"), ("2.0.0", "or a later 1.x")])
def test_another_onnxruntime_is_refused(version: str, words: str, tmp_path: Path) -> None:
    """Before anything of it but its version is called."""
    source, other = tmp_path / "other.c", tmp_path / "libonnxruntime.so.1"
    source.write_text(
        f'const char* version(void) {{ return "{version}"; }}\n'
        "const struct { void* api; const char* (*version)(void); } base = {0, version};\n"
        "const void* OrtGetApiBase(void) { return &base; }\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", other, source], check=True)
    command = [built() / "examples/tformer-cpp", "translate", DEMO, "--onnxruntime", tmp_path]
    found = subprocess.run(command, input=b"", capture_output=True, timeout=60)
    assert (
        found.returncode == 1 and f"onnxruntime {version} " in found.stderr.decode() and words in found.stderr.decode()
    )


@pytest.mark.parametrize("flag", ["--ids", "--score"])
def test_the_command_line_example_names_the_bad_line(flag: str) -> None:
    """Behind the results of those before it."""
    demo("fp32")
    good, bad, words = {
        "--ids": ("5 6 3\n4 3\n", "5\0x", "line 3: '5?x' is no token id"),
        "--score": ("seven\tsieben\neight\tacht\n", "nine", "line 3: has no tab"),
    }[flag]
    alone = run(DEMO, flag, stdin=good.encode())
    assert alone.returncode == 0 and alone.stdout.count(b"\n") == 2
    found = run(DEMO, flag, stdin=f"{good}{bad}\n{good}".encode())
    assert (found.returncode, found.stdout) == (1, alone.stdout)
    assert found.stderr.startswith(f"error: standard input, {words}".encode())


def test_prefixes_and_allowed_outputs_come_from_files(tmp_path: Path) -> None:
    """With what may stand around their lines."""
    (tmp_path / "begins").write_text("  dreiund\r\n\t\n")
    (tmp_path / "outputs").write_text("zweiundvierzig \r\nsieben\n")
    for flags in (["--prefix", tmp_path / "begins"], ["--allowed", tmp_path / "outputs"]):
        command = [ROOT / ".venv/bin/python", "-m", "tformer_deploy", "translate", DEMO, *flags, "--threads", "1"]
        demo("fp32")
        expected = subprocess.run(command, input=b"forty-two\nseven\n", capture_output=True, cwd=ROOT, check=True)
        assert run(DEMO, *flags, stdin=b"forty-two\nseven\n").stdout == expected.stdout
    (tmp_path / "outputs").rename(tmp_path / "outputs.gz")
    assert b"outputs.gz: is compressed: gunzip it" in run(DEMO, "--allowed", tmp_path / "outputs.gz").stderr


@pytest.mark.long
def test_a_line_feed_inside_an_output_is_a_space(tmp_path: Path) -> None:
    """A line for a line, whatever a model writes; JSON has what it wrote."""
    entries = ["<unk>", "<pad>", "<s>", "</s>", *BYTES.values()]
    tokenizer, weights = ByteBpe(entries, [], Specials()), tmp_path / "run/weights/random.safetensors"
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "src_vocab": len(entries), "tgt_vocab": len(entries)}
    model = random_model(small_config(**sizes))
    save_tensors(weights, model_tensors(model))
    save_checkpoint(tmp_path / "run", model.config, Tokenizers(tokenizer, tokenizer), weights, {})
    export_checked(tmp_path / "run", tmp_path / "bundle")
    text, begin = b"cat\ndog\n", ("--first-token", BYTES[10], "--first-token", BYTES[13], "--max-tokens", "4")
    for more, lines in ((["--json"], 2), ([], 2), (["--beams", "2", "--n-best", "2"], 4), (["--stream"], 2)):
        python = run_here("translate", tmp_path / "bundle", *begin, *more, "--threads", 1, stdin=text)
        assert python.stdout.count(b"\n") == lines and b"\r" not in python.stdout
        if more == ["--json"]:
            texts = [json.loads(line)["text"] for line in python.stdout.splitlines()]
            assert all(each.startswith("\n\r") for each in texts)
        elif lines == 2:
            assert python.stdout.decode().split("\n")[:-1] == [re.sub(r"[\n\r]", " ", each) for each in texts]
        assert run(tmp_path / "bundle", *begin, *more, stdin=text).stdout == python.stdout


@pytest.mark.parametrize("flags", [[], ["--stream"], ["--score"]], ids=str)
def test_lines_that_have_come_are_answered(flags: list[str]) -> None:
    """Without a wait for more, however much a batch could take; and a line that never ends is not read for ever."""
    demo("fp32")
    command = [built() / "examples" / "tformer-cpp", "translate", DEMO, *flags, "--onnxruntime", onnxruntime()]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*command, "--threads", "1", "--max-line-bytes", "70000"], **pipes) as process:
        stop = threading.Timer(60, process.kill)
        stop.start()
        assert process.stdin and process.stdout and process.stderr
        for _ in range(2):
            process.stdin.write(b"seven\tsieben\neight\tacht\n" if flags == ["--score"] else b"seven\neight\n")
            process.stdin.flush()
            answers = [process.stdout.readline() for _ in range(2)]
            assert all(answers) and (flags == ["--score"] or answers == [b"sieben\n", b"acht\n"])
        process.stdin.write(b"x" * 100_000)
        process.stdin.flush()
        assert b"standard input, line 5: longer than 70000 bytes" in process.stderr.readline()
        stop.cancel()
        stop.join()


def test_output_that_nobody_takes_is_an_error() -> None:
    demo("fp32")
    command = [built() / "examples" / "tformer-cpp", "translate", DEMO, "--onnxruntime", onnxruntime()]
    with Path("/dev/full").open("wb") as full:
        found = subprocess.run(command, input=b"seven\n", stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert found.returncode == 1 and b"standard output cannot be written" in found.stderr


Change = Callable[[Path], Any]


def edited(change: Callable[[dict[str, Any]], Any]) -> Change:
    def apply(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        change(manifest)
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return apply


def flipped(name: str) -> Change:
    def apply(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(content)

    return apply


def linked_elsewhere(folder: Path) -> None:
    (folder / "weights.data").rename(folder.parent / "weights.data")
    (folder / "weights.data").symlink_to(folder.parent / "weights.data")


DAMAGE: dict[str, Change] = {
    "no folder": shutil.rmtree,
    "a file": lambda folder: (shutil.rmtree(folder), folder.touch()),
    "a run": lambda folder: (folder / "manifest.json").rename(folder / "checkpoint.json"),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "no JSON": lambda folder: (folder / "manifest.json").write_text("{"),
    "a list": lambda folder: (folder / "manifest.json").write_text("[]"),
    "nested": lambda folder: (folder / "manifest.json").write_text("[" * 100_000),
    "a byte 0": lambda folder: (folder / "manifest.json").write_bytes(
        (folder / "manifest.json").read_bytes() + b"\0{}"
    ),
    "a byte order mark": lambda folder: (folder / "manifest.json").write_bytes(
        b"\xef\xbb\xbf" + (folder / "manifest.json").read_bytes()
    ),
    "not UTF-8": lambda folder: (folder / "manifest.json").write_bytes(b'{"\xff": 1}'),
    "other format": edited(lambda it: it.update(format="tformer-checkpoint")),
    "newer": edited(lambda it: it.update(version=3)),
    "version 0": edited(lambda it: it.update(version=0)),
    "version of text": edited(lambda it: it.update(version="2")),
    "no model": edited(lambda it: it.pop("model")),
    "text for a number": edited(lambda it: it["model"].update(heads="4")),
    "unknown key": edited(lambda it: it["model"].update(colour=1)),
    "no such default": edited(lambda it: it.update(default="int9")),
    "unknown activation": edited(lambda it: it["model"].update(activation="swish")),
    "other width": edited(lambda it: it["model"].update(d_model=256)),
    "other start": edited(lambda it: it["model"].update(start_id=4)),
    "other limits": edited(lambda it: it["recipe"]["axes"]["beams"].update(max=128)),
    "other weights": edited(lambda it: it["checkpoint"].update(weights_sha256="0" * 64)),
    "newer kind": edited(lambda it: it["graphs"]["decoder_step"].update(kind="growing/2")),
    "other tensors": edited(lambda it: it["graphs"]["encoder"]["inputs"].pop()),
    "name outside": edited(lambda it: it["files"].update({"../weights.data": "0" * 64})),
    "a file too many": edited(lambda it: it["files"].update({"more.onnx": "0" * 64})),
    "no hash": edited(lambda it: it["files"].pop("encoder.onnx")),
    "no hash of weights": edited(lambda it: it["files"].pop("weights.data")),
    "unknown decoding": edited(lambda it: it.update(decoding={"beems": 2})),
    "a long expression": edited(lambda it: it["tokenizer"]["source"].update(regex="é" * 10_001)),
    "a link": linked_elsewhere,
    "no graph": lambda folder: (folder / "decoder_step.onnx").unlink(),
    "a folder for a graph": lambda folder: (
        (folder / "decoder_step.onnx").unlink(),
        (folder / "decoder_step.onnx").mkdir(),
    ),
    "encoder flipped": flipped("encoder.onnx"),
    "step flipped": flipped("decoder_step.onnx"),
    "weights flipped": flipped("weights.data"),
    "tokenizer flipped": flipped("tokenizer.words"),
    "empty step": lambda folder: (folder / "decoder_step.onnx").write_bytes(b""),
    "short weights": lambda folder: (folder / "weights.data").write_bytes(b"short"),
}
OWN_WORDS = {
    *(
        "no JSON",
        "a list",
        "nested",
        "a byte 0",
        "a byte order mark",
        "not UTF-8",
        "version of text",
        "no model",
        "text for a number",
    ),
}
"""Damage that both have words of their own for: of their JSON libraries and schemas."""


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_bundle_is_refused_in_the_words_of_the_python_package(damage: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(BUNDLES / "v2" / "copy", tmp_path / "bundle"))
    DAMAGE[damage](folder)
    with pytest.raises(CppError) as found:
        Model(folder, variant="fp32").close()
    with pytest.raises(TformerError) as expected, load(folder, variant="fp32", threads=1):
        pass
    message = str(found.value)
    assert "\n" not in message and found.value.status == BUNDLE and len(message) < 1000
    if damage not in OWN_WORDS:
        assert message == str(expected.value)
    once = run(folder, "--variant", "fp32", stdin=b"1\n")
    assert once.returncode == 1 and once.stderr.decode() == f"error: {message}\n"


def test_what_both_languages_know_is_written_from_python() -> None:
    spec = importlib.util.spec_from_file_location("make_spec", ROOT / "engines/make_spec.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for path, content in module.files().items():
        assert path.read_text(encoding="utf-8") == content, f"{path} is not current: make spec"


RECIPES: list[dict[str, Any]] = [
    {"target": "onnx", "cache": "growing", "attention": True, "top_k": 3},
    {"target": "onnx", "cache": "growing", "memory": True},
    {"target": "ort-cpu", "memory": True, "top_k": 4},
    {"target": "ort-cpu", "precision": "int8"},
    {"target": "ort-cpu", "precision": "int4", "group_size": 32},
    {"target": "native", "precision": "int8", "memory": True},
]
"""How graphs and programs can be made, beside the ways of stored bundles."""


@pytest.mark.parametrize("values", RECIPES, ids=str)
@pytest.mark.parametrize("changes", [{}, {"output_bias": True, "encoder_d_model": 24}, {"head_dim": 6}], ids=str)
def test_cpp_reads_the_contract_as_python_does(values: dict[str, Any], changes: dict[str, Any], tmp_path: Path) -> None:
    """Graphs as Python describes them are those that C++ expects, up to their hashes; others are refused."""
    folder = Path(shutil.copytree(BUNDLES / "v2" / "copy", tmp_path / "bundle"))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["model"] |= {**changes, "share_embeddings": "decoder"}
    config = from_dict(ModelConfig, manifest["model"], "model")
    recipe = recipe_from_dict({"cache": "static", **values}).for_model(config)
    graphs = {graph: {**described(graph, config, recipe), "passes": []} for graph in graphs_of(recipe)}
    manifest["variants"] = {"made": {"recipe": asdict(recipe), "graphs": graphs}}
    (folder / "made").mkdir()
    for graph in graphs:
        manifest["files"][f"made/{file_of(graph, recipe)}"] = "0" * 64
        (folder / "made" / file_of(graph, recipe)).touch()

    def refusal() -> str:
        (folder / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(CppError) as found:
            Model(folder, variant="made", backend="native" if recipe.target == "native" else "ort").close()
        return str(found.value)

    assert "does not match its SHA-256" in refusal()
    for graph in graphs.values():
        for side in ("inputs", "outputs"):
            shape = graph[side][-1]["shape"]
            own, shape[-1] = shape[-1], 77
            assert "other graphs than its recipe makes" in refusal()
            shape[-1] = own


def test_an_encoder_that_gives_less_than_it_says_is_refused(tmp_path: Path) -> None:
    """Every size that a graph declares fits: cross_* of one sentence, which the step takes for all."""

    def first_only(graph: onnx.GraphProto) -> None:
        for name, value in (("from", 0), ("to", 1), ("axis", 0)):
            constant(graph, name, [value], np.int64)
        for output in [it.name for it in graph.output]:
            behind(graph, output, onnx.helper.make_node("Slice", [f"{output}_before", "from", "to", "axis"], [output]))

    def for_all(graph: onnx.GraphProto) -> None:
        constant(graph, "ones", [1, 1, 1], np.int64)
        nodes = [
            onnx.helper.make_node("Shape", ["src_lengths"], ["count"]),
            onnx.helper.make_node("Concat", ["count", "ones"], ["wanted"], axis=0),
        ]
        for name in [it.name for it in graph.input if it.name.startswith("cross_")]:
            for node in graph.node:
                node.input[:] = [f"{name}_all" if each == name else each for each in node.input]
            nodes.append(onnx.helper.make_node("Expand", [name, "wanted"], [f"{name}_all"]))
        for node in reversed(nodes):
            graph.node.insert(0, node)

    half = break_graph(BUNDLES / "v2" / "copy", tmp_path / "half", "encoder", first_only)
    folder = break_graph(half, tmp_path / "bundle", "decoder_step", for_all)
    with Model(folder, variant="fp32") as model, Translator(model) as translator:
        assert translator.translate(["3 1 4"])[0][0].ids
        with pytest.raises(
            CppError, match=r"encoder.onnx: it gave 'cross_k_0' of \[1, 2, 4, 8\], not of \[2,"
        ) as failed:
            translator.translate(["3 1 4", "1"])
        assert failed.value.status == BUNDLE


def test_a_bundle_whose_text_cannot_be_split_runs_for_ids(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(BUNDLES / "v2" / "copy", tmp_path / "bundle"))
    edited(lambda it: [side.update(language="de") for side in it["tokenizer"].values()])(folder)
    with Model(folder, variant="fp32") as model, Translator(model) as translator:
        assert translator.generate([[9, 7, 3]])[0][0].text
        with pytest.raises(CppError, match="is split by spaCy's rules for 'de'") as failed:
            translator.translate(["3 1 4"])
        assert failed.value.status == NO_LIBRARY


def test_added_tokens_in_sources_prefixes_and_outputs(tmp_path: Path) -> None:
    """As the Python package has them: `4` stands in a text as it is, between other digits too."""
    folder = Path(shutil.copytree(BUNDLES / "v2" / "copy", tmp_path / "bundle"))
    words = (folder / "tokenizer.words").read_text().split()
    around = {"tokens": [{"id": words.index("4"), "rstrip": True}], "clean_up": True}
    kind = {"kind": "transformers", "of": "words", "around": around}
    edited(lambda it: [side.update(kind) for side in it["tokenizer"].values()])(folder)
    lines, begins = ["3 141 5", "44", "2 1"], ["", "4 4", "24"]
    shown: dict[str, list[str]] = {"python": [], "cpp": []}
    with load(folder, variant="fp32", threads=1) as reference:
        expected = reference.translate(lines, begins)
        assert [each.text for each in expected] == ["3 1 4 1 5", "4 4", "2 4"]
        reference.stream(lines[0], shown["python"].append)
    with Model(folder, variant="fp32") as model, Translator(model) as translator:
        found = translator.translate(lines, begins)
        assert [each[0].text for each in found] == [each.text for each in expected]
        assert [each[0].ids for each in found] == [each.ids for each in expected]
        translator.stream(lines[0], lambda piece: shown["cpp"].append(piece) is None)
    assert shown["cpp"] == shown["python"] and "".join(shown["cpp"]) == "3 1 4 1 5"
    edited(lambda it: it["tokenizer"]["source"].pop("of"))(folder)
    with pytest.raises(CppError, match=r"tokenizer\.source\.of is missing"):
        Model(folder, variant="fp32").close()
    with pytest.raises(TformerError, match=r"tokenizer\.source must contain \['of'\]"), load(folder):
        pass


def test_hashes_may_be_left_unread(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(BUNDLES / "v2" / "copy", tmp_path / "bundle"))
    edited(lambda it: it["files"].update({"weights.data": "0" * 64}))(folder)
    with pytest.raises(CppError, match="does not match its SHA-256"):
        Model(folder, variant="fp32").close()
    with Model(folder, variant="fp32", verify=False) as model, Translator(model) as translator:
        assert translator.translate(["3 1 4"])[0][0].ids


def test_a_version_for_each_and_only_what_is_listed() -> None:
    assert library().tformer_version().decode() == __version__
    shown = subprocess.run([built() / "examples" / "tformer-cpp", "--version"], capture_output=True, text=True)
    assert shown.stdout == f"tformer {__version__}\n"
    file = built() / "libtformer.so"
    table = subprocess.run(["readelf", "-d", file], capture_output=True, text=True, check=True).stdout
    needed = {line.split("[")[1].split("]")[0].split(".")[0] for line in table.splitlines() if "(NEEDED)" in line}
    assert needed <= {"libstdc++", "libm", "libgcc_s", "libc", "ld-linux-x86-64"}


@pytest.mark.parametrize("example", ["minimal", "minimal-c"])
def test_the_small_examples_run(example: str) -> None:
    demo("fp32")
    environment = {**os.environ, "TFORMER_ONNXRUNTIME": onnxruntime(), "OMP_NUM_THREADS": "1"}
    command = [built() / "examples" / example, DEMO, "forty-two"]
    assert subprocess.run(command, capture_output=True, env=environment, check=True).stdout == b"zweiundvierzig\n"


def test_a_folder_to_ship_has_onnx_runtime_beside_the_library(tmp_path: Path) -> None:
    """Wherever that is installed."""
    cmake, runtime = tmp_path / "cmake", tmp_path / "onnxruntime"
    cmake.write_text('#!/bin/sh\nmkdir -p "$4/lib64" && touch "$4/lib64/libtformer.so.0"\n')
    cmake.chmod(0o755)
    runtime.mkdir()
    for name in ("libonnxruntime.so.1.31.1", "LICENSE"):
        (runtime / name).touch()
    command = [ROOT / "engines/make-dist", built(), runtime, tmp_path / "dist", BUNDLES / "v2" / "copy"]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    made = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    with tarfile.open(made.stdout.strip()) as tar:
        names = {Path(*Path(name).parts[1:]) for name in tar.getnames()}
    wanted = {"libtformer.so.0", "libonnxruntime.so.1", "LICENSE"}
    assert {path.name for path in names if path.parent == Path("lib64")} == wanted


def test_a_bundle_without_permission_is_not_called_incomplete(tmp_path: Path) -> None:
    folder, user = Path(shutil.copytree(BUNDLES / "v2" / "copy", tmp_path / "bundle")), os.geteuid()
    library()
    folder.chmod(0)
    if not user:  # root may read all
        os.seteuid(65534)
    try:
        with pytest.raises(CppError, match="json cannot be read: Permission denied") as failed:
            Model(folder, backend="native")
    finally:
        os.seteuid(user)
        folder.chmod(0o700)
    assert failed.value.status == BUNDLE


def test_a_bundle_without_free_descriptors_is_not_called_damaged() -> None:
    library()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Path(os.devnull).open() as free:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free.fileno(), before[1]))
    try:
        with pytest.raises(CppError, match="json cannot be read: Too many open files: close files"):
            Model(BUNDLES / "v2" / "copy", backend="native")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_header_in_a_program_that_is_linked_statically() -> None:
    """Its classes are not the library's own of the same names."""
    ended = subprocess.run([program("header"), BUNDLES / "v2" / "copy", "3 1 4"], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "3 1 4\n"), ended.stderr


def test_an_installed_library_is_found_by_cmake_and_pkg_config(tmp_path: Path) -> None:
    prefix, project = tmp_path / "prefix", tmp_path / "project"
    subprocess.run(["cmake", "--install", built(), "--prefix", prefix], check=True, capture_output=True)
    licenses = {path.name for path in (prefix / "share/doc/tformer/licenses").glob("*")}
    if (ROOT / ".cache/cpp").is_dir():  # dependencies from elsewhere bring none
        assert licenses == {"NOTICE", "json", "onnxruntime", "openssl", "pcre2", "sentencepiece"}
    shipped = tmp_path / "shipped"  # libraries beside the program, as docs/cpp.md says; nothing in the environment
    shipped.mkdir()
    shutil.copy(prefix / "bin" / "tformer-cpp", shipped)
    shutil.copy(next(prefix.rglob("libtformer.so.0")), shipped)
    shutil.copy(onnxruntime(), shipped / "libonnxruntime.so.1")
    alone = subprocess.run(
        [shipped / "tformer-cpp", "translate", BUNDLES / "v2" / "copy"], input=b"7 7\n", env={}, capture_output=True
    )
    assert (alone.returncode, alone.stdout) == (0, b"7 7\n"), alone.stderr
    project.mkdir()
    shutil.copy(ROOT / "engines/examples/minimal.cpp", project / "main.cpp")
    page = (ROOT / "docs/cpp.md").read_text(encoding="utf-8")
    (project / "CMakeLists.txt").write_text(page.split("```cmake\n")[1].split("```")[0])
    older = "-DCMAKE_CXX_STANDARD=11"  # the library's own C++17 holds
    configure = ["cmake", "-S", project, "-B", project / "build", f"-DCMAKE_PREFIX_PATH={prefix}", older]
    subprocess.run(configure, check=True, capture_output=True)
    subprocess.run(["cmake", "--build", project / "build"], check=True, capture_output=True)
    folder = DEMO if DEMO.is_dir() else BUNDLES / "v2" / "copy"
    environment = {**os.environ, "TFORMER_ONNXRUNTIME": onnxruntime()}
    assert subprocess.run([project / "build/app", folder, "7"], capture_output=True, env=environment).returncode == 0
    major, minor, _ = __version__.split(".")
    for wanted, fits in ((minor, "TRUE"), ("0", "FALSE")):  # before 1.0, another minor version may differ in all
        asked = {"": f"{major}.{wanted}", "_MAJOR": major, "_MINOR": wanted}
        script = [f"set(PACKAGE_FIND_VERSION{name} {value})" for name, value in asked.items()]
        script.append(f"include({next(prefix.rglob('tformer-config-version.cmake'))})")
        (tmp_path / "ask.cmake").write_text("\n".join([*script, "message(${PACKAGE_VERSION_COMPATIBLE})"]))
        said = subprocess.run(["cmake", "-P", tmp_path / "ask.cmake"], capture_output=True, text=True)
        assert said.stderr == f"{fits}\n"
    if shutil.which("pkg-config"):
        place = next(prefix.rglob("tformer.pc")).parent
        found = subprocess.run(
            ["pkg-config", "--cflags", "--libs", "tformer"],
            env={**os.environ, "PKG_CONFIG_PATH": str(place)},
            capture_output=True,
            text=True,
            check=True,
        )
        include = next(Path(each[2:]) for each in found.stdout.split() if each.startswith("-I"))
        assert (include / "tformer" / "tformer.h").is_file() and "-ltformer" in found.stdout
