"""The result of an importer, and the options that it gets from the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from ..base.errors import ArtifactError
from ..bundle.text import Tokenizers
from ..model.checkpoint import Steps
from ..model.config import ModelConfig
from ..model.network import Transformer
from .weights import Weights

Change = Callable[[Tensor], Tensor]
TABLES = ("src_embedding.weight", "output.weight")
FILES = ("vocab", "src_vocab", "tgt_vocab", "src_codes", "tgt_codes")
"""Fields of ImportOptions that are paths."""


@dataclass(frozen=True)
class ImportOptions:
    """What the source does not say itself. Each format reads some of these."""

    vocab: Path | None = None
    """Vocabulary of both sides."""
    src_vocab: Path | None = None
    tgt_vocab: Path | None = None
    src_codes: Path | None = None
    """A sentencepiece model or BPE codes that split sources."""
    tgt_codes: Path | None = None
    heads: int = 0
    """Attention heads; 0: as the source says, or 8."""
    src_lang: str = ""
    tgt_lang: str = ""
    split_regex: str = ""
    """Each match in a line is a word."""
    language: str = ""
    """SRC-TGT, such as de-en: spaCy's rules for them split lines into words."""
    lower: bool = False
    """Lower-case the text."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """Names of a wrapper's modules."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ModelConfig that override the source's."""

    @property
    def vocabularies(self) -> tuple[Path | None, Path | None]:
        """The source's file and the target's."""
        return self.src_vocab or self.vocab, self.tgt_vocab or self.vocab

    def to_json(self, name_of: Callable[[Path], str]) -> dict[str, Any]:
        """The options that are set, for a header; `name_of` gives the name of a file there."""
        said = {each.name: value for each in fields(self) if (value := getattr(self, each.name))}
        return {name: name_of(value) if isinstance(value, Path) else value for name, value in said.items()}

    @classmethod
    def of(cls, said: Mapping[str, Any], folder: Path) -> Self:
        """The reverse; file names are relative to a folder."""
        return cls(**{name: folder / value if name in FILES else value for name, value in said.items()})


class Original(Protocol):
    """The code that a checkpoint was made for."""

    name: str
    """What it is, with its version."""

    def in_double(self) -> Original | None:
        """The same in fp64, to measure its rounding error; None if it cannot run in fp64."""
        ...

    def memory(self, src_ids: Tensor, src_lengths: Tensor) -> Tensor | None:
        """Encoder states (B, S, d) of src_ids (B, S), src_lengths (B); None where the original does not show them."""
        ...

    def log_probs(self, src_ids: Tensor, src_lengths: Tensor, tgt_ids: Tensor) -> Tensor:
        """(B, T, V) of what follows each of tgt_ids (B, T), which begin with the start token."""
        ...

    def generate(self, src_ids: Tensor, src_lengths: Tensor, beams: int, max_tokens: int) -> list[list[int]] | None:
        """The best output of each source by its own search and its own defaults, without end tokens.

        None where the original has no search of its own.
        """
        ...

    def source_ids(self, text: str) -> list[int] | None:
        """What the encoder gets for a line; None where the original has no tokenizer here."""
        ...

    def text(self, ids: list[int]) -> str | None:
        """The line of some produced ids."""
        ...


@dataclass
class Imported:
    """An imported source."""

    config: ModelConfig
    tensors: Parameters
    tokenizers: Tokenizers
    decoding: dict[str, Any] = field(default_factory=dict)
    """The source's defaults of DecodeOptions."""
    original: Callable[[], Original] | None = None
    """Loads the original code, where it is installed."""
    not_compared: str = ""
    """Why there is no original."""
    notes: list[str] = field(default_factory=list)
    """What the user should know."""
    steps: Steps | None = None
    """See `Checkpoint.steps`."""
    other_ids: Sequence[str] = ()
    """Texts that have other ids in the original, as a note says: lines with them are not compared."""


class Parameters:
    """How each parameter of our model is made; tensors are read only when they are written."""

    def __init__(self, weights: Weights, config: ModelConfig) -> None:
        self.weights, self.config = weights, config
        with torch.device("meta"):
            model = Transformer(config)
        self.shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        """Of all parameters, in order."""
        self.sources: dict[str, str] = {}
        """Parameters that are made of one tensor of the source, and its name."""
        self._made: dict[str, Callable[[], Tensor]] = {}

    def put(self, ours: str, theirs: str, change: Change | None = None) -> None:
        """Make a parameter from a tensor, changed by a function. Does nothing if our model has no such parameter."""
        self.weights.shape(theirs)
        self.sources[ours] = theirs
        if ours in self.shapes:
            self.make(ours, lambda: change(self.weights.take(theirs)) if change else self.weights.take(theirs))
        elif ours in TABLES:  # the same as another one, as `share_embeddings` says
            self.weights.ignore(theirs)

    def make(self, ours: str, how: Callable[[], Tensor]) -> None:
        """Compute a parameter."""
        assert ours in self.shapes, ours
        self._made[ours] = how

    def fill(self, ours: str) -> None:
        """Fill a parameter, if our model has it, with zeros."""
        if ours in self.shapes:
            self.make(ours, lambda: torch.zeros(self.shapes[ours]))

    def linear(self, ours: str, theirs: str, scale: float = 1.0, transpose: bool = False) -> None:
        """A linear layer, `theirs`.weight and, if it has one, `theirs`.bias."""
        scaled: Change | None = None if scale == 1 else lambda tensor: tensor * scale
        turned: Change | None = (lambda w: w.T * scale) if transpose else scaled
        self.put(f"{ours}.weight", f"{theirs}.weight", turned)
        if f"{theirs}.bias" in self.weights:
            self.put(f"{ours}.bias", f"{theirs}.bias", scaled)
        else:
            self.fill(f"{ours}.bias")

    def norm(self, ours: str, theirs: str, weight: str = "weight", bias: str = "bias") -> None:
        """A norm."""
        self.put(f"{ours}.weight", f"{theirs}.{weight}")
        if f"{theirs}.{bias}" in self.weights:
            self.put(f"{ours}.bias", f"{theirs}.{bias}")
        else:
            self.fill(f"{ours}.bias")

    def attention(
        self, ours: str, theirs: str, names: tuple[str, str, str, str], scale: float = 1.0, transpose: bool = False
    ) -> None:
        """Query, key, value and output layers; `scale` multiplies the query."""
        for part, name in zip(("query", "key", "value", "out"), names, strict=True):
            self.linear(f"{ours}.{part}", f"{theirs}.{name}", scale if part == "query" else 1.0, transpose)

    def packed_attention(self, ours: str, theirs: str) -> None:
        """`in_proj_weight` (3 d, d) of torch.nn.MultiheadAttention, query, key and value one below the other."""
        width = self.weights.shape(f"{theirs}.in_proj_weight")[0] // 3
        for i, part in enumerate(("query", "key", "value")):
            rows = slice(i * width, (i + 1) * width)
            self.put(f"{ours}.{part}.weight", f"{theirs}.in_proj_weight", lambda w, rows=rows: w[rows])  # type: ignore[misc]
            if f"{theirs}.in_proj_bias" in self.weights:
                self.put(f"{ours}.{part}.bias", f"{theirs}.in_proj_bias", lambda b, rows=rows: b[rows])  # type: ignore[misc]
            else:
                self.fill(f"{ours}.{part}.bias")
        self.linear(f"{ours}.out", f"{theirs}.out_proj")

    def require_all(self) -> None:
        """Raise ArtifactError if no source is known for a parameter."""
        if lacking := [name for name in self.shapes if name not in self._made]:
            raise ArtifactError(f"{self.weights.where} has nothing for {listed(lacking)}: is it of another format?")

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """All parameters, made one by one. Raises ArtifactError for wrong shapes, and at the end for unused tensors."""
        self.require_all()
        for name, shape in self.shapes.items():
            tensor = self._made[name]()
            if tuple(tensor.shape) != shape:
                raise ArtifactError(
                    f"{self.weights.where}: {name} would be {tuple(tensor.shape)}, not {shape}: "
                    "give the right --heads or --set model.KEY, or it is of another format"
                )
            yield name, tensor
        if left := self.weights.left():
            raise ArtifactError(f"{self.weights.where} has tensors that this format does not know: {listed(left)}")


def listed(names: list[str]) -> str:
    """Names for a message, all of them where they are few."""
    shown = ", ".join(names[:20])
    return shown if len(names) <= 20 else f"{shown} and {len(names) - 20} more"
