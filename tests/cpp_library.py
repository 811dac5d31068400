"""libtformer through its C API, by ctypes."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from ctypes import POINTER, byref, c_char_p, c_double, c_int, c_int32, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import pytest

ROOT = Path(__file__).parent.parent
NAMED = os.environ.get("TFORMER_CPP_BUILD", "")
"""A build that somebody else has made, and tests take as it is."""
BUILD = Path(NAMED or ROOT / "engines" / "build")


@cache
def built() -> Path:
    """The folder of the C++ build, brought up to date; skips where that cannot be."""
    if not NAMED:
        with (ROOT / "engines" / "CMakeLists.txt").open() as lock:  # of two test processes one builds, the other waits
            flock(lock, LOCK_EX)
            _build()
    return BUILD


def _build() -> None:
    for tool in ("cmake", "ninja", "c++"):
        if not shutil.which(tool):
            pytest.skip(f"{tool} is not installed, so the C++ runtime is not built: apt-get install {tool}")
    configured = (BUILD / "build.ninja").is_file()
    command = ["cmake", "--build", BUILD] if configured else ["make", "cpp-build"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if made.returncode and "get-dependencies:" in made.stderr:
        pytest.skip(made.stderr.strip().splitlines()[0])
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-2000:]


@cache
def onnxruntime() -> str:
    """The library's file in the wheel."""
    spec = find_spec("onnxruntime")
    assert spec and spec.origin
    return str(next((Path(spec.origin).parent / "capi").glob("libonnxruntime.so.*")))


class Text(ctypes.Structure):
    _fields_ = (("data", c_char_p), ("size", c_size_t))


class Ids(ctypes.Structure):
    _fields_ = (("data", POINTER(c_int32)), ("size", c_size_t))


class CppOutput(ctypes.Structure):
    _fields_ = (
        ("text", c_void_p),
        ("text_size", c_size_t),
        ("ids", POINTER(c_int32)),
        ("ids_size", c_size_t),
        ("alignment", POINTER(c_int32)),
        ("score", c_double),
        ("value", c_double),
        ("finished", c_int),
    )


class Candidate(ctypes.Structure):
    _fields_ = (
        ("request", c_uint64),
        ("row", c_int32),
        ("token", c_int32),
        ("rank", c_int32),
        ("value", c_double),
        ("score", c_double),
    )


class Content(ctypes.Structure):
    _fields_ = (("data", c_void_p), ("size", c_size_t), ("handle", c_void_p))


READ = ctypes.CFUNCTYPE(c_int, c_void_p, c_char_p, POINTER(Content))
RELEASE = ctypes.CFUNCTYPE(None, c_void_p, POINTER(Content))
CLOSE = ctypes.CFUNCTYPE(None, c_void_p)
LOG = ctypes.CFUNCTYPE(None, c_void_p, c_int, c_char_p)


class CFiles(ctypes.Structure):
    _fields_ = (("name", c_char_p), ("read", READ), ("release", RELEASE), ("close", CLOSE), ("user", c_void_p))


class CVariant(ctypes.Structure):
    _fields_ = (
        ("name", c_char_p),
        ("backend", c_char_p),
        ("precision", c_char_p),
        ("source_tokens", c_size_t),
        ("target_tokens", c_size_t),
        ("beams", c_size_t),
        ("is_default", c_int),
        ("attention", c_int),
        ("shortlist", c_int),
    )


class COption(ctypes.Structure):
    _fields_ = (
        ("name", c_char_p),
        ("type", c_char_p),
        ("value", c_char_p),
        ("values", c_char_p),
        ("help", c_char_p),
        ("least", c_double),
        ("most", c_double),
    )


STEP = ctypes.CFUNCTYPE(c_int, c_void_p, POINTER(Candidate), c_size_t)
WRITE = ctypes.CFUNCTYPE(c_int, c_void_p, POINTER(ctypes.c_char), c_size_t)


@dataclass(frozen=True)
class Output:
    """One output of a line."""

    ids: list[int]
    score: float
    finished: bool
    alignment: list[int]
    text: str


class CppError(Exception):
    """A status and its message, and the outputs of the lines before."""

    def __init__(self, status: int, message: str, outputs: list[list[Output]]) -> None:
        super().__init__(message)
        self.status, self.outputs = status, outputs


@cache
def library() -> Any:
    """The C API."""
    found = ctypes.CDLL(str(built() / "libtformer.so"))
    for name in ("options_new", "error", "version", "model_variant", "results_output", "results_scores"):
        getattr(found, f"tformer_{name}").restype = c_void_p
    for name in ("version", "error", "model_variant"):
        getattr(found, f"tformer_{name}").restype = c_char_p
    for name in ("results_lines", "results_outputs"):
        getattr(found, f"tformer_{name}").restype = c_size_t
    found.tformer_results_output.restype = POINTER(CppOutput)
    found.tformer_results_scores.restype = POINTER(c_double)
    found.tformer_bundle_variant.restype = POINTER(CVariant)
    found.tformer_bundle_option.restype = POINTER(COption)
    return found


def options(values: Mapping[str, Any]) -> c_void_p:
    """Options as the library has them. Raises CppError."""
    made = c_void_p(library().tformer_options_new())
    for name, value in values.items():
        if isinstance(value, (list, tuple)):
            nested = any(isinstance(each, (list, tuple)) for each in value)
            text = "/".join(",".join(map(str, each)) for each in value) if nested else ",".join(map(str, value))
        else:
            text = str(value).lower() if isinstance(value, bool) else str(value)
        if status := library().tformer_options_set(made, name.encode(), text.encode()):
            message = library().tformer_error().decode()
            library().tformer_options_free(made)
            raise CppError(status, message, [])
    return made


class Model:
    """An open bundle, of a folder or of other files."""

    def __init__(self, folder: Path | CFiles, **values: Any) -> None:
        self.handle = c_void_p()
        own = options({"threads": 1, "onnxruntime": onnxruntime(), **values})
        if isinstance(folder, CFiles):
            status = library().tformer_model_open_files(byref(folder), own, byref(self.handle))
        else:
            status = library().tformer_model_open(str(folder).encode(), own, byref(self.handle))
        library().tformer_options_free(own)
        if status:
            raise CppError(status, library().tformer_error().decode(), [])

    def close(self) -> None:
        library().tformer_model_close(self.handle)

    def target_text(self, ids: Sequence[int], ended: bool = True) -> bytes:
        """Raises CppError."""
        made = Text()
        given = Ids((c_int32 * len(ids))(*ids), len(ids))
        if status := library().tformer_target_text(self.handle, given, c_int(ended), byref(made)):
            raise CppError(status, library().tformer_error().decode(), [])
        found = ctypes.string_at(made.data, made.size)
        library().tformer_text_free(byref(made))
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *why: object) -> None:
        self.close()


def texts(lines: Sequence[str | bytes]) -> Any:
    """Lines as the library takes them."""
    raw = [line.encode() if isinstance(line, str) else line for line in lines]
    return (Text * len(raw))(*((each, len(each)) for each in raw))


class Translator:
    """A translator of a model."""

    def __init__(self, model: Model, **values: Any) -> None:
        self.handle = c_void_p()
        own = options(values)
        status = library().tformer_translator_new(model.handle, own, byref(self.handle))
        library().tformer_options_free(own)
        if status:
            raise CppError(status, library().tformer_error().decode(), [])
        self._callback: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *why: object) -> None:
        library().tformer_translator_free(self.handle)

    def translate(
        self, lines: Sequence[str | bytes], prefixes: Sequence[str] = (), first: int = 0
    ) -> list[list[Output]]:
        """Raises CppError."""
        begins = texts(prefixes) if prefixes else None
        return self._call(library().tformer_translate, texts(lines), begins, c_size_t(len(lines)), c_uint64(first))

    def generate(self, sources: Sequence[Sequence[int]]) -> list[list[Output]]:
        """Raises CppError."""
        arrays = [(c_int32 * len(ids))(*ids) for ids in sources]
        both = (Ids * len(arrays))(*((array, len(array)) for array in arrays))
        return self._call(library().tformer_generate, both, c_size_t(len(arrays)), c_uint64(0))

    def stream(self, line: str, write: Callable[[str], bool]) -> list[list[Output]]:
        """Raises CppError."""
        call = WRITE(lambda _, data, size: 0 if write(ctypes.string_at(data, size).decode()) else 1)
        text, none = Text(line.encode(), len(line.encode())), Text(None, 0)
        return self._call(library().tformer_stream, text, none, c_uint64(0), call, None)

    def score(self, sources: Sequence[str | bytes], targets: Sequence[str | bytes]) -> list[list[float]]:
        """Raises CppError."""
        found: list[list[float]] = []

        def keep(results: c_void_p) -> None:
            for i in range(len(sources)):
                size = library().tformer_results_output(results, c_size_t(i), c_size_t(0)).contents.ids_size
                found.append(library().tformer_results_scores(results, c_size_t(i))[:size])

        arguments = texts(sources), texts(targets), c_size_t(len(sources)), c_uint64(0)
        self._call(library().tformer_score, *arguments, keep=keep)
        return found

    def allow(self, outputs: Sequence[str]) -> None:
        """Raises CppError."""
        if status := library().tformer_allow(self.handle, texts(outputs), c_size_t(len(outputs))):
            raise CppError(status, library().tformer_error().decode(), [])

    def on_step(self, call: Callable[[list[Candidate]], bool]) -> None:
        """`call` gets what each step found, and returns whether to go on."""
        self._callback = STEP(lambda _, all_, count: 0 if call(all_[:count]) else 1)
        library().tformer_on_step(self.handle, self._callback, None)

    def _call(self, function: Any, *arguments: Any, keep: Callable[[c_void_p], None] | None = None) -> Any:
        results = c_void_p()
        status = function(self.handle, *arguments, byref(results))
        message = library().tformer_error().decode() if status else ""
        lines = outputs_of(results)
        if keep and not status:
            keep(results)
        library().tformer_results_free(results)
        if status:
            raise CppError(status, message, lines)
        return lines


class Serving:
    """Lines that share steps; any thread may call it."""

    def __init__(self, model: Model, **values: Any) -> None:
        self.handle = c_void_p()
        self._checked(library().tformer_serving_new, model.handle, values, byref(self.handle))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *why: object) -> None:
        library().tformer_serving_free(self.handle)

    def admit(self, line: str | bytes, number: int, prefix: str = "", **values: Any) -> None:
        """Raises CppError."""
        both = texts([line, prefix])
        self._checked(library().tformer_admit, self.handle, both[0], both[1], values, c_uint64(number))

    def step(self) -> int:
        """How many lines are left."""
        lines = c_size_t()
        self._checked(library().tformer_step, self.handle, byref(lines))
        return lines.value

    def take(self) -> tuple[int, list[Output] | CppError] | None:
        """The next line that has ended: its number, and its outputs or its error."""
        results, number = c_void_p(), c_uint64()
        status = library().tformer_take(self.handle, byref(number), byref(results))
        if not results.value:
            assert not status
            return None
        message = library().tformer_error().decode() if status else ""
        lines = outputs_of(results)
        library().tformer_results_free(results)
        return number.value, CppError(status, message, lines) if status else lines[0]

    def retire(self, number: int) -> None:
        self._checked(library().tformer_retire, self.handle, c_uint64(number))

    @staticmethod
    def _checked(function: Any, *arguments: Any) -> None:
        """Call with options in place of a dictionary. Raises CppError."""
        own = [options(each) if isinstance(each, dict) else each for each in arguments]
        status = function(*own)
        message = library().tformer_error().decode() if status else ""
        for made in (made for made, each in zip(own, arguments, strict=True) if isinstance(each, dict)):
            library().tformer_options_free(made)
        if status:
            raise CppError(status, message, [])


def outputs_of(results: c_void_p) -> list[list[Output]]:
    """Of each line its outputs."""
    found = []
    for line in range(library().tformer_results_lines(results)):
        outputs = []
        for k in range(library().tformer_results_outputs(results, c_size_t(line))):
            it = library().tformer_results_output(results, c_size_t(line), c_size_t(k)).contents
            alignment = it.alignment[: it.ids_size] if it.alignment else []
            text = ctypes.string_at(it.text, it.text_size).decode()
            outputs.append(Output(it.ids[: it.ids_size], it.score, bool(it.finished), alignment, text))
        found.append(outputs)
    return found
