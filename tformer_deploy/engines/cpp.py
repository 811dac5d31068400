"""The C++ runtime, in a process of its own: its crashes become one-line errors.

`engines/examples/tformer_engine.cpp` answers. It links the objects of `libtformer`, as the library exports translation
alone and a check needs every step.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import IO, Any, Self

import numpy as np

from .. import __version__
from ..base.errors import (
    ArtifactError,
    ConfigError,
    DataError,
    EngineError,
    LimitError,
    MissingExtra,
    NoRoom,
    NotNumbers,
    TformerError,
)
from ..base.machine import cores
from ..base.processes import PATIENCE_SECONDS, describe_end
from ..bundle.manifest import Bundle
from ..model.config import BATCH_TOKENS
from .base import ANYTHING, Batch, Calls, Floats, Hypothesis, Ints, Limits, Options, Outlook, Outputs, Scores
from .spec import Opening

PROGRAM = "TFORMER_CPP_ENGINE"
"""The environment variable that names the program."""
BUILT = Path(__file__).parent.parent.parent / "engines" / "build" / "examples" / "tformer-engine"
"""Where a checkout builds it."""
ENCODE, STEP, REORDER, CROSS, BEST, SEARCH, ADMIT = range(7)
KINDS: dict[int, type[TformerError]] = {
    1: ConfigError,
    2: ArtifactError,
    3: LimitError,
    4: DataError,
    5: EngineError,
    6: NotNumbers,
    7: MissingExtra,
    9: NoRoom,
}
"""By the `Status` of `engines/src/errors.hpp`; others are faults of the runtime: EngineError."""
MOST_STATUS = 10


def error_of(status: int, message: str) -> TformerError:
    """An error of the C++ runtime, in one line."""
    return KINDS.get(status, EngineError)("".join(letter if letter.isprintable() else " " for letter in message))


def program() -> Path:
    """The program. Raises MissingExtra."""
    named = os.environ.get(PROGRAM)
    path = Path(named) if named else BUILT
    if not path.is_file():
        raise MissingExtra(f"the C++ engine is not at {path}: run make cpp in a checkout, or name it in {PROGRAM}")
    return path


def onnxruntime_library() -> str:
    """The wheel's library, so that both runtimes compute with the same; empty: the program looks for one."""
    spec = find_spec("onnxruntime")
    found = sorted((Path(spec.origin).parent / "capi").glob("libonnxruntime.so.*")) if spec and spec.origin else []
    return os.environ.get("TFORMER_ONNXRUNTIME") or (str(found[0]) if found else "")


def load_runtime() -> None:
    """Raises MissingExtra where the program is not built."""
    program()


def open_engine(opening: Opening) -> CppEngine:
    """The engine of the standard graphs or of a variant; it reads the lists itself."""
    return CppEngine(opening.bundle, opening.threads, opening.variant, opening.shortlist is not None)


@dataclass
class CppState:
    """A state of the program's, by its number."""

    number: int
    src_tokens: int
    sentences: int
    freed: list[int]

    def __del__(self) -> None:
        self.freed.append(self.number)


class CppEngine:
    """Runs a bundle's standard graphs, or a variant's, in C++. Threads take turns, a request and its answer each."""

    searches, batch_tokens = False, BATCH_TOKENS

    def __init__(self, bundle: Bundle, threads: int = 0, variant: str = "", shortlist: bool = False) -> None:
        self.bundle, self.config, self.variant = bundle, bundle.config, variant
        self.threads, self.shortlist = threads or cores(), shortlist
        self.recipe = bundle.variants[variant] if variant else bundle.recipe
        self.limits = Limits.of(self.recipe.axes)
        self.attention, self.admits, self.precision = False, False, str(self.recipe.precision)

    def __enter__(self) -> Self:
        self._program, self._freed, self._turn = program(), list[int](), Lock()
        # A file, as nobody reads a pipe while the program writes.
        self._stderr: IO[bytes] = tempfile.TemporaryFile()
        threads, shortlist = self.threads, int(self.shortlist)
        asked = self.bundle.directory, self.variant or "fp32", threads, shortlist, onnxruntime_library()
        try:
            self._process = subprocess.Popen(
                [self._program, *map(str, asked)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr
            )
        except OSError as error:
            self._stderr.close()
            raise EngineError(f"{self._program} cannot be run ({error.strerror}): run make cpp") from None
        try:
            self._greet()
        except BaseException:
            self._end(kill=True)
            raise
        return self

    def _greet(self) -> None:
        """What the program says of itself. Raises EngineError where it is another, or reads other limits."""
        self._check_status()
        limits, abilities, version = self._ints().tolist(), self._ints(), self._text()
        if version != __version__:
            raise EngineError(f"{self._program} is of version {version}, this is {__version__}: run make cpp")
        own = [self.limits.batch, self.limits.src_tokens, self.limits.tgt_tokens, self.limits.beams]
        if limits != own:
            raise EngineError(f"the C++ engine reads other limits from the bundle: {limits}, not {own}")
        self.attention, self.admits = map(bool, abilities)

    def __exit__(self, *why: object) -> None:
        self._end(kill=why[0] is not None)

    def _end(self, kill: bool) -> None:
        if kill:
            self._process.kill()
        try:
            self._process.communicate(timeout=PATIENCE_SECONDS)  # closes its standard input first
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._stderr.close()

    def encode(self, src_ids: Ints, src_lengths: Ints, outlook: Outlook = ANYTHING) -> CppState:
        """See `Engine.encode`."""
        with self._asked(ENCODE, None, src_ids, src_lengths, *_words(outlook)):
            return CppState(int(self._ints()[0]), src_ids.shape[1], len(src_ids), self._freed)

    def admit(self, state: CppState, src_ids: Ints, src_lengths: Ints, outlook: Outlook = ANYTHING) -> None:
        """See `Engine.admit`."""
        with self._asked(ADMIT, state, src_ids, src_lengths, *_words(outlook)):
            pass
        state.src_tokens = max(state.src_tokens, src_ids.shape[1])
        state.sentences += len(src_ids)

    def best(self, beams: int, state: CppState) -> int:
        """See `Engine.best`."""
        with self._asked(BEST, state, [beams]):
            return int(self._ints()[0])

    def step(self, tokens: Ints, state: CppState, full: bool = False, attention: bool = False) -> Scores:
        """See `Engine.step`."""
        with self._asked(STEP, state, tokens, [full, attention]):
            best = int(self._ints()[0])
            ids, scores, log_probs, looked = self._ints(), self._floats(), self._floats(), self._floats()
        sizes = best, best, self.config.tgt_vocab if full else 0, state.src_tokens if attention else 0
        for array, size in zip((ids, scores, log_probs, looked), sizes, strict=True):
            if array.size != tokens.size * size:
                raise EngineError(f"the C++ engine gave {array.size} numbers for {tokens.size} rows of {size}")
            array.shape = *tokens.shape, size
        return Scores(ids, scores, log_probs if full else None, looked if attention else None)

    def reorder(self, state: CppState, parents: Ints, sentences: Ints | None = None) -> None:
        """See `Engine.reorder`."""
        kept = range(state.sentences) if sentences is None else sentences
        with self._asked(REORDER, state, parents, kept):
            pass
        state.sentences = len(kept)

    def cross_keys_values(self, state: CppState) -> list[Floats]:
        """See `Engine.cross_keys_values`."""
        side = self.config.decoder
        shape = -1, side.heads, state.src_tokens, side.head_dim
        with self._asked(CROSS, state):
            return [self._floats().reshape(shape) for _ in range(2 * side.layers)]

    def layers(self, src_ids: Ints, src_lengths: Ints, tgt_ids: Ints) -> dict[str, Floats]:
        """See `Engine.layers`: the runtime shows none. Raises EngineError."""
        raise EngineError("the C++ engine shows no layers: --backend ort finds them")

    def search(
        self,
        batch: Batch,
        options: Options,
        allowed: Outputs | None = None,
        strict: bool = False,
        calls: Calls | None = None,
    ) -> list[list[Hypothesis]]:
        """See `Searches.search`. The program takes neither prefixes nor a set of outputs, which no check asks for."""
        assert not (batch.prefixes or allowed or strict)
        text = options.to_json().encode()
        words = np.frombuffer(text.ljust(-(-len(text) // 4) * 4), np.int32)
        with self._asked(SEARCH, None, batch.src_ids, batch.src_lengths, list(batch.numbers), words):
            counts, outputs = self._ints().tolist(), self._ints()
        found: list[list[Hypothesis]] = []
        place = 0
        for count in counts:
            found.append([])
            for _ in range(count):
                size, end_id = outputs[place : place + 2].tolist()
                score, value = outputs[place + 2 : place + 6].copy().view(np.float64).tolist()
                ids = outputs[place + 6 : place + 6 + size].tolist()
                found[-1].append(Hypothesis(ids, None if end_id < 0 else end_id, score, value))
                place += 6 + size
        return found

    @contextmanager
    def _asked(self, call: int, state: CppState | None, *arrays: Ints | Sequence[int]) -> Iterator[None]:
        """A request whose answer the block reads; other threads wait. Raises what `_ask` does."""
        with self._turn:
            self._ask(call, state, *arrays)
            yield

    def _ask(self, call: int, state: CppState | None, *arrays: Ints | Sequence[int]) -> None:
        """Send a request and read its status. Raises the program's error, EngineError where it has ended."""
        freed = [self._freed.pop() for _ in range(len(self._freed))]
        assert self._process.stdin
        try:
            for array in ([call, state.number if state else -1], freed, *arrays):
                words = np.ascontiguousarray(array, np.int32)
                self._process.stdin.write(np.uint64(words.size).tobytes())
                self._process.stdin.write(words.tobytes())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        self._check_status()

    def _check_status(self) -> None:
        if (status := int(self._read(1, np.int32)[0])) not in range(MOST_STATUS + 1):
            raise EngineError(f"{self._program} does not answer as tformer-engine does: run make cpp")
        if status:
            raise error_of(status, self._text())

    def _ints(self) -> Ints:
        found: Ints = self._array(np.int32)
        return found

    def _floats(self) -> Floats:
        found: Floats = self._array(np.float32)
        return found

    def _text(self) -> str:
        return str(self._array(np.uint8).tobytes(), errors="replace").rstrip()

    def _array(self, dtype: type[np.generic]) -> Any:
        words = int(self._read(1, np.uint64)[0])
        return self._read(words * 4 // np.dtype(dtype).itemsize, dtype)

    def _read(self, count: int, dtype: type[np.generic]) -> Any:
        array = np.empty(count, dtype)
        out: Any = self._process.stdout
        if count and out.readinto(array.view(np.uint8)) != array.nbytes:
            raise self._ended()
        return array

    def _ended(self) -> EngineError:
        """How the program ended, and its last words."""
        code = self._process.wait()
        self._stderr.seek(0)
        words = self._stderr.read().decode(errors="replace").strip().splitlines()
        return EngineError(f"the C++ engine's process {describe_end(code, words)}")


def _words(outlook: Outlook) -> tuple[list[int], list[int], list[int]]:
    """Sizes; how many tokens each source requires; these."""
    required = [token for ids in outlook.required for token in ids]
    return [outlook.beams, outlook.tokens], [len(ids) for ids in outlook.required], required
