"""A server that batches whole requests by count and time, on mosec: what most services do.

The variable WINDOW is a JSON object: engine (tformer or ctranslate2), bundle, backend, variant or the CTranslate2
model's folder, threads, processes, batch, wait_ms, max_tokens. Other options are mosec's own, such as --port.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mosec import Server, Worker

Translate = Callable[[list[str]], list[str]]
ASKED = json.loads(os.environ.get("WINDOW", "{}"))


def tformer(bundle: str, backend: str, variant: str, threads: int, max_tokens: int, **_: Any) -> Translate:
    """Our engine, a batch at a time."""
    from tformer_deploy import load

    translator = load(bundle, backend, variant=variant, threads=threads, max_tokens=max_tokens).open()
    return lambda texts: [result.text for result in translator.translate(texts)]


def ctranslate2(model: str, bundle: str, threads: int, max_tokens: int, **_: Any) -> Translate:
    """CTranslate2, with the text in and out of the bundle's tokenizers; its tokens are ids as text."""
    from ctranslate2 import Translator

    from tformer_deploy.bundle.manifest import open_bundle

    text = open_bundle(Path(bundle), graphs=False).tokenizers()
    translator = Translator(model, "cpu", compute_type="int8", intra_threads=threads, inter_threads=1)

    def translate(texts: list[str]) -> list[str]:
        sources = [list(map(str, text.source_ids(each))) for each in texts]
        found = translator.translate_batch(sources, beam_size=1, max_decoding_length=max_tokens, max_input_length=0)
        return [text.target.decode(list(map(int, each.hypotheses[0]))) for each in found]

    return translate


class Texts(Worker):  # type: ignore[misc]
    """Translates a batch of requests."""

    def __init__(self) -> None:
        engines: dict[str, Callable[..., Translate]] = {"tformer": tformer, "ctranslate2": ctranslate2}
        self.translate = engines[ASKED["engine"]](**ASKED)

    def forward(self, data: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """A list of {"text": ...} to the same."""
        return [{"text": text} for text in self.translate([each["text"] for each in data])]


if __name__ == "__main__":
    server = Server()
    server.append_worker(Texts, num=ASKED["processes"], max_batch_size=ASKED["batch"], max_wait_time=ASKED["wait_ms"])
    server.run()
