"""The reference engine: PyTorch, cached step, no graph."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import torch
from torch import Tensor

from ..model import KeysValues, Transformer
from .base import Floats, Ints, Limits, Scores, check_position, check_request


@dataclass
class EagerState:
    """Tensors on the model's device."""

    src_lengths: Tensor
    cross: list[KeysValues]
    past: list[KeysValues]
    parents: Tensor | None = None
    position: int = 0


class EagerEngine:
    """Runs a Transformer as it is; every other engine is compared with this one."""

    def __init__(self, model: Transformer, top_k: int = 1) -> None:
        self.config, self.model, self.top_k = model.config, model, top_k
        positions = model.config.max_positions
        self.limits = Limits(batch=1 << 16, src_tokens=positions, tgt_tokens=positions)

    def __enter__(self) -> Self:
        self._was_training = self.model.training
        self.model.eval()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.model.train(self._was_training)

    @torch.inference_mode()
    def encode(self, src_ids: Ints, src_lengths: Ints) -> EagerState:
        """See `Engine.encode`."""
        check_request(src_ids, src_lengths, self.config, self.limits)
        device = self.model.output.weight.device
        lengths = torch.from_numpy(src_lengths).to(device)
        cross = self.model.cross_keys_values(self.model.encode(torch.from_numpy(src_ids).to(device), lengths))
        empty = cross[0][0].new_empty(len(src_ids), self.config.heads, 0, self.config.head_dim)
        return EagerState(lengths, cross, [(empty, empty)] * len(cross))

    @torch.inference_mode()
    def step(self, tokens: Ints, state: EagerState, full: bool = False) -> Scores:
        """See `Engine.step`."""
        check_position(state.position, self.limits)
        if state.parents is not None:
            rows = state.parents.flatten()
            state.past = [(k[rows], v[rows]) for k, v in state.past]
            state.parents = None
        device = state.src_lengths.device
        log_probs, state.past = self.model.step(
            torch.from_numpy(tokens).to(device),
            torch.tensor([state.position], device=device),
            state.src_lengths,
            state.cross,
            state.past,
        )
        state.position += 1
        # A stable sort keeps the lower id first among equal scores; topk does not promise it.
        if self.top_k == 1:
            ids = log_probs.argmax(-1, keepdim=True)
        else:
            ids = log_probs.sort(dim=-1, descending=True, stable=True).indices[..., : self.top_k]
        return Scores(
            ids.cpu().numpy().astype(np.int32),
            log_probs.gather(-1, ids).cpu().numpy(),
            log_probs.cpu().numpy() if full else None,
        )

    def reorder(self, state: EagerState, parents: Ints, sentences: Ints | None = None) -> None:
        """See `Engine.reorder`."""
        device = state.src_lengths.device
        state.parents = torch.from_numpy(parents).to(device).long()
        if sentences is not None:
            keep = torch.from_numpy(sentences).to(device).long()
            state.src_lengths = state.src_lengths[keep]
            state.cross = [(k[keep], v[keep]) for k, v in state.cross]

    def cross_keys_values(self, state: EagerState) -> list[Floats]:
        """See `Engine.cross_keys_values`."""
        return [tensor.cpu().numpy() for pair in state.cross for tensor in pair]
