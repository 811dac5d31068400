"""Text that grows with its tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from ..bundle.text import Tokenizers
from ..decoding import Step


class TextStream:
    """Writes the text of one output piece by piece; the pieces together are the text of its result."""

    def __init__(self, tokenizers: Tokenizers, end_ids: Collection[int], write: Callable[[str], None]) -> None:
        self._tokenizers, self._end_ids, self._write = tokenizers, end_ids, write
        self._ids: list[int] = []
        self._written = 0

    def on_step(self, step: Step) -> None:
        """Take the token of a step of one sentence and one row."""
        token = int(step.tokens[0, 0])
        if token >= 0 and step.values[0, 0] > -np.inf and token not in self._end_ids:
            self._ids.append(token)
            self.finish(self._tokenizers.settled_text(self._ids))

    def finish(self, text: str) -> None:
        """Write what is still missing of a text."""
        if len(text) > self._written:
            self._write(text[self._written :])
            self._written = len(text)
