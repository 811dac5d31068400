"""`tformer corpus` on a real Ray cluster of several nodes on this machine: the same bytes, whatever is killed.

TFORMER_CORPUS_KILLS=20 kills more often; TFORMER_CORPUS_SEED makes the moments others.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="the extra cluster is not installed")

import ray
from ray.cluster_utils import Cluster

from tformer_deploy.base.errors import ArtifactError, EngineError
from tformer_deploy.base.files import sha256
from tformer_deploy.bundle.manifest import MANIFEST, open_bundle
from tformer_deploy.translate.corpus import on_ray
from tformer_deploy.translate.corpus.job import CorpusOptions, translate_corpus
from tformer_deploy.translate.corpus.output import LIST
from tformer_deploy.translate.opening import TranslatorOptions, open_translator

from .command import COMMAND, failed_line, run_here
from .test_corpus import BUNDLE, number_lines, shards, write

KILLS = int(os.environ.get("TFORMER_CORPUS_KILLS", 3))
SEED = int(os.environ.get("TFORMER_CORPUS_SEED", 1))
OPTIONS = ("--batch-tokens", 64, "--beams", 5, "--n-best", 2)
"""Windows of 1,024 bytes."""
LINES = number_lines(6000)
FEW = LINES[:1200]
"""Enough that the first two workers are not done before the third is there."""


class Machines:
    """A head without cores, and two nodes of two cores each."""

    def __init__(self) -> None:
        self.cluster = Cluster(initialize_head=True, head_node_args={**self.size(0), "include_dashboard": False})
        self.nodes = [self.cluster.add_node(**self.size(2)) for _ in range(2)]
        self.address = self.cluster.address

    def size(self, cores: int) -> dict[str, int]:
        return {"num_cpus": cores, "object_store_memory": 80 << 20}

    def workers(self) -> list[int]:
        """Processes of workers of ours."""
        raylets = {each.process.pid for node in self.nodes for each in node.all_processes["raylet"]}
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if parent in raylets and (folder / "cmdline").read_bytes().startswith(b"ray::Worker"):
                    found.append(int(folder.name))
            except OSError:  # it has ended
                continue
        return found

    def lose_node(self, number: int) -> None:
        """Kill all of a node, and start another one."""
        self.cluster.remove_node(self.nodes.pop(number), allow_graceful=False)
        self.nodes.append(self.cluster.add_node(**self.size(2)))


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    place = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # short: the names of sockets are made of it
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_TMPDIR", "TMPDIR"):
            patch.setenv(name, place)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        found = Machines()
        yield found
        found.cluster.shutdown()
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("text") / "a.txt", LINES)


@pytest.fixture(scope="module")
def expected(text: Path) -> bytes:
    done = run_here("translate", BUNDLE, *OPTIONS, stdin=text.read_bytes())
    assert done.returncode == 0
    return done.stdout


def command(machines: Machines, text: Path, out: Path, *more: object) -> list[str]:
    where = ("--in", text, "--out", out, "--address", machines.address)
    return [str(word) for word in (*COMMAND, "corpus", BUNDLE, *OPTIONS, *where, "--merge", "--json", *more)]


def check(out: Path, expected: bytes, count: int = len(LINES)) -> list[dict[str, Any]]:
    """No line is lost, none is there twice, and every file is listed."""
    assert (out / "merged.txt").read_bytes() == expected
    listed = [json.loads(line) for line in (out / LIST).read_text().splitlines()]
    assert [record["first"] for record in listed] == [0, *accumulate(record["lines"] for record in listed[:-1])]
    assert sum(record["lines"] for record in listed) == count
    assert [record["file"] for record in listed] == [path.name for path in shards(out)]
    assert not list(out.rglob(".*"))
    return listed


def test_a_few_lines_equal_translate(machines: Machines, tmp_path: Path) -> None:
    """Three workers need both nodes."""
    text = write(tmp_path / "few.txt", FEW)
    direct = run_here("translate", BUNDLE, *OPTIONS, stdin=text.read_bytes())
    words = command(machines, text, tmp_path / "out", "--workers", 3, "--shard-lines", 50)
    done = subprocess.run(words, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    check(tmp_path / "out", direct.stdout, len(FEW))
    assert json.loads(done.stderr.splitlines()[-1])["workers"] == 3


def test_only_the_bundles_own_files_are_sent(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(BUNDLE, tmp_path / "bundle"))
    for name in ("int8/notes", ".git/config"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
    assert {*on_ray.files_of(folder)} == {MANIFEST, *open_bundle(folder).manifest["files"]}
    plans = folder / "trt/plans/sm80+-fp16"
    plans.mkdir(parents=True)
    header = {"format": "tformer-plans", "version": 1, "files": {"a.plan": "0" * 64}}
    (plans / "plans.json").write_text(json.dumps(header))
    with pytest.raises(ArtifactError, match=r"plans\.json is damaged"):
        list(on_ray.files_of(folder))


@pytest.mark.long
@pytest.mark.parametrize(("workers", "size"), [(1, 3000), (4, 100)])
def test_equals_translate(
    machines: Machines, text: Path, expected: bytes, workers: int, size: int, tmp_path: Path
) -> None:
    """Four workers need both nodes."""
    more = ("--workers", workers, "--shard-lines", size)
    done = subprocess.run(command(machines, text, tmp_path / "out", *more), capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    listed = check(tmp_path / "out", expected)
    assert len({record["worker"] for record in listed}) == workers
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert lines[-1]["workers"] == workers and lines[-1]["lines"] == len(LINES)


@pytest.mark.long
def test_kills_at_random_moments(machines: Machines, text: Path, expected: bytes, tmp_path: Path) -> None:
    """Of a worker, of a node, of the driver, which is started again."""
    rng, kinds = random.Random(SEED), ["worker", "node", "driver"]
    left = [kinds[i % 3] for i in range(KILLS)]
    rng.shuffle(left)
    job, counts = 0, []
    while left:
        job += 1
        out = tmp_path / f"out{job}"
        running = start(machines, text, out)
        while running.poll() is None and left:
            time.sleep(rng.uniform(0.1, 3))
            if running.poll() is None and kill(machines, left[-1], running, rng):
                counts.append((left.pop(), len(shards(out)) if out.exists() else 0))
                if running.poll() is not None or counts[-1][0] == "driver":
                    running.wait(20)
                    running = start(machines, text, out)
        said = running.communicate(timeout=240)
        assert running.returncode == 0, said
        check(out, expected)
    print(f"{len(counts)} kills in {job} jobs (what, shards that were there): {counts}")
    assert len(counts) == KILLS


def start(machines: Machines, text: Path, out: Path) -> subprocess.Popen[bytes]:
    words = command(machines, text, out, "--shard-lines", 40)
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def kill(machines: Machines, what: str, driver: subprocess.Popen[bytes], rng: random.Random) -> bool:
    """Whether there was one to kill."""
    if what == "driver":
        driver.kill()
    elif what == "node":
        machines.lose_node(rng.randrange(2))
    elif found := machines.workers():
        os.kill(rng.choice(found), signal.SIGKILL)
    else:
        return False
    return True


@pytest.mark.long
def test_a_bad_line_of_a_worker_is_one_clear_line(machines: Machines, tmp_path: Path) -> None:
    text = write(tmp_path / "a.txt", [*LINES[:50], "1 " * 40])
    words = ("--in", text, "--out", tmp_path / "out", "--address", machines.address)
    line = failed_line(run_here("corpus", BUNDLE, *OPTIONS, *words, "--strict"))
    assert "a.txt:51: a source of 41 tokens exceeds the limit of 16" in line


def test_a_cluster_that_is_not_there(text: Path, tmp_path: Path) -> None:
    where = ("--in", text, "--out", tmp_path / "out", "--address", "127.0.0.1:1")
    assert "--address 127.0.0.1:1: no Ray cluster answers" in failed_line(run_here("corpus", BUNDLE, *where))


@pytest.mark.long
def test_the_bundle_comes_by_the_object_store(machines: Machines, tmp_path: Path) -> None:
    """Where a machine does not see the driver's folder, or sees another bundle there."""
    ray.init(machines.address, log_to_driver=False, logging_level="ERROR")
    try:
        files = {name: ray.put((BUNDLE / name).read_bytes()) for name in on_ray.files_of(BUNDLE)}
        wanted, there = sha256(BUNDLE / MANIFEST), ray.remote(on_ray.bundle_here)
        assert ray.get(there.remote(BUNDLE, wanted, files)) == BUNDLE
        other = BUNDLE.parent / "names"
        copies = ray.get([there.remote(place, wanted, files) for place in (tmp_path / "nowhere", other, other)])
        assert len(set(copies)) == 1 and copies[0].name == wanted
        assert {path.relative_to(copies[0]).as_posix() for path in copies[0].rglob("*") if path.is_file()} == {*files}
        with open_translator(TranslatorOptions(copies[0])) as copy, open_translator(TranslatorOptions(BUNDLE)) as own:
            assert copy.translate(LINES[:5]) == own.translate(LINES[:5])
    finally:
        ray.shutdown()


@pytest.mark.long
def test_workers_that_die_again_and_again_end_the_job(
    machines: Machines, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def options(name: str) -> CorpusOptions:
        translator = TranslatorOptions(BUNDLE, workers=2, batch_tokens=64)
        return CorpusOptions([str(text)], str(tmp_path / name), translator, address=machines.address, retries=1)

    class Dying(on_ray.Worker):  # of this function, so that it travels by value
        def run(self, shard: Any) -> Any:
            os._exit(1)

    class NeverOpen(on_ray.Worker):
        def open(self) -> Any:
            os._exit(1)

    monkeypatch.setattr(on_ray, "Worker", Dying)
    with pytest.raises(EngineError, match=r"a.txt, line 1: 2 workers were lost: .*--retries"):
        translate_corpus(options("dying"))
    monkeypatch.setattr(on_ray, "Worker", NeverOpen)
    with pytest.raises(EngineError, match=r"opening the bundle: 3 workers were lost: .*--retries"):
        translate_corpus(options("never"))
    assert not ray.is_initialized()


@pytest.mark.long
@pytest.mark.parametrize("nodes", [False, True])
def test_a_head_that_is_gone_is_one_line_and_the_same_command_goes_on(
    nodes: bool, machines: Machines, text: Path, expected: bytes, tmp_path: Path
) -> None:
    """Before Ray ends the process, with a log of its own; alone, or with all other machines."""
    lost, out = Machines(), tmp_path / "out"
    with (tmp_path / "said").open("wb") as said:
        process = subprocess.Popen(command(lost, text, out, "--shard-lines", 100), stdout=said, stderr=said)
        while not (out.is_dir() and shards(out)):
            assert process.poll() is None
            time.sleep(0.1)
        for node in [lost.cluster.head_node, *(lost.nodes if nodes else [])]:
            for each in chain.from_iterable(node.all_processes.values()):
                each.process.kill()
        assert process.wait(120) == 1
    *_, last = (tmp_path / "said").read_text().splitlines()
    assert last.startswith("error: the head of the Ray cluster, ") and "run the same command, which goes on" in last
    lost.cluster.shutdown()
    done = subprocess.run(command(machines, text, out, "--shard-lines", 100), capture_output=True, timeout=300)
    assert done.returncode == 0 and json.loads(done.stdout)["existing_shards"] > 0
    assert (out / "merged.txt").read_bytes() == expected


def test_usage_reports_are_off() -> None:
    code = (
        "import tformer_deploy.translate.corpus.on_ray\n"
        "from ray._common.usage.usage_lib import usage_stats_enabled\n"
        "print(usage_stats_enabled())"
    )
    env = {name: value for name, value in os.environ.items() if name != "RAY_USAGE_STATS_ENABLED"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.long
def test_another_version_is_refused(
    machines: Machines, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_ray, "__version__", "0.0.1")
    done = run_here("corpus", BUNDLE, "--in", text, "--out", tmp_path / "out", "--address", machines.address)
    assert "the driver 0.0.1: install the same" in failed_line(done)
