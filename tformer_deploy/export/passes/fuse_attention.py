"""Pass `fuse_attention`: ONNX Runtime's fused attention for processors, whose caches are written in place.

`Attention` becomes `MultiHeadAttention`: masks become lengths, and the operator itself writes a step's caches and reads
them, whichever beam wrote a position. The numbers stay within the order of fp32 sums.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...base.errors import ArtifactError
from .rewriting import MICROSOFT, Builder, behind, biased_mask, constant_of, made_by

AXES = ("Unsqueeze", "Expand", "Cast", "Reshape", "Squeeze")
"""What a mask goes through without another meaning."""


def fuse_attention(graph: ir.Graph) -> None:
    """Replace every `Attention`. Raises ArtifactError for one whose mask or cache is of an unknown kind."""
    for node in list(graph):
        if node.op_type == "Attention":
            _fuse(graph, node)


def _fuse(graph: ir.Graph, node: ir.Node) -> None:
    q, k, v, mask = (*node.inputs, None)[:4]
    assert q is not None and k is not None and v is not None
    known = {"scale", "qk_matmul_output_mode", "softcap", "is_causal", "q_num_heads", "kv_num_heads"}
    unknown = [name for name, a in node.attributes.items() if name not in known or (name != "scale" and a.value)]
    if unknown or len(node.inputs) > 4 or q.shape is None or len(q.shape) != 4:
        raise ArtifactError(f"fuse_attention does not know an Attention with {unknown or 'these inputs'}: {node.name}")
    if k.shape is None or k.shape[1] != q.shape[1]:
        raise ArtifactError(f"fuse_attention: {node.name} has {q.shape[1]} heads of queries, and others of keys")
    build, given = Builder(graph, node), {value.name: value for value in graph.inputs}
    # What masked scores get added; the operator's own -1e4 is too little where a trained model has scores of millions.
    scale = {"scale": node.attributes["scale"].as_float()} if "scale" in node.attributes else {}
    how = {"num_heads": q.shape[1], "mask_filter_value": -1e30, **scale}
    mask, bias = biased_mask(mask)
    if bias is not None and (bias.shape is None or list(bias.shape)[:2] != [1, q.shape[1]]):  # with others it is wrong
        raise ArtifactError(f"fuse_attention: {node.name} adds a bias {bias.shape} that is not one for all rows")
    written = [_written(value, given) for value in (k, v)]
    if all(written):
        (new_k, past_k, present_k), (new_v, past_v, present_v) = written  # type: ignore[misc]
        first, position = _first_place(mask, given["position"]), given["position"]
        if first is None and not _compares(mask, "LessOrEqual", position):
            raise ArtifactError(f"fuse_attention: {node.name} reads a cache with another mask than of its positions")
        inputs: list[ir.Value | None] = [_flat(build, each) for each in (q, new_k, new_v)]
        inputs += [None, _from(build, first, position) if first is not None else None]
        inputs += [_until(build, bias, position) if bias is not None else None]
        inputs += [past_k, past_v, position, given["written_by"]]
        mixed, *present = build.nodes("MultiHeadAttention", inputs, 3, MICROSOFT, unidirectional=1, **how)
        for old, new in zip((present_k, present_v), present, strict=True):
            build.replace(old, new)
    elif any(written):
        raise ArtifactError(f"fuse_attention: {node.name} has keys or values in a cache, not both")
    else:
        lengths = given["src_lengths"]
        if not _compares(mask, "Less", lengths):
            raise ArtifactError(
                f"fuse_attention: {node.name} has another mask than of src_lengths: give a bool mask, or "
                "torch.where(mask, bias, -inf)"
            )
        whole = k.is_graph_input() and v.is_graph_input()  # the operator takes both in heads, or none
        keys = [each if whole else _flat(build, each) for each in (k, v)]
        mixed = build.node("MultiHeadAttention", [_flat(build, q), *keys, None, lengths, bias], MICROSOFT, **how)
    mixed.type = q.type
    mixed.shape = ir.Shape([q.shape[0], q.shape[2], q.shape[1] * q.shape[3]])  # type: ignore[operator]
    heads = build.ints([0, 0, q.shape[1], q.shape[3]])  # type: ignore[list-item]
    build.replace(node.outputs[0], build.node("Transpose", [build.node("Reshape", [mixed, heads])], perm=[0, 2, 1, 3]))


def _flat(build: Builder, x: ir.Value) -> ir.Value:
    """(B, H, T, D) -> (B, T, H*D), where it came from if it was split just before."""
    split = made_by(x, "Transpose")
    if split is not None and list(split.attributes["perm"].as_ints()) == [0, 2, 1, 3]:
        whole = made_by(split.inputs[0], "Reshape")
        before = whole.inputs[0] if whole is not None else None
        heads, size = x.shape[1], x.shape[3]  # type: ignore[index]
        merged = heads * size  # type: ignore[operator]
        if before is not None and before.shape is not None and before.shape.rank() == 3 and before.shape[2] == merged:
            return before
    turned = build.node("Transpose", [x], perm=[0, 2, 1, 3])
    return build.node("Reshape", [turned, build.ints([0, 0, x.shape[1] * x.shape[3]])])  # type: ignore[index,operator,list-item]


def _written(value: ir.Value, given: dict[str | None, ir.Value]) -> tuple[ir.Value, ir.Value, ir.Value] | None:
    """What is new, the buffer before and the buffer after, where a value is what beams read of a buffer."""
    gathered = made_by(behind(value, "Reshape"), "GatherElements")
    present = behind(gathered.inputs[0], "Reshape") if gathered is not None else None
    write = made_by(present, "Where")
    if gathered is None or write is None or present is None:
        return None
    before, past, new = write.inputs
    of_beams = behind(gathered.inputs[1], *AXES) is given.get("written_by")
    if not of_beams or past is None or not past.is_graph_input() or not _compares(before, "Less", given["position"]):
        return None
    assert new is not None
    return new, past, present


def _first_place(mask: ir.Value | None, position: ir.Value) -> ir.Value | None:
    """(rows, 1) Where each row's target begins, by a mask of the places from there to `position`."""
    both = made_by(behind(mask, *AXES), "And")
    if both is None:
        return None
    until, since = sorted(both.inputs, key=lambda value: made_by(behind(value, *AXES), "LessOrEqual") is None)
    compared = made_by(behind(since, *AXES), "GreaterOrEqual")
    if compared is None or not _compares(until, "LessOrEqual", position) or not _counts(compared.inputs[0]):
        return None
    return compared.inputs[1]


def _until(build: Builder, bias: ir.Value, position: ir.Value) -> ir.Value:
    """(1, heads, 1, position + 1) Of a bias for the whole buffer, which the operator refuses."""
    end = build.node("Add", [position, build.constant("int32s1_1", np.array([1], np.int32))])
    ends = [build.constant(f"int32s1_{n}", np.array([n], np.int32)) for n in (0, 3)]
    return build.node("Slice", [bias, ends[0], end, ends[1]])


def _from(build: Builder, first: ir.Value, position: ir.Value) -> ir.Value:
    """(rows, position + 1) 1 from each row's first place on, else 0; `simplify` has all layers share it."""
    scalar = build.node("Squeeze", [position, build.ints([0])])
    ints = [build.constant(f"int32s_{n}", np.int32(n)) for n in (0, 1)]
    places = build.node("Range", [ints[0], build.node("Add", [scalar, ints[1]]), ints[1]])
    return build.node("Cast", [build.node("GreaterOrEqual", [places, first])], to=ir.DataType.INT32)


def _compares(mask: ir.Value | None, kind: str, limit: ir.Value) -> bool:
    """Whether a mask compares places, counted from 0, with a limit in that way."""
    node = made_by(behind(mask, *AXES), kind)
    if node is None or mask is None or mask.dtype is not ir.DataType.BOOL:
        return False
    return _counts(node.inputs[0]) and behind(node.inputs[1], *AXES) is limit


def _counts(places: ir.Value | None) -> bool:
    """Whether a value is 0, 1, 2 and so on."""
    places = behind(places, *AXES)
    array, counting = constant_of(places), made_by(places, "Range")
    if array is not None:
        return np.array_equal(array.ravel(), np.arange(array.size))
    first, _, step = counting.inputs if counting is not None else (None, None, None)
    return [constant_of(first), constant_of(step)] == [0, 1]
