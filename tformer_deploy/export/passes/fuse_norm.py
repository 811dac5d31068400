"""Pass `fuse_norm`: the annotated layer norm as `LayerNormalization`.

Its deviation is over d - 1, which is a factor of the gain. Its eps is added to the deviation and is left out, which
changes an output by eps / deviation of itself at most: only norms with eps up to 1e-6 are replaced. Where the target
has the norm itself, it gets all of them as they are.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from ..quantizing import Array
from .rewriting import OURS, Builder, constant_of, made_by, origin_of

LARGEST_EPS, GUARD = 1e-6, 1e-12
"""The largest eps that is left out, and what stands in its place so that constant rows give no NaN."""


ANNOTATED = "AnnotatedNormalization"
"""The norm itself, of our own domain: x, gain, bias; eps."""


def fuse_norm(graph: ir.Graph, annotated: bool = False) -> None:
    """Replace what `AnnotatedLayerNorm.forward` was traced to, if `annotated` by `ANNOTATED`."""
    for node in list(graph):
        if node.op_type == "Add" and node.graph is graph:
            _fuse(graph, node, annotated)


def _fuse(graph: ir.Graph, node: ir.Node, annotated: bool) -> None:
    """weight * (x - mean) / (norm(x - mean) / sqrt(d - 1) + eps) + bias."""
    bias, ratio = _constant_and(node, 1), made_by(_constant_and(node, 1)[1], "Div")
    product = made_by(ratio.inputs[0], "Mul") if ratio is not None else None
    if ratio is None or product is None:
        return
    below = made_by(ratio.inputs[1], "Add")  # not where eps is 0
    offset, deviation = (0.0, ratio.inputs[1]) if below is None else _number_and(below)
    gain, centred = _constant_and(product, 1)
    centre, scaled = made_by(centred, "Sub"), made_by(deviation, "Div")
    mean = made_by(centre.inputs[1], "ReduceMean") if centre is not None else None
    length = made_by(scaled.inputs[0], "ReduceL2") if scaled is not None else None
    if centre is None or mean is None or length is None or bias[0] is None or gain is None:
        return
    x, width = centre.inputs[0], len(constant_of(gain))  # type: ignore[arg-type]
    root = _scalar(scaled.inputs[1])  # type: ignore[union-attr]
    same = mean.inputs[0] is x and length.inputs[0] is centred
    if not same or not math.isclose(root, math.sqrt(width - 1), rel_tol=1e-6) or not offset >= 0:
        return
    build = Builder(graph, node)
    if annotated:
        build.replace(node.outputs[0], build.node(ANNOTATED, [x, gain, bias[0]], OURS, epsilon=offset))
        return
    if offset > LARGEST_EPS:
        return
    factor = np.float32(math.sqrt((width - 1) / width))
    array: Array = constant_of(gain)  # type: ignore[assignment]
    scaled_gain = build.derived(origin_of(gain).scaled(float(factor)), array * factor)
    normed = build.node("LayerNormalization", [x, scaled_gain, bias[0]], epsilon=GUARD, axis=-1)
    build.replace(node.outputs[0], normed)


def _constant_and(node: ir.Node, axes: int) -> tuple[ir.Value | None, ir.Value | None]:
    """The constant input of that many axes, or nothing, and the other one."""
    first, second = node.inputs
    for one, other in ((first, second), (second, first)):
        array = constant_of(one)
        if array is not None and array.ndim == axes:
            return one, other
    return None, None


def _number_and(node: ir.Node) -> tuple[float, ir.Value | None]:
    """The number that a node adds, NaN if it adds none, and what to."""
    constant, other = _constant_and(node, 0)
    return _scalar(constant), other


def _scalar(value: ir.Value | None) -> float:
    array = constant_of(value)
    return float(array) if array is not None and array.size == 1 else math.nan
