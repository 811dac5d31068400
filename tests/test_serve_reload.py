"""Bundles are replaced while requests run: every answer is the old one's or the new one's, none is lost or mixed."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tformer_deploy.base.errors import ArtifactError, ConfigError, EngineError
from tformer_deploy.bundle.text import SPECIALS, Tokenizers, Words
from tformer_deploy.cli.serve import engine_of, read_bundles
from tformer_deploy.decoding import DecodeOptions
from tformer_deploy.serve.app import make_app
from tformer_deploy.serve.models import Model, Models
from tformer_deploy.serve.run import bind
from tformer_deploy.serve.served import WARM_STEPS, Served, warm_up
from tformer_deploy.translate.opening import TranslatorOptions
from tformer_deploy.translate.translator import Translator

from .command import failed_line, run_here
from .serving import CAPS, SOURCE_WORDS, TARGET_WORDS, Watched, events, post, translator_of, wait_for

BUNDLES = Path(__file__).parent / "bundles/v2"
TEXTS = ["w7 w8 w9", "w10", "w11 w12"]
OPTIONS = {"beams": 2, "n_best": 2, "min_tokens": 3}


class Other(Watched):
    """Answers otherwise; its target words are in another order, so that text of mixed parts would show."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = 4


OTHER_WORDS = Words([*SPECIALS, *(f"v{i}" for i in range(4, 40))], None)


def other_translator(engine: Any, **options: Any) -> Translator:
    tokenizers = Tokenizers(SOURCE_WORDS, OTHER_WORDS)
    return Translator(engine, tokenizers, DecodeOptions(**{"max_tokens": 20, **options})).open()


class Slow(Watched):
    """Takes time for a step."""

    def step(self, *request: Any) -> Any:
        time.sleep(0.01)
        return super().step(*request)


class Replaced:
    """Models of one engine, then of another, and so on; keeps all that it has opened."""

    def __init__(self, names: tuple[str, ...] = ("de-en", "en-fr"), unchanged: tuple[str, ...] = ()) -> None:
        self.names, self.unchanged = names, unchanged
        self.engines = Watched(), Other()
        self.opened: list[Models] = []
        self.error: Exception | None = None

    def __call__(self, before: Models) -> Models:
        if self.error:
            raise self.error
        theirs, ours = self.engines
        odd = len(self.opened) % 2 == 0
        made = [
            before.get(name)
            if name in self.unchanged
            else Model(name, other_translator(ours) if odd else translator_of(theirs), CAPS)
            for name in self.names
        ]
        self.opened.append(Models(made))
        return self.opened[-1]


NAMED: dict[str, Any] = {"de-en": {}, "en-fr": {}}


def expected(translator: Translator) -> list[str]:
    return [each.text for each in translator.translate(TEXTS, **OPTIONS)]


def test_requests_during_reloads_get_the_old_answer_or_the_new_one(serve: Callable[..., Any]) -> None:
    replaced = Replaced()
    client = serve(named=NAMED, reopen=replaced)
    both = [expected(translator_of(Watched())), expected(other_translator(Other()))]
    pivot = [post(client, source_lang="de", target_lang="fr", text=TEXTS, options=OPTIONS).json()["results"]]
    ended, found, pivots, streams = threading.Event(), [], [], []

    def ask() -> None:
        with httpx.Client(base_url=client.base_url, timeout=20) as own:
            while not ended.is_set():
                found.append(post(own, text=TEXTS, options=OPTIONS))
                pivots.append(post(own, source_lang="de", target_lang="fr", text=TEXTS, options=OPTIONS))
                streams.append(post(own, text=TEXTS[0], stream=True, options={"min_tokens": 3}))

    pool = ThreadPoolExecutor(3)
    asking = [pool.submit(ask) for _ in range(3)]
    for number in range(6):
        time.sleep(0.05)
        replaced.error = ArtifactError("bundles/en-fr is damaged:\nno") if number % 3 == 2 else None
        answer = client.post("/admin/reload")
        if replaced.error:
            assert answer.status_code == 500
            line = "not reloaded, what was served before goes on: bundles/en-fr is damaged:?no"
            assert answer.json()["error"].startswith(line)
        else:
            models = [{"name": name, "sha256": "", "new": True} for name in NAMED]
            assert (answer.status_code, answer.json()) == (200, {"models": models})
        found.append(post(client, text=TEXTS, options=OPTIONS))
        assert [each["text"] for each in found[-1].json()["results"]] == both[len(replaced.opened) % 2]
    ended.set()
    for each in asking:
        each.result(20)  # raises what was lost
    pool.shutdown()
    assert len(replaced.opened) == 4 and len(found) > 6
    texts = [tuple(each["text"] for each in answer.json()["results"]) for answer in found]
    assert {answer.status_code for answer in (*found, *pivots, *streams)} == {200}
    assert set(texts) == {tuple(each) for each in both}, "no answer is of both"
    replaced.error = None
    assert client.post("/admin/reload").status_code == 200  # an odd number in all: the other's
    pivot.append(post(client, source_lang="de", target_lang="fr", text=TEXTS, options=OPTIONS).json()["results"])
    assert all(answer.json()["results"] in pivot for answer in pivots), "through two models of one set"
    for answer in streams:
        *pieces, (name, result) = events(answer)
        assert name == "result" and "".join(piece["text"] for _, piece in pieces) == result["text"]
    for models in replaced.opened[:-1]:
        for model in models:
            wait_for(lambda model=model: not model.scheduler._thread.is_alive() and not model.translator._opened.open)


def test_a_stream_ends_with_the_model_that_it_began_with(serve: Callable[..., Any], engine: Watched) -> None:
    replaced = Replaced(("de-en", "en-fr"), unchanged=("en-fr",))
    client = serve(named=NAMED, reopen=replaced)
    [result] = translator_of(Watched()).translate(["w7 w8"], min_tokens=6)
    engine.open.clear()
    body = {"text": "w7 w8", "stream": True, "options": {"min_tokens": 6}}
    with client.stream("POST", "/v1/translate", json=body) as answer:
        wait_for(lambda: 'running_lines{model="de-en"} 1.0' in client.get("/metrics").text)
        assert [each["new"] for each in client.post("/admin/reload").json()["models"]] == [True, False]
        texts = post(client, text=TEXTS, options=OPTIONS).json()["results"]
        assert [each["text"] for each in texts] == expected(other_translator(Other())), "while the stream runs"
        second = threading.Thread(target=client.post, args=("/admin/reload",))
        second.start()
        time.sleep(0.1)
        assert len(replaced.opened) == 1, "at most two sets are open"
        assert not client.get("/healthz/ready").is_error
        engine.open.set()
        answer.read()
    assert events(answer)[-1][1]["text"] == result.text
    second.join(20)
    assert len(replaced.opened) == 2
    assert post(client, model="en-fr", text="w7").status_code == 200, "what has not changed is not closed"


def test_a_client_that_takes_no_data_keeps_no_models_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tformer_deploy.serve.current.BODY_SECONDS", 1)
    caps, replaced = dataclasses.replace(CAPS, seconds=0.1), Replaced(("a",))
    models = Models([Model("a", translator_of(Watched()), caps)])
    current = make_app(models, reopen=replaced).current
    with current.use():
        current.reload()
        time.sleep(0.1)
        assert models.get().translator._opened.open
        wait_for(lambda: not models.get().translator._opened.open)
    current.close()


def test_only_its_own_machine_may_reload_a_server_without_a_key() -> None:
    replaced = Replaced(("a",))
    guards = [make_app(Models([Model("a", translator_of(Watched()), CAPS)]), key, replaced) for key in ("", "secret")]

    async def ask(key: str, host: str, headers: dict[str, str]) -> tuple[int, Any]:
        transport = httpx.ASGITransport(app=guards[bool(key)], client=(host, 5))
        async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers) as client:
            answer = await client.post("/admin/reload")
            return answer.status_code, answer.json()

    for host in ("10.0.0.1", "2001:db8::1", "somewhere"):
        status, answer = asyncio.run(ask("", host, {}))
        assert status == 403 and answer["error"].startswith("this server has no key: ask from its own machine")
        assert asyncio.run(ask("secret", host, {}))[0] == 401
        assert asyncio.run(ask("secret", host, {"X-API-Key": "secret"}))[0] == 200
    assert asyncio.run(ask("secret", "127.0.0.1", {}))[0] == 401
    for host in ("127.0.0.1", "127.8.0.1", "::1"):
        assert asyncio.run(ask("", host, {}))[0] == 200
    for guard in guards:
        guard.current.close()


def copied(name: str, folder: Path) -> Path:
    return shutil.copytree(BUNDLES / name, folder)


def schedulers() -> int:
    return sum(thread.name == "tformer scheduler" for thread in threading.enumerate())


def test_bundles_are_opened_again_where_their_manifests_have_changed(tmp_path: Path) -> None:
    first, second = copied("names", tmp_path / "a"), copied("names", tmp_path / "b")
    served = Served({"a": TranslatorOptions(first), "b": TranslatorOptions(second)}, {"c": "a"}, CAPS)
    before, models = schedulers(), served.open()
    try:
        assert [model.scheduler.steps >= 1 for model in models] == [True, True], "they are warm"
        assert all(new is old for new, old in zip(served.open(models), models, strict=True))
        (first / "weights.data").unlink()  # a file that stays open goes on
        shutil.rmtree(first)
        with pytest.raises(ArtifactError, match=re.escape(str(first))):
            served.open(models)
        copied("copy", first)
        changed = (second / "manifest.json").read_text()
        (second / "manifest.json").write_text(f"{changed}\n")
        (second / "encoder.onnx").write_bytes(b"")
        with pytest.raises(ArtifactError, match=r"encoder\.onnx"):
            served.open(models)
        assert schedulers() == before + 2, "the first of the two was opened, and closed again"
        with pytest.raises(ConfigError, match="'zwei' is not in the target vocabulary"):
            dataclasses.replace(served, bundles={"a": TranslatorOptions(first)}, aliases={"c": "a:zwei"}).open(models)
        assert schedulers() == before + 2
        (second / "manifest.json").write_text(changed)
        new = served.open(models)
        assert new.get("b") is models.get("b") and new.get("a").version != models.get("a").version
        assert new.get("c").version == new.get("a").version
        new.get("a").close()
    finally:
        models.close(drain=False)


@pytest.mark.parametrize("kind", ["words", "one word", "none that can be shown", "refused"])
def test_every_model_is_warmed_up(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Slow()
    words = {"one word": [*SPECIALS, "a"], "none that can be shown": [*SPECIALS, "\x01", "\ufff9"]}
    source = Words(words[kind], None) if kind in words else SOURCE_WORDS
    if kind == "refused":
        engine.limits = dataclasses.replace(engine.limits, src_tokens=1)
    translator = Translator(
        engine, Tokenizers(source, TARGET_WORDS), DecodeOptions(min_tokens=20, max_tokens=22)
    ).open()
    model = Model("a", translator, CAPS)
    warm_up(model)
    assert model.scheduler.steps >= WARM_STEPS or kind in ("none that can be shown", "refused")
    model.close()
    assert model.scheduler.steps < 12, "a long output is not waited for"


def test_an_engine_that_fails_fails_the_warm_up() -> None:
    for call in ("encode", "step"):
        engine = Watched()

        def fail(*_: Any, **__: Any) -> Any:
            raise EngineError("the device is lost")

        setattr(engine, call, fail)
        model = Model("a", translator_of(engine), CAPS)
        with pytest.raises(EngineError, match="the device is lost"):
            warm_up(model)
        model.close()


def test_a_model_has_the_engine_that_is_named_for_it(tmp_path: Path) -> None:
    engines = {"a": "ort:int8", "b": "ort"}
    assert engine_of(engines, "c") == {}
    usual, folder = TranslatorOptions("", "native", "native-int8"), BUNDLES / "copy"
    bundles = {name: dataclasses.replace(usual, bundle=folder, **engine_of(engines, name)) for name in engines}
    models = Served(bundles).open()
    assert [model.translator.name.rpartition(" on ")[2] for model in models] == ["ort:int8", "ort"]
    models.close()
    for use, message in (
        ("c=ort", "unknown model of --use 'c'"),
        ("a", "--use a: write NAME=BACKEND:VARIANT"),
        ("a=ort:int9", "unknown variant 'int9'"),
        ("a=orrt", "unknown backend 'orrt'"),
    ):
        assert message in failed_line(run_here("serve", f"a={folder}", "--port", "0", "--use", use))
    with pytest.raises(ConfigError, match="two models have the name a"):
        read_bundles(["a=b", "c/a"])


def test_the_port_is_taken_before_models_are_opened_and_listens_after(tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as bound:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(bound.getsockname(), 5)
        bound.listen()
        line = failed_line(run_here("serve", tmp_path / "none", "--port", bound.getsockname()[1]))
        assert "cannot be listened on" in line


@contextmanager
def running(*arguments: object) -> Iterator[tuple[Any, Any, Any]]:
    """The command as a process: itself, a client of it, and its lines on standard error."""
    command = [sys.executable, "-m", "tformer_deploy", "serve", *map(str, arguments), "--port", "0"]
    with ExitStack() as ending:
        server = ending.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        ending.callback(server.kill)  # else a test that fails waits for it for ever
        assert server.stderr
        line = server.stderr.readline()
        address = re.search(r" on (http://127\.0\.0\.1:\d+)(?: with \d+ workers)?$", line.strip())
        assert address, line
        yield server, ending.enter_context(httpx.Client(base_url=address[1], timeout=20)), server.stderr


def test_sighup_reloads_and_sigterm_says_that_it_is_not_ready(tmp_path: Path) -> None:
    folder = copied("names", tmp_path / "served")
    with running(f"numbers={folder}", "--shutdown-delay", 1.5, "--threads", 1) as (server, client, lines):

        def version() -> str:
            return str(client.get("/v2/models/numbers").json()["versions"][0])

        old, new = version(), copied("copy", tmp_path / "new")
        assert client.get("/healthz/ready").status_code == 200
        folder.rename(tmp_path / "old")
        server.send_signal(signal.SIGHUP)
        while (line := lines.readline()).startswith("{"):
            pass
        assert line.startswith("not reloaded, what was served before goes on: ") and str(folder) in line
        assert version() == old
        new.rename(folder)
        server.send_signal(signal.SIGHUP)
        while (line := lines.readline()).startswith("{"):
            pass
        assert line == "reloaded: numbers\n"
        assert version() != old and client.get("/v1/cards").json()["models"][0]["sha256"] == version()
        server.send_signal(signal.SIGTERM)
        for path in ("/healthz/ready", "/healthz", "/v2/health/ready"):
            wait_for(lambda path=path: client.get(path).status_code == 503)
        assert client.get("/healthz/ready").json() == {"status": "draining"}
        assert client.get("/healthz/live").status_code == 200
        assert post(client, text="5 6").status_code == 200
        assert server.wait(20) == 0
