"""What matrix products read on real sentences: ranges for int8 to round by, and what rounding does to every layer."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from ..contract import layer_names
from ..recipe import Recipe
from ..seq2seq import GrowingCache, KeysValues, Layers, Seq2Seq, log_probs
from .quantizing import Ranges, channels, group_size, groups, step_and_zero

Noise = dict[str, float]
"""Name of a layer's output, see `contract.layer_names` -> the root mean square of its differences."""
SENTENCES, BATCH, TOKENS = 256, 32, 64
"""At most so many sentences, in batches of so many, each decoded for at most so many steps."""
NOISE_SENTENCES, NOISE_TOKENS = 64, 32
"""The same where both the model and its rounded copy decode."""


@torch.inference_mode()
def input_ranges(model: Seq2Seq, sources: Sequence[Sequence[int]]) -> Ranges:
    """Encode and greedily decode the first of `sources`, ids as the encoder sees them, and watch."""
    found: Ranges = {}

    def watch(name: str, x: Tensor) -> None:
        least, largest = found.get(name, (0.0, 0.0))
        found[name] = min(least, float(x.min())), max(largest, float(x.max()))

    hooks = [
        module.register_forward_pre_hook(lambda _, inputs, name=name: watch(name, inputs[0]))
        for name, module in cast(nn.Module, model).named_modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        chosen = sorted(sources[:SENTENCES], key=len)
        for start in range(0, len(chosen), BATCH):
            for _ in seen_steps([model], chosen[start : start + BATCH], TOKENS):
                pass
    finally:
        for hook in hooks:
            hook.remove()
    return found


@torch.inference_mode()
def layer_noise(model: Seq2Seq, recipe: Recipe, ranges: Ranges, sources: Sequence[Sequence[int]]) -> Noise:
    """What a recipe's rounding does to the output of every layer: to the sentence to which it does most.

    Both the model and a copy that rounds as the recipe's graphs do are fed what the model itself decodes.
    """
    found: Noise = {}
    models = [model, round_model(model, recipe, ranges)]
    chosen = sorted(sources[:NOISE_SENTENCES], key=len)
    for start in range(0, len(chosen), BATCH):
        sums: dict[str, Tensor] = {}
        batch = chosen[start : start + BATCH]
        counts = {"encoder": torch.zeros(len(batch)), "decoder": torch.zeros(len(batch))}
        for side, sentences, real, (ours, theirs) in seen_steps(models, batch, NOISE_TOKENS):
            counts[side][sentences] += real.sum(1)
            for name in layer_names("encoder" if side == "encoder" else "decoder_step", model.config):
                squares = ((ours[name] - theirs[name]).square().mean(2) * real).sum(1)
                sums.setdefault(name, torch.zeros(len(batch)))[sentences] += squares
        for name, total in sums.items():
            in_encoder = name in layer_names("encoder", model.config)
            largest = (total / counts["encoder" if in_encoder else "decoder"]).max().sqrt()
            found[name] = max(found.get(name, 0.0), float(largest))
    return found


Seen = tuple[str, Tensor, Tensor, list[Layers]]
"""`encoder` or `decoder`, the sentences (n), which positions are real (n, T), and the layers of every model."""


def seen_steps(models: Sequence[Seq2Seq], sources: Sequence[Sequence[int]], most: int) -> Iterator[Seen]:
    """Greedy search of the first model, whose tokens the others are fed, for the sake of the values on the way."""
    config, batch = models[0].config, len(sources)
    lengths = torch.tensor([len(source) for source in sources])
    src_ids = torch.full((batch, int(lengths.max())), config.pad_id)
    for row, source in zip(src_ids, sources, strict=True):
        row[: len(source)] = torch.tensor(source)
    layers: list[Layers] = [{} for _ in models]
    cross = [
        model.cross_keys_values(model.encode(src_ids, lengths, seen))
        for model, seen in zip(models, layers, strict=True)
    ]
    sentences = torch.arange(batch)
    yield "encoder", sentences, torch.arange(src_ids.shape[1]) < lengths[:, None], layers
    empty = cross[0][0][0].new_empty(batch, config.decoder.heads, 0, config.decoder.head_dim)
    past = [[(empty, empty)] * len(pairs) for pairs in cross]
    tokens = torch.full((batch, 1), config.start_id)
    for position in range(min(most, config.max_positions)):
        layers, chosen = [{} for _ in models], tokens
        for n, model in enumerate(models):
            cache = GrowingCache(past[n])
            hidden = model.step(tokens, torch.tensor([position]), lengths, cross[n], cache, layers[n])
            past[n] = cache.present
            chosen = chosen if n else log_probs(model, hidden).argmax(-1)
        yield "decoder", sentences, torch.ones(len(sentences), 1), layers
        going = chosen[:, 0] != config.eos_id
        if not going.any():
            return
        tokens, lengths, sentences = chosen[going], lengths[going], sentences[going]
        cross, past = ([_kept(pairs, going) for pairs in side] for side in (cross, past))


def _kept(pairs: Sequence[KeysValues], going: Tensor) -> list[KeysValues]:
    return [(k[going], v[going]) for k, v in pairs]


def round_model(model: Seq2Seq, recipe: Recipe, ranges: Ranges) -> Seq2Seq:
    """A copy whose weights are as exact as those of a recipe's graphs, and which rounds what its products read."""
    copied = copy.deepcopy(model)
    for name, module in cast(nn.Module, copied).named_modules():
        if isinstance(module, nn.Embedding):
            module.weight = _frozen(_by_columns(module.weight))
        elif isinstance(module, nn.Linear):
            in_encoder = name.startswith("encoder.") or name.endswith((".cross.key", ".cross.value"))
            weight = dict(cast(nn.Module, model).named_modules())[name].weight
            if in_encoder or not recipe.group_size:
                module.weight = _frozen(_by_columns(weight))
                least, largest = ranges[name]
                module.register_forward_pre_hook(lambda _, x, a=least, b=largest: (_over(x[0], a, b),))
            else:
                size = group_size(recipe.group_size, weight.shape[1])
                module.weight = _frozen(_by_blocks(weight, 8 if recipe.precision == "int8" else 4, size))
                module.register_forward_pre_hook(lambda _, x, size=size: (_each_block(x[0], size),))
    return copied


def _frozen(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)


def _by_columns(weight: Tensor) -> Tensor:
    integers, scales = channels(weight.detach().numpy())
    return torch.from_numpy(integers.astype(np.float32) * scales[:, None])


def _by_blocks(weight: Tensor, bits: int, size: int) -> Tensor:
    integers, scales = groups(weight.detach().numpy(), bits, size)
    values = (integers.astype(np.float32) - (1 << (bits - 1))) * scales[:, :, None]
    return torch.from_numpy(values.reshape(len(values), -1)[:, : weight.shape[1]].copy())


def _over(x: Tensor, least: float, largest: float) -> Tensor:
    """x in 8 bits over a range, as `passes.quantize.round_input` has it."""
    step, zero = (float(value) for value in step_and_zero(least, largest))
    return ((x / step).round() + zero).clamp(0, 255).sub(zero).mul(step)


def _each_block(x: Tensor, size: int) -> Tensor:
    """x in 8 bits with a scale for every group of a row, as the kernels of `MatMulNBits` have it."""
    width = x.shape[-1]
    padded = nn.functional.pad(x, (0, -width % size))
    parts = padded.view(*x.shape[:-1], -1, size)
    step = parts.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    rounded: Tensor = ((parts / step).round() * step).flatten(-2)[..., :width]
    return rounded
