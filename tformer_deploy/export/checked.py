"""Checkpoint to bundle: export, check, drop the variants that failed, then move the folder into place."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from ..base.errors import ConfigError, DataError, ParityError
from ..base.files import atomic_directory
from ..base.headers import is_of
from ..base.notes import Progress, note, unseen
from ..base.settings import from_dict
from ..bundle.manifest import MANIFEST, Exported, add_report, open_bundle, write_manifest
from ..bundle.recipe import Recipe, load_recipe, narrowest
from ..bundle.text import require_fit
from ..check import Corpus, EngineReport, Gate, Report, make_corpus, translations
from ..decoding import DecodeOptions
from ..engines import STANDARD, EngineName, expand, exported_engines, load_exported
from ..engines.eager import NO_ENCODER
from ..model.checkpoint import Checkpoint, Steps, open_source
from ..model.config import ModelConfig
from ..model.modules.probe import calling, require_positions
from ..model.modules.running import UserCheckpoint, made_again
from ..model.seq2seq import Seq2Seq
from .calibrate import NOISE_SENTENCES, SENTENCES, Measured, input_ranges, measure, trained_ranges
from .save import weights_read
from .to_onnx import export_graphs
from .trace import Tracer


@dataclass(frozen=True)
class Texts:
    """What an export reads, one sentence a line."""

    src: Path | None = None
    """To check with; some of it calibrates where nothing else does. None: generated ids."""
    tgt: Path | None = None
    """Its translation: BLEU decides as well."""
    calibrate: Path | None = None
    """To calibrate quantized variants with."""


@dataclass(frozen=True)
class Calibration:
    """Sources for calibration; none of them is checked."""

    sources: list[list[int]]
    places: list[int]
    """Of the corpus that is left to check."""
    line: str
    """How the text was divided, for the report."""


def export_checked(
    run: Path,
    out: Path,
    recipes: Sequence[str] = (STANDARD,),
    texts: Texts | Path | None = None,
    force: bool = False,
    progress: Progress = unseen,
    memory: bool = False,
) -> Report:
    """Make a bundle of a checkpoint and check every engine of it against eager PyTorch.

    It always has the standard graphs; recipes of another target add variants. What runs where no variant is named is
    the first recipe. `texts`: a path is that of `Texts.src`. `memory`: also a graph for the encoder alone, of every
    recipe but of target `trt`. Raises ParityError with the report where something fails: the standard graphs, and
    nothing is left; or variants, which are left out of the bundle and listed in `Report.left_out`. Raises ArtifactError
    where `out` exists without `force`.
    """
    texts = texts if isinstance(texts, Texts) else Texts(texts)
    checkpoint = open_source(run)
    require_fit(checkpoint.config, checkpoint.tokenizers, f"{run}: ")
    from_dict(DecodeOptions, checkpoint.decoding, "decoding")
    chosen = _exportable(checkpoint, recipes, memory)
    corpus, targets, calibration = _read(texts, checkpoint, chosen)
    again = made_again(checkpoint) if isinstance(checkpoint, UserCheckpoint) else None
    with atomic_directory(out, force, "bundle", lambda folder: is_of(folder, MANIFEST, "tformer-bundle")) as directory:
        description = checkpoint.tokenizers.save(directory)
        measured = _write_graphs(directory, str(run), checkpoint, chosen, calibration, progress)
        place = os.path.relpath(os.path.realpath(run), os.path.realpath(out))
        exported = Exported(
            checkpoint.config,
            description,
            checkpoint={"path": place, "weights_sha256": checkpoint.weights_sha256},
            versions={name: version(name) for name in ("torch", "onnx", "onnxscript")},
            measured={name: each.described() for name, each in measured.items()},
            weights=weights_read(directory),
            decoding=checkpoint.decoding,
        )
        write_manifest(directory, chosen, exported)
        bundle = open_bundle(directory)
        gate = Gate(bundle, checkpoint.directory, progress=progress)
        if again:
            gate.use(again)
        report = gate.run(expand(exported_engines(bundle), [], bundle), gate.reference(corpus), targets)
        report.calibration = calibration.line
        if failures := [f"{each.engine}: {failure}" for each in _of(report, "") for failure in each.failures]:
            own = isinstance(checkpoint, UserCheckpoint)
            hint = "; what a module must not do is in docs/your-model.md" if own else ""
            raise ParityError(f"{out} not written, the check failed: {'; '.join(failures)}{hint}", report)
        report.left_out = left_out(report, chosen)
        _keep_what_passed(directory, report, chosen, exported)
    if report.left_out:
        lines = [f"variant {name} left out: {why}" for name, why in report.left_out.items()]
        raise ParityError(f"{out} written, {'; '.join(lines)}", report)
    return report


def _exportable(checkpoint: Checkpoint | UserCheckpoint, recipes: Sequence[str], memory: bool) -> dict[str, Recipe]:
    """The recipes, as this model and this machine can follow them. Raises ConfigError."""
    chosen = choose(recipes, checkpoint.config)
    if memory or not checkpoint.config.decoder_layers:
        chosen = {name: dataclasses.replace(each, memory=each.has_memory) for name, each in chosen.items()}
    if isinstance(checkpoint, UserCheckpoint):
        require_exportable(checkpoint, chosen)
    for name, recipe in chosen.items():
        if recipe.scales == "trained" and (isinstance(checkpoint, UserCheckpoint) or checkpoint.steps is None):
            raise ConfigError(
                f"recipe {name}: {checkpoint.directory} was not trained for 8 bits (docs/train.md, train.quantize): "
                "take a recipe with scales = 'measured', such as native-int8"
            )
    load_exported(recipe.target for recipe in chosen.values())  # fail before the long work if they are not installed
    return chosen


def _write_graphs(
    directory: Path,
    run: str,
    checkpoint: Checkpoint | UserCheckpoint,
    chosen: Mapping[str, Recipe],
    calibration: Calibration,
    progress: Progress,
) -> dict[str, Measured]:
    """Write the graphs of every recipe; returns what calibration measured for those that round."""
    model, own = checkpoint.load_model(), isinstance(checkpoint, UserCheckpoint)
    with calling(run, "calibration of the module") if own else nullcontext():
        progress(stage="calibration")
        steps = None if isinstance(checkpoint, UserCheckpoint) else checkpoint.steps
        measured = _measured(model, chosen, calibration, steps)
    tracer = Tracer(model)
    for name, recipe in chosen.items():
        own_ranges = measured[name].ranges if name in measured else None
        identity = checkpoint.weights_sha256, own_ranges, checkpoint.tokenizer_hashes
        progress(stage=f"graphs of {name or STANDARD}")
        with calling(run, "torch.export of the module") if own else nullcontext():
            export_graphs(tracer, recipe, directory / name, *identity)
    return measured


def _keep_what_passed(directory: Path, report: Report, chosen: Mapping[str, Recipe], exported: Exported) -> None:
    """Remove the variants that a report leaves out from the folder and its manifest, and store the rest of it."""
    passed = {name: recipe for name, recipe in chosen.items() if name not in report.left_out}
    if report.left_out:
        for name in report.left_out:
            shutil.rmtree(directory / name)
        write_manifest(directory, passed, exported)
    engines = [engine for engine in report.engines if EngineName(engine.engine).variant in passed]
    add_report(directory, dataclasses.replace(report, engines=engines).to_json())


def _measured(
    model: Seq2Seq, chosen: Mapping[str, Recipe], calibration: Calibration, steps: Steps | None
) -> dict[str, Measured]:
    """What calibration measures for each recipe that rounds; `steps`: of the checkpoint."""
    ranges = input_ranges(model, calibration.sources) if calibration.sources else {}
    found: dict[object, Measured] = {}  # recipes that round alike are measured once
    lossy = {name: recipe for name, recipe in chosen.items() if recipe.quantized}
    for recipe in lossy.values():
        if recipe.rounding not in found:
            own = trained_ranges(model, steps, ranges) if steps and recipe.scales == "trained" else ranges
            found[recipe.rounding] = measure(model, recipe, own, calibration.sources)
    return {name: found[recipe.rounding] for name, recipe in lossy.items()}


def _of(report: Report, variant: str) -> list[EngineReport]:
    """The engines that ran a variant, or the standard graphs ("")."""
    return [engine for engine in report.engines if EngineName(engine.engine).variant == variant]


WIDER = "widen the limit that is named in a recipe of your own"
SHOWN = 3
"""Failures shown in a variant's line."""


def left_out(report: Report, chosen: Mapping[str, Recipe]) -> dict[str, str]:
    """One line for each variant that failed: which limit it exceeds, and what to do."""
    found: dict[str, str] = {}
    for name, recipe in chosen.items():
        failures = [failure for engine in _of(report, name) for failure in engine.failures]
        if name and failures:
            more = f"; and {len(failures) - SHOWN} more" if len(failures) > SHOWN else ""
            found[name] = f"{'; '.join(failures[:SHOWN])}{more}: {_way_out(recipe)}"
    return found


def _way_out(recipe: Recipe) -> str:
    """What to do about a variant that fails."""
    if recipe.quantized:
        text = "calibrate with more text like that to be translated (--calibrate)"
        return f"{text}, take a recipe of more bits, or {WIDER}"
    return "leave its recipe out, or report it as a bug" if recipe.tolerance.tokens else f"take fp32, or {WIDER}"


def require_exportable(checkpoint: UserCheckpoint, chosen: Mapping[str, Recipe]) -> None:
    """Raise ConfigError for a module that has no room for its sizes, and for recipes that need keys and values of one
    that has none; say what would be faster."""
    require_positions(checkpoint.model, str(checkpoint.directory))
    if not checkpoint.config.module_parameters:
        for name in [name for name, recipe in chosen.items() if recipe.attention and not checkpoint.notes_attention]:
            raise ConfigError(
                f"recipe {name or 'with attention'}: step of {checkpoint.directory} notes no attention in layers: note "
                "it, as seq2seq.Seq2Seq says, or leave the recipe out"
            )
        return
    for name, recipe in chosen.items():
        if recipe.memory and not checkpoint.encodes:
            raise ConfigError(f"memory of {checkpoint.directory}: {NO_ENCODER}, or leave out --memory")
        if not checkpoint.config.decoder_layers and (recipe.target != "onnx" or recipe.attention):
            what = f"recipe {name or 'with attention'}"
            raise ConfigError(f"{what}: {checkpoint.directory} is an encoder alone, for recipe fp32: leave it out")
        if recipe.target != "onnx" or recipe.attention:
            needs = "the attention" if recipe.attention else "keys and values"
            raise ConfigError(
                f"recipe {name or 'with attention'}: it needs {needs} of every layer, which {checkpoint.directory} "
                "does not give: leave it out, or return a module that follows seq2seq.Seq2Seq, see docs/your-model.md"
            )
    if checkpoint.advice:
        note(
            f"{checkpoint.directory}: every step runs the whole prefix again; {checkpoint.advice} of UserModel make it "
            "faster, see docs/your-model.md"
        )
    if checkpoint.looks_ahead:
        note(
            f"{checkpoint.directory}: a token's score changes with the tokens after it; a decoder that was trained so "
            "saw what it had to predict: give it a causal mask, and train it again"
        )


def _read(
    texts: Texts, checkpoint: Checkpoint | UserCheckpoint, chosen: Mapping[str, Recipe]
) -> tuple[Corpus, list[str], Calibration]:
    """What is checked, its translation, and what calibrates. Raises ConfigError, DataError."""
    if texts.tgt and not checkpoint.config.decoder_layers:
        raise ConfigError(f"--tgt: {checkpoint.directory} is an encoder alone, which translates nothing: leave it out")
    if texts.tgt and not texts.src:
        raise ConfigError("--tgt needs the sources it translates: add --src")
    lossy = any(recipe.quantized for recipe in chosen.values())
    if texts.calibrate and not lossy:
        raise ConfigError("--calibrate: no recipe quantizes: leave it out, or add --recipe int8")
    narrow = checkpoint.config, narrowest(chosen.values()), checkpoint.tokenizers
    corpus = make_corpus(*narrow, texts.src)
    targets = translations(texts.src, texts.tgt) if texts.tgt else []
    if not lossy:
        calibration = Calibration([], list(range(len(corpus.sources))), "")
    elif texts.calibrate or not texts.src:
        other = make_corpus(*narrow, texts.calibrate, seed=1)
        calibration = calibration_from(other, corpus)
    else:
        calibration = calibration_split(corpus)
    corpus.sources = [corpus.sources[i] for i in calibration.places]
    corpus.lines = [corpus.lines[i] for i in calibration.places] if corpus.lines else []
    return corpus, [targets[i] for i in calibration.places] if targets else [], calibration


def calibration_from(other: Corpus, corpus: Corpus) -> Calibration:
    """Text of its own calibrates, without what is checked. Raises DataError where nothing is left."""
    checked = set(map(tuple, corpus.sources))
    sources = [source for source in other.sources if tuple(source) not in checked][:SENTENCES]
    if not sources:
        raise DataError(f"--calibrate: every line of {other.name} is checked as well: give other text")
    line = f"calibrated with {len(sources)} sentences of {other.name}, none of which is checked"
    return Calibration(sources, list(range(len(corpus.sources))), line + _few(len(sources)))


def calibration_split(corpus: Corpus) -> Calibration:
    """At most half of a text calibrates, sentences at equal distances; the rest is checked.

    Raises DataError for a text of one sentence.
    """
    different = list(dict.fromkeys(map(tuple, corpus.sources)))
    count = min(SENTENCES, len(different) // 2)
    if not count:
        raise DataError(f"{corpus.name}: one sentence cannot both calibrate and be checked: add lines, or --calibrate")
    picked = [different[i * len(different) // count] for i in range(count)]
    left = set(different).difference(picked)
    places = [i for i, source in enumerate(corpus.sources) if tuple(source) in left]
    line = f"calibrated with {count} sentences of {corpus.name}, checked with {len(places)} others"
    return Calibration([list(source) for source in picked], places, line + _few(count))


def _few(count: int) -> str:
    enough = count >= NOISE_SENTENCES
    return "" if enough else f"; fewer than {NOISE_SENTENCES} may miss how large values get: add text with --calibrate"


def choose(names: Sequence[str], config: ModelConfig) -> dict[str, Recipe]:
    """Recipes by the folder that their graphs get: "" for the standard ones, else the recipe's name.

    The first of `names` comes first. Raises ConfigError where two recipes want the same folder.
    """
    chosen: dict[str, Recipe] = {}
    for name in names:
        recipe, stem = load_recipe(name).for_model(config), Path(name).stem
        folder = "" if recipe.target == "onnx" else stem
        if folder in chosen:
            taken = f"variant {folder}" if folder else "standard graphs"
            raise ConfigError(f"recipe {name}: the bundle has {taken} already: leave one out or rename its file")
        if folder and (stem == STANDARD or not re.fullmatch(r"[A-Za-z0-9][\w-]*", stem)):
            raise ConfigError(f"recipe {name}: a variant cannot be called '{stem}': rename the file")
        chosen[folder] = recipe
    return chosen if "" in chosen else {**chosen, "": load_recipe(STANDARD).for_model(config)}
