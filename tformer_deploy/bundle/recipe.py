"""How to export: TOML in, a frozen Recipe out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from ..base import messages
from ..base.errors import ConfigError, unknown
from ..base.headers import read_toml
from ..base.settings import check_types, from_dict
from ..model.config import ModelConfig


@dataclass(frozen=True)
class Axis:
    """Sizes that a dynamic axis may take."""

    min: int
    """Smallest size."""
    opt: int
    """The size to be fastest at."""
    max: int
    """Largest size; 0, for src_len and past_len: as far as the model's positions reach."""

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 <= self.min <= self.opt or (self.max and self.opt > self.max):
            raise ConfigError(f"axis {{min={self.min}, opt={self.opt}, max={self.max}}}: must be min <= opt <= max")

    def within(self, largest: int) -> Axis:
        """This axis with its open or too large end at `largest`."""
        top = min(self.max or largest, largest)
        return Axis(min(self.min, top), min(self.opt, top), top)


@dataclass(frozen=True)
class Axes:
    """The dynamic axes of both graphs."""

    batch: Axis = Axis(1, 8, 1024)
    """Sentences of a batch."""
    beams: Axis = Axis(1, 1, 64)
    """Beams or samples of a sentence."""
    src_len: Axis = Axis(1, 32, 0)
    """Source tokens."""
    past_len: Axis = Axis(0, 32, 0)
    """Target positions before a step."""


@dataclass(frozen=True)
class Tolerance:
    """What `tformer check` accepts: absolute differences from eager PyTorch, and shares from 0 to 1."""

    encoder: float = 1e-4
    """Largest difference of an encoder output: cross-attention keys and values."""
    scores: float = 1e-4
    """Largest difference of a log-probability (natural logarithm)."""
    bleu: float = 0.1
    """Largest difference in BLEU points, where reference translations are given."""
    tokens: bool = True
    """Every token must be eager's, except for ties."""
    unstable: float = 0.0
    """Share of sentences, per decoding method, whose output may depend on the batch; with `tokens` also differ from
    eager's, except for ties."""
    ties: float = 0.01
    """Share of sentences, for greedy and beam search each, that may differ from eager by a tie."""
    top1: float = 0.999
    """Least share of teacher-forced steps whose best token is eager's, or tied with it."""
    memory: float = 1e-4
    """Largest difference of the encoder's output, if the recipe has `memory`."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("unstable", "ties", "top1"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"tolerance.{name}={getattr(self, name)}: must be a share from 0 to 1")

    def within(self, other: Tolerance) -> Tolerance:
        """The stricter of both, field by field."""
        both = {f.name: min(getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(self)}
        tokens, top1 = self.tokens or other.tokens, max(self.top1, other.top1)
        return Tolerance(**{**both, "tokens": tokens, "top1": top1})

    def wider(self, other: Tolerance) -> list[str]:
        """The fields that accept more than another's."""
        both = self.within(other)
        return [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != getattr(both, f.name)]


TOLERANCES = {
    "fp32": Tolerance(),
    "fp16": Tolerance(encoder=0.06, scores=0.2, ties=0.15),
    "bf16": Tolerance(encoder=0.45, scores=1.5, bleu=0.3, unstable=0.01, ties=0.5, top1=0.99),
    "int8": Tolerance(encoder=0.5, scores=2.0, bleu=0.3, tokens=False, unstable=0.01, top1=0.98, memory=0.5),
    "int4": Tolerance(encoder=0.5, scores=5.0, bleu=0.5, tokens=False, unstable=0.02, top1=0.8, memory=0.5),
}
"""What each precision should achieve, from measurements: docs/check.md. Reports say where a recipe allows more."""
PROGRAMS = {"bf16": Tolerance(encoder=0.25, scores=0.5, bleu=0.3, tokens=False, top1=0.98, memory=0.1)}
"""The same for target `native` where it differs: its bf16 rounds only matrices."""
TRAINED = Tolerance(encoder=2.5, scores=10.0, bleu=1.0, tokens=False, top1=0.9, memory=2.5)
"""The same of `scales = "trained"`: the model was trained for its rounding, and not for the fp32 that it is compared
with."""
HALVES = ("fp16", "bf16")
"""Precisions that only plans have."""
GROUP_SIZES = (0, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Recipe:
    """How a checkpoint becomes graphs."""

    target: Literal["onnx", "ort-cpu", "trt", "native"] = "onnx"
    """`onnx`: standard operators, for every runtime; `ort-cpu`: ONNX Runtime's own operators for processors; `trt`:
    the standard operators of opset 17 that every TensorRT from 8.6 on takes, which `tformer build` compiles; `native`:
    instructions of the C++ runtime's CPU engine."""
    precision: Literal["fp32", "bf16", "int8", "int4"] = "fp32"
    """Of the weights; `bf16` is for target `native` and its matrices only. Sums are fp32."""
    group_size: int = 0
    """Weights that share a scale in the step, fast for few rows; 0: a whole column, fast for many rows."""
    scales: Literal["measured", "trained"] = "measured"
    """Of int8 weights and inputs. `measured`: from the weights, and by calibration. `trained`: those that the model was
    trained with, which a checkpoint may have; then nothing stays fp32."""
    cache: Literal["growing", "static"] = "growing"
    """`static`: buffers of a fixed capacity; `growing`: a position longer with each step."""
    cache_precision: Literal["fp32", "bf16"] = "fp32"
    """Of cached keys and values; `bf16` is for target `native` only. They are widened to fp32 when read."""
    opset: int = 23
    """ONNX opset of the graphs, 18 to 24; below 23 only for target `onnx`."""
    top_k: int = 0
    """Best tokens that a step returns per row; 0: `2*beams`; with target `onnx` one fewer."""
    attention: bool = False
    """A step also returns the last layer's cross-attention, for alignments and the coverage penalty."""
    memory: bool = False
    """Export a further graph that returns the encoder's output, for `tformer encode`."""
    axes: Axes = field(default_factory=Axes)
    """Sizes that requests may have."""
    tolerance: Tolerance = field(default_factory=Tolerance)
    """What the check accepts."""
    plans: Mapping[str, Tolerance] = field(default_factory=dict, hash=False)
    """Tolerances of plans in half precision, for `fp16` and `bf16`; only target `trt` has plans."""

    def __post_init__(self) -> None:
        check_types(self)
        if not 18 <= self.opset <= 24:
            raise ConfigError(f"opset={self.opset}: must be 18 to 24, which ONNX Runtime and TensorRT both load")
        if self.opset < 23 and self.target != "onnx":
            raise ConfigError(
                f"opset={self.opset}: must be 23 or 24 with target={self.target}, whose passes start there"
            )
        if self.top_k < 0:
            raise ConfigError(f"top_k={self.top_k}: must be at least 0")
        own_runtime = self.target != "onnx"
        cache = "static" if own_runtime else "growing"
        if self.cache != cache:
            raise ConfigError(f"cache={self.cache}: must be {cache} with target={self.target}")
        if self.precision == "bf16" and self.target != "native":
            raise ConfigError("precision=bf16: needs target = 'native'; of plans tformer build asks for it")
        if self.precision != "fp32" and self.target not in ("ort-cpu", "native"):
            raise ConfigError(f"precision={self.precision}: needs target = 'ort-cpu' or 'native'")
        if self.cache_precision != "fp32" and self.target != "native":
            raise ConfigError(f"cache_precision={self.cache_precision}: needs target = 'native'")
        if self.attention and own_runtime:
            native = self.target == "native"
            why = "programs always return it" if native else "needs target = 'onnx', whose graphs return it"
            raise ConfigError(f"attention = true: {why}")
        if self.memory and not self.has_memory:
            raise ConfigError(f"memory = true with target = '{self.target}': it has no graph for it, other targets do")
        if self.group_size not in GROUP_SIZES or (self.group_size and not self.quantized):
            raise ConfigError(f"group_size={self.group_size}: must be one of {GROUP_SIZES}, and 0 with fp32 and bf16")
        if self.precision == "int4" and not self.group_size:
            raise ConfigError(f"group_size=0: int4 needs one of {GROUP_SIZES[1:]}")
        if self.scales == "trained" and (self.precision != "int8" or self.group_size):
            raise ConfigError("scales=trained: needs precision = 'int8' and group_size = 0")
        if self.plans and self.target != "trt":
            raise ConfigError(f"[plans] with target={self.target}: only target = 'trt' has plans")

    @property
    def quantized(self) -> bool:
        """Whether weights are integers, which needs text for calibration."""
        return self.precision in ("int8", "int4")

    @property
    def rounds(self) -> bool:
        """Whether its graphs or programs are less precise than fp32."""
        return self.precision != "fp32" or self.cache_precision != "fp32"

    @property
    def has_memory(self) -> bool:
        """Whether its target can run the encoder alone."""
        return self.target in ("onnx", "ort-cpu", "native")

    @property
    def as_ort(self) -> Recipe:
        """The recipe whose graphs a program of target `native` is made from."""
        precision = self.precision if self.quantized else "fp32"
        return dataclasses.replace(self, target="ort-cpu", precision=precision, cache_precision="fp32")

    @property
    def rounding(self) -> tuple[object, ...]:
        """The fields that calibration depends on: recipes with equal ones share its result."""
        return self.precision, self.group_size, self.scales, self.tolerance.scores, self.tolerance.encoder

    @property
    def integer_step(self) -> bool:
        """Whether a step multiplies 8-bit integers, with one scale per output."""
        return self.quantized and not self.group_size

    def passes(self, graph: str) -> tuple[str, ...]:
        """The passes over the trace of a graph, in order, by their names in `export.passes`."""
        if self.target == "onnx":
            return ("fold_weights",)
        if self.target == "trt":
            return ("fuse_norm", "fold_scales", "merge_matmuls", "fold_weights", "older_operators")
        quantized = self.quantized
        encodes = graph in ("encoder", "memory")
        grouped = quantized and self.group_size > 0 and not encodes
        if graph == "short_rows":
            return (("gather_quantized",) if grouped else ("quantize_listed",)) if quantized else ()
        native = self.target == "native"
        merge = () if encodes and not native else ("merge_matmuls",)
        names = ("quantize_tables", "quantize_groups" if grouped else "quantize_channels") if quantized else ()
        listed = ("quantize_listed",) if graph == "short_step" and quantized and not grouped else ()
        last = "native_program" if native else "fold_weights"
        return ("fuse_norm", "fuse_attention", *merge, *names, *listed, last)

    def limits(self, precision: str) -> Tolerance:
        """The tolerance of its graphs, or of a plan of another precision."""
        return self.tolerance if precision == self.precision else self.plans.get(precision, TOLERANCES[precision])

    def for_model(self, config: ModelConfig) -> Recipe:
        """The recipe with its open ends filled in from a model. Raises ConfigError for ends that must not be open."""
        if self.top_k > config.tgt_vocab:
            raise ConfigError(messages.TOP_K.format(top_k=self.top_k, size=config.tgt_vocab))
        for name in ("batch", "beams"):
            if not getattr(self.axes, name).max:
                raise ConfigError(f"axes.{name} has max = 0: only src_len and past_len may have it")
        beams = self.axes.beams
        axes = dataclasses.replace(
            self.axes,
            # The best 2*beams - 1 tokens must exist, 2*beams of a step with static caches.
            beams=beams if self.top_k else beams.within((config.tgt_vocab + (self.cache == "growing")) // 2),
            src_len=self.axes.src_len.within(config.max_positions),
            past_len=self.axes.past_len.within(config.max_positions - 1),
        )
        return dataclasses.replace(self, axes=axes)


def own_limits(target: str, precision: str, scales: str = "measured") -> Tolerance:
    """The default tolerance of a precision in graphs, plans or programs of a target."""
    if scales == "trained":
        return TRAINED
    programs = PROGRAMS if target == "native" else {}
    return programs.get(precision, TOLERANCES[precision])


def narrowest(recipes: Iterable[Recipe]) -> Recipe:
    """The first of some recipes, its axes limited to what all of them allow."""
    first, *others = recipes
    for other in others:
        names = [f.name for f in dataclasses.fields(Axes)]
        axes = {name: getattr(first.axes, name).within(getattr(other.axes, name).max) for name in names}
        first = dataclasses.replace(first, axes=Axes(**axes))
    return first


def recipe_from_dict(values: Mapping[str, Any]) -> Recipe:
    """Build a recipe from parsed TOML or JSON. Raises ConfigError for unknown keys.

    Missing tolerances are the precision's defaults.
    """
    flat = dict(values)
    axes, plans = flat.pop("axes", {}), flat.pop("plans", {})
    for name, table in (("axes", axes), ("plans", plans)):
        if not isinstance(table, Mapping):
            raise ConfigError(f"[{name}]: must be a table, got {table!r}")
    for name in plans:
        if name not in HALVES:
            raise unknown("table of [plans]", name, HALVES)
    tolerance = flat.pop("tolerance", {})
    recipe = from_dict(Recipe, flat, "recipe")
    wanted = HALVES if recipe.target == "trt" else plans
    return dataclasses.replace(
        recipe,
        axes=from_dict(Axes, {name: from_dict(Axis, axis, f"axes.{name}") for name, axis in axes.items()}, "axes"),
        tolerance=_limits(own_limits(recipe.target, recipe.precision, recipe.scales), tolerance, "tolerance"),
        plans={name: _limits(TOLERANCES[name], plans.get(name, {}), f"plans.{name}") for name in wanted},
    )


def _limits(own: Tolerance, values: Mapping[str, Any], where: str) -> Tolerance:
    """The tolerances of a table, over the defaults `own`."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"[{where}]: must be a table, got {values!r}")
    return from_dict(Tolerance, {**dataclasses.asdict(own), **values}, where)


def load_recipe(name_or_file: str) -> Recipe:
    """A recipe that comes with tformer, by name, or a TOML file. Raises ConfigError."""
    path = Path(name_or_file)
    if path.suffix != ".toml":
        named = named_recipes()
        if name_or_file not in named:
            raise unknown("recipe", name_or_file, [*named, "a FILE.toml"])
        path = named[name_or_file]
    return recipe_from_dict(read_toml(path))


def named_recipes() -> dict[str, Path]:
    """The files of the recipes that come with tformer, by name."""
    return dict(sorted((file.stem, file) for file in recipe_folder().glob("*.toml")))


def recipe_folder() -> Path:
    """Where the named recipes are: in the wheel beside the export room, in a checkout in the top-level `export`."""
    package = Path(str(files(__package__.partition(".")[0])))
    installed = package / "export" / "recipes"
    return installed if installed.is_dir() else package.parent / "export" / "recipes"
