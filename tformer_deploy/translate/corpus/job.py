"""Runs a job: translates the shards that the output folder lacks, lists all, and merges them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from ... import __version__
from ...base.errors import ConfigError, DataError
from ...base.files import sha256
from ...base.machine import cores
from ...base.settings import check_whole
from ...bundle.manifest import MANIFEST, Bundle, open_bundle
from ...engines import engine_name
from ...model.config import BATCH_TOKENS, WINDOW_BYTES
from ..batches import suitable_workers
from ..opening import TranslatorOptions, decoding_of, open_translator
from .output import ERRORS, JOB, VERSION, Output, Summary, stored
from .places import canonical, find_inputs, is_url, open_store
from .progress import Execute, Progress
from .rows import Columns
from .shards import Done, Shard, Work, cut, described, digest, translate_shard
from .storage import Input


@dataclass(frozen=True)
class CorpusOptions:
    """A job: inputs, output, and who translates."""

    inputs: Sequence[str]
    """Paths, URLs and patterns."""
    out: str
    """A folder or URL."""
    translator: TranslatorOptions
    """Its `workers`: batches in parallel, 0: one per core; on Ray: workers, 0: as many as fit."""
    column: str = "text"
    into: str = "translation"
    details: bool = False
    """Also write token ids; text inputs give lines of JSON."""
    shard_lines: int = 20_000
    """A shard ends with the first window (16 bytes for each of `batch_tokens`) that reaches so many lines."""
    merge: bool = False
    force: bool = False
    """Overwrite the output of another bundle, other options or other input."""
    strict: bool = False
    """Stop at the first line that cannot be translated."""
    address: str | None = None
    """Address of a Ray cluster; None: this machine, without Ray."""
    num_cpus: int = 1
    """Per worker on Ray."""
    num_gpus: float = 0.0
    retries: int = 5
    """How often a shard is retried whose worker was lost, on Ray."""

    def __post_init__(self) -> None:
        if not self.out:
            raise ConfigError("--out is empty: name a folder, or . for this one")
        check_whole("shard_lines", self.shard_lines, 1, 1 << 31)
        check_whole("num_cpus", self.num_cpus, 1, 1 << 16)
        check_whole("retries", self.retries, 0, 1 << 16)
        for name in () if self.address else ("num_cpus", "num_gpus", "retries"):
            if getattr(self, name) != getattr(CorpusOptions, name):
                raise ConfigError(f"{name} is of workers on Ray: give an address, or leave it out")


def translate_corpus(
    options: CorpusOptions, progress: Progress | None = None, execute: Execute | None = None
) -> Summary:
    """Translate the missing shards, and list all. After a kill, the same call continues.

    Raises TformerError; then what is done stays done.
    """
    progress, start = progress or Progress(), time.perf_counter()
    inputs = find_inputs(options.inputs)
    out, seen = canonical(options.out), set[str]()
    for each in inputs:
        place = canonical(each.place)
        if place.rpartition("/")[0] == out:
            raise ConfigError(f"{each.name} lies in the output folder, beside what is made of it: choose another --out")
        if place in seen:
            raise DataError(f"{each.name} is named twice: name each file once")
        seen.add(place)
    known = all(each.size or not is_url(each.place) for each in inputs)
    progress.total_bytes = sum(each.size for each in inputs) if known else 0
    store = open_store(options.out)
    with store.held():
        work = _work(options, inputs, stored(store))
        output = Output(store, work.format.suffix, options.force)
        job = _described(work, inputs)
        output.begin(job)
        shards = output.missing(cut(work, digest(job["work"]), inputs), progress.skip)
        if first := next(shards, None):  # workers start only if a shard is missing
            for done in (execute or _executor(options))(work, chain([first], shards), progress):
                output.write(done)
                progress.translated_shards += 1
                progress.changed()
        if not output.names:
            store.remove(JOB)  # which would keep the folder for this input
            raise DataError("the input has no line: name files that have some")
        summary = output.finish()
        if options.strict and summary.errors:
            raise DataError(f"{output.first_error()} (an earlier run without --strict left it empty: {ERRORS})")
        if options.merge:
            summary.merged = output.merge()
    progress.finish()
    summary.out, summary.existing_shards = options.out, progress.existing_shards
    summary.seconds = round(time.perf_counter() - start, 3)
    return summary


def here(work: Work, shards: Iterator[Shard], progress: Progress) -> Iterator[Done]:
    """Translate shards on this machine, one after the other, with all its cores."""
    with open_translator(work.translator) as translator:
        progress.workers = translator.settings.workers
        for shard in shards:
            yield translate_shard(translator, work, shard, progress.advance)


def _executor(options: CorpusOptions) -> Execute:
    if not options.address:
        return here
    from .on_ray import Cluster, Resources

    resources = Resources(options.translator.workers, options.num_cpus, options.num_gpus, options.retries)
    return Cluster(options.address, resources)


def _work(options: CorpusOptions, inputs: Sequence[Input], stored_job: dict[str, Any]) -> Work:
    """What is done with every shard; `stored_job`: the one in the output folder."""
    asked = options.translator
    bundle = asked.bundle if isinstance(asked.bundle, Bundle) else open_bundle(Path(asked.bundle), graphs=False)
    bundle.require_decoder()
    columns = Columns(options.column, options.into, options.details, asked.max_line_bytes)
    names, budget = tuple(each.last for each in inputs), (asked.batch_tokens or BATCH_TOKENS) * WINDOW_BYTES
    resolved = replace(asked, bundle=str(bundle.directory), decoding=decoding_of(bundle, asked.decoding))
    work = Work(resolved, names, columns, budget, options.shard_lines, options.strict)
    # Batches are those of `translate` on this machine, even on Ray, and the same when a job is continued.
    before = stored_job.get("work", {}).get("options", {})
    same = digest({**described(work), "least_batches": 0}) == digest({**before, "least_batches": 0})
    least = (same and before.get("least_batches")) or (0 if options.address else asked.workers)
    if not least:
        on_gpu = engine_name(asked.backend, asked.variant, bundle, asked.device).device == "cuda"
        least = 1 if on_gpu else _suitable(work, inputs)
    workers = asked.workers or (1 if least == 1 else cores())
    return replace(work, translator=replace(work.translator, least_batches=least, workers=workers))


def _suitable(work: Work, inputs: Sequence[Input]) -> int:
    """The workers that `tformer translate` would use for the largest input, by the lines of its first window."""
    largest = max(inputs, key=lambda each: each.size)
    window = next(cut(replace(work, shard_lines=1), "", [largest]), None)
    return suitable_workers(window.lines if window else 0)


def _described(work: Work, inputs: Sequence[Input]) -> dict[str, Any]:
    """What identifies a job: all that determines its output, and its inputs."""
    bundle = Path(str(work.translator.bundle))
    return {
        "format": "tformer-corpus",
        "version": VERSION,
        "work": {"tformer": __version__, "bundle": sha256(bundle / MANIFEST), "options": described(work)},
        "inputs": [[each.last, each.size] for each in inputs],
    }
