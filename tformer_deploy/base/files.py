"""Files that are written whole or not at all: atomic replacement, locks, and clean-up after killed processes."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from .errors import ArtifactError, ConfigError, TformerError

_SUFFIX = ".tformer.tmp"
_TEMPORARY = re.compile(rf"\.(?P<target>.+)\.[a-z0-9_]{{8}}{re.escape(_SUFFIX)}", re.DOTALL)
_RENAME_NOREPLACE, _RENAME_EXCHANGE, _AT_FDCWD = 1, 2, -100  # linux/fs.h, linux/fcntl.h
_LOCKLESS = (errno.EBADF, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
"""Errors of file systems without locks, or, as NFS, without locks of folders."""
_log = logging.getLogger(__name__)


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def atomic_file(path: Path, leftovers: bool = True) -> Iterator[Path]:
    """Yield a temporary path, which replaces the file at `path` if the block succeeds.

    A link is replaced, not followed. `leftovers`: also remove temporary files of killed writers, which takes long in a
    folder of very many files.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if leftovers:
        remove_leftovers(path.parent, path.name)
    with _temporary(path, directory=False) as temporary:
        with _named(temporary, path):
            yield temporary
        temporary.chmod(_mode(path))
        _sync(temporary)
        temporary.replace(path)


@contextmanager
def output_file(path: Path) -> Iterator[Path]:
    """As `atomic_file`, for a path that a user names: links are followed; devices and pipes are written to."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not _is_special(path):
        with atomic_file(Path(os.path.realpath(path))) as temporary:
            yield temporary
        return
    with scratch("tformer-output") as folder:
        content = folder / "content"
        yield content
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        with content.open("rb") as source, os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND), "wb") as device:
            shutil.copyfileobj(source, device)


def _is_special(path: Path) -> bool:
    """Whether a path must be written to, not replaced: a device, a pipe, an open file such as /dev/stdout."""
    in_proc = os.path.realpath(path).startswith("/proc/")
    return path.exists() and (not path.is_file() or in_proc or _is_open_file(path))


def _is_open_file(path: Path) -> bool:
    """Whether links lead through /proc/self/fd or /dev/fd to a file."""
    for _ in range(40):
        if str(path.parent) in ("/dev/fd", "/proc/self/fd", f"/proc/{os.getpid()}/fd"):
            return True
        if not path.is_symlink():
            return False
        path = path.parent / path.readlink()
    return False


def _mode(path: Path) -> int:
    """Permissions for the new file: those of the file that it replaces, else the default ones."""
    if path.is_file() and not path.is_symlink():
        return stat.S_IMODE(path.stat().st_mode)
    return 0o666 & ~umask()


def umask() -> int:
    """The process's umask; not by `os.umask`, which would change it for other threads."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("Umask:")).split()[1], 8)
    return 0o022


def check_utf8(path: Path) -> None:
    """Raise ConfigError for a path that is not UTF-8, which ONNX, its runtimes and safetensors refuse."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        shown = str(path).encode("utf-8", "backslashreplace").decode().replace("\\udc", "\\x")
        raise ConfigError(f"{shown} is not UTF-8, which the runtimes need: rename the folder") from None


def check_writable(path: Path, others: Iterable[Path | None] = ()) -> None:
    """Raise ConfigError if `output_file` could not write to a path, or would overwrite one of `others`."""
    named = {os.path.realpath(other) for other in others if other}
    if os.path.realpath(path) in named and not _is_special(path):
        raise ConfigError(f"{path} is named twice, and would be overwritten: name another file")
    special = not path.is_dir() and _is_special(path)
    place = path if special else Path(os.path.realpath(path)).parent
    if path.is_dir() or not (special or place.is_dir()) or not os.access(place, os.W_OK):
        raise ConfigError(f"{path} cannot be written: name a file in a folder that exists and is writable")


def write_output(path: Path, text: str) -> None:
    """Write a text to a path that a user names, in UTF-8."""
    with output_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically, readable by people."""
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def atomic_directory(
    path: Path, force: bool, kind: str = "folder", is_one: Callable[[Path], bool] = Path.is_dir
) -> Iterator[Path]:
    """Yield an empty temporary directory, which becomes `path` if the block succeeds.

    A kill at any moment leaves the old directory or the new one. Links are followed; temporary directories of killed
    writers are removed. Raises ArtifactError if `path` exists without `force`, or is not a `kind` (`is_one`), at the
    start or at the end; and if another process is writing it.
    """
    path = Path(os.path.realpath(path))
    check_utf8(path)

    def refuse_existing() -> None:
        if os.path.lexists(path) and not force:
            raise ArtifactError(f"{path} exists already: choose another folder or add --force")
        if os.path.lexists(path) and not is_one(path):
            raise ArtifactError(f"{path} is not a {kind} and stays as it is: remove it, or choose another folder")

    refuse_existing()
    path.parent.mkdir(parents=True, exist_ok=True)
    if remove_leftovers(path.parent, path.name):
        raise ArtifactError(f"another process is making {path}: wait until it has ended, or choose another folder")
    with hold(path) if path.is_dir() else nullcontext(), _temporary(path, directory=True) as temporary:
        with _named(temporary, path):
            yield temporary
        temporary.chmod(0o777 & ~umask())
        for file in temporary.rglob("*"):
            if file.is_file():
                _sync(file)
        refuse_existing()
        _move(temporary, path)


@contextmanager
def _named(temporary: Path, path: Path) -> Iterator[None]:
    """Let errors name the final path, not the temporary one; those of a full disk name none by themselves."""
    try:
        yield
    except TformerError as error:
        error.args = tuple(str(each).replace(str(temporary), str(path)) for each in error.args)
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT) and not error.filename:
            error.filename = str(path)
        raise


def _move(new: Path, path: Path) -> None:
    """Rename a directory, and exchange it with the one that has the name already, if there is one."""
    exchange = path.is_dir()
    flag = _RENAME_EXCHANGE if exchange else _RENAME_NOREPLACE
    try:
        rename(new, path, flag)
    except FileExistsError:
        raise ArtifactError(f"{path} appeared meanwhile and stays: choose another folder or add --force") from None
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EXDEV):
            raise
        if exchange:
            raise ArtifactError(f"{path} cannot be replaced on this file system: remove it first") from None
        new.rename(path)  # which replaces nothing but an empty folder


def rename(old: Path, new: Path, flag: int) -> None:
    """Linux's renameat2, which Python does not have. Raises OSError."""
    call = ctypes.CDLL(None, use_errno=True).renameat2
    if call(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flag):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(new))


# Locks, and what killed processes leave


@contextmanager
def hold(directory: Path) -> Iterator[None]:
    """Hold an exclusive lock on a folder. Raises ArtifactError if another process has it.

    On a network file system, it does not exclude processes of other machines; on one without locks, no process.
    """
    check_utf8(directory)
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # The last holder of the lock may have removed or replaced the folder.
        if (
            not _lock_where_possible(handle)
            or not directory.is_dir()
            or not os.path.samestat(os.fstat(handle), directory.stat())
        ):
            raise ArtifactError(f"{directory} is being changed by another process: wait until it has ended")
        require_plain(directory)
        yield
    finally:
        os.close(handle)


def require_plain(directory: Path) -> None:
    """Raise ArtifactError if a folder has links, pipes or devices, so that a change could reach other files."""
    for path in directory.rglob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ArtifactError(f"{path} is a link, a pipe or a device: put a file or a folder there instead")


@contextmanager
def scratch(name: str) -> Iterator[Path]:
    """A temporary folder; removes older ones of the same name whose processes were killed."""
    place = Path(tempfile.gettempdir()) / name
    remove_leftovers(place.parent, name)
    with _temporary(place, directory=True) as folder:
        yield folder


@contextmanager
def _temporary(path: Path, directory: bool) -> Iterator[Path]:
    """A new file or folder beside `path`, locked until the block ends. Then it is removed, unless it was renamed."""
    place = _SUFFIX, f".{path.name}.", path.parent
    while True:
        if directory:
            temporary = Path(tempfile.mkdtemp(*place))
            handle = os.open(temporary, os.O_RDONLY)
        else:
            handle, name = tempfile.mkstemp(*place)
            temporary = Path(name)
        try:
            _lock_where_possible(handle, wait=True)
            if os.path.lexists(temporary):  # else another process removed it as a leftover before it was locked
                yield temporary
                return
        finally:
            if directory:
                shutil.rmtree(temporary, ignore_errors=True)
            else:
                temporary.unlink(missing_ok=True)
            os.close(handle)


def remove_leftovers(folder: Path, target: str = "") -> bool:
    """Remove temporary files of killed writers of `target`, or of any file, from a folder, and log it.

    Returns whether a running process is writing one.
    """
    busy = False
    for path in sorted(folder.glob(f".*{_SUFFIX}")):
        found = _TEMPORARY.fullmatch(path.name)
        if not found or target not in ("", found["target"]):
            continue
        with suppress(OSError):  # no permission, or gone by now
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if _lock(handle):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                    _log.warning("%s removed: a process that was killed left it", path)
                else:
                    busy = True
            finally:
                os.close(handle)
    return busy


def _lock(handle: int, wait: bool = False) -> bool:
    """Lock an open file or folder until it is closed; False if another process has locked it."""
    from filelock import lock_descriptor

    return lock_descriptor(handle, blocking=wait)


def _lock_where_possible(handle: int, wait: bool = False) -> bool:
    """As `_lock`; True on a file system without locks."""
    try:
        return _lock(handle, wait)
    except OSError as error:
        if error.errno not in _LOCKLESS:
            raise
        return True


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
