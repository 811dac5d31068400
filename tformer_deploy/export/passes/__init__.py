"""What makes a traced graph a backend's: one file a pass, each a function over a graph; a recipe names its passes."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from ...bundle.recipe import Recipe
from ..quantizing import Ranges
from .fold_scales import fold_scales
from .fold_weights import fold_weights
from .fuse_attention import fuse_attention
from .fuse_norm import fuse_norm
from .merge_matmuls import merge_matmuls
from .older_operators import older_operators
from .quantize import quantize_channels, quantize_groups, quantize_tables
from .rewriting import MICROSOFT
from .shortlists import gather_quantized, quantize_listed
from .simplify import simplify


def run_passes(model: ir.Model, names: tuple[str, ...], recipe: Recipe, ranges: Ranges) -> None:
    """Rewrite a traced graph by passes in order, see `Recipe.passes`. Raises ArtifactError for what one does not know.

    `ranges`: from calibration.
    """
    bits = 8 if recipe.precision == "int8" else 4
    passes: dict[str, Callable[[], None]] = {
        "fuse_norm": lambda: fuse_norm(model.graph, annotated=recipe.target == "native"),
        "fold_scales": lambda: fold_scales(model.graph),
        "fuse_attention": lambda: fuse_attention(model.graph),
        "merge_matmuls": lambda: merge_matmuls(model.graph),
        "quantize_tables": lambda: quantize_tables(model.graph, ranges),
        "quantize_channels": lambda: quantize_channels(model.graph, ranges),
        "quantize_groups": lambda: quantize_groups(model.graph, bits, recipe.group_size, ranges),
        "quantize_listed": lambda: quantize_listed(model.graph, ranges),
        "gather_quantized": lambda: gather_quantized(model.graph, bits, recipe.group_size),
        "fold_weights": lambda: fold_weights(model.graph, gemm=recipe.target == "ort-cpu"),
        "older_operators": lambda: older_operators(model),
    }
    for name in names:
        passes[name]()
        simplify(model, rules=name != "older_operators")
    if any(node.domain == MICROSOFT for node in model.graph):
        model.graph.opset_imports[MICROSOFT] = 1
