"""Worker processes: what they answer, how they die, and that none is left."""

from __future__ import annotations

import os
import sys
import time
from itertools import count
from pathlib import Path

import pytest

from benchmarks.whole import run_whole
from tformer_deploy.base.errors import EngineError, LimitError
from tformer_deploy.base.processes import Process, in_turn, repeat

WORKER = """
import os, sys, time
from tformer_deploy.base.errors import LimitError
from tformer_deploy.base.processes import serve
class Worker:
    def add(self, a, b): print("noise"); return a + b
    def fail(self): raise ZeroDivisionError("by a library")
    def refuse(self): raise LimitError("too long")
    def die(self): sys.exit("last words")
    def stop(self): os.write(replies(), b'{"val'); os._exit(3)
    def sleep(self): time.sleep(60)
def replies(): return max(int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}"))
serve(Worker(), EXPECTED)
"""


def worker(expected: str = "LimitError", **named: object) -> Process:
    return Process("ours", [sys.executable, "-c", WORKER.replace("EXPECTED", expected)], **named)  # type: ignore[arg-type]


def test_errors_that_are_expected_are_replies() -> None:
    with worker("Exception") as process:
        with pytest.raises(EngineError, match=r"^ours: ZeroDivisionError: by a library$"):
            process.ask("fail")
        with pytest.raises(LimitError, match=r"^ours: too long$"):
            process.ask("refuse")
        assert process.ask("add", a=2, b=3) == 5, "it goes on, and what it prints is no reply"


def test_others_end_it_and_each_further_question_says_so() -> None:
    with worker() as process:
        for _ in range(2):
            with pytest.raises(EngineError, match="ours: its process ended with exit code 1: ZeroDivisionError: by a"):
                process.ask("fail")
    with worker("Exception") as process, pytest.raises(EngineError, match="exit code 1: last words"):
        process.ask("die")


def test_the_beginning_of_an_answer_is_none() -> None:
    with worker() as process, pytest.raises(EngineError, match=r"^ours: its process ended with exit code 3"):
        process.ask("stop")


def test_an_answer_may_be_too_late() -> None:
    start = time.monotonic()
    with (
        worker(limit_seconds=1.5) as process,
        pytest.raises(EngineError, match=r"ours: its process gave no answer in 1\.5 s"),
    ):
        process.ask("sleep")
    assert time.monotonic() - start < 30


def test_a_worker_that_is_not_asked_stands_still_and_none_is_left() -> None:
    with worker() as process:
        assert process.ask("add", a=1, b=1) == 2
        pid = process._process.pid
        end = time.monotonic() + 30
        while Path(f"/proc/{pid}/stat").read_text().split()[2] != "T":
            assert time.monotonic() < end
    assert not Path(f"/proc/{pid}").exists()


def test_environment_and_folder_are_the_workers_own(tmp_path: Path) -> None:
    code = (
        "import os; from tformer_deploy.base.processes import serve\n"
        "class W:\n def here(self): return os.environ['X'], os.getcwd()"
    )
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    with Process(
        "", [sys.executable, "-c", f"{code}\nserve(W())"], tmp_path, {"X": "1", "PYTHONPATH": path}
    ) as process:
        assert process.ask("here") == ["1", str(tmp_path)]


def test_whole_processes_are_timed() -> None:
    output, seconds, peak_mib = run_whole([sys.executable, "-c", "print(input())"], "text")
    assert output == "text\n" and 0 < seconds < 60 and 1 < peak_mib < 10_000
    with pytest.raises(EngineError, match=r"^its process ended with exit code 1: no$"):
        run_whole([sys.executable, "-c", "import sys; sys.exit('no')"])


def test_turns_and_repetitions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [in_turn("abc", number) for number in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]
    assert in_turn([], 3) == []
    runs: list[int] = []
    found = repeat(lambda: runs.append(1) or len(runs), warm_up=2, least=3)  # type: ignore[func-returns-value]
    assert [result for _, result in found] == [3, 4, 5] and all(seconds >= 0 for seconds, _ in found)
    assert len(repeat(lambda: None, warm_up=0, seconds=30, most=4)) == 4
    clock = count(step=0.01)  # each run reads it twice, and the loop once
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    assert len(repeat(lambda: None, warm_up=0, seconds=0.05)) == 2


def test_workers_need_nothing_but_the_standard_library() -> None:
    """They run in the environments of other libraries."""
    code = "import sys, tformer_deploy.base.processes; print({'numpy', 'typer', 'fastjsonschema'} & set(sys.modules))"
    assert run_whole([sys.executable, "-c", code])[0] == "set()\n"
