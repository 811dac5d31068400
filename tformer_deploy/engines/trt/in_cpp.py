"""Plans in the C++ library: continuous batching whose steps and search run beside Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..base import Request
from ..native import InCpp, NativeBatch, NativeSearch
from .api import library_of

if TYPE_CHECKING:
    from .engine import TrtEngine


class PlansInCpp(InCpp):
    """The plans of an engine, opened once more in C++."""

    def __init__(self, engine: TrtEngine) -> None:
        folder, library = str(engine.bundle.directory), library_of(engine.tensorrt)
        self.open(engine.limits, folder, engine.precision, 0, tensorrt=library)
        self._note = engine.note_not_captured

    def note(self) -> None:
        """Warn, once, where steps are not replayed as CUDA graphs."""
        if why := self._model.warning.partition(": ")[2]:
            self._note(why)


class PlansBatch(NativeBatch):
    """Lines that share the steps of plans."""

    def __init__(self, plans: PlansInCpp) -> None:
        super().__init__(plans)
        self._plans = plans

    def add(self, requests: Sequence[Request]) -> list[NativeSearch]:
        """See `Running.add`. New sizes take new buffers."""
        made = super().add(requests)
        self._plans.note()
        return made
