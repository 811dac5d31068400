"""Every kind of model, ours and what the importers make, as a program: eager's numbers, or its rounded copy's."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tformer_deploy.base.errors import ArtifactError
from tformer_deploy.bundle.contract import GRAPHS
from tformer_deploy.bundle.manifest import Exported, open_bundle, write_manifest
from tformer_deploy.bundle.recipe import Recipe, load_recipe
from tformer_deploy.check.constants import compare_constants
from tformer_deploy.check.unrounded import unrounded
from tformer_deploy.decoding import Batch
from tformer_deploy.engines import make_engine
from tformer_deploy.engines.base import Engine, Floats
from tformer_deploy.engines.eager import EagerEngine
from tformer_deploy.export.calibrate import Measured, input_ranges, round_model
from tformer_deploy.export.to_onnx import build_program, export_graphs
from tformer_deploy.export.trace import Tracer
from tformer_deploy.importers.base import ImportOptions
from tformer_deploy.importers.run import import_checkpoint
from tformer_deploy.model.checkpoint import Checkpoint, open_checkpoint

from . import import_cases, test_import_ctranslate2, test_import_toolkits
from .configs import CONFIGS
from .conftest import small_config, write_checkpoint
from .hf_folders import FOLDERS, LINES, OPTIONS
from .plain_decoding import make_batch
from .test_seq2seq import make_parallel

pytest.importorskip("tformer_native", reason="tformer-native is not installed: make native")
pytestmark = pytest.mark.long
STEPS, BEAMS = 5, 3
RECIPES = ("native-fp32", "native-int8")
EXACT, FLIPPED = 1e-4, 0.5
"""Largest difference of a log-probability in fp32. In 8 bits: of the root mean square by which rounding moves them, the
share that an fp32 sum in another order may, where it flips a rounding."""


def of_config(name: str, folder: Path) -> Path:
    return write_checkpoint(folder / "run", small_config(**CONFIGS[name]))


def of_tutorial(name: str, folder: Path) -> Path:
    return import_cases.imported(import_cases.CASES[name], folder)[0]


def of_toolkit(name: str, folder: Path) -> Path:
    kind, how = test_import_toolkits.CASES[name]
    made = kind(**how)
    path = made.write(folder)
    import_checkpoint(kind.format, path, folder / "run", made.options(path), comparing=False)
    return folder / "run"


def of_ctranslate2(name: str, folder: Path) -> Path:
    path = test_import_ctranslate2.Model(**test_import_ctranslate2.CASES[name]).write(folder / "model")
    import_checkpoint("ctranslate2", path, folder / "run", comparing=False)
    return folder / "run"


def of_hugging_face(name: str, folder: Path) -> Path:
    options = ImportOptions(**OPTIONS.get(name, {}))
    import_checkpoint("hf", FOLDERS[name](folder / "model"), folder / "run", options, LINES[:2], comparing=False)
    return folder / "run"


MODELS: dict[str, tuple[Callable[[str, Path], Path], Any]] = {
    "ours": (of_config, CONFIGS),
    "tutorial": (of_tutorial, import_cases.CASES),
    "toolkit": (of_toolkit, test_import_toolkits.CASES),
    "ctranslate2": (of_ctranslate2, test_import_ctranslate2.CASES),
    "hf": (of_hugging_face, FOLDERS),
}

EVERY = [(kind, name) for kind, (_, names) in MODELS.items() for name in names]
COUNT = int(os.environ.get("TFORMER_MODELS", "12"))
"""A model takes seconds, most of them to be traced: so many of all are run, at equal distances. 100 is every one."""
ONE_HEAD = ("ours", "gelu by sigmoid, gated, width 36, one head")
CHOSEN = list(dict.fromkeys([*EVERY[:: max(1, len(EVERY) // COUNT)], ONE_HEAD]))


def batch_of(config: Any, sentences: int = 5) -> Batch:
    """Random sources of different lengths."""
    rng = np.random.default_rng(3)
    longest = min(config.max_positions, 12)
    sizes = [longest, *rng.integers(1, longest + 1, sentences - 1)]
    return make_batch([rng.integers(4, config.src_vocab, size).tolist() for size in sizes])


def steps(engine: Engine, batch: Batch, tokens: list[Any], count: int = STEPS) -> list[Floats]:
    """All log-probabilities of some steps, of rows that move, fed `tokens`; where there are none, its own best."""
    state, sentences, found = engine.encode(batch.src_ids, batch.src_lengths), len(batch.src_lengths), []
    for step in range(min(count, engine.config.max_positions)):
        if step == len(tokens):
            own = found[-1].reshape(sentences, -1).argsort(1)[:, -BEAMS:].astype(np.int32) if step else None
            start = np.full((sentences, 1), engine.config.start_id, np.int32)
            tokens.append(start if own is None else own % engine.config.tgt_vocab)
        if step:
            parents = (np.arange(BEAMS) + step) % tokens[step - 1].shape[1]
            rows = np.arange(sentences)[:, None] * tokens[step - 1].shape[1] + parents
            engine.reorder(state, rows.astype(np.int32))
        scores = engine.step(tokens[step], state, full=True)
        assert scores.log_probs is not None
        found.append(scores.log_probs.copy())
    return found


def apart(some: list[Floats], others: list[Floats], power: float = 2) -> float:
    """Mean difference of two lists of arrays, of a power; the largest for an infinite one."""
    off = np.concatenate([np.abs(a - b).ravel() for a, b in zip(some, others, strict=True)])
    return float(off.max() if math.isinf(power) else (off**power).mean() ** (1 / power))


def export_programs(checkpoint: Checkpoint, folder: Path, ranges: Any, named: Mapping[str, Recipe]) -> None:
    """A bundle of programs. Of its standard graphs only the names are there, as they take time and nobody runs them."""
    folder.mkdir()
    config = checkpoint.config
    recipes = {name: recipe.for_model(config) for name, recipe in named.items()}
    tokenizers = checkpoint.tokenizers.save(folder)
    for name in GRAPHS:
        (folder / f"{name}.onnx").touch()
    tracer = Tracer(checkpoint.load_model().eval())
    for name, recipe in recipes.items():
        identity = checkpoint.weights_sha256, ranges, checkpoint.tokenizer_hashes
        export_graphs(tracer, recipe, folder / name, *identity)
    about = {"path": "nowhere", "weights_sha256": checkpoint.weights_sha256}
    measured = {name: Measured(ranges, [], {}).described() for name in recipes} if ranges else {}
    exported = Exported(config, tokenizers, about, measured=measured)
    write_manifest(folder, {"": Recipe().for_model(config), **recipes}, exported)


@pytest.mark.parametrize(("kind", "name"), CHOSEN)
def test_programs_compute_what_the_model_does(kind: str, name: str, tmp_path: Path) -> None:
    """In fp32 eager's numbers; in 8 bits those of the copy that calibration rounds as the graphs of `int8` do."""
    checkpoint = open_checkpoint(MODELS[kind][0](name, tmp_path))
    model, config = checkpoint.load_model().eval(), checkpoint.config
    batch, tokens = batch_of(config), list[Any]()
    with EagerEngine(model) as eager:
        expected = {"native-fp32": steps(eager, batch, tokens)}
    ranges = input_ranges(model, [ids[:n].tolist() for ids, n in zip(batch.src_ids, batch.src_lengths, strict=True)])
    with EagerEngine(round_model(model, load_recipe("int8"), ranges)) as rounded:
        expected["native-int8"] = steps(rounded, batch, tokens)
    export_programs(checkpoint, tmp_path / "bundle", ranges, {name: load_recipe(name) for name in RECIPES})
    bundle = open_bundle(tmp_path / "bundle", graphs=False)
    found = {}
    for recipe in RECIPES:
        with make_engine(f"native:{recipe}", bundle, threads=1) as engine:
            found[recipe] = steps(engine, batch, tokens)
    exact, rounded = expected.values()
    assert apart(found["native-fp32"], exact, math.inf) < EXACT
    assert apart(found["native-int8"], rounded) < FLIPPED * apart(exact, rounded)
    for recipe in RECIPES:
        constants = compare_constants(bundle, recipe, bundle.variants[recipe], model)
        assert not constants.wrong and not constants.unknown and constants.equal == constants.compared > 10
    with (
        unrounded(bundle, "native-int8", model) as plain,
        make_engine("native:native-int8", plain, threads=1) as engine,
    ):
        assert apart(steps(engine, batch, tokens), exact, math.inf) < EXACT


def test_rotary_positions_are_refused_by_name() -> None:
    """A module of somebody else that follows the protocol; in ONNX Runtime it runs, see test_seq2seq.py."""
    model = make_parallel(small_config())
    recipe = load_recipe("native-fp32").for_model(model.config)
    with pytest.raises(ArtifactError, match=r"native does not know \w+ \S*, which reads \S+: use a recipe of ort-cpu"):
        build_program(Tracer(model), recipe, {})
