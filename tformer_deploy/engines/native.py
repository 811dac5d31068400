"""libtformer in this process, by the binding `tformer_native`: its CPU engine, and what `cpp.py` shares with that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

import tformer_native
from tformer_native import Error, Model, State, tensorrt_headers
from tformer_native import Outputs as Compiled
from tformer_native import __version__ as native_version

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
from ..bundle.manifest import Bundle
from ..model.config import BATCH_TOKENS
from .base import (
    ANYTHING,
    Batch,
    Calls,
    Floats,
    Hypothesis,
    Ints,
    Limits,
    Options,
    Outlook,
    Outputs,
    Request,
    Scores,
)
from .spec import STANDARD, Opening

__all__ = ["InCpp", "NativeBatch", "NativeEngine", "load_runtime", "open_engine", "tensorrt_headers"]

R = TypeVar("R")
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
"""By the `Status` of `engines/src/errors.hpp`; others are faults of the library: EngineError."""


def load_runtime() -> None:
    """Raises MissingExtra where the binding is of another version."""
    if native_version != __version__:
        raise MissingExtra(
            f"tformer-native is of version {native_version}, this is {__version__}: "
            f"install the wheel of {__version__}, or make native in a checkout"
        )


def open_engine(opening: Opening) -> NativeEngine:
    """The engine of a program. It reads the bundle's shortlist itself."""
    return NativeEngine(opening.bundle, opening.threads, opening.variant, opening.shortlist is not None)


open_encoder = open_engine


class InCpp:
    """What the library has opened, as far as its continuous batching needs it."""

    _model: Any = None
    _allowed: tuple[Outputs, Any] | None = None

    def open(self, own: Limits, *arguments: Any, **options: Any) -> None:
        """Open a bundle. Raises EngineError where its limits are not our own."""
        model = _call(Model, *arguments, **options)
        if (limits := model.limits) != (own.batch, own.src_tokens, own.tgt_tokens, own.beams):
            raise EngineError(f"tformer-native reads other limits from the bundle: {limits}, not {own}")
        self._model = model

    def batch(self) -> tformer_native.Running:
        """A batch of the library's."""
        return _call(self._model.continuous)

    def compiled(self, allowed: Outputs) -> Any:
        """The allowed outputs as a trie in C++; cached for the next call."""
        cached = self._allowed  # another thread may replace it meanwhile
        if not cached or cached[0] is not allowed:
            cached = self._allowed = allowed, _call(Compiled, list(allowed.outputs()))
        return cached[1]


class NativeEngine(InCpp):
    """Runs the program of a variant. Any number of threads may decode; each state has threads and memory of its own."""

    searches, encodes, no_continuous = True, True, ""

    def __init__(self, bundle: Bundle, threads: int, variant: str, shortlist: bool = False) -> None:
        load_runtime()
        self.bundle, self.config, self.variant = bundle, bundle.config, variant
        self.threads, self.shortlist = threads or cores(), shortlist
        self.recipe = bundle.variants[variant] if variant else bundle.recipe
        self.limits = Limits.of(self.recipe.axes)
        self.attention, self.admits, self.precision = False, True, str(self.recipe.precision)
        self.batch_tokens = BATCH_TOKENS

    def __enter__(self) -> Self:
        folder = str(self.bundle.directory)
        variant, library = self.variant or STANDARD, self.onnxruntime()
        self.open(self.limits, folder, variant, self.threads, self.shortlist, onnxruntime=library)
        self.attention, self.admits = self._model.attention, self._model.admits
        self.batch_tokens = self._model.batch_tokens
        return self

    def __exit__(self, *why: object) -> None:
        self._model = self._allowed = None

    def onnxruntime(self) -> str | None:
        """The file of the library that runs the bundle's graphs; None: the CPU engine runs a program."""
        return None

    def encode(self, src_ids: Ints, src_lengths: Ints, outlook: Outlook = ANYTHING) -> State:
        """See `Engine.encode`."""
        sizes = outlook.beams, outlook.tokens, outlook.required
        state: State = _call(self._model.encode, src_ids, src_lengths, *sizes)
        return state

    def admit(self, state: State, src_ids: Ints, src_lengths: Ints, outlook: Outlook = ANYTHING) -> None:
        """See `Engine.admit`."""
        _call(state.admit, src_ids, src_lengths, outlook.beams, outlook.tokens, outlook.required)

    def best(self, beams: int, state: State) -> int:
        """See `Engine.best`."""
        return int(_call(state.best, beams))

    def step(self, tokens: Ints, state: State, full: bool = False, attention: bool = False) -> Scores:
        """See `Engine.step`."""
        return Scores(*_call(state.step, tokens, full, attention))

    def reorder(self, state: State, parents: Ints, sentences: Ints | None = None) -> None:
        """See `Engine.reorder`."""
        _call(state.reorder, parents, sentences)

    def memory(self, src_ids: Ints, src_lengths: Ints) -> Floats:
        """See `Encoder.memory`."""
        memory: Floats = _call(self._model.memory, src_ids, src_lengths)
        return memory.reshape(*src_ids.shape, self.config.encoder.width)

    def cross_keys_values(self, state: State) -> list[Floats]:
        """See `Engine.cross_keys_values`."""
        side = self.config.decoder
        shape = state.sentences, side.heads, state.src_tokens, side.head_dim
        return [each.reshape(shape) for each in _call(state.cross_keys_values)]

    def layers(self, src_ids: Ints, src_lengths: Ints, tgt_ids: Ints) -> dict[str, Floats]:
        """See `Engine.layers`: libtformer shows none. Raises EngineError."""
        raise EngineError("the C++ engine shows no layers: --backend ort finds them")

    def search(
        self,
        batch: Batch,
        options: Options,
        allowed: Outputs | None = None,
        strict: bool = True,
        calls: Calls | None = None,
    ) -> list[list[Hypothesis]]:
        """See `Searches.search`."""
        compiled = self.compiled(allowed) if allowed else None
        sources = batch.src_ids, batch.src_lengths, list(batch.numbers), batch.prefixes
        return _hypotheses(_call(self._model.search, *sources, options.to_json(), compiled, strict, calls))

    def continuous(self) -> NativeBatch:
        """See `Continues.continuous`."""
        return NativeBatch(self)


class NativeBatch:
    """Continuous batching in the library: a step and its search run without Python."""

    def __init__(self, engine: InCpp) -> None:
        self.engine, self._searches = engine, list[NativeSearch]()
        self._batch: tformer_native.Running | None = None
        """None while nobody runs: its engine has threads and memory."""

    def add(self, requests: Sequence[Request]) -> list[NativeSearch]:
        """See `Running.add`."""
        try:
            if self._batch is None:
                self._batch = self.engine.batch()
            made = [NativeSearch(self.engine, self._batch, each) for each in requests]
            _call(self._batch.add, [search.joined for search in made])
            self._searches += made
        finally:
            self._tidy()
        return made

    def remove(self, search: NativeSearch) -> None:
        """See `Running.remove`."""
        self._change(lambda batch: batch.remove(search.joined))

    def step(self) -> None:
        """See `Running.step`."""
        self._change(lambda batch: batch.step())

    def _change(self, change: Callable[[tformer_native.Running], None]) -> None:
        try:
            if self._batch:
                _call(change, self._batch)
        finally:
            self._tidy()

    def _tidy(self) -> None:
        self._searches = [search for search in self._searches if search.running]
        if not self._searches:
            self._batch = None


class NativeSearch:
    """A search in a `NativeBatch`."""

    def __init__(self, engine: InCpp, batch: tformer_native.Running, asked: Request) -> None:
        own = asked.batch
        compiled = engine.compiled(asked.allowed) if asked.allowed else None
        sources = own.src_ids, own.src_lengths, list(own.numbers), own.prefixes
        made = _call(tformer_native.Joined, batch, *sources, asked.options.to_json(), compiled, asked.on_token)
        self.joined: tformer_native.Joined = made

    @property
    def running(self) -> bool:
        """See `Joined.running`."""
        return bool(self.joined.running)

    def outputs(self) -> list[list[Hypothesis]]:
        """See `Joined.outputs`."""
        return _hypotheses(_call(self.joined.outputs))


def _hypotheses(results: Sequence[Sequence[tuple[Any, ...]]]) -> list[list[Hypothesis]]:
    return [[Hypothesis(*output) for output in outputs] for outputs in results]


def _call(function: Callable[..., R], *arguments: Any, **options: Any) -> R:
    """Call the binding. Raises its error as a TformerError of one line."""
    try:
        return function(*arguments, **options)
    except Error as error:
        message, status, request = error.args
        line = "".join(letter if letter.isprintable() else " " for letter in message)
        kind = KINDS.get(status, EngineError)
        raise NotNumbers(line, request) if kind is NotNumbers else kind(line) from None
