"""The steps from a teacher to a checked student: what each makes, by the functions of the verbs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ...base.errors import ConfigError, Interrupted, ParityError
from ...base.files import hold, scratch, sha256, write_json, write_output
from ...base.headers import is_of, read_json
from ...base.notes import note
from ...base.settings import check_whole
from ...bench.measure import some
from ...bench.plan import MOST_ROUNDS
from ...bundle.manifest import MANIFEST, open_bundle
from ...bundle.recipe import load_recipe
from ...engines import ENGINES, STANDARD, EngineName, engine_name
from ...engines.spec import EngineSpec
from ...export.checked import Texts, export_checked
from ...model.checkpoint import HEADER, open_checkpoint, open_source
from ...model.config import ModelConfig
from ...model.modules.running import UserCheckpoint
from ...translate.corpus.progress import Progress
from ...translate.distill import REPORT, SRC, TGT, DistillOptions, Filters, distill
from ...translate.opening import TranslatorOptions
from ..data import DataConfig, EncodedPairs, Parallel, read_parallel
from ..metrics import read_metrics
from ..run_files import METRICS, STATE
from ..runs import RunSettings, check_settings, only_process, resume_run, start_run
from ..teacher import require_taught
from .page import student_page
from .record import Record, Step
from .report import Measured, StudentReport, make_report, read_report

JSON, HTML = "report.json", "report.html"
SIDES = ("valid-src", "valid-tgt")
EXACT = {"ort-cpu": "fp32-cpu", "native": "native-fp32"}
"""Target of an engine → the recipe of it that rounds nothing."""
CHECKED, CALIBRATING = 500, 1000
"""Most lines of the validation text that the student's bundle is checked with, and of its own text that calibrate."""
Pair = tuple[Path, Path]


@dataclass(frozen=True)
class StudentOptions:
    """A teacher, text, and what is made of them."""

    teacher: Path
    """A run folder, FILE.py:FUNCTION, or a bundle."""
    out: Path
    src: Sequence[Path]
    valid: Pair
    run: RunSettings
    """With `teacher`: probabilities of the teacher are learned too."""
    tgt: Sequence[Path] = ()
    test: Pair | None = None
    choose: str = "score"
    filters: Filters = field(default_factory=Filters)
    backend: str = "ort"
    """Of the distillation and the report."""
    decoding: Mapping[str, Any] = field(default_factory=dict)
    """Of the distillation: fields of `DecodeOptions`."""
    recipes: Sequence[str] = ()
    """Of the student; none: the exact one of the backend."""
    rounds: int = 3
    """In which both models are timed."""
    force: bool = False
    """Make again what was made with other options, and what follows it."""

    def __post_init__(self) -> None:
        check_whole("rounds", self.rounds, 1, MOST_ROUNDS)
        if self.spec.plans or not self.spec.measured:
            raise ConfigError(f"--backend {self.backend}: bundles of new models do not run on it: use ort or native")
        if self.teacher.resolve().is_relative_to(self.out.resolve()):
            raise ConfigError(f"{self.teacher} lies in the folder that is made: name another with --out")

    @property
    def spec(self) -> EngineSpec:
        """The engine that distils."""
        return EngineName(self.backend).spec

    @property
    def exact(self) -> list[str]:
        """The recipe that rounds nothing and is fast on the backend."""
        return [EXACT[target] for target in self.spec.targets if target in EXACT] or [STANDARD]


def make_student(options: StudentOptions) -> StudentReport:
    """Make what is missing; after a kill, the same call continues. Raises TformerError."""
    return Student(options).make()


class Student:
    """The steps of one call. Making it refuses what cannot work, before the long work starts."""

    def __init__(self, options: StudentOptions) -> None:
        self.options, run = options, options.run
        made = (options.out / "text" / name for name in (SRC, TGT))
        self.data = DataConfig(*map(str, (*made, *options.valid)))
        self.settings = check_settings(run, self.data)
        self.recipes = {name: load_recipe(name) for name in options.recipes or options.exact}
        for name, recipe in self.recipes.items():
            if recipe.scales == "trained" and self.settings.quantize == "none":
                raise ConfigError(f"--recipe {name} takes steps that training learns: add --set train.quantize=int8")
        for path in options.src:
            if not path.stat().st_size:
                raise ConfigError(f"{path} has no line: name text to translate with --src")
        pairs = {"validation": options.valid, **({"test": options.test} if options.test else {})}
        self.texts = {name: read_parallel(*pair) for name, pair in pairs.items()}
        self.is_bundle = is_of(options.teacher, MANIFEST, "tformer-bundle")
        self.teacher = options.teacher if self.is_bundle else options.out / "teacher"
        self.teacher_recipes = options.exact
        translator = TranslatorOptions(self.teacher, options.backend, workers=0, decoding=dict(options.decoding))
        rest = options.out / "text", options.tgt, options.choose, options.filters
        self.distilling = DistillOptions(translator, options.src, *rest)
        teacher = {"TEACHER": self._opened()}
        self.asked: dict[str, dict[str, Any]] = {
            "teacher": teacher,
            "text": {
                **teacher,
                "--src": [*map(sha256, options.src)],
                "--tgt": [*map(sha256, options.tgt)],
                "--choose": options.choose,
                "--filter": asdict(options.filters),
                "--backend": options.backend,
                **{f"--{name.replace('_', '-')}": value for name, value in options.decoding.items()},
            },
            "run": {
                **{f"--{side}": sha256(path) for side, path in zip(SIDES, options.valid, strict=True)},
                **{"--preset": run.preset, "--tokenizer": run.tokenizer, "--vocab-size": run.vocab_size},
                **{f"--set model.{name}": value for name, value in run.model.items()},
                **{f"--set train.{name}": value for name, value in run.train.items()},
            },
            "bundle": {"--recipe": {name: asdict(recipe) for name, recipe in self.recipes.items()}},
            "report": {"--rounds": options.rounds, "--test-src": [*map(sha256, options.test or ())]},
        }
        self.left_out: dict[str, str] = {}
        """Variants of the student's bundle."""

    def make(self) -> StudentReport:
        """Run the steps."""
        out = self.options.out
        steps = [
            Step("teacher", self._export_teacher, [MANIFEST], open_bundle),
            Step("text", self._distill, [SRC, TGT, REPORT]),
            Step("run", self._train, [HEADER], open_checkpoint),
            Step("bundle", self._export_student, [MANIFEST], open_bundle),
            Step("report", self._report, [JSON, HTML], cheap=True),
        ]
        out.mkdir(parents=True, exist_ok=True)
        with hold(out):
            record = Record(out, self.options.force)
            try:
                for step in steps[self.is_bundle :]:
                    made = record.run(step, self.asked[step.name])
                    if step.name == "bundle":
                        self.left_out = dict(made.get("left_out", {}))
            except (KeyboardInterrupt, Interrupted):
                raise Interrupted(f"what is made stays in {out}: run the same command again") from None
        return read_report(out / "report" / JSON)

    def _opened(self) -> str:
        """Open the teacher; returns the SHA-256 that identifies it."""
        teacher, run = self.options.teacher, self.options.run
        if self.is_bundle:
            if run.teacher:
                raise ConfigError(f"{teacher} is a bundle: train.teacher_weight needs the run folder that it is of")
            bundle = open_bundle(teacher)
            bundle.require_decoder()
            self.options.spec.require(bundle)
            return sha256(teacher / MANIFEST)
        checkpoint = open_source(teacher)
        if not checkpoint.config.decoder_layers:
            raise ConfigError(f"{teacher} is an encoder alone, which translates nothing: name another teacher")
        if isinstance(checkpoint, UserCheckpoint):
            if run.teacher:
                raise ConfigError(f"{teacher} is no run folder, which train.teacher_weight needs: leave that out")
            self.teacher_recipes = [STANDARD]
        if run.teacher:
            longest = run.model.get("max_positions", ModelConfig.max_positions)
            require_taught(min(self.settings.max_tokens, longest), checkpoint.config)
        return checkpoint.weights_sha256

    def _export_teacher(self, folder: Path, replaces: bool, continued: bool) -> Mapping[str, Any]:
        made = _exported(self.options.teacher, folder, self.teacher_recipes, Texts(), replaces)
        for name, why in made.get("left_out", {}).items():  # the standard graphs translate
            note(f"{folder}: variant {name} left out: {why}")
        return made

    def _distill(self, folder: Path, replaces: bool, continued: bool) -> Mapping[str, Any]:
        progress = Progress()
        progress.tell(lambda: note(progress.line()))
        distill(replace(self.distilling, force=replaces and not continued), progress)
        return {}

    def _train(self, folder: Path, replaces: bool, continued: bool) -> Mapping[str, Any]:
        with only_process(folder):
            if continued and (folder / STATE).exists():
                trainer = resume_run(folder, teacher=self.options.run.teacher, data=self.data)
            else:
                trainer = start_run(folder, self.data, self.options.run, replaces)
            trainer.run()
        return {}

    def _export_student(self, folder: Path, replaces: bool, continued: bool) -> Mapping[str, Any]:
        """Checked with validation text, calibrated with distilled text, as far as the student can read them."""
        run = folder.parent / "run"
        student, made = open_checkpoint(run), self.distilling.out
        longest = min(self.settings.max_tokens, student.config.max_positions)
        with scratch("tformer-student") as place:
            files = {name: place / name for name in ("valid.src", "valid.tgt", "train.src")}
            checked = EncodedPairs(self.texts["validation"], student.tokenizers, longest).text
            calibrating = some(read_parallel(made / SRC, made / TGT).src, CALIBRATING)
            fitting = [line for line in calibrating if len(student.tokenizers.source_ids(line)) <= longest]
            for path, lines in zip(files.values(), (*_some_pairs(checked), fitting), strict=True):
                path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            quantized = any(recipe.quantized for recipe in self.recipes.values())
            texts = Texts(files["valid.src"], files["valid.tgt"], files["train.src"] if quantized else None)
            return _exported(run, folder, [*self.recipes], texts, replaces)

    def _report(self, folder: Path, replaces: bool, continued: bool) -> Mapping[str, Any]:
        bundles = {"teacher": open_bundle(self.teacher), "student": open_bundle(folder.parent / "bundle")}
        recipe, first = next(iter(self.recipes.items()))
        target = "onnx" if Path(recipe).stem in self.left_out else first.target
        specs = [self.options.spec, *ENGINES]
        own = next(each for each in specs if each.measured and (each.reference or target in each.targets))
        models = [
            Measured(name, bundle, engine_name(spec.name, None, bundle))
            for (name, bundle), spec in zip(bundles.items(), (self.options.spec, own), strict=True)
        ]
        usual = int(bundles["teacher"].decoding.get("beams", 1))
        widths = sorted({1, int(self.options.decoding.get("beams", usual))})
        report = make_report(models, self.texts, widths, self.options.rounds)
        report.left_out = self.left_out
        report.distillation = {**read_json(self.distilling.out, REPORT), "teacher": str(self.options.teacher)}
        report.metrics = read_metrics(folder.parent / "run" / METRICS)
        write_json(folder / JSON, asdict(report))
        write_output(folder / HTML, student_page(report))
        return {}


def _exported(run: Path, out: Path, recipes: Sequence[str], texts: Texts, force: bool) -> Mapping[str, Any]:
    """Export; a variant that fails its check is left out of the bundle, and recorded. Raises ParityError."""
    try:
        export_checked(run, out, recipes, texts, force)
    except ParityError as error:
        if error.report is None or not error.report.left_out:
            raise
        return {"left_out": error.report.left_out}
    return {}


def _some_pairs(text: Parallel) -> tuple[list[str], list[str]]:
    pairs = some([*zip(text.src, text.tgt, strict=True)], CHECKED)
    return [src for src, _ in pairs], [tgt for _, tgt in pairs]
