"""Calibration: the largest absolute value of every tensor in graphs of target `trt`, on real text. Needs onnx."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from ...bundle.contract import GRAPHS
from .device_search import DeviceSearchEngine
from .library import InferenceSession, RunOptions

SUFFIX = ".largest"


class RangeEngine(DeviceSearchEngine):
    """Decodes as `DeviceSearchEngine` does and remembers the largest absolute value of every float tensor."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.largest: dict[str, dict[str, float]] = {name: {} for name in GRAPHS}
        """By graph and tensor; infinite where a value was NaN."""
        self._names: dict[str, list[str]] = {}
        self._watched: dict[Any, tuple[str, list[str]]] = {}

    def _session(self, graph: str, spin_us: int, **cuda: str) -> InferenceSession:
        session = super()._session(graph, spin_us, **cuda)
        self._watched[session] = graph, self._names[graph]
        return session

    def _changed(self, graph: str, path: Path) -> bytes:
        model = onnx.load(path, load_external_data=False)
        inferred = onnx.shape_inference.infer_shapes(model).graph
        values = (*inferred.value_info, *inferred.output)
        names = [value.name for value in values if value.type.tensor_type.elem_type == TensorProto.FLOAT]
        model.graph.initializer.append(helper.make_tensor("infinity", TensorProto.FLOAT, [], [np.inf]))
        for name in names:
            # NaN counts as infinite: ReduceMax may pass over it.
            model.graph.node.extend(
                [
                    helper.make_node("IsNaN", [name], [f"{name}.nan"]),
                    helper.make_node("Abs", [name], [f"{name}.abs"]),
                    helper.make_node("Where", [f"{name}.nan", "infinity", f"{name}.abs"], [f"{name}.size"]),
                    helper.make_node("ReduceMax", [f"{name}.size"], [f"{name}{SUFFIX}"], keepdims=0),
                ]
            )
            model.graph.output.append(helper.make_tensor_value_info(f"{name}{SUFFIX}", TensorProto.FLOAT, []))
        self._names[graph] = names
        return bytes(model.SerializeToString())

    def run(self, session: InferenceSession, binding: Any, options: RunOptions | None = None) -> None:
        """See `OrtGraphs.run`."""
        graph, names = self._watched[session]
        largest = self.largest[graph]
        for name in names:
            binding.bind_output(f"{name}{SUFFIX}")
        super().run(session, binding, options)
        for name, value in zip(names, binding.get_outputs()[-len(names) :], strict=True):
            largest[name] = max(float(value.numpy()), largest.get(name, 0.0))
