"""Shards on a Ray cluster: a worker is an actor that opens the bundle once. Ray places, starts and replaces them."""

from __future__ import annotations

import logging
import os
import socket
import stat
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # before it is imported; else it reports to its vendor
os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # of this process: our last line says what is lost

import ray
from filelock import FileLock
from ray.exceptions import RayError, RayTaskError

from ... import __version__
from ...base.errors import ArtifactError, ConfigError, EngineError, TformerError
from ...base.files import atomic_directory, sha256
from ...base.headers import member, read_header, read_json
from ...bundle import plans
from ...bundle.manifest import MANIFEST, open_bundle
from ..opening import open_translator
from ..translator import Translator
from .progress import Progress
from .shards import Done, Shard, Work, translate_shard

CONNECT_SECONDS = 10
"""Time for a cluster to answer."""
HEAD_SECONDS = 40
"""How long the head may be unreachable; less than the 60 seconds after which Ray ends this process."""
LOOK_SECONDS = 5
"""Between two checks that the head is there."""


@dataclass(frozen=True)
class Resources:
    """Resources of the workers."""

    workers: int
    """0: as many as fit at the start."""
    num_cpus: int
    num_gpus: float
    retries: int
    """How often a shard may be retried."""


class Cluster:
    """Executes shards on a running Ray cluster."""

    def __init__(self, address: str, resources: Resources) -> None:
        self.address, self.resources = address, resources

    def __call__(self, work: Work, shards: Iterator[Shard], progress: Progress) -> Iterator[Done]:
        """See `job.Execute`. Raises ConfigError where there is no cluster."""
        with connected(self.address):
            yield from _Team(work, self.resources, progress).run(shards)


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect this process to a Ray cluster, if it is not. Raises ConfigError where there is none."""
    try:
        host, _, port = address.rpartition(":")
        if host and port.isdecimal() and "/" not in host:  # Ray itself waits for minutes
            socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
        if ours := not ray.is_initialized():  # a program may have connected
            with _without_stderr():
                ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        words = " ".join(str(error).split())
        raise ConfigError(
            f"--address {address}: no Ray cluster answers ({words}): "
            "start one with `RAY_USAGE_STATS_ENABLED=0 ray start --head`"
        ) from None
    try:
        yield
    finally:
        if ours:
            ray.shutdown()


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Drop what is written to file descriptor 2: Ray's library says there that RAY_BACKEND_LOG_LEVEL is set."""
    saved = os.dup(2)
    try:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


class _Head:
    """The cluster's head, without which it cannot go on."""

    def __init__(self) -> None:
        self.address = ray.get_runtime_context().gcs_address
        self.looked = self.seen = time.monotonic()
        self.watched = self.answers()
        """False behind a proxy, where this process cannot connect to it."""

    def answers(self) -> bool:
        """Whether it takes a connection."""
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=LOOK_SECONDS).close()
        except (OSError, ValueError):
            return False
        return True

    def look(self, wait: bool = False) -> None:
        """Check now and then that the head is there; `wait` until it is. Raises EngineError if it stays away."""
        while self.watched and (wait or time.monotonic() - self.looked >= LOOK_SECONDS):
            self.looked = time.monotonic()
            if self.answers():
                self.seen = self.looked
                return
            if self.looked - self.seen >= HEAD_SECONDS:
                raise EngineError(
                    f"the head of the Ray cluster, {self.address}, is gone: start one again and run the same command, "
                    "which goes on with the shards that are missing"
                )
            if wait:
                time.sleep(1)


class _Team:
    """The workers and their shards."""

    def __init__(self, work: Work, resources: Resources, progress: Progress) -> None:
        bundle = Path(str(work.translator.bundle))
        files = {name: ray.put(member(bundle, name).read_bytes()) for name in files_of(bundle)}
        threads = work.translator.threads or 1
        translator = replace(work.translator, bundle=str(bundle.resolve()), workers=resources.num_cpus, threads=threads)
        self.work = ray.put(replace(work, translator=translator))
        self.start = ray.remote(Worker).options(
            num_cpus=resources.num_cpus, num_gpus=resources.num_gpus, max_restarts=0
        )
        self.files, self.sha256 = files, sha256(bundle / MANIFEST)
        self.resources, self.progress = resources, progress
        self.size, self.head = resources.workers or _workers_that_fit(resources), _Head()
        self.opening: dict[Any, Any] = {}
        """Workers that open the bundle, or wait for room, by their futures."""
        self.busy: dict[Any, tuple[Any, Shard]] = {}
        self.idle: list[Any] = []
        self.again: deque[Shard] = deque()
        """Shards to do again, as their workers were lost."""
        self.lost: Counter[str] = Counter()
        """Workers that each shard has lost, and ("") those that were lost before they had opened the bundle."""

    def run(self, shards: Iterator[Shard]) -> Iterator[Done]:
        """Give each idle worker the next shard. A lost worker is replaced, and its shard done again."""
        for _ in range(self.size):
            self.hire()
        while True:
            while self.idle and (shard := self.again.popleft() if self.again else next(shards, None)):
                worker = self.idle.pop()
                self.busy[worker.run.remote(shard)] = worker, shard
            if self.idle and not self.busy:
                return
            found_ready, _ = ray.wait([*self.busy, *self.opening], num_returns=1, timeout=LOOK_SECONDS)
            self.head.look()
            if not found_ready:
                continue
            (ready,) = found_ready
            worker, shard = self.busy.pop(ready, None) or (self.opening.pop(ready), None)
            found = self.result(ready, shard)
            if found is None:
                self.head.look(wait=True)  # as Ray itself waits for it without an end of ours
                self.hire()
            else:
                self.idle.append(worker)
            self.progress.workers = len(self.idle) + len(self.busy)
            if isinstance(found, Done):
                self.progress.advance(found.record["lines"], found.record["tokens"], shard.bytes if shard else 0)
                yield found

    def hire(self) -> None:
        """Ask for a worker; Ray starts it as soon as there is room, which may need a new machine."""
        worker = self.start.remote(self.work, self.sha256, self.files, __version__)
        self.opening[worker.open.remote()] = worker

    def result(self, ready: Any, shard: Shard | None) -> Done | str | None:
        """The result of a future; None where its worker was lost.

        Raises the worker's TformerError, and EngineError where workers are lost again and again.
        """
        try:
            found = ray.get(ready)
        except RayError as error:
            if isinstance(error, RayTaskError) and not isinstance(error.cause, RayError):  # a bug, or a full disk
                raise error.cause if isinstance(error.cause, Exception) else error from None
            name = shard.name if shard else ""
            self.lost[name] += 1
            if self.lost[name] > self.resources.retries * (1 if shard else self.size):
                what = f"{shard.input}, line {shard.line}" if shard else "opening the bundle"
                words = " ".join(str(error).split())
                raise EngineError(
                    f"{what}: {self.lost[name]} workers were lost: {words}; see the logs of Ray, or raise --retries"
                ) from None
            if shard:
                self.again.append(shard)
            return None
        if isinstance(found, TformerError):
            raise found
        if not shard:
            self.lost[""] = 0
        return found  # type: ignore[no-any-return]


class Worker:
    """Translates shards; lives in a process of its own, on any machine of the cluster."""

    def __init__(self, work: Work, bundle: str, files: dict[str, Any], version: str) -> None:
        self.work, self.bundle, self.files, self.version = work, bundle, files, version
        self.translator: Translator | None = None

    def open(self) -> str | TformerError:
        """Open the bundle. Returns the host's name, or the error."""
        try:
            if self.version != __version__:
                raise ConfigError(
                    f"{socket.gethostname()} has tformer {__version__}, the driver {self.version}: install the same"
                )
            folder = bundle_here(Path(str(self.work.translator.bundle)), self.bundle, self.files)
            self.translator = open_translator(replace(self.work.translator, bundle=folder))
        except TformerError as error:
            return error
        return socket.gethostname()

    def run(self, shard: Shard) -> Done | TformerError:
        """Translate a shard."""
        assert self.translator
        try:
            return translate_shard(self.translator, self.work, shard)
        except TformerError as error:
            return error


def files_of(bundle: Path) -> Iterator[str]:
    """The files that workers read: the manifest, and what it and plans' headers list. Raises ArtifactError."""
    yield from (MANIFEST, *read_json(bundle, MANIFEST)["files"])
    for header in sorted(bundle.glob(f"*/{plans.FOLDER}/[!.]*/{plans.HEADER}")):
        listed = read_header(header.parent, plans.HEADER, "plans", plans.VERSION)["files"]
        yield from (str(header.parent.relative_to(bundle) / name) for name in (plans.HEADER, *listed))


def bundle_here(shared: Path, wanted: str, files: dict[str, Any]) -> Path:
    """The bundle on this machine: where the driver has it, or a copy that the object store brought.

    `wanted`: SHA-256 of its manifest, which has those of all other files. Raises ArtifactError.
    """
    if (shared / MANIFEST).is_file() and sha256(shared / MANIFEST) == wanted:
        return shared
    place = Path(tempfile.gettempdir()) / f"tformer-bundles-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ArtifactError(f"{place} is not a folder that you alone can write to: remove it")
    copy = place / wanted
    with FileLock(f"{copy}.lock"):
        if not copy.is_dir():
            with atomic_directory(copy, force=False) as folder:
                for name, future in files.items():
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    (folder / name).write_bytes(ray.get(future))
    if sha256(copy / MANIFEST) != wanted:
        raise ArtifactError(f"{copy} was edited: remove it")
    open_bundle(copy)
    return copy


def _workers_that_fit(resources: Resources) -> int:
    """How many workers fit now; at least one, as Ray may add machines."""
    found = 0
    for node in ray.nodes():
        if node["Alive"]:
            has = node["Resources"]
            fits = int(has.get("CPU", 0) // resources.num_cpus)
            found += min(fits, int(has.get("GPU", 0) // resources.num_gpus)) if resources.num_gpus else fits
    return max(1, found)
