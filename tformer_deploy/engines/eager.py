"""The reference engine: PyTorch, cached step, no graph."""

from __future__ import annotations

import copy
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor

from ..base.errors import ConfigError, EngineError, LimitError
from ..base.messages import NO_ATTENTION
from ..bundle.contract import cache_names, layer_names
from ..bundle.manifest import Bundle
from ..model.checkpoint import Checkpoint, open_reference
from ..model.modules.probe import calling
from ..model.modules.running import UserCheckpoint, names_function
from ..model.seq2seq import Carried, GrowingCache, KeysValues, Layers, Seq2Seq, first_past, log_probs
from .base import ANYTHING, Floats, Ints, Limits, Outlook, SameStep, Scores, check_request, check_step
from .spec import Opening

NO_ENCODER = "the module gives forward alone, so that it has no encoder's output: give encode and decode of UserModel"


def load_runtime() -> None:
    """PyTorch is imported with this module."""


def open_engine(opening: Opening) -> EagerEngine:
    """The bundle's checkpoint, where it was at export or where it is said to be. Raises EngineError without a GPU."""
    if opening.device == "cuda" and not torch.cuda.is_available():
        raise EngineError("eager on cuda: this PyTorch finds no GPU: install the driver and a PyTorch with CUDA")
    checkpoint = open_reference(opening.bundle, opening.checkpoint)
    return eager_of(checkpoint, opening.bundle, opening.threads, opening.device)


open_encoder = open_engine


def eager_of(checkpoint: Checkpoint | UserCheckpoint, bundle: Bundle, threads: int, device: str = "cpu") -> EagerEngine:
    """An eager engine of an open checkpoint."""
    model = checkpoint.load_model()
    own = names_function(checkpoint.directory)
    engine = EagerEngine(model, bundle.recipe.top_k, str(checkpoint.directory) if own else "", threads, device)
    engine.checkpoint = checkpoint
    return engine


@dataclass
class EagerState:
    """Tensors on the model's device."""

    src_lengths: Tensor
    cross: list[KeysValues]
    past: list[Carried]
    parents: Tensor | None = None
    position: int = 0


class EagerEngine(SameStep):
    """Runs a model as it is; every other engine is compared with this one."""

    precision = "fp32"

    def __init__(self, model: Seq2Seq, top_k: int = 0, module: str = "", threads: int = 0, device: str = "") -> None:
        """module: `FILE.py:FUNCTION` of a model of the user's own, to say where it fails.

        While the engine is open, PyTorch uses `threads` (0: as many as before) in the whole process, and the model is
        on `device` (none: where it was).
        """
        self.threads, self.device = threads, device
        self.config, self.model, self.top_k, self.module = model.config, model, top_k, module
        self.checkpoint: Checkpoint | UserCheckpoint | None = None
        """Where the model is from, if that is known."""
        self.limits = Limits.eager(model.config)
        self.attention: bool = getattr(model, "notes_attention", True)  # set on modules of the user's own

    def __enter__(self) -> Self:
        self._before = self.model.training, str(self._device), torch.get_num_threads()
        if self.device:
            self.model.to(self.device)
        if self.threads:
            torch.set_num_threads(self.threads)
        self.model.eval()
        return self

    def __exit__(self, *why: object) -> None:
        training, device, threads = self._before
        if self.threads:
            torch.set_num_threads(threads)
        if self.device:
            self.model.to(device)
        self.model.train(training)

    def in_double(self) -> EagerEngine:
        """A copy that computes in fp64, which tells how exact this one is."""
        return EagerEngine(cast(Any, copy.deepcopy(self.model)).double(), self.top_k, self.module)

    @torch.inference_mode()
    def encode(self, src_ids: Ints, src_lengths: Ints, outlook: Outlook = ANYTHING) -> EagerState:
        """See `Engine.encode`."""
        return self._encode(src_ids, src_lengths, None)

    def best(self, beams: int, state: Any = None) -> int:
        """See `Engine.best`."""
        return min(self.top_k or 2 * beams - 1, self.config.tgt_vocab)

    @torch.inference_mode()
    def step(self, tokens: Ints, state: EagerState, full: bool = False, attention: bool = False) -> Scores:
        """See `Engine.step`."""
        if attention and not self.attention:
            raise LimitError(NO_ATTENTION)
        layers: Layers | None = {} if attention else None
        scores = self._step(tokens, state, layers)
        ids = best_ids(scores, self.best(tokens.shape[1], state))
        return Scores(
            ids.cpu().numpy().astype(np.int32),
            scores.gather(-1, ids).cpu().numpy(),
            scores.cpu().numpy() if full else None,
            layers["attention"].cpu().numpy() if layers else None,
        )

    def reorder(self, state: EagerState, parents: Ints, sentences: Ints | None = None) -> None:
        """See `Engine.reorder`."""
        device = state.src_lengths.device
        rows = torch.from_numpy(parents).to(device).long()
        state.parents = rows if state.parents is None else state.parents.flatten()[rows]
        if sentences is not None:
            keep = torch.from_numpy(sentences).to(device).long()
            state.src_lengths = state.src_lengths[keep]
            state.cross = [(k[keep], v[keep]) for k, v in state.cross]

    def cross_keys_values(self, state: EagerState) -> list[Floats]:
        """See `Engine.cross_keys_values`."""
        return [tensor.cpu().numpy() for pair in state.cross for tensor in pair]

    @torch.inference_mode()
    def memory(self, src_ids: Ints, src_lengths: Ints) -> Floats:
        """See `Encoder.memory`. Raises ConfigError for a module that has no encoder of its own."""
        if not self.encodes:
            raise ConfigError(NO_ENCODER)
        check_request(src_ids, src_lengths, self.config, self.limits)
        ids, lengths = (torch.from_numpy(each).to(self._device) for each in (src_ids, src_lengths))
        with self._calling("encode"):
            return self.model.encode(ids, lengths).cpu().numpy()  # type: ignore[no-any-return]

    @torch.inference_mode()
    def step_seconds(self, position: int) -> float:
        """How long a step of one row takes behind so many tokens, whatever they are."""
        state = self._encode(np.zeros((1, 1), np.int32), np.ones(1, np.int32), None)
        state.past, state.position = first_past(self.config, state.cross[0][0], 1, position), position
        start = time.perf_counter()
        self._step(np.zeros((1, 1), np.int32), state, None)
        return time.perf_counter() - start

    @property
    def encodes(self) -> bool:
        """See `Encoder.encodes`."""
        return getattr(self.model, "encodes", True)

    @property
    def _device(self) -> torch.device:
        return next(iter(self.model.parameters())).device

    @torch.inference_mode()
    def layers(self, src_ids: Ints, src_lengths: Ints, tgt_ids: Ints) -> dict[str, Floats]:
        """See `Engine.layers`."""
        encoder: Layers = {}
        state = self._encode(src_ids, src_lengths, encoder)
        values = {name: encoder[name].cpu().numpy() for name in layer_names("encoder", self.config)}
        names = cache_names("cross", self.config)
        values |= zip(names, self.cross_keys_values(state), strict=True)
        steps: list[Layers] = []
        for token in tgt_ids.T:
            layers: Layers = {}
            layers["log_probs"] = self._step(token[:, None], state, layers)
            steps.append(layers)
        for name in (*layer_names("decoder_step", self.config), "log_probs"):
            values[name] = torch.cat([layers[name] for layers in steps], 1).cpu().numpy()
        return values

    def _encode(self, src_ids: Ints, src_lengths: Ints, layers: Layers | None) -> EagerState:
        check_request(src_ids, src_lengths, self.config, self.limits)
        device = self._device
        lengths = torch.from_numpy(src_lengths).to(device)
        with self._calling("encode"):
            memory = self.model.encode(torch.from_numpy(src_ids).to(device), lengths, layers)
            cross = self.model.cross_keys_values(memory)
        return EagerState(lengths, cross, first_past(self.config, cross[0][0], len(src_ids)))

    def _step(self, tokens: Ints, state: EagerState, layers: Layers | None) -> Tensor:
        """Log-probabilities (B, K, V); the state grows."""
        check_step(tokens.shape[1], state.position, self.limits)
        if state.parents is not None:
            rows = state.parents.flatten()
            state.past = [tuple(tensor[rows] for tensor in each) for each in state.past]
            state.parents = None
        device = state.src_lengths.device
        cache, position = GrowingCache(state.past), torch.tensor([state.position], device=device)
        ids = torch.from_numpy(tokens).to(device)
        with self._calling("step"):
            hidden = self.model.step(ids, position, state.src_lengths, state.cross, cache, layers)
            found = log_probs(self.model, hidden)
        state.past = cache.present
        state.position += 1
        return found

    def _calling(self, what: str) -> AbstractContextManager[None]:
        return calling(self.module, what) if self.module else nullcontext()


def best_ids(log_probs: Tensor, k: int) -> Tensor:
    """The ids of the k best scores, best first, equal ones by the lower id: (..., V) -> (..., k)."""
    if k == 1:
        return log_probs.argmax(-1, keepdim=True)  # the first of several
    # One more than needed, to see whether the choice at the end was free: topk takes any of equal scores.
    ids = log_probs.topk(min(k + 1, log_probs.shape[-1])).indices.sort().values
    scores, order = log_probs.gather(-1, ids).sort(descending=True, stable=True)
    if (scores[..., k - 1 : k] == scores[..., k:]).any():
        return log_probs.sort(descending=True, stable=True).indices[..., :k]
    return ids.gather(-1, order)[..., :k]
