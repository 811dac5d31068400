"""Which TensorRT is installed, and what differs between 8.6, 10, 11 and TensorRT for RTX."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base.errors import ConfigError, EngineError, MissingExtra, extras, install, unknown
from ...base.files import atomic_file
from ...bundle.plans import Stamp

if TYPE_CHECKING:
    from .cuda import Gpu

LOG = logging.getLogger(__name__)
MODULES = {"tensorrt": "tensorrt", "rtx": "tensorrt_rtx"}
"""Flavors, in the order in which an installed one is taken, and their Python modules."""
EXTRAS = {"tensorrt": "trt", "rtx": "trt-rtx"}
LIBRARIES = {"tensorrt": "libnvinfer.so", "rtx": "libtensorrt_rtx.so"}
"""How the names of their files begin."""
MAPS = Path("/proc/self/maps")
PORTABLE = "sm80+"
"""What a plan of TensorRT for RTX runs on: every GPU of compute capability 8.0 and above."""


@dataclass(frozen=True)
class TensorRt:
    """An imported TensorRT. Polygraphy, which drives it, knows one in a process."""

    flavor: str
    module: Any
    version: str

    @property
    def title(self) -> str:
        """As people call it."""
        return f"TensorRT{' for RTX' if self.flavor == 'rtx' else ''} {self.version}"

    @property
    def major(self) -> int:
        """Of the interface: that of TensorRT for RTX 1 is TensorRT 11's."""
        return 11 if self.flavor == "rtx" else int(self.version.split(".")[0])

    @property
    def typed(self) -> bool:
        """Whether the graph's types are the plan's; 8.6 has to be told for each layer."""
        return self.major >= 10

    def network_options(self) -> dict[str, Any]:
        """For Polygraphy's network loaders. From 11 on the graph's types always count."""
        return {"strongly_typed": True} if self.major == 10 else {}

    def precision_options(self, precision: str) -> dict[str, Any]:
        """For Polygraphy's CreateConfig. TensorRT 11 has no switches for precision, 10 no use for them."""
        if self.typed:
            return {}
        return {"tf32": False, **({} if precision == "fp32" else {precision: True, "precision_constraints": "obey"})}

    def capability(self) -> str:
        """What plans that are built here run on, such as `sm90`. Raises EngineError where that takes a GPU."""
        return PORTABLE if self.flavor == "rtx" else require_gpu(self.title).capability

    def scratch(self, plan: Any) -> int:
        """Bytes on the device that a plan computes in, beside its weights, inputs and outputs."""
        old = self.flavor == "tensorrt" and tuple(map(int, self.version.split(".")[:2])) < (10, 1)
        return int(plan.device_memory_size if old else plan.device_memory_size_v2)

    def stamps(self, capability: str, precision: str) -> list[Stamp]:
        """What plans may be of that a GPU of that capability runs, those that were made for it first; or nothing."""
        portable = [PORTABLE] if int(capability.removeprefix("sm")) >= 80 else []
        capabilities = portable if self.flavor == "rtx" else [capability, *portable]
        versions = [self.title] if self.flavor == "rtx" else [self.title, f"TensorRT {self.major}"]
        return [Stamp(each, version, precision) for version in versions for each in capabilities]


def installed(flavor: str = "") -> list[str]:
    """The flavors that are installed, or the one that is asked for. Raises MissingExtra."""
    if flavor and flavor not in MODULES:
        raise unknown("TensorRT flavor", flavor, MODULES)
    found = [name for name, module in MODULES.items() if flavor in ("", name) and find_spec(module)]
    if not found:
        extras = [EXTRAS[name] for name in ([flavor] if flavor else MODULES)]
        raise MissingExtra(f"TensorRT is not installed: {install(*extras)}")
    return found


def load_tensorrt(flavor: str) -> TensorRt:
    """Import an installed flavor. Raises EngineError."""
    try:
        module = import_module(MODULES[flavor])
    except (ImportError, OSError) as error:
        raise EngineError(f"{MODULES[flavor]} is installed but does not load: {error}") from None
    return TensorRt(flavor, module, module.__version__)


def load_builder(flavor: str = "") -> TensorRt:
    """Import a flavor, or the first that is installed, and have Polygraphy drive it. Raises MissingExtra."""
    chosen = installed(flavor)[0]
    if not find_spec("polygraphy"):
        raise MissingExtra(f"polygraphy is not installed: {install(EXTRAS[chosen])}")
    os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = str(int(chosen == "rtx"))
    import polygraphy.config

    if (chosen == "rtx") != polygraphy.config.USE_TENSORRT_RTX:
        raise ConfigError(f"--trt-flavor {chosen}: this process has loaded the other one already")
    return load_tensorrt(chosen)


def library_of(tensorrt: TensorRt) -> str:
    """The file that Python has loaded, so that C++ uses the same; empty: the loader knows where it is."""
    lines = MAPS.read_text().splitlines() if MAPS.is_file() else []
    mapped = {line.split(maxsplit=5)[5] for line in lines if "/" in line}
    return min((each for each in mapped if Path(each).name.startswith(LIBRARIES[tensorrt.flavor])), default="")


def why_not_in_cpp(tensorrt: TensorRt) -> str:
    """Why the C++ library here does not run the plans of a TensorRT; empty: it does."""
    if not find_spec("tformer_native"):
        return "tformer-native is not installed"
    try:
        with extras():
            from ..native import load_runtime, tensorrt_headers
        load_runtime()
    except MissingExtra as error:
        return str(error)
    headers = tensorrt_headers()
    if not headers:
        return "tformer-native was built without TensorRT_ROOT"
    if int(headers.split(".")[0]) != tensorrt.major:
        return f"tformer-native was built with the headers of TensorRT {headers}, not of {tensorrt.title}"
    return ""


def require_gpu(wanted_by: str) -> Gpu:
    """The first GPU. Raises MissingExtra or EngineError that says which of package, driver and GPU is missing."""
    try:
        from .cuda import find_gpu
    except ModuleNotFoundError:
        extra = EXTRAS[installed()[0]]
        raise MissingExtra(f"cuda-python is not installed: {install(extra)}") from None
    return find_gpu(wanted_by)


class Kernels:
    """What TensorRT for RTX compiles on the GPU when a plan is first used there, kept from process to process.

    TensorRT's own plans hold their kernels: there is nothing to keep for them.
    """

    def __init__(self, tensorrt: TensorRt, name: str) -> None:
        """`name`: of the file, in $XDG_CACHE_HOME/tformer; it should tell the plans and the kind of GPU."""
        self._tensorrt, self._name = tensorrt, name
        self._kernels: Any = None
        self._kept = b""

    def make_context(self, plan: Any, memory: Callable[[int], int]) -> Any:
        """What runs a plan, or None, as TensorRT says it; needs a CUDA context.

        `memory` takes bytes on the device, for as long as the context lives, and returns their address. TensorRT for
        RTX computes there: it cannot be captured in a CUDA graph while it takes memory by itself (`make_config`).
        """
        if self._tensorrt.flavor != "rtx":
            return plan.create_execution_context()
        runtime_config = plan.create_runtime_config()
        if self._kernels is None:
            self._kernels = runtime_config.create_runtime_cache()
            try:
                kept = self._path().read_bytes()
            except (OSError, RuntimeError):
                kept = b""
            if kept and self._kernels.deserialize(kept):  # which refuses those of another GPU, version or older driver
                self._kept = kept
        runtime_config.set_runtime_cache(self._kernels)
        strategies = self._tensorrt.module.ExecutionContextAllocationStrategy
        runtime_config.set_execution_context_allocation_strategy(strategies.USER_MANAGED)
        context = plan.create_execution_context(runtime_config=runtime_config)
        if context is not None and (size := self._tensorrt.scratch(plan)):
            context.set_device_memory(memory(size), size)
        return context

    def keep(self) -> None:
        """Write down what has been compiled since."""
        if self._kernels is None:
            return
        found = self._kernels.serialize()
        data = b"" if found is None else bytes(found)  # None: it cannot tell which GPU they are for
        if data in (b"", self._kept):
            return
        try:
            with atomic_file(self._path()) as file:
                file.write_bytes(data)
        except (OSError, RuntimeError) as error:
            warnings.warn(f"compiled kernels are not kept ({error}): set XDG_CACHE_HOME", stacklevel=2)
        self._kept = data

    def _path(self) -> Path:
        """Raises RuntimeError where there is no home."""
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tformer" / self._name


def is_full(reasons: str) -> bool:
    """Whether the device's memory is what TensorRT complains of: "OutOfMemory" or "out of memory"."""
    return "outofmemory" in reasons.lower().replace(" ", "")


def make_runtime(trt: Any) -> tuple[Any, list[str]]:
    """What loads plans, and the list of what it reports as errors."""
    logger, messages = make_logger(trt)
    _runtime = trt.Runtime(logger)
    _runtime.engine_host_code_allowed = True  # version-compatible plans hold code
    return _runtime, messages


def make_logger(trt: Any) -> tuple[Any, list[str]]:
    """A logger for TensorRT, and the list of what it reports as errors; LOG gets all else as well."""
    messages: list[str] = []
    serious = trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR

    class Collector(trt.ILogger):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            LOG.debug("%s: %s", severity, message)
            if severity in serious:
                messages.append(message)

    return Collector(), messages
