"""What the project wants of a GPU, beside what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

PointKey = tuple[int, int]
"""Sentences, beams."""
EAGER = "eager"
FIRST, LARGEST = (1, 1), (128, 4)
"""Points of the random model."""


@dataclass
class Side:
    """A row of the tables."""

    name: str
    engine: str
    """As reports call it; of eager PyTorch `eager:` and its precision."""
    refused: str = ""
    """Why its figures are not shown."""
    failed: bool = False
    """It is refused because a check has found it wrong."""
    speeds: dict[PointKey, float] = field(default_factory=dict)
    """Tokens a second of the random model."""
    steps: dict[PointKey, float] = field(default_factory=dict)
    """Its milliseconds a step."""
    host: dict[PointKey, float] = field(default_factory=dict)
    """Share of a batch's time in which the GPU is idle."""
    equal: dict[tuple[str, str], str] = field(default_factory=dict)
    """Model, mode -> sentences equal to eager PyTorch."""
    bleu: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Mode -> lower-cased, of the trained model: the engine's and eager PyTorch's."""
    text: dict[int, float] = field(default_factory=dict)
    """Beams -> tokens a second on the trained model's text."""
    remarks: list[str] = field(default_factory=list)
    """What is missing, and what the figures do not say."""

    @property
    def eager(self) -> bool:
        """Whether it is the yardstick."""
        return self.engine.startswith(EAGER)


@dataclass(frozen=True)
class Target:
    """One of them."""

    what: str
    wanted: str
    side: str
    measured: str = "not measured"
    met: bool | None = None

    @property
    def verdict(self) -> str:
        """In a word."""
        return {True: "met", False: "missed", None: ""}[self.met]


def fastest(sides: Iterable[Side]) -> dict[PointKey, float]:
    """Tokens a second of eager PyTorch in the precision that is faster there."""
    found: dict[PointKey, float] = {}
    for side in sides:
        for key, rate in side.speeds.items() if side.eager else ():
            found[key] = max(rate, found.get(key, 0.0))
    return found


def judge(sides: Iterable[Side], sentences: int) -> list[Target]:
    """Every target for every engine that it is meant for; `sentences` of the trained model were checked."""
    sides = list(sides)
    best = fastest(sides)
    half = next((side.speeds for side in sides if side.engine == f"{EAGER}:fp16"), {})
    found = []
    for side in sides:
        if side.engine == "trt:fp16":
            found += proven(side, sentences)
            found.append(below("ms a step of `base`, batch 1, greedy", 0.25, side, side.steps.get(FIRST), "{:.3f}"))
            found.append(times("of eager fp16: `base`, batch 1, greedy", 10, side, FIRST, half))
            found.append(times("of eager: `base`, batch 128, beam 4", 6, side, LARGEST, best))
            share = max(side.host.values(), default=None)
            found.append(below("the host's share of `base`, the largest", 0.05, side, share, "{:.1%}"))
        elif side.engine.endswith("@cuda"):
            found.append(times("of eager: `base`, batch 1, greedy", 3, side, FIRST, best))
    return found


def proven(side: Side, sentences: int) -> list[Target]:
    """Tokens and BLEU of the trained model; what differs inside the measured error is a tie, else the check fails."""
    tokens = Target(f"tokens of {sentences:,} sentences", "eager's, or ties inside the fp16 error", side.name)
    quality = Target("BLEU", "within 0.1 of eager's", side.name)
    if side.failed:
        return [Target(tokens.what, tokens.wanted, side.name, side.refused, False), quality]
    equal = [f"{mode}: {side.equal['trained', mode]}" for mode in ("greedy", "beam") if ("trained", mode) in side.equal]
    if equal:
        tokens = Target(tokens.what, tokens.wanted, side.name, "; ".join(equal), sentences >= 1000 or None)
    if side.bleu:
        apart = max(abs(engine - eager) for engine, eager in side.bleu.values())
        quality = Target(quality.what, quality.wanted, side.name, f"{apart:.2f}", apart <= 0.1)
    return [tokens, quality]


def below(what: str, most: float, side: Side, measured: float | None, form: str) -> Target:
    """A figure that must not exceed another."""
    wanted = f"≤ {form.format(most)}"
    return Target(what, wanted, side.name, *(() if measured is None else (form.format(measured), measured <= most)))


def times(what: str, least: float, side: Side, key: PointKey, yardstick: Mapping[PointKey, float]) -> Target:
    """How many times as many tokens a second."""
    target = Target(f"times the tokens/s {what}", f"≥ {least:g}", side.name)
    if key not in side.speeds or not yardstick.get(key):
        return target
    ratio = side.speeds[key] / yardstick[key]
    return Target(target.what, target.wanted, side.name, f"{ratio:.2f}", ratio >= least)
