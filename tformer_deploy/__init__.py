"""Ship encoder-decoder Transformers: ONNX graphs, ONNX Runtime and TensorRT, proven equal to eager PyTorch."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike
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
    variant: str | None = None,
    device: str = "cpu",
    checkpoint: str | Path | None = None,
    threads: int = 0,
    workers: int = 1,
    shortlist: bool = False,
    batch_tokens: int = 4096,
    allowed: Iterable[str] = (),
    max_line_bytes: int | None = None,
    **options: Any,
) -> Translator:
    """Open a bundle for translation: `load("bundle", beams=5).translate(["A dog runs."])[0].text`.

    `variant` names graphs of the bundle other than its default, `device` is `cpu` or `cuda` (`trt` is always on a GPU),
    `checkpoint` is the run folder for `backend="eager"`, `threads` 0 means that the workers share the cores, `workers`
    are the batches decoded at a time, `shortlist` scores only the tokens that the bundle's lists have for a source,
    `batch_tokens` are the padded source tokens of a batch, per beam, `allowed` are the only outputs that may come,
    lines of more than `max_line_bytes` (if not given, 1 MiB) are refused, `options` are fields of
    `decoding.DecodeOptions`. Close the translator, or use it in a `with` statement. Raises TformerError.
    """
    from .bundle import open_bundle
    from .config import LINE_BYTES, MOST_LINE_BYTES, check_whole, from_dict
    from .decoding import DecodeOptions
    from .engines import engine_name, make_engine, threads_each
    from .errors import ConfigError, TformerError
    from .translate import Translator

    if not isinstance(bundle, str | PathLike):
        raise ConfigError(f"bundle={bundle!r}: must be a folder's path")
    if not isinstance("" if checkpoint is None else checkpoint, str | PathLike):
        raise ConfigError(f"checkpoint={checkpoint!r}: must be a folder's path")
    for option, text in (("backend", backend), ("variant", "" if variant is None else variant), ("device", device)):
        if not isinstance(text, str):
            raise ConfigError(f"{option}={text!r}: must be a str")
    longest = LINE_BYTES if max_line_bytes is None else max_line_bytes
    check_whole("max_line_bytes", longest, 1, MOST_LINE_BYTES)
    opened = open_bundle(Path(bundle), graphs=False)
    name = engine_name(backend, variant, opened, device)
    run, each = Path(checkpoint) if checkpoint else None, threads_each(threads, workers)
    engine = make_engine(name, opened, run, each, shortlist)
    decoding = from_dict(DecodeOptions, options, "decoding")
    translator = Translator(engine, opened.tokenizers(), decoding, batch_tokens, allowed, workers)
    translator.max_line_bytes = longest
    translator.open()
    try:
        engine.limits.check_asked(options)
    except TformerError:
        translator.close()
        raise
    return translator
