"""The lowering: each node that computes becomes an instruction, those of sizes and masks none.

What it does not know it refuses by the node's name.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from ....base.errors import ArtifactError
from ..fuse_norm import ANNOTATED
from ..rewriting import ORIGIN, Linear, constant_of, linears, made_by, origin_of
from .bias import bias_by_distance
from .instructions import Constant, Instruction, Matrix, Program, Rounding, View
from .values import Activated, Forgotten, Heads, Kept, Limited, Positions, Replaced, Rounded, Rows, layer_of_state

SIGMOID_GELU = 1.702
NORMS = {"LayerNormalization": "layer", "RMSNormalization": "rms", ANNOTATED: "annotated"}
OTHERWISE = ": use a recipe of ort-cpu"
BIAS = 5
"""The input of a fused attention that its scores gain."""
MOST_HEAD, MOST_INPUTS = 256, 65536
"""What the kernels' buffers and 32-bit sums have room for: numbers of a head, inputs of a product."""


class Lowering:
    """Nodes to instructions, one for each that computes."""

    def __init__(self, graph: ir.Graph, positions: int, floats: str) -> None:
        self.graph, self.positions, self.floats = graph, positions, floats
        self.widths: list[int] = []
        self.code: list[Instruction] = []
        self.known: dict[ir.Value, Any] = {}
        """What a value is; None: sizes, places or masks, which the engine knows by itself."""
        self.products: dict[ir.Node, Linear] = {linear.product: linear for linear in linears(graph)}
        self.skipped: set[ir.Node] = set()

    def run(self) -> Program:
        """Instructions in the order of nodes, and what is kept or given at the end."""
        for value in self.graph.inputs:
            self.known[value] = None
        for node in self.graph:
            if node in self.skipped:
                continue
            try:
                self._node(node)
            except ArtifactError as error:  # only where somebody reads it: a bias is computed here
                self.known.update(dict.fromkeys(node.outputs, error))
        outputs = {str(value.name): value for value in self.graph.outputs}
        kept = {name: value for name, value in outputs.items() if name.startswith("cross_")}
        for layer in range(len(kept) // 2):
            self._keep(kept[f"cross_k_{layer}"], kept[f"cross_v_{layer}"], layer)
        memory = outputs.get("memory")  # also a layer of `encoder` that a debugger may look at
        if memory is not None and not kept and isinstance(self.known.get(memory), (View, Rows)):
            self.code.append(Instruction("give", {"x": self.view(memory, self.graph[-1])}))
        if not any(each.op in ("output", "keep", "give") for each in self.code):
            nothing = ArtifactError(f"native finds no outputs in the graph{OTHERWISE}")
            raise next((each for each in self.known.values() if isinstance(each, ArtifactError)), nothing)
        return Program(self.widths, self.code)

    def _node(self, node: ir.Node) -> None:
        for place, value in enumerate(node.inputs):
            known = self.known.get(value) if value is not None else None
            if isinstance(known, ArtifactError) and (node.op_type, place) != ("MultiHeadAttention", BIAS):
                raise known
        how = getattr(self, f"_{node.op_type.lower()}", None)
        if node in self.products:
            self._linear(self.products[node])
        elif self._is_index(node):
            self.known.update(dict.fromkeys(node.outputs))
        elif how is None:
            raise self.unknown(node)
        else:
            self.known[node.outputs[0]] = how(node)

    def unknown(self, node: ir.Node, why: str = "") -> ArtifactError:
        """The error for a node that has no instruction."""
        name = node.name or next((str(value.name) for value in node.outputs), "")
        return ArtifactError(f"native does not know {node.op_type} {name}{why and f', {why}'}{OTHERWISE}")

    def _is_index(self, node: ir.Node) -> bool:
        """Whether a node only computes with sizes, places and masks."""
        if node.op_type == "MultiHeadAttention":
            return False
        if node.op_type == "Shape":
            return True
        given = [value for value in node.inputs if value is not None]
        table = constant_of(given[0]) if node.op_type in ("Gather", "Slice") else None
        if table is not None and table.ndim > 1:
            return False
        computed = [value for value in given if constant_of(value) is None]
        return bool(computed) and all(value in self.known and self.known[value] is None for value in computed)

    def value(self, width: int) -> int:
        """A new value."""
        self.widths.append(width)
        return len(self.widths) - 1

    def view(self, value: ir.Value | None, node: ir.Node) -> View:
        """The columns that a value is; looks up what has not been yet."""
        found = self.known.get(value) if value is not None else None
        if isinstance(found, Rows):
            found = self._embed(found, None)
            self.known[value] = found  # type: ignore[index]
        if isinstance(found, Heads) and not found.turned:
            found = found.view
        if not isinstance(found, View):
            raise self.unknown(node, f"which reads {value.name if value is not None else 'nothing'}")
        return found

    def emit(self, op: str, width: int, reads: dict[str, View] | None = None, **rest: Any) -> View:
        """Add an instruction that writes a new value."""
        out = self.value(width)
        self.code.append(Instruction(op, reads or {}, out, **rest))
        return View(out, 0, width)

    def array(self, value: ir.Value | None, node: ir.Node) -> Constant:
        """A constant."""
        found = constant_of(value)
        if found is None:
            raise self.unknown(node, f"whose {value.name if value is not None else 'input'} is no constant")
        return Constant(str(value.name), found, value.meta.get(ORIGIN))  # type: ignore[union-attr]

    def bias(self, value: ir.Value | None, node: ir.Node) -> dict[str, Constant]:
        """The array of a bias, where there is one."""
        return {} if value is None else {"bias": self.array(value, node)}

    def scalar(self, value: ir.Value | None) -> float | None:
        """The number that a constant is."""
        found = constant_of(value)
        return float(found.reshape(())) if found is not None and found.size == 1 else None

    # Embeddings.

    def _gather(self, node: ir.Node) -> Any:
        table, ids = self.array(node.inputs[0], node), node.inputs[1]
        if table.array.ndim != 2 or ids is None or not ids.is_graph_input():
            raise self.unknown(node)
        by_place = ids.name in ("position", "positions")
        return Positions(table) if by_place else Rows(str(ids.name), table)

    def _slice(self, node: ir.Node) -> Positions:
        """The first rows of a table of positions."""
        table, start = self.array(node.inputs[0], node), self.scalar(node.inputs[1])
        axes, steps = (self.scalar(value) for value in (*node.inputs, None, None)[3:5])
        if table.array.ndim != 2 or start != 0 or axes not in (0, None) or steps not in (1, None):
            raise self.unknown(node)
        return Positions(table)

    def _cast(self, node: ir.Node) -> Any:
        return self.known.get(node.inputs[0])  # type: ignore[arg-type]

    _identity = _cast

    def _embed(self, rows: Rows, positions: Positions | None) -> View:
        arrays = {"table": rows.table}
        arrays |= {"scales": rows.scales} if rows.scales is not None else {}
        arrays |= {"positions": positions.table} if positions is not None else {}
        width = rows.table.array.shape[1]
        return self.emit("embed", width, arrays=arrays, how={"ids": rows.ids, "factor": rows.factor})

    # Sums, products and activations.

    def _add(self, node: ir.Node) -> Any:
        first, second = (self.known.get(value) for value in node.inputs)  # type: ignore[arg-type]
        for rows, positions in ((first, second), (second, first)):
            if isinstance(rows, Rows) and isinstance(positions, Positions):
                return self._embed(rows, positions)
            if isinstance(rows, Kept) and isinstance(positions, Forgotten) and positions.x:
                return Replaced(rows.gate, positions.x, rows.layer) if rows.gate == positions.gate else None
        return self._pair("add", node)

    def _sub(self, node: ir.Node) -> Forgotten:
        """What a cell's gate, a sigmoid, leaves."""
        known = self.known.get(node.inputs[1])  # type: ignore[arg-type]
        if self.scalar(node.inputs[0]) != 1 or not isinstance(known, Activated) or known.slope != 1:
            raise self.unknown(node)
        return Forgotten(known.view)

    def _pair(self, op: str, node: ir.Node) -> View:
        x, y = (self.view(value, node) for value in node.inputs)
        if x.width != y.width:
            raise self.unknown(node)
        return self.emit(op, x.width, {"x": x, "y": y})

    def _mul(self, node: ir.Node) -> Any:
        first, second = node.inputs
        for one, other in ((first, second), (second, first)):
            known, number = self.known.get(one), self.scalar(other)  # type: ignore[arg-type]
            layer = layer_of_state(other)
            if isinstance(known, Activated) and known.slope == 1 and layer is not None:
                return Kept(known.view, layer)
            if isinstance(known, Forgotten) and known.x is None:
                return replace(known, x=self.view(other, node))
            if isinstance(known, Rows) and number is not None and known.scales is None:
                return replace(known, factor=known.factor * number)
            scales = self.known.get(other)  # type: ignore[arg-type]
            if isinstance(known, Rows) and isinstance(scales, Rows) and scales.scales_of(known):
                return replace(known, scales=scales.table)
            if isinstance(known, View) and number is not None:
                return Activated(known, number)  # read by a Sigmoid, or refused
            if isinstance(known, Activated) and other is not None and self.known.get(other) == known.view:
                kinds = {1.0: "silu", SIGMOID_GELU: "gelu_sigmoid"}
                kind = next((kinds[k] for k in kinds if math.isclose(k, known.slope, rel_tol=1e-6)), None)
                if kind is None or made_by(one, "Sigmoid") is None:
                    raise self.unknown(node)
                return self._activate(known.view, kind)
            shrink = constant_of(other)
            if isinstance(known, View) and shrink is not None and shrink.shape == (known.width,):
                return known, self.array(other, node)
        return self._pair("multiply", node)

    def _activate(self, x: View, kind: str) -> View:
        return self.emit("activate", x.width, {"x": x}, how={"activation": kind})

    def _relu(self, node: ir.Node) -> View:
        known = self.known.get(node.inputs[0])  # type: ignore[arg-type]
        if isinstance(known, Replaced):
            return self.emit("recur", known.x.width, {"x": known.x, "y": known.gate}, how={"layer": known.layer})
        return self._activate(self.view(node.inputs[0], node), "relu")

    def _gelu(self, node: ir.Node) -> View:
        tanh = node.attributes.get_string("approximate") == "tanh"
        return self._activate(self.view(node.inputs[0], node), "gelu_tanh" if tanh else "gelu")

    def _sigmoid(self, node: ir.Node) -> Activated:
        known = self.known.get(node.inputs[0])  # type: ignore[arg-type]
        return known if isinstance(known, Activated) else Activated(self.view(node.inputs[0], node), 1.0)

    # Norms.

    def _norm(self, node: ir.Node) -> View | Heads:
        """Of rows, or of each head in them."""
        known = self.known.get(node.inputs[0])  # type: ignore[arg-type]
        heads = known.heads if isinstance(known, Heads) else 1
        x = known.view if isinstance(known, Heads) else self.view(node.inputs[0], node)
        arrays = {"gain": self.array(node.inputs[1], node), **self.bias((*node.inputs, None)[2], node)}
        if arrays["gain"][1].shape != (x.width // heads,):
            raise self.unknown(node, "which is over more than the last axis")
        how = {"kind": NORMS[node.op_type], "eps": float(np.float32(node.attributes["epsilon"].as_float()))}
        how |= {"heads": heads} if heads > 1 else {}
        made = self.emit("norm", x.width, {"x": x}, arrays=arrays, how=how)
        return replace(known, view=made) if isinstance(known, Heads) else made

    _layernormalization = _rmsnormalization = _annotatednormalization = _norm

    # Matrix products.

    def _min(self, node: ir.Node) -> Limited:
        highest = self.scalar(node.inputs[1])
        if highest is None:
            raise self.unknown(node)
        return Limited(self.view(node.inputs[0], node), highest)

    def _quantizelinear(self, node: ir.Node) -> Rounded:
        source, *numbers = node.inputs[:3]
        known = self.known.get(source)  # type: ignore[arg-type]
        step, zero = (self.array(value, node).array.reshape(()) for value in numbers)
        if isinstance(known, Limited):
            x, shrink, most = known.view, None, int(zero) + round(known.highest / float(step))
        else:
            (x, shrink), most = known if isinstance(known, tuple) else (self.view(source, node), None), 255
        rounding = Rounding(float(step), int(zero), shrink, most)
        rounded = self.value(x.width)
        self.code.append(Instruction("round", {"x": x}, rounded=rounded, rounding=rounding))
        return Rounded(View(rounded, 0, x.width), rounding.step, rounding.zero)

    def _linear(self, linear: Linear) -> None:
        weight, _ = linear.arrays()
        x = self.view(linear.x, linear.product)
        matrix = Matrix(origin_of(linear.weight), self.floats, weight, inputs=weight.shape[1])
        self.known[linear.out] = self._product(x, matrix, self.bias(linear.bias, linear.product))
        if linear.out is not linear.product.outputs[0]:
            self.skipped.add(linear.out.producer())  # type: ignore[arg-type]

    def _product(self, x: View, matrix: Matrix, arrays: dict[str, Constant], **how: Any) -> View:
        if x.width != matrix.inputs:
            raise ArtifactError(f"native: {matrix.name} reads {x.width} numbers of {matrix.inputs}{OTHERWISE}")
        if x.width > MOST_INPUTS:
            raise ArtifactError(f"native: {matrix.name} reads more than {MOST_INPUTS} numbers{OTHERWISE}")
        return self.emit("matmul", len(matrix.weight), {"x": x}, matrix=matrix, arrays=arrays, how=how)

    def _matmulintegertofloat(self, node: ir.Node) -> View:
        x = self.known.get(node.inputs[0])  # type: ignore[arg-type]
        if not isinstance(x, Rounded):
            raise self.unknown(node)
        weight, scales = (self.array(node.inputs[place], node).array for place in (1, 3))
        origin = replace(origin_of(node.inputs[1]), transposed=False)  # type: ignore[arg-type]
        matrix = Matrix(origin, "int8", weight.T, scales, inputs=len(weight))
        bias = self.bias((*node.inputs, None, None)[6], node)
        return self._product(x.view, matrix, bias, step=x.step, zero=x.zero)

    def _matmulnbits(self, node: ir.Node) -> View:
        packed, scales = (self.array(value, node).array for value in node.inputs[1:3])
        bits, size, inputs, outputs = (node.attributes[key].as_int() for key in ("bits", "block_size", "K", "N"))
        if bits != 4:
            raise self.unknown(node, "whose groups have 8 bits")
        x = self.view(node.inputs[0], node)
        halves = np.stack((packed & 15, packed >> 4), -1)  # two integers in a byte
        origin = origin_of(node.inputs[1])  # type: ignore[arg-type]
        matrix = Matrix(origin, "int4", halves.reshape(outputs, -1, size), scales.reshape(outputs, -1), inputs, size)
        return self._product(x, matrix, self.bias((*node.inputs, None, None, None)[5], node))

    # Shapes.

    def _split(self, node: ir.Node) -> View:
        x, first, given = self.view(node.inputs[0], node), 0, (*node.inputs, None)[1]
        if given is not None:
            sizes = self.array(given, node).array.tolist()
        else:  # equal parts
            last = [out.shape[-1] if out.shape is not None else None for out in node.outputs]
            sizes = [size if isinstance(size, int) else 0 for size in last]
        if sum(sizes) != x.width:
            raise self.unknown(node, "which splits another axis than the last")
        for out, size in zip(node.outputs, sizes, strict=True):
            self.known[out] = View(x.value, x.first + first, size)
            first += size
        return self.known[node.outputs[0]]  # type: ignore[no-any-return]

    def _reshape(self, node: ir.Node) -> Any:
        shape, known = node.outputs[0].shape, self.known.get(node.inputs[0])  # type: ignore[arg-type]
        sizes = constant_of(node.inputs[1])
        last = list(shape)[-2:] if shape is not None else sizes.tolist()[-2:] if sizes is not None else []
        if isinstance(known, Heads) and not known.turned:
            known = known.view
        view = known if isinstance(known, Rows | Positions) else self.view(node.inputs[0], node)
        rank = len(shape) if shape is not None else 0 if sizes is None else len(sizes)
        width = view.width if isinstance(view, View) else view.table.array.shape[1]
        heads = last[0] if rank == 4 else None
        if isinstance(view, View) and isinstance(heads, int) and heads * last[1] == width:  # one head too
            return Heads(view, heads)
        if last and last[-1] == width:
            return view
        raise self.unknown(node)

    _squeeze = _unsqueeze = _reshape

    def _transpose(self, node: ir.Node) -> Heads | None:
        known = self.known.get(node.inputs[0])  # type: ignore[arg-type]
        if constant_of(node.inputs[0]) is not None:
            return None  # of a product, see `linears`
        if not isinstance(known, Heads) or list(node.attributes["perm"].as_ints()) != [0, 2, 1, 3]:
            raise self.unknown(node)
        return replace(known, turned=not known.turned)

    # Attention.

    def _multiheadattention(self, node: ir.Node) -> View:
        inputs = [*node.inputs, *[None] * (10 - len(node.inputs))]
        q = self.view(inputs[0], node)
        heads = node.attributes["num_heads"].as_int()
        size = q.width // heads
        if size > MOST_HEAD:
            raise self.unknown(node, f"whose heads have more than {MOST_HEAD} numbers")
        scale = node.attributes.get_float("scale", 1 / math.sqrt(size))
        how: dict[str, Any] = {"heads": heads, "size": size, "scale": scale}
        reads, arrays = {"q": q}, {}
        key = inputs[1]
        if key is not None and key.is_graph_input():
            how["layer"] = int(str(key.name).rpartition("_")[2])
            op = "cross"
            if str(inputs[2] and inputs[2].name) != f"cross_v_{how['layer']}":
                raise self.unknown(node, "whose values are not of the keys' layer")
        else:
            op = "self"
            reads |= {"k": self.view(key, node), "v": self.view(inputs[2], node)}
            if inputs[6] is not None:
                how["layer"] = int(str(inputs[6].name).rpartition("_")[2])
        if (bias := inputs[BIAS]) is not None:
            if op == "cross":
                raise self.unknown(node)
            refused = partial(self.unknown, node)
            table = bias_by_distance(self.graph, bias, heads, self.positions, refused)
            arrays["bias"] = Constant(str(bias.name), table)
            how["zero"] = self.positions - 1  # the column of distance 0
        self.known.update(dict.fromkeys(node.outputs[1:]))
        return self.emit(op, heads * size, reads, arrays=arrays, how=how)

    # Results.

    def _keep(self, k: ir.Value, v: ir.Value, layer: int) -> None:
        """The graph's outputs that the engine keeps: keys and values of a layer's cross-attention."""
        keys, values = self._heads(k), self._heads(v)
        if keys.heads != values.heads:
            raise ArtifactError(f"native: {k.name} and {v.name} have other heads{OTHERWISE}")
        how = {"layer": layer, "heads": keys.heads, "size": keys.view.width // keys.heads}
        self.code.append(Instruction("keep", {"k": keys.view, "v": values.view}, how=how))

    def _heads(self, value: ir.Value) -> Heads:
        known = self.known.get(value)
        if isinstance(known, ArtifactError):
            raise known
        if not isinstance(known, Heads) or not known.turned:
            raise ArtifactError(f"native: {value.name} is not of heads{OTHERWISE}")
        return known

    def _logsoftmax(self, node: ir.Node) -> None:
        """The end of a step: the product that made the logits finds the best itself, and nothing behind it counts."""
        logits = self.view(node.inputs[0], node)
        last = self.code[-1]
        if last.op != "matmul" or View(last.out or 0, 0, self.widths[last.out or 0]) != logits:
            raise self.unknown(node)
        last.op, last.out = "output", None
        self.widths.pop()
