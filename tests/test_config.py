"""Configs, recipes and the contract: what is refused and how the message helps; golden signatures."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tformer_deploy.base.errors import ConfigError
from tformer_deploy.base.headers import read_toml
from tformer_deploy.base.settings import from_dict, parse_settings
from tformer_deploy.bundle.contract import (
    GRAPHS,
    MEMORY_GRAPH,
    SHORT_GRAPHS,
    SLOTS_GRAPH,
    described,
    graphs_of,
    layer_names,
    signature,
)
from tformer_deploy.bundle.recipe import (
    TOLERANCES,
    Axes,
    Axis,
    Recipe,
    Tolerance,
    load_recipe,
    recipe_folder,
    recipe_from_dict,
)
from tformer_deploy.model.config import PRESETS, ModelConfig, TrainConfig, preset

GOLDEN = Path(__file__).parent.parent / "export" / "golden"


def tiny(**changes: Any) -> ModelConfig:
    return preset("tiny", 8000, 8000, changes)


# Model and training configs


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid_and_survive_json(name: str) -> None:
    config = preset(name, 100, 100)
    assert config.decoder.head_dim * config.heads == config.d_model
    assert from_dict(ModelConfig, json.loads(json.dumps(dataclasses.asdict(config))), "model") == config


def test_preset_fields_can_be_replaced() -> None:
    assert tiny(d_ff=300, norm="annotated") == dataclasses.replace(tiny(), d_ff=300, norm="annotated")


def test_heads_that_do_not_divide_the_width_list_the_divisors() -> None:
    expected = r"heads=5 does not divide .*d_model=12: choose one of 1, 2, 3, 4, 6, 12, or set head_dim$"
    with pytest.raises(ConfigError, match=expected):
        tiny(d_model=12, heads=5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_modle": 64}, r"unknown key of \[model\] 'd_modle': did you mean 'd_model'"),
        ({"norm": "anotated"}, "unknown norm 'anotated': did you mean 'annotated'"),
        ({"share_embeddings": True}, "unknown share_embeddings 'True'.*all, decoder, none"),
        ({"d_model": 64.0}, "d_model=64.0: must be of type int"),
        ({"heads": True}, "heads=True: must be of type int"),
        ({"output_bias": 1}, "output_bias=1: must be of type bool"),
        ({"dropout": "0.1"}, "dropout='0.1': must be of type float"),
        ({"norm_eps": 10**400}, r"norm_eps: must be at most 1e\+300"),
        ({"dropout": 1.0}, "dropout=1.0: must be at least 0 and less than 1"),
        ({"attention_dropout": float("nan")}, "attention_dropout=nan"),
        ({"decoder_layers": 0}, "decoder_layers=0: must be at least 1"),
        ({"max_positions": 0}, "max_positions=0"),
        ({"d_model": 15, "heads": 3}, "d_model=15: sinusoidal positions need an even width"),
        ({"tgt_vocab": 7000}, "source 8000 and target 7000: use share_embeddings=decoder"),
        ({"eos_id": 8000}, "eos_id=8000 is outside the vocabulary of 8000"),
        ({"norm_eps": -1.0}, "norm_eps=-1.0"),
        ({"position_base": 0.0}, "position_base=0.0"),
        (
            {"positions": "relative", "relative_buckets": 3},
            "relative_buckets=3, model.relative_distance=128: needs at least 4 buckets",
        ),
        ({"positions": "relative", "relative_buckets": 64, "relative_distance": 32}, "a distance above half as many"),
        ({"final_norm": False, "final_norm_sides": "encoder"}, "final_norm_sides=encoder: model.final_norm=false"),
    ],
    ids=str,
)
def test_model_configs_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny(**changes)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("updates", 0),
        ("lr", 0.0),
        ("lr", float("nan")),
        ("clip_norm", -1.0),
        ("clip_norm", float("nan")),
        ("label_smoothing", 1.0),
        ("precision", "fp16"),
        ("seed", "1"),
    ],
)
def test_train_configs_that_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        TrainConfig(**{field: value})


def test_whole_numbers_are_accepted_as_floats() -> None:
    config = TrainConfig(lr=1)
    assert config.lr == 1.0 and type(config.lr) is float


def test_missing_field_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"\[model\].*tgt_vocab"):
        from_dict(ModelConfig, {"src_vocab": 100}, "model")


def test_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown preset 'smal': did you mean 'small'\? valid: base, big, small, tiny"
    ):
        preset("smal", 100, 100)


# Settings of a command line


def test_settings_take_the_types_of_their_fields() -> None:
    texts = {"d_model": "64", "dropout": "0.2", "output_bias": "True", "norm": "annotated"}
    parsed = parse_settings(ModelConfig, "model", texts)
    assert parsed == {"d_model": 64, "dropout": 0.2, "output_bias": True, "norm": "annotated"}
    assert type(parsed["d_model"]) is int and type(parsed["output_bias"]) is bool
    assert tiny(**parsed).dropout == 0.2


@settings(max_examples=30)
@given(updates=st.integers(1, 10**9), lr=st.floats(1e-9, 1e3), patience=st.integers(0, 100))
def test_settings_round_trip(updates: int, lr: float, patience: int) -> None:
    values = {"updates": updates, "lr": lr, "patience": patience}
    assert parse_settings(TrainConfig, "train", {key: str(value) for key, value in values.items()}) == values


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"warm_up": "5"}, r"unknown key of \[train\] 'warm_up': did you mean 'warmup'"),
        ({"updates": "1e3"}, r"train\.updates=1e3: must be a whole number"),
        ({"lr": "fast"}, r"train\.lr=fast: must be a number"),
        ({"updates": ""}, r"train\.updates=: must be a whole number"),
    ],
    ids=str,
)
def test_settings_that_are_refused(text: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_settings(TrainConfig, "train", text)


def test_bool_settings_are_true_or_false() -> None:
    with pytest.raises(ConfigError, match=r"model\.final_norm=yes: must be true or false"):
        parse_settings(ModelConfig, "model", {"final_norm": "yes"})


# Recipes


def to_toml(recipe: Recipe) -> str:
    """A recipe as a person would write it."""
    axes = [
        f"{name} = {{ min = {axis['min']}, opt = {axis['opt']}, max = {axis['max']} }}"
        for name, axis in dataclasses.asdict(recipe.axes).items()
    ]
    return "\n".join(
        [
            f'target = "{recipe.target}"',
            f'precision = "{recipe.precision}"',
            f"group_size = {recipe.group_size}",
            f'cache = "{recipe.cache}"',
            f"opset = {recipe.opset}",
            f"top_k = {recipe.top_k}",
            f"attention = {str(recipe.attention).lower()}",
            f"memory = {str(recipe.memory).lower()}",
            "[axes]",
            *axes,
            "[tolerance]",
            f"encoder = {recipe.tolerance.encoder}",
            f"scores = {recipe.tolerance.scores}",
            f"bleu = {recipe.tolerance.bleu}",
            f"tokens = {str(recipe.tolerance.tokens).lower()}",
            f"unstable = {recipe.tolerance.unstable}",
            f"ties = {recipe.tolerance.ties}",
            f"top1 = {recipe.tolerance.top1}",
            f"memory = {recipe.tolerance.memory}",
        ]
    )


ORT_CPU = {"target": "ort-cpu", "cache": "static"}
GRAPH_KINDS: list[dict[str, Any]] = [
    {},
    {"attention": True},
    {"memory": True},
    ORT_CPU,
    {**ORT_CPU, "precision": "int8"},
    {**ORT_CPU, "precision": "int4", "group_size": 64},
]


@settings(max_examples=30)
@given(
    bounds=st.lists(st.tuples(*[st.integers(0, 999)] * 3).map(sorted), min_size=4, max_size=4),
    opset=st.integers(23, 24),
    tolerances=st.tuples(*[st.floats(1e-9, 1)] * 3, st.booleans(), *[st.floats(0, 1)] * 4),
    graphs=st.sampled_from(GRAPH_KINDS),
)
def test_recipes_round_trip_through_toml_and_json(
    tmp_path_factory: pytest.TempPathFactory,
    bounds: list[list[int]],
    opset: int,
    tolerances: tuple[float, float, float, bool, float, float, float, float],
    graphs: dict[str, Any],
) -> None:
    axes = Axes(*(Axis(*bound) for bound in bounds))
    recipe = Recipe(opset=opset, top_k=3, axes=axes, tolerance=Tolerance(*tolerances), **graphs)
    file = tmp_path_factory.mktemp("recipe") / "mine.toml"
    file.write_text(to_toml(recipe), encoding="utf-8")
    assert load_recipe(str(file)) == recipe
    assert recipe_from_dict(json.loads(json.dumps(dataclasses.asdict(recipe)))) == recipe


def test_named_recipes_load_and_fp32_is_the_default() -> None:
    for file in recipe_folder().glob("*.toml"):
        load_recipe(file.stem).for_model(tiny())
    assert load_recipe("fp32") == Recipe() == recipe_from_dict({})
    assert load_recipe("fp32-attention") == Recipe(attention=True)
    assert load_recipe("fp32-cpu") == recipe_from_dict(ORT_CPU)
    for name in ("int8", "int8-latency", "int4"):
        recipe = load_recipe(name)
        assert (recipe.target, recipe.cache, recipe.precision) == ("ort-cpu", "static", name[:4])
        assert recipe.tolerance == TOLERANCES[recipe.precision] and not recipe.tolerance.tokens


def test_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown recipe 'fp23': did you mean 'fp32'\?.*FILE\.toml"):
        load_recipe("fp23")


@pytest.mark.parametrize("content", [b"opset = ", b"\xff\xfe"], ids=["syntax", "encoding"])
def test_recipe_file_that_is_no_toml(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_bytes(content)
    for name in ("bad.toml", "missing.toml"):
        with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
            load_recipe(str(tmp_path / name))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"opsett": 20}, r"unknown key of \[recipe\] 'opsett': did you mean 'opset'"),
        ({"axes": {"bach": {"min": 1, "opt": 1, "max": 1}}}, r"unknown key of \[axes\] 'bach': did you mean 'batch'"),
        ({"axes": {"batch": {"mim": 1, "opt": 1, "max": 1}}}, r"\[axes\.batch\] 'mim': did you mean 'min'"),
        ({"axes": {"batch": {"min": 1}}}, r"\[axes\.batch\].*opt"),
        ({"axes": {"batch": {"min": 1, "opt": 2.5, "max": 3}}}, "opt=2.5: must be of type int"),
        ({"axes": {"batch": 8}}, "batch"),
        ({"axes": 8}, "axes"),
        ({"tolerance": {"score": 1e-3}}, r"unknown key of \[tolerance\] 'score': did you mean 'scores'"),
        ({"tolerance": {"scores": "small"}}, "scores"),
        ({"precision": "fp31"}, "unknown precision 'fp31': did you mean 'fp32'"),
        ({"opset": 17}, "opset=17: must be 18 to 24"),
        ({"opset": 22, "target": "trt", "cache": "static"}, "opset=22: must be 23 or 24 with target=trt"),
        ({"top_k": -1}, "top_k=-1: must be at least 0"),
        ({"tolerance": {"tokens": 0}}, "tokens=0: must be of type bool"),
        ({"target": "ort-cup"}, "unknown target 'ort-cup': did you mean 'ort-cpu'"),
        ({"target": "ort-cpu"}, "cache=growing: must be static with .*target=ort-cpu"),
        ({"cache": "static"}, "cache=static: must be growing with .*target=onnx"),
        ({"precision": "int8"}, "precision=int8: needs target = 'ort-cpu'"),
        ({**ORT_CPU, "attention": True}, "attention = true: needs target = 'onnx'"),
        ({**ORT_CPU, "target": "native", "attention": True}, "attention = true: programs always return it"),
        ({"precision": "bf16"}, "precision=bf16: needs target = 'native'"),
        ({**ORT_CPU, "cache_precision": "bf16"}, "^cache_precision=bf16: needs target = 'native'"),
        ({"cache_precision": "int8"}, "unknown cache_precision 'int8'"),
        (
            {**ORT_CPU, "precision": "int8", "group_size": 48},
            r"=48: must be one of \(0, 16, 32, 64, 128, 256\)",
        ),
        ({**ORT_CPU, "group_size": 32}, "group_size=32: must be one of .*, and 0 with fp32"),
        ({"group_size": 32}, "group_size=32: must be one of .*, and 0 with fp32"),
        ({**ORT_CPU, "precision": "int4"}, r"group_size=0: int4 needs one of \(16, 32, 64, 128, 256\)"),
    ],
    ids=str,
)
def test_recipes_that_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe_from_dict(values)


@pytest.mark.parametrize("bound", [(2, 1, 3), (1, 4, 3), (-1, 1, 1), (5, 4, 0)])
def test_axis_is_in_order(bound: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="must be min <= opt <= max"):
        Axis(*bound)


def test_for_model_fills_open_ends() -> None:
    axes = Recipe().for_model(tiny(max_positions=100)).axes
    assert axes == Axes(src_len=Axis(1, 32, 100), past_len=Axis(0, 32, 99))


def test_for_model_cuts_axes_to_the_positions() -> None:
    recipe = Recipe(axes=Axes(src_len=Axis(20, 30, 50), past_len=Axis(0, 5, 8)))
    assert recipe.for_model(tiny(max_positions=16)).axes == Axes(src_len=Axis(16, 16, 16), past_len=Axis(0, 5, 8))


def test_top_k_may_not_exceed_the_vocabulary() -> None:
    with pytest.raises(ConfigError, match="top_k=8001 exceeds the vocabulary of 8000"):
        Recipe(top_k=8001).for_model(tiny())


@pytest.mark.parametrize(("vocab", "most"), [(4, 2), (9, 5), (10, 5), (127, 64), (8000, 64)])
def test_beams_have_as_many_best_tokens_as_they_read(vocab: int, most: int) -> None:
    config = tiny(src_vocab=vocab, tgt_vocab=vocab)
    processor = load_recipe("fp32-cpu").for_model(config)
    assert processor.axes.beams == Axis(1, 1, min(vocab // 2, 64)), "one more is read there"
    assert Recipe().for_model(config).axes.beams == Axis(1, 1, most)
    assert Recipe(top_k=3).for_model(config).axes.beams == Axis(1, 1, 64)
    wide = Recipe(axes=Axes(beams=Axis(6, 7, 64))).for_model(config).axes.beams
    assert wide == Axis(min(6, most), min(7, most), most)


# Contract


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize(
    ("folder", "recipe"), [(GOLDEN, "fp32"), (GOLDEN / "ort-cpu", "fp32-cpu"), (GOLDEN / "trt", "trt")]
)
def test_signatures_are_the_golden_ones(graph: str, folder: Path, recipe: str) -> None:
    golden = json.loads((folder / f"{graph}.json").read_text(encoding="utf-8"))
    assert described(graph, tiny(), load_recipe(recipe).for_model(tiny())) == golden


def test_the_signature_of_slots_is_the_golden_one() -> None:
    golden = json.loads((GOLDEN / "ort-cpu" / "slots_step.json").read_text(encoding="utf-8"))
    assert described(SLOTS_GRAPH, tiny(), load_recipe("int8").for_model(tiny())) == golden


@pytest.mark.parametrize("graph", SHORT_GRAPHS)
@pytest.mark.parametrize(("suffix", "recipe"), [("", "fp32-cpu"), ("", "int8-latency"), ("-int8", "int8")])
def test_signatures_for_shortlists_are_the_golden_ones(graph: str, suffix: str, recipe: str) -> None:
    golden = json.loads((GOLDEN / "ort-cpu" / f"{graph}{suffix}.json").read_text(encoding="utf-8"))
    assert described(graph, tiny(), load_recipe(recipe).for_model(tiny())) == golden


@pytest.mark.parametrize("recipe", ["fp32", "fp32-cpu", "int8"])
def test_the_signature_of_memory_is_the_golden_one(recipe: str) -> None:
    golden = json.loads((GOLDEN / "memory.json").read_text(encoding="utf-8"))
    chosen = dataclasses.replace(load_recipe(recipe), memory=True)
    assert described(MEMORY_GRAPH, tiny(), chosen.for_model(tiny())) == golden
    assert graphs_of(chosen) == (*graphs_of(load_recipe(recipe)), MEMORY_GRAPH)


def test_only_graphs_for_processors_have_slots_and_shortlists() -> None:
    made = {name: graphs_of(load_recipe(name)) for name in ("fp32", "trt", "fp32-cpu", "int4")}
    assert made["fp32"] == made["trt"] == GRAPHS
    assert made["fp32-cpu"] == made["int4"] == (*GRAPHS, SLOTS_GRAPH, *SHORT_GRAPHS)


@pytest.mark.parametrize("recipe", ["fp32-cpu", "int8", "int8-latency", "int4"])
def test_lowered_signatures_are_alike_but_for_the_step(recipe: str) -> None:
    """The encoder's is the standard one; caches are buffers that a step takes and gives under two names."""
    config, chosen = tiny(), load_recipe(recipe).for_model(tiny())
    encoder, step = (signature(graph, config, chosen) for graph in GRAPHS)
    assert encoder == signature("encoder", config, Recipe().for_model(config))
    assert step == signature("decoder_step", config, load_recipe("fp32-cpu").for_model(config))
    assert set(encoder.outputs) < set(step.inputs)
    past, present = (
        [(spec.name.removeprefix(kind), spec.dtype, spec.shape) for spec in specs if spec.name.startswith(kind)]
        for kind, specs in (("past", step.inputs), ("present", step.outputs))
    )
    assert past == present and len(past) == 2 * config.decoder_layers
    shapes = {spec.name: spec.shape for spec in step.outputs}
    assert shapes["top_ids"] == shapes["top_scores"] == ("rows", "best")
    fixed = signature("decoder_step", config, dataclasses.replace(chosen, top_k=7))
    assert {spec.name: spec.shape for spec in fixed.outputs}["top_ids"] == ("rows", 7)


def test_signature_follows_config_and_recipe() -> None:
    config = tiny(decoder_layers=2, d_model=24, heads=3, share_embeddings="decoder", tgt_vocab=50)
    encoder, step = (signature(graph, config, Recipe(top_k=7)) for graph in GRAPHS)
    assert [spec.name for spec in encoder.outputs] == ["cross_k_0", "cross_v_0", "cross_k_1", "cross_v_1"]
    assert {spec.shape for spec in encoder.outputs} == {("batch", 3, "src_len", 8)}
    assert set(encoder.outputs) < set(step.inputs)  # what the encoder gives is what a step takes, unchanged
    shapes = {spec.name: spec.shape for spec in step.outputs}
    assert shapes["top_ids"] == shapes["top_scores"] == ("batch", "beams", 7)
    assert shapes["log_probs"] == ("batch", "beams", 50)
    names = [spec.name for spec in (*step.inputs, *step.outputs)]
    assert len(names) == len(set(names))


def test_attention_is_one_more_output_before_the_caches() -> None:
    plain, more = (signature("decoder_step", tiny(), Recipe(attention=attention)) for attention in (False, True))
    assert more.inputs == plain.inputs
    assert (*more.outputs[:3], *more.outputs[4:]) == plain.outputs
    assert more.outputs[3].name == "attention" and more.outputs[3].shape == ("batch", "beams", "src_len")


def test_layer_names_are_in_order_and_nothing_else_has_them() -> None:
    config = tiny(encoder_layers=1, decoder_layers=2)
    assert layer_names("encoder", config) == ("encoder_embedding", "encoder_layer_0", "memory")
    decoder = ("decoder_embedding", "decoder_layer_0", "decoder_layer_1", "hidden")
    assert layer_names("decoder_step", config) == decoder
    assert layer_names("decoder_step", tiny(decoder_layers=2, final_norm=False)) == decoder[:-1]
    for sides, names in (("encoder", ("memory", "decoder_layer_0")), ("decoder", ("encoder_layer_0", "hidden"))):
        one_side = tiny(encoder_layers=1, decoder_layers=1, final_norm_sides=sides)
        assert tuple(layer_names(graph, one_side)[-1] for graph in GRAPHS) == names
    for graph in GRAPHS:
        found = signature(graph, config, Recipe(attention=True))
        assert not {spec.name for spec in (*found.inputs, *found.outputs)} & set(layer_names(graph, config))


def test_toml_files_of_other_editors(tmp_path: Path) -> None:
    """With a byte order mark; and one that is not there."""
    (tmp_path / "mine.toml").write_bytes(b"\xef\xbb\xbf[model]\nd_model = 8\n")
    assert read_toml(tmp_path / "mine.toml") == {"model": {"d_model": 8}}
    with pytest.raises(ConfigError, match=r"other\.toml: No such file or directory: name a TOML file"):
        read_toml(tmp_path / "other.toml")
