"""Graphs and their tensors: the only place where names, types, shapes, kinds and versions are written.

A graph's kind says which tensors it takes and gives, and its version by which rules it is fed; `docs/bundle.md` has the
rules of each. `make spec` writes schemas/contract.json from this module, and C++ reads that.
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
"""The file beside the graphs that holds the weights of all of them."""
PROGRAM = "program.json"
"""The file that has all graphs of target `native`, as instructions."""
PROGRAM_KIND = "native/1"
KINDS = {
    "encoder/1": "source ids to the keys and values of every decoder layer's cross-attention",
    "growing/1": "a step whose self-attention caches grow by a position",
    "inplace/1": "a step whose caches are buffers of a fixed capacity that it writes into",
    "slots/1": "`inplace/1` where each sentence is at a position of its own, so that others can join it",
    "device_search/1": "a step that reads one set of buffers, writes another and chooses what the next one is fed",
    "rows/1": "the rows of the output's table that belong to a list of tokens",
    "short/1": "`inplace` that scores only the tokens of such a list",
    "memory/1": "source ids to the encoder's output, to be used without a decoder",
    PROGRAM_KIND: "instructions of the C++ runtime's CPU engine, which has its caches to itself",
}
"""What this version runs, and what each is."""
_STEPS = {
    "onnx": {"decoder_step": "growing/1"},
    "ort-cpu": {
        "decoder_step": "inplace/1",
        SLOTS_GRAPH: "slots/1",
        **dict(zip(SHORT_GRAPHS, ("rows/1", "short/1"), strict=True)),
    },
    "trt": {"decoder_step": "device_search/1"},
    "native": {"decoder_step": "slots/1"},
}
TARGETS = {
    target: {"encoder": "encoder/1", **steps} | ({MEMORY_GRAPH: "memory/1"} if target != "trt" else {})
    for target, steps in _STEPS.items()
}
"""The kind of each graph of a target; of `native`, of the graphs that its program is made from."""
OPTIONAL_FILES = (WEIGHTS, *(f"{graph}.onnx" for graph in (SLOTS_GRAPH, *SHORT_GRAPHS, MEMORY_GRAPH)))
"""What lies beside the graphs of some models and recipes."""
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
"""Sizes that only a request says. `best` is one more than a search reads where a token may be forbidden on the way.

A row is a beam of a sentence; rows are counted sentence by sentence, so row = sentence * beams + beam.
"""


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a graph."""

    name: str
    dtype: str
    """`int32`, `float32` or `int8`."""
    shape: tuple[int | str, ...]
    """Numbers, and names of `SIZES`."""

    def sized(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape in numbers."""
        return tuple(size if isinstance(size, int) else number(size, sizes) for size in self.shape)


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


@dataclass(frozen=True)
class Template:
    """A tensor of a kind of graphs, before its model and recipe are known."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    """Numbers, and names of `SIZES` and of `model_sizes`."""
    only: str = ""
    """The option, of `options`, with which alone it exists; none: it always does."""
    per_layer: bool = False
    """Stands for one of every decoder layer, see `cache_names`."""

    def specs(self, config: ModelConfig, recipe: Recipe) -> tuple[TensorSpec, ...]:
        """The tensors of a graph."""
        if self.only and not options(config, recipe)[self.only]:
            return ()
        known = model_sizes(config, recipe)
        shape = tuple(known.get(size) or size if isinstance(size, str) else size for size in self.shape)
        names = cache_names(self.name, config) if self.per_layer else [self.name]
        return tuple(TensorSpec(name, self.dtype, shape) for name in names)


def model_sizes(config: ModelConfig, recipe: Recipe) -> dict[str, int]:
    """Sizes that a model and a recipe say; 0: a request says it."""
    return {
        "d_model": config.d_model,
        "encoder_d_model": config.encoder.width,
        "heads": config.decoder.heads,
        "head_dim": config.decoder.head_dim,
        "tgt_vocab": config.tgt_vocab,
        "best": recipe.top_k,
    }


def options(config: ModelConfig, recipe: Recipe) -> dict[str, bool]:
    """Options of a model and a recipe by which tensors and graphs exist."""
    return {
        "attention": recipe.attention,
        "memory": recipe.memory,
        "output_bias": config.output_bias,
        "integer_step": recipe.integer_step,
        "float_step": not recipe.integer_step,
        "keys_values": config.decoder_cell == "attention",
        "states": config.decoder_cell == "ssru",
    }


def _cache(name: str, *shape: str, only: str = "") -> Template:
    rows, positions = shape
    return Template(name, "float32", (rows, "heads", positions, "head_dim"), only, per_layer=True)


def _carried(name: str, *shape: str) -> tuple[Template, Template]:
    """What a step keeps for the next one: keys and values of self-attention, or states of recurrent cells."""
    states = Template(name, "float32", (shape[0], "d_model"), only="states", per_layer=True)
    return _cache(name, *shape, only="keys_values"), states


_BEAMS = ("batch", "beams")
_LENGTHS = Template("src_lengths", "int32", ("batch",))
_SOURCE = (Template("src_ids", "int32", ("batch", "src_len")), _LENGTHS)
_CROSS = _cache("cross", "batch", "src_len")
_BUFFER, _WRITTEN = _carried("past", "rows", "capacity"), _carried("present", "rows", "capacity")
# The last token of each row.
_TOKENS = Template("tokens", "int32", _BEAMS)
# The row of the previous step that each row continues.
_PARENTS = Template("parents", "int32", _BEAMS)
# The place in the caches that every row writes; without `positions` also the index of `tokens` in the target.
_POSITION = Template("position", "int32", (1,))
# The index of `tokens` in the target; without `position` also the place that a row writes.
_POSITIONS = Template("positions", "int32", _BEAMS)
# Which beam of its sentence wrote each earlier position of a beam's target.
_WRITTEN_BY = Template("written_by", "int32", (*_BEAMS, "capacity"))
LISTED = Template("shortlist", "int32", ("listed",))
"""Ids of a list in order, so that equal scores are still by the lower id."""
# The columns of the output's matrix that belong to a list.
_COLUMNS = (
    Template("listed_rows", "int8", ("d_model", "listed"), only="integer_step"),
    Template("listed_scales", "float32", ("listed",), only="integer_step"),
    Template("listed_rows", "float32", ("d_model", "listed"), only="float_step"),
    Template("listed_bias", "float32", ("listed",), only="output_bias"),
)
# 0 where a sentence may use a token of the list, -inf where it may not.
_MASK = Template("listed_mask", "float32", ("batch", 1, "listed"))
# What a step of target `trt` chooses by: each row's sum so far, the token that ends an output, or -1, and how many rows
# of a sentence go on, the best ones.
_SEARCHED = (
    Template("values", "float32", _BEAMS),
    Template("end_id", "int32", (1,)),
    Template("live_beams", "int32", (1,)),
)
# What it feeds the next one: the best of the candidates that do not end an output, best first.
_CHOICE = (
    Template("next_tokens", "int32", _BEAMS),
    Template("next_parents", "int32", _BEAMS),
    Template("next_values", "float32", _BEAMS),
    Template("next_positions", "int32", _BEAMS),
)


def _scores(*rows: str, vocabulary: str = "tgt_vocab") -> tuple[Template, ...]:
    """The best tokens of each row, best first, equal scores by the lower id; and all log-probabilities."""
    return (
        Template("top_ids", "int32", (*rows, "best")),
        Template("top_scores", "float32", (*rows, "best")),
        Template("log_probs", "float32", (*rows, vocabulary)),
    )


# In place, `present` must be bound to the memory of `past`.
_IN_PLACE = (_TOKENS, _POSITION, _WRITTEN_BY, _LENGTHS, _CROSS, *_BUFFER)
TENSORS: dict[str, tuple[tuple[Template, ...], tuple[Template, ...]]] = {
    "encoder/1": (_SOURCE, (_CROSS,)),
    "memory/1": (_SOURCE, (Template("memory", "float32", ("batch", "src_len", "encoder_d_model")),)),
    "growing/1": (
        (_TOKENS, _PARENTS, _POSITION, _LENGTHS, _CROSS, *_carried("past", "past_rows", "past_len")),
        (
            *_scores(*_BEAMS),
            # The last layer's cross-attention, mean over heads; 0 at padding.
            Template("attention", "float32", (*_BEAMS, "src_len"), only="attention"),
            *_carried("present", "rows", "present_len"),
        ),
    ),
    "inplace/1": (_IN_PLACE, (*_scores("rows"), *_WRITTEN)),
    "slots/1": ((*_IN_PLACE[:2], _POSITIONS, *_IN_PLACE[2:]), (*_scores("rows"), *_WRITTEN)),
    "device_search/1": (
        (_TOKENS, _POSITIONS, _PARENTS, *_SEARCHED, _LENGTHS, _CROSS, *_carried("past", "past_rows", "capacity")),
        (*_scores("rows"), *_CHOICE, *_WRITTEN),
    ),
    "rows/1": ((LISTED,), _COLUMNS),
    # The log-probabilities are those of the list and sum to 1 over it.
    "short/1": ((*_IN_PLACE, LISTED, *_COLUMNS, _MASK), (*_scores("rows", vocabulary="listed"), *_WRITTEN)),
}
"""Inputs and outputs of each kind, in order."""


def graphs_of(recipe: Recipe) -> tuple[str, ...]:
    """The graphs that a recipe makes."""
    return tuple(graph for graph in TARGETS[recipe.target] if recipe.memory or graph != MEMORY_GRAPH)


def made_of(recipe: Recipe, config: ModelConfig) -> tuple[str, ...]:
    """The graphs that a recipe makes of a model, which may have an encoder alone."""
    return graphs_of(recipe) if config.decoder_layers else (MEMORY_GRAPH,)


def file_of(graph: str, recipe: Recipe) -> str:
    """The file of a graph of `graphs_of`."""
    return PROGRAM if recipe.target == "native" else f"{graph}.onnx"


def kind_of(graph: str, recipe: Recipe) -> str:
    """The kind of a graph of `graphs_of`, of `KINDS`."""
    return PROGRAM_KIND if recipe.target == "native" else TARGETS[recipe.target][graph]


def signature(graph: str, config: ModelConfig, recipe: Recipe) -> Signature:
    """What a graph takes and gives."""
    sides = TENSORS[TARGETS[recipe.target][graph]]
    return Signature(*(tuple(spec for each in side for spec in each.specs(config, recipe)) for side in sides))


def described(graph: str, config: ModelConfig, recipe: Recipe) -> dict[str, Any]:
    """A graph as it stands in a manifest: its kind and its signature."""
    return {"kind": kind_of(graph, recipe), **signature(graph, config, recipe).to_json()}


def number(size: str, sizes: Mapping[str, int]) -> int:
    """The value of a named size. Raises ArtifactError."""
    if size not in sizes:
        raise ArtifactError(f"size {size} is dynamic: only graphs of target trt can be compiled with fixed sizes")
    return sizes[size]


def cache_names(kind: str, config: ModelConfig) -> list[str]:
    """Keys and values of every decoder layer: `<kind>_k_0`, `<kind>_v_0`, `<kind>_k_1` and so on.

    Of recurrent cells, what is not `cross` are states: `<kind>_c_0`, `<kind>_c_1` and so on.
    """
    parts = ("c",) if config.decoder_cell == "ssru" and kind != "cross" else ("k", "v")
    return [f"{kind}_{part}_{layer}" for layer in range(config.decoder_layers) for part in parts]


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
