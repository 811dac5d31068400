"""The output folder of a job: its shards, a record of each, the manifest, and the merged file."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ...base.errors import ArtifactError
from ...base.headers import parse_json
from .formats import PARQUET
from .shards import Done, Shard, digest
from .storage import RECORDS, Store

JOB, LIST, ERRORS, VERSION = "job.json", "manifest.jsonl", "errors.jsonl", 1
MERGED = "merged"
"""Name of the one file of all shards, without its suffix."""
READERS = 16
"""Records that are read at a time."""
_SHARD = re.compile(r"(?P<first>\d{12})-[0-9a-f]{16}(\.[^/]+)?")


@dataclass
class Summary:
    """The result of a job."""

    out: str = ""
    lines: int = 0
    shards: int = 0
    existing_shards: int = 0
    """Shards that were there from an earlier run."""
    damaged: list[str] = field(default_factory=list)
    """Shards of an earlier run that had changed since, and were made again."""
    errors: int = 0
    """Lines that could not be translated; their outputs are empty."""
    cut: int = 0
    """Outputs that were cut off at a limit."""
    tokens: int = 0
    seconds: float = 0.0
    """Duration of this run."""
    merged: str = ""


class Output:
    """Writes a job's files. Each appears whole; a shard's record is written before the shard."""

    def __init__(self, store: Store, suffix: str, force: bool) -> None:
        self.store, self.suffix, self.force = store, suffix, force
        self.job: dict[str, Any] = {}
        """Bundle, options and inputs of the shards."""
        self.names: list[str] = []
        """The files of all shards so far, in order."""
        self.damaged: list[str] = []
        """Shards that were there, but had changed since they were written."""

    def begin(self, job: dict[str, Any]) -> None:
        """Say what job this is. Raises ArtifactError where the folder has another one, unless it may be replaced, or
        files of the names of a job's that are of none.
        """
        self.job = json.loads(json.dumps(job))
        stored_job = stored(self.store)
        if stored_job and stored_job != self.job and not self.force:
            raise ArtifactError(
                f"the output folder holds another job ({_difference(stored_job, self.job)}): "
                "choose another folder, or add --force to replace it"
            )
        if stored_job == self.job and not self.force:
            return
        own = {name for name in self.store.names() if name in (LIST, ERRORS) or name.partition(".")[0] == MERGED}
        if own and not stored_job:
            raise ArtifactError(
                f"{min(own)} in the output folder is of no job: choose another folder, or move the file"
            )
        for name in own:
            self.store.remove(name)
        if stored_job.get("work") != self.job["work"]:
            self._remove(_shards(self.store))
        self.store.write(
            JOB, json.dumps(self.job, indent=2, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        )

    def missing(self, shards: Iterator[Shard], skip: Callable[[Shard], None]) -> Iterator[Shard]:
        """The shards that are not there as they were written; `skip` gets the others.

        Raises ArtifactError where the text has changed.
        """
        there = {name[:12]: name for name in _shards(self.store)}
        self.damaged = self._damaged(sorted(there.values()))
        for shard in shards:
            self.names.append(shard.name + self.suffix)
            old = there.get(shard.name[:12])
            if old == self.names[-1] and old not in self.damaged:
                skip(shard)
                continue
            if old and old != self.names[-1] and not self.force:
                raise ArtifactError(
                    f"{shard.input}, lines {shard.line} to {shard.line + shard.lines - 1}: not the text of {old}, "
                    "which an earlier run made of them: choose another folder, or add --force to replace it"
                )
            yield shard

    def _damaged(self, shards: list[str]) -> list[str]:
        """Which are not what their records say; several are read at a time."""

        def is_whole(shard: str) -> bool:
            try:
                return bool(hashlib.sha256(self.store.read(shard)).hexdigest() == self._record_of(shard)["sha256"])
            except (ArtifactError, KeyError):
                return False

        with ThreadPoolExecutor(READERS) as pool:
            return [shard for shard, whole in zip(shards, pool.map(is_whole, shards), strict=True) if not whole]

    def write(self, done: Done) -> None:
        """Write a shard."""
        self.store.write(_record(done.name), _line(done.record))
        self.store.write(done.name + self.suffix, done.content)

    def finish(self) -> Summary:
        """Write the manifest and the list of errors. Raises ArtifactError where the folder is another job's now, or has
        shards of other input.
        """
        if stored(self.store) != self.job:
            raise ArtifactError(f"another job has taken the output folder ({JOB}): give each a folder of its own")
        others = _shards(self.store) - set(self.names)
        if others and not self.force:
            raise ArtifactError(
                f"{min(others)}: not of this input, which had other lines when it was made: "
                "choose another folder, or add --force to remove it"
            )
        self._remove(others)
        summary = Summary(damaged=[name for name in self.damaged if name in self.names])
        hashes = {"bundle": self.job["work"]["bundle"], "options": digest(self.job["work"]["options"])}
        with self.store.writing(ERRORS) as errors, self.store.writing(LIST) as listed:
            for record in self._records():
                errors.writelines(_line(error) for error in record["errors"])
                record["errors"] = len(record["errors"])
                listed.write(_line({**record, **hashes}))
                summary.shards += 1
                for name in ("lines", "tokens", "errors", "cut"):
                    setattr(summary, name, getattr(summary, name) + record[name])
        return summary

    def first_error(self) -> str:
        """The place and error of the first line that could not be translated."""
        error = json.loads(self.store.read(ERRORS).partition(b"\n")[0])
        return f"{error['input']}:{error['line']}: {error['error']}"

    def merge(self) -> str:
        """Write all shards as one file; its name. Raises ArtifactError for one that is not what was written."""
        with self.store.writing(f"{MERGED}{self.suffix}") as file:
            if self.suffix == PARQUET:
                from .tables import join

                join(self._contents(), file)
            else:
                file.writelines(self._contents())
        return f"{MERGED}{self.suffix}"

    def _contents(self) -> Iterator[bytes]:
        for record in self._records():
            content = self.store.read(record["file"])
            if hashlib.sha256(content).hexdigest() != record["sha256"]:
                raise ArtifactError(f"{record['file']} was edited or damaged: remove it, and run the command again")
            yield content

    def _records(self) -> Iterator[dict[str, Any]]:
        """The records of all shards; several are read in parallel, as stores are slow to answer."""
        with ThreadPoolExecutor(READERS) as pool:
            for start in range(0, len(self.names), 16 * READERS):
                yield from pool.map(self._record_of, self.names[start : start + 16 * READERS])

    def _record_of(self, shard: str) -> dict[str, Any]:
        try:
            found = parse_json(self.store.read(_record(shard)).decode("utf-8"))
            counts = {name: int(found[name]) for name in ("lines", "tokens", "cut")}
            return {**found, **counts, "file": shard, "errors": [{**error} for error in found["errors"]]}
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            raise ArtifactError(
                f"{_record(shard)} is missing or damaged: remove {shard}, and run the command again"
            ) from None

    def _remove(self, shards: Iterable[str]) -> None:
        for name in sorted(shards):
            self.store.remove(name)
            self.store.remove(_record(name))


def stored(store: Store) -> dict[str, Any]:
    """The job in a folder, or an empty dict. Raises ArtifactError where something else is there."""
    if JOB not in store.names():
        if shards := _shards(store):
            raise ArtifactError(f"{min(shards)}: shards without {JOB}: remove them, or choose another folder")
        return {}
    try:
        found = parse_json(store.read(JOB).decode("utf-8"))
        if found["format"] != "tformer-corpus" or not isinstance(found["work"]["options"], dict):
            raise ValueError("of another format")
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{JOB} is damaged ({error}): remove it and the shards beside it") from None
    return dict(found)


def _shards(store: Store) -> set[str]:
    return {name for name in store.names() if _SHARD.fullmatch(name)}


def _record(shard: str) -> str:
    """Path of a shard's record; `shard`: its name, or that of its file."""
    return f"{RECORDS}/{shard.split('.')[0]}.json"


def _line(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def _difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """The first difference between two jobs."""
    for name in ("tformer", "bundle"):
        if old["work"].get(name) != new["work"][name]:
            return f"{name} was {old['work'].get(name)!s:.12}, is {new['work'][name]!s:.12}"
    options = old["work"]["options"], new["work"]["options"]
    for name, value in options[1].items():
        if options[0].get(name) != value:
            return f"{name} was {options[0].get(name)!s:.60}, is {value!s:.60}"
    for one, other in zip(old.get("inputs", []), new["inputs"], strict=False):
        if one != other:
            return f"input {one[0]} of {one[1]} bytes, now {other[0]} of {other[1]} bytes"
    return f"{len(old.get('inputs', []))} inputs, now {len(new['inputs'])}"
