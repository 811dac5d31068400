"""Pass `older_operators`: a graph in the operators of opset 17, which every TensorRT from 8.6 on takes.

Younger operators are written out. What those parsers take, and its source, stands in tests/trt_operators.json.

Sizes are read by `Gather(Shape(x), index)` and reach only inputs that ONNX Runtime's CUDA provider reads on the host:
anything else would be a copy in each step, which no CUDA graph may hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from ...base.errors import ArtifactError
from .rewriting import Builder, biased_mask, constant_of, made_by

OPSET = 17
HIDDEN = -1e9
"""Added to scores of what must not be looked at: exp gives 0, and no row is all of it."""
UNCHANGED = """
    Add And Cast Concat Div Equal Erf Expand Gather GatherElements Gemm Greater Identity LayerNormalization Less
    LessOrEqual LogSoftmax MatMul Max Min Mod Mul Neg Not Or Range Relu Reshape Shape Sigmoid Slice Softmax Sqrt
    Squeeze Sub Tanh TopK Transpose Unsqueeze Where
"""
"""Operators that mean the same for these types at opset 17 and 24."""


def older_operators(model: ir.Model) -> None:
    """Write younger operators out. Raises ArtifactError for one that is not known."""
    graph = model.graph
    writers: dict[str, Callable[[Builder, ir.Node], ir.Value | None]] = {
        "Attention": _attention,
        "Gelu": _gelu,
        "RMSNormalization": _rms_norm,
        "Split": _split,
        "Clip": _clip,
        "Squeeze": _squeeze,
        "Reshape": _reshape,
        "Range": _range,
        "Slice": _slice,
        "Shape": _shape,
        "Reduce": _reduce,
    }
    for node in list(graph):
        kind = "Reduce" if node.op_type.startswith("Reduce") else node.op_type
        if kind in writers:
            if (new := writers[kind](Builder(graph, node), node)) is not None:
                Builder(graph, node).replace(node.outputs[0], new)
        elif kind not in UNCHANGED.split() or node.domain:
            raise ArtifactError(f"older_operators does not know {node.domain} {node.op_type} at opset {OPSET}")
    graph.opset_imports[""] = OPSET


def _attention(build: Builder, node: ir.Node) -> ir.Value:
    q, k, v, mask = (*node.inputs, None)[:4]
    assert q is not None and q.shape is not None
    if any(node.attributes[name].value for name in ("softcap", "is_causal", "qk_matmul_output_mode")):
        raise ArtifactError(f"older_operators: {node.name} is causal, capped or returns its scores")
    if k is None or k.shape is None or k.shape[1] != q.shape[1]:
        raise ArtifactError(f"older_operators: {node.name} has {q.shape[1]} heads of queries, and others of keys")
    scale = node.attributes.get_float("scale", 1 / math.sqrt(int(q.shape[3])))  # type: ignore[arg-type]
    q = q if scale == 1 else build.node("Mul", [q, build.number(scale)])
    scores = build.node("MatMul", [q, build.node("Transpose", [k], perm=[0, 1, 3, 2])])
    if mask is not None:
        allowed, bias = biased_mask(mask)
        if allowed is None or allowed.dtype is not ir.DataType.BOOL:
            raise ArtifactError(f"older_operators: {node.name} has a mask of numbers")
        widened = made_by(allowed, "Expand")  # adding broadcasts by itself
        allowed = widened.inputs[0] if widened is not None else allowed
        added = build.node("Where", [allowed, bias or build.number(0.0), build.number(HIDDEN)])
        scores = build.node("Add", [scores, added])
    return build.node("MatMul", [build.node("Softmax", [scores], axis=-1), v])


def _gelu(build: Builder, node: ir.Node) -> ir.Value:
    """x / 2 * (1 + erf(x / sqrt(2))); by tanh x / 2 * (1 + tanh(y)), which is x * sigmoid(2 * y)."""
    x = node.inputs[0]
    if node.attributes.get_string("approximate") == "tanh":
        root = math.sqrt(8 / math.pi)  # y is sqrt(2 / pi) * (x + 0.044715 * x^3)
        square = build.node("Mul", [build.node("Mul", [x, x]), build.number(0.044715 * root)])
        twice = build.node("Mul", [x, build.node("Add", [square, build.number(root)])])
        return build.node("Mul", [x, build.node("Sigmoid", [twice])])
    error = build.node("Erf", [build.node("Mul", [x, build.number(math.sqrt(0.5))])])
    half = build.node("Mul", [x, build.number(0.5)])
    return build.node("Mul", [half, build.node("Add", [error, build.number(1.0)])])


def _rms_norm(build: Builder, node: ir.Node) -> ir.Value:
    """x / sqrt(mean(x^2) + eps) * gain, over the last axis."""
    x, gain = node.inputs
    assert x is not None and x.shape is not None
    if node.attributes.get_int("axis", -1) not in (-1, len(x.shape) - 1):
        raise ArtifactError("older_operators: RMSNormalization over more than the last axis")
    mean = build.node("ReduceMean", [build.node("Mul", [x, x])], axes=[-1], keepdims=1)
    root = build.node("Sqrt", [build.node("Add", [mean, build.number(node.attributes.get_float("epsilon", 1e-5))])])
    return build.node("Mul", [build.node("Div", [x, root]), gain])


def _clip(build: Builder, node: ir.Node) -> ir.Value:
    """TensorRT 8.6 clips no integers."""
    x, least, most = node.inputs
    return build.node("Min", [build.node("Max", [x, least]), most])


def _split(build: Builder, node: ir.Node) -> None:
    """Into equal parts without their sizes is younger."""
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        return
    (x, *_), count, axis = node.inputs, len(node.outputs), node.attributes.get_int("axis", 0)
    size = x.shape[axis] if x is not None and x.shape is not None else None
    if not isinstance(size, int) or size % count:
        raise ArtifactError("older_operators: Split into parts whose sizes are not known")
    parts = build.nodes("Split", [x, build.ints([size // count] * count)], count, axis=axis)
    for old, new in zip(node.outputs, parts, strict=True):
        build.replace(old, new)


def _reduce(build: Builder, node: ir.Node) -> ir.Value | None:
    """Axes are an attribute at opset 17, but for sums."""
    if node.op_type == "ReduceSum":
        return None
    axes = constant_of(node.inputs[1]) if len(node.inputs) > 1 else None
    if axes is None:
        raise ArtifactError(f"older_operators: {node.op_type} over axes that are no constant")
    keep = node.attributes.get_int("keepdims", 1)
    return build.node(node.op_type, [node.inputs[0]], axes=[int(n) for n in axes], keepdims=keep)


def _shape(build: Builder, node: ir.Node) -> ir.Value | None:
    """TensorRT 8.6 misreads a Shape with a start or an end."""
    if not {"start", "end"} & set(node.attributes):
        return None
    x = node.inputs[0]
    assert x is not None and x.shape is not None
    rank, how = len(x.shape), node.attributes
    places = range(rank)[how.get_int("start", 0) : how.get_int("end", rank)]
    return build.node("Gather", [build.node("Shape", [x]), build.ints(list(places))])


def _squeeze(build: Builder, node: ir.Node) -> ir.Value | None:
    """A size as a scalar."""
    gather = made_by(node.inputs[0], "Gather")
    place = constant_of(gather.inputs[1]) if gather is not None and made_by(gather.inputs[0], "Shape") else None
    if gather is None or place is None or place.shape != (1,):
        return None
    return build.node("Gather", [gather.inputs[0], build.constant(f"ints_{place[0]}", np.int64(place[0]))])


def _reshape(build: Builder, node: ir.Node) -> ir.Value | None:
    """A scalar size as a vector of one."""
    wanted = constant_of(node.inputs[1])
    return _vector(build, node.inputs[0]) if wanted is not None and wanted.tolist() in ([1], [-1]) else None


def _vector(build: Builder, size: ir.Value | None) -> ir.Value | None:
    """What is computed of scalar sizes, of vectors of one; nothing for any other value."""
    number, node = constant_of(size), made_by(size, "Gather", "Mul")
    if number is not None:
        return build.ints([int(number)]) if number.dtype == np.int64 and number.ndim == 0 else None
    if node is None:
        return None
    if node.op_type == "Mul":
        parts = [_vector(build, value) for value in node.inputs]
        return build.node("Mul", parts) if None not in parts else None
    place = constant_of(node.inputs[1]) if made_by(node.inputs[0], "Shape") else None
    if place is None or place.ndim:
        return None
    return build.node("Gather", [node.inputs[0], build.ints([int(place)])])


def _range(build: Builder, node: ir.Node) -> ir.Value | None:
    """Counted in the type that sizes have, then cast, as a size that is cast itself need not stay on the host."""
    start, limit, step = node.inputs
    cast, least, delta = made_by(limit, "Cast"), constant_of(start), constant_of(step)
    size = cast.inputs[0] if cast is not None else None
    if cast is None or size is None or size.dtype is not ir.DataType.INT64 or least is None or delta is None:
        return None
    ends = [build.constant(f"ints_{int(n)}", np.int64(n)) for n in (least, delta)]
    counted = build.node("Range", [ends[0], size, ends[1]])
    return build.node("Cast", [counted], to=cast.attributes["to"].value)


def _slice(build: Builder, node: ir.Node) -> ir.Value | None:
    """Steps of 1 go without saying."""
    steps = constant_of(node.inputs[4]) if len(node.inputs) == 5 else None
    return build.node("Slice", node.inputs[:4]) if steps is not None and (steps == 1).all() else None
