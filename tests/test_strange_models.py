"""Modules that are unlike ours in one thing each: exported and equal, or refused in one line by what they have."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tformer_deploy.base.errors import ConfigError, TformerError
from tformer_deploy.bundle.recipe import load_recipe
from tformer_deploy.export.calibrate import input_ranges
from tformer_deploy.export.checked import export_checked
from tformer_deploy.export.graphs import scores_by_product
from tformer_deploy.export.to_onnx import build_graph, build_program, export_graphs
from tformer_deploy.export.trace import Tracer
from tformer_deploy.model.checkpoint import Checkpoint
from tformer_deploy.model.modules.probe import require_positions, wrapped
from tformer_deploy.model.modules.user_model import UserModel
from tformer_deploy.model.network import Attention, Transformer
from tformer_deploy.model.seq2seq import KeysValues

from .conftest import random_model, small_config, write_checkpoint


def ours(**changes: object) -> Transformer:
    return random_model(small_config(**{"encoder_layers": 1, "decoder_layers": 1, **changes})).eval()


def spoiled(name: str, change: Callable[[Tensor], object], **changes: object) -> Transformer:
    """Ours, one of whose parameters is changed."""
    model = ours(share_embeddings="none", **changes)
    with torch.no_grad():
        change(model.get_parameter(name))
    return model


class Keys(Transformer):
    """Ours, whose keys of the source are changed once more."""

    def __init__(self, change: Callable[[Keys, Tensor, Tensor], Tensor], **parameters: Tensor) -> None:
        super().__init__(small_config(encoder_layers=1, decoder_layers=1))
        self.init_weights(1)
        self.change, self.part = change, nn.Module()
        for name, value in parameters.items():
            holder = self.part if name.startswith("in_part_") else self
            holder.register_parameter(name.removeprefix("in_part_"), nn.Parameter(value))
        self.eval()

    def cross_keys_values(self, memory: Tensor) -> list[KeysValues]:
        return [(self.change(self, k, memory), v) for k, v in super().cross_keys_values(memory)]


class Training(Transformer):
    """Ours, with a mask and a head that only its training reads."""

    def __init__(self) -> None:
        super().__init__(small_config(encoder_layers=1, decoder_layers=1))
        self.register_buffer("causal", torch.full((24, 24), -math.inf).triu(1), persistent=False)
        self.language = nn.Linear(32, 7)
        self.init_weights(1)
        self.eval()


def random(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.5


def of_equal_numbers(model: Keys, k: Tensor, memory: Tensor) -> Tensor:
    """A row and a column of the same numbers."""
    numbers = torch.tensor([1.0, 2.0])
    row, column = (numbers.view(shape)[..., None] for shape in ((1, 2), (2, 1)))
    return (k.unflatten(3, (2, 2, -1)) * row + k.unflatten(3, (2, 2, -1)) * column).flatten(3)


def used_twice() -> Transformer:
    model = ours(encoder_layers=2)
    model.encoder[1] = model.encoder[0]
    return model


def twice_activated() -> Transformer:
    model = ours()
    for layer in (*model.encoder, *model.decoder):
        layer.ff.activation = nn.Sequential(nn.ReLU(), nn.GELU())  # type: ignore[union-attr,assignment]
    return model


class Gated(Attention):
    """What the queries are made of gates the result too."""

    def forward(self, x: Tensor, kv: KeysValues, mask: Tensor | None, causal: bool = False) -> Tensor:
        rows = self.query(x).view(x.shape[0], x.shape[1], self.heads, self.head_dim)
        mixed = self.attend(rows.transpose(1, 2), kv, mask, causal).transpose(1, 2)
        return self.out((mixed * torch.sigmoid(rows)).flatten(2))  # type: ignore[no-any-return]


def gated() -> Transformer:
    model = ours()
    side = model.config.encoder
    model.encoder[0].attention = Gated(model.config, side, side.width)
    return model.eval()


def shared_keys() -> Transformer:
    """Both layers of the decoder attend to the same keys and values."""
    model = ours(decoder_layers=2)
    model.decoder[1].cross = model.decoder[0].cross
    return model


class Chunked(nn.Module):
    """A feed-forward layer whose gate is the other half of one product."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 96), nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        values, gate = self.up(x).chunk(2, -1)
        return self.down(values * F.gelu(gate))  # type: ignore[no-any-return]


def chunked() -> Transformer:
    model = ours()
    for layer in (*model.encoder, *model.decoder):
        layer.ff = Chunked()
    return model.eval()


class Warm(Transformer):
    """A step that changes the source's keys, and not its values."""

    def step(self, *given: Any, **named: Any) -> Tensor:
        tokens, position, src_lengths, cross, *rest = given
        warm = [(k * torch.tensor([0.5, 1.0, 1.5, 2.0])[:, None, None], v) for k, v in cross]
        return super().step(tokens, position, src_lengths, warm, *rest, **named)


EQUAL: dict[str, tuple[Callable[[], Transformer], list[str]]] = {
    "a row of tiny numbers": (lambda: spoiled("tgt_embedding.weight", lambda w: w[40].mul_(1e-12)), ["int8"]),
    "a neuron of tinier numbers": (lambda: spoiled("encoder.0.ff.up.weight", lambda w: w[3].mul_(1e-20)), ["int8"]),
    "a group of the tiniest": (lambda: spoiled("decoder.0.ff.up.weight", lambda w: w[3].fill_(2e-45)), ["int4"]),
    "a bias that forbids": (
        lambda: spoiled("output.bias", lambda b: b[1].fill_(-math.inf), output_bias=True),
        ["fp32", "int8"],
    ),
    "a number": (lambda: Keys(lambda m, k, _: k * m.number, number=random()), ["fp32"]),
    "a few numbers": (lambda: Keys(lambda m, k, _: k * m.few, few=random(8)), ["fp32"]),
    "a row and a column": (lambda: Keys(of_equal_numbers), ["fp32"]),
    "a matrix a head": (lambda: Keys(lambda m, k, _: k @ m.part.w, in_part_w=random(4, 8, 8)), ["fp32"]),
    "the same turned": (
        lambda: Keys(lambda m, k, _: k @ m.part.w.transpose(1, 2), in_part_w=random(4, 8, 8)),
        ["fp32"],
    ),
    "a vector": (
        lambda: Keys(lambda m, k, memory: k * (memory @ m.part.v)[:, None, :, None], in_part_v=random(32)),
        ["fp32"],
    ),
    "a layer used twice": (used_twice, ["int8"]),
    "two activations": (twice_activated, ["native-fp32"]),
    "queries that gate": (gated, ["trt"]),
    "shared keys": (shared_keys, ["int8", "trt", "native-fp32"]),
    "a gate by chunk": (chunked, ["native-fp32"]),
    "a norm of each head": (lambda: attending(Normed, ours()), ["int8", "trt", "native-fp32", "native-int8"]),
    "keys changed in the step": (lambda: Warm(small_config()).init_weights(1).eval(), ["fp32-cpu"]),
}


@pytest.mark.long
@pytest.mark.parametrize("name", EQUAL)
def test_a_strange_model_is_equal(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, recipes = EQUAL[name]
    model = make()
    run = write_checkpoint(tmp_path / "run", model.config)
    monkeypatch.setattr(Checkpoint, "load_model", lambda _: model)
    assert export_checked(run, tmp_path / "bundle", recipes).passed


class Grouped(Attention):
    """Twice as many heads of queries as of keys."""

    def __init__(self, model: Transformer) -> None:
        side = model.config.encoder
        super().__init__(model.config, side, side.width)
        self.query, self.out = nn.Linear(side.width, 2 * side.width), nn.Linear(2 * side.width, side.width)

    def forward(self, x: Tensor, kv: KeysValues, mask: Tensor | None, causal: bool = False) -> Tensor:
        q = self.query(x).unflatten(2, (2 * self.heads, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, *kv, attn_mask=mask, is_causal=causal, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def grouped() -> Transformer:
    model = ours()
    model.encoder[0].attention = Grouped(model)
    return model.eval()


class Normed(Attention):
    """A norm of each head, or of all that have two axes."""

    def __init__(self, model: Transformer, axes: int = 1) -> None:
        side = model.config.encoder
        super().__init__(model.config, side, side.width)
        self.norm = nn.LayerNorm([side.heads, side.head_dim][-axes:])

    def forward(self, x: Tensor, kv: KeysValues, mask: Tensor | None, causal: bool = False) -> Tensor:
        mixed = self.attend(self.queries(x), kv, mask, causal)
        return self.out(self.norm(mixed.transpose(1, 2)).flatten(2))  # type: ignore[no-any-return]


class Numbers(Attention):
    """A mask of numbers to add."""

    def forward(self, x: Tensor, kv: KeysValues, mask: Tensor | None, causal: bool = False) -> Tensor:
        assert mask is not None
        return super().forward(x, kv, torch.zeros(mask.shape).masked_fill(~mask, -torch.inf), causal)


class Small(Attention):
    """One small product for all heads."""

    def __init__(self, model: Transformer) -> None:
        side = model.config.encoder
        super().__init__(model.config, side, side.width)
        self.small = nn.Linear(side.head_dim, side.head_dim)

    def forward(self, x: Tensor, kv: KeysValues, mask: Tensor | None, causal: bool = False) -> Tensor:
        q = self.small(x.unflatten(2, (self.heads, -1))).transpose(1, 2)
        return self.out(self.attend(q, kv, mask, causal).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def attending(kind: type[Attention], *given: Any) -> Transformer:
    model = ours()
    side = model.config.encoder
    model.encoder[0].attention = kind(*given or (model.config, side, side.width))
    return model.eval()


class SameKeys(Transformer):
    """Keys for values."""

    def step(self, *given: Any, **named: Any) -> Tensor:
        tokens, position, src_lengths, cross, *rest = given
        return super().step(tokens, position, src_lengths, [(k, k) for k, _ in cross], *rest, **named)


REFUSED: dict[str, tuple[Callable[[], Transformer], str, str]] = {
    "grouped heads": (grouped, "fp32-cpu", "has 8 heads of queries, and others of keys"),
    "grouped heads in plans": (grouped, "trt", "has 8 heads of queries, and others of keys"),
    "keys for values": (
        lambda: SameKeys(small_config()).eval(),
        "native-fp32",
        "whose values are not of the keys' layer: use a recipe of ort-cpu",
    ),
    "a norm of all heads at once": (
        lambda: attending(Normed, ours(), 2),
        "native-fp32",
        "native does not know LayerNormalization .*, which is over more than the last axis: use",
    ),
    "a product of each head": (
        lambda: attending(Small, ours()),
        "native-fp32",
        r"native: encoder.0.attention.small.weight\S* reads 32 numbers of 8: use a recipe of ort-cpu",
    ),
    "a mask of numbers": (
        lambda: attending(Numbers),
        "fp32-cpu",
        "another mask than of src_lengths: give a bool mask, or torch.where",
    ),
    "a large head": (
        lambda: ours(d_model=272, heads=1, d_ff=8),
        "native-fp32",
        "whose heads have more than 256 numbers: use a recipe of ort-cpu",
    ),
    "two positions": (lambda: ours(max_positions=2), "fp32", "max_positions=2: must be at least 3 to be "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_strange_model_is_refused_by_name(name: str) -> None:
    make, name, said = REFUSED[name]
    model = make()
    recipe = load_recipe(name).for_model(model.config)
    with pytest.raises(TformerError, match=said):
        if recipe.target == "native":
            build_program(Tracer(model), recipe, {})
        else:
            build_graph("encoder", Tracer(model), recipe, {})


@pytest.mark.parametrize("name", ["fp32", "int8", "trt"])
def test_layers_that_share_keys_have_outputs_of_their_own(name: str) -> None:
    model = shared_keys()
    recipe = load_recipe(name).for_model(model.config)
    found = build_graph("encoder", Tracer(model), recipe, input_ranges(model, [[4, 5, 6], [7]]))
    assert [each.name for each in found.graph.output] == ["cross_k_0", "cross_v_0", "cross_k_1", "cross_v_1"]


@pytest.mark.long
def test_layers_that_share_keys_are_kept_twice_in_a_program() -> None:
    model = shared_keys()
    found = build_program(Tracer(model), load_recipe("native-fp32").for_model(model.config), {})
    kept = [each for each in found["encoder"].code if each.op == "keep"]
    assert sorted(each.how["layer"] for each in kept) == [0, 1] and kept[0].reads == kept[1].reads


@pytest.mark.long
def test_what_only_training_reads_is_no_constant(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("from tests.test_strange_models import Training\n\ndef make():\n    return Training()\n")
    assert export_checked(Path(f"{file}:make"), tmp_path / "bundle", ["fp32"]).passed


def test_a_bias_that_the_config_does_not_tell_is_refused() -> None:
    """Shortlists would leave it out."""
    for told in (True, False):
        model = ours(share_embeddings="none", output_bias=told)
        assert wrapped(UserModel(model), "model.py:make") is model
        model.config = dataclasses.replace(model.config, output_bias=not told)
        with pytest.raises(TformerError, match=f"config.output_bias={not told}: must be {told}, as the module's"):
            wrapped(UserModel(model), "model.py:make")


class Scaled(nn.Linear):
    """A temperature for every token."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.linspace(0.2, 3, self.out_features)


OUTPUTS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "a product": (lambda: nn.Linear(32, 64), True),
    "of no bias": (lambda: nn.Linear(32, 64, bias=False), True),
    "scaled": (lambda: Scaled(32, 64, bias=False), False),
    "a norm as well": (lambda: nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64)), False),
}


@pytest.mark.long
@pytest.mark.parametrize("name", OUTPUTS)
def test_shortlists_are_only_of_outputs_that_are_products(name: str, tmp_path: Path) -> None:
    """Their graphs read weight and bias, and would leave out what else `output` does."""
    make, product = OUTPUTS[name]
    model = ours(share_embeddings="none", tgt_vocab=64)
    model.output = make()  # type: ignore[assignment]
    assert scores_by_product(model) is product
    if product:
        return
    export_graphs(Tracer(model), load_recipe("fp32-cpu").for_model(model.config), tmp_path / "graphs", "")
    assert {path.stem for path in tmp_path.glob("graphs/*.onnx")} == {"encoder", "decoder_step", "slots_step"}


def changed(name: str, change: Callable[[Any, Any], Any]) -> Transformer:
    """Ours, one of whose functions gives something else: `change` gets its arguments, and what it gave."""
    model = ours(share_embeddings="none")
    function = getattr(model, name)

    def other(*given: Any) -> Any:
        return change(given, function(*given))

    setattr(model, name, other)
    return model


def configured(**changes: object) -> Transformer:
    """Ours, whose config says something else."""
    model = ours(share_embeddings="none")
    model.config = dataclasses.replace(model.config, **changes)  # type: ignore[arg-type]
    return model


def with_output(output: nn.Module) -> Transformer:
    """Ours, with another output."""
    model = configured(output_bias=False)
    model.output = output  # type: ignore[assignment]
    return model


def of_a_dict() -> Transformer:
    model = ours()
    model.config = {"d_model": 32}  # type: ignore[assignment]
    return model


MISTAKES: dict[str, tuple[Callable[[], Transformer], str]] = {
    "layers of the encoder": (
        lambda: changed("encode", lambda given, found: (given[2:] and given[2].clear(), found)[1]),
        "encode noted no encoder_embedding in layers: by config it must note encoder_embedding, encoder_layer_0, ",
    ),
    "layers of the decoder": (
        lambda: changed("step", lambda given, found: (given[5:] and given[5].pop("hidden"), found)[1]),
        "step noted no hidden in layers: by config it must note decoder_embedding, decoder_layer_0, hidden",
    ),
    "no memory": (lambda: changed("encode", lambda _, found: found[0]), "where memory (B, S, d) is (3, 5, d)"),
    "no keys": (
        lambda: changed("cross_keys_values", lambda *_: []),
        "cross_keys_values returned 0 layers, where config.",
    ),
    "no cache": (
        lambda: changed("step", lambda given, found: (given[4].present.clear(), found)[1]),
        "step extended the cache of 0 layers, where config.decoder_layers=1",
    ),
    "rows": (
        lambda: changed("step", lambda _, found: found.flatten(0, 1)),
        "where hidden states (B, K, d) is (3, 2, d)",
    ),
    "width": (
        lambda: changed("step", lambda _, found: found[..., 1:]),
        "output of what step returned raised RuntimeError",
    ),
    "probabilities": (
        lambda: with_output(nn.Sequential(nn.Linear(32, 60), nn.Softmax(-1))),
        "output returned probabilities, which sum to 1, where logits are wanted: leave its softmax out",
    ),
    "decoder_layers": (lambda: configured(decoder_layers=2), "returned 1 layers, where config.decoder_layers=2"),
    "encoder_layers": (lambda: configured(encoder_layers=2), "encode noted no encoder_layer_1 in layers"),
    "heads": (lambda: configured(heads=2), "(B, H, S, D) by the config's heads and head_dim is (3, 2, 5, 16)"),
    "tgt_vocab": (lambda: configured(tgt_vocab=40), "where logits (B, K, V) by config.tgt_vocab is (3, 2, 40)"),
    "src_vocab": (
        lambda: configured(src_vocab=9999),
        "is src_vocab, tgt_vocab or max_positions larger than the module's",
    ),
    "a dict": (of_a_dict, "config is a dict: must be a tformer_deploy.model.config.ModelConfig"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_does_not_keep_the_protocol_is_named(name: str) -> None:
    make, said = MISTAKES[name]
    with pytest.raises(ConfigError, match=re.escape(said)):
        require_positions(wrapped(UserModel(make()), "model.py:make"), "model.py:make")


def test_attention_that_is_not_noted_is_named() -> None:
    model = changed("step", lambda given, found: (given[5:] and given[5].pop("attention", None), found)[1])
    with pytest.raises(ConfigError, match="the decoder_step of the module gives no attention: note it in layers"):
        Tracer(model).graph("decoder_step", load_recipe("fp32-attention").for_model(model.config))
