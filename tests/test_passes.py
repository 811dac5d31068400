"""Each pass alone: the same numbers before and after on ONNX Runtime, what it does not know refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from tformer_deploy.base.errors import ArtifactError
from tformer_deploy.bundle.contract import TensorSpec
from tformer_deploy.bundle.recipe import load_recipe
from tformer_deploy.engines.ort.library import InferenceSession, OrtValue, SessionOptions
from tformer_deploy.export.graphs import make_graph
from tformer_deploy.export.passes.fold_scales import fold_scales
from tformer_deploy.export.passes.fold_weights import fold_weights
from tformer_deploy.export.passes.fuse_attention import fuse_attention
from tformer_deploy.export.passes.fuse_norm import fuse_norm
from tformer_deploy.export.passes.merge_matmuls import merge_matmuls
from tformer_deploy.export.passes.native import native_program
from tformer_deploy.export.passes.native.lowering import Lowering
from tformer_deploy.export.passes.older_operators import older_operators
from tformer_deploy.export.passes.quantize import quantize_channels, quantize_groups, quantize_tables
from tformer_deploy.export.passes.rewriting import MICROSOFT
from tformer_deploy.export.passes.simplify import simplify
from tformer_deploy.export.quantizing import TABLES, Range, Ranges
from tformer_deploy.export.trace import Tracer, rename_weights, trace
from tformer_deploy.model.network import AnnotatedLayerNorm, Transformer

from .conftest import random_model, small_config

Array = NDArray[Any]
CLOSE = 2e-6
SEEN: Ranges = {"w": Range(-3.0, 3.0)}


def traced(module: nn.Module, *inputs: Tensor) -> ir.Model:
    """A module of our own making as a simplified graph: inputs x0, x1 ..., their first axis dynamic; output y."""
    names = [f"x{i}" for i in range(len(inputs))]
    rows = torch.export.Dim.DYNAMIC
    program = torch.onnx.export(
        module.eval(),
        inputs,
        dynamo=True,
        opset_version=23,
        input_names=names,
        output_names=["y"],
        dynamic_shapes=tuple({0: rows} for _ in inputs),
        optimize=False,
        verbose=False,
    )
    assert program is not None
    rename_weights(program.model.graph)
    simplify(program.model)
    return program.model


def session(model: ir.Model) -> InferenceSession:
    """On one thread."""
    model.ir_version = 10
    if any(node.domain == MICROSOFT for node in model.graph):
        model.graph.opset_imports[MICROSOFT] = 1
    options = SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.x64quantprecision", "1")
    return InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])


def outputs(model: ir.Model, *inputs: Array) -> Array:
    """The one output of a module of our own."""
    return session(model).run(["y"], {f"x{i}": x for i, x in enumerate(inputs)})[0]  # type: ignore[no-any-return]


def kinds(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


# Whole graphs of a model, with real cache contents

MODEL = random_model(small_config(activation="gelu", output_bias=True, share_embeddings="none")).eval()
SIZES = {"batch": 3, "beams": 2, "rows": 6, "past_rows": 5, "src_len": 7, "past_len": 4, "capacity": 9, "listed": 11}


@cache
def tracer() -> Tracer:
    return Tracer(MODEL)


def graph(name: str, recipe: str) -> ir.Model:
    return tracer().graph(name, load_recipe(recipe).for_model(MODEL.config))


def feed(specs: tuple[TensorSpec, ...], seed: int = 5) -> dict[str, Array]:
    """Numbers that a decode could have at position 4 of rows in two beams."""
    rng = np.random.default_rng(seed)
    given: dict[str, Array] = {}
    for spec in specs:
        shape = spec.sized(SIZES)
        given[spec.name] = rng.normal(size=shape).astype(np.float32) if spec.dtype == "float32" else np.zeros(0)
        if spec.dtype == "int32":
            given[spec.name] = rng.integers(4, 60, shape).astype(np.int32)
    given["src_lengths"] = np.array([7, 2, 5], np.int32)
    exact = {"position": 4, "end_id": 3, "live_beams": 2}
    given |= {name: np.array([value], np.int32) for name, value in exact.items() if name in given}
    if "positions" in given:
        given["positions"] = np.array([[4, 4], [0, 0], [8, 8]], np.int32)
    if "parents" in given:
        given["parents"] = rng.integers(0, 5, (3, 2)).astype(np.int32)
    if "written_by" in given:
        given["written_by"] = rng.integers(0, 2, (3, 2, 9)).astype(np.int32)
        given["written_by"][:, :, 4] = [0, 1]  # this position is each beam's own
    return {spec.name: given[spec.name] for spec in specs}


def run_in_place(model: ir.Model, given: dict[str, Array]) -> dict[str, Array]:
    """A run; of a step in place `present` is the memory of `past`, as engines bind it."""
    found = session(model)
    binding = found.io_binding()
    copies = {name: array.copy() for name, array in given.items()}
    values = {name: OrtValue.ortvalue_from_numpy(array) for name, array in copies.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    names = [output.name for output in found.get_outputs()]
    for name in names:
        past = name.replace("present", "past")
        if "written_by" in given and past in values:
            binding.bind_ortvalue_output(name, values[past])
        else:
            binding.bind_output(name)
    found.run_with_iobinding(binding)
    found_values = [value.numpy().copy() for value in binding.get_outputs()]
    return dict(zip(names, found_values, strict=True))


def assert_same(before: dict[str, Array], after: dict[str, Array], close: float = CLOSE) -> None:
    """Every output; positions of caches that are written, and of the sources that are real."""
    assert before.keys() == after.keys()
    for name, expected in before.items():
        found = after[name]
        if name.startswith("cross_"):
            real = np.arange(7) < np.array([[7], [2], [5]])
            expected, found = (x.transpose(0, 2, 1, 3)[real] for x in (expected, found))
        if name.startswith("present_") and "next_tokens" not in before:
            expected, found = expected[:, :, :5], found[:, :, :5]  # in place; what is behind is masked
        if expected.dtype == np.float32:
            size = max(1.0, float(np.abs(expected).max()))
            assert np.abs(expected - found.reshape(expected.shape)).max() <= close * size, name
        else:
            assert (expected == found).all(), name


GRAPHS = [("encoder", "fp32-cpu"), ("decoder_step", "fp32-cpu"), ("encoder", "trt"), ("decoder_step", "trt")]
PASSES: dict[str, tuple[list[tuple[str, str]], Callable[[ir.Model], None], str]] = {
    "fuse_attention": (GRAPHS[:2], lambda model: fuse_attention(model.graph), "MultiHeadAttention"),
    "merge_matmuls": (GRAPHS, lambda model: merge_matmuls(model.graph), "Split"),
    "fold_weights": (GRAPHS, lambda model: fold_weights(model.graph, gemm=False), "MatMul"),
    "fold_weights, gemm": (GRAPHS[1:2], lambda model: fold_weights(model.graph, gemm=True), "Gemm"),
    "fold_scales": (GRAPHS, lambda model: fold_scales(model.graph), "Attention"),
    "older_operators": (GRAPHS[2:], older_operators, "Erf"),
    "simplify": (GRAPHS, simplify, "MatMul"),
}


@pytest.mark.parametrize(
    ("name", "recipe", "rewrite", "made"),
    [
        pytest.param(name, recipe, rewrite, made, id=f"{key}, {recipe} {name}")
        for key, (graphs, rewrite, made) in PASSES.items()
        for name, recipe in graphs
    ],
)
def test_a_pass_changes_no_number(name: str, recipe: str, rewrite: Callable[[ir.Model], None], made: str) -> None:
    model = graph(name, recipe)
    given = feed(make_graph(name, MODEL, load_recipe(recipe).for_model(MODEL.config)).signature.inputs)
    before = run_in_place(model, given)
    rewrite(model)
    simplify(model)
    assert made in kinds(model)
    assert_same(before, run_in_place(model, given))


def test_attention_is_fused_as_a_whole() -> None:
    """Nothing of masks or of reading what beams wrote is left, and no cache is copied."""
    model = graph("decoder_step", "fp32-cpu")
    fuse_attention(model.graph)
    simplify(model)
    assert kinds(model).count("MultiHeadAttention") == 4 and "Attention" not in kinds(model)
    assert not {"GatherElements", "Where", "Range", "Less", "LessOrEqual", "Expand"} & set(kinds(model))


@pytest.mark.long
def test_keys_of_the_source_that_a_step_changes_are_fused() -> None:
    """The operator takes keys and values in heads, as the graph is given them, or neither."""

    class Warm(Transformer):
        def step(self, *given: Any, **named: Any) -> Tensor:
            tokens, position, src_lengths, cross, *rest = given
            return super().step(tokens, position, src_lengths, [(k * 1.5, v) for k, v in cross], *rest, **named)

    model = Warm(MODEL.config).eval()
    model.load_state_dict(MODEL.state_dict())
    module = make_graph("decoder_step", model, load_recipe("fp32-cpu").for_model(model.config))
    graph, given = trace(module), feed(module.signature.inputs)
    before = run_in_place(graph, given)
    fuse_attention(graph.graph)
    simplify(graph)
    assert_same(before, run_in_place(graph, given))


def test_older_operators_are_all_of_opset_17() -> None:
    for name in ("encoder", "decoder_step"):
        model = graph(name, "trt")
        older_operators(model)
        simplify(model)
        assert model.graph.opset_imports[""] == 17
        shapes = [node for node in model.graph if node.op_type == "Shape"]
        assert shapes and not any(node.attributes for node in shapes), "TensorRT 8.6 misreads a start or an end"


# What a pass does not know


class Attend(nn.Module):
    """Attention of x to itself under some mask."""

    def __init__(self, mask: Callable[[Tensor], Tensor | None], **how: Any) -> None:
        super().__init__()
        self.query, self.mask, self.how = nn.Linear(16, 16), mask, how

    def forward(self, x0: Tensor, x1: Tensor) -> Tensor:
        q = self.query(x0).view(x0.shape[0], 5, 2, 8).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=self.mask(x1), **self.how)


def below(lengths: Tensor) -> Tensor:
    return (torch.arange(5) < lengths[:, None])[:, None, None, :].expand(-1, 1, 5, -1)


def gaining(lengths: Tensor, by_row: bool = False) -> Tensor:
    """The same with what scores gain, in each row something else or not."""
    bias = torch.linspace(-3, 4, 50).view(1, 2, 5, 5)
    return torch.where(below(lengths), bias + lengths[:, None, None, None] if by_row else bias, -torch.inf)


@pytest.mark.parametrize(
    ("mask", "how"),
    [
        (lambda lengths: None, {}),
        (lambda lengths: torch.ones(5, 5).tril().bool(), {}),
        (lambda lengths: (torch.arange(5) <= lengths[:, None])[:, None, None, :].expand(-1, 1, 5, -1), {}),
        (lambda lengths: (torch.arange(5) + 1 < lengths[:, None])[:, None, None, :].expand(-1, 1, 5, -1), {}),
        (lambda lengths: below(lengths).float(), {}),
        (lambda lengths: torch.where(below(lengths), torch.ones(1, 2, 5, 5), -1e9), {}),
        (lambda lengths: gaining(lengths, by_row=True), {}),
        (lambda lengths: torch.where(torch.ones(5, 5).tril().bool(), torch.ones(1, 2, 5, 5), -torch.inf), {}),
        (lambda lengths: None, {"is_causal": True}),
    ],
    ids=[
        "none",
        "causal",
        "one more",
        "one less",
        "numbers",
        "no infinity",
        "rows",
        "causal with a bias",
        "causal by name",
    ],
)
def test_a_mask_that_is_not_of_lengths_is_refused(mask: Any, how: dict[str, Any]) -> None:
    model = traced(Attend(mask, **how), torch.zeros(2, 5, 16), torch.tensor([5, 3]))
    model.graph.inputs[1].name = "src_lengths"
    with pytest.raises(ArtifactError, match="fuse_attention"):
        fuse_attention(model.graph)


@pytest.mark.parametrize("mask", [below, gaining])
def test_a_mask_of_lengths_a_bias_and_a_scale_are_fused(mask: Any) -> None:
    x, lengths = torch.randn(2, 5, 16), torch.tensor([5, 3], dtype=torch.int32)
    model = traced(Attend(mask, scale=0.7), x, lengths)
    before = outputs(model, x.numpy(), lengths.numpy())
    model.graph.inputs[1].name = "src_lengths"
    fuse_attention(model.graph)
    model.graph.inputs[1].name = "x1"
    simplify(model)
    assert "MultiHeadAttention" in kinds(model)
    assert np.abs(outputs(model, x.numpy(), lengths.numpy()) - before).max() <= CLOSE


def test_an_operator_without_an_older_form_is_refused() -> None:
    class Strange(nn.Module):
        def forward(self, x0: Tensor) -> Tensor:
            return torch.cumsum(x0, 0)

    with pytest.raises(ArtifactError, match="older_operators does not know  CumSum at opset 17"):
        older_operators(traced(Strange(), torch.zeros(3, 4)))


@pytest.mark.parametrize("mask", [below, gaining])
def test_attention_in_older_operators(mask: Any) -> None:
    x, lengths = torch.randn(2, 5, 16), torch.tensor([5, 3], dtype=torch.int32)
    model = traced(Attend(mask), x, lengths)
    before = outputs(model, x.numpy(), lengths.numpy())
    older_operators(model)
    simplify(model)
    assert "Attention" not in kinds(model) and "Expand" not in kinds(model)
    assert np.abs(outputs(model, x.numpy(), lengths.numpy()) - before).max() <= CLOSE


def test_a_mask_of_numbers_has_no_older_form() -> None:
    model = traced(Attend(lambda lengths: below(lengths).float()), torch.zeros(2, 5, 16), torch.tensor([5, 3]))
    with pytest.raises(ArtifactError, match=r"older_operators: .* has a mask of numbers"):
        older_operators(model)


@pytest.mark.parametrize("how", ["none", "tanh"])
def test_gelu_in_older_operators(how: str) -> None:
    x = 4 * torch.randn(30, 8)
    model = traced(nn.GELU(approximate=how), x)
    before = outputs(model, x.numpy())
    older_operators(model)
    simplify(model)
    assert "Gelu" not in kinds(model)
    assert np.abs(outputs(model, x.numpy()) - before).max() <= CLOSE


def test_rms_norm_in_older_operators() -> None:
    norm = nn.RMSNorm(8, eps=1e-3)
    norm.weight.data.uniform_(0.5, 2)
    x = torch.randn(3, 5, 8)
    model = traced(norm, x)
    before = outputs(model, x.numpy())
    assert "RMSNormalization" in kinds(model)
    older_operators(model)
    simplify(model)
    assert "RMSNormalization" not in kinds(model)
    assert np.abs(outputs(model, x.numpy()) - before).max() <= CLOSE


def test_sizes_in_older_operators() -> None:
    """Read without Squeeze, counted before the cast, clamped by Min and Max."""

    class Sizes(nn.Module):
        def forward(self, x0: Tensor) -> Tensor:
            rows = x0.shape[0]
            places = torch.arange(rows, dtype=torch.int32)[:, None] * torch.ones(1, 4, dtype=torch.int32)
            most = torch.minimum(torch.maximum(places, torch.tensor(1, dtype=torch.int32)), torch.tensor(3).int())
            best = x0.flatten().topk(rows * 2).values
            return best.view(rows, -1) + most[:, :2]

    x = torch.randn(5, 4)
    model = traced(Sizes(), x)
    before = outputs(model, x.numpy())
    older_operators(model)
    simplify(model, rules=False)
    assert not {"Squeeze", "Clip"} & set(kinds(model))
    (count,) = (node for node in model.graph if node.op_type == "Range")
    assert [use.node.op_type for use in count.outputs[0].uses()] == ["Cast"]
    limit = count.inputs[1].producer()  # type: ignore[union-attr]
    assert limit is not None and limit.op_type == "Gather"
    assert all(len(node.inputs) <= 4 for node in model.graph if node.op_type == "Slice")
    assert (outputs(model, x.numpy()) == before).all()


def test_products_are_called_by_their_layers() -> None:
    """But for names that the graph has already: of an input, or of the same layer run before."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x0, self.twice = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x0: Tensor) -> Tensor:
            return self.twice(self.twice(self.x0(x0)))

    x = torch.randn(5, 3, 4)
    model = traced(Named(), x)
    before = outputs(model, x.numpy())
    fold_weights(model.graph, gemm=False)
    names = [node.outputs[0].name for node in model.graph if node.op_type == "MatMul"]
    assert "twice" in names and "x0" not in names and len(set(names)) == len(names)
    assert np.abs(outputs(model, x.numpy()) - before).max() <= CLOSE


@pytest.mark.parametrize("gemm", [False, True])
@pytest.mark.parametrize(("inputs", "out"), [(4, 4), (4, 6)])
def test_a_product_of_addmm_is_no_layer(inputs: int, out: int, gemm: bool) -> None:
    """Its weight is (in, out), and a Gemm of it has no transB; it was once transposed."""
    weight, bias = torch.randn(inputs, out), torch.randn(out)

    class Conv1D(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

        def forward(self, x0: Tensor) -> Tensor:
            return torch.addmm(self.bias, x0, self.weight)

    x = torch.randn(5, inputs)
    model = traced(Conv1D(), x)
    assert "Gemm" in kinds(model)
    fold_weights(model.graph, gemm=gemm)
    expected = torch.addmm(bias, x, weight).numpy()
    assert np.abs(outputs(model, x.numpy()) - expected).max() <= CLOSE


def test_the_scale_of_a_query_over_two_axes() -> None:
    """Its product is a Gemm, which transposes its weight itself."""

    class Flat(Attend):
        def forward(self, x0: Tensor, x1: Tensor) -> Tensor:
            q = F.linear(x0.flatten(0, 1), self.query.weight, self.query.bias).view(-1, 5, 2, 8).transpose(1, 2)
            k = x0.view(-1, 5, 2, 8).transpose(1, 2)
            return F.scaled_dot_product_attention(q, k, k, attn_mask=self.mask(x1))

    x, lengths = torch.randn(2, 5, 16), torch.tensor([5, 3], dtype=torch.int32)
    model = traced(Flat(below), x, lengths)
    before = outputs(model, x.numpy(), lengths.numpy())
    assert "Gemm" in kinds(model)
    fold_scales(model.graph)
    assert [node.attributes["scale"].as_float() for node in model.graph if node.op_type == "Attention"] == [1.0]
    assert np.abs(outputs(model, x.numpy(), lengths.numpy()) - before).max() <= CLOSE


@pytest.mark.parametrize("sizes", [[3, 3], [2, 4]])
def test_a_split_of_another_axis_is_no_instruction(sizes: list[int]) -> None:
    """Of parts of one size by their number, or by sizes."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 8)

        def forward(self, x0: Tensor) -> Tensor:
            return self.table(x0).split(sizes, 1)[1]

    model = traced(Parts(), torch.zeros(2, 6, dtype=torch.int32))
    model.graph.outputs[0].name = "memory"
    with pytest.raises(ArtifactError, match=r"native does not know Split .*: use a recipe of ort-cpu"):
        native_program(model.graph, 8)


def test_an_encoder_may_be_an_embedding_alone() -> None:
    model = traced(nn.Embedding(9, 6), torch.zeros(2, 6, dtype=torch.int32))
    model.graph.outputs[0].name = "memory"
    assert [each.op for each in Lowering(model.graph, 8, "fp32").run().code] == ["embed", "give"]


def test_a_graph_whose_outputs_are_not_known_is_refused() -> None:
    model = traced(nn.Embedding(9, 6), torch.zeros(2, 6, dtype=torch.int32))
    model.graph.outputs[0].name = "vectors"
    with pytest.raises(ArtifactError, match="native finds no outputs in the graph: use a recipe of ort-cpu"):
        Lowering(model.graph, 8, "fp32").run()


def test_a_split_into_equal_parts_is_columns() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.up = nn.Embedding(9, 8), nn.Linear(8, 12)

        def forward(self, x0: Tensor) -> Tensor:
            values, gate = self.up(self.table(x0)).chunk(2, -1)
            return values * F.gelu(gate)

    model = traced(Gate(), torch.zeros(2, 6, dtype=torch.int32))
    model.graph.outputs[0].name = "memory"
    code = Lowering(model.graph, 8, "fp32").run().code
    assert [(each.op, [(view.first, view.width) for view in each.reads.values()]) for each in code[2:]] == [
        ("activate", [(6, 6)]),
        ("multiply", [(0, 6), (0, 6)]),
        ("give", [(0, 6)]),
    ]


# The annotated norm


@pytest.mark.parametrize(("eps", "fused"), [(1e-6, True), (0.0, True), (1e-12, True), (1e-5, False), (1e-3, False)])
def test_the_annotated_norm_is_fused_where_its_eps_is_small(eps: float, fused: bool) -> None:
    torch.manual_seed(1)
    norm = AnnotatedLayerNorm(24, eps)
    norm.weight.data.uniform_(0.5, 2)
    norm.bias.data.normal_()
    x = torch.randn(4, 3, 24) * torch.tensor([1.0, 0.1, 3.0])[:, None]
    expected = norm(x).detach().numpy()
    model = traced(norm, x)
    fuse_norm(model.graph)
    simplify(model)
    assert ("LayerNormalization" in kinds(model)) == fused
    deviation = float(x.std(-1).min())
    assert np.abs(outputs(model, x.numpy()) - expected).max() <= 2e-6 + 2 * 3 * (eps / deviation if fused else 0)


def test_what_is_only_like_the_annotated_norm_stays() -> None:
    class Other(AnnotatedLayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            centred = x - x.mean(-1, keepdim=True)
            deviation = torch.linalg.vector_norm(centred, dim=-1, keepdim=True) / 5.0
            return self.weight * centred / (deviation + self.eps) + self.bias

    model = traced(Other(24, 1e-6), torch.randn(4, 3, 24))
    fuse_norm(model.graph)
    assert "LayerNormalization" not in kinds(model)


# Quantized products


class Product(nn.Module):
    """A linear layer with a name, as models have it."""

    def __init__(self, weight: Array, bias: Array | None) -> None:
        super().__init__()
        self.w = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
        self.w.weight.data = torch.from_numpy(weight)
        if bias is not None:
            self.w.bias.data = torch.from_numpy(bias)

    def forward(self, x0: Tensor) -> Tensor:
        return self.w(x0)  # type: ignore[no-any-return]


def random_product(outputs: int, inputs: int, rows: int, seed: int = 0) -> tuple[Array, Array, Array]:
    """Weight, bias and x."""
    rng = np.random.default_rng(seed)
    shapes = (outputs, inputs), (outputs,), (rows, inputs)
    weight, bias, x = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    return weight, bias, x


def product(weight: Array, bias: Array | None, rewrite: Callable[[ir.Graph], None], axes: int = 3) -> Any:
    """x (rows, in) -> (rows, out), through a product of two or three axes."""
    shape = (2, 1, weight.shape[1])[-axes:] if axes == 3 else (2, weight.shape[1])
    model = traced(Product(weight, bias), torch.zeros(shape))
    rewrite(model.graph)
    simplify(model)
    run = session(model)
    kind = (lambda x: x[:, None]) if axes == 3 else (lambda x: x)
    return lambda x: run.run(["y"], {"x0": kind(x)})[0].reshape(len(x), -1)


def by_channels(least: float, largest: float) -> Callable[[ir.Graph], None]:
    return lambda graph: quantize_channels(graph, {"w": Range(least, largest)})


@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("least", "largest"), [(-3.0, 2.5), (0.0, 4.0), (0.0, 0.0)])
def test_products_by_channel_are_exact_sums_of_integers(least: float, largest: float, biased: bool, axes: int) -> None:
    weight, bias, x = random_product(48, 64, 9)
    weight[3] = 0  # a channel without a scale
    found = product(weight, bias if biased else None, by_channels(least, largest), axes)(x)
    step = np.float32(max(largest - least, 1e-6) / 255)
    zero = np.rint(-least / step)
    rounded = np.clip(np.rint(x / step) + zero, 0, 255) - zero
    scales = np.maximum(np.abs(weight).max(1), 1e-9) / 127
    integers = np.rint(weight / scales[:, None])
    assert np.abs(integers).max() == 127
    expected = (rounded @ integers.T).astype(np.float64) * step * scales + bias * biased
    assert np.abs(found - expected).max() <= 1e-5 * max(1, np.abs(expected).max())
    if largest:
        near = np.clip(x, least, largest) @ weight.T + bias * biased
        assert np.abs(found - near).max() <= 64 * (step * 4 + scales.max() * max(-least, largest)) / 2
        assert np.abs(found - near).mean() <= 0.1


@pytest.mark.parametrize(
    "rewrite",
    [
        by_channels(-3.0, 3.0),
        lambda graph: quantize_groups(graph, 8, 32, SEEN),
        lambda graph: quantize_groups(graph, 4, 16, SEEN),
    ],
    ids=["channels", "groups of 8 bits", "groups of 4 bits"],
)
def test_a_row_of_an_integer_product_does_not_depend_on_its_neighbours(rewrite: Any) -> None:
    """Bitwise, so that an output is the same in every batch."""
    weight, bias, x = random_product(96, 64, 41)
    call = product(weight, bias, rewrite)
    together = call(x)
    for rows in (slice(0, 1), slice(40, 41), slice(3, 5), slice(7, 24), slice(0, 40)):
        assert (call(x[rows]) == together[rows]).all()
    assert (call(x[::-1].copy())[::-1] == together).all()


@pytest.mark.parametrize(("bits", "size"), [(8, 128), (8, 16), (4, 16), (4, 32), (4, 256)])
@pytest.mark.parametrize(("outputs", "inputs"), [(48, 64), (5, 40), (33, 100), (16, 512)])
def test_products_by_group_are_near(bits: int, size: int, outputs: int, inputs: int) -> None:
    weight, bias, x = random_product(outputs, inputs, 6)
    expected = x @ weight.T + bias
    found = product(weight, bias, lambda graph: quantize_groups(graph, bits, size, SEEN))(x)
    error = np.sqrt(np.mean((found - expected) ** 2)) / np.sqrt(np.mean(expected**2))
    assert error <= {8: 0.02, 4: 0.2}[bits]


def test_a_layer_that_calibration_has_not_seen_is_refused() -> None:
    weight, bias, _ = random_product(4, 16, 1)
    model = traced(Product(weight, bias), torch.zeros(2, 16))
    with pytest.raises(ArtifactError, match="calibration has seen no input of w"):
        quantize_channels(model.graph, {"v": Range(0.0, 1.0)})


@pytest.mark.parametrize("axes", [2, 3])
def test_channels_that_are_shrunk_leave_the_sums_as_they_are(axes: int) -> None:
    """Up to what rounding does, of which a large channel's range leaves much, and a shrunk one's little."""
    weight, bias, x = random_product(48, 64, 40)
    x[:, 5] *= 100
    weight[:, 5] *= 0.01
    shrink = np.ones(64, np.float32)
    shrink[5] = 0.01
    least, largest = float(x.min()), float(x.max())
    exact, errors = x @ weight.T + bias, []
    for found in (Range(least, largest), Range(least, largest, np.ones_like(shrink), "w"), Range(-4, 4, shrink, "w")):
        run = product(weight, bias, lambda graph, found=found: quantize_channels(graph, {"w": found}), axes)
        errors.append(float(np.abs(run(x) - exact).mean()))
    assert errors[0] == errors[1] > 5 * errors[2]


def test_layers_that_stay_fp32_are_left_alone() -> None:
    weight, bias, x = random_product(48, 64, 9)
    exact = product(weight, bias, lambda graph: None)(x)
    for rewrite in (
        lambda graph: quantize_channels(graph, {"w": None}),
        lambda graph: quantize_groups(graph, 8, 32, {"w": None}),
    ):
        assert (product(weight, bias, rewrite)(x) == exact).all()


@pytest.mark.parametrize("scaled", [True, False])
def test_tables_by_row_are_within_half_a_step(scaled: bool) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20, 12)

        def forward(self, x0: Tensor) -> Tensor:
            return self.table(x0) * (3.5 if scaled else 1.0)

    module = Table()
    model = traced(module, torch.zeros(2, 3, dtype=torch.int32))
    model.graph.inputs[0].name = "tokens"
    quantize_tables(model.graph, {TABLES: None})
    assert kinds(model).count("Gather") == 1, "those that stay fp32 are left alone"
    quantize_tables(model.graph, {})
    model.graph.inputs[0].name = "x0"
    simplify(model)
    assert kinds(model).count("Mul") == 1, "a factor becomes the scales'"
    ids = np.arange(20, dtype=np.int32).reshape(4, 5)[:, :3].copy()
    expected = module.table.weight.detach().numpy()[ids] * (3.5 if scaled else 1.0)
    steps = np.abs(expected).max(-1, keepdims=True) / 127
    assert (np.abs(outputs(model, ids) - expected) <= 0.501 * steps).all()
