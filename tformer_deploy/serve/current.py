"""The models that are served now. A reload replaces them, and no request notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition, Lock, Thread

from starlette.applications import Starlette
from starlette.routing import Route

from ..base.errors import ConfigError, EngineError, TformerError
from ..base.notes import note, printable
from .answers import BODY_SECONDS
from .models import Model, Models

Reopen = Callable[[Models], Models]
"""Opens what has changed; models that have not are in both."""


class Held:
    """Models, the application over them, and how many requests use them."""

    def __init__(self, models: Models, app: Starlette) -> None:
        self.models, self.app, self.requests = models, app, 0


class Current:
    """The models that are served now: a request keeps those that it began with until it has ended.

    So its model, the scheduler that its lines are in and the tokenizers that make text of them are of one bundle.
    """

    def __init__(self, models: Models, make: Callable[[Models], Starlette], reopen: Reopen | None = None) -> None:
        """`make`: the application over models. `reopen`: none: they cannot be replaced."""
        self._make, self._reopen = make, reopen
        self._held = Held(models, make(models))
        self._left, self._reloading = Condition(), Lock()
        self._closing: Thread | None = None
        self.draining = False
        """Whether the server is about to end."""

    def __iter__(self) -> Iterator[Model]:
        return iter(self._held.models)

    @property
    def routes(self) -> list[Route]:
        """The application's routes; their paths are those of any models."""
        return [route for route in self._held.app.routes if isinstance(route, Route)]

    def check_room(self) -> None:
        """Raise Busy where no model has room for a text."""
        self._held.models.check_room()

    @contextmanager
    def use(self) -> Iterator[Held]:
        """What is served now; it stays open while the block runs."""
        with self._left:
            held = self._held
            held.requests += 1
        try:
            yield held
        finally:
            with self._left:
                held.requests -= 1
                self._left.notify_all()

    def reload(self) -> list[Model]:
        """Open bundles that have changed, and serve them; says so on standard error. Returns their models.

        Raises EngineError where one cannot be opened: then nothing has changed. Waits until models that a reload before
        this one has replaced are closed, so that at most two sets are open.
        """
        with self._reloading:
            self._wait()
            old = self._held
            new: Models | None = None
            try:
                new = self._opened(old.models)
                held = Held(new, self._make(new))
            except Exception as error:
                for model in set(new or ()) - set(old.models):
                    model.close(drain=False)
                shown = str(error) if isinstance(error, TformerError) else f"{type(error).__name__}: {error}"
                note(line := printable(f"not reloaded, what was served before goes on: {shown}"))
                raise EngineError(line) from error
            kept = list(old.models)
            changed = [model for model in new if model not in kept]
            if changed:
                with self._left:
                    self._held = held
                self._closing = Thread(target=self._close, args=(old, list(new)), name="tformer closing")
                self._closing.start()
            note(f"reloaded: {', '.join(model.name for model in changed) or 'no manifest has changed'}")
            return changed

    def _opened(self, before: Models) -> Models:
        if not self._reopen:
            raise ConfigError("this server does not know how its models were opened: start it again")
        return self._reopen(before)

    def close(self, drain: bool = True) -> None:
        """Close all models, also those that a reload has replaced."""
        with self._reloading:
            self._held.models.close(drain)
            self._wait()

    def _wait(self) -> None:
        """Until replaced models are closed."""
        if self._closing:
            self._closing.join()

    def _close(self, old: Held, kept: list[Model]) -> None:
        """Close models that are no longer served, once their requests have ended, or could have.

        Of a request that is still there after its body's and its texts' time, the client takes no data.
        """
        most = BODY_SECONDS + 2 * max(model.caps.seconds for model in old.models)  # two: through a third language
        with self._left:
            self._left.wait_for(lambda: not old.requests, most)
        for model in old.models:
            if model not in kept:
                model.close()
