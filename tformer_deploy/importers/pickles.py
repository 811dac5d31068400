"""Untrusted pickles: a pickle is inspected before it is loaded, and nothing that it names is executed."""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path
from typing import IO, Any

from ..base.errors import ArtifactError
from ..base.headers import DAMAGED, content

PICKLE_BYTES = 64 << 20
"""A longer file is no vocabulary."""
MOST_IN_TUPLES = 1 << 20
"""A few bytes may nest tuples so that one of them, as a key, is hashed for years."""
TUPLES = ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3")
PUTS, GETS = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), ("GET", "BINGET", "LONG_BINGET")


def require_flat(file: IO[bytes]) -> None:
    """Read a pickle without making anything of it.

    Raises ValueError for a tuple that holds too much, however often the same, and others of `DAMAGED` for no pickle.
    """
    stack: list[int | None] = []  # how many values each object is hashed by; None: a mark
    memo: dict[int, int | None] = {}
    for code, argument, _ in pickletools.genops(file):
        if code.name in PUTS:
            place = int(len(memo) if argument is None else argument)
            if place > 2 * len(memo) + 16:  # an array of so many places would be made
                raise ValueError(f"object {place} follows object {len(memo)}")
            memo[place] = stack[-1]
        elif code.name in GETS:
            stack.append(memo[int(argument or 0)])
        elif code.name in ("MARK", "DUP"):
            stack.append(None if code.name == "MARK" else stack[-1])
        else:
            taken = _taken(stack, code)
            if code.name in TUPLES:
                stack.append(1 + sum(taken))
                if stack[-1] > MOST_IN_TUPLES:  # type: ignore[operator]
                    raise ValueError("tuples within tuples hold too much")
            else:
                stack += [1] * len(code.stack_after)


def _taken(stack: list[int | None], code: pickletools.OpcodeInfo) -> list[int]:
    """Pop an instruction's operands from the stack."""
    count, taken = len(code.stack_before), []
    if pickletools.markobject in code.stack_before:
        count = code.stack_before.index(pickletools.markobject)
        while (top := stack.pop()) is not None:
            taken.append(top)
    return taken + [stack.pop() or 0 for _ in range(count)]


def load_plain_pickle(path: Path) -> Any:
    """A pickle of dicts, lists, texts and numbers; anything else is refused. Raises ArtifactError."""

    class Plain(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if (module, name) == ("collections", "OrderedDict"):
                return dict
            raise pickle.UnpicklingError(f"{module}.{name}")

    found = content(path, PICKLE_BYTES)
    try:
        require_flat(io.BytesIO(found))
        return Plain(io.BytesIO(found)).load()
    except pickle.UnpicklingError as error:
        refused = f"{path} is refused: loading it would execute {error}"
        raise ArtifactError(f"{refused}: write the words to a text file, one a line") from None
    except DAMAGED as error:
        raise ArtifactError(f"{path} is damaged: {error!r:.200}: copy it again") from None
