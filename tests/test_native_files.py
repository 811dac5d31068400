"""`tformer_native`: bundles as mappings and functions, what they list, and the log."""

from __future__ import annotations

import gc
import json
import logging
import mmap
import random
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tformer_deploy import load
from tformer_deploy.engines.ort import shared_library

native = pytest.importorskip("tformer_native", reason="tformer-native is not installed: make native")
if not hasattr(native, "variants"):
    pytest.skip("tformer-native is of an older checkout: make native", allow_module_level=True)

ROOT = Path(__file__).parent.parent
BUNDLE = ROOT / "tests" / "bundles" / "v2" / "copy"
BUNDLE_STATUS = 2
SOURCES = np.array([[4, 5, 13, 7, 3], [6, 9, 3, 1, 1], [3, 1, 1, 1, 1]], np.int32), np.array([5, 3, 1], np.int32)
OPTIONS = json.dumps({"beams": 3, "n_best": 2, "max_tokens": 9})


def contents(folder: Path = BUNDLE) -> dict[str, bytes]:
    """A bundle's files."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def found(model: Any) -> Any:
    """What a model finds for some sources, and the scores of a step."""
    ids, lengths = SOURCES
    outputs = model.search(ids, lengths, [0, 1, 2], [], OPTIONS, None, True, None)
    state = model.encode(ids, lengths, 1, 9, [])
    *step, _, _ = state.step(np.full((3, 1), 2, np.int32), False, False)
    return outputs, [np.copy(each).tobytes() for each in step]


def ways(files: Mapping[str, bytes], folder: Path) -> Iterator[Any]:
    """The same files as each kind of thing that may be given."""
    yield files
    yield {name: bytearray(each) for name, each in files.items()}
    yield {name: np.frombuffer(each, np.uint8) for name, each in files.items()}
    yield files.get
    yield lambda name: (folder / name).read_bytes()
    yield lambda name: memoryview(files[name]) if name in files else None

    def mapped(name: str) -> mmap.mmap:
        with (folder / name).open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    yield mapped


@pytest.mark.parametrize(
    ("variant", "library"),
    [("native-fp32", None), ("native-int8", None), ("native-int4", None), ("fp32", "ort"), ("fp32-cpu", "ort")],
)
def test_a_bundle_in_memory_gives_what_its_folder_gives(variant: str, library: str | None) -> None:
    options = {"onnxruntime": str(shared_library())} if library else {}
    expected = found(native.Model(str(BUNDLE), variant, 1, **options))
    for files in ways(contents(), BUNDLE):
        assert found(native.Model(files, variant, 1, **options)) == expected


def test_bytes_are_let_go_with_the_model() -> None:
    class Kept(bytearray):
        pass

    files = {name: Kept(each) for name, each in contents().items()}
    held = {name: weakref.ref(each) for name, each in files.items()}
    model = native.Model(files, "native-int8", 1)
    expected = found(model)
    state = model.encode(*SOURCES, 1, 3, [])
    del files, model
    gc.collect()
    assert held["manifest.json"]() is not None  # `state` has an engine, which has the mapping
    del state
    gc.collect()
    assert not any(each() is not None for each in held.values())
    assert expected


def refusal(files: Any, **options: Any) -> Any:
    """The error for a bundle."""
    with pytest.raises(native.Error) as refused:
        native.Model(files, "native-int8", 1, **options)
    assert "\n" not in refused.value.args[0] and str(refused.value) == refused.value.args[0]
    return refused.value.args


def test_damage_is_refused_in_the_words_for_a_folder(tmp_path: Path) -> None:
    name = "native-int8/weights.data"
    for damage in (None, b"", contents()[name][:-1], contents()[name][:-1] + b"\x99"):
        folder = Path(shutil.copytree(BUNDLE, tmp_path / "bundle"))
        files = contents()
        if damage is None:
            (folder / name).unlink()
            del files[name]
        else:
            (folder / name).write_bytes(damage)
            files[name] = damage
        said = refusal(files, name=str(folder))
        assert said == refusal(str(folder)) and said[1] == BUNDLE_STATUS
        shutil.rmtree(folder)
    assert refusal({})[0].startswith("memory is not a bundle: it has no manifest.json")


def test_what_a_function_raises_comes_out() -> None:
    class Own(Exception):
        pass

    files = contents()

    def failing(error: BaseException, at: str) -> Callable[[str], Any]:
        def read(name: str) -> bytes | None:
            if name.endswith(at):
                raise error
            return files.get(name)

        return read

    for variant, options in (("native-int8", {}), ("fp32-cpu", {"onnxruntime": str(shared_library())})):
        for at in ("manifest.json", "weights.data"):
            for error in (Own("mine"), KeyError("mine"), KeyboardInterrupt(), MemoryError()):
                with pytest.raises(type(error)):
                    native.Model(failing(error, at), variant, 1, **options)
    with pytest.raises(native.Error, match=r"weights\.data is missing"):
        native.Model(failing(FileNotFoundError(), "weights.data"), "native-int8", 1)


def test_what_is_no_bundle_is_a_type_error() -> None:
    for wrong in (None, 5, b"bytes", ["manifest.json"], (1, 2), np.zeros(3)):
        with pytest.raises(TypeError, match="bundle"):
            native.Model(wrong, "native-int8", 1)
    for wrong in ("text", 5, [b"a"], 1.5):
        with pytest.raises(TypeError):
            native.Model({"manifest.json": wrong}, "native-int8", 1)


def test_functions_that_give_anything() -> None:
    files, refused = contents(), 0
    for seed in range(60):
        chosen = random.Random(seed)

        def give(name: str, chosen: random.Random = chosen) -> Any:
            content = files.get(name)
            if content is None or chosen.random() > 0.2:
                return content
            kinds: list[Any] = [
                None,
                b"",
                content[: chosen.randrange(len(content) + 1)],
                chosen.randbytes(9),
                7,
                "text",
            ]
            return chosen.choice(kinds)

        try:
            found(native.Model(give, chosen.choice(["native-int8", "native-fp32"]), 1))
        except (native.Error, TypeError) as error:
            refused += 1
            assert str(error) and "internal fault" not in str(error)
    assert 0 < refused < 60


def test_variants_and_options_without_a_model() -> None:
    read: list[str] = []
    files = contents()

    def give(name: str) -> bytes | None:
        read.append(name)
        return files.get(name)

    variants = native.variants(give)
    assert read == ["manifest.json"] and variants == native.variants(str(BUNDLE)) == native.variants(files)
    assert {each["name"] for each in variants} >= {"fp32", "fp32-cpu", "native-int8"}
    schema = json.loads((ROOT / "tformer_deploy/base/schemas/options.json").read_text())
    options = native.options()
    assert [each["name"] for each in options] == [each["name"] for each in schema]
    assert [each["help"] for each in options] == [each["help"] for each in schema]
    manifest = json.loads(files["manifest.json"])
    manifest["decoding"] = {"beams": 5}
    own = native.options({"manifest.json": json.dumps(manifest).encode()})
    assert {each["name"]: each["value"] for each in own if each not in options} == {"beams": "5"}
    with pytest.raises(native.Error, match="memory is not a bundle"):
        native.options({})


def test_the_log_is_that_of_logging(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        native.on_log(logging.getLogger("tformer").log)
        try:
            native.Model(contents(), "native-int8", 1, name="packed")
        finally:
            native.on_log(None)
    assert "opened packed: backend native, variant native-int8, 1 threads" in caplog.messages
    before = len(caplog.messages)
    native.Model(str(BUNDLE), "native-int8", 1)
    assert len(caplog.messages) == before
    with pytest.raises(TypeError, match="callback"):
        native.on_log(5)


def test_a_log_that_raises_or_calls_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    calls: list[str] = []

    def log(level: int, message: str) -> None:
        calls.append(message)
        if len(calls) < 3:
            found(native.Model(str(BUNDLE), "native-int8", 1))
        raise ValueError("mine")

    held = weakref.ref(log)
    native.on_log(log)
    try:
        native.Model(str(BUNDLE), "native-int8", 1)
    finally:
        native.on_log(None)
    assert len(calls) > 3 and len(unraisable) == len(calls)
    unraisable.clear()
    del log
    gc.collect()
    assert held() is None


def test_a_process_that_ends_while_all_is_open() -> None:
    script = (
        "import logging, tformer_native as native\n"
        "from pathlib import Path\n"
        f"folder = Path({str(BUNDLE)!r})\n"
        "native.on_log(lambda level, message: None)\n"
        "model = native.Model(lambda name: (folder / name).read_bytes(), 'native-int8', 2)\n"
        "batch = model.continuous()\n"
        "print(model.limits[0] > 0)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "True\n", "")


def test_the_package_itself_opens_folders_as_before() -> None:
    with load(BUNDLE, backend="native", threads=1) as translator:
        assert translator.translate(["3 1"])[0].text == "3 1"
