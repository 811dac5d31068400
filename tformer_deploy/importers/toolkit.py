"""What the toolkits' formats share: settings that are read or refused by their names, YAML, parameters of layers."""

from __future__ import annotations

import io
import math
import reprlib
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from ..base.errors import ArtifactError, missing_extra
from ..base.headers import content
from ..model.config import Activation
from .base import Change, Parameters
from .weights import Weights

T = TypeVar("T")
YAML_BYTES = 16 << 20
"""Limit of YAML: the largest vocabularies have a few MB."""
YAML_DEPTH = 100
MOST_POSITIONS = 1024
"""Rows of a sinusoidal table that are imported, unless model.max_positions says otherwise."""
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 2, 80, 80


class Settings:
    """A toolkit's settings of a model. Reading an unsupported value raises ArtifactError."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self.where, self.values = where, values
        self._read: set[str] = set()

    def get(self, name: str, default: T) -> T:
        """A setting of the default's type; the default if it is missing or null."""
        value = self._value(name)
        if value is None:
            return default
        if isinstance(default, float) and isinstance(value, int):
            return float(value)  # type: ignore[return-value]
        if not isinstance(value, type(default)) or isinstance(value, bool) != isinstance(default, bool):
            raise ArtifactError(f"{self.where}: {name}={shown(value)} is no {type(default).__name__}")
        return value  # type: ignore[no-any-return]

    def count(self, name: str, default: int = 0) -> int:
        """A positive integer; required if there is no default."""
        value = self.get(name, default)
        if value < 1:
            raise ArtifactError(f"{self.where} has no {name}: is it of another model or version?")
        return value

    def only(self, name: str, *supported: Any) -> Any:
        """A setting with only some supported values, the first of which is the default."""
        value = self._value(name)
        if value is None:
            return supported[0]
        if value not in supported:
            raise self.refused(name, value)
        return value

    def same(self, first: str, second: str, default: T) -> T:
        """A setting of encoder and decoder, which must have the same value."""
        value, other = self.get(first, default), self.get(second, default)
        if value != other:
            raise ArtifactError(
                f"{self.where}: {first}={value} and {second}={other} are not supported: they must agree"
            )
        return value

    def section(self, name: str) -> Settings:
        """Settings under a name."""
        found = self.values.get(name)
        if not isinstance(found, Mapping):
            raise ArtifactError(f"{self.where} has no {name}: is it of another model or version?")
        return Settings(f"{self.where}: {name}", found)

    def activation(self, name: str, theirs: Mapping[str, str], default: str = "relu") -> str:
        """Our name of an activation function."""
        value = self.get(name, default)
        return known_activation(theirs.get(value, value), f"{self.where}: {name}")

    def require_read(self, *unused: str) -> None:
        """Raise ArtifactError for a setting that is on, was not read, and is not among `unused`."""
        for name, value in self.values.items():
            if value and name not in self._read and name not in unused:
                raise self.refused(name, value)

    def refused(self, name: str, value: Any) -> ArtifactError:
        """The error for an unsupported setting."""
        return ArtifactError(f"{self.where}: {name}={shown(value)} is not supported")

    def _value(self, name: str) -> Any:
        self._read.add(name)
        return self.values.get(name)


def shown(value: Any) -> str:
    """The beginning of a value's repr; the value may be deeply nested."""
    return _SHORT.repr(value)[:60]


def known_activation(ours: str, where: str) -> str:
    """An activation that our model has. Raises ArtifactError."""
    if ours not in get_args(Activation):
        raise ArtifactError(f"{where}={ours} is not supported, only {', '.join(get_args(Activation))}")
    return ours


def sharing(output: bool, source: bool) -> str:
    """`share_embeddings` of a model whose output, and whose source embedding, is the target embedding."""
    return ("all" if source else "decoder") if output else "none"


def both_sides(decoder: Mapping[str, Any], encoder: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the decoder's sizes, and of the encoder's where they differ."""
    layers = {"encoder_layers": encoder["layers"], "decoder_layers": decoder["layers"]}
    own = {f"encoder_{name}": size for name, size in encoder.items() if size != decoder[name]}
    return {**{name: size for name, size in decoder.items() if name != "layers"}, **own, **layers}


def equal(weights: Weights, *names: str) -> bool:
    """Whether all these tensors exist and are equal."""
    if not all(name in weights and weights.shape(name) == weights.shape(names[0]) for name in names):
        return False
    first = weights.take(names[0])
    return all(torch.equal(first, weights.take(name)) for name in names[1:])


def sines(first: int, count: int, width: int) -> Tensor:
    """(count, width) of positions from `first` on, as tensor2tensor's: sines, then cosines, an odd column 0."""
    half = width // 2
    wavelengths = torch.exp(torch.arange(half) * -(math.log(10000) / (half - 1)))
    angles = torch.arange(first, first + count)[:, None] * wavelengths
    return torch.cat((angles.sin(), angles.cos(), torch.zeros(count, width % 2)), 1)


NEVER = -1e9
"""Output bias of entries that must never be produced."""


def with_start(src_vocab: int, tgt_vocab: int) -> dict[str, Any]:
    """Fields of a model that starts with an embedding of zeros: one more entry, which is never produced."""
    return {
        "src_vocab": max(src_vocab, tgt_vocab + 1),
        "tgt_vocab": tgt_vocab + 1,
        "start_id": tgt_vocab,
        "output_bias": True,
    }


def rows(count: int, value: float = 0.0) -> Change:
    """Pad a table or vector to `count` rows with one value."""

    def filled(tensor: Tensor) -> Tensor:
        return F.pad(tensor, (0,) * (2 * tensor.dim() - 1) + (max(0, count - len(tensor)),), value=value)

    return filled


@dataclass(frozen=True)
class LayerNames:
    """A toolkit's names of the parts of a layer."""

    projections: tuple[str, str, str, str]
    """Query, key, value, output."""
    attention: str
    attention_norm: str
    cross: str
    cross_norm: str
    up: str
    down: str
    ff_norm: str
    gate: str = ""


def put_layer(made: Parameters, ours: str, theirs: str, names: LayerNames) -> None:
    """All parameters of a layer; one without cross-attention is the encoder's."""
    made.attention(f"{ours}.attention", f"{theirs}.{names.attention}", names.projections)
    made.norm(f"{ours}.attention_residual.norm", f"{theirs}.{names.attention_norm}")
    if names.cross and f"{ours}.cross.query.weight" in made.shapes:
        made.attention(f"{ours}.cross", f"{theirs}.{names.cross}", names.projections)
        made.norm(f"{ours}.cross_residual.norm", f"{theirs}.{names.cross_norm}")
    made.linear(f"{ours}.ff.up", f"{theirs}.{names.up}")
    made.linear(f"{ours}.ff.down", f"{theirs}.{names.down}")
    if names.gate:
        made.linear(f"{ours}.ff.gate", f"{theirs}.{names.gate}")
    made.norm(f"{ours}.ff_residual.norm", f"{theirs}.{names.ff_norm}")


def options_of(part: Any, where: str) -> dict[str, Any]:
    """Options as a dict, none where there are none. Raises ArtifactError."""
    found = vars(part) if isinstance(part, Namespace) else {} if part is None else part
    if not isinstance(found, Mapping):
        raise ArtifactError(f"{where} holds a {type(found).__name__}, not options by their names: copy it again")
    return dict(found)


def parse_yaml(text: str, where: str, texts: bool = False) -> Any:
    """YAML of plain values, or of texts alone; objects with a tag of their own are dicts. Raises ArtifactError."""
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise missing_extra(error) from None

    class Plain(yaml.SafeLoader):  # type: ignore[misc]
        def flatten_mapping(self, node: Any) -> None:
            if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):  # a few lines may mean gigabytes
                raise ValueError("it merges mappings with <<, which is not read")

    def plain(loader: Any, _: str, node: Any) -> Any:
        if isinstance(node, yaml.SequenceNode):
            return loader.construct_sequence(node, deep=True)
        return loader.construct_mapping(node, deep=True) if isinstance(node, yaml.MappingNode) else node.value

    Plain.add_multi_constructor("", plain)
    try:
        if len(text) > YAML_BYTES:
            raise ValueError(f"it has more than {YAML_BYTES} characters")
        fast = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
        depth = 0
        for event in yaml.parse(text, fast):  # the fast loader's own recursion ends in a crash
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > YAML_DEPTH:
                raise ValueError(f"it is nested more than {YAML_DEPTH} deep")
        return yaml.load(text, fast if texts else Plain)
    except (yaml.YAMLError, ValueError, RecursionError, TypeError) as error:
        raise ArtifactError(f"{where} is damaged: {' '.join(str(error).split())[:200]}: copy it again") from None


def read_text(path: Path) -> str:
    """A text file. Raises ArtifactError."""
    found = content(path, 4 * YAML_BYTES)
    try:
        return io.TextIOWrapper(io.BytesIO(found), "utf-8").read()  # every kind of line's end is one
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{path} is not UTF-8: {error}: save it as UTF-8") from None
