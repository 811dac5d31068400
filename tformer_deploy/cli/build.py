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


@app.command(epilog="Example: tformer build bundles/numbers-trt --src lines.en --profile 1x1x64x64 --profile 8x4x64x64")
def build(
    bundle: Annotated[Path, typer.Argument(help="Bundle exported with --recipe trt.")],
    precision: Annotated[
        Precisions, typer.Option(help="Type of matmuls and caches; the rest stays in fp32.")
    ] = Precisions.fp16,
    profile: Annotated[
        list[str] | None,
        typer.Option(
            metavar="BxKxSxT",
            help="Sizes of a plan: sentences, beams, source and target tokens; repeatable. Default: usual sizes.",
        ),
    ] = None,
    src: Annotated[
        Path | None,
        typer.Option(help="Sample of the text to translate; its lengths determine the default profiles."),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(help="Text to find layers that overflow half precision; these stay in fp32. Default: --src."),
    ] = None,
    trt_flavor: Annotated[
        str,
        typer.Option(help="tensorrt or rtx (TensorRT for RTX, builds without a GPU). Default: whichever is installed."),
    ] = "",
    fast: Annotated[
        bool, typer.Option("--fast", help="Search less for fast kernels: the build takes less time.")
    ] = False,
    version_compatible: Annotated[
        bool,
        typer.Option("--version-compatible", help="Make plans that later releases of the same major version can load."),
    ] = False,
    hardware_compatible: Annotated[
        bool, typer.Option("--hardware-compatible", help="Make plans that run on every GPU since Ampere.")
    ] = False,
    timing_cache: Annotated[
        Path | None, typer.Option(help="File that keeps kernel timings for later builds; not with TensorRT for RTX.")
    ] = None,
    json: Json = False,
) -> None:
    """Compile a bundle's graphs to TensorRT plans, and add them to the bundle."""
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
