"""OpenVINO on processors: a bundle's standard graphs, in fp32 or with bf16 inside."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from ..base import messages
from ..base.errors import ArtifactError, EngineError, LimitError
from ..base.machine import cores
from ..base.notes import one_line
from ..bundle.contract import GRAPHS, TensorSpec, cache_names, layer_names, signature
from ..bundle.manifest import Bundle
from .base import ANYTHING, Floats, Ints, Limits, Outlook, SameStep, Scores, check_request, check_step
from .ort.operators import require_no_control_flow
from .spec import Opening

# The package reports its own import to its vendor, unless the part that does so is not there.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
import openvino as ov  # noqa: E402
from openvino import opset13 as opset  # noqa: E402
from openvino.frontend import FrontEndManager  # noqa: E402

TYPES = {"int32": ov.Type.i32, "float32": ov.Type.f32}
"""OpenVINO's types of the contract's."""
PRECISIONS = {"fp32": ov.Type.f32, "bf16": ov.Type.bf16}
_PLACES = re.compile(r"Exception from \S+:\d+:|Check '.*' failed at \S+:\d+:|\[ ?[A-Z_]+ ?\]")
"""Parts of its messages that are left out: source files, and conditions that failed."""


def load_runtime() -> None:
    """OpenVINO is imported with this module."""


def open_engine(opening: Opening) -> OpenVinoEngine:
    """The standard graphs, at the precision that the variant names."""
    return OpenVinoEngine(opening.bundle, opening.threads, opening.variant or "fp32")


@dataclass
class OpenVinoState:
    """Tensors, and two requests that alternate, as a step reads the caches in the other request's outputs."""

    src_lengths: Ints
    cross: list[ov.Tensor]
    past: list[ov.Tensor]
    parents: Ints
    turns: tuple[ov.InferRequest, ov.InferRequest]
    position: int = 0


class OpenVinoEngine(SameStep):
    """Runs a bundle's standard graphs."""

    def __init__(self, bundle: Bundle, threads: int = 0, precision: str = "fp32") -> None:
        self.bundle, self.config, self.recipe, self.precision = bundle, bundle.config, bundle.recipe, precision
        self.threads, self.attention = threads or cores(), self.recipe.attention
        self.limits = Limits.of(self.recipe.axes)

    def __enter__(self) -> Self:
        self._core = ov.Core()
        if self.precision == "bf16" and "BF16" not in self._core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            raise EngineError("openvino:bf16: this processor does not compute in bf16: use openvino, which has fp32")
        self.bundle.verify_graphs("")
        self._encoder, self._step = (self._compiled(self._read(graph)) for graph in GRAPHS)
        names = (cache_names(kind, self.config) for kind in ("cross", "past", "present"))
        self._cross, self._past, self._present = names
        step = signature(GRAPHS[1], self.config, self.recipe)
        self._carried = [spec for spec in step.inputs if spec.name in self._past]
        return self

    def __exit__(self, *why: object) -> None:
        del self._encoder, self._step, self._core

    def _read(self, graph: str) -> ov.Model:
        """A graph that is the bundle's. Raises ArtifactError."""
        path = self.bundle.graph(graph)
        try:
            require_no_control_flow(path)
            reader = FrontEndManager().load_by_framework("onnx")  # others would print what they cannot read
            model = reader.convert(reader.load(str(path)))
            names = model.get_rt_info()["framework"]
            metadata = {name: str(model.get_rt_info(["framework", name]).value) for name in names}
        except (RuntimeError, KeyError, ValueError) as error:
            said = f"it is damaged, or tformer did not make it ({reason(error)}): copy or export the bundle again"
            raise ArtifactError(f"openvino {ov.__version__} cannot load {path}: {said}") from None
        self.bundle.check_metadata(graph, metadata, self.recipe)
        wanted = signature(graph, self.config, self.recipe)
        found = {name: each for each in (*model.inputs, *model.outputs) for name in each.names}
        for spec in (*wanted.inputs, *wanted.outputs):
            check_tensor(path, spec, found)
        for node in model.get_ops():
            if node.get_type_name() == "TopK":  # one more than asked for, see `in_order`
                more = opset.add(node.input_value(1), opset.constant(1, node.input_value(1).get_element_type()))
                most = opset.constant(self.config.tgt_vocab, more.get_output_element_type(0))
                node.input(1).replace_source_output(opset.minimum(more, most).output(0))
        return model

    def _compiled(self, model: ov.Model) -> ov.CompiledModel:
        """The graph compiled for the CPU: enough streams that all cores work, not pinned, as others may use a core.

        Without fused subgraphs: in 2026.4.1 fused attention is wrong from the 17th key on, once sizes have changed.
        """
        streams = max(1, cores() // self.threads)
        options = {
            "INFERENCE_PRECISION_HINT": PRECISIONS[self.precision],
            "INFERENCE_NUM_THREADS": self.threads * streams,
            "NUM_STREAMS": streams,
            "ENABLE_CPU_PINNING": False,
            "SNIPPETS_MODE": "DISABLE",
        }
        try:
            return self._core.compile_model(model, "CPU", options)
        except RuntimeError as error:
            where, said = self.bundle.directory, reason(error)
            raise EngineError(f"openvino {ov.__version__} cannot compile {where}: {said}") from None

    def encode(self, src_ids: Ints, src_lengths: Ints, outlook: Outlook = ANYTHING) -> OpenVinoState:
        """See `Engine.encode`."""
        batch, lengths = len(src_ids), np.array(src_lengths, np.int32)
        check_request(src_ids, lengths, self.config, self.limits)
        request = self._encoder.create_infer_request()  # which owns its outputs
        self._run(request, {"src_ids": src_ids, "src_lengths": lengths})
        cross = [request.get_tensor(name) for name in self._cross]
        sizes = {"past_rows": batch, "past_len": 0}
        past = [shared(np.zeros(each.sized(sizes), np.float32)) for each in self._carried]
        turns = self._step.create_infer_request(), self._step.create_infer_request()
        return OpenVinoState(lengths, cross, past, np.arange(batch, dtype=np.int32)[:, None], turns)

    def best(self, beams: int, state: Any = None) -> int:
        """See `Engine.best`."""
        return self.recipe.top_k or 2 * beams - 1

    def step(self, tokens: Ints, state: OpenVinoState, full: bool = False, attention: bool = False) -> Scores:
        """See `Engine.step`."""
        check_step(tokens.shape[1], state.position, self.limits)
        if attention and not self.attention:
            raise LimitError(messages.NO_ATTENTION)
        request = state.turns[state.position % 2]
        self._run(request, self._feed(tokens, state))
        found = {name: request.get_tensor(name).data for name in ("top_ids", "top_scores", "log_probs")}
        wanted = self.best(tokens.shape[1])
        if any(array.shape[:2] != tokens.shape for array in found.values()) or found["top_ids"].shape[2] < wanted:
            shapes = {name: list(array.shape) for name, array in found.items()}
            raise EngineError(f"{self.bundle.graph(GRAPHS[1])} returns {shapes}: export the bundle again")
        ids, scores = in_order(found["top_ids"], found["top_scores"], found["log_probs"], wanted)
        looked = request.get_tensor("attention").data.copy() if attention else None
        state.past = [request.get_tensor(name) for name in self._present]
        state.position += 1
        state.parents = np.arange(tokens.size, dtype=np.int32).reshape(tokens.shape)
        return Scores(ids, scores, found["log_probs"].copy() if full else None, looked)

    def _feed(self, tokens: Ints, state: OpenVinoState) -> dict[str, Any]:
        """The inputs of a step."""
        arrays = {"tokens": tokens, "parents": state.parents, "position": [state.position]}
        tensors = zip([*self._cross, *self._past], [*state.cross, *state.past], strict=True)
        return {**arrays, "src_lengths": state.src_lengths, **dict(tensors)}

    def reorder(self, state: OpenVinoState, parents: Ints, sentences: Ints | None = None) -> None:
        """See `Engine.reorder`."""
        state.parents = state.parents.ravel()[parents]
        if sentences is not None:
            state.src_lengths = state.src_lengths[sentences]
            state.cross = [shared(tensor.data[sentences]) for tensor in state.cross]

    def cross_keys_values(self, state: OpenVinoState) -> list[Floats]:
        """See `Engine.cross_keys_values`."""
        return [tensor.data.copy() for tensor in state.cross]

    def layers(self, src_ids: Ints, src_lengths: Ints, tgt_ids: Ints) -> dict[str, Floats]:
        """See `Engine.layers`."""
        check_request(src_ids, src_lengths, self.config, self.limits)
        (encode, encoder), (step, inside) = (self._showing(graph) for graph in GRAPHS)
        lengths = np.array(src_lengths, np.int32)
        self._run(encode, {"src_ids": src_ids, "src_lengths": lengths})
        values = {name: encode.get_tensor(name).data.copy() for name in (*encoder, *self._cross)}
        state = self.encode(src_ids, lengths)
        steps: list[dict[str, Floats]] = []
        for state.position, token in enumerate(tgt_ids.T):
            check_step(1, state.position, self.limits)
            self._run(step, self._feed(token[:, None], state))
            steps.append({name: step.get_tensor(name).data.copy() for name in (*inside, "log_probs")})
            state.past = [shared(step.get_tensor(name).data.copy()) for name in self._present]
        for name in steps[0]:
            values[name] = np.concatenate([found[name].reshape(len(lengths), 1, -1) for found in steps], 1)
        return values

    def _showing(self, graph: str) -> tuple[ov.InferRequest, list[str]]:
        """A request of a copy of a graph that also returns its layers, and their names."""
        model = self._read(graph)
        inside = {name for node in model.get_ops() for output in node.outputs() for name in output.names}
        model.add_outputs(names := [name for name in layer_names(graph, self.config) if name in inside])
        return self._compiled(model).create_infer_request(), names

    def _run(self, request: ov.InferRequest, feed: Mapping[str, Any]) -> None:
        """Run a graph; its outputs are the request's until that runs again. Raises EngineError."""
        tensors = {name: shared(each, np.int32) for name, each in feed.items()}  # which must live until the call ends
        try:
            for name, tensor in tensors.items():
                request.set_tensor(name, tensor)
            request.start_async()
            request.wait()
        except RuntimeError as error:
            where, said = self.bundle.directory, reason(error)
            remedy = "use smaller batches" if "alloc" in said else "export the bundle again if tformer check fails too"
            raise EngineError(f"openvino {ov.__version__} stopped in {where}: {said}: {remedy}") from None


def in_order(ids: Ints, scores: Floats, log_probs: Floats, best: int) -> tuple[Ints, Floats]:
    """The best tokens (B, K, best), equal scores by the lower id, of at least one more in any order of equal ones.

    OpenVINO can sort so itself, but 10 times as slowly where the vocabulary has 32,000 tokens.
    """
    last, ids = scores[..., best - 1 : best], ids.copy()
    for row in map(tuple, np.argwhere((last == scores[..., best:]).any(-1))):  # which of equal ones came was chance
        above = int((scores[row] > last[row]).sum())
        ids[row][above:best] = np.flatnonzero(log_probs[row] == last[row])[: best - above]
    ids, scores = ids[..., :best], scores[..., :best]
    order = np.lexsort((ids, -scores))
    return np.take_along_axis(ids, order, -1), np.take_along_axis(scores, order, -1)


def shared(value: Any, dtype: type[np.generic] | None = None) -> ov.Tensor:
    """A tensor over the memory of an array, which it keeps; a request keeps neither."""
    own = isinstance(value, ov.Tensor)
    return value if own else ov.Tensor(np.ascontiguousarray(value, dtype), shared_memory=True)


def check_tensor(path: Path, spec: TensorSpec, found: Mapping[str, Any]) -> None:
    """Raise ArtifactError for a graph without an input or output of the contract, or with one of another kind."""
    if spec.name not in found:
        raise ArtifactError(f"{path} has no '{spec.name}': it is not a graph of tformer, export the bundle again")
    shape, dtype = found[spec.name].get_partial_shape(), found[spec.name].get_element_type()
    sizes = ov.PartialShape([size if isinstance(size, int) else -1 for size in spec.shape])
    if dtype != TYPES[spec.dtype] or not shape.compatible(sizes):
        wanted = f"{spec.dtype} of {list(spec.shape)}"
        raise ArtifactError(f"{path}: '{spec.name}' is {dtype} of {shape}, not {wanted}: export the bundle again")


def reason(error: Exception) -> str:
    """The message of an exception, on one short line."""
    return one_line(error, _PLACES)
