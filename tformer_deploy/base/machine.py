"""Memory and cores that this process may use."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

GIB = 1 << 30
SYSTEM = Path("/")


def cores(root: Path = SYSTEM) -> int:
    """Number of CPUs that this process may use, by its affinity and the quotas of its control groups.

    A quota of 1.5 CPUs counts as 2.
    """
    return max(1, min((len(os.sched_getaffinity(0)), *_quotas(root))))


def available_bytes(root: Path = SYSTEM) -> int | None:
    """Memory that is free in the machine and in the process's control groups; None: not known."""
    return min((*_of_machine(root), *_of_groups(root)), default=None)


def keep_freed_memory() -> None:
    """Tell glibc to keep freed blocks of up to 64 MiB: handing each one back to the kernel slows down CPU training.

    Larger ones would leave holes in the heap that only they fit, gigabytes of them.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        m_trim_threshold, m_mmap_threshold = -1, -3
        libc.mallopt(m_mmap_threshold, 64 << 20)
        libc.mallopt(m_trim_threshold, 2 * GIB - 1)


def give_back_freed_memory() -> None:
    """Give the system what `keep_freed_memory` keeps: holes between blocks add up to gigabytes in a long run."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def _of_machine(root: Path) -> Iterator[int]:
    """Free memory of the machine."""
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            yield 1024 * int(line.split()[1])


def _of_groups(root: Path) -> Iterator[int]:
    """Free memory in the process's control groups (version 1 or 2); the page cache counts as free."""
    for group in _groups(root, "memory"):
        for most, used in (("limit_in_bytes", "usage_in_bytes"), ("max", "current")):
            sizes = [line for name in (most, used) for line in _lines(group / f"memory.{name}")]
            if len(sizes) == 2 and all(map(str.isdecimal, sizes)):  # not the word for no limit
                cached = [line.split() for line in _lines(group / "memory.stat")]
                names = ("inactive_file", "active_file")
                yield int(sizes[0]) - int(sizes[1]) + sum(int(size) for name, size in cached if name in names)


def _quotas(root: Path) -> Iterator[int]:
    """CPU quotas of the process's control groups (version 1 or 2), rounded up."""
    for group in _groups(root, "cpu"):
        first = [line for name in ("quota", "period") for line in _lines(group / f"cpu.cfs_{name}_us")]
        for words in (first, *map(str.split, _lines(group / "cpu.max"))):
            if len(words) == 2 and all(map(str.isdecimal, words)) and int(words[1]):  # not -1 or max, for no limit
                yield -(-int(words[0]) // int(words[1]))


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the process's control groups (version 1 or 2), each followed by its parents."""
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        base = root / "sys/fs/cgroup"
        if controller in controllers.split(","):
            base /= controller
        elif number != "0":
            continue
        group = base / path.strip("/")
        while group != group.parent and group.is_relative_to(base):
            yield group
            group = group.parent


def _lines(path: Path) -> list[str]:
    """Lines of a file of the kernel; none if it does not exist."""
    try:
        return path.read_text(encoding="ascii", errors="surrogateescape").splitlines()
    except OSError:
        return []
