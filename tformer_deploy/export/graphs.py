"""The two functions that become graphs, with the flat inputs and outputs of `contract.py`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from ..model import Transformer


class EncoderGraph(nn.Module):
    """Source ids to the cross-attention keys and values of every decoder layer."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, src_ids: Tensor, src_lengths: Tensor) -> tuple[Tensor, ...]:
        """src_ids (B, S), src_lengths (B) -> 2L of (B, H, S, D)."""
        return tuple(t for pair in self.model.cross_keys_values(self.model.encode(src_ids, src_lengths)) for t in pair)


class StepGraph(nn.Module):
    """One decoding step: reorder the caches, step, log-softmax, the best tokens."""

    def __init__(self, model: Transformer, top_k: int) -> None:
        super().__init__()
        self.model, self.top_k = model, top_k

    def forward(
        self, tokens: Tensor, parents: Tensor, position: Tensor, src_lengths: Tensor, *caches: Tensor
    ) -> tuple[Tensor, ...]:
        """Sizes as in `contract.signature`; caches are 2L cross, then 2L past."""
        layers = self.model.config.decoder_layers
        pairs = list(zip(caches[0::2], caches[1::2], strict=True))
        rows = parents.flatten()
        past = [(k.index_select(0, rows), v.index_select(0, rows)) for k, v in pairs[layers:]]
        log_probs, present = self.model.step(tokens, position, src_lengths, pairs[:layers], past)
        scores, ids = log_probs.topk(self.top_k, dim=-1)
        return ids.int(), scores, log_probs, *(t for pair in present for t in pair)


def example_inputs(graph: str, config: ModelConfig) -> tuple[Tensor, ...]:
    """Inputs to trace with."""
    batch, beams, src_len, past_len = 2, 3, min(7, config.max_positions), min(5, config.max_positions - 1)
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
