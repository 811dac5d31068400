"""Parquet."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ...base.errors import ConfigError, DataError
from ...decoding import DecodeOptions
from ..translator import Result
from .cutting import Cutter
from .rows import ADDED, Columns, Part, Source

ROWS = 4096
"""Rows that are read at a time."""


class Parquet:
    """A row a sentence; columns are added to those that are there."""

    suffix = ".parquet"

    def __init__(self, columns: Columns) -> None:
        self.columns = columns

    def parts(self, file: BinaryIO, name: str, cutter: Cutter) -> Iterator[Part]:
        """See `Format`. A part is a stream of Arrow."""
        try:
            table = pq.ParquetFile(file)
            self._check(table.schema_arrow, name)
            held: list[Any] = []
            rows, each = 0, file.seek(0, io.SEEK_END) / max(1, table.metadata.num_rows)
            for batch in table.iter_batches(ROWS):
                start = 0
                for stop, size in enumerate(self._sizes(batch), 1):
                    if cutter.ends(size):
                        yield *_part([*held, batch[start:stop]]), int((rows + stop) * each)
                        held, start = [], stop
                held += [batch[start:]] if start < len(batch) else []
                rows += len(batch)
            if held:
                yield *_part(held), int(rows * each)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{name}: cannot be read: {error}: copy it again, or name another file") from None

    def _check(self, schema: Any, name: str) -> None:
        """Raises ConfigError where the column of text is missing, or the one to add is there."""
        column = self.columns.column
        if column not in schema.names:
            raise ConfigError(f"{name}: no column '{column}': name one of {', '.join(schema.names)} with --column")
        if schema.names.count(column) > 1:
            raise ConfigError(f"{name}: several columns '{column}': rename all but one")
        kind = schema.field(column).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise ConfigError(f"{name}: column '{column}' is {kind}, no text: name another one with --column")
        self.columns.check_free(schema.names, name)

    def _sizes(self, batch: Any) -> list[int]:
        return list(pc.fill_null(pc.binary_length(batch.column(self.columns.column)), 0).to_pylist())

    def sources(self, part: bytes) -> list[Source]:
        """See `Format`. A null is an empty line."""
        column = _table(part).column(self.columns.column).cast(pa.large_binary())
        return [Source.of(value or b"") for value in column.to_pylist()]

    def written(self, part: bytes, results: Sequence[Result], first: int, options: DecodeOptions) -> bytes:
        """See `Format`."""
        table = _table(part)
        rows = [self.columns.added(result, options) for result in results]
        for name, kind in self._added(options).items():
            table = table.append_column(name, pa.array([row[name] for row in rows], kind))
        file = io.BytesIO()
        pq.write_table(table, file)
        return file.getvalue()

    def _added(self, options: DecodeOptions) -> dict[str, Any]:
        """Types of the columns that are added."""
        into, ids = self.columns.into, pa.list_(pa.int32())
        of_one = {"text": pa.string(), "score": pa.float64(), **({"ids": ids} if self.columns.details else {})}
        kinds = (pa.string(), pa.float64(), ids, ids, pa.list_(pa.struct(list(of_one.items()))))
        every = {f"{into}{end}": kind for end, kind in zip(ADDED, kinds, strict=True)}
        return {name: every[name] for name in self.columns.added(Result("", [], 0.0), options)}


def _part(batches: list[Any]) -> tuple[bytes, int]:
    table = pa.Table.from_batches(batches).combine_chunks()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue().to_pybytes(), len(table)


def _table(part: bytes) -> Any:
    with pa.ipc.open_stream(part) as stream:
        return stream.read_all()


def join(parts: Iterator[bytes], out: BinaryIO) -> None:
    """Write the tables of some Parquet files as one file, one at a time in memory. Raises ConfigError where they have
    different columns.
    """
    writer: Any = None
    try:
        for part in parts:
            table = pq.read_table(io.BytesIO(part))
            writer = writer or pq.ParquetWriter(out, table.schema)
            if table.schema != writer.schema:
                other = next((field for field in table.schema if field not in list(writer.schema)), table.schema)
                raise ConfigError(f"the inputs differ in columns ({other}), so --merge cannot join them: leave it out")
            writer.write_table(table)
    finally:
        if writer:
            writer.close()
