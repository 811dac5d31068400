"""Ways to break the graphs of a bundle, each as a wrong exporter or runtime would, and what the check must blame."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from fnmatch import fnmatchcase as fnmatch
from pathlib import Path

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from tformer_deploy.bundle.manifest import hashes

Mutation = Callable[[GraphProto], None]
Change = Callable[[np.ndarray], np.ndarray]
RARE = 57
"""A token that neither text nor outputs of the tests need have."""


def break_graph(bundle: Path, out: Path, graph: str, mutate: Mutation) -> Path:
    """A copy of a bundle with one graph changed and the hashes made to fit."""
    shutil.copytree(bundle, out)
    model = onnx.load(out / f"{graph}.onnx")
    before = model.SerializeToString()
    mutate(model.graph)
    assert model.SerializeToString() != before
    onnx.save(model, out / f"{graph}.onnx")
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps({**manifest, "files": hashes(out)}))
    return out


def producer(graph: GraphProto, value: str) -> NodeProto:
    return next(node for node in graph.node if value in node.output)


def product(graph: GraphProto, linear: str) -> NodeProto:
    """The matrix product of a linear layer, such as `decoder.0.ff.up`; `output` is the projection to the vocabulary."""
    if linear == "output":
        return producer(graph, producer(graph, "log_probs").input[0])
    bias = f"{linear}.bias"
    added = next(node for node in graph.node if bias in node.input)
    return producer(graph, next(name for name in added.input if name != bias))


def behind(graph: GraphProto, output: str, *nodes: NodeProto) -> None:
    """Put nodes behind what an output was: the first reads it as `<output>_before`, the last writes the output."""
    source = producer(graph, output)
    source.output[list(source.output).index(output)] = f"{output}_before"
    place = list(graph.node).index(source) + 1
    for node in reversed(nodes):
        graph.node.insert(place, node)


def constant(graph: GraphProto, name: str, value: object, dtype: type) -> None:
    graph.initializer.append(numpy_helper.from_array(np.array(value, dtype), name))


def change_tensor(graph: GraphProto, name: str, change: Change) -> None:
    """The one constant of that name, in which * stands for anything."""
    (tensor,) = (tensor for tensor in graph.initializer if fnmatch(tensor.name, name))
    tensor.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(tensor).copy()), tensor.name))


def change_output(graph: GraphProto, change: Change) -> None:
    """The weights of the projection to the vocabulary, and not the table of embeddings that they are."""
    node = next(node for node in graph.node if node.op_type == "Gemm")
    tensor = next(tensor for tensor in graph.initializer if tensor.name == node.input[1])
    node.input[1] = "own_output"
    graph.initializer.append(numpy_helper.from_array(change(numpy_helper.to_array(tensor).copy()), "own_output"))


def change_rounding(number: int, place: int, change: Change) -> Mutation:
    """The step (1) or the zero (2) of the rounding of that number."""

    def mutate(graph: GraphProto) -> None:
        node = [node for node in graph.node if node.op_type == "QuantizeLinear"][number]
        change_tensor(graph, node.input[place], change)

    return mutate


def change_weights(linear: str, change: Change) -> Mutation:
    return lambda graph: change_tensor(graph, product(graph, linear).input[1], change)


def scale(linear: str, factor: float = 1.01) -> Mutation:
    return change_weights(linear, lambda matrix: matrix * np.float32(factor))


def scale_token(linear: str, token: int, factor: float = 1.001) -> Mutation:
    """The weights that make the score of one token."""

    def change(matrix: np.ndarray) -> np.ndarray:
        matrix[:, token] *= np.float32(factor)
        return matrix

    return change_weights(linear, change)


def swap_weights(first: str, second: str) -> Mutation:
    """The matrices of two layers exchanged, but not their biases."""

    def mutate(graph: GraphProto) -> None:
        a, b = product(graph, first), product(graph, second)
        a.input[1], b.input[1] = b.input[1], a.input[1]

    return mutate


def spoil(linear: str) -> Mutation:
    """NaN in one weight."""

    def change(matrix: np.ndarray) -> np.ndarray:
        matrix[3, 5] = np.nan
        return matrix

    return change_weights(linear, change)


def row(number: int, change: Change) -> Change:
    """One row of a table, or one element of a vector, changed."""

    def mutate(table: np.ndarray) -> np.ndarray:
        table[number] = change(table[number])
        return table

    return mutate


def changed(name: str, change: Change) -> Mutation:
    """A constant, by its name in the graph."""
    return lambda graph: change_tensor(graph, name, change)


def scale_one_weight(graph: GraphProto) -> None:
    """One matrix times 1.01."""
    scale("encoder.0.ff.up" if graph.input[0].name == "src_ids" else "decoder.0.ff.up")(graph)


def in_half_precision(linear: str) -> Mutation:
    """One matrix product in fp16."""

    def mutate(graph: GraphProto) -> None:
        node = product(graph, linear)
        place, output, inputs = list(graph.node).index(node), node.output[0], list(node.input)
        node.input[:] = [f"{name}_half" for name in inputs]
        node.output[0] = f"{output}_half"
        graph.node.insert(place + 1, helper.make_node("Cast", [f"{output}_half"], [output], to=TensorProto.FLOAT))
        for name in inputs:
            graph.node.insert(place, helper.make_node("Cast", [name], [f"{name}_half"], to=TensorProto.FLOAT16))

    return mutate


def drop_mask(first: int = 0) -> Mutation:
    """Attention over padding as well, from the attention of that number on."""

    def mutate(graph: GraphProto) -> None:
        for node in [node for node in graph.node if node.op_type == "Attention" and len(node.input) == 4][first:]:
            del node.input[3]

    return mutate


def shift_positions(graph: GraphProto) -> None:
    """Position 1 where 0 belongs, and so on."""
    for name in [tensor.name for tensor in graph.initializer if "positions" in tensor.name]:
        change_tensor(graph, name, lambda table: np.roll(table, -1, 0))


def swap_keys_and_values(attention: int) -> Mutation:
    """K and V of one attention exchanged."""

    def mutate(graph: GraphProto) -> None:
        node = [node for node in graph.node if node.op_type == "Attention"][attention]
        node.input[1], node.input[2] = node.input[2], node.input[1]

    return mutate


def swap_outputs(first: str, second: str) -> Mutation:
    """Two outputs under each other's name; what else reads them reads the right one."""

    def mutate(graph: GraphProto) -> None:
        names = {first: second, second: first}
        for node in graph.node:
            for part in (node.input, node.output):
                part[:] = [names.get(name, name) for name in part]

    return mutate


def continue_one_row(graph: GraphProto) -> None:
    """Every row continues row 0."""
    constant(graph, "zero", 0, np.int32)
    rows = next(node.output[0] for node in graph.node if "parents" in node.input)
    behind(graph, rows, helper.make_node("Mul", [f"{rows}_before", "zero"], [rows]))


def continue_other_rows(graph: GraphProto) -> None:
    """The rows' parents from behind."""
    for name, value in (("last", [-1]), ("first", [np.iinfo(np.int64).min]), ("back", [-1])):
        constant(graph, name, value, np.int64)
    constant(graph, "axis", [0], np.int64)
    rows = next(node.output[0] for node in graph.node if "parents" in node.input)
    behind(graph, rows, helper.make_node("Slice", [f"{rows}_before", "last", "first", "axis", "back"], [rows]))


def take_the_worst(graph: GraphProto) -> None:
    """The lowest scores for the highest."""
    node = producer(graph, "top_scores")
    kept = [attribute for attribute in node.attribute if attribute.name != "largest"]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute("largest", 0)])


def shift_ids(graph: GraphProto) -> None:
    """Token 5 for token 4, and so on."""
    constant(graph, "one", 1, np.int32)
    matrix = product(graph, "output").input[1]
    constant(graph, "vocab", next(tensor.dims[1] for tensor in graph.initializer if tensor.name == matrix), np.int32)
    shifted = helper.make_node("Add", ["top_ids_before", "one"], ["top_ids_shifted"])
    behind(graph, "top_ids", shifted, helper.make_node("Mod", ["top_ids_shifted", "vocab"], ["top_ids"]))


def feed_zeros(beyond: int, of: str) -> Mutation:
    """Token 0 for what is beyond so many `beams` of a sentence, `rows` of a step, or `sentences` of an encoder."""

    def mutate(graph: GraphProto) -> None:
        ids = graph.input[0].name
        node, nodes = helper.make_node, []
        for name, value, dtype in (
            ("z_first", 0, np.int64),
            ("z_step", 1, np.int64),
            ("z_beyond", beyond, np.int64),
            ("z_axis", 1 if of == "beams" else 0, np.int64),
            ("z_last", [1], np.int64),
        ):
            constant(graph, name, value, dtype)
        nodes.append(node("Shape", [ids], ["z_shape"]))
        if of == "rows":
            nodes.append(node("ReduceProd", ["z_shape"], ["z_size"], keepdims=0))
        else:
            nodes.append(node("Gather", ["z_shape", "z_axis"], ["z_size"]))
        nodes.append(node("Range", ["z_first", "z_size", "z_step"], ["z_places"]))
        nodes.append(node("Less", ["z_places", "z_beyond"], ["z_kept"]))
        nodes.append(node("Cast", ["z_kept"], ["z_mask"], to=TensorProto.INT32))
        shaped = {
            "beams": node("Identity", ["z_mask"], ["z_shaped"]),
            "rows": node("Reshape", ["z_mask", "z_shape"], ["z_shaped"]),
            "sentences": node("Unsqueeze", ["z_mask", "z_last"], ["z_shaped"]),
        }
        nodes += [shaped[of], node("Mul", [ids, "z_shaped"], ["z_ids"])]
        reader = next(each for each in graph.node if each.op_type == "Gather" and list(each.input[1:]) == [ids])
        reader.input[1] = "z_ids"
        for each in reversed(nodes):
            graph.node.insert(0, each)

    return mutate


# Only a wide beam, or a batch as large as a translator makes, meets these.
BEYOND: dict[str, tuple[str, Mutation, str]] = {
    "beams": ("decoder_step", feed_zeros(5, "beams"), "equal rows of a wide beam|wide beam: "),
    "rows of a step": ("decoder_step", feed_zeros(64, "rows"), r"(greedy|beam) \(large\): "),
    "sentences of an encoder": ("encoder", feed_zeros(64, "sentences"), r"(greedy|beam) \(large\): "),
}
"""Graph, mutation, and what a failure must begin with."""


# Entries that no corpus of the tests need have; seen without a look at the constants.
ENTRIES: dict[str, tuple[str, Mutation, str]] = {
    "source row": ("encoder", lambda graph: negate_row(graph, "src_ids"), "source entry 57 of the vocabulary: encoder"),
    "target row": (
        "decoder_step",
        lambda graph: negate_row(graph, "tokens"),
        "target entry 57 of the vocabulary: scores",
    ),
    "output row": ("decoder_step", scale_token("output", 57, -1.0), "target entry .* of the vocabulary: scores"),
}
"""Graph, mutation, and what a failure must begin with."""


def negate_row(graph: GraphProto, ids: str) -> None:
    """The other sign for entry 57 where `ids` are looked up."""
    reader = next(each for each in graph.node if each.op_type == "Gather" and list(each.input[1:]) == [ids])
    change_tensor(graph, reader.input[0], row(RARE, times(-1)))


def raise_scores(graph: GraphProto) -> None:
    """The scores of the best tokens, and they alone, a little too high."""
    constant(graph, "little", 1e-3, np.float32)
    behind(graph, "top_scores", helper.make_node("Add", ["top_scores_before", "little"], ["top_scores"]))


def round_scores(unit: float, everywhere: bool) -> Mutation:
    """The log-probabilities rounded to a unit, or those alone among which the best tokens are chosen."""

    def mutate(graph: GraphProto) -> None:
        constant(graph, "unit", unit, np.float32)
        node = producer(graph, "top_scores")
        source = node.input[0]
        nodes = [
            helper.make_node("Div", [f"{source}_before" if everywhere else source, "unit"], ["in_units"]),
            helper.make_node("Round", ["in_units"], ["whole"]),
            helper.make_node("Mul", ["whole", "unit"], [source if everywhere else "rounded"]),
        ]
        if everywhere:
            behind(graph, source, *nodes)
            return
        for each in reversed(nodes):
            graph.node.insert(list(graph.node).index(node), each)
        node.input[0] = "rounded"

    return mutate


MIXED = "every layer agrees"
MUTATIONS: dict[str, tuple[str, Mutation, str]] = {
    "encoder mask": ("encoder", drop_mask(), "encoder_layer_0"),
    "encoder mask of the last layer": ("encoder", drop_mask(1), "encoder_layer_1"),
    "encoder positions": ("encoder", shift_positions, "encoder_embedding"),
    "encoder K and V, 0": ("encoder", swap_keys_and_values(0), "encoder_layer_0"),
    "encoder K and V, 1": ("encoder", swap_keys_and_values(1), "encoder_layer_1"),
    "encoder outputs, 0": ("encoder", swap_outputs("cross_k_0", "cross_v_0"), "cross_k_0"),
    "encoder outputs, 1": ("encoder", swap_outputs("cross_k_1", "cross_v_1"), "cross_k_1"),
    "encoder weight, 0": ("encoder", scale("encoder.0.attention.query"), "encoder_layer_0"),
    "encoder weight, 1": ("encoder", scale("encoder.1.ff.down"), "encoder_layer_1"),
    "encoder cross keys": ("encoder", scale("decoder.0.cross.key"), "cross_k_0"),
    "encoder cross values": ("encoder", scale("decoder.1.cross.value"), "cross_v_1"),
    "encoder fp16, 0": ("encoder", in_half_precision("encoder.0.attention.out"), "encoder_layer_0"),
    "encoder fp16, 1": ("encoder", in_half_precision("encoder.1.attention.value"), "encoder_layer_1"),
    "encoder NaN": ("encoder", spoil("encoder.1.ff.up"), "encoder_layer_1"),
    "step mask": ("decoder_step", drop_mask(), "decoder_layer_0"),
    "step mask of the last layer": ("decoder_step", drop_mask(1), "decoder_layer_1"),
    "step positions": ("decoder_step", shift_positions, "token 1, decoder_embedding"),
    "step K and V, 0": ("decoder_step", swap_keys_and_values(0), "decoder_layer_0"),
    "step cross K and V, 0": ("decoder_step", swap_keys_and_values(1), "decoder_layer_0"),
    "step K and V, 1": ("decoder_step", swap_keys_and_values(2), "decoder_layer_1"),
    "step cross K and V, 1": ("decoder_step", swap_keys_and_values(3), "decoder_layer_1"),
    "step weight, 0": ("decoder_step", scale("decoder.0.cross.query"), "decoder_layer_0"),
    "step weight, 1": ("decoder_step", scale("decoder.1.ff.up"), "decoder_layer_1"),
    "step query": ("decoder_step", scale("decoder.1.attention.query"), "token 2, decoder_layer_1"),
    "step fp16, 0": ("decoder_step", in_half_precision("decoder.0.attention.value"), "decoder_layer_0"),
    "step fp16, 1": ("decoder_step", in_half_precision("decoder.1.cross.out"), "decoder_layer_1"),
    "step NaN": ("decoder_step", spoil("decoder.0.ff.down"), "token 1, decoder_layer_0"),
    "step caches": ("decoder_step", swap_outputs("present_k_1", "present_v_1"), "token 2, decoder_layer_1"),
    "output weight": ("decoder_step", scale("output"), "token 1, log_probs"),
    "output fp16": ("decoder_step", in_half_precision("output"), "log_probs"),
    "rows constant": ("decoder_step", continue_one_row, MIXED),
    "rows reversed": ("decoder_step", continue_other_rows, MIXED),
    "worst tokens": ("decoder_step", take_the_worst, "top_ids"),
    "ids off by one": ("decoder_step", shift_ids, "top_ids"),
    "scores of the best": ("decoder_step", raise_scores, "top_scores"),
    "scores in hundredths": ("decoder_step", round_scores(1e-2, everywhere=True), "log_probs"),
    "choice in hundredths": ("decoder_step", round_scores(1e-2, everywhere=False), "top_(ids|scores)"),
}
"""Graph, mutation, and what `EngineReport.blame` must name."""


def times(factor: float) -> Change:
    return lambda array: array * np.float32(factor)


def plus(amount: float) -> Change:
    return lambda array: array + np.float32(amount)


_NORM, _FF, _OUT = "encoder.0.ff_residual.norm", "decoder.1.ff.up", "output.weight"
CONSTANTS: dict[str, tuple[str, str, Mutation, str]] = {
    "source row": ("", "encoder", changed(_OUT, row(RARE, times(-1))), _OUT),
    "target row": ("", "decoder_step", changed(_OUT, row(RARE, times(1.01))), _OUT),
    "output of a token": ("", "decoder_step", scale_token("output", RARE), _OUT),
    "position": ("", "encoder", changed("tgt_positions", row(20, plus(1e-4))), "tgt_positions"),
    "norm bias": ("", "encoder", changed(f"{_NORM}.bias", plus(1e-4)), f"{_NORM}.bias"),
    "key and query": ("", "encoder", swap_weights("encoder.0.attention.key", "encoder.0.attention.query"), "attention"),
    "fp32-cpu, source row": (
        "fp32-cpu",
        "encoder",
        changed(_OUT, row(RARE, times(1.01))),
        _OUT,
    ),
    "fp32-cpu, target row": (
        "fp32-cpu",
        "decoder_step",
        changed(_OUT, row(RARE, times(-1))),
        _OUT,
    ),
    "fp32-cpu, output row": (
        "fp32-cpu",
        "decoder_step",
        changed(_OUT, row(RARE, times(1.0001))),
        _OUT,
    ),
    "fp32-cpu, shortlists": (
        "fp32-cpu",
        "short_rows",
        changed(_OUT, row(RARE, times(1.0001))),
        _OUT,
    ),
    "int8, source row": ("int8", "encoder", changed(f"{_OUT}.scaled.scales", row(RARE, times(1.1))), "output"),
    "int8, target row": (
        "int8",
        "decoder_step",
        changed(f"{_OUT}.int8", row(RARE, lambda r: -r)),
        _OUT,
    ),
    "int8, gain": ("int8", "encoder", changed(f"{_NORM}.weight", times(1.05)), f"{_NORM}.weight"),
    "int8, norm bias": ("int8", "decoder_step", changed("decoder_norm.bias", plus(0.1)), "decoder_norm.bias"),
    "int8, scale": ("int8", "decoder_step", changed(f"{_FF}.weight.scales", row(7, times(1.1))), f"{_FF}.weight"),
    "int8, output scale": (
        "int8",
        "decoder_step",
        changed(f"{_OUT}.scales", row(RARE, times(1.01))),
        _OUT,
    ),
    "int8, output": ("int8", "decoder_step", changed(f"{_OUT}.int8.transposed", row(3, lambda r: r // 2)), _OUT),
    "int8, weight": (
        "int8",
        "encoder",
        changed("decoder.1.cross.value.weight.int8.transposed", row(3, lambda r: r // 2)),
        "cross.value.weight",
    ),
    "int8-latency, gain": (
        "int8-latency",
        "decoder_step",
        changed("decoder_norm.weight", times(1.05)),
        "decoder_norm.weight",
    ),
    "int8-latency, scale": (
        "int8-latency",
        "decoder_step",
        changed(f"{_FF}.weight.scales.groups", row(7, times(1.1))),
        f"{_FF}.weight",
    ),
    "int4, gain": ("int4", "encoder", changed(f"{_NORM}.weight", times(1.05)), f"{_NORM}.weight"),
    "int4, norm bias": (
        "int4",
        "decoder_step",
        changed("decoder.0.cross_residual.norm.bias", plus(0.1)),
        "cross_residual.norm.bias",
    ),
    "int4, scale": (
        "int4",
        "decoder_step",
        changed(f"{_FF}.weight.scales.groups", row(7, times(1.1))),
        f"{_FF}.weight",
    ),
    "int4, nibbles": (
        "int4",
        "decoder_step",
        changed(f"{_FF}.weight.int4.groups", lambda w: w << 4 | w >> 4),
        f"{_FF}.weight",
    ),
    "int4, shortlists": (
        "int4",
        "short_rows",
        changed(f"{_OUT}.scales.groups", row(RARE, times(1.1))),
        _OUT,
    ),
    "int4, a bias": ("int4", "encoder", changed("decoder.0.cross.key.bias", row(5, plus(0.01))), "cross.key.bias"),
}
"""Variant, graph, mutation, and the tensor of the checkpoint that the gate must name."""


# What no tensor of the checkpoint says: how the inputs of products are rounded.
ROUNDING: dict[str, tuple[str, str, Mutation, str]] = {
    "encoder step": ("int8", "encoder", change_rounding(0, 1, times(0.4)), "encoder_layer_0"),
    "encoder zero": ("int4", "encoder", change_rounding(2, 2, lambda z: z + 80), "encoder_layer_0"),
    "step": ("int8", "decoder_step", change_rounding(0, 1, times(0.6)), "decoder_layer_0"),
    "zero": ("int8", "decoder_step", change_rounding(0, 2, lambda z: z * 0), "decoder_layer_0"),
}
"""Variant, graph, mutation, and the layer whose limit it is beyond."""


# What no usual batch, beam or output meets: other widths, more rows, later positions.
def wrong_where(
    condition: str, limit: int, name: str, wrong: str, readers: str = "", also: tuple[str, int] | None = None
) -> Mutation:
    """Another value for an input or a hidden one where `beams` are `limit`, or `position` or `row` is not below it.

    `wrong`: `reversed` among the beams of a sentence, `one less`, `negated`. `readers`: operators that read it; all.
    `also`: `batch` or `position`, which must not be below its own limit either.
    """

    def mutate(graph: GraphProto) -> None:
        node, nodes, other = helper.make_node, [], f"{name}_or_other"
        for key, value in (("limit", limit), ("second", 1), ("first", 0)):
            constant(graph, f"w_{key}", value, np.int64)
        for key, value in (("axis", [1]), ("back", [-1]), ("last", [np.iinfo(np.int64).min]), ("end", [-1])):
            constant(graph, f"w_{key}", value, np.int64)
        nodes.append(node("Shape", ["tokens"], ["w_shape"]))
        if condition == "beams":
            nodes.append(node("Gather", ["w_shape", "w_second"], ["w_size"]))
            nodes.append(node("Equal", ["w_size", "w_limit"], ["w_where"]))
        elif condition == "position":
            nodes.append(node("Cast", ["position"], ["w_position"], to=TensorProto.INT64))
            nodes.append(node("GreaterOrEqual", ["w_position", "w_limit"], ["w_where"]))
        else:
            nodes.append(node("ReduceProd", ["w_shape"], ["w_rows"], keepdims=0))
            nodes.append(node("Range", ["w_first", "w_rows", "w_second"], ["w_row"]))
            nodes.append(node("GreaterOrEqual", ["w_row", "w_limit"], ["w_beyond"]))
            nodes.append(node("Reshape", ["w_beyond", "w_shape"], ["w_by_beam"]))
            nodes.append(node("Unsqueeze", ["w_by_beam", "w_end"], ["w_where"]))
        where = "w_where"
        if also:
            constant(graph, "w_least", also[1], np.int64)
            if also[0] == "batch":
                nodes.append(node("Gather", ["w_shape", "w_first"], ["w_also"]))
            else:
                nodes.append(node("Cast", ["position"], ["w_also"], to=TensorProto.INT64))
            nodes.append(node("GreaterOrEqual", ["w_also", "w_least"], ["w_also_where"]))
            nodes.append(node("And", ["w_where", "w_also_where"], ["w_both"]))
            where = "w_both"
        if wrong == "reversed":
            nodes.append(node("Slice", [name, "w_end", "w_last", "w_axis", "w_back"], ["w_other"]))
        elif wrong == "one less":
            constant(graph, "w_less", [-1], np.int32)
            nodes.append(node("Add", [name, "w_less"], ["w_other"]))
        else:
            nodes.append(node("Neg", [name], ["w_other"]))
        nodes.append(node("Where", [where, "w_other", name], [other]))
        for each in graph.node:
            if each.op_type in (readers or each.op_type) and each.op_type != "Shape":
                each.input[:] = [other if value == name else value for value in each.input]
        made = [n for n, each in enumerate(graph.node) if name in each.output]
        for each in reversed(nodes):
            graph.node.insert(made[0] + 1 if made else 0, each)

    return mutate


_IN_PLACE = ("fp32-cpu", "int8", "int8-latency", "int4")
UNMET: dict[str, tuple[tuple[str, ...], Mutation, str]] = {
    "parents of 4 beams": (("",), wrong_where("beams", 4, "parents", "reversed"), "rows of 4 beams"),
    "parents of 7 beams": (("",), wrong_where("beams", 7, "parents", "reversed"), "rows of 7 beams"),
    "tokens of 4 beams": (("", *_IN_PLACE), wrong_where("beams", 4, "tokens", "reversed"), "rows of 4 beams"),
    "history of 4 beams": (_IN_PLACE, wrong_where("beams", 4, "written_by", "reversed"), "rows of 4 beams"),
    "beyond 600 rows": (("", *_IN_PLACE), wrong_where("row", 600, "hidden", "negated"), "many rows"),
    "late parents": (("",), wrong_where("position", 17, "parents", "reversed"), "late rows"),
    "many rows, not at first": (
        ("", *_IN_PLACE),
        wrong_where("row", 64, "hidden", "negated", also=("position", 6)),
        "full batches",
    ),
    "4 beams of many": (("",), wrong_where("beams", 4, "hidden", "negated", also=("batch", 8)), "full batches"),
    "parents of 4 beams of many": (
        ("",),
        wrong_where("beams", 4, "parents", "reversed", also=("batch", 8)),
        "full batches",
    ),
    "parents of 8 beams, late": (
        ("",),
        wrong_where("beams", 8, "parents", "reversed", also=("position", 7)),
        "full batches",
    ),
    "history of 4 beams, late": (
        _IN_PLACE,
        wrong_where("beams", 4, "written_by", "reversed", also=("position", 6)),
        "full batches",
    ),
    "late history": (_IN_PLACE, wrong_where("position", 12, "written_by", "reversed"), "late rows"),
}
"""Variants, mutation of their step, and what a failure begins with."""
LATE_POSITIONS = wrong_where("position", 13, "position", "one less", "Gather")
"""Each position from 13 on is taken for the one before it."""
UNMET_JOINED: dict[str, Mutation] = {
    "beams": wrong_where("beams", 4, "written_by", "reversed"),
    "late": wrong_where("position", 12, "written_by", "reversed"),
    "tokens": wrong_where("beams", 4, "tokens", "reversed"),
}
"""Mutations of the step where sentences have joined others."""
