"""Ship encoder-decoder Transformers: ONNX graphs, ONNX Runtime and TensorRT, proven equal to eager PyTorch.

`load` opens a bundle; everything that tformer raises for a mistake or a damaged file is a `TformerError`.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .base.errors import (
    ArtifactError,
    ConfigError,
    DataError,
    EngineError,
    LimitError,
    MissingExtra,
    NotNumbers,
    ParityError,
    TformerError,
)

if TYPE_CHECKING:
    from .decoding import ContinuousBatch, DecodeOptions
    from .model.modules.user_model import UserModel
    from .pipelines.model import TformerForSeq2SeqLM
    from .pipelines.texts import pipeline
    from .translate.opening import TranslatorOptions
    from .translate.translator import Result, Translator

__version__ = "0.1.0"
__all__ = [
    "ArtifactError",
    "ConfigError",
    "ContinuousBatch",
    "DataError",
    "DecodeOptions",
    "EngineError",
    "LimitError",
    "MissingExtra",
    "NotNumbers",
    "ParityError",
    "Result",
    "TformerError",
    "TformerForSeq2SeqLM",
    "Translator",
    "TranslatorOptions",
    "UserModel",
    "__version__",
    "load",
    "pipeline",
]
_LATER = {
    "ContinuousBatch": ".decoding",
    "DecodeOptions": ".decoding",
    "Result": ".translate.translator",
    "TformerForSeq2SeqLM": ".pipelines.model",
    "Translator": ".translate.translator",
    "TranslatorOptions": ".translate.opening",
    "UserModel": ".model.modules.user_model",
    "pipeline": ".pipelines.texts",
}
"""Imported when they are first used: they need numpy, and `UserModel` torch."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def load(bundle: str | Path, backend: str = "ort", **options: Any) -> Translator:
    """Open a bundle for translation: `load("bundle", beams=5).translate(["A dog runs."])[0].text`.

    `options` are fields of `TranslatorOptions`, such as `variant`, `threads` and `shortlist`, and of `DecodeOptions`;
    `translate(lines, beams=4)` changes the latter for one call. Any number of threads may use one translator. Close it,
    or use it in a `with` statement. Raises TformerError.
    """
    from dataclasses import fields, replace

    from .decoding import Decoding
    from .translate.opening import TranslatorOptions, open_translator

    own = {field.name for field in fields(TranslatorOptions)} & options.keys()
    changes = {name: options.pop(name) for name in options.keys() - own}
    chosen = TranslatorOptions(bundle, backend, **options)
    if changes:
        decoding = chosen.decoding
        changed = decoding.changed(changes) if isinstance(decoding, Decoding) else {**decoding, **changes}
        chosen = replace(chosen, decoding=changed)
    return open_translator(chosen)
