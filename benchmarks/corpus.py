"""What `tformer corpus` costs: its speed beside `tformer translate`, its memory, and what its driver can do.

speed BUNDLE --text FILE: whole commands in turns, on Ray too where it is installed.
memory BUNDLE --text FILE: peak memory for 100,000 and 1,000,000 lines.
driver --text FILE: no model; shards are cut, given to workers that answer at once, and written.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from tformer_deploy.base.processes import in_turn, peak_mib, repeat
from tformer_deploy.translate.corpus.job import CorpusOptions, translate_corpus
from tformer_deploy.translate.corpus.progress import Progress
from tformer_deploy.translate.corpus.shards import Done, Shard, Work
from tformer_deploy.translate.opening import TranslatorOptions

from .whole import run_whole

COMMAND = [sys.executable, "-m", "tformer_deploy"]
BILLION = 1_000_000_000


def main() -> None:
    """Measure what the first word names, and print it."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.corpus", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["speed", "memory", "driver"])
    parser.add_argument("bundle", type=Path, nargs="?", help="for speed and memory")
    parser.add_argument("--text", type=Path, help="plain text, a sentence a line; repeated as often as needed")
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=256)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(globals()[options.what](options, Path(folder)), indent=1))


def speed(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Seconds and seconds of a core that each takes, and its share of translate's speed within a round."""
    text = repeated(options.text, options.lines, folder / "text.txt")
    more = ["--max-tokens", str(options.max_tokens)]
    with cluster() as address:
        names = ["translate", "corpus", *(["ray"] if address else [])]
        seconds: dict[str, list[float]] = {name: [] for name in names}
        cores: dict[str, list[float]] = {name: [] for name in names}
        for number in range(options.rounds):
            for name in in_turn(names, number):
                start, meter = time.perf_counter(), Meter()
                if name == "translate":
                    out = run_whole([*COMMAND, name, str(options.bundle), *more], text.read_text())[0]
                else:
                    shutil.rmtree(folder / "out", ignore_errors=True)
                    where = ["--in", str(text), "--out", str(folder / "out")]
                    there = ["--address", address] if name == "ray" else []
                    run_whole([*COMMAND, "corpus", str(options.bundle), *where, *there, *more])
                seconds[name].append(round(time.perf_counter() - start, 2))
                cores[name].append(round(meter.read(), 2))
                print(name, seconds[name][-1], cores[name][-1], file=sys.stderr)
    shards = sorted((folder / "out").glob("*.txt"))
    assert "".join(path.read_text() for path in shards) == out, "corpus and translate differ"
    records = [json.loads(line) for line in (folder / "out/manifest.jsonl").read_text().splitlines()]
    tokens = sum(record["tokens"] for record in records)
    return {
        "lines": options.lines,
        "shards": len(records),
        "tokens": tokens,
        "seconds": seconds,
        "core_seconds": cores,
        "tokens_per_second": {name: round(tokens / statistics.median(each)) for name, each in seconds.items()},
        "of_translate": {"seconds": ratios(seconds), "core_seconds": ratios(cores)},
    }


def ratios(taken: dict[str, list[float]]) -> dict[str, float]:
    """The median of the ratios to translate's speed within a round."""
    pairs = {name: zip(taken["translate"], each, strict=True) for name, each in taken.items()}
    return {name: round(statistics.median(one / other for one, other in each), 3) for name, each in pairs.items()}


class Meter:
    """Seconds of a core that this process' children take, and all below them, Ray's workers too."""

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}
        """Clock ticks of each process that lives or has lived, by its number."""
        self.stop = threading.Event()
        self.look()
        self.before = dict(self.seen)
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def _watch(self) -> None:
        while not self.stop.wait(0.2):
            self.look()

    def look(self) -> None:
        """Note what every process below this one has taken."""
        parents, ticks = {}, {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                parents[int(folder.name)], ticks[int(folder.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
        for number in parents:
            above = number
            while (above := parents.get(above, 0)) and above != os.getpid():
                pass
            if above:
                self.seen[number] = ticks[number]

    def read(self) -> float:
        """What they have taken since it was made, but for the last 0.2 s of those that have ended."""
        self.stop.set()
        self.thread.join()
        taken = sum(ticks - self.before.get(number, 0) for number, ticks in self.seen.items())
        return taken / os.sysconf("SC_CLK_TCK")


def memory(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Peak MiB of the whole command."""
    found = {}
    for lines in (options.lines, 10 * options.lines):
        text = repeated(options.text, lines, folder / "text.txt")
        where = ["--in", str(text), "--out", str(folder / f"out{lines}"), "--max-tokens", str(options.max_tokens)]
        _, seconds, mib = run_whole([*COMMAND, "corpus", str(options.bundle), *where])
        found[lines] = {"seconds": round(seconds, 1), "peak_mib": round(mib, 1)}
    return found


def driver(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What the driver takes for a shard of 20,000 lines, and for a billion lines."""
    found: dict[str, Any] = {}
    bundle = Path(__file__).parent.parent / "tests/bundles/v2/copy"
    for suffix in (".txt", ".txt.gz", ".jsonl"):
        text = folder / f"text{suffix}"
        with gzip.open(text, "wb") if suffix.endswith(".gz") else text.open("wb") as file:
            for line in lines_of(options.text, options.lines):
                is_row = suffix == ".jsonl"
                file.write(json.dumps({"id": 1, "text": line.decode().strip()}).encode() + b"\n" if is_row else line)
        asked = CorpusOptions([str(text)], str(folder / f"out{suffix}"), TranslatorOptions(bundle))
        ((seconds, made),) = repeat(lambda asked=asked: translate_corpus(asked, execute=at_once), warm_up=0)  # type: ignore[misc]
        ((rescan, _),) = repeat(lambda asked=asked: translate_corpus(asked, execute=at_once), warm_up=0)  # type: ignore[misc]
        listed = (folder / f"out{suffix}/manifest.jsonl").stat().st_size
        found[suffix] = {
            "lines": made.lines,
            "shards": made.shards,
            "ms_per_shard": round(1000 * seconds / made.shards, 1),
            "lines_per_second": round(made.lines / seconds),
            "again_lines_per_second": round(made.lines / rescan),
            "manifest_bytes_per_shard": round(listed / made.shards),
            "peak_mib": round(peak_mib()),
            "a_billion": {
                "shards": round(BILLION / (made.lines / made.shards)),
                "driver_hours": round(BILLION / (made.lines / seconds) / 3600, 2),
                "manifest_mib": round(BILLION / (made.lines / made.shards) * listed / made.shards / 2**20, 1),
            },
        }
    with cluster() as address:
        if address:
            where = [str(folder / "text.txt")], str(folder / "ray")
            asked = CorpusOptions(*where, TranslatorOptions(bundle, workers=2), address=address)
            found["ray_ms_per_shard"] = through_ray(asked)
            found["wait_ms_among_1000"] = wait_ms(address, 1000)
    return found


def through_ray(asked: CorpusOptions) -> float:
    """From the first shard to the last, with two workers that answer at once."""
    from tformer_deploy.translate.corpus import on_ray

    class Echo(on_ray.Worker):  # of this function, so that it travels by value
        def run(self, shard: Shard) -> Any:
            """Give it back."""
            return next(at_once(self.work, iter([shard]), Progress()))

    times: list[float] = []
    on_ray.Worker = Echo  # type: ignore[misc]
    made = translate_corpus(asked, Progress(changed=lambda: times.append(time.perf_counter())))
    return round(1000 * (times[-1] - times[0]) / (made.shards - 1), 1)


def wait_ms(address: str, workers: int) -> float:
    """How long Ray takes to say which of so many calls has ended."""
    import ray

    ray.init(address, log_to_driver=False)
    busy = ray.remote(repeat)
    calls = [busy.options(num_cpus=1000).remote(None) for _ in range(workers)]  # there is never room for them
    runs = repeat(lambda: ray.wait([*calls, ray.put(1)], num_returns=1), warm_up=3, least=50)
    ray.shutdown()
    return round(1000 * statistics.median(seconds for seconds, _ in runs), 2)


def at_once(work: Work, shards: Iterator[Shard], progress: Progress) -> Iterator[Done]:
    """Workers that take no time; the translation is the source."""
    for shard in shards:
        names = {"file": f"{shard.name}{work.format.suffix}", "input": shard.input, "line": shard.line}
        counts = {"first": shard.first, "lines": shard.lines, "tokens": 15 * shard.lines, "cut": 0, "seconds": 60.123}
        record = {**names, **counts, "sha256": "0" * 64, "worker": "machine-0123:123456", "errors": []}
        yield Done(shard.name, shard.part, record)


def repeated(text: Path, lines: int, out: Path) -> Path:
    """A file of so many lines."""
    with out.open("wb") as file:
        file.writelines(lines_of(text, lines))
    return out


def lines_of(text: Path, count: int) -> Iterator[bytes]:
    """So many lines of a file, again and again."""
    return islice(cycle(text.read_bytes().splitlines(keepends=True)), count)


@contextmanager
def cluster() -> Iterator[str]:
    """The address of a Ray cluster that has this machine's cores; empty without Ray."""
    try:
        from ray.cluster_utils import Cluster
    except ModuleNotFoundError:
        yield ""
        return
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray's; else other work on the machine goes first
    cores = len(os.sched_getaffinity(0))
    found = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, "num_cpus": cores})
    yield found.address
    found.shutdown()


if __name__ == "__main__":
    main()
