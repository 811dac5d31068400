"""A model's functions to graphs: `torch.onnx.export`, the contract's names, the checkpoint's names of weights."""

from __future__ import annotations

import dataclasses
import gc
import io
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.modules import transformer as torch_layers

from ..base.errors import ArtifactError, ConfigError
from ..bundle.contract import MEMORY_GRAPH, Signature
from ..bundle.origin import Origin
from ..bundle.recipe import Recipe
from ..model.modules.recompute import plain_attention
from ..model.seq2seq import Seq2Seq
from .graphs import GraphModule, make_graph
from .passes.expand_masks import expand_masks
from .passes.rewriting import ORIGIN
from .passes.simplify import simplify

_DTYPES = {"int32": torch.int32, "float32": torch.float32}
LEAST_POSITIONS = 3
"""A trace takes a size of 0 or 1 for one that never changes, and a cache is traced with one position less."""
_KINDS = {"int32": ir.DataType.INT32, "float32": ir.DataType.FLOAT}


class Tracer:
    """Traces each graph of a model once; every recipe that needs it gets a copy."""

    def __init__(self, model: Seq2Seq) -> None:
        self.model = model
        self._traced: dict[Any, ir.Model] = {}

    def graph(self, name: str, recipe: Recipe) -> ir.Model:
        """A graph of `contract.graphs_of` in standard operators, as its fp32 recipe has it."""
        plain = dataclasses.replace(recipe, precision="fp32", group_size=0, scales="measured")
        # Only these fields of a recipe change the trace; the others are for passes, or limits.
        of_step = plain.target, plain.top_k, plain.attention, plain.axes
        key = name, plain.opset, *(() if name in ("encoder", MEMORY_GRAPH) else of_step)
        if key not in self._traced:
            self._traced[key] = trace(make_graph(name, self.model, plain))
        return self._traced[key].clone()


class Named(nn.Module):
    """A module whose graph has a name; weights of its `model` have theirs in the checkpoint."""

    model: Seq2Seq
    name: str


def trace(module: GraphModule) -> ir.Model:
    """One module as a simplified graph. Raises ArtifactError where it does not keep the contract."""
    sizes = example_sizes(module)
    expected, names = module.signature, [*(spec.name for spec in module.signature.outputs), *module.layer_names]
    inputs = [torch.zeros(spec.sized(sizes), dtype=_DTYPES[spec.dtype]) for spec in expected.inputs]
    for spec, example in zip(expected.inputs, inputs, strict=True):
        if spec.name == "src_lengths":
            example.fill_(sizes["src_len"])
    given = {spec.name: (example, spec.shape) for spec, example in zip(expected.inputs, inputs, strict=True)}
    model = traced(module, given, names, module.recipe.opset)
    keep_contract(model, module.name, expected)
    return model


def traced(
    module: GraphModule | Named,
    given: Mapping[str, tuple[Tensor, Sequence[int | str]]],
    outputs: Sequence[str],
    opset: int,
) -> ir.Model:
    """A module's `forward` as a simplified graph, which gets its name.

    given: of each input, in order, an example and its shape, in which a size with a name is dynamic.
    """
    inputs = tuple(example for example, _ in given.values())
    shapes = [shape for _, shape in given.values()]
    dynamic = tuple({i: Dim.DYNAMIC for i, size in enumerate(shape) if isinstance(size, str)} for shape in shapes)
    with quiet(), torch.no_grad(), plain_attention(), masks_as_given():
        exported = torch.export.export(
            module, inputs, dynamic_shapes=(dynamic,), prefer_deferred_runtime_asserts_over_guards=True
        )
        drop_assertions(exported.graph)
        # Not optimized, as weights would lose their names; `simplify` does it.
        program = torch.onnx.export(
            exported, dynamo=True, opset_version=opset, output_names=outputs, optimize=False, verbose=False
        )
    assert program is not None
    model = program.model
    model.graph.name = module.name
    for name, value in zip(given, model.graph.inputs, strict=True):
        value.name = name
    rename_weights(model.graph)
    simplify(model)
    require_no_draws(model.graph)
    expand_masks(model.graph)
    return model


def example_sizes(module: GraphModule) -> dict[str, int]:
    """Sizes to trace with, no two alike and none that could be taken for a constant. Raises ConfigError."""
    config = module.model.config
    if config.max_positions < LEAST_POSITIONS:
        raise ConfigError(f"max_positions={config.max_positions}: must be at least {LEAST_POSITIONS} to be exported")
    beams = min(3, config.tgt_vocab // 2)
    return {
        "batch": 2,
        "beams": beams,
        "src_len": min(8, config.max_positions),
        "past_len": min(4, config.max_positions - 1),
        "past_rows": 2 * beams + 1,
        "rows": 2 * beams,
        "capacity": 11,
        "listed": min(max(13, module.recipe.top_k + 1), config.tgt_vocab),
    }


def drop_assertions(graph: torch.fx.Graph) -> None:
    """Remove assertions on sizes, and what only they need: ONNX has none, and the exporter would re-trace them."""
    for node in list(graph.nodes):
        if str(node.target).startswith("aten._assert_"):
            graph.erase_node(node)
    graph.eliminate_dead_code()


DRAWS = {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}


def require_no_draws(graph: ir.Graph) -> None:
    """Raise ConfigError if an output depends on random numbers, with the line that draws them."""
    for node in graph.all_nodes():
        if node.op_type in DRAWS:
            lines = re.findall(r'File "(.+?)", line (\d+)', node.metadata_props.get("pkg.torch.onnx.stack_trace", ""))
            place = ", line ".join(lines[-1]) if lines else f"the module's {graph.name}"
            raise ConfigError(f"{place}: it draws random numbers, which no two runs share: leave them out in eval")


def rename_weights(graph: ir.Graph) -> None:
    """Give weights their names in the checkpoint, and their origins."""
    for name in list(graph.initializers):
        if name.startswith("model."):
            value = graph.initializers[name]
            value.name = name.removeprefix("model.")
            value.meta[ORIGIN] = Origin((value.name,))


def keep_contract(model: ir.Model, name: str, expected: Signature) -> None:
    """Write the contract's sizes on inputs and outputs. Raises ArtifactError where numbers differ from the trace's."""
    graph = model.graph
    outputs = graph.outputs[: len(expected.outputs)]
    for spec, value in zip((*expected.inputs, *expected.outputs), (*graph.inputs, *outputs), strict=True):
        found = list(value.shape) if value.shape is not None else []
        fits = len(found) == len(spec.shape) and all(
            a == b for a, b in zip(found, spec.shape, strict=True) if isinstance(a, int) or isinstance(b, int)
        )
        if not fits or value.dtype is not _KINDS[spec.dtype]:
            raise ArtifactError(f"the traced {name} has {value.name} {value.dtype} {found}, the contract {spec}")
        value.shape = ir.Shape(spec.shape)


@contextmanager
def masks_as_given() -> Iterator[None]:
    """Make PyTorch's own layers apply the masks that they get, without testing whether a mask is causal.

    They would only choose another kernel by it, and no graph has a choice by values.
    """
    before = torch_layers._detect_is_causal_mask
    torch_layers._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        torch_layers._detect_is_causal_mask = before


@contextmanager
def quiet() -> Iterator[None]:
    """No notices of the exporter, whose errors are exceptions; torch prints the graph of a trace that fails.

    Nor a search for garbage: what a trace makes lives until its end, and the search takes a tenth of the time.
    """
    disabled, collects = logging.root.manager.disable, gc.isenabled()
    logging.disable(logging.ERROR)
    gc.disable()
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(disabled)
        if collects:
            gc.enable()
