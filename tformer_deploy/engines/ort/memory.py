"""ONNX Runtime with the encoder alone: no decoder is loaded."""

from __future__ import annotations

from typing import Self

import numpy as np

from ...base.errors import EngineError
from ...bundle.contract import MEMORY_GRAPH
from ..base import Floats, Ints, check_request
from .library import SHORT_SPIN_US, check_library
from .standard import OrtGraphs, view


class OrtMemory(OrtGraphs):
    """Runs the graph `memory` of a bundle's standard graphs or of a variant."""

    encodes = True

    def __enter__(self) -> Self:
        check_library()
        self.bundle.verify_graphs(self.variant)
        self._memory = self._session(MEMORY_GRAPH, SHORT_SPIN_US)
        return self

    def __exit__(self, *why: object) -> None:
        del self._memory

    def memory(self, src_ids: Ints, src_lengths: Ints) -> Floats:
        """See `Encoder.memory`."""
        check_request(src_ids, src_lengths, self.config, self.limits)
        inputs = {"src_ids": src_ids, "src_lengths": src_lengths}
        feed = {name: np.ascontiguousarray(array, np.int32) for name, array in inputs.items()}
        found = view(self.call(self._memory, feed, ["memory"])[0])
        if found.shape != (*src_ids.shape, self.config.encoder.width):
            path = self.bundle.graph(MEMORY_GRAPH, self.variant)
            raise EngineError(f"{path} returns 'memory' of {list(found.shape)}: export the bundle again")
        return found.copy()  # type: ignore[no-any-return]
