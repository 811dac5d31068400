"""tformer serve"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..base.errors import ConfigError, extras, require, unknown
from ..base.headers import read_toml
from ..base.notes import note
from ..base.settings import from_dict
from ..engines import EngineName, threads_each
from .options import Backend, DeviceOption, Limits, MaxQueue, Shortlisted, Slots, Variant, WorkerThreads
from .root import app

if TYPE_CHECKING:
    from ..serve.models import Caps

KEY_VARIABLE = "TFORMER_API_KEY"


@app.command(epilog="Example: tformer serve en-de=bundles/en-de-native --backend native --port 8000")
def serve(
    bundle: Annotated[
        list[str],
        typer.Argument(metavar="[NAME=]BUNDLE", help="Bundle, and its name for clients; default: the folder's name."),
    ],
    alias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=MODEL[:TOKEN]",
            help="Further name of a model; outputs begin with TOKEN, if given; repeatable.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any that is free.")] = 8000,
    grpc_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port for KServe v2 over gRPC; 0: any that is free. Default: none."),
    ] = None,
    backend: Backend = "ort",
    variant: Variant = None,
    device: DeviceOption = "cpu",
    use: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=BACKEND[:VARIANT]",
            help="Backend and variant of one model, such as en-de=native:native-int8; repeatable.",
        ),
    ] = None,
    shortlist: Shortlisted = False,
    workers: Annotated[
        int, typer.Option(min=1, help="Processes that share the port; one that dies is started again.")
    ] = 1,
    threads: WorkerThreads = 0,
    slots: Slots = 32,
    max_queue: MaxQueue = 1024,
    limits: Limits = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help=f"File with the key that clients must send. Default: the variable {KEY_VARIABLE}, if set."),
    ] = None,
    shutdown_delay: Annotated[
        float,
        typer.Option(min=0, max=3600, help="Seconds after SIGTERM in which requests are still taken: docs/serve.md."),
    ] = 0.0,
    address: Annotated[
        str | None,
        typer.Option(help="Address of a Ray cluster, or auto: deploy or update there. Default: serve here."),
    ] = None,
    replicas: Annotated[
        str,
        typer.Option(metavar="N|MIN:MAX", help="Processes that serve all bundles, on Ray; MIN:MAX: by load."),
    ] = "1",
    num_cpus: Annotated[int, typer.Option(min=1, help="Cores per replica, on Ray.")] = 1,
    num_gpus: Annotated[float, typer.Option(min=0, help="GPUs per replica, on Ray.")] = 0.0,
) -> None:
    """Serve bundles over HTTP, with continuous batching. docs/serve.md describes the protocols.

    SIGHUP reloads bundles that have changed. SIGTERM and Ctrl-C stop it. Running requests get 30 seconds to end.
    """
    with extras():
        from ..serve.run import Service, run_server
        from ..serve.workers import run_workers
    if grpc_port is not None:
        require("serve-grpc", "grpc", "tritonclient", "google", "packaging")
    from ..serve.served import Served
    from ..translate.opening import TranslatorOptions

    if not host:
        raise ConfigError("--host must not be empty: 0.0.0.0 means all addresses")
    caps = read_caps(limits, slots, max_queue)
    key = read_key(api_key_file)
    share = threads_each(threads, workers) if workers > 1 else threads
    usual = TranslatorOptions("", backend, variant, device, threads=share, shortlist=shortlist)
    folders = read_bundles(bundle)
    engines = read_pairs("--use", "NAME=BACKEND:VARIANT", use or [])
    for name in engines:
        if name not in folders:
            raise unknown("model of --use", name, folders)
    bundles = {name: replace(usual, bundle=folder, **engine_of(engines, name)) for name, folder in folders.items()}
    aliases = read_pairs("--alias", "NAME=MODEL, or NAME=MODEL:TOKEN", alias or [])
    served = Served(bundles, aliases, caps, slots, max_queue)
    service = Service(served, host, port, key, grpc_port, shutdown_delay)
    if workers > 1 and grpc_port == 0:
        raise ConfigError("--grpc-port 0 would be another port for each of --workers: name one")
    if address is None:
        if replicas != "1" or num_cpus != 1 or num_gpus:
            raise ConfigError("--replicas, --num-cpus and --num-gpus are for --address: on one machine, use --workers")
        if workers > 1:
            run_workers(service, workers, note)
        else:
            run_server(service, note)
        return
    if workers > 1:
        raise ConfigError("--workers are processes of this machine: with --address, use --replicas")
    if not port or shutdown_delay:
        raise ConfigError("with --address, --port must be a number other than 0, and --shutdown-delay has no meaning")
    if grpc_port is not None:
        raise ConfigError("--grpc-port is not served with --address: leave it out")
    require("serve-cluster", "ray", "grpc", "fastapi")
    from ..serve.on_ray import Cluster, deploy, plan_of

    cluster = Cluster(address, host, port, *read_replicas(replicas), num_cpus, num_gpus)
    deploy(plan_of(served, key, num_cpus), cluster, note)


def read_replicas(asked: str) -> tuple[int, int]:
    """The fewest and the most replicas. Raises ConfigError."""
    found = re.fullmatch(r"(\d{1,4})(?::(\d{1,4}))?", asked, re.ASCII)
    fewest, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= fewest <= most:
        raise ConfigError(f"--replicas {asked}: write a number, at least 1, or the fewest and the most, as in 1:8")
    return fewest, most


def split_name(asked: str) -> tuple[str, str]:
    """Name and folder of [NAME=]BUNDLE. Raises ConfigError. A folder may have "=" in its path, a name has no "/"."""
    name, equals, folder = asked.partition("=")
    if not equals or "/" in name:
        name, folder = Path(asked).resolve().name, asked
    if not name or not folder:
        raise ConfigError(f"{asked}: write NAME=BUNDLE, with the bundle's folder")
    return name, folder


def read_bundles(asked: list[str]) -> dict[str, Path]:
    """Bundles by their names. Raises ConfigError."""
    found: dict[str, Path] = {}
    for name, folder in map(split_name, asked):
        if name in found:
            raise ConfigError(f"two models have the name {name}: give each its own, as in NAME=BUNDLE")
        found[name] = Path(folder)
    return found


def read_pairs(option: str, form: str, asked: list[str]) -> dict[str, str]:
    """What an option that may be repeated says of names. Raises ConfigError."""
    found: dict[str, str] = {}
    for each in asked:
        name, _, value = each.partition("=")
        if not name or not value:
            raise ConfigError(f"{option} {each}: write {form}")
        if name in found:
            raise ConfigError(f"{option} {each}: {name} is given twice")
        found[name] = value
    return found


def engine_of(engines: dict[str, str], name: str) -> dict[str, Any]:
    """The engine that `--use` names for a model: it holds in place of the options for all."""
    if name not in engines:
        return {}
    engine = EngineName(engines[name])
    return {"backend": engine.backend, "variant": engine.variant or None, "device": engine.device}


def read_caps(path: Path | None, slots: int, max_queue: int) -> Caps:
    """The limits in a file, or the usual ones. Raises ConfigError for those that the queue has no room for."""
    from ..serve.models import Caps

    values = read_toml(path) if path else {}
    try:
        caps = from_dict(Caps, values, "limits")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if slots + max_queue < caps.texts:
        raise ConfigError(
            f"--slots {slots} and --max-queue {max_queue} have no room for a request of {caps.texts} texts: "
            "use a larger --max-queue, or fewer texts in --limits"
        )
    return caps


def read_key(path: Path | None) -> str:
    """The key in a file, or in the variable, if it is set; else none. Raises ConfigError for an empty one."""
    if path is None and KEY_VARIABLE not in os.environ:
        return ""
    try:
        key = (os.environ[KEY_VARIABLE] if path is None else path.read_text("utf-8")).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    where = path or f"the variable {KEY_VARIABLE}"
    if not key:
        raise ConfigError(f"{where} is empty: write the key into it")
    if not key.isprintable() or " " in key:
        raise ConfigError(f"{where} has more than one word: write one key, which a header can hold")
    return key
