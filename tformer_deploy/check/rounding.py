"""The rounding error of eager PyTorch itself, and what it means for the limits of fp32."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ..bundle.recipe import Tolerance

APART = 3
"""An engine that rounds by up to twice eager's error differs from eager by at most three times that error.

Seen: 2.4 times, of a student of Firefox on ONNX Runtime; its recurrent cells add up what each step rounds.
"""
SAID = 300
"""Characters of a module's error that are kept."""
MOST = 10
"""A limit is widened at most so many times: a model whose rounding error is larger is refused."""


def widened(limit: float, rounding: float) -> float:
    """A limit of fp32, but at least `APART` times eager's rounding error."""
    return max(limit, min(APART * rounding, MOST * limit))


@dataclass(frozen=True)
class Rounding:
    """Largest differences of eager PyTorch from itself in fp64, under teacher forcing; zeros: not known."""

    encoder: float = 0.0
    scores: float = 0.0
    unknown: str = ""
    """Why it is not known, where the module stopped in fp64."""

    @classmethod
    def failed(cls, error: Exception) -> Rounding:
        """Not known, as a module raised an error in fp64."""
        return cls(unknown=f"{type(error).__name__}: {' '.join(str(error).split())[:SAID]}")

    def __bool__(self) -> bool:
        return bool(self.encoder or self.scores)

    def __str__(self) -> str:
        if self.unknown:
            return (
                "how far eager PyTorch rounds is not known, so that limits of fp32 are not widened: "
                f"its module stopped in fp64: {self.unknown}"
            )
        return (
            f"eager PyTorch rounds by up to {self.encoder:.1e} (encoder outputs) and {self.scores:.1e} (scores), "
            f"measured in fp64; limits of fp32 are at least {APART} times that"
        )

    def widen(self, tolerance: Tolerance) -> Tolerance:
        """Limits of fp32, widened where eager's rounding error asks for it."""
        return dataclasses.replace(
            tolerance,
            encoder=widened(tolerance.encoder, self.encoder),
            scores=widened(tolerance.scores, self.scores),
            memory=widened(tolerance.memory, self.encoder),
        )


@dataclass
class Unrounded:
    """A variant without its rounding, over the checkpoint's numbers, beside eager."""

    encoder_max: float = 0.0
    scores_max: float = 0.0
    equal: int = 0
    """Outputs of all modes that are eager's."""
    sentences: int = 0
    skipped: str = ""
    """Why nothing was compared, if nothing was."""

    def __str__(self) -> str:
        if self.skipped:
            return f"not compared: {self.skipped}"
        return (
            f"encoder outputs within {self.encoder_max:.1e} of eager's, scores within {self.scores_max:.1e}, "
            f"{self.equal} of {self.sentences} outputs equal"
        )
