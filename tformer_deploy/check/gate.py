"""The gate: runs eager PyTorch once, then compares every engine with its outputs."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import numpy as np

from .. import __version__
from ..base.errors import (
    ArtifactError,
    ConfigError,
    EngineError,
    LimitError,
    MissingExtra,
    OtherTokenizers,
    ParityError,
    missing_extra,
)
from ..base.machine import cores
from ..base.notes import Progress, unseen
from ..bundle.manifest import Bundle
from ..bundle.recipe import Recipe, Tolerance, narrowest, own_limits
from ..bundle.shortlist import open_shortlist
from ..engines import PACKAGES, EngineName, explain, make_encoder, make_engine, recipe_of
from ..engines.base import Encoder, Engine, Floats, Limits
from .blame import find_layer
from .compare import by_layer, differences
from .corpus import Corpus
from .defaults import lines_of, make_defaults, other_text
from .generated import affordable, not_scored, reachable
from .memory import compare_memory, memory_rounding, read_memory
from .observe import Observation, late_layers, tokens_of
from .parity import Cases, beyond, check, eager_invariance, eager_rounding
from .quality import add_quality, add_translation
from .recording import Run
from .reference import Reference, make_reference
from .report import EngineReport, Report
from .restricted import RestrictedEngine, with_shortlist
from .results import Constants
from .rounding import Rounding

LAYER_NOISE = 3
"""A layer may differ by so many times what calibration measured, as other text may exceed the calibrated ranges."""


class Gate:
    """Checks engines of a bundle. Loads eager PyTorch only if it is needed."""

    def __init__(
        self,
        bundle: Bundle,
        checkpoint: Path | None = None,
        threads: int = 0,
        progress: Progress = unseen,
        loosened: bool = True,
        shortlist: bool = False,
    ) -> None:
        self.bundle, self.checkpoint, self.threads, self.progress = bundle, checkpoint, threads, progress
        self.loosened = loosened
        """Whether the recipe's limits may be wider than the defaults of its precision."""
        self.shortlist = bundle.shortlist_file if shortlist else ""
        """File of the shortlists that both sides use; empty: none."""
        self._lists = open_shortlist(bundle, with_shortlist(bundle, (), ())[0]) if shortlist else None
        self._eager: Engine | None = None

    def use(self, checkpoint: Any) -> None:
        """Use an open checkpoint as the reference."""
        from ..engines.eager import eager_of

        self._eager = eager_of(checkpoint, self.bundle, self.threads)

    def plain_eager(self) -> Engine:
        """Eager PyTorch without a shortlist, not entered."""
        if self._eager is None:
            make = make_engine if self.bundle.config.decoder_layers else make_encoder
            self._eager = cast(Engine, make("eager", self.bundle, self.checkpoint, self.threads))
        return self._eager

    def eager(self) -> Engine:
        """Eager PyTorch, with the shortlist if there is one; not entered."""
        return self._restricted(self.plain_eager())

    def _restricted(self, engine: Engine) -> Engine:
        return RestrictedEngine(engine, self._lists) if self._lists else engine

    def engine(self, name: str) -> Engine:
        """An engine to check, not entered."""
        return make_engine(name, self.bundle, self.checkpoint, self.threads, self._lists is not None)

    def reference(self, corpus: Corpus, allowed: Recipe | None = None) -> Reference:
        """Run eager over a corpus, within the axes of `allowed`, or of every variant of the bundle.

        Raises ParityError if the checkpoint has other tokenizers.
        """
        about: dict[str, Any] = {
            "corpus": corpus.name,
            "weights_sha256": self.bundle.weights_sha256,
            "machine": machine(),
            "shortlist": self.shortlist,
        }
        allowed = allowed or narrowest([self.bundle.recipe, *self.bundle.variants.values()])
        own_beams = min(int(self.bundle.decoding.get("beams", 1)), allowed.axes.beams.max)
        options = dataclasses.replace(corpus.options, own_beams=own_beams).within(Limits.of(allowed.axes))
        self.progress(stage="eager PyTorch")
        try:
            made = self.eager()
        except OtherTokenizers as error:
            raise ParityError(str(error)) from None
        with made as eager:
            encoder = cast(Encoder, self.plain_eager())  # the same engine without the shortlist
            if not self.bundle.config.decoder_layers:
                observed = Observation(memory=read_memory(encoder, corpus.sources, 1, len(corpus.sources)))
                return Reference(corpus.sources, options, observed=observed, **about)
            positions = reachable(cast(Any, encoder), options)
            if positions < options.positions and not corpus.lines:  # a long source costs as much as a long target
                short = [source for source in corpus.sources if len(source) <= positions]
                corpus = dataclasses.replace(corpus, sources=short)
            options = dataclasses.replace(options, positions=positions)
            longest = min(allowed.axes.src_len.max, eager.limits.src_tokens)
            more = [] if corpus.lines else affordable(eager, corpus.sources, options, longest)
            if more:
                options = dataclasses.replace(options, searched=len(corpus.sources))
            found = make_reference(eager, [*corpus.sources, *more], options, about, self.progress, encoder)
            if (checkpoint := getattr(encoder, "checkpoint", None)) and corpus.sources:
                tokenizers = checkpoint.tokenizers
                lines = corpus.lines or lines_of(corpus.sources, tokenizers)
                found.defaults = make_defaults(eager, lines, tokenizers, checkpoint.decoding, found.options, longest)
            return found

    def rounding(self, reference: Reference) -> Rounding:
        """Eager's own rounding error, measured once; zeros without the checkpoint."""
        if reference.rounding is None:
            try:
                plain, eager = cast(Any, self.plain_eager()), self.eager()
            except (ArtifactError, MissingExtra, ModuleNotFoundError):
                return Rounding()
            if self.bundle.config.decoder_layers:
                reference.rounding = eager_rounding(reference, eager, lambda: self._restricted(plain.in_double()))
            else:
                reference.rounding = memory_rounding(plain.in_double, reference.sources, reference.observed.memory)
        return reference.rounding

    def run(self, backends: Sequence[str], reference: Reference, translations: Sequence[str] = ()) -> Report:
        """Compare each engine; with `translations` of the corpus, also BLEU and chrF.

        Raises ArtifactError for a reference of other weights, ConfigError for translations of another number of lines.
        """
        bundle = self.bundle
        self._check_fit(reference, translations)
        if translations:
            add_translation(reference, self.eager)
        greedy = reference.observed.runs.get("greedy", Run())  # none of an encoder alone
        report = Report(
            sentences=len(reference.sources),
            tokens=sum(len(tokens_of(outputs[0])) for outputs in greedy.outputs.values()),
            corpus=reference.corpus,
            weights_sha256=bundle.weights_sha256,
            options=dataclasses.asdict(reference.options),
            reference=reference.machine,
            machine=machine(),
            shortlist=self.shortlist,
            notes=[*explain(backends, bundle), *not_scored(reference.options, bundle)],
        )
        if not bundle.config.decoder_layers:
            report.engines, report.options = [self.encoder_alone(name, reference) for name in backends], {}
            return _with_rounding(report, reference.rounding)
        report.eager_invariance, not_blamed = eager_invariance(reference, bundle.config.eos_id, bundle.recipe.tolerance)
        text = other_text(bundle, reference.defaults) if reference.defaults else []
        for backend in backends:
            try:
                report.engines.append(self._compare(backend, reference, not_blamed, text, translations))
            except ArtifactError as error:  # a graph was exported with other tokenizers
                if not text:
                    raise
                report.engines.append(EngineReport(backend, failures=[str(error), *text]))
        return _with_rounding(report, reference.rounding)

    def _compare(
        self, backend: str, reference: Reference, not_blamed: Cases, text: list[str], translations: Sequence[str]
    ) -> EngineReport:
        """Compare one engine; `text`: differences between the bundle's text and the checkpoint's."""
        engine, recipe, name = self.engine(backend), recipe_of(backend, self.bundle), EngineName(backend)
        self.progress(stage=backend)
        with ExitStack() as entered:
            try:
                entered.enter_context(engine)
            except EngineError as error:  # what was found of other engines stays
                return EngineReport(backend, str(recipe.precision), recipe.tolerance, failures=[str(error)])
            tolerance, own = recipe.limits(engine.precision), own_limits(recipe.target, engine.precision, recipe.scales)
            if not self.loosened:
                tolerance = tolerance.within(own)
            loosened = tolerance.wider(own)
            try:
                report, runs = check(engine, backend, reference, tolerance, not_blamed, self.progress)
                if not report.passed and engine.precision == "fp32":
                    wider = self.rounding(reference).widen(tolerance)
                    if wider != tolerance:  # eager's own rounding error exceeds the limits
                        tolerance = wider
                        report, runs = check(engine, backend, reference, tolerance, not_blamed, self.progress)
            except (EngineError, LimitError) as error:
                return EngineReport(backend, engine.precision, tolerance, failures=[str(error)])
            report.precision, report.loosened = engine.precision, loosened
            decoded_alike = report.passed
            walk_names = tuple(walk.name for walk in report.walks)
            only_walks_failed = not decoded_alike and all(line.startswith(walk_names) for line in report.failures)
            report.failures += text
            self.add_constants(report, recipe)
            self.add_unrounded(report, recipe, reference, not_blamed)
            first_late = self.add_layer_limits(report, engine, reference)
            if recipe.memory and not (name.spec.reference or name.spec.no_encoder):
                self.add_memory(report, reference)
            if translations:
                add_quality(report, engine, reference, runs, translations, self.bundle.tokenizers())
            if not report.passed:
                causes = list[str]()
                if decoded_alike or only_walks_failed:  # neither shows a layer
                    causes = [*(report.constants.wrong if report.constants else []), *first_late]
                if decoded_alike and not causes:
                    causes = report.failures
                report.blame = causes[0] if causes else self.blame(engine, reference, report, tolerance)
        return report

    def encoder_alone(self, name: str, reference: Reference) -> EngineReport:
        """Compare an engine of a model without a decoder: encoder outputs and constants."""
        recipe = recipe_of(name, self.bundle)
        tolerance, own = recipe.limits("fp32"), own_limits(recipe.target, "fp32")
        limits = tolerance if self.loosened else tolerance.within(own)
        report = EngineReport(name, tolerance=limits, loosened=limits.wider(own))
        self.add_constants(report, recipe)
        known = list(report.failures)
        self.add_memory(report, reference)
        if report.failures != known and (wider := self.rounding(reference).widen(limits)) != limits:
            report.tolerance, report.failures = wider, known
            self.add_memory(report, reference)
        return report

    def _check_fit(self, reference: Reference, translations: Sequence[str]) -> None:
        if reference.weights_sha256 != self.bundle.weights_sha256:
            raise ArtifactError(
                "the reference is of other weights than the bundle: make one for this bundle with --save-reference"
            )
        if reference.shortlist != self.shortlist:
            theirs, ours = (name or "no shortlist" for name in (reference.shortlist, self.shortlist))
            raise ArtifactError(
                f"the reference was made with {theirs}, the check with {ours}: make it again as you check"
            )
        if translations and len(translations) != len(reference.sources):
            raise ConfigError(
                f"{len(translations)} reference translations for {len(reference.sources)} sentences: "
                "give --tgt the translation of the text that the reference is of, a line for a line, "
                "without lines whose source is empty"
            )

    def add_layer_limits(self, report: EngineReport, engine: Engine, reference: Reference) -> list[str]:
        """Limit a variant's layers to a multiple of the differences that calibration measured.

        Returns the first token and layer that exceeds its limit only at a late position, if there is one.
        """
        late: dict[str, Floats] = {}
        measured = self.bundle.measured(EngineName(report.engine).folder(self.bundle)).get("limits", {})
        expected, sources = reference.observed, reference.sources
        if measured and expected.late and report.layers:
            late = late_layers(engine, sources, expected.runs["greedy"], reference.options.positions)
            report.late_layers = by_layer({name: expected.late[name][: len(late[name])] for name in late}, late)
        for layer in (*report.layers, *report.late_layers):
            if layer.name in measured:
                layer.limit = LAYER_NOISE * measured[layer.name]
        too_far = [layer for layer in report.layers if layer.limit is not None and not layer.noise <= layer.limit]
        late_ones = [
            layer for layer in report.late_layers if layer.limit is not None and not layer.noise <= layer.limit
        ]
        for first, where in ((too_far[:1], ""), ([] if too_far else late_ones[:1], " at all positions that there are")):
            report.failures += [  # later layers differ as well
                f"layer {layer.name} differs by {layer.noise:.2g} (root mean square){where}, "
                f"more than {LAYER_NOISE} times what rounding did to it in calibration, {layer.limit:.2g}"
                for layer in first
            ]
        for layer in [] if too_far else late_ones[:1]:
            ours, theirs = expected.late[layer.name][: len(late[layer.name])], late[layer.name]
            apart = np.square(differences([ours], [theirs])).reshape(len(theirs), -1).mean(1)
            wrong = ~(np.sqrt(apart) <= layer.limit)
            return [f"token {int(wrong.argmax()) + 1}, {layer.name}"]
        return []

    def add_memory(self, report: EngineReport, reference: Reference) -> None:
        """Compare the encoder's output with eager's."""
        expected, sources = reference.observed.memory, reference.sources
        if sources and not expected:
            raise ArtifactError("the reference has no output of the encoder: make it again with --save-reference")
        try:
            with make_encoder(report.engine, self.bundle, self.checkpoint, self.threads) as encoder:
                report.memory = compare_memory(encoder, sources, expected)
        except (EngineError, LimitError) as error:
            report.failures.append(str(error))
            return
        if not report.memory.largest <= (limit := report.tolerance.memory):
            apart = beyond(report.memory.largest, limit, "memory")
            report.failures.append(f"memory of sentence {report.memory.worst + 1} differs {apart}")
        elif not report.memory.many_apart <= limit:
            apart = beyond(report.memory.many_apart, limit, "memory")
            report.failures.append(f"memory of {report.memory.many:,} sentences at once differs from a few's {apart}")

    def add_constants(self, report: EngineReport, recipe: Recipe) -> None:
        """Compare the constants of an engine's graphs with the checkpoint, if that and onnx are there."""
        name = EngineName(report.engine)
        if name.spec.reference:
            return
        variant = name.folder(self.bundle)
        try:
            from .constants import compare_constants, failures, trained_scales_off

            eager = cast(Any, self.plain_eager())
        except (ArtifactError, MissingExtra) as error:
            report.constants = Constants(skipped=str(error))
            return
        except ModuleNotFoundError as error:
            report.constants = Constants(skipped=str(missing_extra(error)))
            return
        try:
            report.constants = compare_constants(self.bundle, variant, recipe, eager.model)
            if recipe.scales == "trained":
                steps = getattr(eager.checkpoint, "steps", None)
                report.constants.wrong += trained_scales_off(self.bundle.measured(variant), steps)
            report.failures += failures(report.constants)
        except ArtifactError as error:  # a graph is damaged
            report.constants = Constants(skipped=str(error))
            report.failures.append(str(error))

    def add_unrounded(self, report: EngineReport, recipe: Recipe, reference: Reference, not_blamed: Cases) -> None:
        """Compare a quantized variant again without its rounding, by the limits of fp32, if its constants are right."""
        known = report.constants is not None and not report.constants.skipped and not report.constants.wrong
        variant = EngineName(report.engine).folder(self.bundle)
        if not recipe.rounds or not known or self._lists is not None:
            return
        from .unrounded import compare_unrounded

        self.progress(stage=f"{report.engine}, without rounding")
        # Rounding hides nothing of what compares an engine with itself.
        once = dataclasses.replace(
            reference, options=dataclasses.replace(reference.options, invariance=0, large_tokens=0)
        )
        tolerance = own_limits("onnx", "fp32")

        def run(bundle: Bundle) -> EngineReport:
            with make_engine(report.engine, bundle, self.checkpoint, self.threads) as engine:
                plain, _ = check(engine, report.engine, once, tolerance, not_blamed, self.progress)
                if not plain.passed and (wider := self.rounding(reference).widen(tolerance)) != tolerance:
                    plain, _ = check(engine, report.engine, once, wider, not_blamed, self.progress)
            return plain

        compare_unrounded(report, self.bundle, variant, cast(Any, self.plain_eager()).model, run)

    def blame(self, engine: Engine, reference: Reference, report: EngineReport, tolerance: Tolerance) -> str:
        """The layer at fault, if eager PyTorch is there to find it."""
        try:
            eager = self.eager()
        except (ArtifactError, MissingExtra) as error:
            return f"the layer is not known: {error}"
        with eager:
            try:
                return find_layer(engine, eager, reference, report, tolerance)
            except EngineError as error:
                return f"the layer is not known: {error}"


def _with_rounding(report: Report, rounding: Rounding | None) -> Report:
    """Add eager's own rounding error; where it could not be measured, a note why."""
    report.rounding = rounding
    report.notes += [str(rounding)] if rounding is not None and rounding.unknown else []
    return report


def machine() -> dict[str, str]:
    """Processor, cores and versions, on which figures depend."""
    info = Path("/proc/cpuinfo")
    names = [line.partition(": ")[2] for line in info.read_text().splitlines() if line.startswith("model name")]
    versions = {
        "processor": names[0] if names else platform.machine(),
        "cores": str(cores()),
        "python": platform.python_version(),
        "tformer_deploy": __version__,
    }
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
