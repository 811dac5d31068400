"""What KServe v2 asks and answers, however it comes: over HTTP, over gRPC, or through Triton.

Texts are a BYTES tensor `text`, translations tensors of its shape. Options are parameters, or tensors of one value.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ...base.errors import ConfigError, unknown
from ...base.settings import parse_settings
from ...decoding import DecodeOptions
from ...translate.translator import Result
from ..models import Model
from ..texts import Pair
from .tensors import Tensor

INPUTS = {"text": "BYTES"}
OUTPUTS = {"text": "BYTES", "score": "FP64", "finished": "BOOL", "tokens": "INT32"}
PIECE = "piece"
"""The output of a stream: a further piece of the text."""
STREAM = "stream"
"""The option that asks for pieces."""
OPTIONS = [*(each.name for each in fields(DecodeOptions)), STREAM]
NONE = Result("", [], -sys.float_info.max)
"""Stands where a text has fewer outputs than were asked for; its `tokens` are -1."""
REFUSED = {
    "sequence_id": "requests have no state",
    "sequence_start": "requests have no state",
    "sequence_end": "requests have no state",
    "priority": "texts start in the order in which they came",
    "timeout": "the server's own limit of seconds holds",
}
"""Triton's parameters of a request that would change what is done."""


@dataclass(frozen=True)
class Asked:
    """What a request asks."""

    texts: Tensor
    prefixes: Sequence[str]
    decoding: dict[str, Any]
    stream: bool = False

    @property
    def pairs(self) -> list[Pair]:
        """Each text, and how its output begins."""
        return list(zip(self.texts.values, self.prefixes, strict=True))


def read_asked(inputs: Mapping[str, Tensor], parameters: Mapping[str, Any], streams: bool = False) -> Asked:
    """What is asked. `streams`: whether the answer may come in pieces. Raises ConfigError."""
    left = dict(inputs)
    texts, prefixes = _texts(left, "text"), _texts(left, "prefix")
    if not texts or not texts.values:
        raise ConfigError("input 'text': send a BYTES tensor with one text at least")
    if prefixes and len(prefixes.values) != len(texts.values):
        counts = f"{len(texts.values)} texts, {len(prefixes.values)} prefixes"
        raise ConfigError(f"{counts}: give each text one, empty for none")
    begins = prefixes.values if prefixes else [""] * len(texts.values)
    options = _options(left, parameters)
    stream = options.pop(STREAM, False)
    if not isinstance(stream, bool):
        raise ConfigError("stream: must be true or false")
    if stream and not streams:
        raise ConfigError("stream: this call has one answer: docs/serve.md says which calls have pieces")
    if stream and len(texts.values) > 1:
        raise ConfigError("stream: one text at a time")
    return Asked(texts, begins, _parsed(options), stream)


def check_outputs(names: Iterable[str], known: Iterable[str] = OUTPUTS) -> None:
    """Raise ConfigError for an output that there is not."""
    for name in names:
        if name not in known:
            raise unknown("output", f"{name:.40}", known)


def outputs_of(model: Model, asked: Asked, results: Sequence[Result]) -> list[Tensor]:
    """All outputs."""
    count = model.translator.asking(**asked.decoding).options.n_best
    shape = [*asked.texts.shape, count] if count > 1 else list(asked.texts.shape)
    each = [output for result in results for output in ([result, *result.alternatives] + [NONE] * count)[:count]]
    values: dict[str, list[Any]] = {
        "text": [output.text for output in each],
        "score": [output.score for output in each],
        "finished": [output.finished for output in each],
        "tokens": [-1 if output is NONE else len(output.ids) for output in each],
    }
    return [Tensor(name, datatype, shape, values[name]) for name, datatype in OUTPUTS.items()]


def _texts(inputs: dict[str, Tensor], name: str) -> Tensor | None:
    """Take an input of texts. Raises ConfigError."""
    tensor = inputs.pop(name, None)
    if tensor and tensor.datatype != "BYTES":
        raise ConfigError(f"input '{name}': must be of type BYTES, not {tensor.datatype}")
    return tensor


def _options(inputs: Mapping[str, Tensor], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Options: parameters, and inputs of one value each. Raises ConfigError."""
    found = dict(parameters)
    for name, reason in REFUSED.items():
        if name in found:
            raise ConfigError(f"parameter '{name}' is not supported: {reason}")
    for name, tensor in inputs.items():
        if name not in OPTIONS:
            raise unknown("input", f"{name:.40}", ["text", "prefix", *OPTIONS])
        if len(tensor.values) != 1:
            raise ConfigError(f"input '{name}': {len(tensor.values)} values: give one, which holds for all texts")
        if name in found:
            raise ConfigError(f"'{name}' is both an input and a parameter: give one of them")
        found[name] = tensor.values[0]
    for name in found:
        if name not in OPTIONS:
            raise unknown("parameter", f"{name:.40}", OPTIONS)
    return found


def _parsed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Decoding options; what is text is read as on the command line. Raises ConfigError."""
    return {
        name: parse_settings(DecodeOptions, "parameters", {name: value})[name] if isinstance(value, str) else value
        for name, value in options.items()
    }
