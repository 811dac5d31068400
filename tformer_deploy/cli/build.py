"""tformer build"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from .options import Json
from .root import app, emit, progress


class Precisions(StrEnum):
    """Types of a plan's matmuls."""

    fp16 = "fp16"
    bf16 = "bf16"
    fp32 = "fp32"


@app.command(epilog="Example: tformer build bundles/numbers --src lines.en --profile 1x1x64x64 --profile 8x4x64x64")
def build(
    bundle: Annotated[Path, typer.Argument(help="Bundle with graphs for TensorRT: export --recipe trt.")],
    precision: Annotated[
        Precisions, typer.Option(help="Type of matmuls and caches; the rest stays fp32.")
    ] = Precisions.fp16,
    profile: Annotated[
        list[str] | None,
        typer.Option(
            metavar="BxKxSxT",
            help="Sentences, beams, source tokens, target positions of a plan; repeatable. Without it: usual ones.",
        ),
    ] = None,
    src: Annotated[
        Path | None, typer.Option(help="Text of the kind to translate: its lengths choose the usual profiles.")
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(help="Text that shows how large values get, which half precision needs. Without it: --src."),
    ] = None,
    trt_flavor: Annotated[
        str,
        typer.Option(help="tensorrt or rtx (TensorRT for RTX, builds without a GPU); without it, what is installed."),
    ] = "",
    fast: Annotated[bool, typer.Option("--fast", help="Spend the least time on the search for kernels.")] = False,
    version_compatible: Annotated[
        bool, typer.Option("--version-compatible", help="Plans load in later releases of the major version too.")
    ] = False,
    hardware_compatible: Annotated[
        bool, typer.Option("--hardware-compatible", help="Plans run on every GPU from Ampere on.")
    ] = False,
    timing_cache: Annotated[
        Path | None, typer.Option(help="File that keeps kernel timings from build to build; not with TensorRT for RTX.")
    ] = None,
    json: Json = False,
) -> None:
    """Compile a bundle's graphs to TensorRT plans, which go into the bundle."""
    from ..engines.trt.api import installed

    installed(trt_flavor)
    from ..bundle.plans import parse_profile
    from ..export.build import build as build_plans
    from ..export.trt_builder import BuildOptions

    profiles = [parse_profile(text) for text in profile or []]
    options = BuildOptions(precision.value, fast, version_compatible, hardware_compatible, timing_cache, trt_flavor)
    with progress("plans", 2 * len(profiles) or None) as advance:
        report = build_plans(bundle, options, profiles, calibrate, src, advance)
    emit(report.to_json(), json, str(report))
