"""Build one typed graph of fixed sizes into one plan with Polygraphy, and report the plan's precisions."""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ..base.errors import EngineError
from ..engines.trt.api import TensorRt, make_logger, make_runtime

PLAN_TYPES = {"fp32": "Float", "fp16": "Half", "bf16": "BFloat16"}
"""Weight types as a plan names them."""


PlanPrecision = Literal["fp16", "bf16", "fp32"]


@dataclass(frozen=True)
class BuildOptions:
    """Options of a build."""

    precision: PlanPrecision = "fp16"
    """Of matmuls and caches."""
    fast: bool = False
    """Shortest search for kernels."""
    version_compatible: bool = False
    """The plan also loads in later releases of the same major version."""
    hardware_compatible: bool = False
    """The plan also runs on later GPUs than the one that it is built on, from Ampere on."""
    timing_cache: Path | None = None
    flavor: str = ""
    """`tensorrt` or `rtx`; empty: what is installed."""


@dataclass(frozen=True)
class Plan:
    """A finished plan."""

    data: bytes
    seconds: float
    layers: dict[str, dict[str, int]]
    """Layers of the network: kind -> type -> count."""
    weights: dict[str, int]
    """Matrices in the plan: type -> count."""
    tensors: dict[str, int] = field(default_factory=dict)
    """Tensors that its layers read and write: type -> count. Needs a GPU; not known for TensorRT for RTX."""
    scratch: int | None = None
    """Bytes of scratch memory on the device; needs a GPU too."""


def compile_plan(tensorrt: TensorRt, graph: Path, options: BuildOptions, exact: int = 0) -> Plan:
    """Build the graph, of whose matmuls `exact` stay fp32.

    Raises EngineError with the library's own reason, and where the plan is of another precision.
    """
    from polygraphy.backend.trt import engine_bytes_from_network, network_from_onnx_path
    from polygraphy.exception import PolygraphyException

    start = time.perf_counter()
    with defer_interrupt(), Errors(tensorrt.module) as errors:
        try:
            kept_builder(tensorrt)
            loaded = network_from_onnx_path(str(graph), **tensorrt.network_options())
            network = loaded[1]
            types = {}
            if not tensorrt.typed:
                types = graph_types(network, tensorrt.module)
                hold_matmuls(network, tensorrt.module, types)
            layers = count_layers(network, types)
            data = bytes(
                engine_bytes_from_network(loaded, make_config(tensorrt, options), save_timing_cache=cache_file(options))
            )
        except (PolygraphyException, TypeError) as error:
            if isinstance(error, TypeError) and not errors.reason():  # else the library has made no builder
                raise
            raise EngineError(f"{tensorrt.title} cannot build {graph.name}: {errors.reason() or error}") from None
        seconds = time.perf_counter() - start
        information, scratch = ("", None) if tensorrt.flavor == "rtx" else inspect_plan(tensorrt, data)
        tensors = tensor_types(information)
    weights = weight_types(data) if tensorrt.flavor == "rtx" else {}
    check_precision(graph, options.precision, weights, layers, exact)
    if tensors and options.precision not in tensors:
        raise EngineError(f"the plan of {graph.name} is not {options.precision}: its layers are {json.dumps(tensors)}")
    return Plan(data, seconds, layers, dict(Counter(weights.values())), tensors, scratch)


@cache
def kept_builder(tensorrt: TensorRt) -> Any:
    """A builder that is not used, and stays: TensorRT 8.6 then loads its kernels once.

    On an H200, plans took 3 to 6 s each; without it, 13 to 15 s.
    """
    if tensorrt.flavor == "rtx":
        return None
    logger, _ = make_logger(tensorrt.module)
    return logger, tensorrt.module.Builder(logger)


def make_config(tensorrt: TensorRt, options: BuildOptions) -> Any:
    """Polygraphy's builder configuration."""
    trt = tensorrt.module
    how: dict[str, Any] = {
        "max_aux_streams": 0,
        "profiling_verbosity": trt.ProfilingVerbosity.DETAILED,
        **tensorrt.precision_options(options.precision),
    }
    if tensorrt.major < 10:  # cuBLAS and cuDNN, which later versions do without, may not be there
        how["tactic_sources"] = [trt.TacticSource.EDGE_MASK_CONVOLUTIONS, trt.TacticSource.JIT_CONVOLUTIONS]
    if options.fast:
        how["builder_optimization_level"] = 0
    if options.version_compatible:
        how["version_compatible"] = True
    if options.hardware_compatible:
        how["hardware_compatibility_level"] = trt.HardwareCompatibilityLevel.AMPERE_PLUS
    if cache := cache_file(options):
        how["load_timing_cache"] = cache
    if tensorrt.flavor == "rtx":
        from polygraphy.backend.tensorrt_rtx.config import CreateConfigRTX as CreateConfig
    else:
        from polygraphy.backend.trt import CreateConfig

    def create(builder: Any, network: Any) -> Any:
        config = CreateConfig(**how)(builder, network)
        config.clear_flag(trt.BuilderFlag.TF32)  # which Polygraphy leaves on for TensorRT for RTX
        if tensorrt.flavor == "rtx":  # for CUDA graphs; a network that cannot be captured is then refused
            config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
        return config

    return create


def cache_file(options: BuildOptions) -> str | None:
    """Where timings are kept."""
    return str(options.timing_cache) if options.timing_cache else None


def graph_types(network: Any, trt: Any) -> dict[str, Any]:
    """Tensor -> type that the graph gives it. TensorRT 8.6 calls every float tensor fp32 before the build.

    Types follow from inputs, constants and casts.
    """
    floats = (trt.float32, trt.float16)
    types = {each.name: each.dtype for each in (network.get_input(i) for i in range(network.num_inputs))}
    for layer in network:
        outputs = [layer.get_output(i) for i in range(layer.num_outputs)]
        if layer.type == trt.LayerType.CONSTANT:
            layer.__class__ = trt.IConstantLayer
            constant = layer
            kind = str(constant.weights.dtype)  # of numpy
            types[outputs[0].name] = {"float32": trt.float32, "float16": trt.float16}.get(kind, outputs[0].dtype)
        elif layer.type == trt.LayerType.CAST:
            layer.__class__ = trt.ICastLayer
            cast = layer
            types[outputs[0].name] = cast.to_type
        else:
            inputs = [layer.get_input(i) for i in range(layer.num_inputs)]
            given = next((types[each.name] for each in inputs if each and types[each.name] in floats), None)
            types |= {each.name: given if given and each.dtype in floats else each.dtype for each in outputs}
    return types


def hold_matmuls(network: Any, trt: Any, types: dict[str, Any]) -> None:
    """Keep every matmul at the type of its output. Where all layers are held, TensorRT 8.6.0 finds no kernels."""
    for layer in network:
        if layer.type == trt.LayerType.MATRIX_MULTIPLY:
            layer.precision = types[layer.get_output(0).name]
            layer.set_output_type(0, layer.precision)


def count_layers(network: Any, types: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Count layers by kind and by output type; `types` are those that tensors get in the build."""
    counts: dict[str, Counter[str]] = {}
    for layer in network:
        output = layer.get_output(0)
        kind, made = layer.type.name.lower(), types.get(output.name, output.dtype).name.lower()
        counts.setdefault(kind, Counter())[made] += 1
    return {kind: dict(counts[kind]) for kind in sorted(counts)}


def inspect_plan(tensorrt: TensorRt, data: bytes) -> tuple[str, int]:
    """The engine inspector's JSON on a plan's layers, and its scratch memory; needs a GPU. Raises EngineError."""
    trt = tensorrt.module
    _runtime, messages = make_runtime(trt)
    plan = _runtime.deserialize_cuda_engine(data)
    if plan is None:
        raise EngineError(f"the plan does not load where it was built: {'; '.join(messages) or 'no reason given'}")
    inspector = plan.create_engine_inspector()
    return str(inspector.get_engine_information(trt.LayerInformationFormat.JSON)), tensorrt.scratch(plan)


def tensor_types(layers: str) -> dict[str, int]:
    """Precision -> how many of the tensors that layers read and write, of an inspector's JSON."""
    called = {"fp16": ("half", "fp16"), "bf16": ("bfloat16", "bf16"), "fp32": ("float", "fp32")}
    found: Counter[str] = Counter()
    for text in re.findall(r'"Format/Datatype":\s*"([^"]*)"', layers):
        words = re.findall(r"[a-z]+\d*", text.lower())
        found.update(name for name, names in called.items() if any(word in names for word in words))
    return dict(found)


def weight_types(plan: bytes) -> dict[str, str]:
    """Name -> precision of the constants that a plan of TensorRT for RTX names; TensorRT's names say something else."""
    names = {called: precision for precision, called in PLAN_TYPES.items()}
    found = re.findall(rb"([A-Za-z][\w.]*)_constant(Float|Half|BFloat16)\b", plan)
    return {name.decode(): names[kind.decode()] for name, kind in found}


def check_precision(
    graph: Path, precision: str, weights: dict[str, str], layers: dict[str, dict[str, int]], exact: int = 0
) -> None:
    """Raise EngineError where more than `exact` matmuls of a half precision plan are of another type."""
    if precision == "fp32":
        return
    suffix = f"_{precision}"
    wrong = [name for name, kind in weights.items() if name.endswith(suffix) != (kind == precision)]
    if wrong or (weights and precision not in weights.values()):
        found = {name: weights[name] for name in (wrong or list(weights))[:3]}
        raise EngineError(f"the plan of {graph.name} is not {precision}: its weights are {json.dumps(found)}")
    matmuls = layers.get("matrix_multiply", {})
    half = matmuls.get("half" if precision == "fp16" else "bf16", 0)
    if not half or sum(matmuls.values()) - half > exact:
        raise EngineError(f"the plan of {graph.name} is not {precision}: its matmuls are {json.dumps(matmuls)}")


@contextmanager
def defer_interrupt() -> Iterator[None]:
    """Hold Ctrl-C, and what ends a verb as it does, back until the block ends, as TensorRT, which calls Python, would
    lose it. A second one kills."""
    came: list[int] = []

    def note(number: int, frame: object) -> None:
        came.append(number)
        for each in numbers:
            signal.signal(each, signal.SIG_DFL)
        print("stopping after this plan; press again to stop at once", file=sys.stderr)

    # Other threads get no signals, a background job ignores some, and a handler of somebody else stays.
    numbers = [
        each
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(each) is signal.default_int_handler
        and threading.current_thread() is threading.main_thread()
    ]
    for number in numbers:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt


class Errors:
    """Collects TensorRT's error messages during a build, and silences it and Polygraphy."""

    def __init__(self, trt: Any) -> None:
        self._collector, self.messages = make_logger(trt)

    def __enter__(self) -> Errors:
        from polygraphy.backend.trt import util
        from polygraphy.logger import G_LOGGER

        self._before = util.TRT_LOGGER, G_LOGGER.module_severity
        util.TRT_LOGGER, G_LOGGER.module_severity = self._collector, G_LOGGER.CRITICAL + 1
        return self

    def __exit__(self, *details: Any) -> None:
        from polygraphy.backend.trt import util
        from polygraphy.logger import G_LOGGER

        util.TRT_LOGGER, G_LOGGER.module_severity = self._before

    def reason(self) -> str:
        """The message with the cause; the others say where it happened."""
        telling = [message for message in self.messages if "ERROR:" in message or "Assertion" in message]
        return next(iter(telling or self.messages), "")
