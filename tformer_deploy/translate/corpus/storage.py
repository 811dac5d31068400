"""What a job needs of the place where a corpus lies, whatever place it is."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import BinaryIO, Protocol

RECORDS = "records"
"""The folder inside an output folder with what became of each shard."""


@dataclass(frozen=True)
class Input:
    """A file to read."""

    name: str
    """Path or URL, as records and messages show it."""
    size: int
    """Bytes; 0 where a server does not say it."""
    url: str = ""
    """What is opened, where that has a password or a signature, which `name` has not."""

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
        """Files that lie in it."""

    def read(self, name: str) -> bytes:
        """What a file holds."""

    def write(self, name: str, content: bytes) -> None:
        """Put a file there, whole or not at all."""

    def writing(self, name: str) -> AbstractContextManager[BinaryIO]:
        """A file that appears when the block succeeds."""

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""

    def held(self) -> AbstractContextManager[None]:
        """Be the only process of this machine that writes there, where the place knows locks."""
