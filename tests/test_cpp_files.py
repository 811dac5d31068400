"""Bundles that are no folder, in C, C++ and Python; what they list; text of single tokens; the version; the log."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from ctypes import byref, c_int, c_void_p
from pathlib import Path
from typing import Any

import pytest

from tformer_deploy import __version__, load

from .cpp_files import Memory, folder_read, listed
from .cpp_library import (
    CLOSE,
    READ,
    RELEASE,
    ROOT,
    CFiles,
    CppError,
    Ids,
    Model,
    Output,
    Serving,
    Text,
    Translator,
    library,
    onnxruntime,
)
from .cpp_programs import program

BUNDLES = ROOT / "tests" / "bundles" / "v2"
DEMO = ROOT / ".demo" / "bundle"
USAGE, BUNDLE, ENGINE, MISSING, CANCELLED, NO_MEMORY, INTERNAL = 1, 2, 5, 7, 8, 9, 10
LINES = ["3 1 4", "", "forty-two", "7 7 7 7", "x", "9"]
SEARCHES: list[dict[str, Any]] = [
    {},
    {"beams": 4, "n_best": 4, "length_penalty": 0.6},
    {"sampling": True, "n_best": 3, "seed": 5},
]


def found(model: Model) -> list[list[list[Output]]]:
    """What a model makes of the lines."""
    every = []
    for values in SEARCHES:
        with Translator(model, max_tokens=12, **values) as translator:
            every.append(translator.translate(LINES))
    return every


def served(model: Model) -> dict[int, Any]:
    """What lines that join one after the other get."""
    ended: dict[int, Any] = {}
    with Serving(model, max_tokens=12) as serving:
        for number, line in enumerate(LINES):
            serving.admit(line, number)
            serving.step()
        while serving.step():
            pass
        while line := serving.take():
            ended[line[0]] = line[1]
    return ended


def cases() -> Iterator[Any]:
    """Every variant of a small bundle, and of the demo's."""
    for folder in (BUNDLES / "copy", BUNDLES / "names", DEMO):
        if not folder.is_dir():
            yield pytest.param(folder, "", "", marks=pytest.mark.skip(reason="no demo: make demo"))
            continue
        manifest = json.loads((folder / "manifest.json").read_text())
        targets = {"fp32": "onnx"} | {name: each["recipe"]["target"] for name, each in manifest["variants"].items()}
        for name, target in targets.items():
            if target != "trt":
                yield pytest.param(folder, "native" if target == "native" else "ort", name, id=f"{folder.name}-{name}")


@pytest.mark.parametrize(("folder", "backend", "variant"), list(cases()))
@pytest.mark.parametrize("offset", [64, 1])
def test_a_bundle_in_memory_gives_what_its_folder_gives(
    folder: Path, backend: str, variant: str, offset: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, and scores to the last bit; and bytes stay no longer than they are needed."""
    monkeypatch.chdir(tmp_path)
    memory = Memory(folder_read(folder), offset=offset)
    options = {"backend": backend, "variant": variant}
    with Model(folder, **options) as expected, Model(memory.files, **options) as model:
        assert len(set(memory.reads)) == len(memory.reads), "a file was read twice while the model was opened"
        manifest = json.loads((folder / "manifest.json").read_text())
        ours = {name for name in manifest["files"] if name.split("/")[0] in manifest["variants"]}
        if variant in manifest["variants"]:
            assert not {name for name in memory.reads if name in ours and not name.startswith(f"{variant}/")}
        assert found(model) == found(expected)
        if backend == "native" or "slots" in str(manifest["variants"].get(variant, {}).get("graphs")):
            assert served(model) == served(expected)
        assert memory.closed == 0
    memory.require_closed()


def test_a_shortlist_in_memory_is_that_of_the_folder() -> None:
    names = {each["name"]: each for each in listed(BUNDLES / "copy")[0]}
    usable = [each for each in names.values() if each["shortlist"]]
    assert usable
    for each in usable:
        options = {"backend": each["backend"], "variant": each["name"], "shortlist": True}
        memory = Memory(folder_read(BUNDLES / "copy"))
        with Model(BUNDLES / "copy", **options) as expected, Model(memory.files, **options) as model:
            assert any("shortlist" in name for name in memory.reads)
            assert found(model) == found(expected)
        memory.require_closed()


def test_files_stay_open_as_long_as_a_translator() -> None:
    memory = Memory(folder_read(BUNDLES / "copy"))
    model = Model(memory.files, backend="native")
    with Translator(model) as translator:
        model.close()
        assert translator.translate(["3 1 4"])[0][0].text == "3 1 4" and memory.closed == 0
    memory.require_closed()


def test_graphs_and_their_weights_are_released_when_the_model_is_open() -> None:
    """But not those of the CPU engine, which computes with them where they lie."""
    for backend, kept in (("ort", 0), ("native", 1)):
        memory = Memory(folder_read(BUNDLES / "copy"))
        with Model(memory.files, backend=backend):
            assert len(memory.reads) - memory.released == kept
        memory.require_closed()


def test_a_folder_goes_through_the_same_door() -> None:
    files = CFiles(str(BUNDLES / "copy").encode(), READ(), RELEASE(), CLOSE(), None)
    with Model(files, backend="native") as model, Translator(model) as translator:
        assert translator.translate(["3 1 4"])[0][0].text == "3 1 4"


def remove(folder: Path, name: str) -> None:
    (folder / name).unlink()


def shorten(folder: Path, name: str) -> None:
    (folder / name).write_bytes((folder / name).read_bytes()[:-70])


def change(folder: Path, name: str) -> None:
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)


def empty(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"")


def point(folder: Path, name: str) -> None:
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


@pytest.mark.parametrize("damage", [remove, shorten, change, empty, point])
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    ("backend", "variant", "name"),
    [
        *(("native", "native-int8", f"native-int8/{name}") for name in ("weights.data", "program.json")),
        *(("ort", "fp32", name) for name in ("manifest.json", "encoder.onnx", "decoder_step.onnx")),
        *(("ort", "fp32-cpu", f"fp32-cpu/{name}") for name in ("weights.data", "encoder.onnx")),
        ("native", "native-fp32", "TOKENIZER"),
    ],
)
def test_damage_is_refused_in_the_words_for_a_folder(
    damage: Callable[[Path, str], None], verify: bool, backend: str, variant: str, name: str, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(BUNDLES / "copy", tmp_path / "bundle"))
    manifest = json.loads((folder / "manifest.json").read_text())
    if name == "TOKENIZER":
        name = manifest["tokenizer"]["source"]["file"]
    if not (folder / name).is_file():
        pytest.skip(f"the bundle has no {name}")
    damage(folder, name)
    options = {"backend": backend, "variant": variant, "verify": verify}
    memory = Memory(folder_read(folder), str(folder))
    outcomes: list[Any] = []
    for files in (folder, memory.files):
        try:
            with Model(files, **options) as model:
                outcomes.append(found(model))
        except CppError as error:
            assert "\n" not in str(error) and len(str(error)) < 600
            outcomes.append((error.status, str(error)))
    memory.require_closed()
    if verify:
        assert outcomes[1][0] == BUNDLE
    if damage is remove and name == "manifest.json":
        assert outcomes[1][1] == (
            f"{folder} is not a bundle: it has no manifest.json; a bundle is a folder that tformer export writes"
        )
    elif backend == "ort" and not verify and damage in (shorten, empty) and name.endswith(".data"):
        assert [each[0] for each in outcomes] == [BUNDLE, BUNDLE]  # in ONNX Runtime's words
    else:
        assert outcomes[0] == outcomes[1]


def test_a_graph_reads_no_weights_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the manifest does not list them, they are nowhere."""
    variant = "fp32-cpu"
    shutil.copy(BUNDLES / "copy" / variant / "weights.data", tmp_path)
    monkeypatch.chdir(tmp_path)
    manifest = json.loads((BUNDLES / "copy" / "manifest.json").read_text())
    del manifest["files"][f"{variant}/weights.data"]
    read = folder_read(BUNDLES / "copy")
    memory = Memory(lambda name: json.dumps(manifest).encode() if name == "manifest.json" else read(name))
    with pytest.raises(CppError) as refused:
        Model(memory.files, backend="ort", variant=variant)
    assert refused.value.status == BUNDLE and "External data" in str(refused.value) and "\n" not in str(refused.value)
    memory.require_closed()


REFUSALS = [
    (ENGINE, BUNDLE, "memory/native-int8/weights.data cannot be read: its callback returned 5: look there"),
    (-7, BUNDLE, "cannot be read: its callback returned -7: look there for the reason"),
    (CANCELLED, CANCELLED, "the callback stopped the call"),
    (NO_MEMORY, NO_MEMORY, "there is no memory left"),
    (MISSING, BUNDLE, "memory is incomplete: native-int8/weights.data is missing; copy or make it again"),
]


@pytest.mark.parametrize(("returned", "status", "words"), REFUSALS)
def test_a_callback_that_fails(returned: int, status: int, words: str) -> None:
    read = folder_read(BUNDLES / "copy")
    memory = Memory(lambda name: returned if name.endswith("weights.data") else read(name))
    with pytest.raises(CppError) as refused:
        Model(memory.files, backend="native", variant="native-int8")
    assert refused.value.status == status and words in str(refused.value) and "\n" not in str(refused.value)
    memory.require_closed()


def test_bytes_at_no_address_are_refused() -> None:
    files = CFiles(None, READ(lambda _, name, content: setattr(content[0], "size", 5) or 0), RELEASE(), CLOSE(), None)
    with pytest.raises(CppError, match=r"manifest\.json cannot be read: its callback gave 5 bytes at a null pointer"):
        Model(files)


def test_arguments_that_are_missing() -> None:
    closed: list[int] = []
    close = CLOSE(lambda _: closed.append(1))
    files = CFiles(None, READ(lambda *_: MISSING), RELEASE(), close, None)
    assert library().tformer_model_open_files(None, None, None) == USAGE
    assert library().tformer_bundle_open(None, None) == USAGE and not closed
    assert library().tformer_model_open_files(byref(files), None, None) == USAGE and len(closed) == 1
    assert library().tformer_bundle_open(byref(files), None) == USAGE and len(closed) == 2
    none = CFiles(None, READ(), RELEASE(), close, None)
    assert library().tformer_bundle_open(byref(none), byref(c_void_p())) == USAGE and len(closed) == 3
    assert b"folder's name is null" in library().tformer_error()
    assert library().tformer_target_text(None, Ids(None, 0), c_int(1), byref(Text())) == USAGE
    library().tformer_text_free(None)
    library().tformer_bundle_close(None)


def test_what_a_callback_gives_later_is_compared_as_well() -> None:
    """ONNX Runtime's step for lines that join is opened when the first batch of them begins."""
    read, late = folder_read(BUNDLES / "copy"), False

    def changing(name: str) -> bytes | int | None:
        content = read(name)
        return content[:-1] + b"\x00" if late and isinstance(content, bytes) else content

    memory = Memory(changing)
    with Model(memory.files, backend="ort", variant="fp32-cpu") as model:
        late = True
        with pytest.raises(CppError) as refused, Serving(model):
            pass
        assert "does not match its SHA-256" in str(refused.value) and refused.value.status == BUNDLE
        late = False
        assert served(model)
    memory.require_closed()


def wrong(chosen: random.Random, content: bytes) -> bytes | int | None:
    """What a callback may give in place of a file."""
    ways: list[Callable[[], bytes | int | None]] = [
        lambda: None,
        lambda: chosen.choice([1, 2, 3, 4, 5, 6, NO_MEMORY, CANCELLED, INTERNAL, 99, -1]),
        lambda: content[: chosen.randrange(len(content) + 1)],
        lambda: content + b"\x00",
        lambda: chosen.randbytes(len(content)),
        lambda: content.replace(b"1", b"2", 1),
        lambda: b"",
    ]
    return chosen.choice(ways)()


def fuzzed(rounds: int) -> None:
    read = folder_read(BUNDLES / "copy")
    refused = 0
    for seed in range(rounds):
        chosen = random.Random(seed)
        backend, variant = chosen.choice([("native", "native-int8"), ("native", "native-fp32"), ("ort", "fp32-cpu")])
        share = chosen.choice([0.05, 0.3])

        def give(name: str, chosen: random.Random = chosen, share: float = share) -> bytes | int | None:
            content = read(name)
            return wrong(chosen, content) if isinstance(content, bytes) and chosen.random() < share else content

        memory = Memory(give, offset=chosen.choice([1, 4, 64]))
        try:
            with Model(memory.files, backend=backend, variant=variant, verify=chosen.random() < 0.5) as model:
                found(model)
        except CppError as error:
            refused += 1
            assert error.status in (BUNDLE, CANCELLED, NO_MEMORY, USAGE, 6), error
            assert str(error) and "\n" not in str(error) and "internal fault" not in str(error)
        memory.require_closed()
    assert 0 < refused < rounds


def test_callbacks_that_give_anything() -> None:
    fuzzed(40)


@pytest.mark.long
def test_callbacks_that_give_anything_for_longer() -> None:
    fuzzed(2000)


@pytest.mark.parametrize(("backend", "variant"), [("native", "native-int8"), ("ort", "fp32-cpu")])
def test_a_program_in_c(backend: str, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFORMER_ONNXRUNTIME", onnxruntime())
    command = [program("embed"), BUNDLES / "copy", backend, variant, "3 1 4 1 5"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    said = ended.stdout.splitlines()
    of = {
        kind: [line[len(kind) + 1 :] for line in said if line.startswith(f"{kind} ")]
        for kind in ("version", "variant", "option", "log", "piece", "text", "output", "listed:", "opened:")
    }
    assert of["version"] == [f"{__version__} {__version__} {__version__}"]
    variants, options = listed(BUNDLES / "copy")
    assert of["variant"] == [" ".join(map(str, each.values())) for each in variants]
    assert [each.split("|")[0] for each in of["option"]] == [each["name"] for each in options]
    assert of["listed:"] == ["read 1, released 1, closed 1"]
    assert any(line.startswith("20 opened embedded: backend") for line in of["log"])
    assert "".join(of["piece"]) == of["text"][0] == of["output"][0] == "3 1 4 1 5" and len(of["piece"]) > 2
    [ending] = of["opened:"]
    read, released, closed = (int(word.strip(",")) for word in ending.split()[1::2])
    assert read == released > 3 and closed == 1


def test_tokens_are_those_of_the_python_package() -> None:
    """What is in memory is translated as Python translates the folder."""
    memory = Memory(folder_read(BUNDLES / "copy"))
    with load(BUNDLES / "copy", backend="native", threads=1, beams=3) as python:
        expected = python.translate(LINES)
    with Model(memory.files, backend="native") as model, Translator(model, beams=3) as translator:
        ours = translator.translate(LINES)
    assert [(line[0].text, line[0].ids, line[0].score) for line in ours] == [
        (each.text, list(each.ids), each.score) for each in expected
    ]
