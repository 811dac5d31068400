"""Text that grows with its tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection

from ..bundle.text import Tokenizers


class TextStream:
    """Writes the text of one output piece by piece; the pieces together are the text of its result."""

    def __init__(self, tokenizers: Tokenizers, end_ids: Collection[int], write: Callable[[str], None]) -> None:
        self._tokenizers, self._end_ids, self._write = tokenizers, end_ids, write
        self._ids: list[int] = []
        self._written = 0

    def on_token(self, token: int) -> None:
        """Take the next token."""
        if token not in self._end_ids:
            self._ids.append(token)
            self.finish(self._tokenizers.settled_text(self._ids))

    def finish(self, text: str) -> None:
        """Write what is still missing of a text."""
        if len(text) > self._written:
            self._write(text[self._written :])
            self._written = len(text)
