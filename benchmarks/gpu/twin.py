"""The PyTorch model that computes what graphs of target `trt` compute, read back from their numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import numpy_helper

from tformer_deploy.config import ModelConfig
from tformer_deploy.contract import GRAPHS
from tformer_deploy.model import Transformer

Arrays = dict[str, NDArray[np.float32]]


def eager_twin(folder: Path, config: ModelConfig) -> Transformer:
    """The model of both graphs in `folder`; what was tied in it is not, and an annotated norm is a standard one."""
    encoder, step = (floats(folder / f"{graph}.onnx") for graph in GRAPHS)
    scale = math.sqrt(config.d_model) if config.scale_embeddings else 1
    state: Arrays = {}
    for side, arrays in (("src", encoder), ("tgt", step)):
        state[f"{side}_embedding.weight"] = arrays.pop("embedding") / np.float32(scale)
        state[f"{side}_positions"] = arrays.pop("positions")
    for name, array in {**encoder, **step}.items():
        state |= parameters(name, array, math.sqrt(config.decoder.head_dim))
    model = Transformer(replace(config, norm="standard", share_embeddings="none", positions="learned"))
    model.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in state.items()})
    return model


def floats(graph: Path) -> Arrays:
    """The graph's fp32 arrays by name."""
    found = {each.name: numpy_helper.to_array(each) for each in onnx.load(graph).graph.initializer}
    return {name: array for name, array in found.items() if array.dtype == np.float32 and array.ndim}


def parameters(name: str, array: NDArray[np.float32], query_scale: float) -> Arrays:
    """The parameters that an array of a graph was made of."""
    kind = "bias" if name.endswith(".bias") else "weight"
    product = name.removesuffix(".bias").removesuffix(".gain")
    names = [product]
    if product.endswith(".attention.query"):
        names = [product.replace("query", part) for part in ("query", "key", "value")]
    found = {}
    for each, part in zip(names, np.split(array, len(names), -1), strict=True):
        found[f"{each}.{kind}"] = (part * np.float32(query_scale) if each.endswith(".query") else part).T
    return found
