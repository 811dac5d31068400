"""ONNX Runtime: IO binding, caches stay OrtValues from step to step."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from ..bundle import Bundle
from ..contract import caches, signature
from ..errors import ArtifactError, ConfigError, EngineError, LimitError, MissingExtra, missing_extra
from .base import ANYTHING, Floats, Ints, Limits, Outlook, Scores, check_request, check_step

# The wheels report usage to their vendor unless this is set before the library loads.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
import onnxruntime as ort
from onnxruntime import OrtValue

PROVIDERS: dict[str, list[tuple[str, dict[str, str]]]] = {
    "cpu": [("CPUExecutionProvider", {})],
    "cuda": [("CUDAExecutionProvider", {"use_tf32": "0"}), ("CPUExecutionProvider", {})],
}
"""Where nodes run; shapes are computed on the processor in any case."""
SHORT_SPIN_US = 100
"""Long enough to the next operator of the encoder, short enough not to take a core from the step that follows."""


@dataclass
class OrtState:
    """OrtValues on the engine's device."""

    src_lengths: Ints
    cross: list[OrtValue]
    past: list[OrtValue]
    parents: Ints
    position: int = 0


class OrtGraphs:
    """The two sessions of a bundle's graphs."""

    def __init__(self, bundle: Bundle, threads: int = 0, variant: str = "", device: str = "cpu") -> None:
        self.bundle, self.config, self.variant = bundle, bundle.config, variant
        self.recipe = bundle.variants[variant] if variant else bundle.recipe
        self.device = device
        self.threads = threads or len(os.sched_getaffinity(0))
        self.limits = Limits.of(self.recipe.axes)
        self.attention, self.precision = self.recipe.attention, str(self.recipe.precision)
        self.step_graph = "decoder_step"
        self.profile = ""
        """Where the sessions write their traces, if anywhere: the beginning of a file name."""

    def __enter__(self) -> Self:
        check_one_onnxruntime()
        if self.device == "cuda":
            prepare_cuda()
        with ThreadPoolExecutor() as pool:  # the three take about as long as each other
            verified = pool.submit(self.bundle.verify_graphs, self.variant)
            sessions = (
                pool.submit(self._session, "encoder", SHORT_SPIN_US),
                pool.submit(self._session, self.step_graph, 0),
            )
            verified.result()  # first, as a damaged graph may not load either
            self._encoder, self._step = (session.result() for session in sessions)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._encoder, self._step

    def run(self, session: ort.InferenceSession, binding: Any, options: ort.RunOptions | None = None) -> None:
        """Run a session. Raises EngineError."""
        try:
            session.run_with_iobinding(binding, options)
        except Exception as error:  # the library's exceptions share no base class
            raise EngineError(f"onnxruntime {ort.__version__} stopped in {self.bundle.directory}: {error}") from None

    def layers(self, src_ids: Ints, src_lengths: Ints, tgt_ids: Ints) -> dict[str, Floats]:
        """See `Engine.layers`. Raises MissingExtra where onnx is not installed."""
        try:
            from .ort_layers import layer_values
        except ModuleNotFoundError as error:
            raise missing_extra(error) from None
        return layer_values(self, src_ids, src_lengths, tgt_ids)

    def options(self, spin_us: int) -> ort.SessionOptions:
        """The settings of a session; its threads stay awake so long after an operator, with 0 as long as is usual."""
        options = ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        if spin_us:
            options.add_session_config_entry("session.intra_op.spin_duration_us", str(spin_us))
        # Without VNNI, products of unsigned and signed bytes overflow, unless the weights are made unsigned as well.
        options.add_session_config_entry("session.x64quantprecision", str(int(not has_vnni())))
        # The fused kernel takes several times as long as its parts.
        options.add_session_config_entry("optimization.disable_specified_optimizers", "SkipLayerNormFusion")
        if self.profile:
            options.enable_profiling = True
        return options

    def sessions(self) -> list[ort.InferenceSession]:
        """Of the encoder and of the step."""
        return [self._encoder, self._step]

    def _session(self, graph: str, spin_us: int, **cuda: str) -> ort.InferenceSession:
        """`cuda`: more options of the provider for GPUs. Raises ArtifactError, on a GPU EngineError."""
        path, options = self.bundle.graph(graph, self.variant), self.options(spin_us)
        if self.profile:  # the library adds the time to the name, which may be the same for both
            options.profile_file_prefix = f"{self.profile}_{graph}"
        providers = [
            (name, {**how, **cuda} if name.startswith("CUDA") else how) for name, how in PROVIDERS[self.device]
        ]
        try:
            session = ort.InferenceSession(path, options, providers=providers, enable_fallback=0)
        except Exception as error:  # the library's exceptions share no base class
            if self.device == "cuda":
                raise EngineError(f"onnxruntime {ort.__version__} cannot run {path} on a GPU: {error}") from None
            raise ArtifactError(f"onnxruntime {ort.__version__} cannot load {path}: {error}; update it") from None
        if self.device == "cuda" and "CUDAExecutionProvider" not in session.get_providers():
            raise EngineError(
                f"onnxruntime {ort.__version__} finds no GPU that it can use, or not the libraries of CUDA and cuDNN: "
                "look at nvidia-smi, then pip install 'onnxruntime-gpu[cuda,cudnn]'"
            )
        self.bundle.check_metadata(graph, session.get_modelmeta().custom_metadata_map, self.recipe)
        return session


class OrtEngine(OrtGraphs):
    """Runs a bundle's standard graphs."""

    def __enter__(self) -> Self:
        super().__enter__()
        self._cross = [spec.name for spec in caches("cross", self.config, ())]
        self._past = [spec.name for spec in caches("past", self.config, ())]
        self._outputs = [spec.name for spec in signature("decoder_step", self.config, self.recipe).outputs]
        return self

    def encode(self, src_ids: Ints, src_lengths: Ints, outlook: Outlook = ANYTHING) -> OrtState:
        """See `Engine.encode`."""
        batch, lengths = len(src_ids), np.array(src_lengths, np.int32)
        cross = self._encode(src_ids, lengths)
        empty = np.zeros((batch, self.config.heads, 0, self.config.head_dim), np.float32)
        past = [OrtValue.ortvalue_from_numpy(empty)] * len(self._past)
        parents = np.arange(batch, dtype=np.int32)[:, None]
        return OrtState(lengths, cross, past, parents)

    def _encode(self, src_ids: Ints, lengths: Ints) -> list[OrtValue]:
        """The encoder's outputs."""
        check_request(src_ids, lengths, self.config, self.limits)
        binding = self._encoder.io_binding()
        binding.bind_cpu_input("src_ids", np.ascontiguousarray(src_ids, np.int32))
        binding.bind_cpu_input("src_lengths", lengths)
        for name in self._cross:
            binding.bind_output(name)
        self.run(self._encoder, binding)
        return binding.get_outputs()[: len(self._cross)]  # type: ignore[no-any-return]

    def best(self, beams: int, state: Any = None) -> int:
        """See `Engine.best`."""
        return self.recipe.top_k or 2 * beams - 1

    def step(self, tokens: Ints, state: OrtState, full: bool = False, attention: bool = False) -> Scores:
        """See `Engine.step`."""
        check_step(tokens.shape[1], state.position, self.limits)
        if attention and not self.attention:
            raise LimitError(
                "this bundle's step does not return attention: export with a recipe that has attention = true, "
                "such as fp32-attention"
            )
        binding = self._step.io_binding()
        binding.bind_cpu_input("tokens", np.ascontiguousarray(tokens, np.int32))
        binding.bind_cpu_input("parents", state.parents)
        binding.bind_cpu_input("position", np.array([state.position], np.int32))
        binding.bind_cpu_input("src_lengths", state.src_lengths)
        for name, value in zip([*self._cross, *self._past], [*state.cross, *state.past], strict=True):
            binding.bind_ortvalue_input(name, value)
        asked = {"log_probs": full, "attention": attention}
        names = [name for name in self._outputs if asked.get(name, True)]
        for name in names:
            binding.bind_output(name)
        self.run(self._step, binding)
        outputs = binding.get_outputs()[: len(names)]
        state.past = outputs[-len(self._past) :]
        found = {name: view(value).copy() for name, value in zip(names, outputs[: -len(self._past)], strict=False)}
        state.position += 1
        state.parents = np.arange(tokens.size, dtype=np.int32).reshape(tokens.shape)
        return Scores(found["top_ids"], found["top_scores"], found.get("log_probs"), found.get("attention"))

    def reorder(self, state: OrtState, parents: Ints, sentences: Ints | None = None) -> None:
        """See `Engine.reorder`."""
        state.parents = np.ascontiguousarray(parents, np.int32)
        if sentences is not None:
            state.src_lengths = state.src_lengths[sentences]
            state.cross = [OrtValue.ortvalue_from_numpy(view(value)[sentences]) for value in state.cross]

    def cross_keys_values(self, state: Any) -> list[Floats]:
        """See `Engine.cross_keys_values`."""
        return [view(value).copy() for value in state.cross]


def view(value: OrtValue) -> Any:
    """The memory of a CPU OrtValue as an array, not copied; valid as long as the OrtValue lives."""
    return value.numpy()


def has_vnni() -> bool:
    """Whether the processor sums products of bytes in 32 bits."""
    info = Path("/proc/cpuinfo")
    return info.is_file() and "_vnni" in info.read_text()


def prepare_cuda() -> None:
    """Load the libraries that the provider needs, where pip has installed them. Raises MissingExtra."""
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        raise MissingExtra(
            f"onnxruntime {ort.__version__} here is without CUDA: "
            "pip uninstall onnxruntime, then install 'tformer-deploy[gpu]'"
        )
    with redirect_stdout(sys.stderr):  # where it says what it does not find
        ort.preload_dlls()


def check_one_onnxruntime() -> None:
    """Both wheels own the module `onnxruntime`; with both installed, which files won is chance. Raises ConfigError."""
    # Where the module lies; asking for the distributions by name would be a tenth of a command's start.
    site = Path(ort.__file__).parent.parent
    if all(any(site.glob(f"{wheel}-*.dist-info")) for wheel in ("onnxruntime", "onnxruntime_gpu")):
        raise ConfigError(
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other: "
            "pip uninstall both, then install 'tformer-deploy[cpu]' or 'tformer-deploy[gpu]'"
        )
