"""The constants of every graph, compared with the checkpoint: right ones pass, wrong ones are named."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import GraphProto, numpy_helper

from tformer_deploy.base.errors import ArtifactError
from tformer_deploy.bundle.contract import graphs_of
from tformer_deploy.bundle.manifest import Bundle, open_bundle
from tformer_deploy.bundle.origin import ORIGINS
from tformer_deploy.bundle.recipe import load_recipe
from tformer_deploy.check import EngineReport, Gate
from tformer_deploy.check.constants import compare_constants, failures
from tformer_deploy.check.origins import named_tensors
from tformer_deploy.check.report import describe_constants
from tformer_deploy.check.results import Constants
from tformer_deploy.check.unrounded import compare_unrounded
from tformer_deploy.export.calibrate import Measured, input_ranges
from tformer_deploy.export.to_onnx import export_graphs
from tformer_deploy.export.trace import Tracer
from tformer_deploy.model.checkpoint import open_checkpoint
from tformer_deploy.model.network import Transformer

from .configs import OTHERS
from .conftest import random_model, small_config
from .mutations import CONSTANTS, ROUNDING, Mutation, change_tensor
from .program_mutations import PROGRAM_CONSTANTS, ProgramMutation, break_program

pytestmark = pytest.mark.long

PROGRAMS = ("native-fp32", "native-bf16", "native-int8", "native-int4")
RECIPES = ("fp32-cpu", "int8", "int8-latency", "int4", "trt", *PROGRAMS)
CONFIGS: dict[str, dict[str, Any]] = {
    "tied": {},
    "apart, post-norm": {"share_embeddings": "none", "norm_position": "post", "final_norm": False, "output_bias": True},
    "relative": OTHERS,
    "annotated, learned": {"norm": "annotated", "positions": "learned", "scale_embeddings": False},
    "odd sizes": {"d_model": 40, "d_ff": 100, "src_vocab": 33, "tgt_vocab": 47, "share_embeddings": "decoder"},
}


def graphs(model: Transformer, recipe: str, folder: Path) -> Bundle:
    """A bundle of one variant, or of the standard graphs, that is no more than its graphs."""
    config = model.config
    chosen = load_recipe(recipe).for_model(config)
    variant = "" if chosen.target == "onnx" else recipe
    ranges = input_ranges(model, [[5, 6, 7, 3], [8, 9, 3]]) if chosen.quantized else {}
    export_graphs(Tracer(model.eval()), chosen, folder / variant, "0", ranges)
    described = Measured(ranges, [], {}).described() if ranges else {}
    manifest = {"variants": {variant: described} if variant else {}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return Bundle(folder, config, chosen, manifest, {variant: chosen} if variant else {}, variant)


def compared(model: Transformer, bundle: Bundle) -> Constants:
    variant = bundle.default
    return compare_constants(bundle, variant, bundle.variants[variant] if variant else bundle.recipe, model)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_what_export_makes_is_equal(changes: dict[str, Any], recipe: str, tmp_path: Path) -> None:
    model = random_model(small_config(**changes))
    found = compared(model, graphs(model, recipe, tmp_path))
    assert not found.wrong and found.equal == found.compared > 30
    made = re.compile(r".*: float[0-9]?_[-0-9.e+]+")  # which no checkpoint has
    assert all(made.fullmatch(name) for name in found.unknown), found.unknown


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_standard_graphs_are_equal(changes: dict[str, Any], tmp_path: Path) -> None:
    model = random_model(small_config(**changes))
    bundle = graphs(model, "fp32", tmp_path)
    found = compared(model, bundle)
    assert not found.wrong and found.equal == found.compared > 30
    sizes = {
        f"{graph}: {t.name}": list(t.dims) for graph in graphs_of(bundle.recipe) for t in initializers(bundle, graph)
    }
    assert all(sizes[name] == [] for name in found.unknown), "single numbers alone have no origin"


def initializers(bundle: Bundle, graph: str) -> list[Any]:
    return list(onnx.load(bundle.graph(graph), load_external_data=False).graph.initializer)


@pytest.mark.parametrize("recipe", ["fp32", "int8", "native-fp32", "native-int8"])
def test_an_untrained_model_with_equal_tensors_is_equal(recipe: str, tmp_path: Path) -> None:
    """Of its zero biases an exporter keeps one, so that they name no layer."""
    model = Transformer(small_config()).init_weights(1)
    found = compared(model, graphs(model, recipe, tmp_path))
    assert not found.wrong and found.equal == found.compared


class Exported(dict[str, tuple[Transformer, Bundle]]):
    """The small model and its graphs, by recipe; made when they are first asked for. Read only."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.model, self.folder = random_model(small_config()), folder

    def __missing__(self, recipe: str) -> tuple[Transformer, Bundle]:
        (self.folder / recipe).mkdir()
        self[recipe] = self.model, graphs(self.model, recipe, self.folder / recipe)
        return self[recipe]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return Exported(tmp_path_factory.mktemp("graphs"))


def mutated(bundle: Bundle, graph: str, mutate: Mutation, out: Path) -> Bundle:
    """The bundle with one graph changed, all of them without files for their weights."""
    variant, folder = bundle.default, out / bundle.default
    folder.mkdir(exist_ok=True)
    for path in sorted(bundle.graph("encoder", variant).parent.glob("*.onnx")):
        model, name = onnx.load(path), path.stem
        if name == graph:
            mutate(model.graph)
        onnx.save(model, folder / f"{name}.onnx")
    return Bundle(out, bundle.config, bundle.recipe, bundle.manifest, bundle.variants, variant)


@pytest.mark.parametrize(("variant", "graph", "mutate", "named"), CONSTANTS.values(), ids=CONSTANTS)
def test_wrong_constants_are_named(
    variant: str, graph: str, mutate: Mutation, named: str, exported: dict[str, Any], tmp_path: Path
) -> None:
    model, bundle = exported[variant or "fp32"]
    found = compared(model, mutated(bundle, graph, mutate, tmp_path))
    lines = failures(found)
    assert lines and all(line.startswith("constant ") for line in lines)
    assert any(named in line and f"{graph}.onnx differs from the checkpoint's by " in line for line in lines), lines


@pytest.mark.parametrize(("variant", "mutate", "named"), PROGRAM_CONSTANTS.values(), ids=PROGRAM_CONSTANTS)
def test_wrong_constants_of_programs_are_named(
    variant: str, mutate: ProgramMutation, named: str, exported: dict[str, Any], tmp_path: Path
) -> None:
    model, bundle = exported[variant]
    out = break_program(bundle.directory, tmp_path / "broken", variant, mutate)
    found = compared(model, dataclasses.replace(bundle, directory=out))
    lines = failures(found)
    assert lines and all(line.startswith(("constant ", "1 more", "2 more")) for line in lines)
    assert any(named in line and f"{variant}/program.json (" in line for line in lines), lines


@pytest.mark.parametrize(("variant", "graph", "mutate"), [each[:3] for each in ROUNDING.values()], ids=ROUNDING)
def test_wrong_roundings_are_named(
    variant: str, graph: str, mutate: Mutation, exported: dict[str, Any], tmp_path: Path
) -> None:
    model, bundle = exported[variant]
    lines = failures(compared(model, mutated(bundle, graph, mutate, tmp_path)))
    assert lines and "differs from what calibration measured by" in lines[0]


@pytest.mark.parametrize("recipe", ["int8", "native-int8"])
def test_a_bundle_without_ranges_is_refused(recipe: str, exported: dict[str, Any]) -> None:
    """Nothing would say by what its inputs may be rounded."""
    model, bundle = exported[recipe]
    found = compared(model, dataclasses.replace(bundle, manifest={"variants": {recipe: {}}}))
    assert found.wrong == ["manifest.json has no ranges of calibration: nothing bounds the rounding of inputs"]


def test_integers_come_straight_from_their_rounding(exported: dict[str, Any], tmp_path: Path) -> None:
    """What else is done to them, such as a lower limit of their range, is seen nowhere else."""

    def cap(graph: GraphProto) -> None:
        place, node = next((i, n) for i, n in enumerate(graph.node) if n.op_type == "MatMulIntegerToFloat")
        graph.initializer.append(numpy_helper.from_array(np.array(180, np.uint8), "most"))
        graph.node.insert(place, onnx.helper.make_node("Min", [node.input[0], "most"], ["capped"]))
        node.input[0] = "capped"

    model, bundle = exported["int8"]
    lines = failures(compared(model, mutated(bundle, "decoder_step", cap, tmp_path)))
    assert lines and "constant capped" in lines[0] and "differs from what QuantizeLinear gives" in lines[0]


@pytest.mark.parametrize(
    ("recipe", "graph", "kind", "place"),
    [
        ("int4", "decoder_step", "MatMulNBits", 3),
        ("int4", "decoder_step", "MatMulNBits", 4),
        ("int4", "short_rows", "GatherBlockQuantized", 3),
        ("int8", "decoder_step", "MatMulIntegerToFloat", 5),
    ],
)
def test_inputs_that_export_leaves_empty_are_named(
    recipe: str, graph: str, kind: str, place: int, exported: dict[str, Any], tmp_path: Path
) -> None:
    """Zero points of weights, and the order of their groups."""

    def add(graph: GraphProto) -> None:
        node = next(node for node in graph.node if node.op_type == kind)
        graph.initializer.append(numpy_helper.from_array(np.zeros((), np.int32), "zeros"))
        inputs = [*node.input, *[""] * (place + 1 - len(node.input))]
        node.input[:] = [*inputs[:place], "zeros", *inputs[place + 1 :]]

    model, bundle = exported[recipe]
    lines = failures(compared(model, mutated(bundle, graph, add, tmp_path)))
    where = f"{recipe}/{graph}.onnx"
    assert lines[0] == f"{kind} of {where} reads zeros where export leaves the input empty: export the bundle again"


def test_scales_that_are_computed_are_named(exported: dict[str, Any], tmp_path: Path) -> None:
    def computed(kind: str, place: int) -> Mutation:
        def mutate(graph: GraphProto) -> None:
            number, node = next((i, n) for i, n in enumerate(graph.node) if n.op_type == kind)
            graph.initializer.append(numpy_helper.from_array(np.float32(1.01), "little"))
            graph.node.insert(number, onnx.helper.make_node("Mul", [node.input[place], "little"], ["made"]))
            node.input[place] = "made"

        return mutate

    for recipe, graph, kind, place, named in (
        ("int8", "decoder_step", "MatMulIntegerToFloat", 3, "the weight's own scales"),
        ("int8", "decoder_step", "MatMulIntegerToFloat", 2, "what calibration measured"),
        ("int8", "decoder_step", "QuantizeLinear", 1, "what calibration measured"),
        ("int4", "decoder_step", "MatMulNBits", 2, "the weight's own scales"),
        ("int4", "short_rows", "GatherBlockQuantized", 2, "the weight's own scales"),
    ):
        out = tmp_path / f"{kind} {place}"
        out.mkdir()
        model, bundle = exported[recipe]
        lines = failures(compared(model, mutated(bundle, graph, computed(kind, place), out)))
        assert any("constant made" in line and f"differs from {named}" in line for line in lines), (kind, lines)


def test_a_constant_cannot_hide_behind_that_of_another_graph(exported: dict[str, Any], tmp_path: Path) -> None:
    """The other graph has the tensor, so that it is not missed; it has changed where it has no origin any more."""
    model, bundle = exported["int8"]
    name, scales = "decoder.0.ff.up.weight.int8.transposed", "decoder.0.ff.up.weight.scales"
    (tmp_path / "other").mkdir()
    changed = mutated(bundle, "slots_step", lambda graph: change_tensor(graph, name, lambda w: -w), tmp_path / "other")
    path = changed.graph("slots_step", "int8")
    stored = onnx.load(path)
    (metadata,) = (each for each in stored.metadata_props if each.key == ORIGINS)
    metadata.value = json.dumps({key: value for key, value in json.loads(metadata.value).items() if key != name})
    onnx.save(stored, path)
    assert failures(compared(model, changed)) == [
        f"constant {each} of int8/slots_step.onnx has no origin: export the bundle again" for each in (name, scales)
    ]


def without(bias: str) -> Mutation:
    def mutate(graph: GraphProto) -> None:
        node = next(node for node in graph.node if bias in node.input)
        if node.op_type == "Add":
            node.op_type = "Identity"
            node.input.remove(bias)
        else:
            node.input[:] = ["" if each == bias else each for each in node.input]

    return mutate


def test_a_bias_that_is_left_out_is_named(exported: dict[str, Any], tmp_path: Path) -> None:
    for recipe in ("fp32", "int8", "int4"):
        (tmp_path / recipe).mkdir()
        model, bundle = exported[recipe]
        lines = failures(
            compared(model, mutated(bundle, "decoder_step", without("decoder.0.ff.up.bias"), tmp_path / recipe))
        )
        assert len(lines) == 1 and "constant decoder.0.ff.up.bias of " in lines[0], lines
        assert "decoder_step.onnx differs from the checkpoint's by " in lines[0]


def test_an_output_bias_that_is_left_out_is_named_where_weights_are_tied(tmp_path: Path) -> None:
    """A table of embeddings has the same weights, and no bias."""

    model = random_model(small_config(output_bias=True))
    bundle = graphs(model, "fp32", tmp_path)
    (tmp_path / "broken").mkdir()
    lines = failures(compared(model, mutated(bundle, "decoder_step", without("output.bias"), tmp_path / "broken")))
    assert len(lines) == 1 and lines[0].startswith("constant output.bias of decoder_step.onnx differs "), lines


def test_a_relative_bias_that_is_left_out_of_a_program_is_named(tmp_path: Path) -> None:
    model = random_model(small_config(**OTHERS))
    (tmp_path / "bundle").mkdir()
    bundle = graphs(model, "native-fp32", tmp_path / "bundle")
    assert not compared(model, bundle).wrong

    def drop(program: Any) -> None:
        each = next(each for each in program.about["graphs"]["encoder"]["code"] if each["op"] == "self")
        del each["bias"]

    out = break_program(bundle.directory, tmp_path / "broken", "native-fp32", drop)
    lines = failures(compared(model, dataclasses.replace(bundle, directory=out)))
    assert any("constant encoder_relative.tables.0 of " in line for line in lines), lines


@pytest.mark.parametrize("kind", ["DOUBLE", "FLOAT8E4M3FN", "INT4"])
def test_weights_of_any_type_are_compared(kind: str, exported: dict[str, Any], tmp_path: Path) -> None:
    """Also of one that export never writes."""

    def other_type(graph: GraphProto) -> None:
        for tensor in graph.initializer:
            if tensor.name in ("encoder_norm.bias", "encoder.0.ff.up.weight.int8.transposed"):
                values, dtype = numpy_helper.to_array(tensor), getattr(onnx.TensorProto, kind)
                values = (values * 1.01 + 1).clip(-7, 7).ravel()
                tensor.CopyFrom(onnx.helper.make_tensor(tensor.name, dtype, list(tensor.dims), values))

    model, bundle = exported["int8"]
    found = compared(model, mutated(bundle, "encoder", other_type, tmp_path))
    for name in ("encoder_norm.bias", "encoder.0.ff.up.weight"):
        assert any(f"constant {name}" in line for line in found.wrong), found.wrong


def test_a_damaged_program_is_an_error_of_one_line(exported: dict[str, Any], tmp_path: Path) -> None:
    def cut(program: Any) -> None:
        program.about["arrays"][0]["offset"] = 1 << 40

    model, bundle = exported["native-fp32"]
    out = break_program(bundle.directory, tmp_path / "broken", "native-fp32", cut)
    with pytest.raises(ArtifactError, match=r"program.json is damaged .*: export the bundle again"):
        compared(model, dataclasses.replace(bundle, directory=out))


def test_a_renamed_constant_cannot_hide(exported: dict[str, Any], tmp_path: Path) -> None:
    """It is missed, and counted among those of unknown origin."""

    def rename(graph: GraphProto) -> None:
        names = ("encoder.1.ff.down.weight.transposed", "encoder.1.ff.down.weight.int8.transposed")
        old = next(t for t in graph.initializer if t.name in names)
        name, old.name = old.name, "mine"
        for node in graph.node:
            node.input[:] = ["mine" if each == name else each for each in node.input]

    for recipe in ("fp32", "int8"):
        model, bundle = exported[recipe]
        (tmp_path / recipe).mkdir()
        found = compared(model, mutated(bundle, "encoder", rename, tmp_path / recipe))
        assert "encoder: mine" in found.unknown
        assert any("encoder.1.ff.down.weight" in line for line in failures(found))
        assert "of other origin (" in describe_constants(found)


def test_nan_and_other_shapes_are_no_equality(exported: dict[str, Any], tmp_path: Path) -> None:
    model, bundle = exported["int8"]
    for number, change in enumerate((lambda a: a * np.nan, lambda a: a[:-1], lambda a: -a, lambda a: a * 0)):

        def mutate(graph: GraphProto, change: Any = change) -> None:
            for tensor in graph.initializer:
                if tensor.name in ("encoder_norm.bias", "encoder.0.ff.up.weight.scales"):
                    values = np.asarray(change(numpy_helper.to_array(tensor)), np.float32)
                    if tensor.name == "encoder_norm.bias" or values.shape == tuple(tensor.dims):
                        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))

        (tmp_path / str(number)).mkdir()
        found = compared(model, mutated(bundle, "encoder", mutate, tmp_path / str(number)))
        assert any("encoder_norm.bias" in line for line in found.wrong)
        assert number == 1 or any("encoder.0.ff.up" in line for line in found.wrong)


def test_the_tensors_of_a_checkpoint_have_their_positions() -> None:
    model = random_model(small_config(encoder_layers=1, decoder_layers=1))
    found = named_tensors(model)
    assert found["src_positions"].shape == (24, 32) and "decoder.0.ff.up.weight" in found


def test_many_wrong_constants_are_counted() -> None:
    found = Constants(compared=9, wrong=[f"constant {n}" for n in range(9)])
    assert failures(found) == [
        "constant 0",
        "constant 1",
        "constant 2",
        "6 more constants differ from the checkpoint's",
    ]
    assert describe_constants(Constants(skipped="no onnx")) == "not compared: no onnx"


def test_a_variant_that_cannot_be_checked_without_rounding_fails(
    variants_bundle: Path, run: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(variants_bundle, broken)
    (broken / "int8/encoder.onnx").write_bytes(b"no graph")
    report, model = EngineReport("ort:int8", "int8"), open_checkpoint(run).load_model()
    compare_unrounded(report, open_bundle(broken, graphs=False), "int8", model, lambda _: EngineReport("ort:int8"))
    (failure,) = report.failures
    assert failure.startswith("without its rounding: ") and "encoder.onnx is damaged" in failure


def test_a_graph_that_cannot_be_read_fails(variants_bundle: Path, run: Path, tmp_path: Path) -> None:
    """Also one that the engine does not run: what was not compared is not what was found equal."""
    broken = tmp_path / "broken"
    shutil.copytree(variants_bundle, broken)
    (broken / "int8/short_rows.onnx").write_bytes(b"no graph")
    gate, report = Gate(open_bundle(broken, graphs=False), run), EngineReport("ort:int8", "int8")
    gate.add_constants(report, gate.bundle.variants["int8"])
    assert "short_rows.onnx is damaged, or tformer did not make it" in report.failures[0]
