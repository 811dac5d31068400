"""Models that were trained for 8 bits: their scales, from Marian's file to programs and graphs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tformer_deploy.base.errors import ArtifactError, ConfigError
from tformer_deploy.bundle.contract import PROGRAM
from tformer_deploy.bundle.manifest import open_bundle
from tformer_deploy.bundle.recipe import Recipe, load_recipe
from tformer_deploy.check.constants import compare_constants, trained_scales_off
from tformer_deploy.check.unrounded import unrounded
from tformer_deploy.engines import make_engine
from tformer_deploy.engines.eager import EagerEngine
from tformer_deploy.export.calibrate import input_ranges, round_model, trained_ranges
from tformer_deploy.export.checked import export_checked
from tformer_deploy.export.quantizing import Range
from tformer_deploy.importers.run import import_checkpoint
from tformer_deploy.model.checkpoint import Checkpoint, Steps, open_checkpoint

from .command import run_here
from .conftest import small_config, write_checkpoint
from .plain_toolkits import Marian
from .test_native_models import EXACT, FLIPPED, apart, batch_of, export_programs, steps

FACTOR = 60
"""What inputs are multiplied by before they are rounded. Those beyond 127 / 60 are cut off, which some are."""
TRAINED = "native-int8-trained"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student in Marian's file of 8 bits."""
    folder = tmp_path_factory.mktemp("student")
    model = Marian(ssru=True, pre=False, tied=True, int8=True, range=FACTOR)
    path = model.write(folder)
    import_checkpoint("marian", path, folder / "run", model.options(path), comparing=False)
    return folder / "run"


def sources(checkpoint: Checkpoint) -> list[list[int]]:
    batch = batch_of(checkpoint.config)
    return [ids[:n].tolist() for ids, n in zip(batch.src_ids, batch.src_lengths, strict=True)]


def test_every_layer_has_the_steps_of_the_file(run: Path) -> None:
    checkpoint = open_checkpoint(run)
    found, model = checkpoint.steps, checkpoint.load_model()
    assert found is not None
    linear = {
        name for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, torch.nn.Linear)
    }
    tables = {"src_embedding", "tgt_embedding"}
    assert found.inputs == dict.fromkeys(linear, pytest.approx(1 / FACTOR))
    assert found.weights.keys() == linear | tables
    for name, step in found.weights.items():
        integers = model.get_submodule(name).weight.detach() / step  # type: ignore[operator]
        assert torch.allclose(integers, integers.round(), atol=1e-3) and integers.abs().max() < 127.01


def test_a_program_rounds_as_the_model_was_trained(run: Path, tmp_path: Path) -> None:
    """Against PyTorch that rounds by the file's scales; without rounding the program is eager's."""
    pytest.importorskip("tformer_native", reason="tformer-native is not installed: make native")
    checkpoint = open_checkpoint(run)
    model, batch, tokens = checkpoint.load_model(), batch_of(checkpoint.config), list[Any]()
    assert checkpoint.steps is not None
    ranges = trained_ranges(model, checkpoint.steps, input_ranges(model, sources(checkpoint)))
    with EagerEngine(model) as eager:
        exact = steps(eager, batch, tokens)
    with EagerEngine(round_model(model, load_recipe(TRAINED), ranges)) as eager:
        rounded = steps(eager, batch, tokens)
    export_programs(checkpoint, tmp_path / "bundle", ranges, {TRAINED: load_recipe(TRAINED)})
    bundle = open_bundle(tmp_path / "bundle", graphs=False)
    with make_engine(f"native:{TRAINED}", bundle, threads=1) as engine:
        assert apart(steps(engine, batch, tokens), rounded) < FLIPPED * apart(exact, rounded)
    constants = compare_constants(bundle, TRAINED, bundle.variants[TRAINED], model)
    assert not constants.wrong and not constants.unknown and constants.equal == constants.compared > 10
    with unrounded(bundle, TRAINED, model) as plain, make_engine(f"native:{TRAINED}", plain, threads=1) as engine:
        assert apart(steps(engine, batch, tokens), exact, math.inf) < EXACT
    path = tmp_path / "bundle" / TRAINED / PROGRAM
    whole = json.loads(path.read_text())
    for key, value in (("most", 255), ("step", 1 / 61), ("zero", 128)):
        changed = json.loads(path.read_text())
        for each in changed["graphs"]["encoder"]["code"]:
            if "rounding" in each:
                each["rounding"][key] = value
        path.write_text(json.dumps(changed))
        assert "rounding of the input" in compare_constants(bundle, TRAINED, bundle.variants[TRAINED], model).wrong[0]
        path.write_text(json.dumps(whole))
    measured = bundle.manifest["variants"][TRAINED]
    assert trained_scales_off(measured, checkpoint.steps) == []
    assert "no scales of training" in trained_scales_off(measured, None)[0]
    (wrong,) = trained_scales_off(measured, checkpoint.steps._replace(inputs={"output": 0.5}))
    assert "other scales of output" in wrong
    measured["scales"]["encoder.0.ff.up"] *= 1.01
    assert "other scales of encoder.0.ff.up" in trained_scales_off(measured, checkpoint.steps)[0]
    assert "encoder.0.ff.up" in compare_constants(bundle, TRAINED, bundle.variants[TRAINED], model).wrong[0]


@pytest.mark.long
def test_the_gate_takes_it_in_every_engine(run: Path, tmp_path: Path) -> None:
    """The same scales in ONNX Runtime's graphs."""
    recipe = tmp_path / "ort-trained.toml"
    lines = ('target = "ort-cpu"', 'precision = "int8"', 'scales = "trained"', 'cache = "static"')
    wide = ("[tolerance]", "tokens = false", "encoder = 10.0", "scores = 20.0", "top1 = 0.9")
    recipe.write_text("\n".join((*lines, *wide)))
    names = ["fp32", str(recipe), *([TRAINED] if native() else [])]
    report = export_checked(run, tmp_path / "bundle", names)
    assert report.passed and not report.left_out
    assert len({engine.engine for engine in report.engines}) >= len(names)


def native() -> bool:
    try:
        import tformer_native  # noqa: F401
    except ImportError:
        return False
    return True


def test_a_model_without_them_is_refused(tmp_path: Path) -> None:
    plain = write_checkpoint(tmp_path / "run", small_config())
    failed = run_here("export", plain, "--out", tmp_path / "out", "--recipe", TRAINED)
    assert failed.returncode == 1 and b"was not trained for 8 bits" in failed.stderr


def test_steps_of_every_layer_are_needed(run: Path) -> None:
    model = open_checkpoint(run).load_model()
    with pytest.raises(ConfigError, match=r"the model has no steps of \w+_embedding"):
        trained_ranges(model, Steps({}, {"output": 0.1}), {})
    with pytest.raises(ConfigError, match="the model has no steps of output"):
        trained_ranges(model, Steps({}, {}), {"output": Range(-1, 1)})


@pytest.mark.parametrize(
    "steps", [{}, {"inputs": {}}, {"inputs": {"a": 0.0}, "weights": {}}, {"inputs": [], "weights": {}}]
)
def test_damaged_steps(run: Path, tmp_path: Path, steps: Any) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for path in run.rglob("*"):
        if path.is_file():
            (folder / path.relative_to(run)).parent.mkdir(exist_ok=True)
            (folder / path.relative_to(run)).write_bytes(path.read_bytes())
    header = json.loads((folder / "checkpoint.json").read_text())
    from tformer_deploy.base.headers import digest

    body = {**{key: value for key, value in header.items() if key != "sha256"}, "steps": steps}
    (folder / "checkpoint.json").write_text(json.dumps({**body, "sha256": digest(body)}))
    with pytest.raises(ArtifactError, match="steps"):
        open_checkpoint(folder)


@pytest.mark.parametrize("wrong", [{"precision": "fp32"}, {"precision": "int8", "group_size": 32}])
def test_only_int8_by_channels_has_them(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="scales=trained"):
        Recipe(target="native", cache="static", scales="trained", **wrong)
