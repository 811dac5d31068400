"""The values inside a bundle's graphs, read by making them outputs of a copy in memory. Needs onnx."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime as ort

from ..contract import GRAPHS, caches, layer_names
from ..errors import EngineError
from .base import Floats, Ints, check_request, check_step

if TYPE_CHECKING:
    from .ort import OrtEngine


def layer_values(engine: OrtEngine, src_ids: Ints, src_lengths: Ints, tgt_ids: Ints) -> dict[str, Floats]:
    """See `Engine.layers`."""
    config, batch = engine.config, len(src_ids)
    check_request(src_ids, src_lengths, config, engine.limits)
    encoder, step = (open_copy(engine, graph) for graph in GRAPHS)
    lengths = np.array(src_lengths, np.int32)
    values = run(encoder, {"src_ids": np.array(src_ids, np.int32), "src_lengths": lengths})
    cross = {spec.name: values[spec.name] for spec in caches("cross", config, ())}
    empty = np.zeros((batch, config.heads, 0, config.head_dim), np.float32)
    past = {spec.name: empty for spec in caches("past", config, ())}
    steps = []
    for position, token in enumerate(tgt_ids.T):
        check_step(1, position, engine.limits)
        feed = {
            "tokens": np.array(token[:, None], np.int32),
            "parents": np.arange(batch, dtype=np.int32)[:, None],
            "position": np.array([position], np.int32),
            "src_lengths": lengths,
        }
        found = run(step, {**feed, **cross, **past})
        past = {name: found[name.replace("past", "present")] for name in past}
        steps.append(found)
    for name in (*layer_names("decoder_step", config), "log_probs"):
        if name in steps[0]:
            values[name] = np.concatenate([found[name] for found in steps], 1)
    return values


def open_copy(engine: OrtEngine, graph: str) -> ort.InferenceSession:
    """A session whose first outputs are the layer values that the graph has."""
    path = engine.bundle.graph(graph)
    model = onnx.load(path, load_external_data=False)
    present = {name for node in model.graph.node for name in node.output}
    outputs = list(model.graph.output)
    del model.graph.output[:]
    names = [name for name in layer_names(graph, engine.config) if name in present]
    model.graph.output.extend([*(onnx.ValueInfoProto(name=name) for name in names), *outputs])
    options = engine.options(spin=False)
    # A model from memory has no folder of its own in which weights beside the graph could lie.
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(session: ort.InferenceSession, feed: dict[str, Any]) -> dict[str, Floats]:
    """All outputs by name, in order."""
    names = [output.name for output in session.get_outputs()]
    try:
        return dict(zip(names, session.run(names, feed), strict=True))
    except Exception as error:  # the library's exceptions share no base class
        raise EngineError(f"onnxruntime {ort.__version__} stopped in a copy that shows its layers: {error}") from None
