"""Ship encoder-decoder Transformers: ONNX graphs, ONNX Runtime and TensorRT, proven equal to eager PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .translate import Translator

__version__ = "0.1.0"
__all__ = ["__version__", "load"]


def load(
    bundle: str | Path,
    backend: str = "ort",
    *,
    checkpoint: str | Path | None = None,
    threads: int = 0,
    **options: Any,
) -> Translator:
    """Open a bundle for translation: `load("bundle", beams=5).translate(["A dog runs."])[0].text`.

    `checkpoint` is the run folder for `backend="eager"`, `threads` 0 means one per core, `options` are fields of
    `decoding.DecodeOptions`. Close the translator, or use it in a `with` statement. Raises TformerError.
    """
    from .bundle import open_bundle
    from .config import from_dict
    from .decoding import DecodeOptions
    from .engines import make_engine
    from .translate import Translator

    opened = open_bundle(Path(bundle))
    engine = make_engine(backend, opened, Path(checkpoint) if checkpoint else None, threads)
    return Translator(engine, opened.tokenizers(), from_dict(DecodeOptions, options, "decoding")).open()
