"""Opens a translator: options in, a model that is ready out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from ..base.errors import ArtifactError, ConfigError
from ..base.lines import LINE_BYTES, MOST_LINE_BYTES
from ..base.settings import check_whole, from_dict
from ..bundle.manifest import MANIFEST, Bundle, open_bundle
from ..decoding import DecodeOptions, Decoding
from ..engines import MOST_BATCH_TOKENS, check_checkpoint, engine_name, make_engine, threads_each
from .translator import Translator


@dataclass(frozen=True)
class TranslatorOptions:
    """Which model translates, on what, and how."""

    bundle: str | Path | Bundle
    backend: str = "ort"
    variant: str | None = None
    """A variant other than the bundle's default; for `trt`, the precision of its plans."""
    device: str = "cpu"
    """`cpu` or `cuda`; `trt` is always on a GPU."""
    checkpoint: str | Path | None = None
    """For `eager`: the run folder, if it has moved since the export."""
    threads: int = 0
    """Per worker; 0: the cores divided by the workers."""
    workers: int = 1
    """Batches that are decoded in parallel."""
    shortlist: bool = False
    """Score only the tokens that the bundle's shortlist has for a source."""
    batch_tokens: int = 0
    """Padded source tokens of a batch, per beam; 0: what suits the engine."""
    allowed: Iterable[str] = ()
    """The only outputs that are allowed, if any are given."""
    max_line_bytes: int = LINE_BYTES
    """Longer lines are refused."""
    decoding: Mapping[str, Any] | Decoding = field(default_factory=dict)
    """Fields of `DecodeOptions` to set over the bundle's defaults, or what `decoding_of` has made of them."""
    least_batches: int = 0
    """Least number of batches that requests are split into; 0: `workers`."""

    def __post_init__(self) -> None:
        if not isinstance(self.bundle, str | PathLike | Bundle):
            raise ConfigError(f"bundle={self.bundle!r}: must be a folder's path")
        if self.checkpoint is not None and not isinstance(self.checkpoint, str | PathLike):
            raise ConfigError(f"checkpoint={self.checkpoint!r}: must be a folder's path")
        for name, text in (
            ("backend", self.backend),
            ("variant", "" if self.variant is None else self.variant),
            ("device", self.device),
        ):
            if not isinstance(text, str):
                raise ConfigError(f"{name}={text!r}: must be a str")
        check_whole("max_line_bytes", self.max_line_bytes, 1, MOST_LINE_BYTES)
        check_whole("least_batches", self.least_batches, 0, MOST_BATCH_TOKENS)

    @property
    def asked(self) -> Mapping[str, Any]:
        """The decoding options that the user set."""
        return self.decoding.asked if isinstance(self.decoding, Decoding) else self.decoding


def open_translator(options: TranslatorOptions) -> Translator:
    """An open translator. Close it, or use it in a `with` statement. Raises TformerError."""
    bundle = options.bundle if isinstance(options.bundle, Bundle) else open_bundle(Path(options.bundle), graphs=False)
    name = engine_name(options.backend, options.variant, bundle, options.device)
    check_checkpoint(options.checkpoint, [name])
    run, threads = options.checkpoint, threads_each(options.threads, options.workers)
    engine = make_engine(name, bundle, Path(run) if run else None, threads, options.shortlist)
    batching = options.batch_tokens, options.allowed, options.workers
    translator = Translator(engine, bundle.tokenizers(), decoding_of(bundle, options.decoding), *batching)
    translator.name = f"{bundle.directory} on {name}"
    translator.max_line_bytes, translator.least_batches = options.max_line_bytes, options.least_batches
    return translator.open()


def decoding_of(bundle: Bundle, asked: Mapping[str, Any] | Decoding) -> Decoding:
    """Decoding options over the bundle's defaults. Raises ConfigError, and ArtifactError for wrong defaults."""
    if isinstance(asked, Decoding):
        return asked
    try:
        from_dict(DecodeOptions, bundle.decoding, "decoding")
    except ConfigError as error:
        raise ArtifactError(f"{bundle.directory / MANIFEST} is damaged: {error}") from None
    return Decoding.over(bundle.decoding, asked)
