"""Pass `simplify`: constants computed, equal nodes once, shapes as numbers where they can be; weights keep their names.

The first pass over every trace, and run again after others to remove what they made superfluous.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as common
from onnxscript.optimizer import fold_constants
from onnxscript.rewriter import RewriteRuleSet, rewrite
from onnxscript.rewriter.rules import common as known

from .rewriting import ORIGIN, Builder, behind, constant_of, made_by

MAX_FOLDED, MAX_NUMBERS = 1024, 8
"""Elements of an array that is folded: shapes and scalars, no weights; and of one that is called by its numbers."""


PREFIXES = {"float32": "float", "int64": "ints", "int32": "int32s", "bool": "bools"}
RULES = RewriteRuleSet(
    [
        *RewriteRuleSet([known.add_0_rule, known.mul_by_1_rule], commute=True),
        known.sub_0_rule,
        known.div_by_1_rule,
        known.min_min_rule,
        known.max_max_rule,
        known.min_max_rule,
        known.max_min_rule,
        known.no_op_cast_rule,
        known.cast_cast_rule,
        known.no_op_expand_rule,
        known.no_op_transpose_rule,
        known.transpose_transpose_rule,
        known.reshape_reshape_rule,
        known.squeeze_reshape_1d_rule,
        known.unsqueeze_unsqueeze_rule,
        known.one_reshape_matmul_reshape_rule,
        known.two_reshapes_matmul_reshape_rule,
        known.collapse_slice_rule,
        known.collapse_slice2_rule,
        known.materialize_reshape_shape_rule,
        known.no_op_static_scatter_nd_rule,
        known.no_op_dynamic_scatter_nd_rule,
    ]
)
"""onnxscript's, without those of convolutions and their kind: each is tried on each node, which takes time."""


def simplify(model: ir.Model, rules: bool = True) -> None:
    """Standard simplifications of onnxscript and onnx_ir, and two of our own.

    `rules`: also onnxscript's, which choose operators of their own, as Clip for Min and Max.
    """
    for again in (False, True):
        fold_constants(model, input_size_limit=MAX_FOLDED, should_fold=_not_a_weight)
        if rules and not again:
            rewrite(model, RULES)
        common.IdentityEliminationPass()(model)
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        _share_numbers(model.graph)
        common.CommonSubexpressionEliminationPass()(model)
        _constant_shapes(model.graph)
        _same_indices(model.graph)
        common.RemoveUnusedNodesPass()(model)
    common.RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]
    common.RemoveUnusedOpsetsPass()(model)
    common.TopologicalSortPass()(model)


def _not_a_weight(node: ir.Node) -> bool | None:
    floats = (value for value in node.inputs if value is not None and value.is_initializer())
    return False if any(value.dtype is ir.DataType.FLOAT for value in floats) else None


def _share_numbers(graph: ir.Graph) -> None:
    """One constant for equal sizes and scalars, called by its value, so that what is computed from them is one too."""
    for name, value in list(graph.initializers.items()):
        array = constant_of(value)
        kind = PREFIXES.get(array.dtype.name) if array is not None and array.size <= MAX_NUMBERS else None
        if array is None or kind is None or "." in name or ORIGIN in value.meta or value.is_graph_output():
            continue
        shape = array.ndim if array.ndim < 2 else "x".join(map(str, array.shape))
        new = "_".join([f"{kind}{shape or ''}", *map(str, array.ravel().tolist())])
        if new == name:
            continue
        if new in graph.initializers:
            ir.convenience.replace_all_uses_with(value, graph.initializers[new])
            del graph.initializers[name]
        else:
            value.name = new


def _same_indices(graph: ir.Graph) -> None:
    """Gather takes int32 as it takes int64, of one axis as it is."""
    for node in list(graph):
        if node.op_type == "Gather":
            cast = made_by(node.inputs[1], "Cast")
            ids = behind(cast.inputs[0], "Reshape") if cast is not None else None
            if cast is not None and ids is not None and ids.dtype is ir.DataType.INT32:
                node.replace_input_with(1, cast.inputs[0])


def _constant_shapes(graph: ir.Graph) -> None:
    """No Reshape to the sizes that a value has or had; else constants for numbers, equal axes, and one other size.

    Where there are two others, the sizes of an input that has them.
    """
    for node in list(graph):
        if node.op_type != "Reshape" or node.inputs[0] is None:
            continue
        before, after = node.inputs[0].shape, node.outputs[0].shape
        root = behind(node.inputs[0], "Reshape")
        same = [value for value in (node.inputs[0], root) if value is not None and value.shape == after]
        if before is None or after is None:
            continue
        if same and not node.outputs[0].is_graph_output():
            ir.convenience.replace_all_uses_with(node.outputs[0], same[0])
            continue
        if constant_of(node.inputs[1]) is not None:
            continue
        sizes = [
            size if isinstance(size, int) else 0 if i < len(before) and before[i] == size else -1
            for i, size in enumerate(after)
        ]
        build = Builder(graph, node)
        wanted = build.ints(sizes) if sizes.count(-1) <= 1 else _sizes_of_input(build, list(after))
        if wanted is not None:
            build.replace(node.outputs[0], build.node("Reshape", [node.inputs[0], wanted]))


def _sizes_of_input(build: Builder, sizes: list[Any]) -> ir.Value | None:
    """Sizes that begin with all of an input's and go on with numbers."""
    for value in build.graph.inputs:
        own = list(value.shape) if value.shape is not None else []
        others = sizes[len(own) :]
        if own and sizes[: len(own)] == own and all(isinstance(size, int) for size in others):
            return build.node("Concat", [build.node("Shape", [value]), build.ints(others)], axis=0)
    return None
