"""tformer export"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..base.notes import note
from ..bundle.recipe import named_recipes
from ..export.layouts import LAYOUTS
from .options import Json, folder
from .root import app, emit, progress


def complete_recipe(incomplete: str) -> list[tuple[str, str]]:
    """Completions for the shell: names of recipes, and the first line of their files."""
    files = {name: file for name, file in named_recipes().items() if name.startswith(incomplete)}
    return [(name, file.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")) for name, file in files.items()]


def recipes(default: str) -> Any:
    """The option `--recipe`, with the text of its default."""
    return typer.Option(
        metavar="RECIPE",
        help=f"{', '.join(named_recipes())}, or a TOML file; repeatable. The first for ONNX Runtime is "
        f"the bundle's default. Default: {default}.",
        autocompletion=complete_recipe,
    )


@app.command(epilog="Example: tformer export runs/numbers --out bundles/numbers --recipe fp32 --recipe int8")
def export(
    run: Annotated[Path, typer.Argument(help="Run folder, or FILE.py:FUNCTION; that file is run.")],
    out: Annotated[Path, typer.Option(parser=folder, metavar="<path>", help="Folder for the bundle.")],
    recipe: Annotated[list[str] | None, recipes("fp32")] = None,
    src: Annotated[
        Path | None, typer.Option(help="Text to check with, one sentence per line. Default: generated ids.")
    ] = None,
    tgt: Annotated[Path | None, typer.Option(help="Reference translations of --src: BLEU must pass as well.")] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="Text to calibrate quantized variants with. Default: a part of --src, which is left out of the check."
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            help=f"Write the files of another runtime instead of a bundle: {', '.join(LAYOUTS)}. RUN may be a bundle "
            "too. See docs/anywhere.md."
        ),
    ] = None,
    memory: Annotated[
        bool,
        typer.Option("--memory", help="Also export the encoder alone, for tformer encode; not for trt."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the bundle in --out.")] = False,
    json: Json = False,
) -> None:
    """Export a checkpoint to a bundle, and check it against eager PyTorch. If a variant fails, the bundle is written
    without it; if the standard graphs fail, no bundle is written. In both cases the exit code is 3.

    FILE.py:FUNCTION runs that file and exports the module that the function returns. See docs/your-model.md.
    """
    from ..base.errors import ConfigError, ParityError, require

    require("export", "torch", "onnx", "onnxscript")
    from ..export.checked import Texts, export_checked
    from ..export.layouts.written import to_json, write_layout

    if layout:
        beside = {"--recipe": recipe, "--tgt": tgt, "--calibrate": calibrate, "--memory": memory}
        if given := [name for name, value in beside.items() if value]:
            raise ConfigError(f"{given[0]}: not with --layout, which has its own precisions: leave it out")
        with progress("check") as advance:
            written = write_layout(run, out, layout, src, force, advance)
        emit({"folder": str(out), "check": to_json(written)}, json, f"{written}\n{out}: written")
        return
    try:
        with progress("check") as advance:
            report = export_checked(run, out, recipe or ["fp32"], Texts(src, tgt, calibrate), force, advance, memory)
    except ParityError as error:
        if error.report is None:
            raise
        report = error.report
        if not report.left_out:
            emit({"bundle": None, "check": report.to_json()}, json, str(report))
            raise
    without = f" without {', '.join(report.left_out)}" if report.left_out else ""
    emit({"bundle": str(out), "check": report.to_json()}, json, f"{report}\n{out}: bundle written{without}")
    for name, why in report.left_out.items():
        note(f"error: variant {name} left out: {why}")
    if report.left_out:
        raise typer.Exit(3)
