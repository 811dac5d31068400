"""Runs a benchmark: loads every engine in a process of its own, measures them in turns, profiles them at the end."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import datetime

from ..base.errors import MissingExtra
from ..base.headers import read_json
from ..base.machine import cores
from ..base.notes import Progress, unseen
from ..base.processes import Process, in_turn
from ..bundle.contract import GRAPHS, PROGRAM
from ..bundle.manifest import Bundle
from ..check.gate import machine
from ..engines import EngineName, explain, recipe_of
from .measure import CorpusSample, Sample
from .plan import BenchPlan, Point, has_profile
from .report import BenchReport, CorpusReport, EngineFigures, NodeKind, PointReport
from .roofline import (
    LARGE_BUFFER,
    Ceiling,
    Cost,
    ProgramRead,
    Storage,
    WeightsRead,
    bound,
    buffer_size,
    device_bound,
    encoder_cost,
    step_cost,
)

Samples = dict[tuple[Point, str], list[Sample]]
CorpusSamples = dict[tuple[int, str], list[CorpusSample]]


def run_benchmark(plan: BenchPlan, bundle: Bundle, progress: Progress = unseen) -> BenchReport:
    """Run a benchmark. Raises LimitError, DataError or ConfigError first for what cannot be measured."""
    plan.check(bundle)
    report = BenchReport(
        machine(),
        plan.threads,
        plan.workers,
        plan.rounds,
        notes=explain(plan.engines, bundle),
        corpus_name=plan.src.name if plan.src else "",
        bundle=str(plan.bundle),
        date=datetime.now().astimezone().date().isoformat(),
    )
    report.shortlist = bundle.shortlist_file if plan.shortlist else ""
    samples: Samples = defaultdict(list)
    texts: CorpusSamples = defaultdict(list)
    with ExitStack() as stack:
        engines = {name: stack.enter_context(start(name)) for name in plan.engines}
        for name, process in engines.items():
            report.engines.append(_load(plan, name, process))
        limits = MachineLimits(plan, bundle, stack.enter_context(start("limits of the machine")), report)
        for number in range(plan.rounds):
            progress(stage="the machine")
            limits.measure()
            _round(plan, {name: engines[name] for name in in_turn(plan.engines, number)}, samples, texts, progress)
        for engine in report.engines:
            engine.peak_mib = engines[engine.engine].ask("peak_mib")
            engine.device = engines[engine.engine].ask("device")
        for (point, name), found in samples.items():
            report.points.append(PointReport.of(name, point, found))
            report.points[-1].device_ms = engines[name].ask("device_ms", point=asdict(point))
            if plan.profile and has_profile(name):
                progress(stage=f"{name}, {point}, profile")
                kinds = engines[name].ask("profile", point=asdict(point))
                report.points[-1].kinds = [NodeKind(**kind) for kind in kinds]
                progress(1)
    report.corpus = [CorpusReport.of(name, beams, rounds) for (beams, name), rounds in texts.items()]
    limits.judge()
    return report


def start(name: str) -> Process:
    """Start a worker process."""
    return Process(name, [sys.executable, "-m", f"{__package__}.worker"])


def _load(plan: BenchPlan, name: str, process: Process) -> EngineFigures:
    checkpoint = plan.checkpoint if EngineName(name).spec.reference else None
    found = process.ask(
        "open",
        bundle=str(plan.bundle),
        engine=name,
        checkpoint=str(checkpoint) if checkpoint else None,
        threads=plan.threads,
        workers=plan.workers,
        shortlist=plan.shortlist,
    )
    return EngineFigures(name, peak_mib=0.0, **found)


def _round(
    plan: BenchPlan,
    engines: dict[str, Process],
    samples: Samples,
    texts: CorpusSamples,
    progress: Progress,
) -> None:
    """One round: every engine at every point, then on the text."""
    for point in plan.points:
        for name, process in engines.items():
            progress(stage=f"{name}, {point}")
            found = process.ask("point", point=asdict(point), seconds=plan.seconds)
            samples[point, name] += [Sample(**sample) for sample in found]
            progress(1)
    src = str(plan.src.resolve()) if plan.src else ""  # /dev/stdin is another file in a worker
    for beams in plan.beams if src else ():
        for name, process in engines.items():
            progress(stage=f"{name}, {beams} beams, text")
            found = process.ask("corpus", src=src, beams=beams, max_tokens=plan.max_tokens)
            texts[beams, name].append(CorpusSample(**found))
            progress(1)


def program_reads(name: str, bundle: Bundle) -> list[ProgramRead]:
    """What each graph of an engine's program reads; empty if it runs no program."""
    if recipe_of(name, bundle).target != "native":
        return []
    program = read_json(bundle.directory / EngineName(name).folder(bundle), PROGRAM)
    return [ProgramRead.of(program, graph) for graph in GRAPHS]


def _storage(engine: EngineFigures, bundle: Bundle) -> Storage:
    """The types of an engine. A bf16 program counts as fp32: it widens weights, and states their size itself."""
    recipe = recipe_of(engine.engine, bundle)
    widens = engine.precision == "bf16" and recipe.target == "native"
    return Storage("fp32" if widens else engine.precision, recipe.group_size, recipe.cache_precision == "bf16")


class MachineLimits:
    """The machine's limits, measured in a process of their own, and each point compared with them."""

    def __init__(self, plan: BenchPlan, bundle: Bundle, process: Process, report: BenchReport) -> None:
        self.plan, self.bundle, self.process, self.report = plan, bundle, process, report
        self.threads = min(plan.threads * plan.workers, cores())
        self.storages = {engine.engine: _storage(engine, bundle) for engine in report.engines}
        weights = bundle.manifest.get("weights", {})
        standard = [WeightsRead(**weights[graph]) for graph in GRAPHS if graph in weights]
        # The manifest does not say what a variant with some layers in fp32 reads, so that has no limits.
        mixed = {name for name in bundle.variants if bundle.measured(name).get("fp32")}
        self.weights: dict[str, Sequence[WeightsRead | ProgramRead]] = {
            name: program_reads(name, bundle) or ([] if EngineName(name).folder(bundle) in mixed else standard)
            for name in self.storages
        }
        self.measurable = bool(weights)
        """Whether the machine's limits say something: what the graphs read is known, and they could be measured."""
        if not weights:
            report.notes.append("no limits of the machine: the manifest does not say what the graphs read")
        costs = [cost for name in plan.engines for point in plan.points for cost in self.costs(name, point)]
        self.sizes = sorted({LARGE_BUFFER, *(buffer_size(*cost) for cost in costs)})

    def costs(self, name: str, point: Point) -> list[tuple[Cost, int]]:
        """For the encoder and a step: cost of one worker's part, and number of workers; empty if unknown."""
        workers = min(self.plan.workers, point.batch)
        part, storage, config = point.split(workers), self.storages[name], self.bundle.config
        both = zip((encoder_cost, step_cost), self.weights[name], strict=False)
        return [(cost(config, weights, storage, part), workers) for cost, weights in both]

    def measure(self) -> None:
        """Measure the limits, and keep the best of all rounds; a note if that is impossible, nothing for GPUs alone."""
        report = self.report
        if not self.measurable or all(EngineName(name).device == "cuda" for name in self.plan.engines):
            return
        try:
            rates = self.process.ask("matrix_rates", threads=self.threads)
        except MissingExtra as error:
            self.measurable = False
            reason = str(error).removeprefix(f"{self.process.name}: ")
            report.notes.append(f"no limits of the machine: {reason}")
            return
        speeds = self.process.ask("bandwidth", sizes=self.sizes, threads=self.threads)
        report.ceiling = report.ceiling or Ceiling(self.threads)
        report.ceiling.add(dict(zip(self.sizes, speeds, strict=True)), rates)

    def judge(self) -> None:
        """Compare every point's best times with the limits."""
        report = self.report
        devices = {engine.engine: engine.device for engine in report.engines}
        for found in report.points:
            if not self.weights[found.engine]:
                continue
            encoder, step = self.costs(found.engine, found.point)
            if rate := (devices[found.engine] or {}).get("read_bytes_per_s"):
                found.step_bound = device_bound(step[0], rate, found.step_ms.min)
            if EngineName(found.engine).device == "cuda" or not report.ceiling:
                continue
            precision = self.storages[found.engine].precision
            found.encoder_bound = bound(*encoder, report.ceiling, precision, found.encoder_ms.min)
            if not self.plan.shortlist:  # with it, what a step reads depends on the sources
                found.step_bound = bound(*step, report.ceiling, precision, found.step_ms.min)
