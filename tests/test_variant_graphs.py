"""Graphs of variants: eager's numbers for every kind of model, best tokens in order, products in 8 and 4 bits."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tformer_deploy.bundle.contract import GRAPHS, SLOTS_GRAPH, kind_of, layer_names, signature
from tformer_deploy.bundle.recipe import Axes, Axis, Recipe, load_recipe
from tformer_deploy.decoding import DecodeOptions, decode
from tformer_deploy.engines.base import Scores
from tformer_deploy.engines.eager import EagerEngine
from tformer_deploy.engines.ort.library import InferenceSession, SessionOptions
from tformer_deploy.export import calibrate
from tformer_deploy.export.calibrate import fp32_layers, input_ranges
from tformer_deploy.export.graphs import best_in_blocks, block_width
from tformer_deploy.export.passes.rewriting import MICROSOFT
from tformer_deploy.export.passes.simplify import simplify
from tformer_deploy.export.quantizing import Range, groups
from tformer_deploy.export.signature import read_signature
from tformer_deploy.export.to_onnx import build_graph
from tformer_deploy.export.trace import Tracer
from tformer_deploy.model.network import Transformer
from tformer_deploy.translate.translator import make_batch

from .configs import CONFIGS
from .conftest import random_model, random_sources, small_config, variant_engine
from .params import long_but

Array = NDArray[Any]
TOLERANCE = 1e-5


@pytest.mark.parametrize("recipe", ["fp32-cpu", "trt"])
@pytest.mark.parametrize("changes", long_but(CONFIGS, "pre-norm", "annotated, nothing shared"))
def test_lowered_graphs_give_eagers_numbers_and_tokens(changes: dict[str, object], recipe: str, tmp_path: Path) -> None:
    """At every step of greedy search, of four beams and of samples."""
    model = random_model(small_config(**changes))
    src_ids, lengths = random_sources(5, 9)
    src_ids %= 44  # in every vocabulary
    with variant_engine(model, tmp_path, recipe) as engine, EagerEngine(model) as eager:
        assert_same_numbers(engine, eager, src_ids, lengths)
        batch = make_batch([row[:n].tolist() for row, n in zip(src_ids, lengths, strict=True)], model.config.pad_id)
        for options in ({}, {"beams": 4, "n_best": 4}, {"sampling": True, "n_best": 2, "seed": 3, "top_p": 0.95}):
            chosen = DecodeOptions(max_tokens=12, **options)  # type: ignore[arg-type]
            ours, theirs = (decode(side, batch, chosen) for side in (eager, engine))
            assert [[h.ids for h in found] for found in ours] == [[h.ids for h in found] for found in theirs]
            pairs = [(a.score, b.score) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)]
            assert max(abs(a - b) for a, b in pairs) <= 12 * TOLERANCE


def test_masks_hold_where_attention_has_scores_of_millions(tmp_path: Path) -> None:
    """As in a trained model of somebody else: what a runtime adds to masked scores by default is too little there."""
    model = random_model(small_config())
    with torch.no_grad():
        for layer in (*model.encoder, *model.decoder):
            layer.attention.query.weight *= 1e6
    src_ids, lengths = random_sources(5, 9)
    with variant_engine(model, tmp_path) as engine, EagerEngine(model) as eager:
        states = [side.encode(src_ids, lengths) for side in (eager, engine)]
        found = [np.stack(side.cross_keys_values(s)) for side, s in zip((eager, engine), states, strict=True)]
    real = np.arange(src_ids.shape[1]) < lengths[:, None]
    assert np.abs(found[0] - found[1]).transpose(1, 3, 0, 2, 4)[real].max() <= 1e-3


def assert_same_numbers(engine: Any, eager: EagerEngine, src_ids: Array, lengths: Array) -> None:
    """Encoder outputs at real positions; all log-probabilities of one beam, then of three."""
    states = [side.encode(src_ids, lengths) for side in (eager, engine)]
    real = np.arange(src_ids.shape[1]) < lengths[:, None]
    for ours, theirs in zip(
        *(s.cross_keys_values(x) for s, x in zip((eager, engine), states, strict=True)), strict=True
    ):
        assert np.abs(ours - theirs).transpose(0, 2, 1, 3)[real].max() <= TOLERANCE
    rng, beams = np.random.default_rng(1), 1
    for position in range(8):
        if position == 2:
            for side, state in zip((eager, engine), states, strict=True):
                side.reorder(state, np.repeat(np.arange(len(src_ids), dtype=np.int32)[:, None], 3, 1))
            beams = 3
        tokens = rng.integers(0, 44, (len(src_ids), beams)).astype(np.int32)
        a, b = (side.step(tokens, state, full=True) for side, state in zip((eager, engine), states, strict=True))
        assert a.log_probs is not None and b.log_probs is not None
        assert np.abs(a.log_probs - b.log_probs).max() <= TOLERANCE
        assert_best(b)


def assert_best(found: Scores) -> None:
    """The ids and scores are what a full sort of the log-probabilities gives."""
    assert found.log_probs is not None
    order = np.argsort(-found.log_probs, axis=-1, kind="stable")[..., : found.ids.shape[-1]]
    assert (found.ids == order).all()
    assert (found.scores == np.take_along_axis(found.log_probs, order, -1)).all()


@pytest.mark.parametrize("recipe", ["fp32-cpu", "int8", "int8-latency", "int4"])
def test_graphs_of_variants_keep_the_contract(recipe: str, variants_bundle: Path) -> None:
    manifest = json.loads((variants_bundle / "manifest.json").read_text())
    config = small_config()
    for name in (*GRAPHS, SLOTS_GRAPH):
        model = onnx.load(variants_bundle / recipe / f"{name}.onnx")
        assert model.ir_version == 10
        assert {(o.domain, o.version) for o in model.opset_import} <= {("", 23), (MICROSOFT, 1)}
        found = read_signature(model)
        assert found == signature(name, config, load_recipe(recipe).for_model(config))
        stored = manifest["variants"][recipe]["graphs"][name]
        passes = list(load_recipe(recipe).passes(name))
        assert stored == {"kind": kind_of(name, load_recipe(recipe)), **found.to_json(), "passes": passes}
        made = [output for node in model.graph.node for output in node.output]
        if name in GRAPHS:
            assert [each for each in made if each in layer_names(name, config)] == list(layer_names(name, config))
        assert len(made) == len(set(made))


# Best tokens


class Best(torch.nn.Module):
    """What finds the best of log_probs, alone."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe

    def forward(self, tokens: torch.Tensor, log_probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        most = self.recipe.top_k or 2 * self.recipe.axes.beams.max
        return best_in_blocks(log_probs, self.recipe.top_k or 2 * tokens.shape[1], most)


def best_graph(vocab: int, beams: int, top_k: int = 0) -> tuple[InferenceSession, list[str]]:
    """As a session, and the kinds of its nodes."""
    recipe = dataclasses.replace(load_recipe("fp32-cpu"), top_k=top_k, axes=Axes(beams=Axis(1, 1, beams)))
    rows = torch.export.Dim.DYNAMIC
    program = torch.onnx.export(
        Best(recipe),
        (torch.zeros(2, min(2, beams), dtype=torch.int32), torch.zeros(2 * min(2, beams) + 3, vocab)),
        dynamo=True,
        opset_version=recipe.opset,
        input_names=["tokens", "log_probs"],
        output_names=["top_scores", "best"],
        dynamic_shapes=({0: rows, 1: rows}, {0: rows}),
        optimize=False,
        verbose=False,
    )
    assert program is not None
    simplify(program.model)
    model = ir.to_proto(program.model)
    options = SessionOptions()
    options.intra_op_num_threads = 1
    found = InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return found, [node.op_type for node in model.graph.node]


@pytest.mark.parametrize(
    ("vocab", "beams", "top_k", "in_blocks"),
    [
        (5, 2, 0, False),
        (60, 5, 0, False),
        (1009, 2, 0, False),
        (1024, 4, 0, True),
        (1024, 40, 0, False),
        (1100, 5, 0, True),
        (1100, 64, 3, True),
        (1100, 64, 11, True),
        (1100, 64, 60, False),
        (4096, 16, 0, True),
        (4096, 1, 0, True),
    ],
)
def test_best_tokens_equal_a_stable_sort(vocab: int, beams: int, top_k: int, in_blocks: bool) -> None:
    """With many equal scores, as rounded ones have, within a block and across."""
    found, kinds = best_graph(vocab, beams, top_k)
    assert ("ReduceMax" in kinds) == in_blocks
    rng = np.random.default_rng(vocab)
    for levels in (1, 2, 5, 50, 10**6):
        for width in {1, beams // 2 + 1, beams}:
            log_probs = -rng.integers(0, levels, (2 * width, vocab)).astype(np.float32)
            feed = {"tokens": np.zeros((2, width), np.int32), "log_probs": log_probs}
            scores, ids = found.run(["top_scores", "best"], feed)
            order = np.argsort(-log_probs, axis=-1, kind="stable")[:, : top_k or 2 * width]
            assert (ids == order).all() and (scores == np.take_along_axis(log_probs, order, -1)).all()


@pytest.mark.long
def test_equal_output_rows_give_the_lower_id(tmp_path: Path) -> None:
    """With every token there four times, in other blocks too."""
    model = random_model(small_config(share_embeddings="none", tgt_vocab=2048, encoder_layers=1, decoder_layers=1))
    model.output.weight.data = model.output.weight.data[:512].repeat(4, 1)
    recipe = dataclasses.replace(load_recipe("fp32-cpu"), axes=Axes(beams=Axis(1, 1, 6)))
    src_ids, lengths = random_sources(3, 5)
    with variant_engine(model, tmp_path, recipe) as engine:
        state = engine.encode(src_ids, lengths)
        for beams in (1, 3, 6, 2):
            width = len(state.tokens[0])
            engine.reorder(state, np.repeat(np.arange(3, dtype=np.int32)[:, None] * width, beams, 1))
            found = engine.step(np.full((3, beams), 7, np.int32), state, full=True)
            assert found.log_probs is not None
            assert (found.log_probs[..., :512] == found.log_probs[..., -512:]).all()
            assert_best(found)
            assert (found.ids[..., 1] == found.ids[..., 0] + 512).all()


@given(st.integers(1, 70_000))
def test_block_widths_divide_the_vocabulary(vocab: int) -> None:
    width = block_width(vocab)
    divisors = [n for n in range(16, 1025) if vocab % n == 0]
    assert width in divisors if divisors else width == 0


# Integers


@settings(max_examples=60)
@given(
    st.integers(1, 5),
    st.integers(1, 70),
    st.sampled_from([4, 8]),
    st.sampled_from([16, 32, 64]),
    st.floats(1e-30, 1e6),
    st.integers(0, 10**6),
)
def test_blocks_dequantise_within_half_a_step(
    outputs: int, inputs: int, bits: int, block: int, size: float, seed: int
) -> None:
    weight = (size * np.random.default_rng(seed).normal(size=(outputs, inputs))).astype(np.float32)
    integers, scales = groups(weight, bits, block)
    middle, count = 1 << (bits - 1), -(-inputs // block)
    assert integers.shape == (outputs, count, block) and integers.dtype == np.uint8
    assert scales.shape == (outputs, count) and scales.dtype == np.float32
    assert integers.max() < 2 * middle and np.isfinite(scales).all() and scales.all()
    steps = np.abs(scales.astype(np.float64))[:, :, None]
    values = (integers.astype(np.float64) - middle) * scales[:, :, None]
    padded = np.zeros((outputs, count * block))
    padded[:, :inputs] = weight
    apart = np.abs(values - padded.reshape(values.shape)) / steps
    # The largest integer is one short of the opposite of the element furthest from zero.
    top = integers == 2 * middle - 1
    assert apart[~top].max(initial=0) <= 0.5001 and apart[top].max(initial=0) <= 1.0001
    assert (integers.reshape(outputs, -1)[:, inputs:] == middle).all(), "padding stays zero"
    furthest = np.abs(padded.reshape(values.shape)).argmax(2)[:, :, None]
    assert np.take_along_axis(apart, furthest, 2).max() <= 1e-5, "which is exact"


def test_blocks_of_zeros_stay_zeros() -> None:
    integers, scales = groups(np.zeros((2, 32), np.float32), 4, 16)
    assert (integers == 8).all() and (scales == 1).all()


# Ranges, and whole models in 8 and 4 bits


def test_ranges_cover_what_goes_into_a_product() -> None:
    model = random_model(small_config()).eval()
    sources = [[7, 8, 9, 3], [5, 3], [50, 51, 52, 53, 54, 3]]
    found = input_ranges(model, sources)
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert found.keys() == linear and all(each and each.least <= 0 <= each.largest for each in found.values())
    assert not model.training and not [m for m in model.modules() if m._forward_pre_hooks], "nothing watches afterwards"
    for name in ("encoder.0.ff.down", "encoder.1.ff.down", "decoder.0.ff.down"):
        assert found[name][0] == 0 < found[name][1], "no negative number leaves relu"
    for source in sources:  # by hand, as far as the first norm
        x = model.src_embedding.weight[source] * np.sqrt(32) + model.src_positions[: len(source)]
        y = model.encoder[0].attention_residual.norm(x).detach()
        for part in ("query", "key", "value"):
            least, largest = found[f"encoder.0.attention.{part}"][:2]
            assert least <= float(y.min()) and float(y.max()) <= largest
    x = model.src_embedding.weight[sources[1]] * np.sqrt(32) + model.src_positions[:2]
    y = model.encoder[0].attention_residual.norm(x).detach()
    every = model.src_embedding.weight * np.sqrt(32) + model.src_positions[:1]  # each entry is fed once as well
    entries = model.encoder[0].attention_residual.norm(every).detach()
    for text, seen in ((sources[1:2], torch.cat((y, entries))), ([], entries)):
        alone = input_ranges(model, text)["encoder.0.attention.query"]
        assert alone and alone[:2] == pytest.approx((float(seen.min()), float(seen.max())), abs=1e-6)


@pytest.mark.parametrize("recipe", ["int8", "int8-latency", "int4"])
@pytest.mark.parametrize(
    "changes",
    long_but(
        {
            "relu": {},
            "gelu": {"activation": "gelu", "norm_position": "post", "output_bias": True, "share_embeddings": "none"},
            "silu": {"d_model": 24, "heads": 3, "d_ff": 40, "activation": "silu"},
        },
        "relu",
    ),
)
def test_models_in_few_bits_stay_within_their_tolerance(
    recipe: str, changes: dict[str, object], tmp_path: Path
) -> None:
    model = random_model(small_config(**changes))
    limits = load_recipe(recipe).tolerance
    src_ids, lengths = random_sources(6, 12)
    tgt_ids = np.random.default_rng(1).integers(4, 60, (6, 10)).astype(np.int32)
    with variant_engine(model, tmp_path, recipe) as engine, EagerEngine(model) as eager:
        ours, theirs = (side.layers(src_ids, lengths, tgt_ids) for side in (eager, engine))
        real = np.arange(12) < lengths[:, None]
        for name in [name for name in ours if name.startswith("cross_")]:
            assert np.abs(ours[name] - theirs[name]).transpose(0, 2, 1, 3)[real].max() <= limits.encoder
        apart = np.abs(ours["log_probs"] - theirs["log_probs"])
        assert 1e-4 < apart.max() <= limits.scores and apart.mean() <= limits.scores / 8


def with_large_channels(model: Transformer, factor: float) -> Transformer:
    """The same function, but that one channel behind every norm is larger, and its weights smaller."""
    with torch.no_grad():
        for layer in (*model.encoder, *model.decoder):
            own, cross = layer.attention, getattr(layer, "cross", None)
            read: list[tuple[Any, list[Any]]] = [(layer.attention_residual.norm, [own.query, own.key, own.value])]
            read += [(layer.ff_residual.norm, [layer.ff.up])]
            read += [(layer.cross_residual.norm, [cross.query])] if cross else []
            for norm, linears in read:
                norm.weight[3] *= factor
                norm.bias[3] *= factor
                for linear in linears:
                    linear.weight[:, 3] /= factor
    return model


def test_large_channels_are_shrunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that, they leave the others of their inputs a few of the 256 integers."""
    model, recipe = with_large_channels(random_model(small_config()).eval(), 400), load_recipe("int8")
    src_ids, lengths = random_sources(6, 12)
    sources = [row[:length].tolist() for row, length in zip(src_ids, lengths, strict=True)]
    tgt_ids = np.random.default_rng(1).integers(4, 60, (6, 10)).astype(np.int32)
    found = {}
    for shares in (calibrate.SHARES, [1.0]):
        monkeypatch.setattr(calibrate, "SHARES", shares)
        kept = fp32_layers(model, recipe, input_ranges(model, sources), sources)
        with variant_engine(model, tmp_path / str(len(shares)), recipe) as engine, EagerEngine(model) as eager:
            ours, theirs = (side.layers(src_ids, lengths, tgt_ids)["log_probs"] for side in (eager, engine))
        found[len(shares)] = kept, float(np.abs(ours - theirs).max())
    (kept, apart), (harmed, lost) = found.values()
    assert not kept and apart <= recipe.tolerance.scores
    assert {"encoder.0.ff.up", "decoder.0.ff.up"} <= set(harmed) and lost > recipe.tolerance.scores, found


def test_relu_is_left_to_rounding_where_ranges_allow_it() -> None:
    model = random_model(small_config()).eval()
    tracer, ranges = Tracer(model), input_ranges(model, [[7, 8, 9, 3]])
    for recipe, encoder, step in (("fp32-cpu", 2, 2), ("int8", 0, 0), ("int8-latency", 0, 2)):
        chosen = load_recipe(recipe).for_model(model.config)
        graphs = [build_graph(name, tracer, chosen, ranges).graph for name in GRAPHS]
        assert [sum(node.op_type == "Relu" for node in graph.node) for graph in graphs] == [encoder, step]
    wider = {**ranges, "encoder.0.ff.down": Range(-0.1, 5.0)}
    graph = build_graph("encoder", tracer, load_recipe("int8").for_model(model.config), wider).graph
    assert sum(node.op_type == "Relu" for node in graph.node) == 1
