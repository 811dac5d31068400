"""CTranslate2, measured from inside; runs in its own environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ctranslate2

from .serve import config, serve


class CTranslate2:
    """A converted model; its tokens are our ids, as text."""

    def __init__(self, model: str, compute_type: str, intra_threads: int, inter_threads: int) -> None:
        folder = "int8" if compute_type.startswith("int8") else "float32"
        self.translator = ctranslate2.Translator(
            str(Path(model) / folder),
            "cpu",
            compute_type=compute_type,
            intra_threads=intra_threads,
            inter_threads=inter_threads,
        )

    def prepare(self, point: dict[str, Any]) -> tuple[list[list[str]], dict[str, int]]:
        """See `Library.prepare`."""
        options = {"beam_size": point["beams"], "max_decoding_length": point["max_tokens"], "max_input_length": 0}
        return [list(map(str, ids)) for ids in point["sources"]], options

    def run(self, prepared: tuple[list[list[str]], dict[str, int]], batching: dict[str, Any]) -> list[Any]:
        """See `Library.run`."""
        sources, options = prepared
        found: list[Any] = self.translator.translate_batch(sources, **options, **batching)
        return found

    def ids(self, found: list[Any]) -> list[list[int]]:
        """See `Library.ids`."""
        return [list(map(int, result.hypotheses[0])) for result in found]

    def scores(self, prepared: tuple[list[list[str]], dict[str, int]], batching: dict[str, Any]) -> list[float]:
        """See `Library.scores`."""
        sources, options = prepared
        plain = {"return_scores": True, "length_penalty": 0}
        return [result.scores[0] for result in self.translator.translate_batch(sources, **options, **batching, **plain)]


def main() -> None:
    """Load the model that the command line names."""
    values = config()
    names = ("compute_type", "intra_threads", "inter_threads")
    serve(CTranslate2(values["ctranslate2"], *(values[name] for name in names)), values["points"])


if __name__ == "__main__":
    main()
