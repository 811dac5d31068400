"""What a model attends to, by hooks: a reference for what engines return."""

from __future__ import annotations

import torch
from torch import Tensor

from tformer_deploy.model.network import Attention, Transformer


def attention_weights(model: Transformer, src_ids: Tensor, src_lengths: Tensor, tgt_ids: Tensor) -> dict[str, Tensor]:
    """The attention weights of a teacher-forced pass: name of the module -> (B, H, T, S)."""
    weights: dict[str, Tensor] = {}

    def record(name: str, module: Attention, args: tuple[Tensor, ...], causal: bool) -> None:
        x, (keys, _), mask = args[0], args[1], args[2]
        if causal:
            mask = torch.ones(x.shape[1], keys.shape[2], dtype=torch.bool, device=x.device).tril()
        weights[name] = module.weights(x, keys, mask)

    hooks = [
        module.register_forward_pre_hook(
            lambda module, args, kwargs, name=name: record(name, module, args, kwargs.get("causal", False)),
            with_kwargs=True,
        )
        for name, module in model.named_modules()
        if isinstance(module, Attention)
    ]
    try:
        with torch.no_grad():
            model(src_ids, src_lengths, tgt_ids)
    finally:
        for hook in hooks:
            hook.remove()
    return weights
