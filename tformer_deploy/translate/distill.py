"""Sequence-level distillation: a teacher's translations of a text, chosen and filtered, as training data of a student.

Source: Kim and Rush 2016, "Sequence-Level Knowledge Distillation". The filters and their limits are our own.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError, DataError, unknown
from ..base.files import atomic_file, write_json
from ..base.lines import read_lines
from ..base.settings import check_types
from .corpus.job import CorpusOptions, translate_corpus
from .corpus.progress import Progress
from .opening import TranslatorOptions

SRC, TGT, REPORT, MADE = "train.src", "train.tgt", "report.json", "translated"
"""Files of the output folder, and in it the folder of the teacher's translations."""
CHOICES = ("score", "bleu", "chrf")
REASONS = ("no text", "failed", "cut off", "score", "length", "copied", "repeated", "script")
"""Why a line is left out: the first of them that is true."""
SHORT = 10
"""Characters: of two shorter texts, no ratio is formed."""
GRAM = 3
"""Words of a repetition."""
OWN_SCRIPT = 0.05
"""A script with so large a share of all letters belongs to the language."""


@dataclass(frozen=True)
class Filters:
    """Which lines are left out; 0 turns a filter off."""

    max_ratio: float = 3.0
    """Characters of the longer side for each of the shorter."""
    max_copied: float = 0.8
    """Share of the output that stands in the source in the same order."""
    max_repeats: int = 3
    """How often three words in a row may come."""
    min_script: float = 0.5
    """Share of the letters that must be of the scripts of the target language."""
    min_score: float = 0.0
    """Log-probability per token, such as -1.5."""

    def __post_init__(self) -> None:
        check_types(self)
        for name, least in (("max_ratio", 1.0), ("max_copied", 0.0), ("max_repeats", 1), ("min_script", 0.0)):
            if (value := getattr(self, name)) and not value >= least:
                raise ConfigError(f"{name}={value}: must be at least {least:g}, or 0 for no such filter")
        for name in ("max_copied", "min_script"):
            if (value := getattr(self, name)) > 1:
                raise ConfigError(f"{name}={value}: is a share: give at most 1")
        if not self.min_score <= 0 or math.isinf(self.min_score):
            raise ConfigError(f"min_score={self.min_score}: is a log-probability: must be below 0")


@dataclass(frozen=True)
class DistillOptions:
    """What is translated, and what becomes of it."""

    translator: TranslatorOptions
    src: Sequence[Path]
    out: Path
    tgt: Sequence[Path] = ()
    """Reference translations of `src`, in the same order."""
    choose: str = "score"
    """Of a line's outputs: the best by the teacher's score, or by sentence BLEU or chrF against its reference."""
    filters: Filters = field(default_factory=Filters)
    force: bool = False
    """Replace what was made of another text or with other options."""

    def __post_init__(self) -> None:
        if self.choose not in CHOICES:
            raise unknown("choice", self.choose, CHOICES)
        if self.choose != "score" and not self.tgt:
            raise ConfigError(f"--choose {self.choose} compares with reference translations: give --tgt")
        if self.choose != "score" and int(self.translator.asked.get("n_best", 1)) < 2:
            raise ConfigError(f"--choose {self.choose} needs outputs to choose from: add --beams 4 --n-best 4")
        if self.tgt and len(self.tgt) != len(self.src):
            raise ConfigError(f"{len(self.src)} files of --src and {len(self.tgt)} of --tgt: give one for each")
        if len({path.suffix == ".gz" for path in self.src}) > 1:
            raise ConfigError("--src: some files are .gz and some are not: give all alike")


@dataclass
class DistillReport:
    """What was made."""

    out: str
    teacher: str
    lines: int = 0
    kept: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    """Reason -> lines."""
    other_than_first: int = 0
    """Lines whose chosen output is not the teacher's best."""
    scripts: list[str] = field(default_factory=list)
    """Of the target language."""
    quality: dict[str, dict[str, float]] = field(default_factory=dict)
    """With references: figures of the teacher's best outputs and of the chosen ones, of all lines with both texts."""
    decoding: dict[str, Any] = field(default_factory=dict)
    filters: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def __str__(self) -> str:
        lines = [f"{self.out}: {self.kept:,} of {self.lines:,} lines kept, by {self.teacher}"]
        lines += [f"  {count:,} left out: {reason}" for reason, count in self.left_out.items() if count]
        if self.other_than_first:
            lines.append(f"  {self.other_than_first:,} outputs are nearer to their reference than the teacher's best")
        for name, figures in self.quality.items():
            lines.append(f"  {name}: " + ", ".join(f"{key} {value:.2f}" for key, value in figures.items()))
        return "\n".join(lines)


def counted(left_out: Mapping[str, int]) -> str:
    """Reasons that have lines, with their numbers, in one line; empty if none has."""
    return ", ".join(f"{count:,} {reason}" for reason, count in left_out.items() if count)


def distill(options: DistillOptions, progress: Progress | None = None) -> DistillReport:
    """Translate, choose, filter and write; after a kill, the same call continues. Raises TformerError."""
    sources = [line for path in options.src for line in read_lines(path)]
    references = [line for path in options.tgt for line in read_lines(path)]
    if references and len(references) != len(sources):
        raise DataError(f"--src has {len(sources)} lines, --tgt {len(references)}: they must be translations")
    made = options.out / MADE
    job = CorpusOptions(
        list(map(str, options.src)), str(made), options.translator, details=True, merge=True, force=options.force
    )
    summary = translate_corpus(job, progress)
    records = [json.loads(line) for line in read_lines(made / summary.merged)]
    if len(records) != len(sources):
        raise DataError(f"{made} has {len(records)} lines, --src {len(sources)}: use another --out")
    wanted = references or [""] * len(sources)
    chosen = [best_of(record, each, options.choose) for record, each in zip(records, wanted, strict=True)]
    outputs = [str(each.get("text") or "") for each in chosen]
    scripts = scripts_of(references or outputs)
    report = DistillReport(str(options.out), str(_name(options.translator)), len(sources), scripts=sorted(scripts))
    report.left_out = dict.fromkeys(REASONS, 0)
    report.other_than_first = sum(a is not b for a, b in zip(records, chosen, strict=True))
    report.filters, report.seconds = asdict(options.filters), summary.seconds
    report.decoding = dict(options.translator.asked)
    kept = []
    for source, output, record in zip(sources, outputs, chosen, strict=True):
        if reason := why_left_out(source, output, record, options.filters, scripts):
            report.left_out[reason] += 1
        else:
            kept.append((source, output))
    report.kept = len(kept)
    if not kept:
        raise DataError(f"no line is left of {len(sources):,} ({counted(report.left_out)}): loosen the filters")
    if references:
        report.quality = _quality(records, outputs, references)
    for name, side in ((SRC, 0), (TGT, 1)):
        with atomic_file(options.out / name) as temporary:
            temporary.write_text("".join(f"{pair[side]}\n" for pair in kept), encoding="utf-8")
    write_json(options.out / REPORT, asdict(report))
    return report


def best_of(record: dict[str, Any], reference: str, choose: str) -> dict[str, Any]:
    """The output of a line that is chosen: of equal ones, the first."""
    others = record.get("alternatives") or []
    if choose == "score" or not reference or not others:
        return record
    from ..train.metrics import sentence_quality

    return max((record, *others), key=lambda each: sentence_quality(choose, each["text"], reference))


def why_left_out(source: str, output: str, record: dict[str, Any], filters: Filters, scripts: set[str]) -> str:
    """The first of `REASONS`, or empty."""
    if not source:
        return "no text"
    if not output:
        return "failed"
    found = {
        "cut off": not record["finished"],
        "score": bool(filters.min_score) and record["score"] / max(1, len(record["ids"])) < filters.min_score,
        "length": bool(filters.max_ratio) and ratio(source, output) > filters.max_ratio,
        "copied": bool(filters.max_copied) and copied(source, output) > filters.max_copied,
        "repeated": bool(filters.max_repeats) and repeats(output) > filters.max_repeats,
        "script": bool(filters.min_script) and share_of(output, scripts) < filters.min_script,
    }
    return next((reason for reason, wrong in found.items() if wrong), "")


def ratio(source: str, output: str) -> float:
    """Characters of the longer text for each of the shorter; 1 where both are short."""
    short, long = sorted((len(source), len(output)))
    return 1.0 if long < SHORT else long / short


def copied(source: str, output: str) -> float:
    """Share of the output's words that stand in the source in the same order; 0 of fewer than three words."""
    words = output.split()
    if len(words) < GRAM:
        return 0.0
    blocks = SequenceMatcher(None, source.split(), words, autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks) / len(words)


def repeats(output: str) -> int:
    """How often the most frequent run of three words, or of three characters of a text without spaces, comes."""
    words: Sequence[str] = output.split()
    parts = words if len(words) > 1 else output
    return max(Counter(tuple(parts[i : i + GRAM]) for i in range(len(parts) - GRAM + 1)).values(), default=0)


def letters(text: str) -> Iterator[str]:
    """The script of each letter, as the first word of its Unicode name: LATIN, CYRILLIC, CJK."""
    return (unicodedata.name(c, "?").partition(" ")[0] for c in text if c.isalpha())


def scripts_of(texts: Sequence[str]) -> set[str]:
    """Scripts that a good part of all letters have."""
    counts = Counter(script for text in texts for script in letters(text))
    return {script for script, count in counts.items() if count >= OWN_SCRIPT * counts.total()}


def share_of(text: str, scripts: set[str]) -> float:
    """Share of a text's letters of some scripts; 1 without letters."""
    found = [script in scripts for script in letters(text)]
    return sum(found) / len(found) if found else 1.0


def _quality(records: list[dict[str, Any]], outputs: list[str], references: list[str]) -> dict[str, dict[str, float]]:
    from ..train.metrics import text_figures

    both = [(str(r.get("text") or ""), o, t) for r, o, t in zip(records, outputs, references, strict=True) if t]
    first, chosen, wanted = map(list, zip(*both, strict=True))
    return {"teacher's best": text_figures(first, wanted), "chosen": text_figures(chosen, wanted)}


def _name(options: TranslatorOptions) -> Any:
    return getattr(options.bundle, "directory", options.bundle)
