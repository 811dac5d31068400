"""Text as published scores take it: lower case, plain punctuation, Moses' tokens. By sacremoses.

The order of the steps is that of the Multi30K data set's own script, whose files are named `lc.norm.tok`.
"""

from __future__ import annotations

from sacremoses import MosesDetokenizer, MosesPunctNormalizer, MosesTokenizer


class Moses:
    """The steps for one language; unknown languages are split by the rules of English."""

    def __init__(self, language: str) -> None:
        self._normalizer = MosesPunctNormalizer(language)
        self._tokenizer, self._detokenizer = MosesTokenizer(language), MosesDetokenizer(language)

    def prepared(self, line: str) -> str:
        """A line of usual text in lower case, as tokens with a space between them; `'` and `"` become entities."""
        return str(self._tokenizer.tokenize(self._normalizer.normalize(line.lower()), return_str=True))

    def joined(self, line: str) -> str:
        """A line of tokens as usual text; its case stays lower."""
        return str(self._detokenizer.detokenize(line.split()))
