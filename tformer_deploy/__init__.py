"""Ship encoder-decoder Transformers: ONNX graphs, ONNX Runtime and TensorRT, proven equal to eager PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .modules.user_model import UserModel
    from .translate import Translator

__version__ = "0.1.0"
__all__ = ["UserModel", "__version__", "load"]


def __getattr__(name: str) -> Any:
    """`UserModel`, which needs torch."""
    if name == "UserModel":
        from .modules.user_model import UserModel

        return UserModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load(bundle: str | Path, backend: str = "ort", **options: Any) -> Translator:
    """Open a bundle for translation: `load("bundle", beams=5).translate(["A dog runs."])[0].text`.

    `options` are fields of `opening.TranslatorOptions`, such as `variant`, `threads` and `shortlist`, and of
    `decoding.DecodeOptions`. Close the translator, or use it in a `with` statement. Raises TformerError.
    """
    from dataclasses import fields

    from .opening import TranslatorOptions, open_translator

    own = {field.name for field in fields(TranslatorOptions)} & options.keys()
    decoding = {**options.pop("decoding", {}), **{name: options.pop(name) for name in options.keys() - own}}
    return open_translator(TranslatorOptions(bundle, backend, decoding=decoding, **options))
