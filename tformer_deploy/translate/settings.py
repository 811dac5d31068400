"""What a translator is given beside its model, and checks of what a user says about a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike
from typing import Any

from ..base.errors import ConfigError
from ..base.lines import LINE_BYTES, MOST_LINE_BYTES
from ..base.settings import check_whole
from ..bundle.manifest import Bundle
from ..engines import MOST_BATCH_TOKENS
from .requests import as_list


@dataclass(frozen=True, kw_only=True)
class TranslatorSettings:
    """How a translator reads lines and puts them into batches."""

    workers: int = 1
    """Batches that are decoded in parallel, each in a thread of its own, on the one engine."""
    batch_tokens: int = 0
    """Padded source tokens of a batch, counted once for every beam or sample; 0: what suits the engine."""
    least_batches: int = 0
    """Least number of batches that requests are split into; 0: `workers`."""
    allowed: Iterable[str] = ()
    """The only outputs that may be produced, if any are given."""
    max_line_bytes: int = LINE_BYTES
    """Longer lines are refused before they are tokenized."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "allowed", tuple(as_list("allowed", self.allowed)))
        check_whole("batch_tokens", self.batch_tokens, 0, MOST_BATCH_TOKENS)
        check_whole("least_batches", self.least_batches, 0, MOST_BATCH_TOKENS)
        check_whole("max_line_bytes", self.max_line_bytes, 1, MOST_LINE_BYTES)


def check_model(bundle: Any, checkpoint: Any, **texts: Any) -> None:
    """Raise ConfigError for a bundle or run folder that is no path, and for other options that are no str."""
    if not isinstance(bundle, str | PathLike | Bundle):
        raise ConfigError(f"bundle={bundle!r}: must be a folder's path")
    if checkpoint is not None and not isinstance(checkpoint, str | PathLike):
        raise ConfigError(f"checkpoint={checkpoint!r}: must be a folder's path")
    for name, text in texts.items():
        if not isinstance(text, str):
            raise ConfigError(f"{name}={text!r}: must be a str")
