"""TensorRT plans: each step is a CUDA graph, which the device picks inputs for; the host reads its results later.

Nothing of a state leaves the device. Each step's best tokens, and what the device feeds the next one, are copied to the
host behind the step; `speculative.py` says how the search follows.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ...base.errors import EngineError, NoRoom, install
from ...bundle.contract import GRAPHS
from ...bundle.manifest import Bundle
from ...bundle.plans import PRECISIONS, Plans, Profile, build_command, find_plans, trt_variant
from ..base import Floats, Ints, Limits
from ..speculative import SpeculativeEngine
from .api import (
    Kernels,
    TensorRt,
    installed,
    is_full,
    library_of,
    load_tensorrt,
    make_runtime,
    require_gpu,
    why_not_in_cpp,
)
from .cuda import Event
from .device import TrtDevice, free_all

if TYPE_CHECKING:
    from ..base import Running
    from .in_cpp import PlansInCpp


class TrtEngine(SpeculativeEngine):
    """Runs the plans of a bundle that fit this host."""

    keeps = sys.maxsize
    _in_cpp: PlansInCpp | None = None
    """The same plans in C++, once somebody has asked for continuous batching."""

    def __init__(self, bundle: Bundle, precision: str = "", only: Profile | None = None) -> None:
        self.bundle, self.config, self.precision = bundle, bundle.config, precision
        self.only = only
        """The one profile that is used; None: each for what it fits."""
        self.timings: list[tuple[Event, Event]] | None = None
        """Begin and end of the device's work, if they are recorded."""

    def look(self) -> Self:
        """Find the plans and what they take, without the device. Raises ArtifactError, EngineError, MissingExtra."""
        self.plans, self.tensorrt = self._find()
        self.precision = self.plans.stamp.precision
        profiles = [self.only] if self.only else self.plans.profiles
        self.limits = Limits(
            max(each.batch for each in profiles),
            max(each.src_len for each in profiles),
            max(each.capacity for each in profiles),
            max(each.beams for each in profiles),
            tuple(profiles),
            f"build a larger profile too: {build_command(self.bundle.directory, self.precision, profiles)} "
            "--profile BATCHxBEAMSxSOURCExTARGET",
        )
        return self

    def __enter__(self) -> Self:
        self.look()
        self._runtime, self._reasons = make_runtime(self.tensorrt.module)
        self.kernels = Kernels(self.tensorrt, f"{self.plans.identity}-{self.gpu.capability}.kernels")
        self._loaded: dict[Path, Any] = {}
        self._devices: list[TrtDevice] = []
        return super().__enter__()

    def __exit__(self, *why: object) -> None:
        super().__exit__(*why)
        self._in_cpp = None
        try:
            free_all([device.free for device in self._devices], quiet=why[1] is not None)
        finally:
            del self._devices, self.kernels, self._loaded, self._runtime

    def _find(self) -> tuple[Plans, TensorRt]:
        """The plans for this host, and what runs them."""
        loaded = [load_tensorrt(flavor) for flavor in installed()]
        self.gpu = require_gpu(loaded[0].title)
        precisions = [self.precision] if self.precision else list(PRECISIONS)
        owners = {
            stamp: each for name in precisions for each in loaded for stamp in each.stamps(self.gpu.capability, name)
        }
        if not owners:
            raise EngineError(
                f"{loaded[0].title} needs a GPU of compute capability 8.0 or later, this one has "
                f"{self.gpu.capability}: {install('trt')}, and build again"
            )
        plans = find_plans(self.bundle, trt_variant(self.bundle), list(owners))
        return plans, owners[plans.stamp]

    def layers(self, src_ids: Ints, src_lengths: Ints, tgt_ids: Ints) -> dict[str, Floats]:
        """See `Engine.layers`: a plan shows none. Raises EngineError."""
        raise EngineError("a plan does not show its layers: check ort:trt, which runs the graphs that it was made of")

    @property
    def no_continuous(self) -> str:
        """See `Continues.no_continuous`: why the C++ library does not run these plans."""
        return "one profile alone is used" if self.only else why_not_in_cpp(self.tensorrt)

    def continuous(self) -> Running:
        """See `Continues.continuous`. C++ has buffers of its own, and holds the plans that it uses once more."""
        from .in_cpp import PlansBatch, PlansInCpp

        with self._lock:
            if not self._in_cpp:
                folder, library = self.bundle.directory, library_of(self.tensorrt)
                self._in_cpp = PlansInCpp(folder, self.precision, self.limits, library)
            return PlansBatch(self._in_cpp, self.note_not_captured)

    def choose(self, wanted: Profile, filled: int) -> Profile:
        """See `SpeculativeEngine.choose`: the smallest that takes the request."""
        return self.only or self.plans.fitting(wanted)

    def make(self, profile: Profile) -> TrtDevice:
        """See `SpeculativeEngine.make`."""
        encoder, step = (self._load(self.plans.plan(graph, profile)) for graph in GRAPHS)
        device = TrtDevice(self, profile, encoder, step)
        self._devices = [device, *(each for each in self._devices if not each.freed)]
        self.kernels.keep()
        self._reasons.clear()  # what did not stop it
        if device.not_captured:
            self.note_not_captured(device.not_captured)
        return device

    def device_ms(self) -> float:
        """How long the device has worked since `timings` was emptied; empties it again."""
        pairs, self.timings = self.timings or [], []
        total = 0.0
        for begin, end in pairs:
            end.wait()
            total += end.since(begin)
            begin.free()
            end.free()
        return total

    def reasons(self) -> str:
        """What TensorRT has complained of since this was asked last."""
        text = "; ".join(self._reasons) or "it gives no reason"
        self._reasons.clear()
        return text

    def _load(self, path: Path) -> Any:
        """A plan in the device's memory, once."""
        if path not in self._loaded:
            plan = self._runtime.deserialize_cuda_engine(path.read_bytes())
            if plan is None:
                reasons = self.reasons()
                error = NoRoom if is_full(reasons) else EngineError
                raise error(f"{self.tensorrt.title} cannot load {path}: {reasons}")
            self._loaded[path] = plan
        return self._loaded[path]
