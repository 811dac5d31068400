"""A server of exact numbers and clients of it, which the tests of `translate.scheduler` and `serve` share."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tformer_deploy.base.errors import EngineError, LimitError
from tformer_deploy.bundle.text import SPECIALS, Tokenizers, Words
from tformer_deploy.decoding import DecodeOptions
from tformer_deploy.engines.base import Ints, Scores
from tformer_deploy.serve.models import Caps, Model, Models
from tformer_deploy.translate.scheduler import Line
from tformer_deploy.translate.translator import Translator

from .plain_decoding import TableEngine, TableState

SOURCE_WORDS, TARGET_WORDS = (Words([*SPECIALS, *(f"w{i}" for i in range(4, size))], None) for size in (60, 40))
BROKEN, REFUSED = 59, 58
"""Words of the source: one whose log-probabilities become NaN, one that the engine refuses."""
CAPS = Caps(texts=4, text_bytes=200, body_bytes=2000, beams=4, max_tokens=20, seconds=20)
NAMED: dict[str, Any] = {"numbers": {}, "b": {}}
"""Models, and what their translators are opened with."""
PAIRS: dict[str, Any] = {"numbers": {}, "de-en": {"max_tokens": 12}, "en-pt_BR": {}, "fr-de": {"max_tokens": 12}}
"""Models of pairs of languages; the limit makes outputs of some shorter."""


class Watched(TableEngine):
    """Numbers are exact, so that results are equal to the last bit. Notes what it is asked; `open` lets steps go on."""

    def __init__(self) -> None:
        super().__init__(seed=3, positions=24, vocab=40)
        self.encoded: list[int] = []
        self.rows: set[tuple[int, int]] = set()
        self.open = threading.Event()
        self.open.set()
        self.broken = False

    def encode(self, src_ids: Ints, src_lengths: Ints, outlook: Any = None) -> TableState:
        if (src_ids == REFUSED).any():
            raise LimitError("refused")
        self.encoded.append(src_ids.size)
        return super().encode(src_ids, src_lengths, outlook)

    def step(self, tokens: Ints, state: TableState, full: bool = False, attention: bool = False) -> Scores:
        self.open.wait(20)
        if self.broken:
            raise EngineError("the device is lost")
        self.rows.add(tokens.shape)  # type: ignore[arg-type]
        scores = super().step(tokens, state, full, attention)
        for source, values in zip(state.sources, scores.scores, strict=True):
            if BROKEN in source and state.positions[0]:
                values[:] = np.nan
        return scores


def translator_of(engine: Any, **options: Any) -> Translator:
    return Translator(
        engine, Tokenizers(SOURCE_WORDS, TARGET_WORDS), DecodeOptions(**{"max_tokens": 20, **options})
    ).open()


def translated(text: str, *ways: dict[str, Any], **decoding: Any) -> Any:
    """What the translators give, each the best output of the one before it."""
    for way in ways:
        [result] = translator_of(Watched(), **way).translate([text], **(decoding if way is ways[-1] else {}))
        text = result.text
    return result


@pytest.fixture
def engine() -> Iterator[Watched]:
    engine = Watched()
    yield engine
    engine.open.set()


@pytest.fixture
def serve(engine: Watched) -> Iterator[Callable[..., Any]]:
    """Makes a server on a free port; returns a client of it."""
    httpx, uvicorn = pytest.importorskip("httpx"), pytest.importorskip("uvicorn")
    from tformer_deploy.serve.app import make_app
    from tformer_deploy.serve.connections import Timed

    ending = []

    def start(
        key: str = "",
        named: dict[str, Any] = NAMED,
        aliases: dict[str, str] | None = None,
        reopen: Callable[[Models], Models] = lambda models: models,
        **other: Any,
    ) -> Any:
        given = {"caps": CAPS, **other}
        made = [Model(name, translator_of(engine, **options), **given) for name, options in named.items()]
        models = Models(made, aliases)
        app = make_app(models, key, reopen)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", http=Timed))
        thread = threading.Thread(target=server.run)
        thread.start()
        wait_for(lambda: server.started or not thread.is_alive())
        assert server.started
        port = server.servers[0].sockets[0].getsockname()[1]
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20)
        client.app = app
        ending.append((server, thread, client, app.current))
        return client

    yield start
    engine.open.set()
    for server, thread, client, current in ending:
        client.close()
        server.should_exit = True
        thread.join(20)
        current.close(drain=False)


@pytest.fixture
def client(serve: Callable[..., Any]) -> Any:
    return serve()


@pytest.fixture
def cancelled(monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Whether a line has been cancelled, as each is once the server has seen that its client is gone."""
    called, cancel = threading.Event(), Line.cancel

    def note(line: Line) -> None:
        cancel(line)
        called.set()

    monkeypatch.setattr(Line, "cancel", note)
    return called.is_set


def post(client: Any, path: str = "/v1/translate", **body: Any) -> Any:
    return client.post(path, json=body)


def events(response: Any) -> list[tuple[str, Any]]:
    found = [each.split("\n") for each in response.text.split("\n\n") if each]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in found]


def wait_for(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def counted(client: Any, name: str, model: str = "numbers") -> float:
    found = re.search(rf'^tformer_{name}{{model="{model}"}} (.*)$', client.get("/metrics").text, re.MULTILINE)
    assert found
    return float(found[1])


def ask_and_leave(client: Any, model: str = "numbers", **body: Any) -> None:
    """Ask for a translation, and close the connection once a line of the model runs."""
    content = json.dumps(body).encode()
    with socket.create_connection((client.base_url.host, client.base_url.port), 20) as connection:
        head = f"POST /v1/translate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
        wait_for(lambda: counted(client, "running_lines", model) == 1)
