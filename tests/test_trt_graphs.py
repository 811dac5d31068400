"""Graphs for TensorRT: within the rules of its parsers, fixed sizes, half precision with what must stay fp32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from tformer_deploy.base.errors import ArtifactError, LimitError
from tformer_deploy.bundle.contract import GRAPHS
from tformer_deploy.bundle.plans import Profile
from tformer_deploy.bundle.recipe import load_recipe
from tformer_deploy.decoding import DecodeOptions, decode
from tformer_deploy.engines.eager import EagerEngine
from tformer_deploy.engines.ort.ranges import RangeEngine
from tformer_deploy.export.half import fix_sizes, to_half
from tformer_deploy.export.to_onnx import build_graph
from tformer_deploy.export.trace import Tracer
from tformer_deploy.model.network import Transformer
from tformer_deploy.translate.translator import make_batch

from .configs import CONFIGS
from .conftest import random_model, random_sources, small_config, variant_engine
from .params import long_but

TABLE = json.loads((Path(__file__).parent / "trt_operators.json").read_text())
SIZES, ONE_BEAM = (Profile(3, beams, 9, 12).sizes for beams in (2, 1))
TYPES = {
    TensorProto.FLOAT: "FP32",
    TensorProto.FLOAT16: "FP16",
    TensorProto.BFLOAT16: "BF16",
    TensorProto.INT32: "INT32",
    TensorProto.BOOL: "BOOL",
}


def graphs(model: Transformer) -> dict[str, ModelProto]:
    recipe = load_recipe("trt").for_model(model.config)
    tracer = Tracer(model.eval())
    return {name: build_graph(name, tracer, recipe, {}) for name in GRAPHS}


def problems(model: ModelProto, version: str) -> Iterator[str]:
    """What a parser would refuse, or misread."""
    first, last = TABLE["opsets"][version]
    if [each.domain for each in model.opset_import] != [""] or not first <= model.opset_import[0].version <= last:
        yield f"opset {model.opset_import}"
    inferred = onnx.shape_inference.infer_shapes(model).graph
    kinds = {v.name: v.type.tensor_type.elem_type for v in (*inferred.value_info, *inferred.input, *inferred.output)}
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    kinds |= {name: tensor.data_type for name, tensor in constants.items()}
    for node in model.graph.node:
        allowed = TABLE["operators"].get(node.op_type, {}).get(version)
        if allowed is None:
            yield f"{node.op_type} is not in the table"
            continue
        compares = node.op_type in ("Less", "LessOrEqual", "Greater", "Equal")
        for name in (*node.input, *([] if compares else node.output)):
            # Indices, sizes and counts are int64 in ONNX; 8.6 narrows them.
            if kinds.get(name) in TYPES and TYPES[kinds[name]] not in allowed.split():
                yield f"{node.op_type} {node.name}: {name} is {TYPES[kinds[name]]}"
        how = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        if node.op_type == "Shape" and how:
            yield f"{node.name}: a Shape with a start or an end is misread"
        if node.op_type in ("Slice", "Unsqueeze"):
            given = node.op_type == "Unsqueeze" or len(node.input) == 4
            one_dimension = len(constants.get(node.input[0], TensorProto()).dims) == 1
            if not one_dimension if not given else node.input[-1] not in constants:
                yield f"{node.name}: axes must be an initializer"
        if node.op_type == "LayerNormalization" and len(node.output) > 1:
            yield f"{node.name}: has a second output"
        if node.op_type == "TopK" and not how.get("sorted", 1):
            yield f"{node.name}: must be sorted"


@pytest.mark.parametrize("changes", long_but(CONFIGS, "pre-norm"))
def test_graphs_keep_the_rules_of_every_parser(changes: dict[str, object]) -> None:
    every = ["8.6", "10.0", "11.1"]
    for precision, versions, sizes in (
        ("fp32", every, SIZES),
        ("fp16", every, SIZES),
        ("fp16", every, ONE_BEAM),
        ("bf16", every[1:], SIZES),
    ):
        for model in graphs(random_model(small_config(**changes))).values():
            assert not [problem for version in every for problem in problems(model, version)]
            fix_sizes(model, sizes)
            if precision != "fp32":
                assert to_half(model, precision, {}) == []  # type: ignore[arg-type]
            onnx.checker.check_model(model, full_check=True)
            assert not [problem for version in versions for problem in problems(model, version)]


def test_the_rules_find_what_they_are_for() -> None:
    model = graphs(random_model(small_config()))["decoder_step"]
    nodes = {node.op_type: node for node in model.graph.node}
    nodes["Shape"].attribute.append(helper.make_attribute("start", 1))
    nodes["TopK"].attribute.append(helper.make_attribute("sorted", 0))
    nodes["Relu"].op_type = "Gelu"
    found = " ".join(problems(model, "8.6"))
    assert all(text in found for text in ("misread", "must be sorted", "Gelu is not in the table"))
    half = graphs(random_model(small_config()))["encoder"]
    to_half(half, "bf16", {})
    assert "BF16" in " ".join(problems(half, "8.6")) and not list(problems(half, "10.0"))


@pytest.mark.parametrize("norm", long_but(["rms", "standard"], "rms"))
def test_norms_of_queries_and_keys_stay_fp32_in_half_graphs(norm: str) -> None:
    """The square of an RMS norm, too: it overflows where its input does not."""
    model = graphs(random_model(small_config(encoder_layers=1, decoder_layers=1, qk_norm=True, norm=norm)))["encoder"]
    fix_sizes(model, SIZES)
    assert to_half(model, "fp16", {}) == []
    inferred = onnx.shape_inference.infer_shapes(model).graph
    kinds = {
        value.name: TYPES[value.type.tensor_type.elem_type]
        for value in inferred.value_info
        if value.type.tensor_type.elem_type in TYPES
    }
    makers = {output: node for node in model.graph.node for output in node.output}
    norms = [node for node in model.graph.node if node.op_type in ("LayerNormalization", "ReduceMean")]
    squares = [makers[node.input[0]] for node in norms if node.op_type == "ReduceMean"]
    assert len(norms) == 2 + 2 + 1 + 1, "of the layer, its queries and keys, the memory, the keys of the decoder"
    assert {kinds[node.input[0]] for node in (*norms, *squares)} == {"FP32"}


@pytest.mark.parametrize("changes", long_but(CONFIGS, "pre-norm", "every option"))
def test_what_is_computed_from_shapes_stays_on_the_processor(changes: dict[str, object]) -> None:
    """ONNX Runtime's CUDA provider reads these inputs there; any other would be a copy, and no step a CUDA graph."""
    read_on_host = {"Reshape": {1}, "Slice": {1, 2, 3}, "TopK": {1}, "Expand": {1}, "Range": {0, 1, 2}}
    for model in graphs(random_model(small_config(**changes))).values():
        sizes = {node.output[0] for node in model.graph.node if node.op_type == "Shape"}
        constants = {tensor.name for tensor in model.graph.initializer}
        for node in model.graph.node:
            own = [i for i, name in enumerate(node.input) if name in sizes]
            if own and set(node.input) <= sizes | constants and node.op_type in ("Gather", "Concat", "Mul"):
                sizes.add(node.output[0])
            else:
                assert set(own) <= read_on_host.get(node.op_type, set()), f"{node.op_type} {node.output[0]}"
        assert len(sizes) > 1


def test_fixed_sizes_leave_no_shape_to_compute() -> None:
    for model in graphs(random_model(small_config())).values():
        before = len(model.graph.node)
        fix_sizes(model, SIZES)
        assert not [node for node in model.graph.node if node.op_type in ("Shape", "Concat")]
        assert len(model.graph.node) < before
        dims = [d for v in (*model.graph.input, *model.graph.output) for d in v.type.tensor_type.shape.dim]
        assert all(d.dim_value and not d.dim_param for d in dims)
    alone = graphs(random_model(small_config()))["decoder_step"]
    fix_sizes(alone, ONE_BEAM)
    caches = {value.name for value in alone.graph.input if value.name.startswith("past_")}
    readers = {node.op_type for node in alone.graph.node if caches & set(node.input)}
    assert readers == {"Where"}, "with one beam no cache is reordered"
    step = graphs(random_model(small_config()))["decoder_step"]
    fix_sizes(step, SIZES)
    top = next(node for node in step.graph.node if node.op_type == "TopK")
    count = next(tensor for tensor in step.graph.initializer if tensor.name == top.input[1])
    assert numpy_helper.to_array(count).tolist() == [2 * SIZES["beams"]], "8.6 wants it constant"
    without = {name: size for name, size in SIZES.items() if name != "capacity"}
    with pytest.raises(ArtifactError, match="size capacity is dynamic: only graphs of target trt"):
        fix_sizes(graphs(random_model(small_config()))["decoder_step"], without)


@pytest.mark.parametrize("wrong", [-7, 10**6])
def test_no_step_leaves_the_tables(wrong: int) -> None:
    """Whatever TopK may make of log-probabilities that are not numbers."""
    model = random_model(small_config())
    step = graphs(model)["decoder_step"]
    top = next(node for node in step.graph.node if node.op_type == "TopK")
    best, top.output[1] = top.output[1], "right"
    step.graph.initializer.append(numpy_helper.from_array(np.int64(wrong), "wrong"))
    step.graph.node.insert(list(step.graph.node).index(top) + 1, helper.make_node("Add", ["right", "wrong"], [best]))
    fix_sizes(step, SIZES)
    rng, feed = np.random.default_rng(0), {}
    for value in step.graph.input:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        whole = value.type.tensor_type.elem_type == TensorProto.INT32
        feed[value.name] = np.zeros(shape, np.int32) if whole else np.full(shape, np.nan, np.float32)
    feed["src_lengths"][:], feed["live_beams"][:] = rng.integers(1, 9, 3), 2
    names = [value.name for value in step.graph.output]
    with np.errstate(all="ignore"):
        found = dict(zip(names, ReferenceEvaluator(step).run(None, feed), strict=True))
    assert np.isnan(found["top_scores"]).all() and np.isfinite(found["next_values"]).all()
    for name, end in (
        ("top_ids", model.config.tgt_vocab),
        ("next_tokens", model.config.tgt_vocab),
        ("next_parents", 6),
    ):
        assert 0 <= found[name].min() <= found[name].max() < end


def half_engine(model: Transformer, folder: Path, largest: dict[str, dict[str, float]]) -> Any:
    """The graphs of a model in fp16, on a processor."""
    engine = variant_engine(model, folder, "trt")
    for name in GRAPHS:
        path = folder / "variant" / f"{name}.onnx"
        graph = onnx.load(path)
        to_half(graph, "fp16", largest.get(name, {}))
        onnx.save(graph, path)
    return engine


@pytest.mark.parametrize(
    "name",
    long_but(
        ["pre-norm", "annotated post-norm, a large eps", "annotated, nothing shared"],
        "pre-norm",
        "annotated, nothing shared",
    ),
)
def test_half_precision_is_near_eager(name: str, tmp_path: Path) -> None:
    model = random_model(small_config(**CONFIGS[name]))
    src_ids, lengths = random_sources(5, 9)
    src_ids %= 44
    batch = make_batch([row[:n].tolist() for row, n in zip(src_ids, lengths, strict=True)], model.config.pad_id)
    with half_engine(model, tmp_path, {}) as engine, EagerEngine(model) as eager:
        assert engine.cross_keys_values(engine.encode(src_ids, lengths))[0].dtype == np.float16
        for beams in (1, 3):
            options = DecodeOptions(max_tokens=12, beams=beams, n_best=beams)
            ours, theirs = (decode(side, batch, options) for side in (engine, eager))
            pairs = [(a[0].score, b[0].score) for a, b in zip(ours, theirs, strict=True) if a[0].ids == b[0].ids]
            assert len(pairs) >= 4 and 0 < max(abs(a - b) for a, b in pairs) < 0.1


def measured(engine: Any, model: Transformer) -> dict[str, dict[str, float]]:
    """Ranges of a few decoded sentences."""
    src_ids, lengths = random_sources(5, 9)
    ranges = RangeEngine(engine.bundle, 1, engine.variant)
    with ranges:
        batch = make_batch([row[:n].tolist() for row, n in zip(src_ids, lengths, strict=True)], model.config.pad_id)
        decode(ranges, batch, DecodeOptions(max_tokens=12), strict=False)
    return ranges.largest


def first_step(model: Transformer, half: bool, largest: dict[str, float]) -> NDArray[Any]:
    """Best scores of a first step whose caches are 1 everywhere, in the types of the graph to the letter.

    ONNX Runtime does not do for that: on a processor it computes half precision in fp32.
    """
    graph = graphs(model)["decoder_step"]
    fix_sizes(graph, SIZES)
    if half:
        to_half(graph, "fp16", largest)
    feed: dict[str, Any] = {}
    for value in graph.graph.input:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        feed[value.name] = np.zeros(shape, kind) if value.name == "positions" else np.ones(shape, kind)
    with np.errstate(all="ignore"):
        found = ReferenceEvaluator(graph).run(["log_probs"], feed)
    return np.asarray(found[0])


def test_what_overflows_stays_fp32(tmp_path: Path) -> None:
    """One layer whose hidden values are far beyond fp16: an island once that has been measured."""
    model = random_model(small_config())
    feed_forward = model.decoder[1].ff
    for parameter in (feed_forward.up.weight, feed_forward.up.bias):
        parameter.data *= 1e6
    feed_forward.down.weight.data /= 1e6
    largest = measured(variant_engine(model, tmp_path, "trt"), model)["decoder_step"]
    islands = to_half(graphs(model)["decoder_step"], "fp16", largest)
    assert [island.kind for island in islands] == ["MatMul", "MatMul"], "what is between follows"
    assert {island.graph for island in islands} == {"decoder_step"}
    assert [island.node for island in islands] == ["decoder.1.ff.up", "decoder.1.ff.down"]
    assert islands[0].tensor == "decoder.1.ff.up.weight.transposed"
    assert all(island.largest > 65504 for island in islands)
    exact, half = first_step(model, False, {}), first_step(model, True, largest)
    assert 0 < np.abs(half - exact).max() < 0.1


def test_too_large_values_would_not_be_finite() -> None:
    """What the ranges are for: weights that fit, and products of them that do not."""
    model = random_model(small_config())
    model.decoder[1].ff.up.weight.data *= 2e5
    assert np.isfinite(first_step(model, False, {})).all()
    assert not np.isfinite(first_step(model, True, {})).all()


def test_a_cache_that_overflows_is_named(tmp_path: Path) -> None:
    model = random_model(small_config())
    model.decoder[0].cross.value.weight.data *= 1e6
    largest = measured(variant_engine(model, tmp_path, "trt"), model)["encoder"]
    message = r"cross_v_0 reaches .*, more than half of what fp16 holds: build with --precision bf16 or fp32"
    with pytest.raises(LimitError, match=message):
        to_half(graphs(model)["encoder"], "fp16", largest)
    assert to_half(graphs(model)["encoder"], "bf16", largest) == []


def test_ranges_are_those_of_the_values(tmp_path: Path) -> None:
    model = random_model(small_config())
    engine = variant_engine(model, tmp_path, "trt")
    largest = measured(engine, model)
    src_ids, lengths = random_sources(5, 9)
    with EagerEngine(model) as eager:
        cross = eager.cross_keys_values(eager.encode(src_ids, lengths))
    assert largest["encoder"]["cross_k_0"] == pytest.approx(np.abs(cross[0]).max(), abs=1e-4)
    assert largest["decoder_step"]["present_k_0"] > 0


def test_a_value_that_is_not_a_number_counts_as_infinite(tmp_path: Path) -> None:
    """Wherever it stands, and however late."""
    model = random_model(small_config())
    model.decoder[1].ff.up.bias.data[7] = float("nan")
    largest = measured(variant_engine(model, tmp_path, "trt"), model)
    assert largest["decoder_step"]["log_probs"] == np.inf > largest["decoder_step"]["decoder_layer_0"]
