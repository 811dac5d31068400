"""KServe v2 over gRPC, driven by Triton's own client: answers are those of `Translator.translate`."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from tformer_deploy import __version__
from tformer_deploy.base.errors import ConfigError
from tformer_deploy.serve.app import make_app
from tformer_deploy.serve.models import Caps, Model, Models

from .command import failed_line, printed, run_here
from .serving import BROKEN, CAPS, Watched, translator_of, wait_for

pytest.importorskip("grpc")
triton = pytest.importorskip("tritonclient.grpc")
httpx = pytest.importorskip("httpx")
server = pytest.importorskip("tformer_deploy.serve.grpc")
pb, Failed = triton.service_pb2, triton.InferenceServerException
TEXTS = ["w7 w8 w9", "", "w5"]


class Served:
    """A server and a client of it."""

    def __init__(self, models: Models, key: str) -> None:
        self.models = models
        self.guard = make_app(models, key)
        self.server = server.GrpcServer(self.guard, "127.0.0.1", 0, CAPS.body_bytes)
        self.url = f"127.0.0.1:{self.server.port}"
        self.client = triton.InferenceServerClient(self.url)

    def infer(self, texts: Any, *more: Any, model: str = "numbers", **options: Any) -> Any:
        return self.client.infer(model, [bytes_of("text", texts), *more], parameters=options)

    @property
    def running(self) -> int:
        return int(self.models.get("numbers").scheduler.running)


@pytest.fixture
def serve(engine: Watched) -> Iterator[Callable[..., Served]]:
    ending: list[Served] = []

    def start(key: str = "", **other: Any) -> Served:
        made = [Model(name, translator_of(engine), **{"caps": CAPS, **other}) for name in ("numbers", "b")]
        ending.append(Served(Models(made, {"c": "b:w7"}), key))
        return ending[-1]

    yield start
    engine.open.set()
    for served in ending:
        served.client.close()
        served.server.close(5)
        served.guard.current.close(drain=False)


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    return serve()


def bytes_of(name: str, texts: Any) -> Any:
    values = np.array(texts, dtype=np.object_)
    tensor = triton.InferInput(name, list(values.shape), "BYTES")
    return tensor.set_data_from_numpy(values)


def number_of(name: str, value: Any, datatype: str, kind: Any) -> Any:
    return triton.InferInput(name, [1], datatype).set_data_from_numpy(np.array([value], kind))


def expected(texts: list[str], prefixes: tuple[str, ...] = (), **options: Any) -> list[Any]:
    with translator_of(Watched()) as translator:
        return translator.translate(texts, prefixes, **options)


def texts_in(answer: Any) -> list[str]:
    return [each.decode() for each in answer.as_numpy("text").flatten()]


def test_texts_are_translated(served: Served) -> None:
    answer = served.client.infer("numbers", [bytes_of("text", TEXTS)], request_id="é", parameters={"beams": 3})
    found = expected(TEXTS, beams=3)
    assert texts_in(answer) == [each.text for each in found]
    assert answer.as_numpy("score").tolist() == [each.score for each in found]
    assert answer.as_numpy("finished").tolist() == [each.finished for each in found]
    assert answer.as_numpy("tokens").tolist() == [len(each.ids) for each in found]
    assert (answer.get_response().id, answer.get_response().model_name) == ("é", "numbers")


def test_the_n_best_are_a_further_axis(served: Served) -> None:
    answer = served.infer([["w7 w8"], [""]], model="b", beams=3, n_best=2)
    [best] = expected(["w7 w8"], beams=3, n_best=2)
    assert answer.as_numpy("text").shape == (2, 1, 2)
    assert texts_in(answer) == [best.text, best.alternatives[0].text, "", ""]
    assert answer.as_numpy("tokens")[1, 0].tolist() == [0, -1]


def test_prefixes_and_options_are_inputs_too(served: Served) -> None:
    inputs = [bytes_of("prefix", ["w9 w9"]), number_of("sampling", True, "BOOL", bool)]
    inputs += [number_of("seed", 5, "UINT64", np.uint64), number_of("repetition_penalty", 1.5, "FP32", np.float32)]
    answer = served.infer(["w7"], *inputs, max_tokens="9", temperature=0.7)
    options = {"sampling": True, "seed": 5, "temperature": 0.7, "repetition_penalty": 1.5, "max_tokens": 9}
    [alone] = expected(["w7"], ("w9 w9",), **options)
    assert (texts_in(answer), answer.as_numpy("score").tolist()) == ([alone.text], [alone.score])


def test_values_may_stand_in_contents(served: Served) -> None:
    request = pb.ModelInferRequest(model_name="b", outputs=[{"name": "text"}])
    request.inputs.add(name="text", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"w7")
    request.inputs.add(name="beams", datatype="INT32", shape=[1]).contents.int_contents.append(3)
    with triton.grpc.insecure_channel(served.url) as channel:
        call = triton.service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer
        answer = call(request)
        assert [each.name for each in answer.outputs] == ["text"]
        assert answer.raw_output_contents[0][4:].decode() == expected(["w7"], beams=3)[0].text
        request.raw_input_contents.append(b"")
        with pytest.raises(triton.grpc.RpcError, match="2 inputs, 1 raw_input_contents: send all inputs raw, or none"):
            call(request)


def test_the_server_and_its_models_are_described(served: Served) -> None:
    client = served.client
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("b") and client.is_model_ready("c")
    assert not client.is_model_ready("d") and not client.is_model_ready("b", "1")
    assert client.get_server_metadata().version == __version__
    described = client.get_model_metadata("b", as_json=True)
    assert described["inputs"] == [{"name": "text", "datatype": "BYTES", "shape": ["-1"]}]
    assert [each["name"] for each in described["outputs"]] == ["text", "score", "finished", "tokens"]
    assert [each.name for each in client.get_model_repository_index().models] == ["numbers", "b", "c"]


def streamed(served: Served, *requests: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Results and errors as they come, until each request has its last."""
    came: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
    with triton.InferenceServerClient(served.url) as client:
        client.start_stream(lambda result, error: came.put((result, error)))
        for request in requests:
            text = {"model_name": "numbers", "inputs": [bytes_of("text", ["w7 w8"])], **request}
            client.async_stream_infer(**text)
        found, last = [], 0
        while last < len(requests):
            found.append(came.get(timeout=20))
            result, error = found[-1]
            last += bool(error) or result.get_response().parameters["triton_final_response"].bool_param
    return found


@pytest.mark.parametrize("options", [{}, {"beams": 3}, {"sampling": True}], ids=str)
def test_a_stream_has_the_pieces_of_the_result(served: Served, options: dict[str, Any]) -> None:
    *pieces, (last, _) = streamed(served, {"parameters": {"stream": True, **options}})
    [result] = expected(["w7 w8"], **options)
    assert "".join(each.as_numpy("piece")[0].decode() for each, _ in pieces) == result.text
    assert len(pieces) > 1 or "beams" in options
    assert (texts_in(last), last.as_numpy("score").tolist()) == ([result.text], [result.score])


def test_requests_of_a_stream_run_side_by_side(served: Served) -> None:
    requests = [
        {"request_id": str(number), "inputs": [bytes_of("text", [f"w{4 + number % 50}"])]} for number in range(300)
    ]
    answers = {each.get_response().id: texts_in(each) for each, _ in streamed(served, *requests)}
    alone = expected([f"w{number}" for number in range(4, 54)])
    assert answers == {str(number): [alone[number % 50].text] for number in range(300)}


def test_errors_of_a_stream_are_of_their_requests(served: Served) -> None:
    two = [bytes_of("text", ["w7", "w8"])]
    for request, message in (
        ({"parameters": {"stream": True}, "inputs": two}, "stream: one text at a time"),
        ({"parameters": {"streem": True}}, "unknown parameter 'streem': did you mean 'stream'"),
        ({"model_name": "numbrs"}, "unknown model 'numbrs': did you mean 'numbers'"),
        ({"parameters": {"min_tokens": 3, "stream": True}, "inputs": [bytes_of("text", [f"w{BROKEN}"])]}, "NaN"),
        ({"outputs": [triton.InferRequestedOutput("piece")]}, "unknown output 'piece'"),
    ):
        came = streamed(served, request, {"enable_empty_final_response": True})
        failed = [error.message() for _, error in came if error]
        assert len(failed) == 1 and message in failed[0] and "\n" not in failed[0]


@pytest.mark.parametrize(
    ("asked", "status", "message"),
    [
        ({"model_name": "numbrs"}, "NOT_FOUND", "did you mean 'numbers'"),
        ({"model_version": "1"}, "NOT_FOUND", "model 'numbers' has no version '1'"),
        ({"parameters": {"beam": 2}}, "INVALID_ARGUMENT", "unknown parameter 'beam': did you mean 'beams'"),
        ({"parameters": {"stream": True}}, "INVALID_ARGUMENT", "stream: this call has one answer"),
        ({"parameters": {"beams": 5}}, "INVALID_ARGUMENT", "5 beams or samples exceed this server's limit of 4"),
        ({"timeout": 1000}, "INVALID_ARGUMENT", "parameter 'timeout' is not supported"),
        ({"priority": 1}, "INVALID_ARGUMENT", "parameter 'priority' is not supported"),
        ({"sequence_id": 7}, "INVALID_ARGUMENT", "requests have no state"),
        ({"outputs": [triton.InferRequestedOutput("txt")]}, "INVALID_ARGUMENT", "unknown output 'txt'"),
        (
            {"outputs": [triton.InferRequestedOutput("text", class_count=2)]},
            "INVALID_ARGUMENT",
            "'classification' is not supported",
        ),
        ({"inputs": [bytes_of("text", ["w4"]), bytes_of("text", ["w4"])]}, "INVALID_ARGUMENT", "'text' stands twice"),
        ({"inputs": [bytes_of("text", [b"\xff"])]}, "INVALID_ARGUMENT", "element 0 is not UTF-8"),
        ({"inputs": [bytes_of("text", ["w4"] * 5)]}, "INVALID_ARGUMENT", "5 texts exceed this server's limit of 4"),
        ({"inputs": [bytes_of("text", ["w4 " * 20])]}, "INVALID_ARGUMENT", "21 tokens exceeds the limit of 16"),
        (
            {"inputs": [bytes_of("text", ["w4", f"w{BROKEN} w5"])], "parameters": {"min_tokens": 3}},
            "INTERNAL",
            "text 2: ",
        ),
        ({"inputs": [bytes_of("text", ["w4" * 2000])]}, "RESOURCE_EXHAUSTED", "larger than max"),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value)[:20],
)
def test_what_cannot_be_answered_raises_the_clients_error(
    served: Served, asked: dict[str, Any], status: str, message: str
) -> None:
    with pytest.raises(Failed) as caught:
        served.client.infer(**{"model_name": "numbers", "inputs": [bytes_of("text", ["w4"])], **asked})
    assert caught.value.status() == f"StatusCode.{status}"
    assert message in caught.value.message() and "\n" not in caught.value.message()


def test_extensions_that_are_not_there_are_refused_by_name(served: Served) -> None:
    client = served.client
    for call, name in (
        (client.get_system_shared_memory_status, "SystemSharedMemoryStatus"),
        (client.get_trace_settings, "TraceSetting"),
        (lambda: client.get_model_config("b"), "ModelConfig"),
        (client.get_inference_statistics, "ModelStatistics"),
        (lambda: client.load_model("b"), "RepositoryModelLoad"),
    ):
        with pytest.raises(Failed, match=f"{name} is of an extension that this server does not have") as caught:
            call()
        assert caught.value.status() == "StatusCode.UNIMPLEMENTED"


def test_a_key_is_needed_but_for_health(serve: Callable[..., Served]) -> None:
    served = serve("key")
    assert served.client.is_server_live() and served.client.is_server_ready()
    for headers in ({}, {"authorization": "Bearer kex"}, {"x-api-key": "ke"}):
        with pytest.raises(Failed, match="a key is needed: send authorization: Bearer KEY") as caught:
            served.client.infer("b", [bytes_of("text", ["w4"])], headers=headers)
        assert caught.value.status() == "StatusCode.UNAUTHENTICATED"
    for headers in ({"authorization": "Bearer key"}, {"authorization": "bearer key"}, {"x-api-key": "key"}):
        assert served.client.infer("b", [bytes_of("text", ["w4"])], headers=headers)
    came: SimpleQueue[Any] = SimpleQueue()
    served.client.start_stream(lambda result, error: came.put(error))
    assert "a key is needed" in came.get(timeout=20).message()


def test_a_full_queue_raises_the_clients_error(serve: Callable[..., Served], engine: Watched) -> None:
    served = serve(slots=1, max_queue=0)
    engine.open.clear()
    running = threading.Thread(target=served.infer, args=(["w4"],))
    running.start()
    wait_for(lambda: served.running == 1)
    with pytest.raises(Failed, match="try again later") as caught:
        served.infer(["w4"])
    assert caught.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
    engine.open.set()
    running.join(20)


def test_a_text_that_is_late_is_given_up(serve: Callable[..., Served], engine: Watched) -> None:
    served = serve(caps=Caps(seconds=0.1))
    engine.open.clear()
    threading.Timer(1.5, engine.open.set).start()  # late even if the request comes late
    with pytest.raises(Failed, match=r"the line did not end within 0\.") as caught:
        served.infer(["w4 w5"], min_tokens=10)
    assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_place(
    served: Served, engine: Watched, cancelled: Callable[[], bool], stream: bool
) -> None:
    engine.open.clear()
    asked = {"model_name": "numbers", "inputs": [bytes_of("text", ["w4 w5"])], "parameters": {"min_tokens": 20}}
    if stream:
        served.client.start_stream(lambda result, error: None)
        served.client.async_stream_infer(**asked)
        wait_for(lambda: served.running == 1)
        served.client.stop_stream(cancel_requests=True)
    else:
        with pytest.raises(Failed, match="Deadline Exceeded"):
            served.client.infer(**asked, client_timeout=1)
        wait_for(lambda: served.running == 1)
    wait_for(cancelled)
    engine.open.set()
    wait_for(lambda: served.running == 0)


def test_calls_that_run_end_when_the_server_ends(serve: Callable[..., Served], engine: Watched) -> None:
    served = serve()
    engine.open.clear()
    answers: list[Any] = []
    running = threading.Thread(target=lambda: answers.append(served.infer(["w4"])))
    running.start()
    wait_for(lambda: served.running == 1)
    threading.Timer(0.3, engine.open.set).start()
    served.server.close(20)
    running.join(20)
    assert texts_in(answers[0]) == [expected(["w4"])[0].text]
    with pytest.raises(Failed) as caught:
        served.infer(["w4"])
    assert caught.value.status() == "StatusCode.UNAVAILABLE"


def test_a_stream_without_requests_holds_nobody_up(served: Served, engine: Watched) -> None:
    came: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
    served.client.start_stream(lambda result, error: came.put((result, error)))
    served.client.async_stream_infer("numbers", [bytes_of("text", ["w4"])])
    assert came.get(timeout=20)[0]
    engine.open.clear()
    served.client.async_stream_infer("numbers", [bytes_of("text", ["w5"])])
    wait_for(lambda: served.running == 1)
    threading.Timer(0.3, engine.open.set).start()
    start = time.monotonic()
    served.server.close(20)
    assert time.monotonic() - start < 10
    assert texts_in(came.get(timeout=20)[0]) == [expected(["w5"])[0].text]


def test_a_port_that_is_taken_is_said(served: Served) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} cannot be listened on: choose another --grpc-port"):
            server.GrpcServer(served.guard, "127.0.0.1", port, 1000)


def test_calls_are_logged_and_counted(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tformer_deploy.serve.access")
    served.client.infer("b", [bytes_of("text", ["w4"])], headers={"x-request-id": "mine"})
    with pytest.raises(Failed):
        served.infer(["w4"], beam=2)
    streamed(served, {})
    lines = [json.loads(each.message) for each in caplog.records]
    assert [(each["method"], each["path"], each["status"]) for each in lines] == [
        ("gRPC", "ModelInfer", 200),
        ("gRPC", "ModelInfer", 400),
        ("gRPC", "ModelStreamInfer", 200),
    ]
    assert lines[0]["request"] == "mine"
    assert 'tformer_requests_total{route="grpc_ModelInfer",status="400"} 1.0' in served.guard.counted.text()


BUNDLE = Path(__file__).parent / "bundles/v2/copy"


def test_the_command_serves_both_until_it_is_told_to_end() -> None:
    options = ("--port", "0", "--grpc-port", "0", "--shutdown-delay", "1")
    command = [sys.executable, "-m", "tformer_deploy", "serve", str(BUNDLE), *options]
    env = {**os.environ, "TFORMER_API_KEY": "key"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as process, ExitStack() as ending:
        ending.callback(process.kill)
        assert process.stderr
        line = process.stderr.readline()
        found = re.fullmatch(r"serving copy on http://127\.0\.0\.1:\d+, gRPC on (127\.0\.0\.1:\d+)\n", line)
        assert found, line + process.stderr.read()
        client = ending.enter_context(triton.InferenceServerClient(found[1]))
        assert client.is_server_ready()
        texts, headers = bytes_of("text", ["3 1 4"]), {"authorization": "Bearer key"}
        [row] = printed(run_here("translate", BUNDLE, "--json", stdin=b"3 1 4\n"))
        answer = client.infer("copy", [texts], headers=headers)
        assert texts_in(answer) == [json.loads(row)["text"]] and answer.as_numpy("tokens")[0] == len(
            json.loads(row)["ids"]
        )
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: not client.is_server_ready())
        assert client.infer("copy", [texts], headers=headers)  # until the delay is over
        assert process.wait(20) == 0


@pytest.mark.long
def test_workers_share_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "tformer_deploy", "serve", str(BUNDLE), "--workers", "2", "--port", "0"]
        command += ["--grpc-port", str(port), "--threads", "1"]
        refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert f"127.0.0.1:{port} cannot be listened on: choose another --host or --grpc-port" in refused.stderr
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process, ExitStack() as ending:
        ending.callback(process.kill)
        assert process.stderr
        line = process.stderr.readline()
        assert line.endswith(f", gRPC on 127.0.0.1:{port} with 2 workers\n"), line + process.stderr.read()
        [row] = printed(run_here("translate", BUNDLE, "--json", stdin=b"3 1 4\n"))
        for number in range(16):
            separate = [("grpc.use_local_subchannel_pool", 1), ("grpc.primary_user_agent", str(number))]
            with triton.InferenceServerClient(f"127.0.0.1:{port}", channel_args=separate) as client:
                answer = client.infer("copy", [bytes_of("text", ["3 1 4"])])
                assert texts_in(answer) == [json.loads(row)["text"]]
        with httpx.Client(base_url=re.findall(r"http://\S+(?=,)", line)[0], timeout=20) as http:
            answered = r'tformer_requests_total{(?=[^}]*grpc_ModelInfer)[^}]*worker="(\d)"'
            wait_for(lambda: set(re.findall(answered, http.get("/metrics").text)) == {"0", "1"})
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_the_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    line = failed_line(run_here("serve", BUNDLE, "--grpc-port", 0))
    assert line.startswith("error: the package 'grpc' is not installed: pip install '.[serve-grpc]' in a checkout")


def test_a_cluster_has_no_grpc() -> None:
    line = failed_line(run_here("serve", BUNDLE, "--address", "auto", "--grpc-port", 0))
    assert line == "error: --grpc-port is not served with --address: leave it out"
