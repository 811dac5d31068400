"""The one way to a translator: options in, a model that is ready out."""

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
from ..decoding import DecodeOptions, over_defaults
from ..engines import MOST_BATCH_TOKENS, check_checkpoint, engine_name, make_engine, threads_each
from .translator import Translator


@dataclass(frozen=True)
class TranslatorOptions:
    """What is translated with, how and where."""

    bundle: str | Path | Bundle
    backend: str = "ort"
    variant: str | None = None
    """Graphs of ort or the precision of trt's plans, other than the bundle's default."""
    device: str = "cpu"
    """`cpu` or `cuda`; `trt` is always on a GPU."""
    checkpoint: str | Path | None = None
    """The run folder for `eager`, if it is not where it was at export."""
    threads: int = 0
    """Of each worker; 0: they share the cores."""
    workers: int = 1
    """Batches that are decoded at a time."""
    shortlist: bool = False
    """Score only the tokens that the bundle's lists have for a source."""
    batch_tokens: int = 0
    """Padded source tokens of a batch, per beam; 0: what suits the engine."""
    allowed: Iterable[str] = ()
    """The only outputs that may come, if any are given."""
    max_line_bytes: int = LINE_BYTES
    """Longer lines are refused."""
    decoding: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `decoding.DecodeOptions` that are asked for; others have the bundle's defaults."""
    least_batches: int = 0
    """Into how many batches requests are split at least; 0: as many as there are workers."""

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


def open_translator(options: TranslatorOptions) -> Translator:
    """A translator that is ready, for commands and programs alike. Close it, or use it in a `with` statement.

    Raises TformerError.
    """
    bundle = options.bundle if isinstance(options.bundle, Bundle) else open_bundle(Path(options.bundle), graphs=False)
    name = engine_name(options.backend, options.variant, bundle, options.device)
    check_checkpoint(options.checkpoint, [name])
    run, threads = options.checkpoint, threads_each(options.threads, options.workers)
    engine = make_engine(name, bundle, Path(run) if run else None, threads, options.shortlist)
    defaults = defaults_of(bundle)
    limits = options.batch_tokens, options.allowed, options.workers
    translator = Translator(engine, bundle.tokenizers(), over_defaults(defaults, options.decoding), *limits)
    translator.name, translator.defaults, translator.asked = f"{bundle.directory} on {name}", defaults, options.decoding
    translator.max_line_bytes, translator.least_batches = options.max_line_bytes, options.least_batches
    return translator.open()


def defaults_of(bundle: Bundle) -> dict[str, Any]:
    """The bundle's own decoding options. Raises ArtifactError where there are no such options."""
    try:
        from_dict(DecodeOptions, bundle.decoding, "decoding")
    except ConfigError as error:
        raise ArtifactError(f"{bundle.directory / MANIFEST} is damaged: {error}") from None
    return bundle.decoding
