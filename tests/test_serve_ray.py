"""`tformer serve --address` on a real Ray cluster of several nodes on this machine: updates, a lost node."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest

pytest.importorskip("ray", reason="the extra serve-cluster is not installed")
pytest.importorskip("grpc", reason="the extra serve-cluster is not installed")
pytest.importorskip("httpx")

import httpx

from tformer_deploy.base.errors import ConfigError, EngineError
from tformer_deploy.cli.serve import read_replicas
from tformer_deploy.serve.on_ray import Cluster, deploy, last_error, plan_of
from tformer_deploy.serve.served import Served
from tformer_deploy.translate.opening import TranslatorOptions

from . import test_corpus_ray
from .command import failed_line, run_here, run_process
from .test_corpus import BUNDLE, number_lines

Machines, machines = test_corpus_ray.Machines, test_corpus_ray.machines
KEY = "sesame"
LINES = number_lines(60)
PASSING = (httpx.TransportError, 500, 503)
"""What a client may see of a lost node, and asks again after."""


@pytest.mark.parametrize(("asked", "found"), [("1", (1, 1)), ("2:8", (2, 8))])
def test_how_many_replicas(asked: str, found: tuple[int, int]) -> None:
    assert read_replicas(asked) == found


@pytest.mark.parametrize("asked", ["", "0", "0:2", "3:2", "1:", "x", "-1", "1:2:3"])
def test_numbers_of_replicas_that_are_none(asked: str) -> None:
    with pytest.raises(ConfigError, match="write a number, at least 1, or the fewest and the most"):
        read_replicas(asked)


def test_no_cluster_is_said() -> None:
    line = failed_line(run_here("serve", BUNDLE, "--address", "127.0.0.1:1"))
    assert "--address 127.0.0.1:1: no Ray cluster answers" in line


def test_the_last_error_of_ours_is_found_between_stack_traces() -> None:
    text = "Error: ray::x()\n  File y\ntformer_deploy.base.errors.ConfigError: a\n\nRuntimeError: tformer\n"
    assert last_error(text) == "a"
    assert last_error(" a\n b ") == "a b"


@pytest.fixture(scope="module")
def expected() -> dict[str, tuple[str, float]]:
    """What `tformer translate` gives for each line alone."""
    done = run_here(
        "translate", BUNDLE, "--json", "--batch-tokens", 1, stdin="".join(f"{line}\n" for line in LINES).encode()
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {line: (each["text"], each["score"]) for line, each in zip(LINES, found, strict=True)}


@pytest.fixture(scope="module")
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def command(cluster: Machines, port: int, *more: object) -> Any:
    return run_process(
        "serve", f"numbers={BUNDLE}", "--address", cluster.address, "--port", port, "--replicas", 2, *more
    )


class Clients:
    """Clients that send lines without end, and ask again after what passes. Use it as a context."""

    def __init__(self, port: int, expected: dict[str, tuple[str, float]]) -> None:
        self.port, self.expected = port, expected
        self.answered, self.seen = Counter[int](), Counter[object]()
        self.wrong: list[object] = []
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(6)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join(90)
        assert not any(thread.is_alive() for thread in self._threads)

    def _run(self, number: int) -> None:
        with httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60) as client:
            for line in cycle(LINES[number:] + LINES[:number]):
                if self._ends.is_set():
                    return
                try:
                    answer = self.ask(client, line)
                    found = answer.json()["results"][0]
                    if (found["text"], pytest.approx(found["score"], abs=1e-4)) != self.expected[line]:
                        self.wrong.append((line, found))
                    self.answered[number] += 1
                except Exception as error:  # a thread's own is not seen
                    self.wrong.append(error)
                    return

    def ask(self, client: Any, line: str) -> Any:
        """Send a line until it is answered, for a minute at most."""
        end = time.monotonic() + 60
        while True:
            try:
                answer = client.post("/v1/translate", json={"text": line}, headers={"X-API-Key": KEY})
                if answer.status_code not in PASSING:
                    assert answer.status_code == 200, answer.text
                    return answer
                self.seen[answer.status_code] += 1
            except PASSING[:1] as error:
                self.seen[type(error).__name__] += 1
            assert time.monotonic() < end, "not answered in a minute"
            time.sleep(0.1)

    def wait(self, count: int) -> None:
        """Until each client has had so many more answers."""
        before, end = Counter(self.answered), time.monotonic() + 120
        while any(self.answered[number] < before[number] + count for number in range(len(self._threads))):
            assert time.monotonic() < end and not self.wrong, self.wrong
            time.sleep(0.05)


@pytest.fixture(scope="module")
def served(machines: Machines, port: int) -> Iterator[Machines]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TFORMER_API_KEY", KEY)
        done = command(machines, port)
        assert done.returncode == 0, done.stderr
        assert done.stderr.decode() == f"serving numbers on 127.0.0.1:{port} of every node that has a replica\n"
        yield machines


@pytest.mark.long
def test_protocols_keys_and_health_are_those_of_one_server(served: Machines, port: int, expected: Any) -> None:
    url, headers = f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {KEY}"}
    assert httpx.get(f"{url}/healthz/ready").json() == {"status": "ready", "models": ["numbers"]}
    assert httpx.post(f"{url}/v1/translate", json={"text": "one"}).status_code == 401
    answer = httpx.post(
        f"{url}/v1/translate", json={"text": LINES[0], "stream": True}, headers={**headers, "X-Request-Id": "mine"}
    )
    assert answer.headers.get_list("x-request-id") == ["mine"]
    pieces = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert "".join(piece["text"] for piece in pieces[:-1]) == pieces[-1]["text"] == expected[LINES[0]][0]
    metrics = httpx.get(f"{url}/metrics", headers=headers).text
    assert re.search(r'^tformer_requests_total{replica="\w+",route=', metrics, re.MULTILINE)
    assert re.search(r'^tformer_steps_total{model="numbers",replica="\w+"}', metrics, re.MULTILINE)
    assert httpx.post(f"{url}/v1/translate", json={}, headers=headers).status_code == 400
    assert httpx.get(f"{url}/-/healthz").text == "success"


@pytest.mark.long
def test_no_request_fails_while_the_command_updates_the_application(
    served: Machines, port: int, expected: dict[str, tuple[str, float]]
) -> None:
    with Clients(port, expected) as clients:
        clients.wait(5)
        done = command(served, port, "--alias", "en-de=numbers")
        assert done.returncode == 0, done.stderr
        clients.wait(5)
    assert not clients.wrong and not clients.seen
    url = f"http://127.0.0.1:{port}/v1/translate"
    for _ in range(10):  # all replicas know it
        found = httpx.post(url, json={"text": "one", "model": "en-de"}, headers={"X-API-Key": KEY})
        assert found.status_code == 200, found.text


@pytest.mark.long
def test_a_lost_node_costs_a_client_no_more_than_a_second_try(
    served: Machines, port: int, expected: dict[str, tuple[str, float]]
) -> None:
    with Clients(port, expected) as clients:
        clients.wait(5)
        served.lose_node(0)
        clients.wait(50)
    assert not clients.wrong
    assert sum(clients.seen.values()) < sum(clients.answered.values())
    time.sleep(15)  # until another replica is there
    with Clients(port, expected) as clients:
        clients.wait(50)
    assert not clients.wrong and not clients.seen


@pytest.mark.long
def test_what_cannot_be_deployed_leaves_what_is_there(served: Machines, port: int, expected: Any) -> None:
    line = failed_line(command(served, port + 1))
    assert f"Ray Serve listens on 127.0.0.1:{port} of this cluster already: give --host 127.0.0.1 and --port" in line
    plan = plan_of(Served({"numbers": TranslatorOptions(BUNDLE)}), KEY, 1)
    object.__setattr__(plan, "hashes", {"numbers": "0" * 64})
    with pytest.raises(EngineError, match=r"has another bundle at .*: every node needs the same"):
        deploy(plan, Cluster(served.address, "127.0.0.1", port, 2, 2, 1, 0.0), print)
    with Clients(port, expected) as clients:
        clients.wait(5)
    assert not clients.wrong and not clients.seen
