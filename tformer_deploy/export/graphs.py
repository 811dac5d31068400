"""The two functions that become graphs: flat inputs and outputs as in `contract.py`, then its named layer values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from ..contract import layer_names
from ..model import Layers, Transformer
from ..recipe import Recipe


class EncoderGraph(nn.Module):
    """Source ids to the cross-attention keys and values of every decoder layer."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, src_ids: Tensor, src_lengths: Tensor) -> tuple[Tensor, ...]:
        """src_ids (B, S), src_lengths (B) -> 2L of (B, H, S, D), layer values (B, S, d)."""
        layers: Layers = {}
        cross = self.model.cross_keys_values(self.model.encode(src_ids, src_lengths, layers))
        inside = (layers[name] for name in layer_names("encoder", self.model.config))
        return *(t for pair in cross for t in pair), *inside


class StepGraph(nn.Module):
    """One decoding step: reorder the caches, step, log-softmax, the best tokens."""

    def __init__(self, model: Transformer, recipe: Recipe) -> None:
        super().__init__()
        self.model, self.recipe = model, recipe

    def forward(
        self, tokens: Tensor, parents: Tensor, position: Tensor, src_lengths: Tensor, *caches: Tensor
    ) -> tuple[Tensor, ...]:
        """Sizes as in `contract.signature`; caches are 2L cross, then 2L past."""
        layers: Layers = {}
        pairs = list(zip(caches[0::2], caches[1::2], strict=True))
        cross, past = pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]
        rows = parents.flatten()
        past = [(k.index_select(0, rows), v.index_select(0, rows)) for k, v in past]
        log_probs, present = self.model.step(tokens, position, src_lengths, cross, past, layers)
        scores, ids = log_probs.topk(self.recipe.top_k or 2 * tokens.shape[1] - 1, dim=-1)
        attention = [layers["attention"]] if self.recipe.attention else []
        inside = (layers[name] for name in layer_names("decoder_step", self.model.config))
        return ids.int(), scores, log_probs, *attention, *(t for pair in present for t in pair), *inside


def example_inputs(graph: str, config: ModelConfig) -> tuple[Tensor, ...]:
    """Inputs to trace with."""
    batch, beams = 2, min(3, (config.tgt_vocab + 1) // 2)
    src_len, past_len = min(7, config.max_positions), min(5, config.max_positions - 1)
    lengths = torch.tensor([src_len, max(1, src_len - 2)], dtype=torch.int32)
    if graph == "encoder":
        return torch.zeros(batch, src_len, dtype=torch.int32), lengths
    cross = [torch.zeros(batch, config.heads, src_len, config.head_dim) for _ in range(2 * config.decoder_layers)]
    past = [
        torch.zeros(batch * beams + 1, config.heads, past_len, config.head_dim)
        for _ in range(2 * config.decoder_layers)
    ]
    # Two tensors: given the same object twice, the exporter would use one input for both.
    tokens, parents = (torch.zeros(batch, beams, dtype=torch.int32) for _ in range(2))
    return tokens, parents, torch.tensor([past_len], dtype=torch.int32), lengths, *cross, *past
