"""The files in deploy/: their commands are ones that `tformer` takes, their probes and times those of the server."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from tformer_deploy.serve.app import READY
from tformer_deploy.serve.run import DRAIN_SECONDS

from .command import failed_line, run_here
from .test_corpus import BUNDLE

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
DOCKERFILE, UNIT = (DEPLOY / "Dockerfile").read_text(), (DEPLOY / "tformer-serve.service").read_text()
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["tformer"]
DEPLOYMENT, *OTHERS = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
POD = DEPLOYMENT["spec"]["template"]["spec"]
[CONTAINER] = POD["containers"]
ENTRY = json.loads(re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.MULTILINE)[0])
CHECK = json.loads(re.findall(r"^  CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)[0])
STARTS = {
    "Dockerfile": [*ENTRY, *shlex.split(re.findall(r"^# +tformer-serve (.*)$", DOCKERFILE, re.MULTILINE)[0])],
    "compose.yaml": [*ENTRY, *COMPOSE["command"]],
    "kubernetes.yaml": [*ENTRY, *CONTAINER["args"]],
    "tformer-serve.service": shlex.split(re.findall(r"^ExecStart=(.*)$", UNIT, re.MULTILINE)[0]),
}


@pytest.mark.parametrize("file", STARTS)
def test_the_command_of_each_file_is_one_of_tformer(file: str, tmp_path: Path) -> None:
    """With a real bundle, whose variants are looked at after all options."""
    (tmp_path / "key").write_text("sesame")
    name, verb, *words = STARTS[file]
    assert (Path(name).name, verb) == ("tformer", "serve")
    words = [re.sub(r"en-de=(/\S+)?/bundles/en-de", f"en-de={BUNDLE}", each) for each in words]
    words = [str(tmp_path / "key") if each.endswith("/key") else each for each in words]
    assert f"en-de={BUNDLE}" in words
    line = failed_line(run_here("serve", *words, "--host", "127.0.0.1", "--port", 0, "--variant", "none-such"))
    assert "none-such" in line


def seconds(text: str) -> int:
    return int(text.removesuffix("s"))


def test_each_waits_for_running_requests() -> None:
    delay = int(CONTAINER["args"][CONTAINER["args"].index("--shutdown-delay") + 1])
    assert POD["terminationGracePeriodSeconds"] > DRAIN_SECONDS + delay
    assert seconds(COMPOSE["stop_grace_period"]) > DRAIN_SECONDS
    assert int(re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)[0]) > DRAIN_SECONDS


def test_probes_ask_the_servers_own_paths() -> None:
    paths = {name: CONTAINER[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/healthz/ready", "readiness": "/healthz/ready", "liveness": "/healthz/live"}
    assert paths["readiness"] in READY and paths["liveness"] not in READY
    assert "http://127.0.0.1:8000/healthz/ready" in CHECK[-1]
    compile(CHECK[-1], "HEALTHCHECK", "exec")


def test_nothing_is_root_or_writes() -> None:
    user, group = re.findall(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE)[0]
    security = POD["securityContext"]
    assert (security["runAsUser"], security["runAsGroup"]) == (int(user), int(group)) != (0, 0)
    assert security["runAsNonRoot"] and CONTAINER["securityContext"]["readOnlyRootFilesystem"]
    assert CONTAINER["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert (
        COMPOSE["read_only"]
        and COMPOSE["cap_drop"] == ["ALL"]
        and all(each["read_only"] for each in COMPOSE["volumes"])
    )
    assert "DynamicUser=yes" in UNIT and "ProtectSystem=strict" in UNIT and "CapabilityBoundingSet=\n" in UNIT


def test_what_the_image_copies_is_in_the_checkout_and_not_ignored() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    kept = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    for words in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE):
        for each in words.split():
            assert (ROOT / each).exists() and any(fnmatch(each.split("/")[0], name) for name in kept), each
    for name in kept:
        assert (ROOT / name).exists()


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "tformer-serve.service"
    unit.write_text(UNIT.replace("/opt/tformer/bin/tformer", "/bin/true"))
    done: Any = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    unit.write_text(
        UNIT.replace("TimeoutStopSec=45", "TimeoutStopSec=soon").replace("/opt/tformer/bin/tformer", "/bin/true")
    )
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60)
    assert "Failed to parse time value" in done.stderr, "what is wrong is seen"
