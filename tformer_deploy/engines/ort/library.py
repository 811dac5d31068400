"""ONNX Runtime, set up: the only module that imports it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from ...base.errors import ArtifactError, ConfigError, EngineError, MissingExtra, TformerError, install
from ...base.notes import one_line

# The wheels report usage to their vendor unless this is set before the library loads.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
import onnxruntime as ort
from onnxruntime import InferenceSession, OrtValue, RunOptions, SessionOptions

__all__ = ["InferenceSession", "OrtValue", "RunOptions", "SessionOptions", "ort"]

OLDEST = (1, 31, 0)
"""Versions before write past the caches of steps in place. Before 1.24.1 they let a graph read any file as well."""
FATAL = 4
"""The only level of its log that is shown: other errors are exceptions."""
Providers = list[tuple[str, dict[str, str]]]
CPU: Providers = [("CPUExecutionProvider", {})]
SHORT_SPIN_US = 100
"""How long threads spin after an operator: until the encoder's next one, but not into the step that follows."""
_PLACES = re.compile(
    r"\[ONNXRuntimeError\] : \d+ : \w+ : |Load model from .+? failed:"
    r"|/\S+\.(?:cc|h|cu):\d+ [^()]*\([^()]*\)(?: const)? |\w+\.(?:cc|h|cu):\d+ \w+ "
)
"""Parts of its messages that are left out: codes, file names, and functions of its source."""
NEWER = "IR version|onnx opset versions|No Op registered|not a registered function"
"""Parts of messages about graphs that a later version may run."""


def check_library() -> None:
    """Raise ConfigError for a library that is too old, or two that overwrite each other."""
    if tuple(int(number) for number in re.findall(r"\d+", ort.__version__)[:3]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(
            f"onnxruntime {ort.__version__} writes past the caches of a decoding step: update it to {oldest} or later"
        )
    # Both wheels own the module `onnxruntime`; with both installed, which files won is chance. Where the module lies:
    # asking for the distributions by name would be a tenth of a command's start.
    site = Path(ort.__file__).parent.parent
    if all(any(site.glob(f"{wheel}-*.dist-info")) for wheel in ("onnxruntime", "onnxruntime_gpu")):
        raise ConfigError(
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other: "
            f"pip uninstall both, then {install('cpu', 'gpu')}"
        )


def session_options(threads: int) -> SessionOptions:
    """The settings that every session has."""
    options = SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = FATAL
    return options


def open_session(
    graph: Path, options: SessionOptions, providers: Providers = CPU, copy: bytes = b""
) -> InferenceSession:
    """A session of a graph's file, or of a changed `copy` in memory, with the weights beside the file."""
    if copy:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(graph.parent))
    return InferenceSession(copy or graph, options, providers=providers, enable_fallback=0)


@contextmanager
def loading(graph: Path, on_gpu: bool = False) -> Iterator[None]:
    """Turn the library's exceptions, which share no base class, into ArtifactError, with `on_gpu` EngineError."""
    try:
        yield
    except TformerError:
        raise
    except Exception as error:
        version, said = ort.__version__, reason(error)
        if on_gpu:
            raise EngineError(f"onnxruntime {version} cannot run {graph} on a GPU: {said}") from None
        if "alloc" in said:
            said = f"{said}: free some memory"
        elif re.search(NEWER, said):
            said = f"{said}: update onnxruntime, or export with a lower opset"
        else:
            said = f"it is damaged, or tformer did not make it ({said}): copy or export the bundle again"
        raise ArtifactError(f"onnxruntime {version} cannot load {graph}: {said}") from None


def reason(error: Exception) -> str:
    """The message of an exception, on one short line."""
    return one_line(error, _PLACES)


def has_vnni() -> bool:
    """Whether the processor has VNNI: dot products of bytes, accumulated in 32 bits."""
    info = Path("/proc/cpuinfo")
    return info.is_file() and "_vnni" in info.read_text()


def prepare_cuda() -> None:
    """Load the CUDA libraries that pip has installed. Raises MissingExtra."""
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        raise MissingExtra(
            f"onnxruntime {ort.__version__} here is without CUDA: pip uninstall onnxruntime, then {install('gpu')}"
        )
    with redirect_stdout(sys.stderr):  # where it says what it does not find
        ort.preload_dlls()
