"""What passes share: building nodes, reading constants, and finding linear layers in a traced graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import ArrayLike

from ...bundle.origin import Origin
from ..quantizing import Array

MICROSOFT, OURS = "com.microsoft", "tformer"
ORIGIN = "origin"
"""Key of a constant's `meta`: its `Origin`, if it is made of tensors of the checkpoint."""


class Builder:
    """Puts new nodes before one of a graph."""

    def __init__(self, graph: ir.Graph, before: ir.Node) -> None:
        self.graph, self.before = graph, before

    def nodes(
        self, kind: str, inputs: Sequence[ir.Value | None], outputs: int = 1, domain: str = "", **how: Any
    ) -> Sequence[ir.Value]:
        """Add a node and return its outputs."""
        node = ir.node(kind, inputs, how, domain=domain, num_outputs=outputs)
        self.graph.insert_before(self.before, node)
        return node.outputs

    def node(self, kind: str, inputs: Sequence[ir.Value | None], domain: str = "", **how: Any) -> ir.Value:
        """Add a node and return its one output."""
        return self.nodes(kind, inputs, 1, domain, **how)[0]

    def constant(self, name: str, array: ArrayLike) -> ir.Value:
        """A constant of the graph, stored once under its name."""
        if name not in self.graph.initializers:
            tensor = ir.tensor(np.asarray(array, order="C"), name=name)
            shape = ir.Shape(tensor.shape.numpy())
            value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=shape, const_value=tensor)
            self.graph.register_initializer(value)
        assert np.array_equal(constant_of(self.graph.initializers[name]), array), f"two constants called {name}"  # type: ignore[arg-type]
        return self.graph.initializers[name]

    def derived(self, origin: Origin, array: ArrayLike) -> ir.Value:
        """A constant that is made of tensors of the checkpoint, stored once; its name is made from its origin."""
        name, number = origin.name, 1
        while (known := self.graph.initializers.get(name)) is not None:
            if known.meta.get(ORIGIN) == origin and np.array_equal(constant_of(known), array):  # type: ignore[arg-type]
                return known
            number += 1
            name = f"{origin.name}.{number}"
        made = self.constant(name, array)
        made.meta[ORIGIN] = origin
        return made

    def ints(self, values: Sequence[int]) -> ir.Value:
        """A constant of int64."""
        return self.constant(f"ints1_{'_'.join(map(str, values))}", np.array(values, np.int64))

    def number(self, value: float) -> ir.Value:
        """A constant of float."""
        return self.constant(f"float_{float(np.float32(value))}", np.float32(value))

    def replace(self, old: ir.Value, new: ir.Value) -> None:
        """Have the readers of one value read another, which gets its type, and its name where that is an output."""
        new.shape, new.type = new.shape or old.shape, new.type or old.type
        if old.is_graph_output():
            name, old.name = old.name, f"{old.name}_before"
            new.name, new.shape, new.type = name, old.shape, old.type
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


@dataclass(frozen=True)
class Linear:
    """A matrix product with a weight of the checkpoint, and the sum with its bias."""

    x: ir.Value
    weight: ir.Value
    """(out, in)"""
    bias: ir.Value | None
    """(out)"""
    product: ir.Node
    out: ir.Value

    @property
    def name(self) -> str:
        """The layer's, scaled or not; of several side by side, all of them."""
        return ",".join(name.removesuffix(".weight") for name in origin_of(self.weight).tensors)

    def arrays(self) -> tuple[Array, Array | None]:
        """Weight and bias."""
        bias = None if self.bias is None else constant_of(self.bias)
        weight = constant_of(self.weight)
        assert weight is not None
        return weight, bias


def linears(graph: ir.Graph) -> Iterator[Linear]:
    """Every linear layer of a traced graph, in order."""
    for node in list(graph):
        if node.op_type == "Gemm":  # of a layer over two axes; also of `addmm`, which may be none
            x, weight, bias = (*node.inputs, None)[:3]
            known = constant_of(weight) is not None and (bias is None or constant_of(bias) is not None)
            factors = [node.attributes.get_float(name, 1.0) for name in ("alpha", "beta")]
            axes = [node.attributes.get_int(name, 0) for name in ("transA", "transB")]
            if known and axes == [0, 1] and factors == [1, 1]:
                yield Linear(x, weight, bias, node, node.outputs[0])  # type: ignore[arg-type]
            continue
        weight = _transposed(node.inputs[1]) if node.op_type == "MatMul" else None
        if weight is None:
            continue
        (x, _), product = node.inputs, node.outputs[0]
        assert x is not None
        bias, out = None, product
        readers = [use.node for use in product.uses()]
        if len(readers) == 1 and readers[0].op_type == "Add" and not product.is_graph_output():
            others = [value for value in readers[0].inputs if value is not product]
            shape = others[0].shape if others and others[0] is not None else None
            if others and constant_of(others[0]) is not None and shape == ir.Shape([weight.shape[0]]):  # type: ignore[index]
                bias, out = others[0], readers[0].outputs[0]
        yield Linear(x, weight, bias, node, out)


def _transposed(value: ir.Value | None) -> ir.Value | None:
    """The weight (out, in) that a value is the transpose of."""
    node = value.producer() if value is not None else None
    weight = node.inputs[0] if node is not None and node.op_type == "Transpose" else None
    if weight is None or not weight.is_initializer() or weight.shape is None or len(weight.shape) != 2:
        return None
    return weight


def constant_of(value: ir.Value | None) -> Array | None:
    """The array of a constant; nothing for what is computed."""
    if value is None or value.const_value is None:
        return None
    return value.const_value.numpy()


def origin_of(constant: ir.Value) -> Origin:
    """What a constant is made of: tensors of the checkpoint, or itself."""
    return constant.meta.get(ORIGIN) or Origin((str(constant.name),))


def made_by(value: ir.Value | None, *kinds: str) -> ir.Node | None:
    """The node that makes a value, if it is of one of these kinds."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type in kinds else None


def biased_mask(mask: ir.Value | None) -> tuple[ir.Value | None, ir.Value | None]:
    """What an attention may look at, and what its scores gain there, if its mask says both."""
    chosen = made_by(mask, "Where")
    hidden = constant_of(chosen.inputs[2]) if chosen is not None else None
    if chosen is None or hidden is None or not (hidden == -np.inf).all():
        return mask, None
    return chosen.inputs[0], chosen.inputs[1]


def behind(value: ir.Value | None, *kinds: str) -> ir.Value | None:
    """What a value is made of, past nodes of these kinds."""
    while (node := made_by(value, *kinds)) is not None:
        value = node.inputs[0]
    return value
