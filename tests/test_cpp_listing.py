"""What libtformer says without a translation: variants, options, text of single tokens, its version, its log."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tformer_deploy import __version__, load
from tformer_deploy.bundle.manifest import open_bundle
from tformer_deploy.bundle.text import ByteBpe, Specials, Tokenizers
from tformer_deploy.bundle.text.bpe import BYTES
from tformer_deploy.export.checked import export_checked
from tformer_deploy.model.checkpoint import model_tensors, save_checkpoint, save_tensors

from .conftest import random_model, small_config
from .cpp_files import Memory, folder_read, items, listed
from .cpp_library import CLOSE, LOG, ROOT, CppError, Model, Translator, library

BUNDLES = ROOT / "tests" / "bundles" / "v2"
DEMO = ROOT / ".demo" / "bundle"
BUNDLE = 2


@pytest.mark.parametrize("folder", [BUNDLES / "copy", BUNDLES / "names"], ids=lambda it: it.name)
def test_variants_are_those_of_the_manifest(folder: Path) -> None:
    bundle = open_bundle(folder)
    memory = Memory(folder_read(folder))
    variants, options = listed(memory)
    assert memory.reads == ["manifest.json"]
    memory.require_closed()
    assert (variants, options) == listed(folder)
    assert [each["name"] for each in variants] == ["fp32", *sorted(bundle.variants)]
    for each in variants:
        recipe = bundle.variants.get(each["name"], bundle.recipe)
        backend = {"onnx": "ort", "ort-cpu": "ort"}.get(str(recipe.target), str(recipe.target))
        assert (each["backend"], each["precision"]) == (backend, recipe.precision)
        assert each["source_tokens"] == recipe.axes.src_len.max and each["beams"] == recipe.axes.beams.max
        assert each["target_tokens"] == recipe.axes.past_len.max + 1
        assert each["is_default"] == (each["name"] == (bundle.default or "fp32"))
        assert each["attention"] == int(recipe.attention or recipe.target == "native")
        if backend == "trt":
            continue
        with Model(folder, backend=backend, variant=each["name"]) as model:
            assert library().tformer_model_variant(model.handle).decode() == each["name"]
        if backend == "native" and each["shortlist"]:
            Model(folder, backend=backend, variant=each["name"], shortlist=True).close()
        elif not each["shortlist"]:
            with pytest.raises(CppError, match="shortlist"):
                Model(folder, backend=backend, variant=each["name"], shortlist=True)


def test_options_are_those_of_the_schema() -> None:
    """With the bundle's own defaults; each default can be set, and what is outside a range cannot."""
    schema = json.loads((ROOT / "tformer_deploy/base/schemas/options.json").read_text())
    own = items(library().tformer_bundle_option, None)
    assert [each["name"] for each in own] == [each["name"] for each in schema]
    with Model(BUNDLES / "copy", backend="native") as model:
        for each, wanted in zip(own, schema, strict=True):
            assert (each["type"], each["help"]) == (wanted["type"], wanted["help"])
            assert each["values"] == (wanted["rule"] or ", ".join(wanted.get("choices", ())))
            Translator(model, **{each["name"]: each["value"]}).__exit__(None, None, None)
            if each["type"] in ("int", "float"):
                assert each["least"] <= float(each["value"]) <= each["most"]
                assert float(wanted["default"]) == float(each["value"])
                if abs(each["most"]) < 1e300:
                    beyond = int(each["most"]) + 1 if each["type"] == "int" else each["most"] * 2 + 1
                    with pytest.raises(CppError, match=each["name"]):
                        Translator(model, **{each["name"]: str(beyond)})
            else:
                assert (each["least"], each["most"]) == (0, 0)
    manifest = json.loads((BUNDLES / "copy" / "manifest.json").read_text())
    manifest["decoding"] = {"beams": 3, "length_penalty": 0.5, "suppress": [4, 5], "align": True, "stop": "exact"}
    manifest["decoding"]["bad_words"] = [[4, 5], [6]]
    memory = Memory(lambda name: json.dumps(manifest).encode() if name == "manifest.json" else None)
    changed = {each["name"]: each["value"] for each in listed(memory)[1] if each not in own}
    assert changed == {
        **{"beams": "3", "length_penalty": "0.5", "suppress": "4,5", "align": "true", "stop": "exact"},
        "bad_words": "4,5/6",
    }


def test_a_bundle_whose_own_options_are_wrong_is_not_listed() -> None:
    manifest = json.loads((BUNDLES / "copy" / "manifest.json").read_text())
    manifest["decoding"] = {"beams": 0}
    memory = Memory(lambda name: json.dumps(manifest).encode() if name == "manifest.json" else None)
    with pytest.raises(CppError, match=r"manifest\.json is damaged") as refused:
        listed(memory)
    assert refused.value.status == BUNDLE
    memory.require_closed()


def test_pieces_of_single_tokens_join_to_the_text() -> None:
    for folder in (BUNDLES / "copy", BUNDLES / "names", *([DEMO] if DEMO.is_dir() else [])):
        bundle = open_bundle(folder)
        tokenizers, chosen = bundle.tokenizers(), random.Random(3)
        with Model(folder) as model:
            size = bundle.config.tgt_vocab
            for _ in range(50):
                ids = [chosen.randrange(-2, size + 3) for _ in range(chosen.randrange(12))]
                shown = b""
                for count in range(len(ids) + 1):
                    text = model.target_text(ids[:count], ended=False)
                    assert text.startswith(shown)
                    shown = text
                whole = model.target_text(ids)
                assert whole.startswith(shown)
                real = [each for each in ids if each >= 0]
                assert whole.decode() == tokenizers.target_text(real)
                assert shown.decode() == tokenizers.settled_text(real)


@pytest.mark.long
def test_an_incomplete_character_is_no_piece(tmp_path: Path) -> None:
    """Bytes of a character come as tokens of their own."""
    entries = ["<unk>", "<pad>", "<s>", "</s>", *BYTES.values()]
    own = ByteBpe(entries, [], Specials())
    tokenizers, weights = Tokenizers(own, own), tmp_path / "run/weights/random.safetensors"
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "src_vocab": len(entries), "tgt_vocab": len(entries)}
    made = random_model(small_config(**sizes))
    save_tensors(weights, model_tensors(made))
    save_checkpoint(tmp_path / "run", made.config, tokenizers, weights, {})
    export_checked(tmp_path / "run", tmp_path / "bundle")
    text = "aß€🏳"
    ids = own.encode(text)
    assert len(ids) == 10
    with Model(tmp_path / "bundle") as model:
        for chosen in ([*ids], [*ids[:9], ids[0]], random.Random(1).choices(range(4, len(entries)), k=300)):
            pieces, shown = [], ""
            for count in range(len(chosen) + 1):
                grown = model.target_text(chosen[:count], ended=False).decode()
                assert grown == tokenizers.settled_text(chosen[:count]) and grown.startswith(shown)
                pieces.append(grown[len(shown) :])
                shown = grown
            assert model.target_text(chosen).decode() == own.decode(chosen)
            if chosen == ids:
                assert [each for each in pieces if each] == list(text)
        with Translator(model, max_tokens=40, sampling=True, temperature=5.0, seed=2) as translator:
            streamed: list[str] = []
            [[output]] = translator.stream("abc", lambda piece: streamed.append(piece) is None)
            assert "".join(streamed) == output.text and len(streamed) > 5
    with load(tmp_path / "bundle", threads=1, max_tokens=40, sampling=True, temperature=5.0, seed=2) as python:
        pieces = []
        python.stream("abc", pieces.append)
    assert pieces == streamed


def test_streamed_pieces_are_those_of_single_tokens() -> None:
    with Model(BUNDLES / "copy", backend="native") as model, Translator(model) as translator:
        ids: list[int] = []
        shown: list[bytes] = [b""]

        def grow(candidates: Any) -> bool:
            ids.append(candidates[0].token)
            text = model.target_text(ids, ended=False)
            if len(text) > len(shown[-1]):
                shown.append(text)
            return True

        translator.on_step(grow)
        pieces: list[str] = []
        [[output]] = translator.stream("3 1 4 1 5", lambda piece: pieces.append(piece) is None)
        joined = [shown[i + 1][len(shown[i]) :].decode() for i in range(len(shown) - 1)]
        assert "".join(pieces) == output.text == model.target_text(output.ids).decode() == "3 1 4 1 5"
        assert [each for each in joined if each] == pieces or joined == pieces[: len(joined)]


def test_the_version_is_one() -> None:
    text = (ROOT / "engines/include/tformer/version.h").read_text()
    defined = dict(
        line.split()[1:]
        for line in text.splitlines()
        if line.startswith("#define TFORMER_VERSION_") and len(line.split()) == 3
    )
    assert ".".join(defined[f"TFORMER_VERSION_{part}"] for part in ("MAJOR", "MINOR", "PATCH")) == __version__
    assert f'#define TFORMER_VERSION "{__version__}"' in text
    assert library().tformer_version().decode() == __version__


@contextmanager
def heard() -> Iterator[list[tuple[int, str]]]:
    """What the library logs."""
    messages: list[tuple[int, str]] = []
    call = LOG(lambda _, level, message: messages.append((level, message.decode())))
    assert library().tformer_on_log(call, None, CLOSE()) == 0
    try:
        yield messages
    finally:
        assert library().tformer_on_log(LOG(), None, CLOSE()) == 0


def test_what_opening_decides_is_logged() -> None:
    cores = library().tformer_cores()
    folder = BUNDLES / "copy"
    with heard() as messages:
        options = {"backend": "native", "variant": "native-int8", "threads": cores + 1}
        with Model(folder, **options) as model, Translator(model) as translator:
            translator.translate(["3 1 4"])
        Model(folder, backend="ort", variant="fp32", verify=False).close()
    words = "\n".join(f"{level} {message}" for level, message in messages)
    assert f"20 opened {folder}: backend native, variant native-int8, {cores + 1} threads" in words
    assert f"30 {folder}: {cores + 1} threads share {cores} cores" in words
    assert "20 native-int8: kernels " in words and "10 1 lines in 1 batches" in words
    assert f"20 opened {folder}: backend ort, variant fp32, 1 threads, files not compared with their SHA-256" in words
    before = len(messages)
    Model(folder, backend="native").close()
    assert len(messages) == before


def test_a_log_may_call_the_library_and_is_released_once() -> None:
    released: list[int] = []
    nested: list[str] = []

    def call(_: Any, level: int, message: bytes) -> None:
        if len(nested) < 2:
            nested.append(message.decode())
            with Model(BUNDLES / "copy", backend="native") as model, Translator(model) as translator:
                assert translator.translate(["3 1"])[0][0].text == "3 1"
            assert library().tformer_on_log(LOG(), None, CLOSE()) == 0
            assert not released  # it is still running

    own, release = LOG(call), CLOSE(lambda _: released.append(1))
    assert library().tformer_on_log(own, None, release) == 0
    opening = threading.Thread(target=lambda: Model(BUNDLES / "copy", backend="native").close(), daemon=True)
    opening.start()
    opening.join(60)
    assert not opening.is_alive(), "a callback that calls the library waits for itself"
    assert len(nested) == 2 and released == [1]


def test_threads_that_log_while_the_callback_changes() -> None:
    def work() -> None:
        for _ in range(20):
            Model(BUNDLES / "copy", backend="native").close()

    threads = [threading.Thread(target=work) for _ in range(3)]
    counts = {"heard": 0, "released": 0}

    def call(_: Any, level: int, message: bytes) -> None:
        counts["heard"] += 1

    def let_go(_: Any) -> None:
        counts["released"] += 1

    own, release = LOG(call), CLOSE(let_go)
    for each in threads:
        each.start()
    for _ in range(200):
        assert library().tformer_on_log(own, None, release) == 0
    for each in threads:
        each.join()
    assert library().tformer_on_log(LOG(), None, CLOSE()) == 0
    assert counts["released"] == 200 and counts["heard"] > 0
