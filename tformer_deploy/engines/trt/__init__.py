"""TensorRT: its plans, and the GPU that they run on. Its packages are imported with the first engine that is opened."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..base import Engine
    from ..spec import Opening


def load_runtime() -> None:
    """Raises EngineError where a package that is installed does not load."""
    from . import engine  # noqa: F401
    from .api import installed, load_tensorrt

    for flavor in installed():
        load_tensorrt(flavor)


def open_engine(opening: Opening) -> Engine:
    """The plans of a precision, or of the first that there are plans of."""
    from .engine import TrtEngine

    return TrtEngine(opening.bundle, opening.variant)
