"""A model that is built otherwise than ours goes the whole way: traced, quantized, checked, built into plans.

Attention and feed-forward side by side, rotary positions, no biases, a gate: only the protocol is the same.
"""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tformer_deploy.base.errors import ArtifactError, ParityError
from tformer_deploy.bundle.manifest import open_bundle
from tformer_deploy.bundle.plans import Profile
from tformer_deploy.bundle.recipe import load_recipe
from tformer_deploy.decoding import DecodeOptions, decode
from tformer_deploy.engines import make_engine
from tformer_deploy.engines.eager import EagerEngine
from tformer_deploy.export.build import build
from tformer_deploy.export.checked import export_checked
from tformer_deploy.export.to_onnx import build_graph
from tformer_deploy.export.trace import Tracer
from tformer_deploy.export.trt_builder import BuildOptions
from tformer_deploy.model.checkpoint import Checkpoint
from tformer_deploy.model.config import ModelConfig
from tformer_deploy.model.seq2seq import Cache, KeysValues, Layers, keep, length_mask
from tformer_deploy.translate.translator import make_batch

from .conftest import random_sources, small_config, write_checkpoint

pytestmark = pytest.mark.long

RECIPES = ("fp32", "fp32-cpu", "int8", "int8-latency", "int4", "trt")


class Block(nn.Module):
    """x + attention(norm(x)) + feed-forward(norm(x)), and in a decoder cross-attention beside them."""

    def __init__(self, config: ModelConfig, cross: bool) -> None:
        super().__init__()
        d, self.heads = config.d_model, config.heads
        self.norm = nn.RMSNorm(d, eps=1e-5)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(d, config.d_ff, bias=False), nn.Linear(d, config.d_ff, bias=False)
        self.down = nn.Linear(config.d_ff, d, bias=False)
        if cross:
            self.cross_q, self.cross_k, self.cross_v, self.cross_o = (nn.Linear(d, d, bias=False) for _ in range(4))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def feed_forward(self, y: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]

    def look(self, y: Tensor, cross: KeysValues, mask: Tensor, seen: Layers | None) -> Tensor:
        q = self.split(self.cross_q(y))
        if seen is not None:
            scores = q @ cross[0].transpose(2, 3) / q.shape[3] ** 0.5
            seen["attention"] = scores.masked_fill(~mask, -torch.inf).softmax(-1).mean(1)
        return self.cross_o(F.scaled_dot_product_attention(q, *cross, attn_mask=mask).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Parallel(nn.Module):
    """The whole model; `Seq2Seq` is all that it has to do with ours."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, d = config, config.d_model
        self.embedding = nn.Embedding(config.src_vocab, d)
        self.encoder = nn.ModuleList(Block(config, cross=False) for _ in range(config.encoder_layers))
        self.decoder = nn.ModuleList(Block(config, cross=True) for _ in range(config.decoder_layers))
        self.encoder_norm, self.decoder_norm = nn.RMSNorm(d, eps=1e-5), nn.RMSNorm(d, eps=1e-5)
        self.output = nn.Linear(d, config.tgt_vocab, bias=config.output_bias)
        half = d // config.heads // 2
        angles = torch.arange(config.max_positions)[:, None] * 0.3 ** torch.arange(half)
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x (B, H, T, D) by angles (T, D), or (B or 1, 1, 1, D). Source: Su et al. 2021."""
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    def encode(self, src_ids: Tensor, src_lengths: Tensor, layers: Layers | None = None) -> Tensor:
        count = src_ids.shape[1]
        mask = length_mask(src_lengths, count, count)
        x = keep(layers, "encoder_embedding", self.embedding(src_ids))
        for i, block in enumerate(self.encoder):
            y = block.norm(x)  # type: ignore[operator]
            q, k = (self.rotate(block.split(f(y)), self.cos[:count], self.sin[:count]) for f in (block.q, block.k))  # type: ignore[operator,index]
            mixed = F.scaled_dot_product_attention(q, k, block.split(block.v(y)), attn_mask=mask)  # type: ignore[operator]
            x = x + block.o(mixed.transpose(1, 2).flatten(2)) + block.feed_forward(y)  # type: ignore[operator]
            keep(layers, f"encoder_layer_{i}", x)
        return keep(layers, "memory", self.encoder_norm(x))

    def cross_keys_values(self, memory: Tensor) -> list[KeysValues]:
        return [(b.split(b.cross_k(memory)), b.split(b.cross_v(memory))) for b in self.decoder]  # type: ignore[operator]

    def step(
        self,
        tokens: Tensor,
        position: Tensor,
        src_lengths: Tensor,
        cross: list[KeysValues],
        cache: Cache,
        layers: Layers | None = None,
    ) -> Tensor:
        mask = length_mask(src_lengths, cross[0][0].shape[2], tokens.shape[1])
        cos, sin = (F.embedding(position, table).flatten(0, -2)[:, None, None] for table in (self.cos, self.sin))  # type: ignore[operator]
        x = keep(layers, "decoder_embedding", self.embedding(tokens))
        for i, (block, theirs) in enumerate(zip(self.decoder, cross, strict=True)):
            y = block.norm(x)  # type: ignore[operator]
            rows = y.reshape(-1, 1, y.shape[2])
            q, k = (self.rotate(block.split(f(rows)), cos, sin) for f in (block.q, block.k))  # type: ignore[operator]
            keys_values, earlier = cache.extend(i, k, block.split(block.v(rows)))  # type: ignore[operator]
            mixed = F.scaled_dot_product_attention(q, *keys_values, attn_mask=earlier)
            own = block.o(mixed.transpose(1, 2).flatten(2)).view_as(x)  # type: ignore[operator]
            seen = layers if i == len(self.decoder) - 1 else None
            x = x + own + block.look(y, theirs, mask, seen) + block.feed_forward(y)  # type: ignore[operator]
            keep(layers, f"decoder_layer_{i}", x)
        return keep(layers, "hidden", self.decoder_norm(x))


def make_parallel(config: ModelConfig) -> Parallel:
    torch.manual_seed(3)
    model = Parallel(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, 0, 0.5 if "embedding" in name else parameter.shape[1] ** -0.5)
    return model.eval()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exported, quantized and checked by the command's own road: only the checkpoint's module is another."""
    folder = tmp_path_factory.mktemp("parallel")
    run = write_checkpoint(folder / "run", small_config())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "load_model", lambda self: make_parallel(self.config))
        report = export_checked(run, folder / "bundle", RECIPES)
        assert report.passed and len(report.engines) == len(RECIPES), str(report)
        assert all(each.constants and not each.constants.wrong for each in report.engines)
    return folder / "bundle"


@pytest.mark.parametrize("recipe", ["fp32", "fp32-cpu", "trt"])
def test_another_model_gives_eagers_tokens(bundle: Path, recipe: str) -> None:
    opened = open_bundle(bundle)
    src_ids, lengths = random_sources(6, 11)
    batch = make_batch([row[:n].tolist() for row, n in zip(src_ids, lengths, strict=True)], opened.config.pad_id)
    name = "ort" if recipe == "fp32" else f"ort:{recipe}"
    with make_engine(name, opened, threads=1) as engine, EagerEngine(make_parallel(opened.config)) as eager:
        for options in ({}, {"beams": 3, "n_best": 3}, {"sampling": True, "n_best": 2, "seed": 3}):
            chosen = DecodeOptions(max_tokens=12, **options)  # type: ignore[arg-type]
            ours, theirs = (decode(side, batch, chosen) for side in (eager, engine))
            expected, made = ([[each.ids for each in found] for found in side] for side in (ours, theirs))
            assert made == expected


def test_another_model_is_fused_and_quantized(bundle: Path) -> None:
    """As ours: none of its matrix products is left in fp32, and none of its attention is written out."""
    for variant, expected in (("int8", "MatMulIntegerToFloat"), ("int4", "MatMulNBits")):
        kinds = [
            node.op_type
            for node in onnx.load(bundle / variant / "decoder_step.onnx", load_external_data=False).graph.node
        ]
        assert kinds.count("MultiHeadAttention") == 4 and expected in kinds
        assert not {"Attention", "MatMul", "Gemm"} & set(kinds)


def test_another_model_is_built_into_plans(bundle: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("".join(f"w{5 + n} w{9 + n} w{20 + n}\n" for n in range(20)))
    report = build(bundle, BuildOptions("fp16"), [Profile(2, 2, 12, 16)], text)
    assert sorted(plan.graph for plan in report.plans) == ["decoder_step", "encoder"]
    assert all(plan.layers["matrix_multiply"].get("half", 0) > 0 for plan in report.plans)


def test_another_model_that_is_wrong_fails_its_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference of the check is the module itself."""
    run = write_checkpoint(tmp_path / "run", small_config())
    made: list[Parallel] = []

    def load(self: Checkpoint) -> Parallel:
        made.append(make_parallel(self.config))
        if len(made) > 1:  # what the check compares with
            made[-1].decoder[1].down.weight.data *= 1.01  # type: ignore[union-attr,operator]
        return made[-1]

    monkeypatch.setattr(Checkpoint, "load_model", load)
    with pytest.raises(ParityError, match="scores"):
        export_checked(run, tmp_path / "bundle", ["fp32"])
    assert len(made) > 1


def test_what_no_pass_knows_is_refused_by_name() -> None:
    class Capped(Parallel):
        def cross_keys_values(self, memory: Tensor) -> list[KeysValues]:
            return [(k.cumsum(2), v) for k, v in super().cross_keys_values(memory)]

    model = Capped(small_config()).eval()
    with pytest.raises(ArtifactError, match="older_operators does not know  CumSum at opset 17"):
        build_graph("encoder", Tracer(model), load_recipe("trt").for_model(model.config), {})
