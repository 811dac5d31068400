from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Files = str | Mapping[str, Buffer] | Callable[[str], Buffer | None]
"""A bundle: its folder, or its files by names such as manifest.json and native-int8/weights.data, as a mapping or as a
function that returns None for a file that does not exist, or raises FileNotFoundError. Bytes must not change while a
model uses them, and weights of the CPU engine are copied unless they begin at a multiple of 64."""

__version__: str

class Error(Exception):
    """`args`: message, status (`Status` of engines/src/errors.hpp) and number of the request; as text the message."""

class Outputs:
    """The only outputs that may come."""

    def __init__(self, outputs: Sequence[Sequence[int]]) -> None: ...

class State:
    """Caches and lengths of some sentences, and the engine that is theirs as long as they live. For one thread."""

    sentences: int
    src_tokens: int
    def admit(
        self, src_ids: Ints, src_lengths: Ints, beams: int, tokens: int, required: Sequence[Sequence[int]]
    ) -> None: ...
    def best(self, beams: int) -> int: ...
    def step(self, tokens: Ints, full: bool, attention: bool) -> tuple[Ints, Floats, Floats | None, Floats | None]: ...
    def reorder(self, parents: Ints, sentences: Ints | None) -> None: ...
    def cross_keys_values(self) -> list[Floats]: ...

class Joined:
    """A search that shares an engine's steps with others."""

    def __init__(
        self,
        batch: Running,
        src_ids: Ints,
        src_lengths: Ints,
        numbers: Sequence[int],
        prefixes: Sequence[Sequence[int]],
        options: str,
        allowed: Outputs | None,
        on_token: Callable[[int], object] | None,
    ) -> None:
        """`options`: JSON. `on_token`: called in `Running.step` with each token of a search of one source and row."""
    @property
    def running(self) -> bool: ...
    def outputs(self) -> list[list[tuple[list[int], int | None, float, float, list[int]]]]:
        """As `Model.search` returns them. Raises the error that ended it."""

class Running:
    """Continuous batching: searches join and leave between steps. An error in a step or in `remove` ends all."""

    def add(self, searches: Sequence[Joined]) -> None: ...
    def step(self) -> None: ...
    def remove(self, search: Joined) -> None: ...

class Model:
    """An open variant of a bundle, for any number of threads.

    Raises Error; TypeError and ValueError for wrong arrays.
    """

    def __init__(
        self,
        bundle: Files,
        variant: str,
        threads: int,
        shortlist: bool = False,
        kernels: str = "",
        onnxruntime: str | None = None,
        tensorrt: str | None = None,
        name: str = "memory",
    ) -> None:
        """`name`: what messages call a bundle that is no folder. `onnxruntime`: the file of the library that runs the
        bundle's graphs; `tensorrt`: of the one that runs its plans, or its folder, "" where the loader finds it;
        without both, the CPU engine runs a program."""
    @property
    def limits(self) -> tuple[int, int, int, int]:
        """Sentences, source tokens, target tokens, beams."""
    @property
    def attention(self) -> bool: ...
    @property
    def admits(self) -> bool: ...
    @property
    def batch_tokens(self) -> int: ...
    @property
    def warning(self) -> str:
        """Why it runs slower than it could, if that is known by now."""
    def encode(
        self, src_ids: Ints, src_lengths: Ints, beams: int, tokens: int, required: Sequence[Sequence[int]]
    ) -> State: ...
    def continuous(self) -> Running:
        """A batch that nobody has joined yet, with an engine of its own."""
    def memory(self, src_ids: Ints, src_lengths: Ints) -> Floats:
        """The encoder's own output, (B * S * E)."""
    def search(
        self,
        src_ids: Ints,
        src_lengths: Ints,
        numbers: Sequence[int],
        prefixes: Sequence[Sequence[int]],
        options: str,
        allowed: Outputs | None,
        strict: bool,
        calls: list[tuple[str, float, float]] | None,
    ) -> list[list[tuple[list[int], int | None, float, float, list[int]]]]:
        """Of each source its outputs: ids, end token, score, value, alignment. `options`: JSON. `calls` gets those of
        the engine: name, begin and end in seconds of time.perf_counter."""

def variants(bundle: Files, name: str = "memory") -> list[dict[str, Any]]:
    """What a bundle has, without opening a model: name, backend, precision, source_tokens, target_tokens, beams,
    is_default, attention and shortlist of each variant, as `tformer_variant` of tformer.h explains them."""

def options(bundle: Files | None = None, name: str = "memory") -> list[dict[str, Any]]:
    """Decoding options with the defaults of a bundle, or of the library: name, type, value, values, help, least and
    most of each, as `tformer_option` of tformer.h explains them."""

def on_log(callback: Callable[[int, str], object] | None) -> None:
    """Call this with a level of `logging` and a message about what the library decides, in the whole process: that may
    be `logging.getLogger("tformer").log`. Threads may call it at the same time."""

def tensorrt_headers() -> str:
    """The version of the TensorRT headers that this was built with, such as 11.1.0; "": it runs no plans."""

def kernels() -> list[str]:
    """The instruction sets that this build knows, best first."""

def best_kernels() -> str:
    """The best that this machine has."""

def product_rate(numbers: str, threads: int) -> float:
    """Operations a second of products of fp32 or int8."""
