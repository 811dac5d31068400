"""The texts of a request as lines of a scheduler: all are queued, and errors name the text that they are of."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

from ..base.errors import ConfigError, TformerError
from ..translate.scheduler import Busy, Late, Line
from ..translate.translator import Result
from .models import Model

Pair = tuple[str, str]
"""A text and how its output begins."""
Outcome = Result | BaseException


def naming(where: str, error: BaseException) -> BaseException:
    """An error of ours that names the model or the text that it is of."""
    if isinstance(error, TformerError):
        error = copy(error)
        error.args = (f"{where}: {error}",)
    return error


def all_results(outcomes: Sequence[Outcome]) -> list[Result]:
    """The results, for protocols that have one error for all texts. Raises the first, which names its text."""
    results = []
    for number, outcome in enumerate(outcomes, 1):
        if isinstance(outcome, BaseException):
            raise naming(f"text {number}", outcome) if len(outcomes) > 1 else outcome
        results.append(outcome)
    return results


def check_busy(outcomes: Sequence[Outcome]) -> None:
    """Raise Busy where the queue had no room for any text."""
    if isinstance(outcomes[0], Busy) and all(isinstance(outcome, Busy) for outcome in outcomes):
        raise outcomes[0]


def check_count(texts: int, model: Model) -> None:
    """Raise ConfigError for more texts than a request may have."""
    if texts > model.caps.texts:
        raise ConfigError(f"{texts} texts exceed this server's limit of {model.caps.texts} a request: send fewer")


def submit_all(
    model: Model,
    pairs: Sequence[Pair],
    decoding: Mapping[str, Any],
    due: float,
    write: Callable[[str], None] | None = None,
) -> list[Line | TformerError]:
    """Queue texts; in the place of one that cannot be queued, its error. Raises ConfigError, which concerns all.

    `due`: when they must have ended, as `time.monotonic` counts. `write`: of one text, takes its pieces.
    """
    lines: list[Line | TformerError] = []
    for pair in pairs:
        if lines and time.monotonic() > due:
            lines.append(Late(f"the {len(pairs)} texts took too long to read: send fewer at once"))
            continue
        try:
            lines.append(model.submit(*pair, decoding, write, seconds=max(0.0, due - time.monotonic())))
        except ConfigError:
            cancel(lines)
            raise
        except TformerError as error:
            lines.append(error)
    return lines


def cancel(lines: Sequence[Line | TformerError]) -> None:
    """Cancel lines; those that have ended are left as they are."""
    for line in lines:
        if isinstance(line, Line):
            line.cancel()
