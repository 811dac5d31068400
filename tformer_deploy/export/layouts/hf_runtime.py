"""A folder of Hugging Face's layout in plain ONNX Runtime: its graphs, and the search that its JSON files ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from ...base.settings import from_dict
from ...decoding import DecodeOptions, decode
from ...engines.base import ANYTHING, Floats, Ints, Limits, Outlook, SameStep, Scores, check_request, check_step
from ...engines.eager import best_ids
from ...engines.ort.library import InferenceSession, check_library, loading, open_session, session_options
from ...importers.hf_generation import decoding_defaults
from ...importers.weights import read_json_file
from ...model.config import ModelConfig
from .layout import Generate
from .written import batches

Arrays = dict[str, NDArray[Any]]


@dataclass
class RowsState:
    """What a decoder is fed, each array with a row a hypothesis."""

    fixed: Arrays
    """`encoder_attention_mask` and `encoder_hidden_states`."""
    past: Arrays = field(default_factory=dict)
    position: int = 0


class GraphsEngine(SameStep):
    """The graphs of a folder as an engine, whose rows are those of Hugging Face: sources are repeated for beams."""

    precision, attention = "fp32", False

    def __init__(self, config: ModelConfig, encoder: Path, decoder: Path, with_past: Path | None) -> None:
        """`decoder`: the merged one, unless there is a `with_past`."""
        self.config, self.limits = config, Limits.eager(config)
        self.paths = [encoder, decoder, *([with_past] if with_past else [])]
        self.sessions: list[InferenceSession] = []

    def __enter__(self) -> Self:
        check_library()
        for path in self.paths:
            with loading(path):
                options = session_options(0)
                options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # two sessions in turns
                self.sessions.append(open_session(path, options))
        return self

    def __exit__(self, *why: object) -> None:
        self.sessions.clear()

    def encode(self, src_ids: Ints, src_lengths: Ints, outlook: Outlook = ANYTHING) -> RowsState:
        """See `Engine.encode`."""
        check_request(src_ids, src_lengths, self.config, self.limits)
        mask = (np.arange(src_ids.shape[1]) < src_lengths[:, None]).astype(np.int64)
        [memory] = self.sessions[0].run(None, {"input_ids": src_ids.astype(np.int64), "attention_mask": mask})
        return RowsState({"encoder_attention_mask": mask, "encoder_hidden_states": memory})

    def best(self, beams: int, state: Any = None) -> int:
        """See `Engine.best`."""
        return min(2 * beams - 1, self.config.tgt_vocab)

    def step(self, tokens: Ints, state: RowsState, full: bool = False, attention: bool = False) -> Scores:
        """See `Engine.step`."""
        check_step(tokens.shape[1], state.position, self.limits)
        logits = self.logits(tokens.reshape(-1, 1).astype(np.int64), state)
        state.position += 1
        scores = torch.log_softmax(torch.from_numpy(logits[:, -1]), -1).view(*tokens.shape, -1)
        ids = best_ids(scores, self.best(tokens.shape[1]))
        found = ids.numpy().astype(np.int32), scores.gather(-1, ids).numpy()
        return Scores(*found, scores.numpy() if full else None)

    def logits(self, tokens: NDArray[np.int64], state: RowsState) -> Floats:
        """(R, 1) -> (R, 1, V); the state grows."""
        cached = bool(state.past)
        session = self.sessions[-1 if cached else 1]
        wanted = {value.name: value.shape for value in session.get_inputs()}
        feeds = {"input_ids": tokens, "use_cache_branch": np.array([cached]), **state.fixed, **state.past}
        for name, shape in wanted.items():
            if name not in feeds:  # empty caches, for the merged decoder's first step
                sizes = [len(tokens), shape[1], 0, shape[3]]
                feeds[name] = np.zeros(sizes, np.float32)
        names = [value.name for value in session.get_outputs()]
        outputs = session.run(names, {name: feeds[name] for name in wanted})
        for name, value in zip(names, outputs, strict=True):
            past = name.replace("present", "past_key_values")
            if name != "logits" and (not cached or ".decoder." in name):
                state.past[past] = value
        return outputs[0]  # type: ignore[no-any-return]

    def reorder(self, state: RowsState, parents: Ints, sentences: Ints | None = None) -> None:
        """See `Engine.reorder`."""
        rows = parents.flatten()
        for arrays in (state.fixed, state.past):
            arrays |= {name: value[rows] for name, value in arrays.items()}

    def cross_keys_values(self, state: RowsState) -> list[Floats]:
        """See `Engine.cross_keys_values`; once a step was taken."""
        return [value for name, value in state.past.items() if ".encoder." in name]

    def layers(self, src_ids: Ints, src_lengths: Ints, tgt_ids: Ints) -> dict[str, Floats]:
        """See `Engine.layers`: these graphs name none."""
        return {}


@contextmanager
def plain_runtime(config: ModelConfig, folder: Path, graphs: Sequence[str]) -> Iterator[Generate]:
    """Generate with graphs of a folder, their names without `.onnx`, as its generation_config.json says."""
    settings = read_json_file(folder / "generation_config.json")
    stated = {"start_id": settings["decoder_start_token_id"], "pad_id": settings["pad_token_id"]}
    encoder, decoder, *with_past = (folder / f"{name}.onnx" for name in graphs)
    stated_config = dataclasses.replace(config, **stated)
    with GraphsEngine(stated_config, encoder, decoder, with_past[0] if with_past else None) as engine:

        def generate(sources: Sequence[Sequence[int]], options: DecodeOptions) -> list[list[int]]:
            asked = {"num_beams": options.beams, "max_length": options.max_tokens + 1}
            forced = settings.get("forced_bos_token_id")
            first = () if forced is None else (forced,)
            decoding, _ = decoding_defaults({**settings, **asked}, first, stated_config)
            found = from_dict(DecodeOptions, decoding, "decoding")
            parts = batches(stated_config.pad_id, [list(each) for each in sources])
            return [each[0].ids for batch in parts for each in decode(engine, batch, found)]

        yield generate
