"""Errors whose messages say what is wrong, where, and how to fix it."""

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
    """The bundle's tokenizers differ from the checkpoint's; in a check, exit code 3."""


class TrainingError(TformerError):
    """Training that cannot go on."""


class LimitError(TformerError):
    """A request beyond what the model or the recipe allows."""


class EngineError(TformerError):
    """A runtime failed, or returned something that is no result."""


class NotNumbers(EngineError):
    """NaN or infinite log-probabilities; `request`: index of the sentence."""

    def __init__(self, message: str, request: int = 0) -> None:
        super().__init__(message)
        self.request = request


class NoRoom(EngineError):
    """The device's memory is full."""


class MissingExtra(TformerError):
    """A package that an optional part of tformer needs is not installed."""


class ParityError(TformerError):
    """An engine's outputs differ from eager PyTorch by more than the recipe allows; exit code 3.

    `report`: the check's whole report, a `check.Report`, if there is one.
    """

    def __init__(self, message: str, report: Any = None) -> None:
        super().__init__(message)
        self.report = report


class Interrupted(TformerError):
    """Ctrl-C or SIGTERM arrived and the work has been saved; exit code 130."""


EXTRAS = {
    "report": ("jinja2", "markupsafe", "matplotlib"),
    "train": ("torch", "safetensors", "sacrebleu", "sacremoses", "num2words", "matplotlib"),
    "export": ("torch", "safetensors", "onnx", "onnxscript", "yaml"),
    "cpu": ("onnxruntime",),
    "serve": ("starlette", "uvicorn", "httptools", "uvloop", "prometheus_client"),
    "serve-grpc": ("grpc", "tritonclient", "google", "packaging"),
    "trt": ("tensorrt", "polygraphy", "onnx", "cuda"),
    "trt-rtx": ("tensorrt_rtx", "polygraphy", "onnx", "cuda"),
    "gpu": ("onnxruntime", "cuda"),
    "openvino": ("openvino",),
    "words": ("spacy",),
    "corpus": ("fsspec", "pyarrow", "zstandard"),
    "cluster": ("ray",),
    "serve-cluster": ("ray",),
}
"""Extra of pyproject.toml → the modules that it installs. A module in several extras is reported by the first."""


NATIVE = "install the wheel that was released with this tformer, or make native in a checkout"
"""How to install the C++ runtime's Python package."""


def install(*extras: str) -> str:
    """How to install an extra, or one of several."""
    names = [f"'.[{extra}]'" for extra in extras]
    return f"pip install {' or '.join(names)} in a checkout of tformer-deploy"


def missing_extra(error: ModuleNotFoundError) -> MissingExtra:
    """Turn a failed import into a message that names the pip extra to install."""
    module = (error.name or str(error)).split(".")[0]
    if module == "tformer_native":
        return MissingExtra(f"tformer-native is not installed: {NATIVE}")
    extra = next((extra for extra, modules in EXTRAS.items() if module in modules), None)
    if module == "cuda" and find_spec("tensorrt_rtx") and not find_spec("tensorrt"):
        extra = "trt-rtx"
    if extra is None:
        return MissingExtra(f"the Python package '{module}' is not installed: pip install {module}")
    return MissingExtra(f"the package '{module}' is not installed: {install(extra)}")


def require(extra: str, *modules: str, instead: str = "") -> None:
    """Raise MissingExtra if a module of an extra is not installed; `instead`: what works without it."""
    if lacking := next((module for module in modules if not find_spec(module)), None):
        raise MissingExtra(f"the package '{lacking}' is not installed: {install(extra)}{instead}")


@contextmanager
def extras() -> Iterator[None]:
    """Turn failed imports in the block into MissingExtra."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise missing_extra(error) from None
    except ImportError as error:  # a loader's error, or a binding of another version
        if not (error.name or "").startswith("tformer_native"):
            raise
        raise MissingExtra(f"tformer-native cannot be loaded ({error}): install it again: {NATIVE}") from None


def unknown(kind: str, name: str, valid: Iterable[str]) -> ConfigError:
    """The error for an unknown name, with the nearest valid one and all others."""
    names = sorted(valid)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return ConfigError(f"unknown {kind} '{name}': {hint}valid: {', '.join(names)}")
