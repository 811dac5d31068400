"""ONNX Runtime. Its library is imported with the first engine that is opened."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ...bundle.plans import trt_variant

if TYPE_CHECKING:
    from ..base import Encoder, Engine
    from ..spec import Opening


def load_runtime() -> None:
    """Raises ConfigError for a library that is too old, or two that overwrite each other."""
    from .library import check_library

    check_library()


def shared_library() -> str:
    """The library's file in the Python package, or the one that is named; empty: neither is there."""
    spec = find_spec("onnxruntime")
    files = sorted((Path(spec.origin).parent / "capi").glob("libonnxruntime.so.*")) if spec and spec.origin else []
    return os.environ.get("TFORMER_ONNXRUNTIME") or (str(files[0]) if files else "")


def open_engine(opening: Opening) -> Engine:
    """The class for the variant's target."""
    bundle, threads, variant = opening.bundle, opening.threads, opening.variant
    if not variant:
        from .standard import OrtEngine

        return OrtEngine(bundle, threads)
    if bundle.variants[variant].target == "trt":
        trt_variant(bundle)  # refuses graphs that it cannot feed
        from .device_search import DeviceSearchEngine

        return DeviceSearchEngine(bundle, threads, variant, opening.device)
    from .in_place import InPlaceEngine

    return InPlaceEngine(bundle, threads, variant, opening.shortlist)


def open_encoder(opening: Opening) -> Encoder:
    """The graph `memory` of a variant or of the standard graphs."""
    from .memory import OrtMemory

    return OrtMemory(opening.bundle, opening.threads, opening.variant)
