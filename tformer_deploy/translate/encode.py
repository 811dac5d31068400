"""Text to encoder outputs: a vector for each source token, or one pooled vector."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from ..base.errors import NotNumbers, TformerError
from ..base.lines import LINE_BYTES, MOST_LINE_BYTES
from ..base.settings import check_whole
from ..bundle.manifest import Bundle, open_bundle
from ..engines import MOST_BATCH_TOKENS, check_checkpoint, engine_name, make_encoder
from ..engines.base import Encoder, Floats
from ..model.config import BATCH_TOKENS
from .batches import length_batches, make_batch
from .pooling import NO_POOL, check_pool, pooled
from .requests import SourceReader, as_list
from .settings import check_model


@dataclass(frozen=True)
class Encoded:
    """The encoder's output for one line."""

    ids: list[int]
    """Source tokens as the encoder reads them; empty for an empty line."""
    vectors: Floats
    """(d); with pool `none` (S, d), a row a token. For an empty line zeros, or no row."""


@dataclass(frozen=True)
class EncoderOptions:
    """Which model encodes, and how."""

    bundle: str | Path | Bundle
    backend: str = "ort"
    """`ort`, `native` or `eager`."""
    variant: str | None = None
    """A variant other than the backend's default."""
    checkpoint: str | Path | None = None
    """For `eager`: the run folder, if it has moved since the export."""
    threads: int = 0
    """0: one per core."""
    pool: str = "mean"
    """`mean`, `first` or `last` of a source's vectors; `none`: all of them."""
    batch_tokens: int = BATCH_TOKENS
    """Padded source tokens of a batch."""
    max_line_bytes: int = LINE_BYTES
    """Longer lines are refused."""

    def __post_init__(self) -> None:
        variant = "" if self.variant is None else self.variant
        check_model(self.bundle, self.checkpoint, backend=self.backend, variant=variant, pool=self.pool)
        check_pool(self.pool)
        check_whole("batch_tokens", self.batch_tokens, 1, MOST_BATCH_TOKENS)
        check_whole("max_line_bytes", self.max_line_bytes, 1, MOST_LINE_BYTES)


class TextEncoder:
    """An open encoder. Use it in a `with` statement, which frees its device at the end."""

    def __init__(self, options: EncoderOptions) -> None:
        """Raises TformerError, also where the bundle has no graph for it."""
        bundle, run = options.bundle, options.checkpoint
        bundle = bundle if isinstance(bundle, Bundle) else open_bundle(Path(bundle), graphs=False)
        name = engine_name(options.backend, options.variant, bundle)
        check_checkpoint(run, [name])
        self.options, self.tokenizers = options, bundle.tokenizers()
        self.engine: Encoder = make_encoder(name, bundle, Path(run) if run else None, options.threads)
        self.width = bundle.config.encoder.width
        """Size of a vector."""

    def __enter__(self) -> Self:
        self.engine.__enter__()
        return self

    def __exit__(self, *why: object) -> None:
        self.engine.__exit__(*why)

    def encode(self, lines: Iterable[str]) -> list[Encoded]:
        """Encode each line.

        Raises errors that name the line: LimitError for a source that is too long, DataError for a line that is not
        text, NotNumbers for NaN or infinite vectors.
        """
        return list(self.results(lines))

    def results(self, lines: Iterable[str], first: int = 0) -> Iterator[Encoded]:
        """Like `encode`, but yields the results before a bad line and then raises. Lines are numbered from `first`."""
        sources: list[list[int]] = []
        failure: TformerError | None = None
        engine = self.engine
        reader = SourceReader(self.tokenizers, engine.config, engine.limits, self.options.max_line_bytes)
        try:
            for number, text in enumerate(as_list("lines", lines), first + 1):
                sources.append(reader.line(text, number))
        except TformerError as error:
            failure = error
        yield from self._encode(sources, first)
        if failure:
            raise failure

    def _encode(self, sources: list[list[int]], first: int) -> Iterator[Encoded]:
        """Ids to vectors, in batches of similar length, up to the first NaN or infinity. Raises NotNumbers for that."""
        pool, limits = self.options.pool, self.engine.limits
        empty = np.zeros((0, self.width) if pool == NO_POOL else self.width, np.float32)
        encoded = [Encoded(ids, empty) for ids in sources]
        finite = len(sources)
        most = lambda longest: limits.sentences(1, longest, 1)  # noqa: E731
        for indices in length_batches([len(ids) for ids in sources], self.options.batch_tokens, most):
            batch = make_batch([sources[i] for i in indices], self.engine.config.pad_id)
            memory = self.engine.memory(batch.src_ids, batch.src_lengths)
            for row, i in enumerate(indices):
                vectors = pooled(memory[row, : len(sources[i])], pool)
                if not np.isfinite(vectors).all():
                    finite = min(finite, i)
                encoded[i] = Encoded(sources[i], vectors.copy())
        yield from encoded[:finite]
        if finite < len(sources):
            raise NotNumbers(f"line {first + finite + 1}: NaN or infinite encoder outputs: check the weights", finite)
