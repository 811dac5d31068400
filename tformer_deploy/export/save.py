"""Graphs to files: `<name>.onnx`, and one file of weights that they share."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto
from onnx.external_data_helper import set_external_data

from ..base.errors import ArtifactError
from ..bundle.contract import GRAPHS, WEIGHTS
from ..bundle.origin import ORIGINS, Origin, read_origins

PAGE = 4096
"""Bytes. Smaller arrays stay in the graph; the others begin at one, so that a runtime can map them into memory."""
MESSAGE = 300
"""Characters of an onnx message that our errors quote."""
INDICES = (TensorProto.INT32, TensorProto.INT64)
"""Sizes and places, which stay in the graph in any case: it can then be understood without its weights."""


@contextmanager
def reading(graph: Path) -> Iterator[None]:
    """Turn onnx's errors about a graph's file, or the weights beside it, into one line. Raises ArtifactError."""
    try:
        yield
    except (ValueError, DecodeError, onnx.checker.ValidationError) as error:
        said = " ".join(str(error).split())[:MESSAGE]
        raise ArtifactError(
            f"{graph} is damaged, or tformer did not make it ({said}): copy or export the bundle again"
        ) from None


def load_graph(path: Path, weights: bool = True) -> onnx.ModelProto:
    """Read a graph, with the weights beside it. Raises ArtifactError, also for weights outside its folder."""
    with reading(path):
        return onnx.load(path, load_external_data=weights)


def weights_read(directory: Path) -> dict[str, Any]:
    """What each standard graph reads of its weights, as the manifest has it: what `bench` compares its times with.

    `matmuls`: inputs and outputs of each matrix; `others`: numbers of all other weights. Of tables that rows are taken
    from, nothing counts.
    """
    found: dict[str, Any] = {}
    for name in GRAPHS if (directory / f"{GRAPHS[0]}.onnx").is_file() else ():  # a module may have an encoder alone
        graph = load_graph(directory / f"{name}.onnx", weights=False).graph
        shapes = {t.name: list(t.dims) for t in graph.initializer if t.dims and t.data_type == TensorProto.FLOAT}
        tables = {node.input[0] for node in graph.node if node.op_type in ("Gather", "Slice")}
        products = [
            node.input[1] for node in graph.node if node.op_type == "MatMul" and len(shapes.get(node.input[1], ())) == 2
        ]
        others = shapes.keys() - tables - set(products)
        matmuls = [shapes[each] for each in products]
        found[name] = {"matmuls": matmuls, "others": sum(math.prod(shapes[each]) for each in others)}
    return found


def origins_of(model: onnx.ModelProto, path: Path) -> dict[str, Origin]:
    """What the constants of a graph from a file are made of, by name. Raises ArtifactError."""
    with reading(path):
        metadata = {each.key: each.value for each in model.metadata_props}
        if ORIGINS not in metadata:
            raise ValueError(f"no {ORIGINS}")
        return read_origins(metadata[ORIGINS])


def save_graphs(models: Mapping[str, onnx.ModelProto], directory: Path) -> None:
    """Write models that pass onnx.checker, by their names; of equal arrays, such as tied tables, one is written."""
    offsets: dict[bytes, int] = {}
    with (directory / WEIGHTS).open("wb") as file:
        for model in models.values():
            for tensor in model.graph.initializer:
                if len(tensor.raw_data) < PAGE or tensor.data_type in INDICES:
                    continue
                digest = hashlib.sha256(tensor.raw_data).digest()
                if digest not in offsets:
                    file.write(bytes(-file.tell() % PAGE))
                    offsets[digest] = file.tell()
                    file.write(tensor.raw_data)
                set_external_data(tensor, WEIGHTS, offsets[digest], len(tensor.raw_data))
                tensor.ClearField("raw_data")
    for name, model in models.items():
        onnx.save_model(model, directory / f"{name}.onnx")
        onnx.checker.check_model(directory / f"{name}.onnx", full_check=True)
