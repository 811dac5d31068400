"""What a server serves: bundles by name, opened, checked and warm; and again those that have changed on disk."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from ..base.errors import ArtifactError, ConfigError, DataError, LimitError, NotNumbers
from ..translate.opening import TranslatorOptions, open_translator
from ..translate.scheduler import Cancelled
from ..translate.translator import Translator
from .models import Caps, Model, Models, manifest_hash

WARM_STEPS = 4
"""Steps of a warm-up: one computes everything, the others are as short as those of requests."""
WARM_WORDS = 8


@dataclass(frozen=True)
class Served:
    """Which models, and what requests may ask of them."""

    bundles: Mapping[str, TranslatorOptions]
    """By the models' names; the first is the default."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """See `Models`."""
    caps: Caps = field(default_factory=Caps)
    slots: int = 32
    max_queue: int = 1024

    def open(self, before: Models | None = None) -> Models:
        """All models, checked and warm. Those of `before` whose manifests have not changed are taken as they are.

        Raises TformerError, and leaves nothing open that was not.
        """
        opened: list[Model] = []
        try:
            models = []
            for name, options in self.bundles.items():
                old = before.get(name) if before else None
                if not old or old.version != manifest_hash(options):
                    opened.append(self._open(name, options))
                    old = opened[-1]
                models.append(old)
            return Models(models, self.aliases)
        except BaseException:
            for model in opened:
                model.close(drain=False)
            raise

    def _open(self, name: str, options: TranslatorOptions) -> Model:
        version = manifest_hash(options)
        translator = open_translator(options)
        try:
            model = Model(name, translator, self.caps, self.slots, self.max_queue)
        except BaseException:
            translator.close()
            raise
        try:
            if model.version != version:
                raise ArtifactError(f"{options.bundle} was changed while it was opened: try again")
            warm_up(model)
        except BaseException:
            model.close(drain=False)
            raise
        return model


def warm_up(model: Model) -> None:
    """Take the first steps of a text, so that the first request finds weights in memory, and threads and buffers made.

    A text that this model does not take is no failure. Raises the engine's own errors.
    """
    for text in some_texts(model.translator):
        steps = model.scheduler.steps
        try:
            line = model.scheduler.submit(text)
            while not line.future.done() and model.scheduler.steps < steps + WARM_STEPS:
                time.sleep(0.001)
            line.cancel()  # a whole output may be long
            line.result()
        except Cancelled:
            return
        except (ConfigError, DataError, LimitError, NotNumbers):
            continue
        if line.length:
            return


def some_texts(translator: Translator) -> Iterator[str]:
    """Texts of the source vocabulary: its first words together, then each alone."""
    source = translator.tokenizers.source
    decoded = (source.decode([index]).strip() for index in range(source.size))
    words = list(islice((word for word in decoded if word and word.isprintable()), WARM_WORDS))
    yield " ".join(words)
    yield from words
