"""Steps of a run: commands with a time limit, whose result stays, so that a later run does not repeat them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

STOPPED, KILLED, NOT_STARTED, DIFFERS = 124, 137, 127, 3
"""Exit codes: past its time limit; the same, and SIGKILL was needed; no such program; a check found a difference."""
GRACE_S = 10
"""Between SIGTERM and SIGKILL: enough to leave nothing half written."""
QUESTION_S = 60
"""Of a short question to a Python, which imports torch or TensorRT from a cold disk."""


class Command(NamedTuple):
    """A part of a step."""

    words: Sequence[str | Path]
    quiet: bool = False
    """What it prints goes to the log, not to the step's report."""
    stdin: str | Path = os.devnull


class Run:
    """One run of the kit: where things are, what its steps get, and what is not done."""

    def __init__(self, here: Path) -> None:
        said = os.environ
        self.begin, self.here, self.lock = time.monotonic(), here, -1
        self.work = Path(said.get("KIT_WORK") or here / "work").absolute()
        self.results = Path(said.get("KIT_RESULTS") or here / "results").absolute()
        self.core, self.models, self.out = (self.work / name for name in ("core", "models", "out"))
        self.installed, self.python = said.get("KIT_INSTALLED", ""), said.get("KIT_PYTHON") or "python3"
        self.base = self.installed
        """The Python that environments are made of."""
        self.stage, self.stage_end = "", 0
        self.failed: list[str] = []
        self.missing: dict[str, str] = {}
        """Folders that are not unpacked, and why."""
        self.no_gpu: str | None = None
        """See `stages.no_gpu`; None: nobody has asked."""
        self.tried: set[tuple[str, ...]] = set()
        """Builds of this run."""
        self.env = {name: value for name, value in said.items() if not name.startswith("PIP_")}  # other indexes
        self.env.update(XDG_CACHE_HOME=str(self.work / "cache"), PIP_CONFIG_FILE=os.devnull)
        self.env.update(PIP_DISABLE_PIP_VERSION_CHECK="1")
        self.host_env = dict(self.env)
        """For the host's own Python, which may find its torch by `PYTHONPATH` or in the user's folder."""
        if not self.installed:
            self.env = {name: value for name, value in self.env.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
            self.env["PYTHONNOUSERSITE"] = "1"

    def elapsed(self) -> int:
        """Seconds since the start."""
        return int(time.monotonic() - self.begin)

    def say(self, text: str) -> None:
        """Print a line and log it."""
        print(text, flush=True)
        with (self.out / "run.log").open("a", encoding="utf-8") as log:
            log.write(f"{text}\n")

    def fail(self, name: str, reason: str) -> None:
        """Note that something is not done. The run goes on."""
        self.say(f"{name}: {reason}")
        self.failed.append(name)

    def step(self, name: str, *commands: Command, env: dict[str, str] | None = None) -> None:
        """Run commands one after the other, unless that has worked before, and collect the results so far."""
        if self.over(name):
            return
        start = self.elapsed()
        if start >= self.stage_end:
            self.skip(name, f"no time was left of what the stage {self.stage} may take: run it again")
            return
        self.forget(name)
        code = self.execute(name, commands, self.stage_end - start, env or self.env)
        seconds = self.elapsed() - start
        if code in (STOPPED, KILLED):
            with (self.out / f"{name}.err").open("a") as log:
                log.write(f"stopped after {seconds} s\n")
        (self.out / f"{name}.done").write_text(f"{code} {seconds}\n")
        if code == 0:
            self.say(f"{name}: ok, {seconds} s")
        else:
            self.fail(name, f"FAILED, code {code} after {seconds} s: {self.last_line(name)}")
        self.collect()

    def execute(self, name: str, commands: Sequence[Command], limit_s: float, env: dict[str, str]) -> int:
        """Run commands until one fails or the time is over. Returns its exit code, as a shell has it."""
        until, code = time.monotonic() + limit_s, 0
        mark = f"{self.work}:{name}"  # another kit on this machine may have a step of the same name
        with (self.out / f"{name}.out").open("wb") as report, (self.out / f"{name}.err").open("wb", 0) as log:
            for words, quiet, stdin in commands:
                try:
                    with Path(stdin).open("rb") as source:
                        process = subprocess.Popen(
                            [str(word) for word in words],
                            stdin=source,
                            stdout=log if quiet else report,
                            stderr=log,
                            env={**env, "KIT_STEP": mark},
                            pass_fds=[self.lock],  # it stays locked while what a killed run has left still works
                        )
                except OSError as error:
                    log.write(f"{words[0]}: {error.strerror}\n".encode())
                    return NOT_STARTED
                try:
                    code = process.wait(max(0.0, until - time.monotonic()))
                except subprocess.TimeoutExpired:
                    code = stop(process)
                except KeyboardInterrupt:  # which the process has got as well
                    stop(process)
                    end_children(mark)
                    raise
                code = code if code >= 0 else 128 - code
                if code in (STOPPED, KILLED):
                    end_children(mark)
                if code:
                    break
        return code

    def ask(self, words: Sequence[str | Path], env: dict[str, str]) -> tuple[int, str, str]:
        """Exit code, output and the last line of a command that answers soon, if it does."""
        command = [str(word) for word in words]
        try:
            done = subprocess.run(command, env=env, timeout=QUESTION_S, capture_output=True, check=False)
        except OSError as error:
            return NOT_STARTED, "", f"{command[0]}: {error.strerror}"
        except subprocess.TimeoutExpired:
            return STOPPED, "", f"{command[0]} did not answer within {QUESTION_S} s"
        lines = (done.stdout + done.stderr).decode(errors="replace").splitlines()
        return done.returncode, done.stdout.decode(errors="replace").strip(), lines[-1] if lines else ""

    def collect(self) -> bool:
        """Put everything so far where it is brought back from."""
        self.results.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.out / "run.log", self.results / "run.log")
        words = [self.base, self.core / "host.py", "collect", self.out, self.core / "kit.json"]
        return subprocess.run([*words, self.results / "results.json"], env=self.env, check=False).returncode == 0

    def skip(self, name: str, reason: str) -> None:
        """Note a step that cannot run on this host now, unless it ran before."""
        if not self.over(name):
            self.forget(name)
            (self.out / f"{name}.skipped").write_text(f"{reason}\n", encoding="utf-8")
            self.fail(name, f"not run: {reason}")

    def over(self, name: str) -> bool:
        """Whether a step has worked, or found a difference, which it would find again."""
        code = self.code(name)
        if code == 0:
            self.say(f"{name}: done before")
        elif code == DIFFERS:
            self.fail(name, f"FAILED, code {code} before")
        return code in (0, DIFFERS)

    def worked(self, name: str) -> bool:
        """Whether a step has worked."""
        return self.code(name) == 0

    def code(self, name: str) -> int | None:
        """The exit code of a step; None: it has not run."""
        done = self.out / f"{name}.done"
        return int(done.read_text().split()[0]) if done.exists() else None

    def forget(self, name: str) -> None:
        """Remove the files of an earlier try."""
        for path in self.out.glob(f"{name}.*"):
            path.unlink()

    def last_line(self, name: str) -> str:
        """The end of a step's log, which has the reason where it failed."""
        lines = (self.out / f"{name}.err").read_text(encoding="utf-8", errors="replace").splitlines()
        return lines[-1] if lines else ""


def stop(process: subprocess.Popen[bytes]) -> int:
    """End a process, with SIGKILL if need be. Returns the exit code that says which."""
    process.terminate()
    try:
        process.wait(GRACE_S)
        return STOPPED
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return KILLED


def end_children(step: str) -> None:
    """Kill what a stopped step, as its `KIT_STEP` says, had started: it would disturb the next one."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"KIT_STEP={step}".encode() in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)
        except OSError:  # it has ended, or is another user's
            continue


def die(reason: str) -> NoReturn:
    """End with a line."""
    sys.exit(f"error: {reason}")
