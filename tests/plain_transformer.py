"""Transformers a second time, for the tests of importers: one sentence, no batch, no cache, tensors by their own names.

A toolkit's test says how its tensors are used; here is what all of them have in common.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tformer_deploy.decoding import DecodeOptions
from tformer_deploy.engines.base import Limits
from tformer_deploy.importers.base import Imported, ImportOptions
from tformer_deploy.importers.compare import Comparison, compare
from tformer_deploy.importers.run import import_checkpoint
from tformer_deploy.model.checkpoint import open_checkpoint

from .plain_decoding import Sentence, Tokens


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, causal: bool = False) -> Tensor:
    """Multi-head attention of q (T, d) over k and v (S, d), one head after the other."""
    size, parts = q.shape[1] // heads, []
    for h in range(heads):
        columns = slice(h * size, (h + 1) * size)
        scores = q[:, columns] @ k[:, columns].T / math.sqrt(size)
        if causal:
            scores = scores + torch.full_like(scores, -math.inf).triu(1)
        parts.append(torch.softmax(scores, 1) @ v[:, columns])
    return torch.cat(parts, 1)


def layer_norm(x: Tensor, gain: Tensor, bias: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(1, keepdim=True)
    return centred / (centred.square().mean(1, keepdim=True) + eps).sqrt() * gain + bias


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(1, keepdim=True) + eps).sqrt() * gain


class Random:
    """Random tensors by their names, of a seed."""

    def __init__(self, seed: int = 1) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, Tensor] = {}

    def add(self, name: str, *shape: int, scale: float = 0.0, around: float = 0.0) -> Tensor:
        """Of a deviation, or of one that keeps sizes alike through a matrix."""
        drawn = torch.randn(shape, generator=self.generator) * (scale or shape[-1] ** -0.5)
        self.tensors[name] = drawn + around
        return self.tensors[name]

    def linear(self, name: str, out: int, into: int) -> None:
        self.add(f"{name}.weight", out, into)
        self.add(f"{name}.bias", out, scale=0.1)

    def norm(self, name: str, width: int) -> None:
        self.add(f"{name}.weight", width, scale=0.1, around=1.0)
        self.add(f"{name}.bias", width, scale=0.1)


class PlainOriginal:
    """An original of two functions: encoder states (S, d) of ids, and logits (T, V) of states and ids."""

    name = "a plain model"

    def __init__(
        self,
        encode: Callable[[list[int]], Tensor],
        decode: Callable[[Tensor, list[int]], Tensor],
        imported: Imported,
    ) -> None:
        self.encode, self.decode, self.config = encode, decode, imported.config
        self.options = imported.decoding
        self.limits = Limits(batch=1, src_tokens=64, tgt_tokens=imported.config.max_positions, beams=64)
        self._memory: dict[Tokens, Tensor] = {}
        self._found: dict[tuple[Tokens, Tokens], Any] = {}

    def in_double(self) -> None: ...

    def memory(self, src_ids: Tensor, src_lengths: Tensor) -> Tensor:
        rows = [self.encode(row[:n].tolist()) for row, n in zip(src_ids, src_lengths, strict=True)]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def log_probs(self, src_ids: Tensor, src_lengths: Tensor, tgt_ids: Tensor) -> Tensor:
        rows = []
        for source, n, target in zip(src_ids.tolist(), src_lengths.tolist(), tgt_ids.tolist(), strict=True):
            rows.append(self.padded(self.decode(self.encode(source[:n]), target).log_softmax(-1)))
        return torch.stack(rows)

    def padded(self, log_probs: Tensor) -> Tensor:
        """An entry that ours has and this has not is never produced."""
        return F.pad(log_probs, (0, self.config.tgt_vocab - log_probs.shape[-1]), value=-1e9)

    def of(self, source: Tokens, output: Tokens) -> Any:
        """Log-probabilities of the next token, as `plain_decoding` asks for them."""
        if source not in self._memory:
            self._memory[source] = self.encode(list(source))
        if (source, output) not in self._found:
            logits = self.decode(self._memory[source], [self.config.start_id, *output])
            self._found[source, output] = self.padded(logits[-1:].log_softmax(-1))[0].numpy()
        return self._found[source, output]

    def generate(self, src_ids: Tensor, src_lengths: Tensor, beams: int, max_tokens: int) -> list[list[int]]:
        options = DecodeOptions(
            **{**self.options, "beams": beams, "max_tokens": max_tokens, "end_ids": (self.config.eos_id,)}
        )
        engine: Any = SimpleNamespace(log_probs=self.of, limits=self.limits, looks=lambda *_: np.empty(0))
        sources = [tuple(row[:n].tolist()) for row, n in zip(src_ids, src_lengths, strict=True)]
        return [list(Sentence(engine, source, options).beam()[0].ids) for source in sources]

    def source_ids(self, text: str) -> list[int] | None:
        return None

    def text(self, ids: list[int]) -> str | None:
        return None


def imported_as(
    name: str,
    path: Path,
    out: Path,
    encode: Callable[[list[int]], Tensor],
    decode: Callable[[Tensor, list[int]], Tensor],
    options: ImportOptions | None = None,
) -> tuple[Imported, Comparison]:
    """Import a file and compare it with a plain model: all numbers, all tokens."""
    imported, _ = import_checkpoint(name, path, out, options, comparing=False)
    checkpoint = open_checkpoint(out)
    torch.set_num_threads(1)
    with torch.inference_mode():
        original = PlainOriginal(encode, decode, imported)
        found = compare(original, checkpoint.load_model(), checkpoint.tokenizers, imported.decoding, [])
    assert found.passed, found.failures[:3]
    assert found.tokens and all(equal.startswith("60 of") for equal in found.tokens.values()), found.tokens
    assert found.memory is not None and found.memory < 1e-4 and found.log_probs < 1e-4
    return imported, found
