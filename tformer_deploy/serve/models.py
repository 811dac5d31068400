"""The models that a server has, what a request may ask of them, and the lines that wait for an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ..base.errors import ConfigError, LimitError, unknown
from ..base.files import sha256
from ..base.settings import at_least, check_types
from ..bundle.manifest import MANIFEST, Bundle
from ..translate.opening import TranslatorOptions
from ..translate.scheduler import Line, Scheduler
from ..translate.translator import Translator
from .languages import Pairs


@dataclass(frozen=True)
class Caps:
    """The most that one request may ask for."""

    texts: int = 128
    """Texts of a request."""
    text_bytes: int = 1 << 16
    """UTF-8 bytes of a text."""
    body_bytes: int = 1 << 20
    """Bytes of a request's body."""
    beams: int = 16
    """Beams, and samples, of a text."""
    option_ids: int = 1000
    """Token ids in an option, such as `suppress`."""
    max_tokens: int = 512
    """Tokens of an output. A request that does not say how many gets at most these."""
    seconds: float = 60.0
    """Seconds that a text may take, waiting included."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("texts", "text_bytes", "body_bytes", "beams", "option_ids", "max_tokens"):
            at_least(self, name, 1)
        if self.seconds <= 0:
            raise ConfigError(f"seconds={self.seconds}: must be more than 0")


class UnknownModel(ConfigError):
    """A model that the server does not have."""


class Model:
    """A bundle that is served: its translator, and the scheduler that batches all requests to it."""

    def __init__(self, name: str, translator: Translator, caps: Caps, slots: int = 32, max_queue: int = 1024) -> None:
        self.name, self.translator, self.caps = name, translator, caps
        self.version = version_of(translator)
        self.scheduler = Scheduler(translator, slots, max_queue)
        self.decoding: dict[str, Any] = {}
        """Options of its own, over those of the bundle."""

    def called(self, name: str, token: str = "") -> Self:
        """The same model by another name; its outputs begin with a vocabulary entry, such as a language code, if given.

        Raises ConfigError for an entry that the vocabulary does not have.
        """
        other = copy(self)
        other.name = name
        if token:
            index = self.translator.tokenizers.target.id_of(token)
            if index is None:
                raise ConfigError(f"alias {name}: '{token}' is not in the target vocabulary of {self.name}")
            other.decoding = {**self.decoding, "first_ids": (index,)}
            other.translator = self.translator.asking(**other.decoding)
        return other

    def submit(
        self,
        text: str,
        prefix: str,
        decoding: Mapping[str, Any],
        write: Callable[[str], None] | None = None,
        seconds: float | None = None,
    ) -> Line:
        """Queue a text. Raises Busy, LimitError for what exceeds the caps, and the errors of `Scheduler.submit`.

        `seconds`: that it may take; none: those of the caps.
        """
        asked = self.capped(decoding)
        for name, value in (("text", text), ("prefix", prefix)):
            self.check_size(name, value)
        return self.scheduler.submit(text, prefix, write, self.caps.seconds if seconds is None else seconds, **asked)

    def check_size(self, name: str, text: str) -> None:
        """Raise LimitError for a text that is longer than the caps allow."""
        if (size := len(text.encode("utf-8", "surrogatepass"))) > (most := self.caps.text_bytes):
            raise LimitError(f"a {name} of {size} bytes exceeds this server's limit of {most}: split it")

    def capped(self, decoding: Mapping[str, Any]) -> dict[str, Any]:
        """Decoding options within the caps. Raises LimitError for those beyond, ConfigError for wrong ones."""
        asked, caps = {**self.decoding, **decoding}, self.caps
        for name, value in decoding.items():
            if isinstance(value, (list, tuple)) and (ids := _numbers(value)) > caps.option_ids:
                raise LimitError(f"{name}: {ids} token ids exceed this server's limit of {caps.option_ids}: use fewer")
        options = self.translator.asking(**asked).options
        if options.endless:
            raise LimitError("endless is not an option of this server: outputs must be able to end")
        if options.rows > caps.beams:
            raise LimitError(f"{options.rows} beams or samples exceed this server's limit of {caps.beams}: use fewer")
        if options.max_tokens > caps.max_tokens:
            if "max_tokens" in asked:
                raise LimitError(
                    f"max_tokens={options.max_tokens} exceeds this server's limit of {caps.max_tokens}: use fewer"
                )
            asked["max_tokens"] = caps.max_tokens
        return asked

    def close(self, drain: bool = True) -> None:
        """End the scheduler, after all lines if `drain`, and free the engine."""
        self.scheduler.close(drain)
        self.translator.close()


def _numbers(value: Sequence[Any]) -> int:
    return sum(len(each) if isinstance(each, (list, tuple)) else 1 for each in value)


def version_of(translator: Translator) -> str:
    """SHA-256 of the manifest of a translator's bundle, which has the hashes of all its files; empty: there is none."""
    settings = translator.settings
    if not isinstance(settings, TranslatorOptions):
        return ""
    return manifest_hash(settings)


def manifest_hash(options: TranslatorOptions) -> str:
    """SHA-256 of the manifest as it is on disk; empty: there is none that can be read."""
    bundle = options.bundle
    try:
        return sha256((bundle.directory if isinstance(bundle, Bundle) else Path(bundle)) / MANIFEST)
    except OSError:
        return ""


class Models:
    """The models of a server by name; the first is the default."""

    def __init__(self, models: Sequence[Model], aliases: Mapping[str, str] | None = None) -> None:
        """`aliases`: further names, each of MODEL, or of MODEL:TOKEN for outputs that begin with that entry."""
        self._models = {model.name: model for model in models}
        if len(self._models) < len(models):
            raise ConfigError("two models have the same name: give each its own, as in NAME=BUNDLE")
        self._aliases = {name: asked.partition(":")[::2] for name, asked in (aliases or {}).items()}
        for name, (model, _) in self._aliases.items():
            if name in self._models:
                raise ConfigError(f"alias {name}: a model has this name: choose another")
            if model not in self._models:
                raise unknown(f"model of alias {name}", model, self._models)
            self.get(name)
        self.pairs = Pairs([*self._models, *self._aliases])

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models.values())

    def listed(self) -> list[Model]:
        """All that a client may name: models, then aliases."""
        return [self.get(name) for name in (*self._models, *self._aliases)]

    @property
    def body_bytes(self) -> int:
        """The largest body that any model takes; which one a request is for stands in the body."""
        return max(model.caps.body_bytes for model in self)

    def get(self, name: str = "") -> Model:
        """A model by its name or an alias; without a name the first. Raises UnknownModel."""
        if not name:
            return next(iter(self._models.values()))
        if name in self._aliases:
            model, token = self._aliases[name]
            return self._models[model].called(name, token)
        if name not in self._models:
            raise UnknownModel(str(unknown("model", name, [*self._models, *self._aliases])))
        return self._models[name]

    def check_room(self) -> None:
        """Raise Busy where the queues of all models are full."""
        if all(model.scheduler.full for model in self):
            self.get().scheduler.check_room()

    def find(self, source: str, target: str) -> tuple[Model, ...]:
        """The model for a pair of languages, or the two that lead there. Raises UnknownPair; see `Pairs.way`."""
        return tuple(self.get(name) for name in self.pairs.way(source, target))

    def close(self, drain: bool = True) -> None:
        """Close all."""
        for model in self._models.values():
            model.close(drain)
