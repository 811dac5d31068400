"""Model to ONNX files: trace, passes, metadata, our own signature check."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import onnx
import onnx_ir as ir

from .. import __version__
from ..contract import GRAPHS, graphs_of, layer_names, signature
from ..recipe import Recipe
from .passes import run_passes
from .quantizing import Ranges
from .save import save_graphs
from .signature import compare_signature, name_sizes, read_signature
from .trace import Tracer

IR_VERSION = 10
"""The newest that ONNX Runtime and TensorRT both load."""


def export_graphs(
    tracer: Tracer,
    recipe: Recipe,
    directory: Path,
    weights_sha256: str,
    ranges: Ranges | None = None,
    tokenizers: Mapping[str, str] | None = None,
) -> None:
    """Write the graphs of a recipe and their weights; `ranges`: what `calibrate` found, for int8.

    `tokenizers`: SHA-256 of the files that belong to the model. Raises ArtifactError where a graph does not keep the
    contract.
    """
    models = {}
    for name in graphs_of(recipe):
        exported = build_graph(name, tracer, recipe, ranges or {})
        label(
            exported,
            {
                "tformer.graph": name,
                "tformer.version": __version__,
                "tformer.weights_sha256": weights_sha256,
                "tformer.model": json.dumps(dataclasses.asdict(tracer.model.config)),
                "tformer.recipe": json.dumps(dataclasses.asdict(recipe)),
                **({"tformer.tokenizers": json.dumps(tokenizers)} if tokenizers else {}),
            },
        )
        name_sizes(exported)
        compare_signature(name, read_signature(exported), signature(name, tracer.model.config, recipe))
        models[name] = exported
    directory.mkdir(exist_ok=True)
    save_graphs(models, directory)


def build_graph(name: str, tracer: Tracer, recipe: Recipe, ranges: Ranges) -> onnx.ModelProto:
    """One graph of a recipe: traced, then rewritten by the recipe's passes."""
    model = tracer.graph(name, recipe)
    run_passes(model, recipe.passes(name), recipe, ranges)
    proto = ir.to_proto(model)
    if name in GRAPHS:
        hide(proto, layer_names(name, tracer.model.config))
    return proto


def hide(model: onnx.ModelProto, names: tuple[str, ...]) -> None:
    """Make outputs, which the exporter names, values inside the graph, which a runtime may fuse away."""
    inside = [output for output in model.graph.output if output.name in names]
    model.graph.value_info.extend(inside)
    for output in inside:
        model.graph.output.remove(output)


def label(model: onnx.ModelProto, metadata: dict[str, str]) -> None:
    """Pin the IR version and store what the graph is inside it; drop the exporter's notes on each node."""
    model.ir_version = IR_VERSION
    model.producer_name, model.producer_version = "tformer-deploy", __version__
    for node in model.graph.node:
        del node.metadata_props[:]
    for part in (model.graph.input, model.graph.output, model.graph.value_info, model.graph.initializer):
        for value in part:
            del value.metadata_props[:]
    del model.graph.metadata_props[:]
    onnx.helper.set_model_props(model, metadata)
