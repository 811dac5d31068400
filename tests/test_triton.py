"""`tformer triton`: repositories that Triton reads, and a real Triton that serves them to its own clients."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from tformer_deploy.base.errors import ArtifactError, ConfigError
from tformer_deploy.bundle.manifest import open_bundle
from tformer_deploy.decoding import DecodeOptions
from tformer_deploy.serve.models import Caps
from tformer_deploy.serve.protocols.inference import OUTPUTS
from tformer_deploy.serve.triton.repository import Settings, read_parameters, write_model

from .command import failed_line, printed, run_here

pytest.importorskip("grpc")
http = pytest.importorskip("tritonclient.http")
grpc = pytest.importorskip("tritonclient.grpc")
text_format = pytest.importorskip("google.protobuf.text_format")
ROOT = Path(__file__).parent.parent
BUNDLE = ROOT / "tests/bundles/v2/copy"
long = pytest.mark.long


def configuration(model: Path) -> Any:
    """What Triton reads."""
    return text_format.Parse((model / "config.pbtxt").read_text(), grpc.model_config_pb2.ModelConfig())


def parameters(model: Path) -> dict[str, dict[str, str]]:
    """Parameters as Triton hands them to a model."""
    return {key: {"string_value": each.string_value} for key, each in configuration(model).parameters.items()}


def test_a_repository_has_the_bundle_and_how_it_runs(tmp_path: Path) -> None:
    (tmp_path / "limits.toml").write_text("beams = 4\nseconds = 2.5\n")
    options = ("--variant", "int8", "--slots", 8, "--max-queue", 200, "--limits", tmp_path / "limits.toml", "--json")
    [line] = printed(run_here("triton", BUNDLE, "--out", tmp_path / "a b", "--name", "en-de", *options))
    model = tmp_path / "a b/en-de"
    assert json.loads(line) == {"model": "en-de", "path": str(model), "stream": False}
    assert sorted(each.name for each in model.rglob("*") if each.parent in (model, model / "1")) == [
        "1",
        "bundle",
        "config.pbtxt",
        "model.py",
    ]
    open_bundle(model / "1/bundle")
    settings, caps = read_parameters(parameters(model))
    assert settings == Settings(variant="int8", slots=8, max_queue=200)
    assert caps == Caps(beams=4, seconds=2.5)
    assert settings.options(model / "1").bundle == model / "1/bundle"
    assert dataclasses.replace(settings, bundle="/b").options(model / "1").bundle == Path("/b")


def test_triton_reads_the_inputs_and_outputs_of_kserve(tmp_path: Path) -> None:
    bundle = open_bundle(BUNDLE)
    for stream in (False, True):
        model = tmp_path / str(stream)
        write_model(bundle, model, Settings(), Caps(), stream, force=False)
        found = configuration(model)
        assert (found.name, found.backend, found.max_batch_size) == (str(stream), "python", 0)
        assert found.model_transaction_policy.decoupled == stream
        required = [each.name for each in found.input if not each.optional]
        options = {each.name for each in dataclasses.fields(DecodeOptions)} - {"align", "endless"}
        assert required == ["text"]
        assert {each.name for each in found.input} == {"text", "prefix", *options, *(["stream"] if stream else [])}
        assert [each.name for each in found.output] == [*OUTPUTS, *(["piece"] if stream else [])]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--name", "a/b"), "'a/b' is no name of a model: use --name with letters"),
        (("--name", ".."), "'..' is no name of a model"),
        (("--variant", "int9"), "unknown variant 'int9': did you mean 'int8'"),
        (("--backend", "orrt"), "unknown backend 'orrt': did you mean 'ort'"),
        (("--max-queue", 3), "have no room for a request of 128 texts"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused(options: tuple[object, ...], message: str, tmp_path: Path) -> None:
    assert message in failed_line(run_here("triton", BUNDLE, "--out", tmp_path / "out", *options))
    assert not (tmp_path / "out").exists()


def test_a_model_is_replaced_only_when_asked(tmp_path: Path) -> None:
    arguments = ("triton", BUNDLE, "--out", tmp_path)
    assert printed(run_here(*arguments))
    assert "exists already: choose another folder or add --force" in failed_line(run_here(*arguments))
    assert printed(run_here(*arguments, "--force", "--stream"))
    assert configuration(tmp_path / "copy").model_transaction_policy.decoupled
    (tmp_path / "other").mkdir()
    with pytest.raises(ArtifactError, match="is not a model of Triton and stays as it is"):
        write_model(open_bundle(BUNDLE), tmp_path / "other", Settings(), Caps(), stream=False, force=True)


def test_parameters_that_are_none_are_refused() -> None:
    assert read_parameters({"EXECUTION_ENV_PATH": {"string_value": "x.tar.gz"}}) == (Settings(), Caps())
    for name, value, message in (
        ("slot", "3", "unknown parameter of config.pbtxt 'slot': did you mean 'slots'"),
        ("slots", "many", "slots=many: must be a whole number"),
        ("limits.beams", "0", "beams=0: must be at least 1"),
        ("limits.body_bytes", "9", "unknown parameter of config.pbtxt 'limits.body_bytes'"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            read_parameters({name: {"string_value": value}})


# A real Triton. Its numpy is older than ours, so it has an environment of its own.

TRITON = ["nvidia-pytriton==0.7.0", "numpy==1.26.4", "tritonclient==2.69.0", "grpcio==1.67.1", "protobuf==6.33.6"]
TEXTS = ["3 1 4", "", "6 5", "2 7 1 8"]
WAYS: list[dict[str, Any]] = [
    {},
    {"beams": 4, "n_best": 2, "length_penalty": 0.6},
    {"sampling": True, "n_best": 3, "seed": 7, "top_k": 5},
]


class Triton:
    """A running server, and its clients."""

    def __init__(self, process: subprocess.Popen[bytes], ports: list[int], log: Path) -> None:
        self.process, self.log = process, log
        self.urls = {http: f"127.0.0.1:{ports[0]}", grpc: f"127.0.0.1:{ports[1]}"}

    def client(self, way: Any) -> Any:
        """A new client, because one over HTTP is for one thread. Close it: Triton's end waits for connections."""
        return way.InferenceServerClient(self.urls[way])

    def infer(self, way: Any, model: str, texts: list[str], *more: Any, **options: Any) -> Any:
        with self.client(way) as client:
            return client.infer(model, [texts_of(way, texts), *more], parameters=options)

    def load(self, model: str, way: Any = grpc) -> None:
        with self.client(way) as client:
            client.load_model(model)

    def state(self, model: str) -> str:
        with self.client(http) as client:
            found = {each["name"]: each.get("state", "") for each in client.get_model_repository_index()}
            return str(found[model])


def texts_of(way: Any, texts: list[Any], name: str = "text") -> Any:
    values = np.array(texts, dtype=np.object_)
    tensor = way.InferInput(name, list(values.shape), "BYTES")
    tensor.set_data_from_numpy(values)
    return tensor


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Triton in `venv`, and tformer from a wheel."""
    folder = tmp_path_factory.mktemp("triton")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    own = [each.split("==")[0] for each in TRITON]
    pinned = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.split("==")[0] not in own]
    (folder / "constraints.txt").write_text("\n".join(pinned))
    install = [folder / "venv/bin/pip", "install", "-q", "--no-compile", "--disable-pip-version-check"]
    command = [*install, f"{wheel}[cpu]", *TRITON, "-c", folder / "constraints.txt"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        pytest.skip(f"Triton's environment cannot be made: {done.stderr.strip().splitlines()[-1]}")
    (packages,) = folder.glob("venv/lib/*/site-packages")
    server = packages / "pytriton/tritonserver"
    shutil.copytree(server / "backends", folder / "backends")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copy(server / f"python_backend_stubs/{version}/triton_python_backend_stub", folder / "backends/python")
    return folder


def start(environment: Path, repository: Path) -> Triton:
    with socket.socket() as one, socket.socket() as two, socket.socket() as three:
        for each in (one, two, three):
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in (one, two, three)]
    (packages,) = environment.glob("venv/lib/*/site-packages")
    libraries = [str(packages / "nvidia_pytriton.libs"), sysconfig.get_config_var("LIBDIR")]
    variables = {
        **os.environ,
        "PATH": f"{environment / 'venv/bin'}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(environment / "venv"),
        "LD_LIBRARY_PATH": ":".join(libraries),  # the backend loads the Python that the environment was made of
    }
    options = {
        "model-repository": repository,
        "backend-directory": environment / "backends",
        "model-control-mode": "explicit",
        "http-address": "127.0.0.1",
        "grpc-address": "127.0.0.1",
        **dict(zip(("http-port", "grpc-port", "metrics-port"), ports, strict=True)),
    }
    log = repository.parent / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [
                packages / "pytriton/tritonserver/bin/tritonserver",
                *(f"--{key}={each}" for key, each in options.items()),
            ],
            env=variables,
            stdout=file,
            stderr=file,
        )
    return Triton(process, ports, log)


@pytest.fixture(scope="module")
def triton(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    """Triton with the models `copy`, `pieces` for streams, `wrong`, and `narrow`, which has one place and a queue."""
    folder = tmp_path_factory.mktemp("served")
    repository = folder / "repository"
    (folder / "limits.toml").write_text("beams = 4\n")
    for name, *options in (
        ("copy", "--limits", folder / "limits.toml"),
        ("pieces", "--stream", "--variant", "int8"),
        ("narrow", "--slots", 1, "--max-queue", 127),
        ("wrong", "--variant", "int8"),
    ):
        command = [environment / "venv/bin/tformer", "triton", BUNDLE, "--out", repository, "--name", name, *options]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    wrong = repository / "wrong/config.pbtxt"
    wrong.write_text(wrong.read_text().replace('"int8"', '"int9"'))
    server = start(environment, repository)
    try:
        wait_for(lambda: server.process.poll() is not None or is_ready(server), server)
        assert server.process.poll() is None, server.log.read_text()[-3000:]
        server.load("copy", http)
        server.load("pieces")
        server.load("narrow")
        yield server
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    finally:
        server.process.kill()
        server.process.wait()


def is_ready(server: Triton) -> bool:
    try:
        with server.client(http) as client:
            return bool(client.is_server_ready())
    except OSError:  # it does not listen yet
        return False


def wait_for(holds: Callable[[], bool], server: Triton) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, server.log.read_text()[-3000:]
        time.sleep(0.05)


def translated(texts: list[str], variant: str = "", **options: Any) -> list[list[dict[str, Any]]]:
    """What `tformer translate` gives for each text alone: all its outputs."""
    settings = [f"--set={name}={value}" for name, value in options.items()]
    found = []
    for text in texts if options.get("sampling") else [None]:  # of a list, each line has samples of its own
        lines = texts if text is None else [text]
        command = ("translate", BUNDLE, "--json", *([f"--variant={variant}"] if variant else []), *settings)
        rows = printed(run_here(*command, stdin="".join(f"{line}\n" for line in lines).encode()))
        found += [[row, *row["alternatives"]] for row in map(json.loads, rows)]
    return found


def check_answer(answer: Any, expected: list[list[dict[str, Any]]], count: int) -> None:
    shape = (len(expected), count) if count > 1 else (len(expected),)
    texts, scores, tokens = (
        answer.as_numpy(name).reshape(len(expected), count) for name in ("text", "score", "tokens")
    )
    assert answer.as_numpy("text").shape == answer.as_numpy("finished").shape == shape
    for row, outputs in enumerate(expected):
        for column, output in enumerate(outputs):
            assert texts[row, column].decode() == output["text"]
            assert tokens[row, column] == len(output["ids"])
            assert scores[row, column] == pytest.approx(output["score"], abs=1e-4)
        assert (tokens[row, len(outputs) :] == -1).all()


@long
@pytest.mark.parametrize("way", [http, grpc], ids=["http", "grpc"])
def test_answers_are_those_of_translate(triton: Triton, way: Any) -> None:
    for options in WAYS:
        answer = triton.infer(way, "copy", TEXTS, **options)
        check_answer(answer, translated(TEXTS, **options), options.get("n_best", 1))
    beams = way.InferInput("beams", [1], "INT64")
    beams.set_data_from_numpy(np.array([3], np.int64))
    [expected] = translated(["3 1 4"], beams=3)
    [begun] = triton.infer(way, "copy", ["3 1 4"], beams, texts_of(way, ["5 5"], "prefix")).as_numpy("text")
    assert triton.infer(way, "copy", ["3 1 4"], beams).as_numpy("text")[0].decode() == expected[0]["text"]
    assert begun.decode().startswith("5 5")


@long
def test_requests_of_many_clients_share_steps(triton: Triton) -> None:
    texts = [" ".join(str(1 + (number * step) % 8) for step in range(1, 2 + number % 7)) for number in range(60)]
    jobs = [(number, WAYS[number % 2]) for number in range(len(texts))]
    expected = [translated(texts, **options) for options in WAYS[:2]]

    def ask(job: tuple[int, dict[str, Any]]) -> Any:
        number, options = job
        return triton.infer((http, grpc)[number % 4 // 2], "copy", [texts[number]], **options)

    with ThreadPoolExecutor(12) as threads:
        for (number, options), answer in zip(jobs, threads.map(ask, jobs), strict=True):
            check_answer(answer, [expected[number % 2][number]], options.get("n_best", 1))
    with triton.client(grpc) as client:
        statistics = client.get_inference_statistics("copy", as_json=True)["model_stats"][0]
    assert int(statistics["inference_stats"]["success"]["count"]) >= 60


def streamed(triton: Triton, model: str, texts: list[str], **options: Any) -> list[Any]:
    """The responses of a stream, then its error if it has one."""
    came: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
    with triton.client(grpc) as client:
        client.start_stream(lambda result, error: came.put((result, error)))
        client.async_stream_infer(model, [texts_of(grpc, texts)], parameters=options)
        found = []
        while True:
            result, error = came.get(timeout=60)
            found.append(error or result)
            if error or result.get_response().parameters["triton_final_response"].bool_param:
                return found


@long
@pytest.mark.parametrize("options", [{}, {"beams": 3}, {"sampling": True}])
def test_a_stream_has_the_pieces_of_the_result(triton: Triton, options: dict[str, Any]) -> None:
    *pieces, last = streamed(triton, "pieces", ["3 1 4 1 5"], stream=True, **options)
    check_answer(last, translated(["3 1 4 1 5"], "int8", **options), 1)
    texts = [each.as_numpy("piece")[0].decode() for each in pieces]
    assert "".join(texts) == last.as_numpy("text")[0].decode()
    assert len(texts) > 1 or "beams" in options
    [whole] = streamed(triton, "pieces", TEXTS, **options)
    assert whole.as_numpy("piece") is None and whole.as_numpy("text").shape == (4,)


@long
def test_generate_takes_plain_json(triton: Triton) -> None:
    httpx = pytest.importorskip("httpx")
    [[expected]] = translated(["3 1 4"], beams=3)
    with httpx.Client(base_url=f"http://{triton.urls[http]}/v2/models", timeout=60) as client:
        answer = client.post("/copy/generate", json={"text": "3 1 4", "beams": 3}).json()
        assert (answer["text"], answer["tokens"]) == (expected["text"], len(expected["ids"]))
        stream = client.post("/pieces/generate_stream", json={"text": "3 1 4", "stream": True}).text
    *pieces, last = [json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line]
    assert "".join(each["piece"] for each in pieces) == last["text"] and last["tokens"]


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"beam": 2}, "unknown parameter 'beam': did you mean 'beams'"),
    ({"beams": 8}, "8 beams exceed the engine's limit of 7: use fewer"),
    ({"n_best": 5, "sampling": True}, "5 beams or samples exceed this server's limit of 4: use fewer"),
    ({"beams": "many"}, "must be a whole number"),
    ({"endless": True}, "endless is not an option of this server"),
    ({"stream": True}, "stream: this call has one answer"),
]


@long
@pytest.mark.parametrize("way", [http, grpc], ids=["http", "grpc"])
def test_what_cannot_be_answered_raises_the_clients_error(triton: Triton, way: Any) -> None:
    asked = [([texts_of(way, ["3"])], {"parameters": options}, message) for options, message in REFUSALS]
    asked += [
        ([texts_of(way, [b"\xff"])], {}, "input 'text': element 0 is not UTF-8"),
        ([texts_of(way, ["3", "1 " * 20])], {}, "text 2: line 1: a source of 21 tokens exceeds the limit of 16"),
        ([texts_of(way, ["3"] * 129)], {}, "129 texts exceed this server's limit of 128 a request"),
        ([texts_of(way, ["3"]), texts_of(way, ["3", "4"], "prefix")], {}, "1 texts, 2 prefixes"),
        ([texts_of(way, ["3"])], {"timeout": 1000}, "parameter 'timeout' is not supported"),
        ([texts_of(way, ["3"])], {"sequence_id": 7}, "requests have no state"),
    ]
    for inputs, options, message in asked:
        with triton.client(way) as client, pytest.raises(way.InferenceServerException) as caught:
            client.infer("copy", inputs, **options)
        assert caught.value.status() == ("400" if way is http else "StatusCode.INVALID_ARGUMENT")
        assert message in caught.value.message() and "\n" not in caught.value.message()
    [error] = streamed(triton, "pieces", ["3", "4"], stream=True)
    assert error.message() == "stream: one text at a time"


@long
def test_a_full_queue_is_said_and_a_client_that_leaves_frees_its_place(triton: Triton) -> None:
    texts = ["3 1 4 1 5 9 2 6 5 3 5"] * 128
    options = {"beams": 7, "min_tokens": 16, "max_tokens": 16}
    ended = threading.Event()
    with triton.client(grpc) as client:
        asked = [texts_of(grpc, texts)]
        call = client.async_infer("narrow", asked, lambda result, error: ended.set(), parameters=options)
        time.sleep(0.3)
        with pytest.raises(grpc.InferenceServerException, match="try again later") as caught:
            triton.infer(grpc, "narrow", texts, **options)
        assert caught.value.status() == "StatusCode.UNAVAILABLE"
        call.cancel()
        begun = time.monotonic()
        assert triton.infer(grpc, "narrow", ["3"]).as_numpy("text").shape == (1,)
        assert time.monotonic() - begun < 5 and ended.wait(20)


@long
def test_a_model_is_unloaded_after_its_requests_and_loaded_again(triton: Triton) -> None:
    texts = ["3 1 4 1 5 9 2 6 5 3 5"] * 64
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(triton.infer, grpc, "narrow", texts, beams=7, min_tokens=16, max_tokens=16)
        time.sleep(0.3)
        with triton.client(http) as client:
            client.unload_model("narrow")
        assert running.result(60).as_numpy("text").shape == (64,)
    with pytest.raises(grpc.InferenceServerException, match="narrow"):
        triton.infer(grpc, "narrow", ["3"])
    wait_for(lambda: triton.state("narrow") == "UNAVAILABLE", triton)
    triton.load("narrow")
    check_answer(triton.infer(http, "narrow", TEXTS), translated(TEXTS), 1)


@long
def test_a_model_that_cannot_be_loaded_says_why(triton: Triton) -> None:
    with pytest.raises(http.InferenceServerException) as caught:
        triton.load("wrong", http)
    assert "unknown variant 'int9': did you mean 'int8'" in caught.value.message()
    assert "Traceback" not in triton.log.read_text()
