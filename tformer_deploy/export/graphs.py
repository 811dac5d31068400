"""The PyTorch modules that are traced to graphs: inputs and outputs as in `contract.py`, then named layer values.

Each takes its inputs in the order of its signature. B batch, K beams, R = B*K rows, S source length, T target length so
far, M capacity, H heads, D head size, V vocabulary, k best tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..base.errors import ConfigError
from ..bundle.contract import DEAD, GRAPHS, MEMORY_GRAPH, SLOTS_GRAPH, Signature, layer_names, signature
from ..bundle.recipe import Recipe
from ..model.seq2seq import Cache, Carried, GrowingCache, KeysValues, Layers, Seq2Seq, StaticCache, log_probs

PARTS = {1: ("c",), 2: ("k", "v")}
"""Names of what a layer keeps, by how many tensors that is."""


class GraphModule(nn.Module):
    """One graph of a model."""

    model: Seq2Seq

    def __init__(self, name: str, model: Seq2Seq, recipe: Recipe) -> None:
        super().__init__()
        self.model, self.name, self.recipe = model, name, recipe
        self.signature: Signature = signature(name, model.config, recipe)
        self.layer_names = layer_names(name, model.config) if name in GRAPHS else ()

    def named(self, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        """Inputs by their names."""
        return dict(zip((spec.name for spec in self.signature.inputs), inputs, strict=True))

    def result(self, found: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Outputs in the signature's order, then the layer values. Raises ConfigError for one that is missing."""
        names = (*(spec.name for spec in self.signature.outputs), *self.layer_names)
        if missing := [name for name in names if name not in found]:
            raise ConfigError(f"the {self.name} of the module gives no {missing[0]}: note it in layers")
        return tuple(found[name] for name in names)


class EncoderGraph(GraphModule):
    """Source ids to the cross-attention keys and values of every decoder layer."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """src_ids (B, S), src_lengths (B) -> 2L of (B, H, S, D), layer values (B, S, d)."""
        given, layers = self.named(inputs), Layers()
        memory = self.model.encode(given["src_ids"], given["src_lengths"], layers)
        return self.result({**layers, **flat("cross", self.model.cross_keys_values(memory))})


class MemoryGraph(GraphModule):
    """Source ids to the encoder's output."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """src_ids (B, S), src_lengths (B) -> (B, S, d)."""
        given = self.named(inputs)
        return self.result({"memory": self.model.encode(given["src_ids"], given["src_lengths"])})


class StepGraph(GraphModule):
    """One decoding step over growing caches: reorder, step, log-softmax, the best tokens."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Sizes as in `contract.signature`."""
        given, layers = self.named(inputs), Layers()
        cache, positions = self.cache(given), given["positions" if "positions" in given else "position"]
        hidden = self.model.step(given["tokens"], positions, given["src_lengths"], cross_of(given), cache, layers)
        found = self.best(hidden, given)
        return self.result({**layers, **found, **flat("present", cache.present)})

    def cache(self, given: dict[str, Tensor]) -> Cache:
        """The caches that the step reads and writes."""
        return GrowingCache(list(reordered(given)))

    def best(self, hidden: Tensor, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """Scores of hidden states (B, K, d)."""
        scores = log_probs(self.model, hidden)
        top_scores, ids = scores.topk(self.recipe.top_k or 2 * hidden.shape[1] - 1, dim=-1)
        return {"log_probs": scores, "top_scores": top_scores, "top_ids": ids.int()}


class InPlaceStep(StepGraph):
    """A step over caches that are written in place; beams are tracked by index, not reordered."""

    def cache(self, given: dict[str, Tensor]) -> Cache:
        """See `StepGraph.cache`."""
        return StaticCache(pairs("past", given), given["position"], written_by=given["written_by"])

    def best(self, hidden: Tensor, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """See `StepGraph.best`; (R, V) and (R, k)."""
        scores = log_probs(self.model, hidden.flatten(0, 1))
        count, most = (self.recipe.top_k or 2 * beams for beams in (hidden.shape[1], self.recipe.axes.beams.max))
        top_scores, ids = best_in_blocks(scores, count, most)
        return {"log_probs": scores, "top_scores": top_scores, "top_ids": ids.int()}


class SlotsStep(InPlaceStep):
    """The same for sentences at different positions, which all write the same slot of their buffers."""

    def cache(self, given: dict[str, Tensor]) -> Cache:
        """See `StepGraph.cache`."""
        first = (given["position"] - given["positions"]).reshape(-1, 1)
        return StaticCache(pairs("past", given), given["position"], first, given["written_by"])


class ShortStep(InPlaceStep):
    """The same, scoring only the tokens of a shortlist."""

    def best(self, hidden: Tensor, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """See `StepGraph.best`; (R, n) and (R, k) for a list of n tokens."""
        logits = hidden @ given["listed_rows"]
        if "listed_bias" in given:
            logits = logits + given["listed_bias"]
        scores = torch.log_softmax((logits + given["listed_mask"]).flatten(0, 1), -1)
        top_scores, places = scores.topk(self.recipe.top_k or 2 * hidden.shape[1], dim=-1)
        ids = given["shortlist"].index_select(0, places.flatten()).view_as(places)
        return {"log_probs": scores, "top_scores": top_scores, "top_ids": ids}


class ShortRows(GraphModule):
    """What a `ShortStep` needs of the output's weights."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """shortlist (n) -> (d, n), and bias (n) where there is one."""
        (ids,) = inputs
        output = self.model.output
        found = {"listed_rows": output.weight.index_select(0, ids).T}
        if output.bias is not None:
            found["listed_bias"] = output.bias.index_select(0, ids)
        return self.result(found)


def scores_by_product(model: Seq2Seq) -> bool:
    """Whether `output` is a product with its weight and bias, which is all that `ShortRows` has of it."""
    weight, bias = getattr(model.output, "weight", None), getattr(model.output, "bias", None)
    if not isinstance(weight, Tensor) or weight.shape != (model.config.tgt_vocab, model.config.d_model):
        return False
    x = torch.randn(2, model.config.d_model, generator=torch.Generator().manual_seed(1))
    x[1] *= 1000  # so that soft-capped logits, for instance, show
    with torch.no_grad():
        found, expected = model.output(x), F.linear(x, weight, bias)
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-3, atol=1e-4)  # a bias may be -inf


class DeviceSearchStep(StepGraph):
    """A step for TensorRT: caches are copied between two buffers, and the graph chooses the next tokens itself."""

    def cache(self, given: dict[str, Tensor]) -> Cache:
        """See `StepGraph.cache`. Rows begin at any step: of a state, they have what another sentence left there."""
        positions = given["positions"].flatten()
        past = list(reordered(given))
        if "past_c_0" in given:
            begun = (positions > 0)[:, None]
            past = [(torch.where(begun, state, 0.0),) for (state,) in past]
        return StaticCache(past, positions)

    def best(self, hidden: Tensor, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """See `StepGraph.best`; also the next step's inputs, `contract._CHOICE`."""
        scores = log_probs(self.model, hidden)
        top = scores.topk(self.recipe.top_k or 2 * hidden.shape[1], dim=-1)
        # One axis from here on: of rows that were one axis before, TensorRT 8.6 gave the ids in another order.
        scores, top_scores, ids = (each.flatten(0, 1) for each in (scores, *top))
        # TensorRT's TopK of NaN is undocumented, and an id out of range would crash a step.
        first, last = (torch.tensor(n, dtype=torch.int32) for n in (0, scores.shape[1] - 1))
        ids = torch.minimum(torch.maximum(ids.int(), first), last)
        choice = self.choose(given, ids, top_scores)
        return {"log_probs": scores, "top_scores": top_scores, "top_ids": ids, **choice}

    def choose(self, given: dict[str, Tensor], ids: Tensor, scores: Tensor) -> dict[str, Tensor]:
        """The best candidates of each sentence that do not end an output; ids and scores (R, k)."""
        (batch, beams), (rows, count) = given["tokens"].shape, ids.shape
        sums = given["values"].reshape(-1, 1) + scores
        sums = torch.where(ids == given["end_id"], DEAD, sums)
        # NaN compares as false and becomes DEAD; DEAD plus a log-probability stays above 3 * DEAD.
        sums = torch.where(sums > 3 * DEAD, sums, DEAD)
        best_sums, chosen = sums.reshape(batch, -1).topk(beams, dim=-1)
        lives = torch.arange(beams, dtype=torch.int32) < given["live_beams"]
        last = torch.tensor(self.recipe.axes.past_len.max, dtype=torch.int32)  # sentences that have ended go on
        owners = torch.arange(rows, dtype=torch.int32)[:, None].expand(-1, count).contiguous()
        return {
            "next_tokens": ids.reshape(batch, -1).gather(1, chosen),
            "next_parents": owners.view(batch, -1).gather(1, chosen),
            "next_values": torch.where(lives, best_sums, DEAD),
            "next_positions": torch.minimum(given["positions"] + 1, last),
        }


def make_graph(name: str, model: Seq2Seq, recipe: Recipe) -> GraphModule:
    """The module of a graph of `contract.graphs_of`."""
    kinds: dict[str, type[GraphModule]] = {
        "encoder": EncoderGraph,
        MEMORY_GRAPH: MemoryGraph,
        SLOTS_GRAPH: SlotsStep,
        "short_rows": ShortRows,
        "short_step": ShortStep,
    }
    steps = {"onnx": StepGraph, "ort-cpu": InPlaceStep, "trt": DeviceSearchStep}
    return kinds.get(name, steps[recipe.target])(name, model, recipe).eval()


def best_in_blocks(scores: Tensor, count: Any, most: int) -> tuple[Tensor, Tensor]:
    """The `count`, at most `most`, best of (R, V) and their ids; equal ones by the lower id, as TopK of ONNX has it.

    TopK looks at every score several times, a maximum once: the best lie in the blocks of highest maximum.
    """
    vocab = scores.shape[1]
    width = block_width(vocab)
    if not width or vocab // width < most:
        return tuple(scores.topk(count, dim=-1))  # type: ignore[return-value]
    rows, parts = scores.shape[0], scores.view(-1, vocab // width, width)
    # In order of their ids, so that of equal scores the lower id comes first below.
    blocks = parts.amax(-1).topk(count, dim=-1).indices.topk(count, dim=-1, largest=False).values  # (R, k)
    all_blocks = blocks + torch.arange(rows)[:, None] * parts.shape[1]
    chosen = parts.flatten(0, 1).index_select(0, all_blocks.flatten()).view(rows, -1)
    best, places = chosen.topk(count, dim=-1)
    within = torch.div(places, width, rounding_mode="trunc")
    return best, blocks.gather(1, within) * width + (places - within * width)


def block_width(vocab: int) -> int:
    """The divisor of the vocabulary, from 16 to 1024, near which TopK sees least of four blocks; 0: there is none."""
    found = [width for width in range(16, 1025) if vocab % width == 0]
    return min(found, key=lambda width: vocab // width + 4 * width, default=0)


def pairs(kind: str, given: dict[str, Tensor]) -> list[Carried]:
    """Keys and values, or the state, of every layer among named tensors, see `contract.cache_names`."""
    values = [value for name, value in given.items() if name.startswith(f"{kind}_")]
    size = 1 if f"{kind}_c_0" in given else 2
    return [tuple(values[i : i + size]) for i in range(0, len(values), size)]


def cross_of(given: dict[str, Tensor]) -> list[KeysValues]:
    """Keys and values of every layer's cross-attention."""
    return [(k, v) for k, v in pairs("cross", given)]


def flat(kind: str, found: Sequence[Carried]) -> dict[str, Tensor]:
    """The reverse."""
    parts = [(part, i, t) for i, each in enumerate(found) for part, t in zip(PARTS[len(each)], each, strict=True)]
    return {f"{kind}_{part}_{i}": t for part, i, t in parts}


def reordered(given: dict[str, Tensor]) -> Iterator[Carried]:
    """What was kept of the rows that each row continues."""
    rows = given["parents"].flatten()
    for each in pairs("past", given):
        yield tuple(tensor.index_select(0, rows) for tensor in each)
