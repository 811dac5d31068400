"""The signature that a finished ONNX file has, compared with the contract; every difference is reported."""

from __future__ import annotations

import onnx

from ..base.errors import ArtifactError
from ..bundle.contract import SIZES, Signature, TensorSpec

_EXPRESSIONS = {
    "batch*beams": "rows",
    "beams*batch": "rows",
    "past_len+1": "present_len",
    "2*beams-1": "best",
    "2*beams": "best",
}
"""What a trace calls sizes that follow from others, without spaces -> their names."""


def read_signature(model: onnx.ModelProto) -> Signature:
    """Inputs and outputs that the graph's file declares."""
    return Signature(tuple(map(_spec, model.graph.input)), tuple(map(_spec, model.graph.output)))


def name_sizes(model: onnx.ModelProto) -> None:
    """Give sizes that are expressions their names in `contract.SIZES`; inside the graph, others are left open.

    Inputs and outputs keep what has no name, for `compare_signature` to report.
    """
    graph = model.graph
    for inside, values in ((False, (*graph.input, *graph.output)), (True, graph.value_info)):
        for value in values:
            for dim in value.type.tensor_type.shape.dim:
                size = dim.dim_param
                if name := _EXPRESSIONS.get(size.replace(" ", "")):
                    dim.dim_param = name
                elif size and size not in SIZES and inside:
                    dim.ClearField("dim_param")


def compare_signature(graph: str, found: Signature, expected: Signature) -> None:
    """Raise ArtifactError with every tensor that differs."""
    problems = []
    for side in ("inputs", "outputs"):
        ours, theirs = getattr(expected, side), getattr(found, side)
        if [spec.name for spec in ours] != [spec.name for spec in theirs]:
            problems.append(f"{side} are {[spec.name for spec in theirs]}, expected {[spec.name for spec in ours]}")
            continue
        problems += [f"{got} should be {want}" for want, got in zip(ours, theirs, strict=True) if want != got]
    if problems:
        raise ArtifactError(f"the exported {graph} does not keep the contract: {'; '.join(problems)}")


def _spec(value: onnx.ValueInfoProto) -> TensorSpec:
    tensor = value.type.tensor_type
    shape = tuple(dim.dim_param or dim.dim_value for dim in tensor.shape.dim)
    return TensorSpec(value.name, onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name, shape)
