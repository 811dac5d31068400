"""The application on a Ray cluster, by Ray Serve, which places, scales, replaces and updates its replicas."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from socket import gethostname
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # before it is imported; else it reports to its vendor

from ray import serve
from ray.exceptions import RayError
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import __version__
from ..base.errors import ConfigError, EngineError
from ..bundle.manifest import open_bundle
from ..translate.corpus.on_ray import connected
from .app import LOG, make_app
from .models import Models, manifest_hash
from .run import DRAIN_SECONDS
from .served import Served

NAME = "tformer"
"""The application's name on the cluster, which has one of them."""
POLL_SECONDS, NOTE_SECONDS = 0.5, 30
"""Between two looks at a deployment on its way, and between two lines about it."""
HEALTH_SECONDS = 5
"""Between two checks of a replica; Ray Serve replaces it after three that fail."""
STARTS = 3
"""How often replicas may fail to start."""


@dataclass(frozen=True)
class Cluster:
    """Where replicas run, and how many."""

    address: str
    host: str
    port: int
    """On which every node that has a replica listens."""
    fewest: int
    most: int
    num_cpus: int
    num_gpus: float


@dataclass(frozen=True)
class Plan:
    """What every replica serves: the same bundles, by the same tformer."""

    served: Served
    """Its bundles have absolute paths, at which every node must have them."""
    key: str
    hashes: Mapping[str, str] = field(init=False)
    """Of the bundles' manifests."""
    version: str = __version__

    def __post_init__(self) -> None:
        found = {name: manifest_hash(options) for name, options in self.served.bundles.items()}
        object.__setattr__(self, "hashes", found)

    def open(self) -> Models:
        """The models. Raises ConfigError where this node has another tformer, or other bundles."""
        if self.version != __version__:
            raise ConfigError(f"{gethostname()} has tformer {__version__}, not {self.version}: install the same")
        for name, options in self.served.bundles.items():
            if not (found := manifest_hash(options)) or found != self.hashes[name]:
                what = "another bundle" if found else "no bundle"
                raise ConfigError(f"{gethostname()} has {what} at {options.bundle}: every node needs the same")
        return self.served.open()


def plan_of(served: Served, key: str, num_cpus: int) -> Plan:
    """A plan for other machines. Raises ArtifactError for what is no bundle here."""
    bundles = {}
    for name, options in served.bundles.items():
        bundle = open_bundle(Path(str(options.bundle)), graphs=False)
        bundle.require_decoder()
        bundles[name] = replace(options, bundle=bundle.directory.resolve(), threads=options.threads or num_cpus)
    return Plan(replace(served, bundles=bundles), key)


class Replica:
    """A process of the cluster with all models; Ray Serve sends it requests while it is healthy."""

    def __init__(self, plan: Plan) -> None:
        LOG.setLevel(logging.INFO)
        LOG.parent = logging.getLogger("ray.serve")  # whose files have the replica's name
        self.guard = make_app(plan.open(), plan.key, no_reload)
        self.guard.counted.labels = {"replica": serve.get_replica_context().replica_tag}  # any of them may be asked

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """What Ray Serve calls for the application."""
        return without_id(self.guard)

    async def check_health(self) -> None:
        """Raise EngineError unless ready."""
        if (status := await status_of(self.guard, "/healthz/ready")) != 200:
            raise EngineError(f"the replica is not ready: {status}")

    def __del__(self) -> None:
        """Called when its requests have ended, or their time is up."""
        if hasattr(self, "guard"):  # else models could not be opened
            self.guard.current.close(drain=False)


def no_reload(_: Models) -> Models:
    """Raise ConfigError: one replica alone would answer otherwise than the others."""
    raise ConfigError("on a Ray cluster, run `tformer serve --address` again: it updates all replicas")


def without_id(app: ASGIApp) -> ASGIApp:
    """The application without the header of a request's id, which Ray Serve adds itself."""

    async def serve_one(scope: Scope, receive: Receive, send: Send) -> None:
        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                del MutableHeaders(scope=message)["X-Request-Id"]
            await send(message)

        await app(scope, receive, answer)

    return serve_one


async def status_of(app: ASGIApp, path: str) -> int:
    """The status that the application answers a GET with."""
    answers: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        answers.append(message)

    scope = {"type": "http", "http_version": "1.1", "method": "GET", "scheme": "http", "path": path, "headers": []}
    await app({**scope, "query_string": b"", "root_path": "", "client": None, "server": None}, receive, send)
    return int(answers[0]["status"])


def deploy(plan: Plan, cluster: Cluster, note: Callable[[str], None]) -> None:
    """Deploy the application, or update the one that is there. Returns when all replicas are new and ready.

    Raises ConfigError where there is no cluster, or where Ray Serve listens elsewhere, and EngineError for replicas
    that do not start: then those that were there go on.
    """
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    with connected(cluster.address):
        try:
            _listen(cluster)
            serve.run_many([serve.RunTarget(_application(plan, cluster), NAME)], wait_for_applications_running=False)
            _wait(note)
        except (RayError, RayServeException, ValueError, RuntimeError) as error:
            raise EngineError(f"Ray Serve: {last_error(str(error))}") from None
    names = ", ".join(plan.served.bundles)
    note(f"serving {names} on {cluster.host}:{cluster.port} of every node that has a replica")


def _listen(cluster: Cluster) -> None:
    """Start Ray Serve, if it does not run. Raises ConfigError where it listens elsewhere."""
    serve.start("EveryNode", {"host": cluster.host, "port": cluster.port})
    there = _get_global_client().http_config
    if (there.host, there.port) != (cluster.host, cluster.port):
        raise ConfigError(
            f"Ray Serve listens on {there.host}:{there.port} of this cluster already: give --host {there.host} and "
            f"--port {there.port}, or end it with `serve shutdown`"
        )


def _application(plan: Plan, cluster: Cluster) -> Any:
    """What Ray Serve runs."""
    slots, max_queue = plan.served.slots, plan.served.max_queue
    replica = serve.deployment(
        serve.ingress()(Replica),
        name="replica",
        ray_actor_options={"num_cpus": cluster.num_cpus, "num_gpus": cluster.num_gpus},
        autoscaling_config={
            "min_replicas": cluster.fewest,
            "max_replicas": cluster.most,
            "target_ongoing_requests": slots,
        },
        max_ongoing_requests=slots + max_queue,  # beyond them the replica itself refuses
        max_queued_requests=max(1, max_queue),
        backpressure_config={"status_code": 429, "retry_after_s": 1},
        graceful_shutdown_timeout_s=DRAIN_SECONDS,
        health_check_period_s=HEALTH_SECONDS,
        max_constructor_retry_count=STARTS,
        max_surge_percent=25,  # old replicas end when new ones are ready
    )
    return replica.bind(plan)


def _wait(note: Callable[[str], None]) -> None:
    """Wait until the application runs. Raises EngineError if it does not start."""
    noted = time.monotonic()
    while (found := serve.status().applications[NAME]).status != "RUNNING":
        said = "\n".join([found.message, *(each.message for each in found.deployments.values())])
        if found.status not in ("NOT_STARTED", "DEPLOYING"):
            raise EngineError(f"the replicas do not start: {last_error(said)}")
        if time.monotonic() - noted >= NOTE_SECONDS:
            noted = time.monotonic()
            note(f"waiting for replicas: {last_error(said)}")
        time.sleep(POLL_SECONDS)


def last_error(text: str) -> str:
    """An error of ours in a text with stack traces, or all of it, in one line."""
    ours = re.findall(r"^tformer_deploy\.base\.errors\.\w+: (.+)", text, re.MULTILINE)
    return str(ours[-1]) if ours else " ".join(text.split())
