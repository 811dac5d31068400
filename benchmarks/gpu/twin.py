"""The PyTorch model that computes what the graphs of a variant compute, read back from their constants."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from onnx import numpy_helper

from tformer_deploy.base.errors import ArtifactError
from tformer_deploy.bundle.contract import GRAPHS
from tformer_deploy.export.save import load_graph, origins_of
from tformer_deploy.model.config import ModelConfig
from tformer_deploy.model.network import Transformer


def eager_twin(folder: Path, config: ModelConfig) -> Transformer:
    """The model of both graphs in `folder`, whose constants are fp32 and functions of one tensor each.

    So `config` must tie no tables. Raises ArtifactError where the graphs lack a tensor.
    """
    model = Transformer(config)
    state, lacking = model.state_dict(), set(model.state_dict())
    for graph in GRAPHS:
        path = folder / f"{graph}.onnx"
        exported = load_graph(path)
        origins = origins_of(exported, path)
        for constant in exported.graph.initializer:
            origin = origins.get(constant.name)
            if origin is None or not all(name in state for name in origin.tensors):
                continue
            array = numpy_helper.to_array(constant)
            array, begin = array.T if origin.transposed else array, 0
            for name, factor in zip(origin.tensors, origin.factors or (1.0,) * len(origin.tensors), strict=True):
                end = begin + len(state[name])
                state[name] = torch.from_numpy(array[begin:end] / np.float32(factor))
                begin = end
                lacking.discard(name)
    if lacking:
        raise ArtifactError(f"{folder}: no constant of the graphs is {', '.join(sorted(lacking))}")
    model.load_state_dict(state)
    return model
