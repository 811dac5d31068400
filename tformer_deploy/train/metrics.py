"""Metrics of training: rows of metrics.jsonl, progress on stderr, and the plot metrics.png."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import sacrebleu

from ..base.files import atomic_file
from ..base.headers import parse_json
from ..base.notes import note
from ..base.pages.fonts import no_fonts_at_home


def corpus_bleu(made: Sequence[str], reference: Sequence[str], lowercase: bool = False) -> float:
    """BLEU of sacrebleu with its default tokenization (13a), 0 to 100; 0 where no line has four words."""
    return float(sacrebleu.corpus_bleu(list(made), [list(reference)], lowercase=lowercase, force=True).score)


def tokenized_bleu(made: Sequence[str], reference: Sequence[str]) -> float:
    """BLEU of tokens with spaces between them, as Moses' `multi-bleu.perl` has it: not smoothed, 0 to 100."""
    pairs = list(made), [list(reference)]
    return float(sacrebleu.corpus_bleu(*pairs, tokenize="none", smooth_method="none", force=True).score)


def published_bleu(
    tokens: Sequence[str], reference_tokens: Sequence[str], text: Sequence[str], reference: Sequence[str]
) -> dict[str, float]:
    """BLEU of the same outputs by three definitions: as `multi-bleu.perl` of tokens, and sacrebleu's of text."""
    return {
        "multi_bleu": tokenized_bleu(tokens, reference_tokens),
        "sacrebleu_lc": corpus_bleu(text, reference, lowercase=True),
        "sacrebleu": corpus_bleu(text, reference),
    }


def corpus_chrf(made: Sequence[str], reference: Sequence[str]) -> float:
    """chrF of sacrebleu, 0 to 100: n-grams of characters, so that one-word lines count too."""
    return float(sacrebleu.corpus_chrf(list(made), [list(reference)]).score)


def sentence_quality(metric: str, made: str, reference: str) -> float:
    """`bleu` (smoothed) or `chrf` of one sentence, 0 to 100."""
    score = sacrebleu.sentence_bleu if metric == "bleu" else sacrebleu.sentence_chrf
    return float(score(made, [reference]).score)


def text_figures(made: Sequence[str], reference: Sequence[str], tokenized: bool = False) -> dict[str, float]:
    """BLEU and chrF, 0 to 100, and the share of exact matches. No BLEU if no reference has four words."""
    bleu = tokenized_bleu if tokenized else corpus_bleu
    four_words = sacrebleu.corpus_bleu(list(reference), [list(reference)]).totals[3] > 0
    return {
        **({"bleu": bleu(made, reference)} if four_words else {}),
        "chrf": corpus_chrf(made, reference),
        "exact_match": sum(a == b for a, b in zip(made, reference, strict=True)) / len(reference),
    }


FINAL = {"averaged", "weights"}
"""One of these keys is in the rows of the final validations."""
EVERY_SECONDS = 10
"""Seconds between two progress lines, if updates are slow."""


class Metrics:
    """Appends to metrics.jsonl, redraws metrics.png, prints. Silent if path is None, as in processes other than 0."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.sums: dict[str, float] = {}
        """Sums over the updates since the last row."""
        self._bar = sys.stderr.isatty()
        self._first, self._started = 0, time.perf_counter()
        self._pace: dict[str, float] = {}
        """Seconds per item of each kind of validation work, when last measured."""
        self._validated = 0.0
        """Seconds of validations since `begin`."""
        self._said = -math.inf

    def begin(self, update: int, line: str) -> None:
        """Print a line, and start the clock that the time left is estimated from."""
        self._first, self._started, self._said = update, time.perf_counter(), -math.inf
        self._validated = 0.0
        self.say(line)

    def took(self, kind: str, count: int, seconds: float) -> None:
        """Record how long `count` items of one kind of validation work took."""
        self._pace[kind] = seconds / max(1, count)
        self._validated += seconds

    def left(self, update: int, updates: int, validations: Mapping[str, int]) -> str:
        """The time left; includes validations once one has been measured."""
        training = time.perf_counter() - self._started - self._validated
        seconds = training / max(1, update - self._first) * (updates - update)
        seconds += sum(count * self._pace.get(kind, 0.0) for kind, count in validations.items())
        unknown = "" if validations.keys() <= self._pace.keys() else " and validation"
        return f"{timedelta(seconds=round(seconds))}{unknown} left"

    def train(self, figures: dict[str, float], every: int, updates: int, validations: Mapping[str, int]) -> None:
        """Record one update. The mean of each `every` updates becomes a row, and is printed.

        `validations`: items left of each kind of validation work.
        """
        for name in ("loss", "tokens", "seconds", "count"):
            self.sums[name] = self.sums.get(name, 0.0) + figures.get(name, 1.0)
        sums, update = self.sums, int(figures["update"])
        row = {
            "update": update,
            "epoch": figures["epoch"],
            "loss": sums["loss"] / sums["count"],
            "lr": figures["lr"],
            "grad_norm": figures["grad_norm"],
            "tokens_per_s": sums["tokens"] / sums["seconds"],
        }
        full = update % every == 0 or update == updates
        if full:
            self.sums = {}
            self._append(row)
        self.tell(
            f"update {update}/{updates}  epoch {row['epoch']}  loss {row['loss']:.3f}  lr {row['lr']:.2e}  "
            f"{row['tokens_per_s']:,.0f} target tokens/s  {self.left(update, updates, validations)}",
            always=full,
        )

    def tell(self, text: str, always: bool = False) -> None:
        """Print progress, at most every `EVERY_SECONDS`."""
        if always or time.perf_counter() - self._said >= EVERY_SECONDS:
            self._said = time.perf_counter()
            self.say(text, transient=True)

    def valid(self, figures: dict[str, Any]) -> None:
        """Write one validation and redraw the plot."""
        self._append(figures)
        parts = [f"update {figures['update']}", f"valid loss {figures['valid_loss']:.3f}"]
        parts += [f"{label} {figures[name]:.2f}" for name, label in LABELS.items() if name in figures]
        parts += [f"exact {figures['exact_match']:.1%}"] if "exact_match" in figures else []
        self.say("  ".join(parts))
        if self.path:
            try:
                plot(self.path, self.path.with_suffix(".png"))
            except OSError as error:  # a full disk must not cost the training that the plot shows
                self.say(f"metrics.png not drawn: {error}")

    def cut(self, update: int) -> None:
        """Remove the rows that a resumed run writes again: those after `update`, and the final validation."""
        if self.path and self.path.is_file():
            kept = [row for row in read_metrics(self.path) if row["update"] <= update and not row.keys() & FINAL]
            with atomic_file(self.path) as temporary:
                temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")

    def _append(self, row: dict[str, Any]) -> None:
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def say(self, text: str, transient: bool = False) -> None:
        """Print a line on stderr; a transient one is overwritten by the next on a terminal."""
        if not self.path:
            return
        if self._bar:
            note(f"\r\033[K{text}", end="" if transient else "\n")
        else:
            note(text)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics.jsonl; invalid lines, such as one cut short by a kill, are skipped."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):
            row = parse_json(line)
            if isinstance(row, dict) and type(row.get("update")) is int:
                rows.append(row)
    return rows


LABELS = {"bleu": "BLEU", "chrf": "chrF"}


def plot(metrics: Path, image: Path) -> None:
    """Plot losses, quality of validation outputs, and learning rate by update."""
    with no_fonts_at_home():
        from matplotlib.figure import Figure

    rows = read_metrics(metrics)
    figure = Figure(figsize=(12, 3.5), layout="constrained")
    panels: dict[str, dict[str, tuple[str, float]]] = {
        "loss per target token": {"training (smoothed labels)": ("loss", 1), "validation": ("valid_loss", 1)},
        "validation outputs, 0 to 100": {
            "lines that match exactly, %": ("exact_match", 100),
            **{label: (name, 1) for name, label in LABELS.items()},
        },
        "learning rate": {"rate": ("lr", 1)},
    }
    for axes, (title, curves) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for label, (name, scale) in curves.items():
            points = [(row["update"], scale * row[name]) for row in rows if isinstance(row.get(name), float)]
            if points:
                axes.plot(*zip(*points, strict=True), marker="." if len(points) < 40 else None, label=label)
        if len(axes.lines) > 1:
            axes.legend()
        axes.set_title(title)
        axes.set_xlabel("update")
        axes.grid(alpha=0.3)
    with atomic_file(image) as temporary:
        figure.savefig(temporary, dpi=100, format="png")
