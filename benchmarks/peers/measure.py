"""Two phases: every setting a few times, then the best of every side in turns."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tformer_deploy.base.errors import TformerError
from tformer_deploy.base.processes import Process, in_turn

from . import ROOT
from .points import Point
from .sides import OURS, Setting, Side, batchings

HOPELESS = 1.5
"""A setting that is this many times slower than the best in its first try is dropped."""
LIMIT_SECONDS = 900
"""Seconds to wait for an answer; torch.compile takes minutes."""
TURN_SECONDS = 0.5
"""Seconds for which a side repeats a batch in its turn, at least."""
REFERENCES = ("CTranslate2", "CTranslate2 float32", "eager PyTorch")
"""Ours are compared with the fastest side whose name begins so."""


@dataclass(frozen=True)
class Model:
    """One model in the format of every side, and what is decoded with it."""

    name: str
    bundle: Path
    ctranslate2: Path
    points: list[Point]
    file: Path
    """All points, for the processes."""
    pythons: dict[str, Path]
    """The interpreter of each program."""

    def start(self, side: Side, setting: Setting) -> Process:
        """A process that loads the model before it first answers."""
        paths = {"bundle": str(self.bundle), "ctranslate2": str(self.ctranslate2), "points": str(self.file)}
        values = json.dumps({**paths, **setting})
        command = [str(self.pythons[side.program]), "-m", f"{__package__}.{side.program}", values]
        return Process("", command, ROOT, setting.get("env"), LIMIT_SECONDS)


@dataclass
class Trial:
    """One setting at one point."""

    side: str
    point: str
    setting: Setting
    batching: Setting
    seconds: list[float] = field(default_factory=list)
    error: str = ""


def equal_outputs(model: Model, point: Point, sides: Sequence[Side]) -> dict[str, float]:
    """Outputs and scores of two sides, each with the first of its settings. Raises TformerError."""
    found = []
    for side in sides:
        setting = side.settings[0]
        with model.start(side, setting) as process:
            batching = batchings(side, setting, point, quick=True)[0]
            request = {"point": point.name, "batching": batching, "warm_up": 0, "repeats": 1}
            found.append(process.ask("measure", **request, outputs=True, scores=True))
    return compare(*found)


def compare(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """How many outputs are equal, and how far the scores of those are apart at most.

    Untrained weights repeat a token, so equal outputs alone prove little.
    """
    pairs = zip(one["outputs"], other["outputs"], one["scores"], other["scores"], strict=True)
    apart = [abs(a - b) for first, second, a, b in pairs if first == second]
    return {"sentences": len(one["outputs"]), "equal": len(apart), "score_max": max(apart, default=0.0)}


def try_all(model: Model, sides: Sequence[Side], tries: int, quick: bool) -> list[Trial]:
    """Phase 1: every setting of every side at every point; a failure is kept with its message."""
    trials: list[Trial] = []
    for side in sides:
        best: dict[str, float] = {}
        for setting in side.settings:
            try:
                with model.start(side, setting) as process:
                    for point in filter(side.can, model.points):
                        for batching in batchings(side, setting, point, quick):
                            trial = Trial(side.name, point.name, setting, batching)
                            trials.append(trial)
                            _try(process, point, trial, tries, best)
            except TformerError as error:
                points = filter(side.can, model.points)
                trials += [Trial(side.name, point.name, setting, {}, error=str(error)) for point in points]
            print(f"  {model.name}: {side.name} {_short(setting)}", flush=True)
    return trials


def choose(trials: Sequence[Trial], point: str) -> dict[str, Trial]:
    """Each side's fastest trial at a point; a side that failed throughout is left out."""
    chosen: dict[str, Trial] = {}
    for trial in trials:
        if trial.point == point and trial.seconds:
            best = chosen.get(trial.side)
            if best is None or min(trial.seconds) < min(best.seconds):
                chosen[trial.side] = trial
    return chosen


def race(model: Model, point: Point, sides: Sequence[Side], chosen: dict[str, Trial], rounds: int) -> dict[str, Any]:
    """Phase 2: figures of each side by its name, with its best setting; all take turns in every round."""
    results: dict[str, Any] = {}
    with ExitStack() as stack:
        processes: dict[str, Process] = {}
        for side in sides:
            if trial := chosen.get(side.name):
                kept: dict[str, list[float]] = {"seconds": [], "cpu_seconds": []}
                result = {"setting": trial.setting, "batching": trial.batching, "limit": side.limit, **kept}
                results[side.name] = result
                try:
                    processes[side.name] = stack.enter_context(model.start(side, trial.setting))
                    request = {"point": point.name, "batching": trial.batching, "warm_up": 0, "repeats": 1}
                    result |= {**processes[side.name].ask("measure", **request, outputs=True), **kept}
                except TformerError as error:
                    result["error"] = str(error)
        for number in range(rounds):
            live = [name for name in processes if "error" not in results[name]]
            for name in in_turn(live, number):
                _turn(processes[name], point, chosen[name], results[name])
    for name in [name for name, result in results.items() if "error" not in result]:
        results[name] |= summary(results[name], len(point.sources))
    add_ratios(results)
    return results


def summary(result: dict[str, Any], sentences: int) -> dict[str, float]:
    """Medians over rounds."""
    median = statistics.median(result["seconds"])
    return {
        "seconds_median": median,
        "seconds_min": min(result["seconds"]),
        "cpu_seconds_median": statistics.median(result["cpu_seconds"]),
        "tokens_per_second": result["tokens"] / median,
        "sentences_per_second": sentences / median,
    }


def add_ratios(results: dict[str, Any]) -> None:
    """Give each of ours its speed beside the references of its limit: the median of the ratios within a round.

    Of wall time, and of the processor time of all threads.
    """
    measured = {name: result for name, result in results.items() if "seconds_median" in result}
    for name, result in measured.items():
        for reference in REFERENCES if name.startswith(OURS) else ():
            alike = [it for it in measured if it.startswith(reference) and measured[it]["limit"] == result["limit"]]
            if not alike:
                continue
            fastest = min(alike, key=lambda it: float(measured[it]["seconds_median"]))
            wall, cpu = (speed_ratios(result[kind], measured[fastest][kind]) for kind in ("seconds", "cpu_seconds"))
            found = {"side": fastest, "rounds": wall, "median": statistics.median(wall), "cpu": statistics.median(cpu)}
            result.setdefault("speed_beside", {})[reference] = found


def speed_ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """How many times as fast ours is in each round."""
    return [their / our for our, their in zip(ours, theirs, strict=True)]


def _try(process: Process, point: Point, trial: Trial, tries: int, best: dict[str, float]) -> None:
    """Measure a setting once, and again unless it is hopeless or a whole corpus."""
    request = {"point": point.name, "batching": trial.batching, "outputs": False}
    warm_up = 1 if point.exact or trial.setting.get("compiled") else 0
    try:
        trial.seconds += process.ask("measure", **request, warm_up=warm_up, repeats=1)["seconds"]
        if tries > 1 and not point.corpus and trial.seconds[0] < HOPELESS * best.get(point.name, float("inf")):
            trial.seconds += process.ask("measure", **request, warm_up=0, repeats=tries - 1)["seconds"]
        best[point.name] = min(best.get(point.name, float("inf")), *trial.seconds)
    except TformerError as error:
        trial.error, trial.seconds = str(error), []


def _turn(process: Process, point: Point, trial: Trial, result: dict[str, Any]) -> None:
    """One side's part of a round: the mean of some repeats, or the error that ends it."""
    repeats = 1 if point.corpus else max(1, round(TURN_SECONDS / min(trial.seconds)))
    request = {"point": point.name, "batching": trial.batching, "outputs": False}
    try:
        answer = process.ask("measure", **request, warm_up=int(point.exact), repeats=repeats)
        for kind in ("seconds", "cpu_seconds"):
            result[kind].append(statistics.mean(answer[kind]))
        result["peak_mib"] = answer["peak_mib"]
    except TformerError as error:
        result["error"] = str(error)


def _short(setting: Setting) -> str:
    return ", ".join(f"{name} {value}" for name, value in setting.items() if name not in ("env", "engine"))
