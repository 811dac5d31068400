"""One graph of the encoder, the step and the parts of the search: loops whose bodies read the weights around them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from ....bundle.contract import cache_names, signature
from ....bundle.recipe import Recipe
from ....decoding import DecodeOptions
from ....model.seq2seq import Seq2Seq
from ...passes import run_passes
from ...to_onnx import output_names
from ...trace import Tracer, traced
from .search import (
    BEFORE,
    EVENT,
    FLOAT,
    INPUTS,
    KEPT,
    PER_SENTENCE,
    POSITION,
    ROWS,
    SENTENCES,
    Best,
    Choose,
    Collect,
    Needed,
    Part,
    Ruled,
    Specs,
    Start,
)

Values = dict[str, ir.Value]
KINDS = {"int32": ir.DataType.INT32, "int64": ir.DataType.INT64, "bool": ir.DataType.BOOL}
KINDS |= {"float32": ir.DataType.FLOAT, "float64": ir.DataType.DOUBLE}
OUTPUTS = {"ids": "kept_ids", "lengths": "kept_lengths", "finished": "kept_finished"}
OUTPUTS |= {"scores": "kept_scores", "values": "kept_values"}
IR_VERSION = 10


class Joiner:
    """Builds one graph of traced ones. Initializers are those of the outermost graph."""

    def __init__(self, main: ir.Graph) -> None:
        self.main, self.count = main, 0

    def put(self, into: ir.Graph, made: ir.Model, names: Sequence[str], given: Mapping[str, ir.Value]) -> Values:
        """Move a traced graph's nodes to the end of another: its first outputs, by `names`; "" is not needed."""
        self.count += 1
        part = made.graph
        kept = [(name, value) for name, value in zip(names, part.outputs, strict=False) if name]
        part.outputs[:] = [value for _, value in kept]
        RemoveUnusedNodesPass()(made)
        for value in list(part.inputs):
            ir.convenience.replace_all_uses_with(value, given[str(value.name)])
        part.outputs.clear()
        now = {}
        for name, value in list(part.initializers.items()):
            del part.initializers[name]
            now[value] = self.keep_initializer(name, value)
        nodes = list(part)
        part.remove(nodes)
        for node in nodes:
            node.name = f"{part.name}_{self.count}/{node.name}"
            for value in node.outputs:
                value.name = f"{part.name}_{self.count}/{value.name}"
                value.shape = value.type = None  # sizes have other names in other parts
        into.extend(nodes)
        return {name: now.get(value, value) for name, value in kept}

    def keep_initializer(self, name: str, value: ir.Value) -> ir.Value:
        """Give a constant to the outermost graph, or its readers the equal one that is there."""
        known = self.main.initializers.get(name)
        if known is not None:
            ours, other = known.const_value, value.const_value
            assert ours is not None
            assert other is not None
            if ours.dtype == other.dtype and np.array_equal(ours.numpy(), other.numpy()):
                ir.convenience.replace_all_uses_with(value, known)
                return known
            value.name = f"{name}_{self.count}"
        self.main.register_initializer(value)
        return value

    def nodes(self, into: ir.Graph, kind: str, inputs: Sequence[Any], outputs: int, **how: Any) -> Sequence[ir.Value]:
        """Add a node to the end of a graph: its outputs."""
        self.count += 1
        made = ir.node(kind, inputs, how, num_outputs=outputs, name=f"{kind}_{self.count}")
        for i, value in enumerate(made.outputs):
            value.name = f"{kind}_{self.count}/{i}"
        into.append(made)
        return made.outputs

    def node(self, into: ir.Graph, kind: str, inputs: Sequence[Any], **how: Any) -> ir.Value:
        """Add a node to the end of a graph: its one output."""
        return self.nodes(into, kind, inputs, 1, **how)[0]

    def constant(self, array: Any) -> ir.Value:
        """A constant of the outermost graph."""
        self.count += 1
        name = f"constant_{self.count}"
        tensor = ir.tensor(np.asarray(array), name=name)
        value = ir.Value(name=name, const_value=tensor, type=ir.TensorType(tensor.dtype))
        self.main.register_initializer(value)
        return value


def kind_of(dtype: Any) -> ir.TensorType:
    """ONNX's type of PyTorch's."""
    return ir.TensorType(KINDS[str(dtype).removeprefix("torch.")])


def values_of(specs: Specs, suffix: str = "", sized: bool = False) -> Values:
    """New values of these types."""
    found = {}
    for name, (dtype, shape) in specs.items():
        sizes = shape if sized else [None] * len(shape)
        found[name] = ir.Value(name=f"{name}{suffix}", type=kind_of(dtype), shape=ir.Shape(sizes))
    return found


class Composer:
    """One model's graphs and search as one."""

    def __init__(self, model: Seq2Seq, options: DecodeOptions, recipe: Recipe) -> None:
        self.config, self.options, self.recipe = model.config, options, recipe
        self.tracer = Tracer(model)
        heads: tuple[str, ...] = ("rows", "heads", "positions", "size")
        self.past: Specs = dict.fromkeys(cache_names("past", model.config), (FLOAT, heads))
        self.cross: Specs = dict.fromkeys(cache_names("cross", model.config), (FLOAT, heads))
        self.inputs = values_of(INPUTS, sized=True)
        for name in PER_SENTENCE:
            self.inputs[name].shape = ir.Shape(["batch_or_1", *INPUTS[name][1][1:]])
        self.graph = self.empty(self.inputs.values(), "generate")
        self.joiner = Joiner(self.graph)

    def empty(self, inputs: Iterable[ir.Value], name: str) -> ir.Graph:
        """A graph without nodes."""
        return ir.Graph(list(inputs), [], nodes=[], opset_imports={"": self.recipe.opset}, name=name)

    def standard(self, into: ir.Graph, name: str, given: Values) -> Values:
        """Put a standard graph; of a step, without its own choice of tokens."""
        made = self.tracer.graph(name, self.recipe)
        run_passes(made, self.recipe.passes(name), self.recipe, {})
        names = output_names(signature(name, self.config, self.recipe))
        return self.joiner.put(into, made, ["" if each.startswith("top_") else each for each in names], given)

    def part(self, into: ir.Graph, kind: type[Part], given: Values) -> Values:
        """Put a part of the search."""
        module = kind(self.config, self.options).eval()
        made = traced(module, module.given(), list(module.outputs), self.recipe.opset)
        return self.joiner.put(into, made, module.outputs, given)

    def compose(self) -> ir.Model:
        """The whole graph."""
        given: Values = dict(self.inputs)
        given |= self.standard(self.graph, "encoder", given)
        given |= self.first(given)
        specs = {**ROWS, **POSITION, **KEPT, **SENTENCES, "src_lengths": INPUTS["src_lengths"], **self.cross}
        specs |= self.past
        last = self.loop(self.graph, "until all have ended", specs, given, self.round)
        put, graph = self.joiner.node, self.graph
        n_best = put(graph, "Cast", [given["n_best"]], to=ir.DataType.INT64)
        bounds = [self.joiner.constant([0]), n_best, self.joiner.constant([1])]
        for name, kept in OUTPUTS.items():
            value = put(graph, "Slice", [last[kept], *bounds])
            dtype, shape = KEPT[kept]
            value.name, value.type = name, kind_of(dtype)
            value.shape = ir.Shape(["batch", "n_best", *shape[2:]])
            graph.outputs.append(value)
        return ir.Model(graph, ir_version=IR_VERSION)

    def first(self, given: Values) -> Values:
        """The state before the first step."""
        put, graph, constant = self.joiner.node, self.graph, self.joiner.constant
        beams = put(graph, "Cast", [given["beams"]], to=ir.DataType.INT64)
        found = {"places": put(graph, "Expand", [constant(np.zeros(1, np.float32)), beams])}
        count = put(graph, "Shape", [given["src_lengths"]])
        for name in PER_SENTENCE:
            ones = constant(np.ones(len(INPUTS[name][1]) - 1, np.int64))
            found[name] = put(graph, "Expand", [given[name], put(graph, "Concat", [count, ones], axis=0)])
        heads = self.config.decoder
        nothing = constant(np.zeros((1, heads.heads, 0, heads.head_dim), np.float32))
        sizes = put(graph, "Concat", [count, constant(np.ones(3, np.int64))], axis=0)
        found |= dict.fromkeys(self.past, put(graph, "Expand", [nothing, sizes]))
        return {**found, **self.part(graph, Start, {**given, **found})}

    def loop(self, into: ir.Graph, name: str, specs: Specs, given: Values, body_of: Any) -> Values:
        """A loop over some values, whose body `body_of(graph, given)` gives them and whether it goes on."""
        state = values_of(specs, f" {name}")
        step = ir.Value(name=f"step {name}", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
        known = ir.Value(name=f"on {name}", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))
        body = self.empty([step, known, *state.values()], name)
        found = body_of(body, {**given, **state})
        body.outputs.extend([found["goes_on"], *(found[each] for each in specs)])
        body.outputs[0].type = ir.TensorType(ir.DataType.BOOL)
        for value, (dtype, _) in zip(body.outputs[1:], specs.values(), strict=True):
            value.type = kind_of(dtype)
        inputs = [None, self.joiner.constant(np.array(True)), *(given[each] for each in specs)]
        return dict(zip(specs, self.joiner.nodes(into, "Loop", inputs, len(specs), body=body), strict=True))

    def round(self, body: ir.Graph, given: Values) -> Values:
        """Steps until an output ends; then the outputs are collected, and sentences that have ended leave."""
        nothing = {name: self.joiner.constant(self.zeros(spec)) for name, spec in {**EVENT, **BEFORE}.items()}
        specs = {**ROWS, **POSITION, **EVENT, **BEFORE, **self.past}
        found = {**given, **self.loop(body, "until an output ends", specs, {**given, **nothing}, self.step)}
        found |= self.part(body, Collect, found)
        put, constant = self.joiner.node, self.joiner.constant
        places = put(body, "Squeeze", [put(body, "NonZero", [found["going"]]), constant([0])])
        for name in (*ROWS, *SENTENCES, "src_lengths", *self.cross):
            found[name] = put(body, "Gather", [found[name], places], axis=0)
        left = put(body, "Size", [places])
        return {**found, "goes_on": put(body, "Greater", [left, constant(np.array(0))])}

    @staticmethod
    def zeros(spec: tuple[Any, Sequence[int | str]]) -> np.ndarray[Any, Any]:
        """What nobody reads: an array of the right type."""
        dtype, shape = spec
        return np.zeros([0] * len(shape), str(dtype).removeprefix("torch."))

    def step(self, body: ir.Graph, given: Values) -> Values:
        """One step for all rows."""
        found = {**given, **self.standard(body, "decoder_step", given)}
        needed = self.part(body, Needed, found)["needed"]
        branches = {name: self.empty([], name) for name in ("then_branch", "else_branch")}
        for graph, kind in zip(branches.values(), (Ruled, Best), strict=True):
            outputs = self.part(graph, kind, found)
            same = outputs["ruled"] is outputs["plain"]
            plain = self.joiner.node(graph, "Identity", [outputs["plain"]]) if same else outputs["plain"]
            graph.outputs.extend([outputs["top_ids"], outputs["ruled"], plain])
        best = self.joiner.nodes(body, "If", [needed], len(Best.outputs), **branches)
        found |= dict(zip(Best.outputs, best, strict=True))
        for name in BEFORE:
            found[name] = self.joiner.node(body, "Identity", [given[name.removesuffix("_before")]])
        found |= self.part(body, Choose, found)
        return {**found, **{name: found[name.replace("past", "present")] for name in self.past}}
