"""Which TensorRT is installed, and what differs between 8.6, 10, 11 and TensorRT for RTX."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ..errors import ConfigError, EngineError, MissingExtra, unknown

MODULES = {"tensorrt": "tensorrt", "rtx": "tensorrt_rtx"}
"""Flavors, in the order in which an installed one is taken, and their Python modules."""
EXTRAS = {"tensorrt": "trt", "rtx": "trt-rtx"}
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
        return PORTABLE if self.flavor == "rtx" else device_capability(self.title)


def load_tensorrt(flavor: str = "") -> TensorRt:
    """Import a flavor, or the first that is installed. Raises MissingExtra."""
    if flavor and flavor not in MODULES:
        raise unknown("TensorRT flavor", flavor, MODULES)
    found = [name for name, module in MODULES.items() if flavor in ("", name) and find_spec(module)]
    if not found:
        extras = " or ".join(f"'tformer-deploy[{EXTRAS[name]}]'" for name in ([flavor] if flavor else MODULES))
        raise MissingExtra(f"TensorRT is not installed: pip install {extras}")
    if not find_spec("polygraphy"):
        raise MissingExtra(f"polygraphy is not installed: pip install 'tformer-deploy[{EXTRAS[found[0]]}]'")
    os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = str(int(found[0] == "rtx"))
    import polygraphy.config

    if (found[0] == "rtx") != polygraphy.config.USE_TENSORRT_RTX:
        raise ConfigError(f"--trt-flavor {found[0]}: this process has loaded the other one already")
    try:
        module = import_module(MODULES[found[0]])
    except (ImportError, OSError) as error:
        raise EngineError(f"{MODULES[found[0]]} is installed but does not load: {error}") from None
    return TensorRt(found[0], module, module.__version__)


def device_capability(wanted_by: str) -> str:
    """The compute capability of the first GPU, such as `sm90`. Raises EngineError, MissingExtra."""
    try:
        from cuda.bindings import runtime
    except ModuleNotFoundError:
        raise MissingExtra("cuda-python is not installed: pip install 'tformer-deploy[trt]'") from None
    error, count = runtime.cudaGetDeviceCount()
    if error == runtime.cudaError_t.cudaErrorInsufficientDriver:
        raise EngineError(f"{wanted_by} builds on the GPU that it builds for, and no NVIDIA driver is loaded here")
    if error != runtime.cudaError_t.cudaSuccess or not count:
        raise EngineError(f"{wanted_by} builds on the GPU that it builds for, and there is none here ({error.name})")
    _, properties = runtime.cudaGetDeviceProperties(0)
    return f"sm{properties.major}{properties.minor}"
