"""Plans in the C++ library: continuous batching whose steps and search run beside Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ..base import Limits, Request
from ..native import InCpp, NativeBatch, NativeSearch


class PlansInCpp(InCpp):
    """The plans of a bundle, opened once more in C++."""

    def __init__(self, folder: Path, precision: str, limits: Limits, library: str) -> None:
        """`limits`: those that Python has found; `library`: TensorRT's file, or empty."""
        self.open(limits, str(folder), precision, 0, tensorrt=library)

    @property
    def not_captured(self) -> str:
        """Why steps are not replayed as CUDA graphs, if that is known by now."""
        return str(self._model.warning).partition(": ")[2]


class PlansBatch(NativeBatch):
    """Lines that share the steps of plans."""

    def __init__(self, plans: PlansInCpp, note_not_captured: Callable[[str], None]) -> None:
        super().__init__(plans)
        self._plans, self._note = plans, note_not_captured

    def add(self, requests: Sequence[Request]) -> list[NativeSearch]:
        """See `Running.add`. New sizes take new buffers."""
        made = super().add(requests)
        if why := self._plans.not_captured:
            self._note(why)
        return made
