"""One exception family: every message says what is wrong, where, and how to fix it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any


class TformerError(Exception):
    """A user's mistake or an unusable input: one line on stderr, exit code 1."""


class ConfigError(TformerError):
    """A setting, preset, recipe or key that does not exist or does not fit the others."""


class DataError(TformerError):
    """Training or input text that cannot be used."""


class ArtifactError(TformerError):
    """A checkpoint or bundle that is missing, damaged, edited or of a newer format."""


class OtherTokenizers(ArtifactError):
    """A bundle whose tokenizers are not its checkpoint's; in a check, exit code 3."""


class TrainingError(TformerError):
    """Training that cannot go on."""


class LimitError(TformerError):
    """A request beyond what the model or the recipe allows."""


class EngineError(TformerError):
    """A runtime that stopped with an error of its own, or gave what is no result."""


class NotNumbers(EngineError):
    """NaN or infinite log-probabilities, of one `request`, counted from 0."""

    def __init__(self, message: str, request: int = 0) -> None:
        super().__init__(message)
        self.request = request


class NoRoom(EngineError):
    """The device's memory is full."""


class MissingExtra(TformerError):
    """A package is not installed that an optional part of tformer needs."""


class ParityError(TformerError):
    """An engine's outputs differ from eager PyTorch by more than the recipe allows; exit code 3.

    `report`: all that the check found, a `check.Report`, where there was one.
    """

    def __init__(self, message: str, report: Any = None) -> None:
        super().__init__(message)
        self.report = report


class Interrupted(TformerError):
    """Ctrl-C or SIGTERM arrived and the work has been saved; exit code 130."""


EXTRAS = {
    "report": ("jinja2", "markupsafe", "matplotlib"),
    "train": ("torch", "safetensors", "sacrebleu", "num2words", "matplotlib"),
    "export": ("torch", "safetensors", "onnx", "onnxscript", "yaml"),
    "cpu": ("onnxruntime",),
    "trt": ("tensorrt", "polygraphy", "onnx", "cuda"),
    "trt-rtx": ("tensorrt_rtx", "polygraphy", "onnx", "cuda"),
    "gpu": ("onnxruntime", "cuda"),
    "openvino": ("openvino",),
    "words": ("spacy",),
    "corpus": ("fsspec", "pyarrow", "zstandard"),
    "cluster": ("ray",),
}
"""What each extra of pyproject.toml brings, by the names that are imported; a package is named by the first."""


def install(*extras: str) -> str:
    """How to get an extra, or one of several."""
    names = [f"'.[{extra}]'" for extra in extras]
    return f"pip install {' or '.join(names)} in a checkout of tformer-deploy"


def missing_extra(error: ModuleNotFoundError) -> MissingExtra:
    """Turn a failed import into a message that names the pip extra to install."""
    module = (error.name or str(error)).split(".")[0]
    if module == "tformer_native":
        return MissingExtra("tformer-native is not installed: pip install tformer-native, or make native in a checkout")
    extra = next((extra for extra, modules in EXTRAS.items() if module in modules), None)
    if module == "cuda" and find_spec("tensorrt_rtx") and not find_spec("tensorrt"):
        extra = "trt-rtx"
    if extra is None:
        return MissingExtra(f"the Python package '{module}' is not installed: pip install {module}")
    return MissingExtra(f"the package '{module}' is not installed: {install(extra)}")


def require(extra: str, *modules: str, instead: str = "") -> None:
    """Raise MissingExtra where some of an extra's packages are not installed; `instead`: what goes without them."""
    if lacking := next((module for module in modules if not find_spec(module)), None):
        raise MissingExtra(f"the package '{lacking}' is not installed: {install(extra)}{instead}")


@contextmanager
def extras() -> Iterator[None]:
    """Around imports, or a function that imports. Raises MissingExtra for a package that is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise missing_extra(error) from None


def unknown(kind: str, name: str, valid: Iterable[str]) -> ConfigError:
    """An unknown name, with the nearest valid one and the list of all."""
    names = sorted(valid)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return ConfigError(f"unknown {kind} '{name}': {hint}valid: {', '.join(names)}")
