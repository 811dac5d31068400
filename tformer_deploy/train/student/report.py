"""A student beside its teacher: quality, speed and size, measured on the same text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any

from ...base.errors import TformerError
from ...base.files import scratch
from ...base.headers import read_json
from ...base.processes import in_turn
from ...bench.measure import CorpusSample, some
from ...bench.report import (
    CORPUS_HEAD,
    ENGINE_HEAD,
    CorpusReport,
    EngineFigures,
    Latency,
    corpus_row,
    engine_row,
    table,
)
from ...bench.turns import start
from ...bundle.manifest import Bundle
from ...check.gate import machine
from ...engines import STANDARD, EngineName, threads_each
from ...translate.distill import counted
from ...translate.opening import TranslatorOptions, open_translator
from ...translate.translator import Translator
from ..data import Parallel
from ..metrics import text_figures

TIMED = 200
"""Most lines of the validation text that are timed."""
MAX_TOKENS = 256
"""Longest output that is timed, as in `tformer translate`."""


@dataclass(frozen=True)
class Measured:
    """A model, as one of the two in a report."""

    name: str
    """`teacher` or `student`."""
    bundle: Bundle
    engine: EngineName


@dataclass(frozen=True)
class Quality:
    """One model's outputs of one text."""

    text: str
    """`validation` or `test`."""
    model: str
    beams: int
    sentences: int
    refused: int
    """Lines that are too long for the model: their outputs are empty."""
    reference: dict[str, float]
    """`metrics.text_figures` against the references."""
    teacher: dict[str, float]
    """The same against the teacher's outputs with as many beams."""


@dataclass
class StudentReport:
    """A student beside its teacher."""

    date: str
    machine: dict[str, str]
    """Machine and versions."""
    threads: int
    rounds: int
    parameters: dict[str, int]
    """By model."""
    engines: list[EngineFigures] = field(default_factory=list)
    """By `teacher: ENGINE` and `student: ENGINE`."""
    quality: list[Quality] = field(default_factory=list)
    speed: list[CorpusReport] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    """Variants that failed their check → why."""
    distillation: dict[str, Any] = field(default_factory=dict)
    """What `tformer distill` reports."""
    metrics: list[dict[str, Any]] = field(default_factory=list)
    """Rows of the run's metrics.jsonl."""

    def __str__(self) -> str:
        found = self.distillation
        left_out = counted(found["left_out"]) or "none"
        lines = [f"{found['kept']:,} of {found['lines']:,} lines distilled; left out: {left_out}"]
        for _, head, rows in self.tables():
            lines += ["", *table(head, rows)]
        versions = ", ".join(f"{name} {value}" for name, value in self.machine.items() if name != "processor")
        return "\n".join([*lines, "", f"{self.machine['processor']}, {versions}, threads {self.threads}"])

    def tables(self) -> list[tuple[str, Sequence[str], list[tuple[str, ...]]]]:
        """Title, head and rows of each table."""
        sizes = [
            (*engine_row(found), f"{count:,}")
            for found, count in zip(self.engines, self.parameters.values(), strict=True)
        ]
        return [
            ("Size", (*ENGINE_HEAD, "parameters"), sizes),
            ("Quality", QUALITY_HEAD, [*map(quality_row, self.quality)]),
            ("Speed", CORPUS_HEAD, [*map(corpus_row, self.speed)]),
        ]

    def headline(self) -> str:
        """How much faster and smaller the student is, greedily."""
        rates = {found.engine: found.sentences_per_s for found in self.speed if found.beams == 1}
        faster = rates["student"] / rates["teacher"]
        size = self.engines[1].disk_mib / self.engines[0].disk_mib
        return f"The student is {faster:.1f} times as fast as its teacher, with {100 * size:.0f} % of the size"


QUALITY_HEAD = (
    *("text", "model", "beams", "sentences", "too long", "BLEU", "chrF", "exact, %"),
    *("BLEU to teacher's", "chrF to teacher's", "equal to teacher's, %"),
)


def quality_row(found: Quality) -> tuple[str, ...]:
    """Cells under QUALITY_HEAD."""
    counts = str(found.beams), f"{found.sentences:,}", f"{found.refused:,}" if found.refused else "-"
    scales = {"bleu": 1, "chrf": 1, "exact_match": 100}
    cells = [
        f"{scale * figures[name]:.2f}" if name in figures else "-"
        for figures in (found.reference, found.teacher)
        for name, scale in scales.items()
    ]
    return (found.text, found.model, *counts, *cells)


def make_report(
    models: Sequence[Measured], texts: Mapping[str, Parallel], widths: Sequence[int], rounds: int
) -> StudentReport:
    """Measure two models on texts, with each of some numbers of beams; the first text is timed as well."""
    report = StudentReport(
        datetime.now().astimezone().date().isoformat(),
        machine(),
        threads_each(0, 1),
        rounds,
        {model.name: model.bundle.config.parameters for model in models},
    )
    refused: set[str] = set()
    made: dict[tuple[str, int], list[str]] = {}
    for model in models:
        with open_translator(_options(model)) as translator:
            for (name, text), beams in product(texts.items(), widths):
                outputs, bad = _translated(translator, text.src, beams)
                refused.update(bad)
                expected = made.setdefault((name, beams), outputs)
                to_teacher = {} if outputs is expected else text_figures(outputs, expected)
                counts = beams, len(outputs), len(bad)
                report.quality.append(Quality(name, model.name, *counts, text_figures(outputs, text.tgt), to_teacher))
    report.quality.sort(key=lambda found: [*texts].index(found.text))
    first = next(iter(texts.values()))
    lines = some([line for line in first.src if line not in refused], TIMED)
    report.engines, report.speed = _timed(models, lines, widths, rounds)
    return report


def _translated(translator: Translator, lines: list[str], beams: int) -> tuple[list[str], list[str]]:
    """Outputs, and the lines that are refused."""
    bad: list[str] = []

    def refused(number: int, error: TformerError) -> None:
        bad.append(lines[number])

    return [result.text for result in translator.results(lines, refused=refused, beams=beams)], bad


def _options(model: Measured) -> TranslatorOptions:
    """As the workers of a benchmark open an engine."""
    standard = STANDARD if model.engine.plain and model.engine.spec.standard else None
    return TranslatorOptions(model.bundle, model.engine, standard)


def _timed(
    models: Sequence[Measured], lines: Sequence[str], widths: Sequence[int], rounds: int
) -> tuple[list[EngineFigures], list[CorpusReport]]:
    """Each model in a process of its own, in turns, by the functions of `tformer bench`."""
    samples: dict[tuple[int, str], list[CorpusSample]] = defaultdict(list)
    engines = []
    with ExitStack() as stack, scratch("tformer-student") as place:
        (place / "lines").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        workers = {model.name: stack.enter_context(start(model.name)) for model in models}
        settings = {"checkpoint": None, "threads": threads_each(0, 1), "workers": 1}
        for model in models:
            asked = {"bundle": str(model.bundle.directory), "engine": str(model.engine), **settings}
            found = workers[model.name].ask("open", **asked)
            engines.append(EngineFigures(f"{model.name}: {model.engine}", peak_mib=0.0, **found))
        for number in range(rounds):
            for beams in widths:
                for name in in_turn([*workers], number):
                    asked = {"src": str(place / "lines"), "beams": beams, "max_tokens": MAX_TOKENS}
                    samples[beams, name].append(CorpusSample(**workers[name].ask("corpus", **asked)))
        for engine, worker in zip(engines, workers.values(), strict=True):
            engine.peak_mib = worker.ask("peak_mib")
    return engines, [CorpusReport.of(name, beams, samples[beams, name]) for beams, name in product(widths, workers)]


def read_report(path: Path) -> StudentReport:
    """A report that was written as JSON."""
    found = read_json(path.parent, path.name)
    speed = [CorpusReport(**{**row, "single_ms": Latency(**row["single_ms"])}) for row in found["speed"]]
    engines, quality = [EngineFigures(**row) for row in found["engines"]], [Quality(**row) for row in found["quality"]]
    return StudentReport(**{**found, "speed": speed, "engines": engines, "quality": quality})
