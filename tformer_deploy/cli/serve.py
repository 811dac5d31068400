"""tformer serve"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..base.errors import ConfigError, extras
from ..base.headers import read_toml
from ..base.notes import note
from ..base.settings import from_dict
from .options import Backend, DeviceOption, Shortlisted, Threads, Variant
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
        typer.Option(metavar="NAME=MODEL[:TOKEN]", help="Further name of a model; outputs begin with TOKEN, if given."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any that is free.")] = 8000,
    backend: Backend = "ort",
    variant: Variant = None,
    device: DeviceOption = "cpu",
    shortlist: Shortlisted = False,
    threads: Threads = 0,
    slots: Annotated[int, typer.Option(min=1, max=4096, help="Lines of a bundle that run at once.")] = 32,
    max_queue: Annotated[
        int, typer.Option(min=0, max=1 << 20, help="Lines of a bundle that wait; further ones are refused (429).")
    ] = 1024,
    limits: Annotated[
        Path | None, typer.Option(help="TOML file with the most that a request may ask for: docs/serve.md.")
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help=f"File with the key that clients must send. Default: the variable {KEY_VARIABLE}, if set."),
    ] = None,
) -> None:
    """Serve bundles over HTTP, with continuous batching. docs/serve.md describes the protocols.

    SIGTERM and Ctrl-C stop it. Running requests get 30 seconds to end.
    """
    with extras():
        from ..serve.run import run_server
    from ..serve.models import Model, Models
    from ..translate.opening import TranslatorOptions, open_translator

    if not host:
        raise ConfigError("--host must not be empty: 0.0.0.0 means all addresses")
    caps = _caps(limits)
    if slots + max_queue < caps.texts:
        raise ConfigError(
            f"--slots {slots} and --max-queue {max_queue} have no room for a request of {caps.texts} texts: "
            "use a larger --max-queue, or fewer texts in --limits"
        )
    key = read_key(api_key_file)
    aliases = read_aliases(alias or [])
    models = []
    try:
        for each in bundle:
            name, folder = split_name(each)
            options = TranslatorOptions(Path(folder), backend, variant, device, threads=threads, shortlist=shortlist)
            models.append(Model(name, open_translator(options), caps, slots, max_queue))
        run_server(Models(models, aliases), host, port, key, note)
    finally:
        for model in models:
            model.close(drain=False)


def split_name(asked: str) -> tuple[str, str]:
    """Name and folder of [NAME=]BUNDLE. Raises ConfigError. A folder may have "=" in its path, a name has no "/"."""
    name, equals, folder = asked.partition("=")
    if not equals or "/" in name:
        name, folder = Path(asked).resolve().name, asked
    if not name or not folder:
        raise ConfigError(f"{asked}: write NAME=BUNDLE, with the bundle's folder")
    return name, folder


def read_aliases(asked: list[str]) -> dict[str, str]:
    """Models by further names. Raises ConfigError."""
    found: dict[str, str] = {}
    for each in asked:
        name, _, model = each.partition("=")
        if not name or not model:
            raise ConfigError(f"--alias {each}: write NAME=MODEL, or NAME=MODEL:TOKEN")
        if name in found:
            raise ConfigError(f"--alias {each}: {name} is given twice")
        found[name] = model
    return found


def _caps(path: Path | None) -> Caps:
    from ..serve.models import Caps

    values = read_toml(path) if path else {}
    try:
        return from_dict(Caps, values, "limits")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


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
