"""Layout `optimum`: the folder that optimum-onnx's ORTModelForSeq2SeqLM opens, and plain ONNX Runtime programs feed."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from ...base.files import write_json
from .hf_config import config_json, generation_json, refused
from .hf_graphs import DECODER, ENCODER, MERGED, WITH_PAST, make_graph, save_graph
from .hf_precisions import lowered
from .hf_runtime import plain_runtime
from .hf_text import write_text
from .layout import Generate, Source

RUNTIME = "onnxruntime"
FP32, APART = "fp32", "fp32, apart"
PRECISIONS = {FP32: True, APART: True}
"""The merged decoder, and the two that it is made of."""
GRAPHS = {FP32: (ENCODER, MERGED), APART: (ENCODER, DECODER, WITH_PAST)}
BEAMS = (1, 4)


def refuse(source: Source) -> Iterable[str]:
    """See `Layout.refuse`."""
    return refused(source, beams=True)


def write(source: Source, folder: Path) -> None:
    """See `Layout.write`."""
    model = source.checkpoint.load_model()
    for name in (ENCODER, DECODER, WITH_PAST, MERGED):
        save_graph(lowered(make_graph(name, model)), folder / f"{name}.onnx", source.checkpoint.weights_sha256)
    write_json(folder / "config.json", config_json(source))
    write_json(folder / "generation_config.json", generation_json(source, beams=True))
    write_text(source, folder, marian=True)


def open_runtime(source: Source, folder: Path, precision: str) -> AbstractContextManager[Generate]:
    """See `Layout.open_runtime`."""
    return plain_runtime(source.config, folder, GRAPHS[precision])
