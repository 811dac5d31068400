"""OpenVINO over a bundle's standard graphs, in a plain greedy loop; runs in the peers' environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import openvino

from .serve import config, serve

Array = np.ndarray[Any, Any]
Found = list[tuple[list[int], float]]
"""Each source's output and the sum of its log-probabilities."""


class OpenVINO:
    """The encoder and a decoding step of one bundle, all threads on one batch."""

    def __init__(self, bundle: str, precision: str, threads: int) -> None:
        self.model: dict[str, Any] = json.loads(Path(bundle, "manifest.json").read_text())["model"]
        core = openvino.Core()
        options = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1}
        encoder, step = (core.compile_model(str(Path(bundle, f"{name}.onnx")), "CPU", options) for name in NAMES)
        self.encoder = encoder.create_infer_request()
        self.steps = [step.create_infer_request() for _ in range(2)]  # one reads what the other has returned

    def prepare(self, point: dict[str, Any]) -> tuple[list[list[int]], int]:
        """See `Library.prepare`. Raises ValueError for beams."""
        if point["beams"] != 1:
            raise ValueError("the loop is greedy")
        return point["sources"], point["max_tokens"]

    def run(self, prepared: tuple[list[list[int]], int], batching: dict[str, Any]) -> Found:
        """See `Library.run`: sources of similar length together."""
        sources, max_tokens = prepared
        size = batching["max_batch_size"]
        order = sorted(range(len(sources)), key=lambda i: -len(sources[i]))
        found: Found = [([], 0.0)] * len(sources)
        for first in range(0, len(order), size):
            some = order[first : first + size]
            for i, output in zip(some, self._decode([sources[i] for i in some], max_tokens), strict=True):
                found[i] = output
        return found

    def ids(self, found: Found) -> list[list[int]]:
        """See `Library.ids`."""
        return [ids for ids, _ in found]

    def scores(self, prepared: tuple[list[list[int]], int], batching: dict[str, Any]) -> list[float]:
        """See `Library.scores`."""
        return [score for _, score in self.run(prepared, batching)]

    def _decode(self, sources: list[list[int]], max_tokens: int) -> Found:
        """Greedy, the caches as the step returns them; a sentence that has ended leaves the batch."""
        src_ids = np.full((len(sources), max(map(len, sources))), self.model["pad_id"], np.int32)
        for row, ids in zip(src_ids, sources, strict=True):
            row[: len(ids)] = ids
        lengths = np.array(list(map(len, sources)), np.int32)
        given = self._infer(self.encoder, {"src_ids": src_ids, "src_lengths": lengths})
        given["src_lengths"] = lengths
        for i in range(self.model["decoder_layers"]):
            empty = given[f"cross_k_{i}"][:, :, :0].copy()
            given |= {f"past_k_{i}": empty, f"past_v_{i}": empty}
        outputs: list[list[int]] = [[] for _ in sources]
        scores = [0.0] * len(sources)
        live, parents = np.arange(len(sources)), np.arange(len(sources), dtype=np.int32)
        tokens = np.full(len(sources), self.model["start_id"], np.int32)
        for position in range(max_tokens):
            given |= {
                "tokens": tokens[:, None],
                "parents": parents[:, None],
                "position": np.array([position], np.int32),
            }
            found = self._infer(self.steps[position % 2], given)
            tokens = found["top_ids"][:, 0, 0].copy()
            for sentence, token, score in zip(live, tokens, found["top_scores"][:, 0, 0], strict=True):
                scores[sentence] += float(score)
                if token != self.model["eos_id"]:
                    outputs[sentence].append(int(token))
            going = tokens != self.model["eos_id"]
            if not going.any():
                break
            given |= {name.replace("present", "past"): found[name] for name in found if name.startswith("present")}
            parents = np.flatnonzero(going).astype(np.int32)
            if not going.all():
                live, tokens = live[going], tokens[going]
                given |= {name: given[name][going] for name in given if name.startswith(("cross", "src_lengths"))}
        return list(zip(outputs, scores, strict=True))

    def _infer(self, request: Any, given: dict[str, Array]) -> dict[str, Array]:
        """What a graph returns, in its own memory: the next run of the request overwrites it."""
        names = [one.get_any_name() for one in request.model_inputs]
        found = request.infer({name: given[name] for name in names}, share_inputs=True, share_outputs=True)
        return {port.get_any_name(): array for port, array in found.items()}


NAMES = ("encoder", "decoder_step")


def main() -> None:
    """Compile the graphs of the bundle that the command line names."""
    values = config()
    serve(OpenVINO(values["bundle"], values["precision"], values["threads"]), values["points"])


if __name__ == "__main__":
    main()
