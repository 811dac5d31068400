"""Matrix products of lowered graphs: a weight in fp32, in int8 by column, or in int8 or int4 by block."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from numpy.typing import ArrayLike, NDArray
from onnx import helper, numpy_helper

Array = NDArray[Any]
MICROSOFT = "com.microsoft"


class Graph:
    """A graph in the making: nodes in order, constants by name."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}
        self.rounded: set[str] = set()
        """What the graph has in 8 bits as well."""

    def constant(self, name: str, array: ArrayLike) -> str:
        """Store an array once under its name."""
        if name not in self.constants:
            self.constants[name] = numpy_helper.from_array(np.asarray(array, order="C"), name)
        return name

    def node(self, kind: str, inputs: list[str], outputs: str | list[str] = "", domain: str = "", **how: Any) -> str:
        """Add a node and return its first output, which gets a name of its own unless one is given."""
        names = outputs if isinstance(outputs, list) else [outputs or f"{kind}_{len(self.nodes)}"]
        self.nodes.append(helper.make_node(kind, inputs, names, f"{kind}_{len(self.nodes)}", domain=domain, **how))
        return names[0]


def float_product(graph: Graph, x: str, name: str, weight: Array, bias: Array | None) -> str:
    """x (..., in) times weight (out, in), plus bias (out)."""
    y = graph.node("MatMul", [x, graph.constant(name, weight.T)])
    return y if bias is None else graph.node("Add", [y, graph.constant(f"{name}.bias", bias)])


def column_product(
    graph: Graph, x: str, name: str, weight: Array, bias: Array | None, input_range: tuple[float, float]
) -> str:
    """The same in integers: x in 8 bits over `input_range`, weights in 8 bits with a scale per output.

    The sums are exact, so that a row's result does not depend on the rows beside it.
    """
    integers, scales = columns(weight)
    names = graph.constant(name, integers.T), graph.constant(f"{name}.scales", scales)
    bias_name = "" if bias is None else graph.constant(f"{name}.bias", bias)
    return integer_product(graph, x, input_range, names, bias_name)


def integer_product(
    graph: Graph, x: str, input_range: tuple[float, float], weight: tuple[str, str], bias: str = ""
) -> str:
    """The same where the weights, int8 (in, out), and their scales (out) are in the graph already."""
    rounded, step, zero = round_input(graph, x, input_range)
    inputs = [rounded, weight[0], step, weight[1], zero]
    return graph.node("MatMulIntegerToFloat", [*inputs, "", bias] if bias else inputs, domain=MICROSOFT)


def table_product(graph: Graph, x: str, name: str, weight: Array, input_range: tuple[float, float]) -> str:
    """The same for x (rows, in), with the weights as they lie in a table of embeddings: (out, in)."""
    rounded, step, zero = round_input(graph, x, input_range)
    integers, scales = columns(weight)
    constants = {name: integers, f"{name}.scales": scales, f"{name}.zeros": np.zeros(len(scales), np.int8)}
    table = [graph.constant(*item) for item in constants.items()]
    return graph.node("QGemm", [rounded, step, zero, *table], domain=MICROSOFT, transB=1)


def round_input(graph: Graph, x: str, input_range: tuple[float, float]) -> tuple[str, str, str]:
    """x in 8 bits over its range, the step between two integers, and the integer that stands for 0."""
    least, largest = input_range
    step = np.float32(max(largest - least, 1e-6) / 255)
    zero = np.uint8(np.clip(np.rint(-least / step), 0, 255))
    names = graph.constant(f"{x}.step", step), graph.constant(f"{x}.zero", zero)
    if f"{x}.rounded" not in graph.rounded:  # one for all products that read x, whose range is the same
        graph.rounded.add(graph.node("QuantizeLinear", [x, *names], f"{x}.rounded"))
    return f"{x}.rounded", *names


def columns(weight: Array) -> tuple[Array, Array]:
    """weight (out, in) in 8 bits, and a scale per output."""
    scales = np.maximum(np.abs(weight).max(1), 1e-9).astype(np.float32) / np.float32(127)
    return np.rint(weight / scales[:, None]).astype(np.int8), scales


def block_product(
    graph: Graph, x: str, name: str, weight: Array, bias: Array | None, bits_block: tuple[int, int]
) -> str:
    """The same with weights in 8 or 4 bits and a scale per block of inputs; the kernel rounds each row of x itself."""
    bits, largest_block = bits_block
    outputs, inputs = weight.shape
    block = block_size(largest_block, inputs)
    packed, scales = packed_blocks(weight, bits, block)
    names = [x, graph.constant(name, packed), graph.constant(f"{name}.scales", scales)]
    if bias is not None:
        names += ["", "", graph.constant(f"{name}.bias", bias)]
    how = {"K": inputs, "N": outputs, "bits": bits, "block_size": block, "accuracy_level": 4}
    return graph.node("MatMulNBits", names, domain=MICROSOFT, **how)


def block_size(largest: int, inputs: int) -> int:
    """A block that is no longer than needed."""
    return min(largest, max(16, 1 << (inputs.bit_length() - 1)))


def packed_blocks(weight: Array, bits: int, block: int) -> tuple[Array, Array]:
    """The integers of `blocks` as bytes, two of 4 bits in one, and their scales."""
    integers, scales = blocks(weight, bits, block)
    return integers if bits == 8 else integers[..., 0::2] | integers[..., 1::2] << 4, scales


def blocks(weight: Array, bits: int, block: int) -> tuple[Array, Array]:
    """weight (out, in) as unsigned integers (out, blocks, block) around 2^(bits-1), and scales (out, blocks).

    The element furthest from zero becomes the least integer exactly, which uses the whole range.
    """
    outputs, inputs = weight.shape
    count, middle = -(-inputs // block), 1 << (bits - 1)
    padded = np.zeros((outputs, count * block), np.float32)
    padded[:, :inputs] = weight
    parts = padded.reshape(outputs, count, block)
    furthest = np.take_along_axis(parts, np.abs(parts).argmax(2, keepdims=True), 2)
    scales = np.where(furthest == 0, np.float32(1), furthest / np.float32(-middle))
    integers = np.clip(np.rint(parts / scales) + middle, 0, 2 * middle - 1).astype(np.uint8)
    return integers, scales[:, :, 0].astype(np.float32)
