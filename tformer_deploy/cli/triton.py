"""tformer triton"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import Backend, DeviceOption, Json, Limits, MaxQueue, Shortlisted, Slots, Threads, Variant
from .root import app, emit
from .serve import read_caps


@app.command(epilog="Example: tformer triton bundles/en-de --out repository")
def triton(
    bundle: Annotated[Path, typer.Argument(help="Bundle.")],
    out: Annotated[Path, typer.Option(help="Model repository; the model becomes a folder in it.")],
    name: Annotated[str, typer.Option(help="The model's name. Default: the bundle's folder's.")] = "",
    stream: Annotated[
        bool,
        typer.Option("--stream", help="For streams of pieces (decoupled): gRPC's stream and generate_stream alone."),
    ] = False,
    backend: Backend = "ort",
    variant: Variant = None,
    device: DeviceOption = "cpu",
    shortlist: Shortlisted = False,
    threads: Threads = 0,
    slots: Slots = 32,
    max_queue: MaxQueue = 1024,
    limits: Limits = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the model.")] = False,
    json: Json = False,
) -> None:
    """Write a bundle as a model of Triton Inference Server, which holds a copy of it. docs/serve.md says what Triton
    needs.
    """
    from ..bundle.manifest import open_bundle
    from ..serve.triton.repository import Settings, model_folder, write_model

    caps = read_caps(limits, slots, max_queue)
    settings = Settings(
        backend=backend,
        variant=variant or "",
        device=device,
        threads=threads,
        shortlist=shortlist,
        slots=slots,
        max_queue=max_queue,
    )
    opened, model = open_bundle(bundle), model_folder(out, name or bundle.resolve().name)
    write_model(opened, model, settings, caps, stream, force)
    emit(
        {"model": model.name, "path": str(model), "stream": stream},
        json,
        f"{model}: written; serve it with tritonserver --model-repository {out}",
    )
