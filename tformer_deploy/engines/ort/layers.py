"""Intermediate values of a bundle's graphs: they become outputs of a copy in memory. Needs onnx."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import onnx

from ...base.errors import EngineError
from ...bundle.contract import GRAPHS, cache_names, layer_names
from ...bundle.manifest import Bundle
from ...bundle.recipe import Recipe
from ...model.config import ModelConfig
from ..base import Floats, Ints, Limits, check_request, check_step
from .library import SHORT_SPIN_US, InferenceSession, OrtValue, SessionOptions, loading, open_session, ort, reason


class Graphs(Protocol):
    """The engine whose layers are read."""

    bundle: Bundle
    variant: str
    config: ModelConfig
    recipe: Recipe
    limits: Limits

    def options(self, spin_us: int) -> SessionOptions:
        """The settings of a session."""
        ...


def layer_values(engine: Graphs, src_ids: Ints, src_lengths: Ints, tgt_ids: Ints) -> dict[str, Floats]:
    """See `Engine.layers`."""
    config, (batch, length) = engine.config, tgt_ids.shape
    check_request(src_ids, src_lengths, config, engine.limits)
    encoder, step = (open_copy(engine, graph) for graph in GRAPHS)
    lengths = np.array(src_lengths, np.int32)
    values = run(encoder, {"src_ids": np.array(src_ids, np.int32), "src_lengths": lengths}, {})
    cross = {name: values[name] for name in cache_names("cross", config)}
    static, in_place = engine.recipe.cache == "static", engine.recipe.target == "ort-cpu"
    shape: tuple[int, ...] = batch, config.decoder.heads, length if static else 0, config.decoder.head_dim
    if config.decoder_cell == "ssru":
        shape = batch, config.decoder.width
    past = {name: np.zeros(shape, np.float32) for name in cache_names("past", config)}
    fixed = {
        "src_lengths": lengths,
        **cross,
        "parents": np.arange(batch, dtype=np.int32)[:, None],
        "written_by": np.zeros((batch, 1, length), np.int32),
        "values": np.zeros((batch, 1), np.float32),
        "end_id": np.full(1, -1, np.int32),
        "live_beams": np.ones(1, np.int32),
    }
    asked, steps = {value.name for value in step.get_inputs()}, []
    for position, token in enumerate(tgt_ids.T):
        check_step(1, position, engine.limits)
        positions = np.full((batch, 1), position, np.int32)
        feed = {**fixed, "tokens": token[:, None].astype(np.int32), "position": positions[0], "positions": positions}
        feed |= {} if in_place else past
        found = run(step, {name: feed[name] for name in feed.keys() & asked}, past if in_place else {})
        past = past if in_place else {name: found[name.replace("past", "present")] for name in past}
        steps.append(found)
    for name in (*layer_names("decoder_step", config), "log_probs"):
        if name in steps[0]:
            values[name] = np.concatenate([found[name].reshape(batch, 1, -1) for found in steps], 1)
    return values


def open_copy(engine: Graphs, graph: str) -> InferenceSession:
    """A session whose first outputs are the layer values that the graph has."""
    path = engine.bundle.graph(graph, engine.variant)
    with loading(path):
        model = onnx.load(path, load_external_data=False)
        present = {name for node in model.graph.node for name in node.output}
        outputs = list(model.graph.output)
        del model.graph.output[:]
        names = [name for name in layer_names(graph, engine.config) if name in present]
        model.graph.output.extend([*(onnx.ValueInfoProto(name=name) for name in names), *outputs])
        return open_session(path, engine.options(spin_us=SHORT_SPIN_US), copy=model.SerializeToString())


def run(session: InferenceSession, feed: dict[str, Any], buffers: dict[str, Floats]) -> dict[str, Floats]:
    """All outputs by name, in order; caches in `buffers`, by their `past` names, are read and written in place."""
    binding = session.io_binding()
    for name, array in feed.items():
        binding.bind_ortvalue_input(name, OrtValue.ortvalue_from_numpy(array))
    written = {name.replace("past", "present"): (name, array) for name, array in buffers.items()}
    names = [output.name for output in session.get_outputs()]
    for output in names:
        if output in written:
            name, array = written[output]
            value = OrtValue.ortvalue_from_numpy(array)
            binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(output, value)
        else:
            binding.bind_output(output)
    try:
        session.run_with_iobinding(binding)
    except Exception as error:  # the library's exceptions share no base class
        said = reason(error)
        raise EngineError(f"onnxruntime {ort.__version__} stopped in a copy that shows its layers: {said}") from None
    return dict(zip(names, binding.copy_outputs_to_cpu(), strict=True))
