"""The format of a corpus' files, by their names."""

from __future__ import annotations

from collections.abc import Sequence

from ...base.errors import ConfigError, DataError
from .compression import OTHERS, SUFFIXES
from .lines import JsonLines, Text
from .rows import Columns, Format

JSON_SUFFIXES = (".jsonl", ".ndjson")
PARQUET = ".parquet"
TARS = (".tar", ".tgz")


def format_of(names: Sequence[str], columns: Columns) -> Format:
    """The common format of files, by their names. Raises DataError for several formats."""
    for name in names:
        if name.lower().endswith(OTHERS):
            raise DataError(f"--in: {name}: cannot be unpacked: pack it anew with gzip or zstd, or unpack it")
        if _suffixes(name)[0] in TARS:
            raise DataError(f"--in: {name}: an archive of files: unpack it, and name those")
    suffixes = {_suffixes(name) for name in names}
    if len(suffixes) > 1:
        shown = ", ".join(sorted("".join(each) or "(no suffix)" for each in suffixes))
        raise DataError(f"--in: files of several formats ({shown}): translate those of each into a folder of its own")
    ((suffix, packing),) = suffixes
    if suffix == PARQUET:
        from .tables import Parquet

        return Parquet(columns)
    if suffix in JSON_SUFFIXES:
        return JsonLines(suffix, packing, columns)
    for name in ("column", "into"):
        if (given := getattr(columns, name)) != getattr(Columns, name):
            raise ConfigError(f"--{name} {given}: lines of text have no columns: leave it out")
    return Text(suffix, packing, columns)


def _suffixes(name: str) -> tuple[str, str]:
    """The suffixes of content and of compression in a file's name, such as `.txt` and `.gz`, in lower case."""
    last = name.rsplit("/", 1)[-1].lower()
    packing = next((suffix for suffix in SUFFIXES if last.endswith(suffix)), "")
    last = last.removesuffix(packing)
    return (f".{last.rsplit('.', 1)[1]}" if "." in last[1:] else ""), packing
