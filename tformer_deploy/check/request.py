"""A whole check as a command asks for it: eager's side is computed or read, then every engine is compared with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError, LimitError
from ..base.notes import Progress, unseen
from ..bundle.manifest import Bundle
from ..engines import EngineName, limits_of
from .corpus import GENERATED, allowed_by, make_corpus, translations
from .gate import Gate
from .observe import CheckOptions
from .quality import add_translation
from .reference import Reference, load_reference
from .report import Report
from .restricted import asked_engines

MORE = 3
"""Times as many generated sentences as an export reads: a check is run alone and seldom, an export often."""


@dataclass(frozen=True)
class CheckRequest:
    """What to check, and with what."""

    bundle: Bundle
    backends: Sequence[str] = ()
    """Empty: `ort`; with `save_reference` none."""
    variants: Sequence[str] = ()
    """Empty: all."""
    device: str = "cpu"
    checkpoint: Path | None = None
    src: Path | None = None
    """Text; None: generated ids."""
    tgt: Path | None = None
    save_reference: Path | None = None
    reference: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `CheckOptions` that the user has set."""
    loosened: bool = False
    shortlist: bool = False
    threads: int = 0


def run_check(request: CheckRequest, progress: Progress = unseen) -> Report | None:
    """Compare each engine with eager PyTorch; None if only the reference was to be written.

    Raises ConfigError and LimitError for what cannot be checked, before anything runs.
    """
    bundle = request.bundle
    targets = translations(request.src, request.tgt) if request.tgt else []
    _require_decoder(request)
    engines = asked_engines(
        bundle, request.backends or ["ort"], request.variants, device=request.device, shortlist=request.shortlist
    )
    for name in engines if request.options else []:
        limits_of(name, bundle).check_asked(dict(request.options))
    gate = Gate(bundle, request.checkpoint, request.threads, progress, request.loosened, request.shortlist)
    expected = load_reference(request.reference) if request.reference else _run_eager(gate, engines, request)
    if request.save_reference:
        gate.rounding(expected)  # for machines without PyTorch
        if request.src:
            add_translation(expected, gate.eager)  # for a later --tgt
        expected.save(request.save_reference)
        if not request.backends:
            return None
    return gate.run(engines, expected, targets)


def _require_decoder(request: CheckRequest) -> None:
    """Raise ConfigError for what a model without a decoder has nothing for."""
    if request.bundle.config.decoder_layers:
        return
    names = ("tgt", "save_reference", "reference", "shortlist")
    asked = {**request.options, **{name: getattr(request, name) for name in names}}
    if unread := [name for name, value in asked.items() if value]:
        raise ConfigError(
            f"--{unread[0].replace('_', '-')}: {request.bundle.directory} has an encoder and no decoder, "
            "whose output is compared: leave it out"
        )


def _run_eager(gate: Gate, engines: Sequence[EngineName], request: CheckRequest) -> Reference:
    """Eager PyTorch over the text, within what every engine takes."""
    bundle = request.bundle
    generated = dataclasses.replace(GENERATED, sentences=MORE * GENERATED.sentences)
    options = dataclasses.replace(CheckOptions() if request.src else generated, **request.options)
    allowed = allowed_by(engines, bundle)
    for name, most in {"beams": allowed.axes.beams.max, "max_tokens": allowed.axes.past_len.max + 1}.items():
        if (value := request.options.get(name, 0)) > most:
            option = name.replace("_", "-")
            raise LimitError(f"--{option} {value}: a variant of this bundle takes at most {most}: ask for less")
    return gate.reference(make_corpus(bundle.config, allowed, bundle.tokenizers(), request.src, options), allowed)
