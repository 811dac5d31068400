"""Our engines and eager PyTorch, measured from inside."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from tformer_deploy.decoding import DecodeOptions, decode
from tformer_deploy.engines import STANDARD
from tformer_deploy.engines.base import Engine
from tformer_deploy.translate.batches import make_batch
from tformer_deploy.translate.opening import TranslatorOptions, open_translator
from tformer_deploy.translate.translator import Translator

from .serve import config, serve

Prepared = tuple[dict[str, Any], DecodeOptions]


class Tformer:
    """An engine with its decode loops."""

    def __init__(self, translator: Translator, workers: int) -> None:
        self.translator, self.engine, self.workers = translator, translator.engine, workers
        self.pool = ThreadPoolExecutor(workers)

    def prepare(self, point: dict[str, Any]) -> Prepared:
        """See `Library.prepare`."""
        return point, DecodeOptions(max_tokens=point["max_tokens"], beams=point["beams"])

    def run(self, prepared: Prepared, batching: dict[str, Any]) -> list[list[int]]:
        """See `Library.run`: a corpus through the translator, a batch as it is, a part for every worker."""
        point, options = prepared
        if not point["exact"]:
            self.translator.options = options
            self.translator.settings = replace(self.translator.settings, batch_tokens=batching["batch_tokens"])
            return [result.ids for result in self.translator.generate(point["sources"])]
        size = -(-len(point["sources"]) // self.workers)
        parts = [point["sources"][i : i + size] for i in range(0, len(point["sources"]), size)]
        if len(parts) == 1:
            return self._decode(parts[0], options)
        found = self.pool.map(self._decode, parts, [options] * len(parts))
        return [ids for part in found for ids in part]

    def ids(self, found: list[list[int]]) -> list[list[int]]:
        """See `Library.ids`."""
        return found

    def scores(self, prepared: Prepared, batching: dict[str, Any]) -> list[float]:
        """See `Library.scores`."""
        point, self.translator.options = prepared
        return [result.score for result in self.translator.generate(point["sources"])]

    def _decode(self, sources: list[list[int]], options: DecodeOptions) -> list[list[int]]:
        batch = make_batch(sources, self.engine.config.pad_id)
        return [hypotheses[0].ids for hypotheses in decode(self.engine, batch, options)]


def at_its_best(engine: Engine, dtype: str, compiled: bool) -> None:
    """Prepare eager PyTorch: keep freed memory, lower the weights, compile the step."""
    import torch

    from tformer_deploy.base.machine import keep_freed_memory
    from tformer_deploy.engines.eager import EagerEngine

    assert isinstance(engine, EagerEngine)
    keep_freed_memory()
    engine.model.to(getattr(torch, dtype))
    engine.model.output.register_forward_hook(lambda module, arguments, logits: logits.float())
    if compiled:
        engine.model.step = torch.compile(engine.model.step, dynamic=True)  # type: ignore[method-assign]


def main() -> None:
    """Load the engine that the command line names."""
    values = config()
    engine, workers = values["engine"], values["workers"]
    variant = STANDARD if engine == "ort" else None
    options = TranslatorOptions(values["bundle"], engine, variant, threads=values["threads"], workers=workers)
    with open_translator(options) as translator:
        if engine == "eager":
            at_its_best(translator.engine, values["dtype"], values["compiled"])
        serve(Tformer(translator, workers), values["points"])


if __name__ == "__main__":
    main()
