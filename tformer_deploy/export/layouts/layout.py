"""What a layout is: how it is written, and how the runtime that it is for generates from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from ...bundle.text import Tokenizers
from ...decoding import DecodeOptions
from ...model.checkpoint import Checkpoint
from ...model.config import ModelConfig
from ...model.modules.running import UserCheckpoint

Generate = Callable[[Sequence[Sequence[int]], DecodeOptions], list[list[int]]]
"""The best output of each source, as ids without start and end token. Sources are ids as the encoder sees them."""


@dataclass(frozen=True)
class Source:
    """What a layout is made of."""

    checkpoint: Checkpoint | UserCheckpoint
    options: DecodeOptions
    """The checkpoint's own decoding options, over the usual ones."""

    @property
    def config(self) -> ModelConfig:
        """Of the model."""
        return self.checkpoint.config

    @property
    def tokenizers(self) -> Tokenizers:
        """Of both sides."""
        return self.checkpoint.tokenizers


class Layout(Protocol):
    """A module that writes a layout."""

    RUNTIME: str
    """The package or program that it is proven in, as its users call it."""
    PRECISIONS: dict[str, bool]
    """Precisions that it writes → whether tokens must equal eager's; others are compared, and the figure is noted."""
    BEAMS: Sequence[int]
    """The beam sizes that the runtime is asked for; 1 is greedy search."""

    @staticmethod
    def refuse(source: Source) -> Iterable[str]:
        """What the layout cannot say: model options and decoding options, each with its value and why."""
        ...

    @staticmethod
    def write(source: Source, folder: Path) -> None:
        """Write all files into an empty folder."""
        ...

    @staticmethod
    def open_runtime(source: Source, folder: Path, precision: str) -> AbstractContextManager[Generate]:
        """The runtime over a written folder. Raises MissingExtra where it is not installed, with how to install it."""
        ...


@runtime_checkable
class SearchesItself(Protocol):
    """A layout whose runtime has a search of its own, which need not know all options."""

    @staticmethod
    def nearest(options: DecodeOptions) -> tuple[DecodeOptions, list[str]]:
        """The options without those that the search lacks, and what they were, each with its value and why."""
        ...
