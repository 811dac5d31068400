"""Opens a translator: options in, a model that is ready out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..base.errors import ArtifactError, ConfigError
from ..base.settings import from_dict
from ..bundle.manifest import MANIFEST, Bundle, open_bundle
from ..decoding import DecodeOptions, Decoding
from ..engines import check_checkpoint, engine_name, make_engine, threads_each
from .settings import TranslatorSettings, check_model
from .translator import Translator


@dataclass(frozen=True)
class TranslatorOptions(TranslatorSettings):
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
    shortlist: bool = False
    """Score only the tokens that the bundle's shortlist has for a source."""
    decoding: Mapping[str, Any] | Decoding = field(default_factory=dict)
    """Fields of `DecodeOptions` to set over the bundle's defaults, or what `decoding_of` has made of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        variant = "" if self.variant is None else self.variant
        check_model(self.bundle, self.checkpoint, backend=self.backend, variant=variant, device=self.device)
        if not isinstance(self.decoding, Mapping | Decoding):
            raise ConfigError(f"decoding={self.decoding!r}: must be a table of decoding options, as in {{'beams': 4}}")

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
    decoding = decoding_of(bundle, options.decoding)
    return Translator(engine, bundle.tokenizers(), decoding, options, f"{bundle.directory} on {name}").open()


def decoding_of(bundle: Bundle, asked: Mapping[str, Any] | Decoding) -> Decoding:
    """Decoding options over the bundle's defaults. Raises ConfigError, and ArtifactError for wrong defaults."""
    if isinstance(asked, Decoding):
        return asked
    try:
        from_dict(DecodeOptions, bundle.decoding, "decoding")
    except ConfigError as error:
        raise ArtifactError(f"{bundle.directory / MANIFEST} is damaged: {error}") from None
    return Decoding.over(bundle.decoding, asked)
