"""ONNX Runtime with the standard graphs: caches stay OrtValues between steps, by IO binding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from ...base import messages
from ...base.errors import ArtifactError, EngineError, LimitError, extras
from ...base.machine import cores
from ...bundle.contract import Signature, cache_names, signature
from ...bundle.manifest import Bundle
from ..base import ANYTHING, Floats, Ints, Limits, Outlook, SameStep, Scores, check_request, check_step
from .library import (
    CPU,
    SHORT_SPIN_US,
    InferenceSession,
    OrtValue,
    Providers,
    RunOptions,
    SessionOptions,
    check_library,
    has_vnni,
    loading,
    open_session,
    ort,
    prepare_cuda,
    reason,
    session_options,
)
from .operators import require_no_control_flow

PROVIDERS: dict[str, Providers] = {"cpu": CPU, "cuda": [("CUDAExecutionProvider", {"use_tf32": "0"}), *CPU]}
"""Execution providers; shapes are always computed on the processor."""
ONNX_TYPES = {"int32": ("tensor(int32)",), "int8": ("tensor(int8)",), "float32": ("tensor(float)", "tensor(float16)")}
"""ONNX Runtime's types of the contract's; half precision is for graphs that TensorRT compiles."""


@dataclass
class OrtState:
    """OrtValues on the engine's device."""

    src_lengths: Ints
    cross: list[OrtValue]
    past: list[OrtValue]
    parents: Ints
    position: int = 0


class OrtGraphs(SameStep):
    """The two sessions of a bundle's graphs."""

    def __init__(self, bundle: Bundle, threads: int = 0, variant: str = "", device: str = "cpu") -> None:
        self.bundle, self.config, self.variant = bundle, bundle.config, variant
        self.recipe = bundle.variants[variant] if variant else bundle.recipe
        self.device = device
        self.threads = threads or cores()
        self.limits = Limits.of(self.recipe.axes)
        self.attention, self.precision = self.recipe.attention, str(self.recipe.precision)
        self.step_graph = "decoder_step"
        self.profile = ""
        """Prefix of the files for profiles of the sessions; empty: none are written."""

    def __enter__(self) -> Self:
        check_library()
        if self.device == "cuda":
            prepare_cuda()
        with ThreadPoolExecutor() as pool:
            verified, opened = pool.submit(self.bundle.verify_graphs, self.variant), pool.submit(self._both_sessions)
            verified.result()  # first, as a damaged graph may not load either
            self._encoder, self._step = opened.result()
        return self

    def _both_sessions(self) -> tuple[InferenceSession, InferenceSession]:
        """The step first, and alone: while its output is packed, the largest matrix is in memory twice."""
        step = self._session(self.step_graph, 0)
        return self._session("encoder", SHORT_SPIN_US), step

    def __exit__(self, *why: object) -> None:
        del self._encoder, self._step

    def run(self, session: InferenceSession, binding: Any, options: RunOptions | None = None) -> None:
        """Run a session. Raises EngineError."""
        try:
            session.run_with_iobinding(binding, options)
        except Exception as error:  # the library's exceptions share no base class
            where, said = self.bundle.directory / self.variant, reason(error)
            remedy = "use smaller batches" if "alloc" in said else "export the bundle again if tformer check fails too"
            raise EngineError(f"onnxruntime {ort.__version__} stopped in {where}: {said}: {remedy}") from None

    def call(self, session: InferenceSession, feed: Mapping[str, Any], names: Sequence[str]) -> list[OrtValue]:
        """Some outputs of a session, for arrays and OrtValues. Raises EngineError."""
        binding = session.io_binding()
        for name, value in feed.items():
            (binding.bind_cpu_input if isinstance(value, np.ndarray) else binding.bind_ortvalue_input)(name, value)
        for name in names:
            binding.bind_output(name)
        self.run(session, binding)
        return binding.get_outputs()  # type: ignore[no-any-return]

    def layers(self, src_ids: Ints, src_lengths: Ints, tgt_ids: Ints) -> dict[str, Floats]:
        """See `Engine.layers`. Raises MissingExtra where onnx is not installed."""
        with extras():
            from .layers import layer_values
        return layer_values(self, src_ids, src_lengths, tgt_ids)

    def options(self, spin_us: int) -> SessionOptions:
        """The settings of a session; `spin_us`: how long threads spin after an operator, 0: the library's default."""
        options = session_options(self.threads)
        if spin_us:
            options.add_session_config_entry("session.intra_op.spin_duration_us", str(spin_us))
        # Without VNNI, products of unsigned and signed bytes overflow, unless the weights are made unsigned as well.
        options.add_session_config_entry("session.x64quantprecision", str(int(not has_vnni())))
        # The fused kernel takes several times as long as its parts.
        options.add_session_config_entry("optimization.disable_specified_optimizers", "SkipLayerNormFusion")
        if self.profile:
            options.enable_profiling = True
        return options

    def sessions(self) -> list[InferenceSession]:
        """The encoder's and the step's."""
        return [self._encoder, self._step]

    def _session(self, graph: str, spin_us: int, **cuda: str) -> InferenceSession:
        """`cuda`: more options of the provider for GPUs. Raises ArtifactError, on a GPU EngineError."""
        path, options = self.bundle.graph(graph, self.variant), self.options(spin_us)
        if self.profile:  # the library adds the time to the name, which may be the same for both
            options.profile_file_prefix = f"{self.profile}_{graph}"
        providers = [
            (name, {**how, **cuda} if name.startswith("CUDA") else how) for name, how in PROVIDERS[self.device]
        ]
        with loading(path, on_gpu=self.device == "cuda"):
            require_no_control_flow(path)
            session = open_session(path, options, providers, self._changed(graph, path))
            metadata = dict(session.get_modelmeta().custom_metadata_map)
            found = {value.name: value for value in (*session.get_inputs(), *session.get_outputs())}
        if self.device == "cuda" and "CUDAExecutionProvider" not in session.get_providers():
            raise EngineError(
                f"onnxruntime {ort.__version__} finds no GPU that it can use, or not the libraries of CUDA and cuDNN: "
                "look at nvidia-smi, then pip install 'onnxruntime-gpu[cuda,cudnn]'"
            )
        self.bundle.check_metadata(graph, metadata, self.recipe)
        check_tensors(path, found, signature(graph, self.config, self.recipe))
        return session

    def _changed(self, graph: str, path: Path) -> bytes:
        """A copy of the graph to run instead of its file, if any."""
        return b""


class OrtEngine(OrtGraphs):
    """Runs a bundle's standard graphs."""

    def __enter__(self) -> Self:
        super().__enter__()
        self._cross = cache_names("cross", self.config)
        self._past = cache_names("past", self.config)
        step = signature("decoder_step", self.config, self.recipe)
        self._outputs = [spec.name for spec in step.outputs]
        self._carried = [spec for spec in step.inputs if spec.name in self._past]
        return self

    def encode(self, src_ids: Ints, src_lengths: Ints, outlook: Outlook = ANYTHING) -> OrtState:
        """See `Engine.encode`."""
        batch, lengths = len(src_ids), np.array(src_lengths, np.int32)
        cross = self._encode(src_ids, lengths)
        sizes = {"past_rows": batch, "past_len": 0}
        past = [OrtValue.ortvalue_from_numpy(np.zeros(each.sized(sizes), np.float32)) for each in self._carried]
        parents = np.arange(batch, dtype=np.int32)[:, None]
        return OrtState(lengths, cross, past, parents)

    def _encode(self, src_ids: Ints, lengths: Ints) -> list[OrtValue]:
        """The encoder's outputs."""
        check_request(src_ids, lengths, self.config, self.limits)
        feed = {"src_ids": np.ascontiguousarray(src_ids, np.int32), "src_lengths": lengths}
        return self.call(self._encoder, feed, self._cross)

    def best(self, beams: int, state: Any = None) -> int:
        """See `Engine.best`."""
        return self.recipe.top_k or 2 * beams - 1

    def step(self, tokens: Ints, state: OrtState, full: bool = False, attention: bool = False) -> Scores:
        """See `Engine.step`."""
        check_step(tokens.shape[1], state.position, self.limits)
        if attention and not self.attention:
            raise LimitError(messages.NO_ATTENTION)
        feed: dict[str, Any] = {
            "tokens": np.ascontiguousarray(tokens, np.int32),
            "parents": state.parents,
            "position": np.array([state.position], np.int32),
            "src_lengths": state.src_lengths,
            **dict(zip([*self._cross, *self._past], [*state.cross, *state.past], strict=True)),
        }
        asked = {"log_probs": full, "attention": attention}
        names = [name for name in self._outputs if asked.get(name, True)]
        outputs = self.call(self._step, feed, names)
        state.past = outputs[-len(self._past) :]
        found = {name: view(value).copy() for name, value in zip(names, outputs[: -len(self._past)], strict=False)}
        self._check(found, tokens.shape)
        state.position += 1
        state.parents = np.arange(tokens.size, dtype=np.int32).reshape(tokens.shape)
        return Scores(found["top_ids"], found["top_scores"], found.get("log_probs"), found.get("attention"))

    def _check(self, found: Mapping[str, Any], rows: tuple[int, ...]) -> None:
        """Raise EngineError where a step does not return what belongs to `rows`, (B, K)."""
        best = (self.best(rows[1]),)
        for name, array in found.items():
            if array.shape[:2] != rows or (name.startswith("top_") and array.shape[2:] != best):
                path = self.bundle.graph(self.step_graph, self.variant)
                raise EngineError(f"{path} returns '{name}' of {list(array.shape)}: export the bundle again")

    def reorder(self, state: OrtState, parents: Ints, sentences: Ints | None = None) -> None:
        """See `Engine.reorder`."""
        state.parents = state.parents.ravel()[parents]
        if sentences is not None:
            state.src_lengths = state.src_lengths[sentences]
            state.cross = [OrtValue.ortvalue_from_numpy(view(value)[sentences]) for value in state.cross]

    def cross_keys_values(self, state: Any) -> list[Floats]:
        """See `Engine.cross_keys_values`."""
        return [view(value).copy() for value in state.cross]


def view(value: OrtValue) -> Any:
    """The memory of a CPU OrtValue as an array, not copied; valid as long as the OrtValue lives."""
    return value.numpy()


def check_tensors(path: Path, found: Mapping[str, Any], wanted: Signature) -> None:
    """Raise ArtifactError for a graph without an input or output of the contract, or with one of another kind."""
    for spec in (*wanted.inputs, *wanted.outputs):
        value = found.get(spec.name)
        if value is None:
            raise ArtifactError(f"{path} has no '{spec.name}': it is not a graph of tformer, export the bundle again")
        sizes = zip(value.shape, spec.shape, strict=False)
        fits = value.type in ONNX_TYPES[spec.dtype] and len(value.shape) == len(spec.shape)
        if not fits or any(size != other for size, other in sizes if isinstance(size, int) and isinstance(other, int)):
            raise ArtifactError(
                f"{path}: '{spec.name}' is {value.type} of {value.shape}, not {spec.dtype} of {list(spec.shape)}: "
                "export the bundle again"
            )
