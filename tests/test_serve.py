"""The HTTP server, over real connections: answers are those of `Translator.translate`, and nothing hangs."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tformer_deploy.base.errors import ConfigError
from tformer_deploy.cli.serve import KEY_VARIABLE, read_key, read_pairs, split_name
from tformer_deploy.serve import waiting
from tformer_deploy.serve.app import LOG
from tformer_deploy.serve.models import Model, Models
from tformer_deploy.serve.protocols import own
from tformer_deploy.serve.texts import submit_all
from tformer_deploy.serve.waiting import Stream, translate_all
from tformer_deploy.translate.scheduler import BOUNDS, Late, Line
from tformer_deploy.translate.translator import Translator

from .command import failed_line, run_here
from .serving import (
    BROKEN,
    CAPS,
    NAMED,
    REFUSED,
    Watched,
    ask_and_leave,
    counted,
    events,
    post,
    translator_of,
    wait_for,
)

httpx = pytest.importorskip("httpx")


def test_texts_are_translated_each_with_its_own_result_or_error(client: Any, engine: Watched) -> None:
    texts = ["w7 w8 w9", "", f"w{BROKEN} w5", f"w{REFUSED}"]
    options = {"beams": 3, "n_best": 2, "min_tokens": 3}
    answer = post(client, text=texts, options=options)
    assert answer.status_code == 200 and answer.headers["x-request-id"]
    good, empty, broken, refused = answer.json()["results"]
    [expected] = translator_of(Watched()).translate(texts[:1], **options)
    assert (good["text"], good["score"], good["finished"]) == (expected.text, expected.score, expected.finished)
    assert [each["text"] for each in good["alternatives"]] == [each.text for each in expected.alternatives]
    assert empty == {"text": "", "score": 0.0, "finished": True, "tokens": 0}
    assert broken["status"] == 500 and "NaN or infinite log-probabilities" in broken["error"]
    assert refused == {"error": "refused", "status": 422}


def test_an_output_that_has_begun_is_ended(client: Any) -> None:
    answer = post(client, model="b", text="w7 w8", prefix="w9 w9").json()
    assert answer["model"] == "b" and answer["results"][0]["text"].startswith("w9 w9")


def test_scores_are_those_of_the_translator(client: Any) -> None:
    answer = post(client, "/v1/score", source=["w7 w8", "w9"], target=["w5 w6", "w7"]).json()
    expected = translator_of(Watched()).score(["w7 w8", "w9"], ["w5 w6", "w7"])
    assert [each["tokens"] for each in answer["scores"]] == expected


@pytest.mark.parametrize("options", [{}, {"beams": 3}, {"sampling": True}])
def test_a_stream_has_the_pieces_of_the_result(client: Any, options: dict[str, Any]) -> None:
    *pieces, (last, result) = events(post(client, text="w7 w8", stream=True, options=options))
    assert last == "result" and {name for name, _ in pieces} == {"piece"}
    assert "".join(piece["text"] for _, piece in pieces) == result["text"]
    assert result == post(client, text="w7 w8", options=options).json()["results"][0]


def test_a_stream_ends_with_the_error(client: Any) -> None:
    name, error = events(post(client, text=f"w{BROKEN} w5", stream=True, options={"min_tokens": 3}))[-1]
    assert name == "error" and error["status"] == 500


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 400, "text"),
        ({"text": 3}, 400, "must be a string or a list of strings"),
        ({"text": "w4", "prefix": {}}, 400, "prefix: must be a string or a list of strings"),
        ({"text": "w4", "stream": {}}, 400, "stream true or false"),
        ({"text": []}, 400, "not empty"),
        ({"text": "w4", "txt": "w5"}, 400, "did you mean 'text'"),
        ({"text": "w4", "options": {"beam": 2}}, 400, "did you mean 'beams'"),
        ({"text": "w4", "options": {"beams": "2"}}, 400, "must be of type int"),
        ({"text": "w4", "model": "numbrs"}, 404, "did you mean 'numbers'"),
        ({"text": ["w4"] * 5}, 400, "5 texts exceed this server's limit of 4"),
        ({"text": ["w4"], "prefix": ["w4", "w5"]}, 400, "1 texts, 2 prefixes"),
        ({"text": "w4 " * 100}, 422, "300 bytes exceeds this server's limit of 200"),
        ({"text": "w4 " * 20}, 422, "21 tokens exceeds the limit of 16"),
        ({"text": "w4\ud800"}, 422, "valid Unicode"),
        ({"text": "w4", "options": {"beams": 5}}, 422, "5 beams or samples exceed this server's limit of 4"),
        ({"text": "w4", "options": {"max_tokens": 21}}, 422, "max_tokens=21 exceeds this server's limit of 20"),
        ({"text": "w4", "options": {"endless": True}}, 422, "endless is not an option of this server"),
        ({"text": ["w4"], "stream": True}, 400, "one text at a time"),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value)[:20],
)
def test_what_cannot_be_answered_is_refused_in_one_line(client: Any, body: Any, status: int, message: str) -> None:
    answer = client.post("/v1/translate", content=json.dumps(body))
    assert answer.status_code == status and message in answer.json()["error"]
    assert "\n" not in answer.json()["error"]


ODD = '{"text": "w4", %s}'


@pytest.mark.parametrize(
    "odd", [r'"model": "\ud800"', r'"\ud800": 1', r'"options": {"stop": "\ud800"}', r'"model": "a\n\u001b\u2028"']
)
def test_what_a_message_quotes_is_printable(client: Any, odd: str) -> None:
    answer = client.post("/v1/translate", content=ODD % odd, headers={"X-Request-Id": b"a\xe9"})
    assert answer.status_code in (400, 404) and answer.json()["error"].isprintable()
    assert answer.headers["x-request-id"].isalnum()


def test_a_body_that_is_said_to_be_too_large_is_not_waited_for(client: Any) -> None:
    with socket.create_connection((client.base_url.host, client.base_url.port), 20) as connection:
        connection.sendall(b"POST /v1/translate HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n{")
        assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")


def test_a_body_that_does_not_come_is_not_waited_for(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tformer_deploy.serve.answers.BODY_SECONDS", 0.1)
    with socket.create_connection((client.base_url.host, client.base_url.port), 20) as connection:
        connection.sendall(b"POST /v1/translate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")


def test_a_text_that_is_late_is_given_up(serve: Callable[..., Any], engine: Watched) -> None:
    client = serve(caps=dataclasses.replace(CAPS, seconds=0.1))
    engine.open.clear()
    threading.Timer(1.5, engine.open.set).start()  # late even if the request comes late
    late = post(client, text=["w4 w5", "w6"], options={"min_tokens": 10}).json()["results"]
    assert [each["status"] for each in late] == [504, 504]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--host", ""), "--host must not be empty: 0.0.0.0 means all addresses"),
        (("--api-key-file", "keys"), "keys has more than one word: write one key"),
        (("--limits", "limits.toml"), "limits.toml: beams=0: must be at least 1"),
        (("--address", "auto", "--workers", "2"), "--workers are processes of this machine: with --address, use"),
        (("--slots", "4", "--max-queue", "20"), "have no room for a request of 128 texts"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_no_server_can_be_is_refused_at_once(
    options: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("keys").write_text("a\nb\n")
    Path("limits.toml").write_text("beams = 0\n")
    assert message in failed_line(run_here("serve", "bundle", *options))


@pytest.mark.parametrize(("body", "status"), [(b"{", 400), (b"[" * 900, 400), (b"[]", 400), (b"x" * 2001, 413)])
def test_bodies_that_are_no_requests_are_refused(client: Any, body: bytes, status: int) -> None:
    answer = client.post("/v1/translate", content=body)
    assert answer.status_code == status and answer.json()["error"]


@pytest.mark.parametrize(("path", "status"), [("/v1/translate", 405), ("/x", 404)])
def test_paths_and_methods_that_do_not_exist_are_refused_in_one_line(client: Any, path: str, status: int) -> None:
    answer = client.get(path)
    assert answer.status_code == status and "docs/serve.md has the paths" in answer.json()["error"]
    assert answer.headers.get("allow") == ("POST" if status == 405 else None)


def test_metrics_have_the_times_and_the_rows_of_steps(client: Any) -> None:
    result = post(client, text="w4 w5 w6", options={"min_tokens": 3, "beams": 3}).json()["results"][0]
    steps = counted(client, "steps_total")
    assert counted(client, "rows_total") == 3 * steps and counted(client, "tokens_total") == result["tokens"]
    for name in ("first_token_seconds", "token_seconds"):
        assert counted(client, f"{name}_count") == 1 and 0 < counted(client, f"{name}_sum") < 20
        bucket = rf'^tformer_{name}_bucket{{le="(.*)",model="numbers"}} (.*)$'
        found = re.findall(bucket, client.get("/metrics").text, re.MULTILINE)
        assert [float(bound) for bound, _ in found] == [*BOUNDS, math.inf]
        counts = [float(count) for _, count in found]
        assert counts == sorted(counts) and counts[-1] == 1


def test_a_failure_is_logged_and_counted_with_its_message_and_request(
    client: Any, engine: Watched, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LOG, "propagate", True)
    caplog.set_level("INFO", LOG.name)
    engine.broken = True
    answer = client.post("/v1/completions", json={"prompt": "w4"}, headers={"X-Request-Id": "my 1"})
    assert answer.status_code == 500 and answer.json()["error"]["message"] == "the device is lost (request my 1)"
    engine.broken = False
    assert client.get("/nowhere", headers={"X-Request-Id": "my 2"}).status_code == 404
    wait_for(lambda: len(caplog.records) >= 2)
    logged = [json.loads(record.getMessage()) for record in caplog.records[:2]]
    assert [(line["request"], line["status"]) for line in logged] == [("my 1", 500), ("my 2", 404)]
    assert logged[0]["error"] == "the device is lost (request my 1)" and "docs/serve.md" in logged[1]["error"]
    text = client.get("/metrics").text
    for kind in ("EngineError", "HTTPException"):
        assert f'tformer_errors_total{{kind="{kind}"}} 1.0' in text


def test_requests_to_score_wait_for_each_other_and_few_wait(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, free = serve(caps=dataclasses.replace(CAPS, seconds=2)), threading.Event()
    monkeypatch.setattr(own, "MOST_SCORES", 1)
    monkeypatch.setattr(Translator, "score", lambda *_: free.wait(20) and [[-1.0]])
    statuses: list[int] = []

    def score() -> None:
        statuses.append(client.post("/v1/score", json={"source": "w4", "target": "w5"}).status_code)

    threads = [threading.Thread(target=score) for _ in range(4)]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    wait_for(lambda: len(statuses) == 3)  # two are refused, one that waits is late
    free.set()
    for thread in threads:
        thread.join(20)
    assert statuses[:2] == [429, 429] and sorted(statuses[2:]) == [200, 504]


def test_a_list_that_takes_too_long_to_read_is_read_no_further() -> None:
    engine = Watched()
    engine.open.clear()
    with translator_of(engine) as translator:
        model = Model("a", translator, CAPS)
        first, *others = submit_all(model, [("w4", "")] * 3, {}, time.monotonic() - 1)
        engine.open.set()
        assert isinstance(first, Line) and isinstance(first.future.exception(20), Late)
        assert all(isinstance(each, Late) and "took too long to read" in str(each) for each in others)
        model.close()


def test_texts_that_fail_in_a_list_are_counted(client: Any) -> None:
    texts = ["w4", f"w{BROKEN} w5", "w5 " * 30]
    assert [each.get("status", 200) for each in post(client, text=texts).json()["results"]] == [200, 500, 422]
    text = client.get("/metrics").text
    for kind in ("NotNumbers", "LimitError"):
        assert f'tformer_failed_lines_total{{kind="{kind}",model="numbers"}} 1.0' in text


def test_metrics_of_a_server_among_several_have_its_label(client: Any) -> None:
    post(client, text="w4")
    plain = client.get("/metrics").text
    client.app.counted.labels = {"replica": "x"}
    text = client.get("/metrics").text
    assert 'tformer_steps_total{model="numbers",replica="x"} ' in text
    assert 'tformer_requests_total{replica="x",route="translate",status="200"} 1.0' in text
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    assert samples and all('replica="x"' in line for line in samples)
    kinds = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert kinds == [line for line in plain.splitlines() if line.startswith("# TYPE")]


@pytest.mark.parametrize(("name", "value"), [("suppress", [4] * 11), ("bad_words", [[4, 5]] * 6)])
def test_options_of_very_many_ids_are_refused(serve: Callable[..., Any], name: str, value: Any) -> None:
    client = serve(caps=dataclasses.replace(CAPS, option_ids=10))
    answer = post(client, text="w4", options={name: value})
    assert answer.status_code == 422 and "token ids exceed this server's limit of 10" in answer.json()["error"]


def test_a_server_that_ends_asks_clients_to_leave(serve: Callable[..., Any]) -> None:
    client = serve()
    assert "connection" not in post(client, text="w4").headers
    client.app.current.draining = True
    answer = post(client, text="w4")
    assert answer.status_code == 200 and answer.headers["connection"] == "close"


@pytest.mark.parametrize("named", [NAMED, {"numbers": {}}], ids=["two models", "one"])
def test_a_full_queue_is_said_at_once(serve: Callable[..., Any], engine: Watched, named: dict[str, Any]) -> None:
    client = serve(named=named, slots=1, max_queue=1)
    engine.open.clear()
    threads = [threading.Thread(target=post, args=(client,), kwargs={"text": "w4"}) for _ in range(2)]
    threads[0].start()
    wait_for(lambda: counted(client, "running_lines") == 1)
    threads[1].start()
    wait_for(lambda: counted(client, "waiting_lines") == 1)
    for body in ({"text": "w4"}, {"text": ["w4", "w5"]}, {"text": "w4", "stream": True}):
        answer = post(client, **body)
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
    assert 'tformer_failed_lines_total{kind="Busy",model="numbers"} 3.0' in client.get("/metrics").text
    engine.open.set()
    for thread in threads:
        thread.join(20)


@pytest.mark.parametrize("call", ["encode", "step"])
@pytest.mark.parametrize("error", [RuntimeError("a fault"), SystemExit("a fault")], ids=["error", "exit"])
def test_an_engine_that_fails_answers_500_and_serves_on(
    client: Any, engine: Watched, call: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(engine, call, fail)
        answer = post(client, text="w4 w5")
        assert answer.status_code == 500 and "a fault" in answer.json()["error"]
        both = post(client, text=["w4", "w5"]).json()["results"]
        assert [each["status"] for each in both] == [500, 500]
        assert events(post(client, text="w4 w5", stream=True))[-1][0] == "error"
    assert post(client, text="w4 w5").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_place(
    client: Any, engine: Watched, cancelled: Callable[[], bool], stream: bool
) -> None:
    engine.open.clear()
    ask_and_leave(client, text="w4 w5", options={"min_tokens": 20}, stream=stream)
    wait_for(cancelled)
    engine.open.set()
    wait_for(lambda: counted(client, "running_lines") == 0)
    assert counted(client, "steps_total") < 5


@pytest.mark.parametrize("stream", [False, True])
def test_a_task_that_is_cancelled_while_it_queues_texts_leaves_none(
    engine: Watched, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ray Serve does when a client goes away. Long texts are queued in a thread."""
    monkeypatch.setattr(waiting, "SHORT", 0)
    queued, go, lines = threading.Event(), threading.Event(), []
    with translator_of(engine) as translator:
        model = Model("a", translator, CAPS)
        submit = model.submit

        def slow(*given: Any, **named: Any) -> Line:
            lines.append(submit(*given, **named))
            queued.set()
            go.wait(20)
            return lines[-1]

        monkeypatch.setattr(model, "submit", slow)
        nobody: Any = None
        pairs = [("w4", "")] * (1 if stream else 3)
        asked: Any = Stream.open(model, pairs[0], {}) if stream else translate_all(nobody, model, pairs, {})

        async def ask() -> None:
            task = asyncio.ensure_future(asked)
            await asyncio.to_thread(queued.wait, 20)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            go.set()
            await asyncio.to_thread(
                wait_for, lambda: len(lines) == len(pairs) and all(line.cancelled for line in lines)
            )

        engine.open.clear()
        asyncio.run(ask())
        engine.open.set()
        model.close()


def test_a_key_is_needed_if_there_is_one(serve: Callable[..., Any]) -> None:
    client = serve("sésame")
    for headers in ({}, {"Authorization": "Bearer x"}, {"X-API-Key": ""}, {"X-API-Key": b"\xff"}):
        answer = client.post("/v1/translate", json={"text": "w4"}, headers=headers)
        assert answer.status_code == 401 and "a key is needed" in answer.json()["error"]
    for name, key in (("Authorization", "Bearer sésame"), ("Authorization", "bearer sésame"), ("X-API-Key", "sésame")):
        headers = {name: key.encode()}
        assert client.post("/v1/translate", json={"text": "w4"}, headers=headers).status_code == 200
    assert client.get("/healthz/ready").json()["models"] == ["numbers", "b"]
    assert client.get("/metrics").status_code == 401


def test_models_of_one_name_are_refused() -> None:
    with translator_of(Watched()) as translator:
        models = [Model("a", translator, CAPS) for _ in range(2)]
        with pytest.raises(ConfigError, match="two models have the same name"):
            Models(models)
        for model in models:
            model.scheduler.close()


def test_a_key_is_read_from_a_file_or_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert read_key(None) == ""
    for content in ("sésame\n", "sésame"):
        monkeypatch.setenv(KEY_VARIABLE, content)
        file.write_text(content)
        assert read_key(None) == read_key(file) == "sésame"
    for content, problem in (("", "is empty"), ("\n", "is empty"), ("two words", "has more than one word")):
        monkeypatch.setenv(KEY_VARIABLE, content)
        file.write_text(content)
        for path, where in ((None, f"the variable {KEY_VARIABLE}"), (file, str(file))):
            with pytest.raises(ConfigError, match=f"{re.escape(where)} {problem}"):
                read_key(path)


def test_a_bundles_name_is_before_the_first_equals_sign() -> None:
    assert split_name("en-de=/data/date=2024/b") == ("en-de", "/data/date=2024/b")
    assert split_name("/data/date=2024/b") == ("b", "/data/date=2024/b")
    assert split_name("bundles/b") == ("b", "bundles/b")
    for wrong in ("en-de=", "=b"):
        with pytest.raises(ConfigError, match="write NAME=BUNDLE"):
            split_name(wrong)


@pytest.mark.parametrize("alias", ["en-de", "=words", "en-de="])
def test_an_alias_that_is_none_is_refused(alias: str) -> None:
    with pytest.raises(ConfigError, match=f"--alias {alias}: write NAME=MODEL"):
        read_pairs("--alias", "NAME=MODEL", [alias])
    with pytest.raises(ConfigError, match="--alias en-de=b: en-de is given twice"):
        read_pairs("--alias", "NAME=MODEL", ["en-de=a", "en-de=b"])


def test_the_command_serves_a_bundle_until_it_is_told_to_end(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "limits.toml").write_text("beams = 2\n")
    command = [sys.executable, "-m", "tformer_deploy", "serve", f"words={bundle}", "--port", "0"]
    command += ["--limits", str(tmp_path / "limits.toml"), "--alias", "en-de=words"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server, ExitStack() as ending:
        ending.callback(server.kill)  # else a test that fails waits for it for ever
        assert server.stderr
        line = server.stderr.readline()
        found = re.fullmatch(r"serving words on (http://127\.0\.0\.1:\d+)\n", line)
        assert found, line + server.stderr.read()
        with httpx.Client(base_url=found[1], timeout=20) as client:
            found = post(client, text="w5 w6", target_lang="de", options={"max_tokens": 5}).json()
            assert found["model"] == "en-de" and found["results"][0]["tokens"]
            assert post(client, text="w5", options={"beams": 3}).status_code == 422
        server.send_signal(signal.SIGTERM)
        log = server.stderr.read().splitlines()
        assert [json.loads(each)["status"] for each in log] == [200, 422]
        assert server.wait(20) == 0


@pytest.mark.parametrize("options", [["--replicas", "2"], ["--num-cpus", "2"], ["--num-gpus", "1"]], ids=" ".join)
def test_options_of_a_cluster_need_its_address(options: list[str], bundle: Path) -> None:
    line = failed_line(run_here("serve", bundle, *options))
    assert "are for --address: on one machine, use --workers" in line
