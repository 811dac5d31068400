"""Describe the host, and collect the results of all steps, as JSON. Needs only the standard library."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

QUERY = (
    "name,driver_version,memory.total,memory.used,compute_cap,clocks.max.sm,clocks.max.mem,power.limit,mig.mode.current"
)
LIMIT = 16 << 20
"""Bytes of results: small enough for a job's output."""
TORCH = (
    "import torch; print(torch.__version__, 'CUDA', torch.version.cuda, "
    "'' if torch.cuda.is_available() else 'not available')"
)


def describe(python: str) -> dict[str, Any]:
    """Machine, driver, and what that Python has."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(": ")[2] for line in info if line.startswith("model name")]
    return {
        "date": str(datetime.date.today()),
        "processor": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20,
        "disk_free_mib": shutil.disk_usage(".").free >> 20,
        "system": platform.platform(),
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "gpus": gpus(),
        "torch": run([python, "-c", TORCH], 18),
    }


def gpus() -> list[dict[str, str]]:
    """What nvidia-smi says, or what an old one knows; nothing where there is none."""
    for query in (QUERY, "name,driver_version"):
        rows = run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], 10).splitlines()
        if rows:
            return [dict(zip(query.split(","), map(str.strip, row.split(",")), strict=False)) for row in rows]
    return []


def run(command: list[str], seconds: int) -> str:
    """A command's output; empty if it fails or takes longer, since a description is not worth failing for."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout.strip()


def libraries() -> str:
    """Folders of NVIDIA's libraries that this Python has, as LD_LIBRARY_PATH."""
    spec = find_spec("nvidia")
    places = list(spec.submodule_search_locations or []) if spec else []
    found = {path.parent for place in places for path in Path(place).glob("**/lib*.so*")}
    return ":".join(map(str, sorted(found)))


def collect(out: Path, kit: Path, target: Path) -> None:
    """Write what all steps found into one file. Raises ValueError where it is too large to bring back."""
    host = step(out, "host") if (out / "host.done").exists() else {}
    names = sorted({path.stem for path in out.iterdir() if path.suffix in (".done", ".skipped")} - {"host"})
    results = {
        "format": "tformer-gpu-results",
        "version": 3,
        "kit": json.loads(kit.read_text(encoding="utf-8")),
        "host": host.get("report", {}),
        "steps": {name: step(out, name) for name in names},
    }
    text = json.dumps(results, ensure_ascii=False, separators=(",", ":"))
    text = text.replace(f"{out.parent}/", "work/")  # where that is, nobody need know
    if len(text.encode()) > LIMIT:
        raise ValueError(
            f"{target}: {len(text) >> 20} MiB are too much to bring back: make the kit with fewer --sentences"
        )
    part = target.with_suffix(".part")  # or a host that is cut off while it writes would leave half of it
    part.write_text(text, encoding="utf-8")
    part.replace(target)


def step(out: Path, name: str) -> dict[str, Any]:
    """One step: `report` it printed, `code`, `seconds` and `error`, or why it was `skipped`."""
    if (out / f"{name}.skipped").exists():
        return {"skipped": (out / f"{name}.skipped").read_text(encoding="utf-8").strip()}
    code, seconds = map(int, (out / f"{name}.done").read_text(encoding="utf-8").split())
    found: dict[str, Any] = {"code": code, "seconds": seconds}
    with contextlib.suppress(ValueError):
        found["report"] = json.loads((out / f"{name}.out").read_text(encoding="utf-8"))
    if code:
        found["error"] = (out / f"{name}.err").read_text(encoding="utf-8", errors="replace").strip()[-4000:]
    return found


def main() -> None:
    """`describe PYTHON`, `libraries`, `collect OUT KIT TARGET`."""
    verb, *arguments = sys.argv[1:]
    if verb == "describe":
        print(json.dumps(describe(*arguments)))
    elif verb == "libraries":
        print(libraries())
    else:
        try:
            collect(*map(Path, arguments))
        except ValueError as error:
            sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
