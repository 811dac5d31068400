"""The ranges of what goes into every matrix product, seen on real sentences: what int8 activations are scaled by."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..model import Transformer

Ranges = dict[str, tuple[float, float]]
"""Name of a linear layer -> least and largest element of its input, 0 among them."""
SENTENCES, BATCH, TOKENS = 256, 32, 64
"""At most so many sentences, in batches of so many, each decoded for at most so many steps."""


@torch.inference_mode()
def input_ranges(model: Transformer, sources: Sequence[Sequence[int]]) -> Ranges:
    """Encode and greedily decode the first of `sources`, ids as the encoder sees them, and watch."""
    found: Ranges = {}

    def watch(name: str, x: Tensor) -> None:
        least, largest = found.get(name, (0.0, 0.0))
        found[name] = min(least, float(x.min())), max(largest, float(x.max()))

    hooks = [
        module.register_forward_pre_hook(lambda _, inputs, name=name: watch(name, inputs[0]))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        chosen = sorted(sources[:SENTENCES], key=len)
        for start in range(0, len(chosen), BATCH):
            decode(model, chosen[start : start + BATCH])
    finally:
        for hook in hooks:
            hook.remove()
    return found


def decode(model: Transformer, sources: Sequence[Sequence[int]]) -> None:
    """Greedy search, for the sake of the values on the way."""
    config, batch = model.config, len(sources)
    lengths = torch.tensor([len(source) for source in sources])
    src_ids = torch.full((batch, int(lengths.max())), config.pad_id)
    for row, source in zip(src_ids, sources, strict=True):
        row[: len(source)] = torch.tensor(source)
    cross = model.cross_keys_values(model.encode(src_ids, lengths))
    empty = cross[0][0].new_empty(batch, config.heads, 0, config.head_dim)
    past, tokens = [(empty, empty)] * len(cross), torch.full((batch, 1), config.bos_id)
    for position in range(min(TOKENS, config.max_positions)):
        log_probs, past = model.step(tokens, torch.tensor([position]), lengths, cross, past)
        tokens = log_probs.argmax(-1)
        going = tokens[:, 0] != config.eos_id
        if not going.any():
            return
        tokens, lengths = tokens[going], lengths[going]
        cross, past = ([(k[going], v[going]) for k, v in pairs] for pairs in (cross, past))
