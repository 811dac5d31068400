"""The `tformer` command: one file for each verb, which parses its options and calls.

In: a command line and standard input. Out: text on standard output, notes on standard error, an exit code.
No other room uses it.
"""

from __future__ import annotations

import errno
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..base.errors import Interrupted, ParityError, TformerError, missing_extra
from ..base.notes import note, printable, shortened
from . import (  # noqa: F401
    bench,
    bleu,
    build,
    check,
    corpus,
    distill,
    encode,
    export,
    import_,
    init,
    inspect,
    prepare,
    score,
    serve,
    shortlist,
    student,
    train,
    translate,
    triton,
)
from .lines import open_streams, output_lost
from .root import app

__all__ = ["app", "main"]


def main() -> None:
    """Run the command. Exit codes: 1 a user's mistake, 2 wrong usage, 3 a check that failed, 130 a signal."""
    open_streams()
    if next((each for each in sys.argv[1:] if not each.startswith("-")), "") == "serve":
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it can reload: what it opens is new anyway
    try:
        try:
            with stopped_as_by_ctrl_c():
                app()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # now, while an error is still reported
    except KeyboardInterrupt:  # before typer handles it
        sys.exit(130)
    except Exception as error:
        if isinstance(error, OSError) and output_lost() and not error.filename:
            error.filename = "standard output"
        if "--debug" in sys.argv:
            raise
        if not isinstance(error, BrokenPipeError):
            kind = "stopped" if isinstance(error, Interrupted) else "error"
            note(shortened(printable(f"{kind}: {_one_line(error)}"), LONGEST_ERROR))
        sys.exit(_exit_code(error))


@contextmanager
def stopped_as_by_ctrl_c() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a verb as Ctrl-C does, so that it removes temporary files.

    Signals that are ignored, as under nohup, or handled already stay as they are.
    """
    numbers = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        numbers = []  # only the main thread may set handlers
    for number in numbers:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


LONGEST_ERROR = 4000
"""Most characters of an error message."""
_FULL = "make room or choose another folder"
_ADVICE = {
    errno.ENOENT: "check the path",
    errno.EACCES: "get permission for it or name another",
    errno.EPERM: "get permission for it or name another",
    errno.EISDIR: "name a file",
    errno.ENOTDIR: "choose another folder",
    errno.EEXIST: "choose another folder",
    errno.EROFS: "choose another folder",
    errno.ENAMETOOLONG: "use a shorter name",
    errno.ELOOP: "check the links",
    errno.EMFILE: "raise the limit, ulimit -n",
    **dict.fromkeys((errno.ENOSPC, errno.EFBIG, errno.EDQUOT), _FULL),
}
"""errno → how to fix it."""


def _one_line(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return str(missing_extra(error))
    if isinstance(error, OSError):
        where = "".join(f"{name}: " for name in (error.filename, error.filename2) if name)
        return f"{where}{error.strerror or error}: {_ADVICE.get(error.errno or 0, 'check the file and its disk')}"
    words = " ".join(str(error).split())
    if isinstance(error, TformerError):
        return words
    if isinstance(error, MemoryError) or "allocate memory" in words or "out of memory" in words:  # PyTorch's
        return "out of memory: ask for less at a time, or use a machine with more"
    return f"a bug in tformer, {type(error).__name__}: {words}: run it with tformer --debug and report the trace"


def _exit_code(error: Exception) -> int:
    if isinstance(error, Interrupted):
        return 130
    return 3 if isinstance(error, ParityError) else 1
