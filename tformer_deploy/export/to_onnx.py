"""Model to files: trace, passes, metadata, our own signature check."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
import onnx_ir as ir

from .. import __version__
from ..bundle.contract import GRAPHS, SHORT_GRAPHS, SLOTS_GRAPH, Signature, graphs_of, layer_names, made_of, signature
from ..bundle.origin import ORIGINS, write_origins
from ..bundle.recipe import Recipe
from .graphs import scores_by_product
from .passes import run_passes
from .passes.native import Program, native_program
from .passes.rewriting import ORIGIN
from .program import save_program
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
    about = {
        "tformer.version": __version__,
        "tformer.weights_sha256": weights_sha256,
        "tformer.model": json.dumps(dataclasses.asdict(tracer.model.config)),
        "tformer.recipe": json.dumps(dataclasses.asdict(recipe)),
        **({"tformer.tokenizers": json.dumps(tokenizers)} if tokenizers else {}),
    }
    directory.mkdir(exist_ok=True)
    if recipe.target == "native":
        programs = build_program(tracer, recipe, ranges or {})
        save_program(programs, {"tformer.graph": "program", **about}, directory)
        return
    models = {}
    for name in made_of(recipe, tracer.model.config):
        if name in SHORT_GRAPHS and not scores_by_product(tracer.model):
            continue  # a short step would skip what else the output layer does
        exported = build_graph(name, tracer, recipe, ranges or {})
        label(exported, {"tformer.graph": name, **about})
        name_sizes(exported)
        compare_signature(name, read_signature(exported), signature(name, tracer.model.config, recipe))
        models[name] = exported
    save_graphs(models, directory)


def build_graph(name: str, tracer: Tracer, recipe: Recipe, ranges: Ranges) -> onnx.ModelProto:
    """Trace one graph of a recipe and run the recipe's passes over it."""
    model = tracer.graph(name, recipe)
    run_passes(model, recipe.passes(name), recipe, ranges)
    own_outputs(model.graph, output_names(signature(name, tracer.model.config, recipe)))
    proto = ir.to_proto(model)
    origins = {each: value.meta[ORIGIN] for each, value in model.graph.initializers.items() if ORIGIN in value.meta}
    onnx.helper.set_model_props(proto, {ORIGINS: write_origins(origins)})
    if name in GRAPHS:
        hide(proto, layer_names(name, tracer.model.config))
    return proto


def build_program(tracer: Tracer, recipe: Recipe, ranges: Ranges) -> dict[str, Program]:
    """The programs of a recipe of target `native`, of each of its graphs, made from what ONNX Runtime would run."""
    found = {}
    for name in graphs_of(recipe):
        in_step = name == "decoder_step"
        model = tracer.graph(SLOTS_GRAPH if in_step else name, recipe.as_ort)
        *passes, _ = recipe.passes(name)
        run_passes(model, tuple(passes), recipe, ranges)
        if not in_step:  # whose outputs a program has of itself
            own_outputs(model.graph, output_names(signature(name, tracer.model.config, recipe.as_ort)))
        positions = recipe.axes.past_len.max + 1 if in_step else recipe.axes.src_len.max
        found[name] = native_program(model.graph, positions, "bf16" if recipe.precision == "bf16" else "fp32")
    return found


def output_names(expected: Signature) -> list[str]:
    """Of a graph's contract, in order."""
    return [spec.name for spec in expected.outputs]


def own_outputs(graph: ir.Graph, names: Sequence[str]) -> None:
    """Give each output a name of its own: layers that share keys and values have one value, which has one name."""
    for place, (value, name) in enumerate(zip(list(graph.outputs), names, strict=False)):
        if value.name != name:
            node = ir.node("Identity", [value])
            copy = node.outputs[0]
            copy.name, copy.shape, copy.type = name, value.shape, value.type
            graph.append(node)
            graph.outputs[place] = copy


def hide(model: onnx.ModelProto, names: tuple[str, ...]) -> None:
    """Make outputs, which the exporter names, values inside the graph, which a runtime may fuse away."""
    inside = [output for output in model.graph.output if output.name in names]
    model.graph.value_info.extend(inside)
    for output in inside:
        model.graph.output.remove(output)


def label(model: onnx.ModelProto, metadata: dict[str, str]) -> None:
    """Pin the IR version and add the graph's metadata; drop the exporter's per-node metadata."""
    model.ir_version = IR_VERSION
    model.producer_name, model.producer_version = "tformer-deploy", __version__
    for node in model.graph.node:
        del node.metadata_props[:]
    for part in (model.graph.input, model.graph.output, model.graph.value_info, model.graph.initializer):
        for value in part:
            del value.metadata_props[:]
    del model.graph.metadata_props[:]
    for key, value in metadata.items():
        model.metadata_props.add(key=key, value=value)
