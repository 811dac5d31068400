"""What training tells: metrics as JSON lines, a line on stderr, a plot."""

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
    return float(sacrebleu.corpus_bleu(list(made), [list(reference)], lowercase=lowercase).score)


def corpus_chrf(made: Sequence[str], reference: Sequence[str]) -> float:
    """chrF of sacrebleu (characters, so it tells something of one-word lines too), 0 to 100."""
    return float(sacrebleu.corpus_chrf(list(made), [list(reference)]).score)


def text_figures(made: Sequence[str], reference: Sequence[str]) -> dict[str, float]:
    """BLEU and chrF, 0 to 100, and the share of lines that match exactly; without BLEU where it could only be 0."""
    four_words = sacrebleu.corpus_bleu(list(reference), [list(reference)]).totals[3] > 0
    return {
        **({"bleu": corpus_bleu(made, reference)} if four_words else {}),
        "chrf": corpus_chrf(made, reference),
        "exact_match": sum(a == b for a, b in zip(made, reference, strict=True)) / len(reference),
    }


EVERY_SECONDS = 10
"""Where updates are slow, a line comes so often."""


class Metrics:
    """Appends to metrics.jsonl, keeps metrics.png up to date, prints. With path None: silent (other processes)."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.sums: dict[str, float] = {}
        """Of the updates since the last row."""
        self._bar = sys.stderr.isatty()
        self._first, self._started = 0, time.perf_counter()
        self._pace: dict[str, float] = {}
        """Seconds that one of each kind of a validation's work took last."""
        self._validated = 0.0
        """Seconds of validations since `begin`."""
        self._said = -math.inf

    def begin(self, update: int, line: str) -> None:
        """Say what goes on behind an update; the time that is left is reckoned from here."""
        self._first, self._started, self._said = update, time.perf_counter(), -math.inf
        self._validated = 0.0
        self.say(line)

    def took(self, kind: str, count: int, seconds: float) -> None:
        """Note how long so much of a validation's work took."""
        self._pace[kind] = seconds / max(1, count)
        self._validated += seconds

    def left(self, update: int, updates: int, ahead: Mapping[str, int]) -> str:
        """The time that is left, validations included as soon as one has been made."""
        training = time.perf_counter() - self._started - self._validated
        seconds = training / max(1, update - self._first) * (updates - update)
        seconds += sum(count * self._pace.get(kind, 0.0) for kind, count in ahead.items())
        unknown = "" if ahead.keys() <= self._pace.keys() else " and validation"
        return f"{timedelta(seconds=round(seconds))}{unknown} left"

    def train(self, figures: dict[str, float], every: int, updates: int, ahead: Mapping[str, int]) -> None:
        """Note one update; write the mean of each `every` updates. Say that, the first update, and what is slow.

        `ahead`: how much of each kind of a validation's work is left.
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
            f"{row['tokens_per_s']:,.0f} target tokens/s  {self.left(update, updates, ahead)}",
            always=full,
        )

    def tell(self, text: str, always: bool = False) -> None:
        """Say how far the work is, if nothing has been said for a while."""
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
        """Forget the final validation and what was written after `update`, before a resumed run repeats them."""
        if self.path and self.path.is_file():
            kept = [row for row in read_metrics(self.path) if row["update"] <= update and "averaged" not in row]
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
    """Rows of a metrics.jsonl; what is none, such as a line cut short by a kill, is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):
            row = parse_json(line)
            if isinstance(row, dict) and type(row.get("update")) is int:
                rows.append(row)
    return rows


LABELS = {"bleu": "BLEU", "chrf": "chrF"}


def plot(metrics: Path, image: Path) -> None:
    """Draw the losses, the quality of validation outputs and the learning rate over the updates."""
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
    figure.savefig(image, dpi=100)
