"""libtformer with ONNX Runtime, in this process: what C and C++ programs run, for `tformer check`."""

from __future__ import annotations

from .native import NativeEngine, load_runtime
from .ort import shared_library
from .spec import Opening

__all__ = ["CppEngine", "load_runtime", "open_engine"]


def open_engine(opening: Opening) -> CppEngine:
    """The engine of the standard graphs or of a variant. It reads the bundle's shortlist itself."""
    return CppEngine(opening.bundle, opening.threads, opening.variant, opening.shortlist is not None)


class CppEngine(NativeEngine):
    """Runs a bundle's standard graphs, or a variant's. Python's search decodes, so that every step can be compared."""

    searches, encodes = False, False

    def onnxruntime(self) -> str:
        """The library of the Python package, so that `ort` and this one compute with the same."""
        return shared_library()
