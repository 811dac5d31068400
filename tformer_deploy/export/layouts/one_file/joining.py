"""One graph of the encoder, the step and the parts of the search: loops whose bodies read the weights around them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ....bundle.contract import cache_names, signature
from ....bundle.recipe import Recipe
from ....decoding import DecodeOptions
from ....model.seq2seq import Seq2Seq
from ...passes import run_passes
from ...to_onnx import output_names, own_outputs
from ...trace import Tracer, traced
from .search import (
    INPUTS,
    KEPT,
    PER_SENTENCE,
    STATE,
    Best,
    Choose,
    Needed,
    Part,
    Ruled,
    Specs,
    Start,
)

Values = dict[str, ir.Value]
KINDS = {"int32": ir.DataType.INT32, "float32": ir.DataType.FLOAT, "float64": ir.DataType.DOUBLE}
KINDS |= {"bool": ir.DataType.BOOL}
OUTPUTS = {"ids": "kept_ids", "lengths": "kept_lengths", "finished": "kept_finished"}
OUTPUTS |= {"scores": "kept_scores", "values": "kept_values"}


class Joiner:
    """Builds one graph of traced ones. Initializers are those of the outermost graph."""

    def __init__(self, main: ir.Graph) -> None:
        self.main, self.count = main, 0

    def put(self, into: ir.Graph, part: ir.Graph, names: Sequence[str], given: Mapping[str, ir.Value]) -> Values:
        """Move a traced graph's nodes to the end of another; its outputs by `names`."""
        self.count += 1
        own_outputs(part, [f"{name}_{self.count}" for name in names])
        for value in list(part.inputs):
            ir.convenience.replace_all_uses_with(value, given[str(value.name)], replace_graph_outputs=True)
        for name, value in list(part.initializers.items()):
            del part.initializers[name]
            self.keep_initializer(name, value)
        nodes, outputs = list(part), list(part.outputs)
        part.outputs.clear()
        part.remove(nodes)
        for node in nodes:
            node.name = f"{part.name}_{self.count}/{node.name}"
            for value in node.outputs:
                value.name = f"{part.name}_{self.count}/{value.name}"
                value.shape = value.type = None
        into.extend(nodes)
        return dict(zip(names, outputs, strict=False))

    def keep_initializer(self, name: str, value: ir.Value) -> None:
        """Give a constant to the outermost graph, or its readers the equal one that is there."""
        known = self.main.initializers.get(name)
        if known is not None:
            one, other = known.const_value, value.const_value
            assert one is not None
            assert other is not None
            if one.dtype == other.dtype and np.array_equal(one.numpy(), other.numpy()):
                ir.convenience.replace_all_uses_with(value, known)
                return
            name = f"{name}_{self.count}"
        value.name = name
        self.main.register_initializer(value)

    def node(self, into: ir.Graph, kind: str, inputs: Sequence[ir.Value | None], outputs: int = 1, **how: Any) -> Any:
        """Add a node to the end of a graph: its output, or all of several."""
        self.count += 1
        made = ir.node(kind, inputs, how, num_outputs=outputs, name=f"{kind}_{self.count}")
        for i, value in enumerate(made.outputs):
            value.name = f"{kind}_{self.count}/{i}"
        into.append(made)
        return made.outputs[0] if outputs == 1 else list(made.outputs)

    def constant(self, array: Any) -> ir.Value:
        """A constant of the outermost graph."""
        self.count += 1
        name = f"constant_{self.count}"
        value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
        self.main.register_initializer(value)
        return value


def typed(specs: Specs, suffix: str = "", shaped: bool = False) -> Values:
    """New values of these types; their sizes only where `shaped`."""
    found = {}
    for name, (dtype, shape) in specs.items():
        sizes = shape if shaped else [None] * len(shape)
        kind = ir.TensorType(KINDS[str(dtype).removeprefix("torch.")])
        found[name] = ir.Value(name=f"{name}{suffix}", type=kind, shape=ir.Shape(sizes))
    return found


class Composer:
    """One model's graphs and search as one."""

    def __init__(self, model: Seq2Seq, options: DecodeOptions, recipe: Recipe) -> None:
        self.config, self.options, self.recipe = model.config, options, recipe
        self.tracer = Tracer(model)
        self.inputs = typed(INPUTS, shaped=True)
        for name in PER_SENTENCE:
            self.inputs[name].shape = ir.Shape(["batch_or_1", *INPUTS[name][1][1:]])
        self.graph = self.empty(self.inputs.values(), "generate")
        self.joiner = Joiner(self.graph)

    def empty(self, inputs: Iterable[ir.Value], name: str) -> ir.Graph:
        """A graph without nodes."""
        return ir.Graph(list(inputs), [], nodes=[], opset_imports={"": self.recipe.opset}, name=name)

    def standard(self, into: ir.Graph, name: str, given: Values) -> Values:
        """Put a standard graph."""
        part = self.tracer.graph(name, self.recipe)
        run_passes(part, self.recipe.passes(name), self.recipe, {})
        names = output_names(signature(name, self.config, self.recipe))
        return self.joiner.put(into, part.graph, names, given)

    def part(self, into: ir.Graph, kind: type[Part], given: Values) -> Values:
        """Put a part of the search."""
        module = kind(self.config, self.options).eval()
        made = traced(module, module.given(), list(module.outputs), self.recipe.opset)
        return self.joiner.put(into, made.graph, module.outputs, given)

    def compose(self) -> ir.Model:
        """The whole graph."""
        given, put = dict(self.inputs), self.joiner.node
        given |= self.standard(self.graph, "encoder", given)
        beams = put(self.graph, "Cast", [given["beams"]], to=ir.DataType.INT64.value)
        zero = ir.AttrTensor("value", ir.tensor(np.zeros(1, np.float32)))
        node = ir.Node("", "ConstantOfShape", [beams], [zero], name="places")
        self.graph.append(node)
        node.outputs[0].name = "places"
        count = put(self.graph, "Shape", [given["src_lengths"]])
        size = put(self.graph, "Concat", [count, self.joiner.constant(np.ones(1, np.int64))], axis=0)
        given |= {"places": node.outputs[0]}
        for name in PER_SENTENCE:
            to = count if len(INPUTS[name][1]) == 1 else size
            given[name] = put(self.graph, "Expand", [given[name], to])
        found = self.part(self.graph, Start, given)
        given |= found
        heads = self.config.decoder
        empty = put(
            self.graph,
            "Expand",
            [
                self.joiner.constant(np.zeros((1, heads.heads, 0, heads.head_dim), np.float32)),
                put(self.graph, "Concat", [count, self.joiner.constant(np.ones(3, np.int64))], axis=0),
            ],
        )
        caches = cache_names("past", self.config)
        given |= dict.fromkeys(caches, empty)
        carried = [*STATE, *caches]
        body = self.body(given, caches)
        true = self.joiner.constant(np.array(True))
        loop = ir.Node(
            "",
            "Loop",
            [None, true, *(given[name] for name in carried)],
            [ir.AttrGraph("body", body)],
            num_outputs=len(carried),
            name="loop",
        )
        self.graph.append(loop)
        for name, value in zip(carried, loop.outputs, strict=True):
            value.name = f"last_{name}"
        last = dict(zip(carried, loop.outputs, strict=True))
        n_best = put(self.graph, "Cast", [given["n_best"]], to=ir.DataType.INT64.value)
        for name, kept in OUTPUTS.items():
            start, axis = self.joiner.constant(np.zeros(1, np.int64)), self.joiner.constant(np.ones(1, np.int64))
            value = put(self.graph, "Slice", [last[kept], start, n_best, axis])
            dtype, shape = KEPT[kept]
            value.name = name
            value.type = ir.TensorType(KINDS[str(dtype).removeprefix("torch.")])
            value.shape = ir.Shape(["batch", "n_best", *shape[2:]])
            self.graph.outputs.append(value)
        return ir.Model(self.graph, ir_version=10)

    def body(self, around: Values, caches: Sequence[str]) -> ir.Graph:
        """A step of the search."""
        state = typed(STATE, "_before")
        heads = [None] * 4
        state |= {
            name: ir.Value(name=f"{name}_before", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(heads))
            for name in caches
        }
        step = ir.Value(name="step", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
        goes_on = ir.Value(name="goes_on", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))
        body = self.empty([step, goes_on, *state.values()], "body")
        given = {**around, **state}
        given |= self.standard(body, "decoder_step", given)
        needed = self.part(body, Needed, given)["needed"]
        branches = {}
        for name, kind in (("then_branch", Ruled), ("else_branch", Best)):
            branch = self.empty([], name)
            found = self.part(branch, kind, given)
            branch.outputs.extend(found.values())
            branches[name] = branch
        chosen = ir.Node(
            "", "If", [needed], [ir.AttrGraph(n, g) for n, g in branches.items()], num_outputs=3, name="rules"
        )
        body.append(chosen)
        for name, value in zip(Best.outputs, chosen.outputs, strict=True):
            value.name = f"best_{name}"
            given[name] = value
        found = self.part(body, Choose, given)
        on = self.joiner.node(body, "ReduceMax", [self.joiner.node(body, "Cast", [found["active"]], to=6)], keepdims=0)
        on = self.joiner.node(body, "Cast", [on], to=ir.DataType.BOOL.value)
        presents = [given[name.replace("past", "present")] for name in caches]
        body.outputs.extend([on, *(found[name] for name in STATE), *presents])
        for value, (dtype, _) in zip(body.outputs[1:], STATE.values(), strict=False):
            value.type = ir.TensorType(KINDS[str(dtype).removeprefix("torch.")])
        on.type = ir.TensorType(ir.DataType.BOOL)
        for value in presents:
            value.type = ir.TensorType(ir.DataType.FLOAT)
        return body
