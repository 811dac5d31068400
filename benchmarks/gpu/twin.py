"""The PyTorch model that computes what the graphs of a variant compute, read back from their constants."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import numpy_helper

from tformer_deploy.base.errors import ArtifactError
from tformer_deploy.bundle.contract import GRAPHS
from tformer_deploy.check.constants import NAME, ORIGIN
from tformer_deploy.model.config import ModelConfig
from tformer_deploy.model.network import Transformer


def eager_twin(folder: Path, config: ModelConfig) -> Transformer:
    """The model of both graphs in `folder`, whose constants are fp32 and by their names functions of one tensor each.

    So `config` must tie no tables. Raises ArtifactError where the graphs lack a tensor.
    """
    model = Transformer(config)
    state, lacking = model.state_dict(), set(model.state_dict())
    for graph in GRAPHS:
        for constant in onnx.load(folder / f"{graph}.onnx").graph.initializer:
            parsed = NAME.fullmatch(constant.name)
            parts = [ORIGIN.fullmatch(part) for part in parsed["origins"].split(",")] if parsed else []
            origins = [(part["name"], part["factor"]) for part in parts if part is not None and part["name"] in state]
            if not origins:
                continue
            assert parsed is not None
            array = numpy_helper.to_array(constant)
            array, begin = array.T if parsed["turned"] else array, 0
            for name, factor in origins:
                end = begin + len(state[name])
                state[name] = torch.from_numpy(array[begin:end] / np.float32(factor or 1))
                begin = end
                lacking.discard(name)
    if lacking:
        raise ArtifactError(f"{folder}: no constant of the graphs is {', '.join(sorted(lacking))}")
    model.load_state_dict(state)
    return model
