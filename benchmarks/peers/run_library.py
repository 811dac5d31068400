"""libtformer through its C API, measured from inside: the CPU engine and the search in C++."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import POINTER, byref, c_char_p, c_double, c_int, c_int32, c_size_t, c_uint64, c_void_p
from typing import Any

from .serve import config, serve


class Ids(ctypes.Structure):
    """`tformer_ids`"""

    _fields_ = (("data", POINTER(c_int32)), ("size", c_size_t))


class Output(ctypes.Structure):
    """`tformer_output`"""

    _fields_ = (
        ("text", c_void_p),
        ("text_size", c_size_t),
        ("ids", POINTER(c_int32)),
        ("ids_size", c_size_t),
        ("alignment", POINTER(c_int32)),
        ("score", c_double),
        ("value", c_double),
        ("finished", c_int),
    )


class LibraryError(Exception):
    """What the library says of a call that failed."""


class Native:
    """A model that is open, and a translator for each kind of request."""

    def __init__(self, library: str, bundle: str, how: Mapping[str, Any]) -> None:
        self.c, self.how = ctypes.CDLL(library), how
        for name in ("options_new", "results_output"):
            getattr(self.c, f"tformer_{name}").restype = c_void_p
        self.c.tformer_error.restype = c_char_p
        self.c.tformer_results_output.restype = POINTER(Output)
        self.model = c_void_p()
        self._checked(self.c.tformer_model_open(bundle.encode(), self._options(how), byref(self.model)))
        self.translators: dict[tuple[tuple[str, Any], ...], c_void_p] = {}

    def prepare(self, point: dict[str, Any]) -> tuple[Any, int, dict[str, Any]]:
        """See `Library.prepare`."""
        arrays = [(c_int32 * len(ids))(*ids) for ids in point["sources"]]
        sources = (Ids * len(arrays))(*((array, len(array)) for array in arrays))  # type: ignore[misc]
        return sources, len(arrays), {"beams": point["beams"], "max_tokens": point["max_tokens"]}

    def run(self, prepared: tuple[Any, int, dict[str, Any]], batching: dict[str, Any]) -> list[tuple[list[int], float]]:
        """See `Library.run`."""
        sources, count, asked = prepared
        results, translator = c_void_p(), self._translator({**asked, **batching})
        self._checked(self.c.tformer_generate(translator, sources, c_size_t(count), c_uint64(0), byref(results)))
        found = []
        for line in range(count):
            it = self.c.tformer_results_output(results, c_size_t(line), c_size_t(0)).contents
            found.append((it.ids[: it.ids_size], it.score))
        self.c.tformer_results_free(results)
        return found

    def ids(self, found: Sequence[tuple[list[int], float]]) -> list[list[int]]:
        """See `Library.ids`."""
        return [ids for ids, _ in found]

    def scores(self, prepared: tuple[Any, int, dict[str, Any]], batching: dict[str, Any]) -> list[float]:
        """See `Library.scores`."""
        return [score for _, score in self.run(prepared, batching)]

    def _translator(self, asked: dict[str, Any]) -> c_void_p:
        key = tuple(asked.items())
        if key not in self.translators:
            made = c_void_p()
            options = self._options({"workers": self.how["workers"], **asked})
            self._checked(self.c.tformer_translator_new(self.model, options, byref(made)))
            self.translators[key] = made
        return self.translators[key]

    def _options(self, values: Mapping[str, Any]) -> c_void_p:
        made = c_void_p(self.c.tformer_options_new())
        for name, value in values.items():
            self._checked(self.c.tformer_options_set(made, name.encode(), str(value).encode()))
        return made

    def _checked(self, status: int) -> None:
        if status:
            raise LibraryError(self.c.tformer_error().decode())


def main() -> None:
    """Open the model that the command line names."""
    values = config()
    names = ("backend", "variant", "kernels", "threads", "workers")
    how = {name: values[name] for name in names if name in values}
    serve(Native(values["library"], values["bundle"], how), values["points"])


if __name__ == "__main__":
    main()
