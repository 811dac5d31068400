"""Build, check and measure on a GPU host without a network; docs/gpu.md says how.

./run.sh            everything that has not worked yet
./run.sh STAGE...   of: unpack host install probe trained where steps ort-cuda eager base batches beams
"""

# Before anything is installed, the standard library of Python 3.8 must do, here and in the files beside this one.
from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

from stages import STAGES
from steps import Run, die

SUMS = "SHA256SUMS"
OF_A_KIT = ("core", "models", "probe", "rtx", "trt86", "ort-gpu", "python", "env", "out", ".part")
"""What belongs to one kit in the work folder."""


def main(arguments: list[str]) -> None:
    """Unpack, install, and run stages."""
    if arguments[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return
    for stage in arguments:
        if stage not in ("unpack", *STAGES):
            die(f"there is no stage '{stage}': take of unpack {' '.join(STAGES)}")
    total, limit = seconds("KIT_TOTAL_SECONDS"), seconds("KIT_LIMIT_SECONDS")
    run = Run(Path(__file__).absolute().parents[1])
    if not (run.here / SUMS).is_file():
        die(f"{run.here / SUMS} is missing: copy it there")
    kit: dict[str, dict[str, str]] = {}
    for line in (run.here / SUMS).read_text().splitlines():
        digest, name = line.split()
        kit.setdefault(name.partition(".tar")[0], {})[name] = digest
    unpack(run, kit)
    run.base = find_python(run)
    first = [] if arguments == ["unpack"] else ["host", "install"]
    for stage in [*first, *(name for name in arguments or STAGES if name not in ("unpack", "host", "install"))]:
        if stage != "ort-cuda" or run.installed or "ort-gpu" in kit:
            run_stage(run, stage, total, STAGES[stage][0] if limit is None else limit)
    if not run.collect():
        run.failed.append("results")
    run.say(f"results: {run.results}")
    if run.failed:
        run.say(f"{len(run.failed)} not done: {' '.join(run.failed)}")
        sys.exit(1)


def seconds(name: str) -> int | None:
    """An environment variable that limits time."""
    value = os.environ.get(name, "")
    if value and not value.isdecimal():
        die(f"{name}={value} is no number of seconds")
    return int(value) if value else None


def run_stage(run: Run, stage: str, total: int | None, limit: int) -> None:
    """Run the steps of a stage, unless the limit of the whole run might cut it off."""
    left = (total or 0) - run.elapsed()
    if stage not in ("host", "install", "probe") and not run.models.exists():
        run.fail(stage, f"not begun: {run.missing['models']}")
    elif total and left < limit:
        run.fail(stage, f"not begun: it may take {limit} s, and {left} s are left of {total}: run it again")
    else:
        run.stage, run.stage_end = stage, run.elapsed() + limit
        STAGES[stage][1](run)


def unpack(run: Run, kit: dict[str, dict[str, str]]) -> None:
    """Unpack what is here and was not unpacked before; the rest may come later."""
    run.work.mkdir(parents=True, exist_ok=True)
    run.lock = os.open(run.work / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(run.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        die(f"another run.sh, or what one has left, works in {run.work}: wait for it or end it")
    sums, known = (run.here / SUMS).read_bytes(), run.work / SUMS
    if known.exists() and known.read_bytes() != sums:
        print(f"another kit: what was unpacked, installed and built in {run.work} before goes", flush=True)
        for name in OF_A_KIT:
            shutil.rmtree(run.work / name, ignore_errors=True)
    known.write_bytes(sums)
    run.out.mkdir(exist_ok=True)
    for folder, pieces in kit.items():
        if (run.work / folder).exists():
            continue
        absent = " ".join(name for name in pieces if not (run.here / name).is_file())
        problem = f"{absent} not here: copy to {run.here}" if absent else extract(run, folder, pieces)
        if not problem:
            run.say(f"unpack-{folder}: ok")
            continue
        run.missing[folder] = problem
        if folder == "core":
            die(f"core: {problem}")
        elif absent:
            run.say(f"unpack-{folder}: {problem}")
        else:
            run.fail(f"unpack-{folder}", f"FAILED, {problem}")


def extract(run: Run, folder: str, pieces: dict[str, str]) -> str:
    """Unpack pieces; their folder appears whole or not at all. Returns what is wrong, if so."""
    for name, digest in pieces.items():
        own = hashlib.sha256()
        with (run.here / name).open("rb") as file:
            while block := file.read(1 << 20):
                own.update(block)
        if own.hexdigest() != digest:
            return f"{name} does not match SHA256SUMS: copy it again"
    part = run.work / ".part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    with subprocess.Popen(["cat", *(str(run.here / name) for name in pieces)], stdout=subprocess.PIPE) as whole:
        try:
            with tarfile.open(fileobj=whole.stdout, mode="r|*", bufsize=1 << 20) as archive:
                archive.extraction_filter = lambda member, path: member  # its hash says that it is ours
                archive.extractall(part)
            (part / folder).rename(run.work / folder)
        except (tarfile.TarError, EOFError, OSError) as error:
            return f"it cannot be unpacked to {part}: {error}"
    return ""


def find_python(run: Run) -> str:
    """The Python that environments are made of."""
    if run.installed:
        return run.installed if shutil.which(run.installed) else die(f"KIT_INSTALLED: there is no {run.installed}")
    wanted = (run.core / "python").read_text().strip()
    version = "import sys; print('%d.%d' % sys.version_info[:2])"
    for python in (run.python, f"python{wanted}", str(run.work / f"python/usr/bin/python{wanted}")):
        if run.ask([python, "-c", version], run.env)[1] == wanted:
            return python
    die(f"there is no Python {wanted}: name one in KIT_PYTHON, or make the kit with --python")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:  # the steps that have not ended are not noted, and run again
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
