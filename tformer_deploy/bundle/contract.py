"""Names, types, sizes, kinds and versions of the graphs: the only place where they are written.

A graph's kind says how it is fed, and its version which rules that was by; `docs/bundle.md` has the rules of each.
Sizes are numbers or names of `SIZES`. A row is a beam of a sentence; rows are counted sentence by sentence, so row =
sentence * beams + beam.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..base.errors import ArtifactError
from ..model.config import ModelConfig
from .recipe import Recipe

GRAPHS = ("encoder", "decoder_step")
SHORT_GRAPHS = ("short_rows", "short_step")
SLOTS_GRAPH = "slots_step"
MEMORY_GRAPH = "memory"
WEIGHTS = "weights.data"
"""The file beside the graphs that holds what both read."""
PROGRAM = "program.json"
"""The file that has both graphs of target `native`, as instructions."""
KINDS = {
    "encoder/1": "source ids to the keys and values of every decoder layer's cross-attention",
    "growing/1": "a step whose self-attention caches grow by a position",
    "inplace/1": "a step whose caches are buffers of a fixed capacity that it writes into",
    "slots/1": "`inplace/1` where each sentence is at a position of its own, so that others can join it",
    "device_search/1": "a step that reads one set of buffers, writes another and chooses what the next one is fed",
    "rows/1": "the rows of the output's table that belong to a list of tokens",
    "short/1": "`inplace` that scores only the tokens of such a list",
    "memory/1": "source ids to the encoder's output, to be used without a decoder",
    "native/1": "instructions of the C++ runtime's CPU engine, which has its caches to itself",
}
"""What this version runs, and what each is."""
DEAD = -1e9
"""Sum of a row that nothing comes from, in `device_search`."""
SIZES = {
    "batch": "sentences",
    "beams": "rows of a sentence",
    "rows": "batch * beams",
    "src_len": "source tokens of the longest sentence",
    "past_len": "target positions in the cache before a step",
    "present_len": "past_len + 1",
    "past_rows": "rows of the step before",
    "capacity": "target positions that a buffer has room for",
    "best": "tokens that a step returns a row: 2 * beams, of `growing` 2 * beams - 1",
    "listed": "tokens of a list",
}
"""Sizes that only a request says. `best` is one more than a search reads where a token may be forbidden on the way."""


@dataclass(frozen=True)
class TensorSpec:
    """One input or output."""

    name: str
    dtype: str
    """`int32`, `float32` or `int8`."""
    shape: tuple[int | str, ...]

    def sized(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape in numbers."""
        return tuple(size if isinstance(size, int) else number(size, sizes) for size in self.shape)


LISTED = TensorSpec("shortlist", "int32", ("listed",))
"""Ids of a list in order, so that equal scores are still by the lower id."""


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs of a graph, in order."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def to_json(self) -> dict[str, Any]:
        """The signature as it stands in manifests and golden files."""
        return {
            side: [{**asdict(spec), "shape": list(spec.shape)} for spec in getattr(self, side)]
            for side in ("inputs", "outputs")
        }


CHOOSING = (
    TensorSpec("values", "float32", ("batch", "beams")),
    TensorSpec("end_id", "int32", (1,)),
    TensorSpec("live_beams", "int32", (1,)),
)
"""What a step of target `trt` chooses by: each row's sum so far, the token that ends an output, or -1, and how many
rows of a sentence go on, the best ones."""
CHOICE = (
    TensorSpec("next_tokens", "int32", ("batch", "beams")),
    TensorSpec("next_parents", "int32", ("batch", "beams")),
    TensorSpec("next_values", "float32", ("batch", "beams")),
    TensorSpec("next_positions", "int32", ("batch", "beams")),
)
"""What a step of target `trt` feeds the next one: the best of the candidates that do not end an output, best first."""


def graphs_of(recipe: Recipe) -> tuple[str, ...]:
    """The graphs that a recipe makes."""
    steps = (SLOTS_GRAPH, *SHORT_GRAPHS) if recipe.target == "ort-cpu" else ()
    return (*GRAPHS, *steps, *([MEMORY_GRAPH] if recipe.memory else []))


def made_of(recipe: Recipe, config: ModelConfig) -> tuple[str, ...]:
    """The graphs that a recipe makes of a model, which may have an encoder alone."""
    return graphs_of(recipe) if config.decoder_layers else (MEMORY_GRAPH,)


def file_of(graph: str, recipe: Recipe) -> str:
    """The file of a graph of `graphs_of`."""
    return PROGRAM if recipe.target == "native" else f"{graph}.onnx"


def kind_of(graph: str, recipe: Recipe) -> str:
    """The kind of a graph of `graphs_of`, of `KINDS`."""
    if recipe.target == "native":
        return "native/1"
    steps = {"onnx": "growing/1", "ort-cpu": "inplace/1", "trt": "device_search/1"}
    others = {"encoder": "encoder/1", SLOTS_GRAPH: "slots/1", "short_rows": "rows/1", "short_step": "short/1"}
    others[MEMORY_GRAPH] = "memory/1"
    return others.get(graph, steps[recipe.target])


def signature(graph: str, config: ModelConfig, recipe: Recipe) -> Signature:
    """What a graph takes and gives."""
    cross = caches("cross", config, ("batch", config.decoder.heads, "src_len", config.decoder.head_dim))
    lengths = TensorSpec("src_lengths", "int32", ("batch",))
    if graph in ("encoder", MEMORY_GRAPH):
        memory = TensorSpec("memory", "float32", ("batch", "src_len", config.encoder.width))
        source = TensorSpec("src_ids", "int32", ("batch", "src_len"))
        return Signature((source, lengths), cross if graph == "encoder" else (memory,))
    if graph == "short_rows":
        return Signature((LISTED,), _listed(config, recipe))
    if graph == "short_step":
        return _short_step(config, recipe)
    if recipe.target == "native":  # what its program is made from
        return _static_step(config, recipe.as_ort, own_positions=True)
    if recipe.cache == "static":
        return _static_step(config, recipe, own_positions=graph == SLOTS_GRAPH)
    best = ("batch", "beams", recipe.top_k or "best")
    # The last layer's cross-attention, mean over heads; 0 at padding.
    attention = (TensorSpec("attention", "float32", ("batch", "beams", "src_len")),) if recipe.attention else ()
    return Signature(
        (
            # The last token of each row, and the row of the previous step that it continues.
            TensorSpec("tokens", "int32", ("batch", "beams")),
            TensorSpec("parents", "int32", ("batch", "beams")),
            # The index of `tokens` in the target; equals past_len.
            TensorSpec("position", "int32", (1,)),
            lengths,
            *cross,
            *caches("past", config, ("past_rows", config.decoder.heads, "past_len", config.decoder.head_dim)),
        ),
        (
            # Best first; equal scores by the lower id.
            TensorSpec("top_ids", "int32", best),
            TensorSpec("top_scores", "float32", best),
            TensorSpec("log_probs", "float32", ("batch", "beams", config.tgt_vocab)),
            *attention,
            *caches("present", config, ("rows", config.decoder.heads, "present_len", config.decoder.head_dim)),
        ),
    )


def _static_step(config: ModelConfig, recipe: Recipe, own_positions: bool = False) -> Signature:
    """The step whose caches have a fixed capacity.

    Target `ort-cpu`: one buffer, `present` must be bound to the memory of `past`. Target `trt`: two, read and written,
    and the step chooses what the next one is fed.
    """
    buffer = ("rows", config.decoder.heads, "capacity", config.decoder.head_dim)
    best = ("rows", recipe.top_k or "best")
    in_place = recipe.target == "ort-cpu"
    # The place in the caches that every row writes; without `positions` also the index of `tokens` in the target.
    place = (TensorSpec("position", "int32", (1,)),) if in_place else ()
    # The index of `tokens` in the target; without `position` also the place that a row writes.
    positions = (TensorSpec("positions", "int32", ("batch", "beams")),) if own_positions or not in_place else ()
    # In place: which beam of its sentence wrote each earlier position of a beam's target. Else as in a growing step.
    history = (
        TensorSpec("written_by", "int32", ("batch", "beams", "capacity"))
        if in_place
        else TensorSpec("parents", "int32", ("batch", "beams"))
    )
    past = buffer if in_place else ("past_rows", *buffer[1:])
    return Signature(
        (
            TensorSpec("tokens", "int32", ("batch", "beams")),
            *place,
            *positions,
            history,
            *(() if in_place else CHOOSING),
            TensorSpec("src_lengths", "int32", ("batch",)),
            *caches("cross", config, ("batch", config.decoder.heads, "src_len", config.decoder.head_dim)),
            *caches("past", config, past),
        ),
        (
            # Best first; equal scores by the lower id.
            TensorSpec("top_ids", "int32", best),
            TensorSpec("top_scores", "float32", best),
            TensorSpec("log_probs", "float32", ("rows", config.tgt_vocab)),
            *(() if in_place else CHOICE),
            *caches("present", config, buffer),
        ),
    )


def _listed(config: ModelConfig, recipe: Recipe) -> tuple[TensorSpec, ...]:
    """The columns of the output's product that belong to a list."""
    bias = (TensorSpec("listed_bias", "float32", ("listed",)),) if config.output_bias else ()
    if recipe.integer_step:
        scales = TensorSpec("listed_scales", "float32", ("listed",))
        return TensorSpec("listed_rows", "int8", (config.d_model, "listed")), scales, *bias
    return TensorSpec("listed_rows", "float32", (config.d_model, "listed")), *bias


def _short_step(config: ModelConfig, recipe: Recipe) -> Signature:
    """A static step in place, whose log-probabilities are those of the list and sum to 1 over it."""
    full = _static_step(config, recipe)
    log_probs = TensorSpec("log_probs", "float32", ("rows", "listed"))
    return Signature(
        # 0 where a sentence may use a token of the list, -inf where it may not.
        (*full.inputs, LISTED, *_listed(config, recipe), TensorSpec("listed_mask", "float32", ("batch", 1, "listed"))),
        tuple(log_probs if spec.name == "log_probs" else spec for spec in full.outputs),
    )


def described(graph: str, config: ModelConfig, recipe: Recipe) -> dict[str, Any]:
    """A graph as it stands in a manifest: its kind and its signature."""
    return {"kind": kind_of(graph, recipe), **signature(graph, config, recipe).to_json()}


def number(size: str, sizes: Mapping[str, int]) -> int:
    """The value of a named size. Raises ArtifactError."""
    if size not in sizes:
        raise ArtifactError(f"size {size} of the graph has no number: it is not of target trt")
    return sizes[size]


def caches(kind: str, config: ModelConfig, shape: tuple[int | str, ...]) -> tuple[TensorSpec, ...]:
    """Keys and values of every decoder layer: `<kind>_k_0`, `<kind>_v_0`, `<kind>_k_1` and so on."""
    return tuple(
        TensorSpec(f"{kind}_{part}_{layer}", "float32", shape)
        for layer in range(config.decoder_layers)
        for part in ("k", "v")
    )


def layer_names(graph: str, config: ModelConfig) -> tuple[str, ...]:
    """Values inside a graph that carry these names, in order of computation: `[batch, src_len or beams, d_model]`.

    They are no outputs, so that a runtime may fuse them away; a debugger makes them outputs of a copy. A module of the
    user's own has none.
    """
    if config.module_parameters:
        return ()
    name, side, last = (
        ("encoder", config.encoder, "memory") if graph == "encoder" else ("decoder", config.decoder, "hidden")
    )
    # Without a final norm the last value would be the last layer's, and one value cannot have two names.
    final = (last,) if side.final_norm else ()
    return (f"{name}_embedding", *(f"{name}_layer_{i}" for i in range(side.layers)), *final)
