"""Ship encoder-decoder Transformers: ONNX graphs, ONNX Runtime and TensorRT, proven equal to eager PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

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
    max_tokens: int = 256,
) -> Translator:
    """Open a bundle for translation: `load("bundle").translate(["A dog runs."])[0].text`.

    `checkpoint` is the run folder for `backend="eager"`, `threads` 0 means one per core, `max_tokens` limits each
    output. Close the translator, or use it in a `with` statement. Raises TformerError.
    """
    from .bundle import open_bundle
    from .decoding import DecodeOptions
    from .engines import make_engine
    from .translate import Translator

    opened = open_bundle(Path(bundle))
    engine = make_engine(backend, opened, Path(checkpoint) if checkpoint else None, threads)
    return Translator(engine, opened.tokenizers(), DecodeOptions(max_tokens)).open()
