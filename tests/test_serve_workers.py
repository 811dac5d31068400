"""Several processes behind one port: one that dies is started again, and the others go on."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from .command import run_process
from .serving import post, wait_for
from .test_serve_reload import BUNDLES, copied, running

pytest.importorskip("prometheus_client")
pages = pytest.importorskip("tformer_deploy.serve.pages")


def workers_of(server: Any) -> list[int]:
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text()
    return [int(each) for each in children.split()]


def is_alive(process: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def next_line(lines: Any) -> str:
    while (line := lines.readline()).startswith("{"):  # the access log
        pass
    return str(line)


def test_one_that_is_killed_is_started_again_and_the_others_go_on(tmp_path: Path) -> None:
    folder = copied("names", tmp_path / "served")
    with running(f"numbers={folder}", "--workers", 2) as (server, client, lines):
        first, second = workers_of(server)
        expected = post(client, text="seven").json()["results"]
        ended, statuses, lost = threading.Event(), set(), []

        def ask() -> None:
            while not ended.is_set():
                try:  # a connection each
                    answer = httpx.post(f"{client.base_url}/v1/translate", json={"text": "seven"}, timeout=20)
                    statuses.add((answer.status_code, answer.json()["results"] == expected))
                except httpx.TransportError as error:
                    lost.append(error)

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        os.kill(first, signal.SIGKILL)
        assert next_line(lines) == "worker 0 was ended by SIGKILL: it is started again in 1 s\n"
        wait_for(lambda: len(workers_of(server)) == 2)
        assert second in workers_of(server) and first not in workers_of(server)
        assert "with 2 workers" in next_line(lines)
        ended.set()
        for thread in threads:
            thread.join(20)
        assert statuses == {(200, True)} and len(lost) <= 2, "no more than what the killed one had"

        def metrics() -> str:
            return str(httpx.get(f"{client.base_url}/metrics", timeout=20).text)

        wait_for(lambda: all(f'tformer_steps_total{{model="numbers",worker="{each}"}}' in metrics() for each in "01"))
        folder.rename(tmp_path / "old")
        copied("copy", folder)
        assert httpx.post(f"{client.base_url}/admin/reload", timeout=20).json()["models"][0]["new"]
        assert {next_line(lines), next_line(lines), next_line(lines)} == {
            "reloaded: numbers\n",
            "reloaded: no manifest has changed\n",  # of the one that was asked
        }
        alive = workers_of(server)
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
        assert not any(map(is_alive, alive))


@pytest.mark.long
def test_one_that_hangs_is_killed_and_started_again() -> None:
    code = "from tformer_deploy.serve import workers; workers.HANG_SECONDS = 5"
    code += "; from tformer_deploy.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", str(BUNDLES / "names"), "--workers", "2", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr
        try:
            port = re.search(r":(\d+) with 2 workers", next_line(server.stderr))
            assert port
            first, second = workers_of(server)
            os.kill(first, signal.SIGSTOP)
            assert next_line(server.stderr) == f"worker 0 (process {first}) hangs: it is killed\n"
            assert next_line(server.stderr) == "worker 0 was ended by SIGKILL: it is started again in 1 s\n"
            assert "with 2 workers" in next_line(server.stderr)
            assert second in workers_of(server) and first not in workers_of(server)
            answer = httpx.post(f"http://127.0.0.1:{port[1]}/v1/translate", json={"text": "seven"}, timeout=20)
            assert answer.status_code == 200
            server.send_signal(signal.SIGTERM)
            assert server.wait(30) == 0
        finally:
            server.kill()


@pytest.mark.long
def test_no_worker_outlives_the_first_process() -> None:
    with running(f"numbers={BUNDLES / 'names'}", "--workers", 2) as (server, _, _):
        alive = workers_of(server)
        server.kill()
        wait_for(lambda: not any(map(is_alive, alive)))


@pytest.mark.long
def test_workers_that_keep_dying_end_the_server() -> None:
    code = (
        "from tformer_deploy.serve import workers; workers.MOST_DEATHS = 2; from tformer_deploy.cli import main; main()"
    )
    command = [sys.executable, "-c", code, "serve", str(BUNDLES / "names"), "--workers", "2", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr
        try:
            assert "with 2 workers" in next_line(server.stderr)
            for _ in range(3):  # the other goes on
                wait_for(lambda: len(workers_of(server)) == 2)
                os.kill(workers_of(server)[-1], signal.SIGSEGV)
                wait_for(lambda: len(workers_of(server)) < 2)
            for _ in range(40):  # now nobody serves
                for each in workers_of(server) if server.poll() is None else []:
                    with suppress(ProcessLookupError):
                        os.kill(each, signal.SIGSEGV)
                time.sleep(0.25)
            found = server.stderr.read()
            assert server.wait(30) == 1
        finally:
            server.kill()
    assert "worker 1 was ended by SIGSEGV: it is started again in 1 s\n" in found
    assert re.search(r"error: worker [01] was ended by SIGSEGV, \d times in a row\n$", found)


@pytest.mark.parametrize("workers", [(), ("--workers", "2")], ids=["one", "workers"])
def test_sighup_while_it_starts_does_not_end_it(workers: tuple[str, ...]) -> None:
    """From when the command has begun; before, Python itself has not started."""
    code = "from tformer_deploy.cli import main; print(end='.', flush=True); main()"
    command = [sys.executable, "-c", code, "serve", str(BUNDLES / "names"), *workers, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout and server.stderr
        try:
            assert server.stdout.read(1) == "."
            time.sleep(0.02)
            said: list[str] = []
            reading = threading.Thread(target=lambda: said.append(next_line(server.stderr)))
            reading.start()
            while reading.is_alive():
                server.send_signal(signal.SIGHUP)
                time.sleep(0.005)
            assert "serving names on" in said[0] or "reloaded" in said[0]
            server.send_signal(signal.SIGTERM)
            threading.Thread(target=server.stderr.read, daemon=True).start()
            assert server.wait(60) == 0
        finally:
            server.kill()


def test_a_bundle_that_cannot_be_opened_is_said_once(tmp_path: Path) -> None:
    folder = shutil.copytree(BUNDLES / "names", tmp_path / "bundle")
    (folder / "encoder.onnx").write_bytes(b"")
    done = run_process("serve", folder, "--workers", 3, "--port", 0)
    [line] = done.stderr.decode().splitlines()
    assert done.returncode == 1 and line.startswith("error: ") and "encoder.onnx" in line


def test_pages_are_read_whole_or_not_at_all() -> None:
    both = pages.Pages.make(2)
    text = '# TYPE a gauge\na{model="m"} 1.0\n'
    both.write(text)
    assert both.read() == '# HELP a \n# TYPE a gauge\na{model="m",worker="0"} 1.0\n'
    both.of(1).write(text.replace("1.0", "2.0"))
    assert 'a{model="m",worker="1"} 2.0' in both.read()
    both.of(1).write("")
    assert 'worker="1"' not in both.read()
    os.pwrite(both.files[1], text.encode(), 0)  # by one that was killed before the end
    assert 'worker="1"' not in both.read()
