"""Checkpoint to ONNX files: torch.onnx.export, metadata, our own signature check."""

from __future__ import annotations

import dataclasses
import json
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import torch
from torch.export import Dim

from .. import __version__
from ..config import ModelConfig
from ..contract import SHORT_GRAPHS, graphs_of, layer_names, signature
from ..model import Transformer
from ..recipe import Recipe
from .calibrate import Ranges
from .graphs import EncoderGraph, StepGraph, example_inputs
from .lower_ort import OrtLowering
from .lower_short import ShortLowering
from .lower_trt import TrtLowering
from .save import save_graphs
from .signature import compare_signature, read_signature

IR_VERSION = 10
"""The newest that ONNX Runtime and TensorRT both load."""


def export_graphs(
    model: Transformer,
    recipe: Recipe,
    directory: Path,
    weights_sha256: str,
    ranges: Ranges | None = None,
    tokenizers: Mapping[str, str] | None = None,
) -> None:
    """Write the graphs of a recipe and their weights, lowered ones with what `calibrate` found.

    `tokenizers`: SHA-256 of the files that belong to the model. Raises ArtifactError where a graph does not keep the
    contract.
    """
    models = {}
    for name in graphs_of(recipe):
        if recipe.target == "onnx":
            module = EncoderGraph(model) if name == "encoder" else StepGraph(model, recipe)
            exported = trace(name, module.eval(), recipe)
        else:
            exported = lower(name, model, recipe, ranges or {})
        describe(
            exported,
            {
                "tformer.graph": name,
                "tformer.version": __version__,
                "tformer.weights_sha256": weights_sha256,
                "tformer.model": json.dumps(dataclasses.asdict(model.config)),
                "tformer.recipe": json.dumps(dataclasses.asdict(recipe)),
                **({"tformer.tokenizers": json.dumps(tokenizers)} if tokenizers else {}),
            },
        )
        compare_signature(name, read_signature(exported), signature(name, model.config, recipe))
        models[name] = exported
    directory.mkdir(exist_ok=True)
    save_graphs(models, directory)


def lower(name: str, model: Transformer, recipe: Recipe, ranges: Ranges) -> onnx.ModelProto:
    """A graph of a recipe whose target is one runtime, built from the weights."""
    if recipe.target == "trt":
        return TrtLowering(model, recipe).build(name)
    kind = ShortLowering if name in SHORT_GRAPHS else OrtLowering
    return kind(model, recipe, ranges, block=0 if name == "encoder" else recipe.block).build(name)


def trace(name: str, module: EncoderGraph | StepGraph, recipe: Recipe) -> onnx.ModelProto:
    """Export one module with the contract's names and dynamic axes."""
    config = module.model.config
    expected = signature(name, config, recipe)
    axes = dynamic_dims(config)
    shapes: list[Any] = [
        {i: axes[size] for i, size in enumerate(spec.shape) if isinstance(size, str)} for spec in expected.inputs
    ]
    if name == "decoder_step":  # the caches are one variadic argument
        fixed = 4
        shapes = [*shapes[:fixed], tuple(shapes[fixed:])]
    with quiet(), torch.no_grad():
        program = torch.onnx.export(
            module,
            example_inputs(name, config),
            dynamo=True,
            opset_version=recipe.opset,
            input_names=[spec.name for spec in expected.inputs],
            output_names=[*(spec.name for spec in expected.outputs), *layer_names(name, config)],
            dynamic_shapes=tuple(shapes),
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    hide(model, layer_names(name, config))
    return model


def hide(model: onnx.ModelProto, names: tuple[str, ...]) -> None:
    """Make outputs, which the exporter names, values inside the graph, which a runtime may fuse away."""
    inside = [output for output in model.graph.output if output.name in names]
    model.graph.value_info.extend(inside)
    for output in inside:
        model.graph.output.remove(output)


def dynamic_dims(config: ModelConfig) -> dict[str, Any]:
    """The symbolic sizes of the contract, for torch.export."""
    positions = config.max_positions
    return {
        "batch": Dim("batch", min=1),
        "beams": Dim("beams", min=1, max=(config.tgt_vocab + 1) // 2),
        "past_rows": Dim("past_rows", min=1),
        "src_len": Dim("src_len", min=1, max=positions),
        "past_len": Dim("past_len", min=0, max=positions - 1),
    }


def describe(model: onnx.ModelProto, metadata: dict[str, str]) -> None:
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


class quiet:
    """Silence the exporter's notices; its errors are exceptions."""

    def __enter__(self) -> None:
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        warnings.simplefilter("ignore")
        self._loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
        self._levels = [logger.level for logger in self._loggers]
        for logger in self._loggers:
            logger.setLevel(logging.ERROR)

    def __exit__(self, *details: Any) -> None:
        for logger, level in zip(self._loggers, self._levels, strict=True):
            logger.setLevel(level)
        self._warnings.__exit__(*details)
