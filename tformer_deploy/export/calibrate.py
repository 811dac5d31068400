"""What matrix products read on real sentences: ranges for int8 to round by, and what rounding does to every layer."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..base.errors import ConfigError
from ..bundle.contract import layer_names
from ..bundle.recipe import Recipe
from ..model.checkpoint import Steps
from ..model.seq2seq import GrowingCache, Layers, Seq2Seq, first_past, log_probs
from .quantizing import TABLES, Range, Ranges, channels, group_size, groups

Noise = dict[str, float]
"""Name of a layer's output, see `contract.layer_names` -> the root mean square of its differences."""
SENTENCES, BATCH, TOKENS = 256, 32, 64
"""Limits of calibration: sentences, batch size, decoding steps."""
NOISE_SENTENCES, NOISE_TOKENS = 64, 32
"""The same where the rounded copies of the model decode too."""
ENTRIES = 512
"""Vocabulary entries per batch."""
CALLS = 64
"""Calls of a layer whose inputs are kept to choose its range: enough text, and no more memory for longer ones."""
ROWS = 8
"""Rows of each call that are kept."""
SHARES = [0.5**n for n in range(7)]
"""Factors that are tried for shrinking large channels: each halves their range, down to 1/64."""
FEW = 0.5
"""Largest share of channels that may be shrunk: where most are large, none stands out."""
PAYS = 0.25
"""Shrinking must reduce the squared error to this share, to be worth its multiplication in every call."""
SHARE, ROOM = 0.15, 0.75
"""Shares of the tolerance. If rounding all layers costs too much, one alone may cost `SHARE` in scores, and all that
are rounded `ROOM`, since other text may cost more."""


@torch.inference_mode()
def input_ranges(model: Seq2Seq, sources: Sequence[Sequence[int]]) -> Ranges:
    """Encode and greedily decode the first of `sources`, ids as the encoder sees them, and watch.

    Then every entry of both vocabularies once, as a check feeds them: what no sentence had would leave the ranges.
    """
    modules = cast(nn.Module, model).named_modules(remove_duplicate=False)  # a layer may be used twice
    layers = {name: module for name, module in modules if isinstance(module, nn.Linear)}
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    rows: dict[str, list[Tensor]] = {name: [] for name in layers}

    def watch(name: str, x: Tensor) -> None:
        x = x.flatten(0, -2)
        least, largest = seen.get(name, (x.new_zeros(()), x.new_zeros(())))
        seen[name] = torch.minimum(least, x.amin(0)), torch.maximum(largest, x.amax(0))
        if len(rows[name]) < CALLS:
            rows[name].append(x[:: 1 + len(x) // ROWS].clone())

    hooks = [
        module.register_forward_pre_hook(lambda _, inputs, name=name: watch(name, inputs[0]))
        for name, module in layers.items()
    ]
    try:
        steps = all_steps([model], sources[:SENTENCES], TOKENS)
        next(steps)  # of a batch that is encoded, and no more
        encoding = set(seen)
        for _ in steps:
            pass
    finally:
        for hook in hooks:
            hook.remove()
    readers: dict[bytes, list[str]] = defaultdict(list)  # of each input
    for name, pair in seen.items():
        readers[b"output" if name == "output" else torch.cat(pair).numpy().tobytes()].append(name)
    found: Ranges = {}
    for names in readers.values():
        weights = [layers[name].weight for name in names if name != "output"]
        chosen = _shrunk(*seen[names[0]], torch.cat(rows[names[0]]), weights)
        found |= {name: chosen._replace(name=names[0], encodes=name in encoding) for name in names}
    return found


def _shrunk(least: Tensor, largest: Tensor, rows: Tensor, weights: Sequence[Tensor]) -> Range:
    """The range of an input of which some `rows` (n, in) are known, its largest channels shrunk if that pays.

    To the share of the largest channel, a power of 2, with the least error of the products: (out, in) each.
    """
    ends, best = torch.maximum(largest, -least).clamp(min=1e-9), math.inf
    chosen = Range(float(least.min()), float(largest.max()))
    for share in SHARES if weights else ():
        shrink = (float(ends.max()) * share / ends).clamp(max=1)
        if float((shrink < 1).float().mean()) > FEW:
            break  # each of them would lose the room between what it was seen to be and the range
        found = Range(float((least * shrink).min()), float((largest * shrink).max()), shrink.numpy())
        off = sum(
            float((_over(rows * shrink, found) @ _by_columns(w / shrink).T - rows @ w.T).square().sum())
            / max(float((rows @ w.T).square().sum()), 1e-12)
            for w in weights
        )
        if share == 1:
            best = off * PAYS
        elif off < best:
            chosen, best = found, off
    return chosen


class Measured(NamedTuple):
    """How a recipe rounds a model."""

    ranges: Ranges
    fp32: list[str]
    """Linear layers that stay fp32."""
    limits: Noise

    def described(self) -> dict[str, object]:
        """As the manifest has it."""
        known = {name: each for name, each in self.ranges.items() if each is not None}
        ranges = {name: each.described() for name, each in known.items() if each.largest > each.least}
        scales = {name: float(each.scales[0]) for name, each in known.items() if each.scales is not None}
        return {"limits": self.limits, "fp32": self.fp32, "ranges": ranges, **({"scales": scales} if scales else {})}


def trained_ranges(model: Seq2Seq, steps: Steps, seen: Ranges) -> Ranges:
    """The ranges and scales that a model was trained with; `seen`: of `input_ranges`.

    Integers are -127 to 127, of which 127 more is stored. Without steps of weights, `channels` finds their scales.
    Raises ConfigError for a layer without a step.
    """
    found: Ranges = {}
    for name, module in cast(nn.Module, model).named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear | nn.Embedding):
            step, weight = steps.inputs.get(name, 0.0), steps.weights.get(name, 0.0)
            if (steps.weights and not weight) or (name in seen and not step):
                raise ConfigError(f"scales = 'trained': the model has no steps of {name}: take scales = 'measured'")
            encodes = name in seen and cast(Range, seen[name]).encodes
            scales = np.full(len(module.weight), weight, np.float32) if weight else None
            found[name] = Range(-127 * step, 128 * step, encodes=encodes, scales=scales, most=254)
    return found


def measure(model: Seq2Seq, recipe: Recipe, ranges: Ranges, sources: Sequence[Sequence[int]]) -> Measured:
    """What stays fp32, and what rounding the rest does to every layer; `ranges`: of one of the functions above."""
    fp32 = [] if recipe.scales == "trained" else fp32_layers(model, recipe, ranges, sources)
    own = {**ranges, **dict.fromkeys(fp32)}
    return Measured(own, fp32, layer_noise(model, recipe, own, sources))


@torch.inference_mode()
def fp32_layers(model: Seq2Seq, recipe: Recipe, ranges: Ranges, sources: Sequence[Sequence[int]]) -> list[str]:
    """The linear layers, and `TABLES`, that a recipe must leave in fp32 to stay within its tolerance, mostly none.

    Those that alone cost more than `SHARE` of the scores' tolerance; then, one after another, those that alone cost
    most, until what the rest together cost is within `ROOM`. Never the output, whose rows for shortlists have the
    recipe's precision.
    """
    rounded, mixed = (cast(nn.Module, each) for each in (round_model(model, recipe, ranges), copy.deepcopy(model)))
    own, tables = cast(nn.Module, model), [n for n, m in mixed.named_modules() if isinstance(m, nn.Embedding)]

    def apart(fp32: Sequence[str]) -> tuple[float, float]:
        """Errors with all layers but these rounded, as multiples of the tolerance: of scores, and of everything."""
        for name in [*tables, *ranges]:
            parent, _, child = name.rpartition(".")
            kept = (TABLES if name in tables else name) in fp32
            setattr(mixed.get_submodule(parent), child, (own if kept else rounded).get_submodule(name))
        return parts_off([model, cast(Seq2Seq, mixed)], recipe, sources)

    if max(apart([])) <= 1:
        return []
    names = [TABLES, *(name for name in ranges if name != "output")]
    alone = {name: apart([other for other in (*names, "output") if other != name]) for name in names}
    worst_first = sorted(names, key=lambda name: max(alone[name]), reverse=True)
    found = [name for name in names if alone[name][0] > SHARE]
    for name in worst_first:
        if max(apart(found)) <= ROOM:
            break
        found += [name] if name not in found else []
    return [name for name in names if name in found]


def parts_off(models: Sequence[Seq2Seq], recipe: Recipe, sources: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Largest error of a score, and of a cross-attention key or value, as multiples of the tolerance."""
    scores = encoder = 0.0
    for side, _, real, layers in all_steps(models, sources[:BATCH], NOISE_TOKENS, ENTRIES):
        if side == "decoder":
            ours, theirs = (log_probs(m, seen["hidden"]) for m, seen in zip(models, layers, strict=True))
            scores = max(scores, _largest(ours, theirs) / recipe.tolerance.scores)
        else:
            inside = real[:, None, :, None]  # (B, 1, S, 1)
            for name in [name for name in layers[0] if name.startswith("cross_")]:
                ours, theirs = (seen[name] * inside for seen in layers)
                encoder = max(encoder, _largest(ours, theirs) / recipe.tolerance.encoder)
    return scores, encoder


def _largest(ours: Tensor, theirs: Tensor) -> float:
    """The largest absolute difference; infinite where only one side is NaN or infinite."""
    off = torch.where(ours == theirs, 0, ours - theirs).abs()  # of infinities too
    return float(off.nan_to_num(math.inf, math.inf).max())


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


def all_steps(
    models: Sequence[Seq2Seq], sources: Sequence[Sequence[int]], most: int, entries: int | None = None
) -> Iterator[Seen]:
    """`seen_steps` of sentences, and of the first `entries` of the vocabularies, each a source and a first token."""
    config, chosen = models[0].config, sorted(sources, key=len)
    for start in range(0, len(chosen), BATCH):
        yield from seen_steps(models, chosen[start : start + BATCH], most)
    count = max(config.src_vocab, config.tgt_vocab)
    count = min(count, entries or count)
    for start in range(0, count, ENTRIES):
        ids = torch.arange(start, min(start + ENTRIES, count))
        src_ids, tokens = (ids % size for size in (config.src_vocab, config.tgt_vocab))
        yield from seen_steps(models, src_ids[:, None].tolist(), 1, tokens[:, None])


def seen_steps(
    models: Sequence[Seq2Seq], sources: Sequence[Sequence[int]], most: int, tokens: Tensor | None = None
) -> Iterator[Seen]:
    """Greedy search of the first model, whose tokens the others are fed, for the sake of the values on the way.

    `tokens` (B, 1): what it begins with, if that is not the start.
    """
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
    for seen, pairs in zip(layers, cross, strict=True):
        seen.update(
            {f"cross_{kind}_{i}": each for i, pair in enumerate(pairs) for kind, each in zip("kv", pair, strict=True)}
        )
    sentences = torch.arange(batch)
    yield "encoder", sentences, torch.arange(src_ids.shape[1]) < lengths[:, None], layers
    past = [first_past(config, pairs[0][0], batch) for pairs in cross]
    tokens = torch.full((batch, 1), config.start_id) if tokens is None else tokens
    for position in range(min(most, config.max_positions)):
        layers, chosen = [{} for _ in models], tokens
        for n, model in enumerate(models):
            cache = GrowingCache(past[n])
            hidden = model.step(tokens, torch.tensor([position]), lengths, cross[n], cache, layers[n])
            layers[n]["hidden"], past[n] = hidden, cache.present
            chosen = chosen if n else log_probs(model, hidden).argmax(-1)
        yield "decoder", sentences, torch.ones(len(sentences), 1), layers
        going = chosen[:, 0] != config.eos_id
        if not going.any():
            return
        tokens, lengths, sentences = chosen[going], lengths[going], sentences[going]
        cross = [[(k[going], v[going]) for k, v in pairs] for pairs in cross]
        past = [[tuple(tensor[going] for tensor in each) for each in carried] for carried in past]


def round_model(model: Seq2Seq, recipe: Recipe, ranges: Ranges) -> Seq2Seq:
    """A copy whose weights are as exact as those of a recipe's graphs, and which rounds what its products read."""
    copied = copy.deepcopy(model)
    for name, module in cast(nn.Module, copied).named_modules():
        if isinstance(module, nn.Embedding) and TABLES not in ranges:
            own = ranges.get(name)
            module.weight = _frozen(_by_columns(module.weight, own and own.scales))
        elif isinstance(module, nn.Linear) and (limits := ranges.get(name)):
            weight = module.weight
            if limits.encodes or not recipe.group_size:
                shrink = torch.ones(()) if limits.shrink is None else torch.from_numpy(limits.shrink)
                module.weight = _frozen(_by_columns(weight / shrink, limits.scales))
                module.register_forward_pre_hook(lambda _, x, own=limits, s=shrink: (_over(x[0] * s, own),))
            else:
                size = group_size(recipe.group_size, weight.shape[1])
                module.weight = _frozen(_by_blocks(weight, 8 if recipe.precision == "int8" else 4, size))
                module.register_forward_pre_hook(lambda _, x, size=size: (_each_block(x[0], size),))
    return copied


def _frozen(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)


def _by_columns(weight: Tensor, given: NDArray[Any] | None = None) -> Tensor:
    integers, scales = channels(weight.detach().numpy(), given)
    return torch.from_numpy(integers.astype(np.float32) * scales[:, None])


def _by_blocks(weight: Tensor, bits: int, size: int) -> Tensor:
    integers, scales = groups(weight.detach().numpy(), bits, size)
    values = (integers.astype(np.float32) - (1 << (bits - 1))) * scales[:, :, None]
    return torch.from_numpy(values.reshape(len(values), -1)[:, : weight.shape[1]].copy())


def _over(x: Tensor, over: Range) -> Tensor:
    """x in 8 bits over a range, as `passes.quantize.round_input` has it."""
    step, zero = (float(value) for value in over.step_and_zero)
    return ((x / step).round() + zero).clamp(0, over.most).sub(zero).mul(step)


def _each_block(x: Tensor, size: int) -> Tensor:
    """x in 8 bits with a scale for every group of a row, as the kernels of `MatMulNBits` have it."""
    width = x.shape[-1]
    padded = nn.functional.pad(x, (0, -width % size))
    parts = padded.view(*x.shape[:-1], -1, size)
    step = parts.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    rounded: Tensor = ((parts / step).round() * step).flatten(-2)[..., :width]
    return rounded
