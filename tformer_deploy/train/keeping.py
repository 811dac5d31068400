"""Which weights a run keeps at its end, and the validations until then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..model.config import TrainConfig

MEASURES = {"loss": ("valid_loss",), "bleu": ("bleu", "chrf")}
"""`train.keep` → the figures of a validation that may decide; the first that is known does."""


def candidates(settings: TrainConfig) -> list[str]:
    """Names of the weights to validate at the end."""
    if settings.keep not in MEASURES:
        return [settings.keep]
    return ["average", "last", *(["ema"] if settings.ema else [])]


def work_left(settings: TrainConfig, update: int, pairs: int, lines: int) -> dict[str, int]:
    """Work of the remaining validations of a text: pairs to compute the loss of, and lines to translate."""
    every, updates = settings.valid_every, settings.updates
    left = updates // every - (update - 1) // every + (updates % every != 0)
    last = len(candidates(settings))  # after the last update, with all lines
    return {"pairs": (left + last) * pairs, "lines": left * min(lines, settings.bleu_sentences) + last * lines}


def best_of(found: Mapping[str, Mapping[str, Any]], keep: str) -> tuple[str, str, dict[str, Any]]:
    """The best candidate by its validation, of equal ones the first; a line that says so, a record for the header."""
    measure = next(name for name in MEASURES[keep] if all(name in figures for figures in found.values()))
    values = {name: float(figures[measure]) for name, figures in found.items()}
    best = (min if keep == "loss" else max)(values, key=values.__getitem__)
    digits = 4 if keep == "loss" else 2
    others = ", ".join(f"{name} {value:.{digits}f}" for name, value in values.items() if name != best)
    line = f"kept: {best}, {measure} {values[best]:.{digits}f} on validation ({others})"
    return best, line, {"kept": best, "measure": measure, "candidates": values}
