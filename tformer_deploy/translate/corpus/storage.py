"""The interface of places that hold a corpus."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import BinaryIO, Protocol

RECORDS = "records"
"""The folder of shards' records inside an output folder."""


@dataclass(frozen=True)
class Input:
    """A file to read."""

    name: str
    """Path or URL, as records and messages show it."""
    size: int
    """Bytes; 0: a server does not say how many."""
    url: str = ""
    """The place to open, where it has a password or signature that `name` leaves out."""

    @property
    def place(self) -> str:
        """Path or URL to open."""
        return self.url or self.name

    @property
    def last(self) -> str:
        """The name without its folders."""
        return self.name.rsplit("/", 1)[-1]


class Store(Protocol):
    """A folder to write into."""

    def names(self) -> set[str]:
        """Names of its files."""

    def read(self, name: str) -> bytes:
        """The content of a file."""

    def write(self, name: str, content: bytes) -> None:
        """Write a file, whole or not at all."""

    def writing(self, name: str) -> AbstractContextManager[BinaryIO]:
        """A file that appears when the block succeeds."""

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""

    def held(self) -> AbstractContextManager[None]:
        """Hold an exclusive lock among processes of this machine, where the place has locks."""
