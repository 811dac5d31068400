"""tformer check"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..base.errors import ConfigError, require
from ..base.notes import note
from .options import BACKENDS, CheckedVariants, CheckpointOption, DeviceOption, Json, Shortlisted, Threads
from .root import app, emit, progress

if TYPE_CHECKING:
    from ..bundle.manifest import Bundle
    from ..importers.compare import Comparison
    from ..model.checkpoint import Checkpoint


@app.command(
    epilog="Example: tformer check bundles/numbers --backend ort --src lines.en --tgt lines.de --html check.html"
)
def check(
    bundle: Annotated[Path, typer.Argument(help="Bundle.")],
    backend: Annotated[
        list[str] | None, typer.Option(metavar="BACKEND[:VARIANT]", help=f"{BACKENDS}; repeatable. Default: ort.")
    ] = None,
    variant: CheckedVariants = None,
    device: DeviceOption = "cpu",
    checkpoint: CheckpointOption = None,
    src: Annotated[
        Path | None, typer.Option(help="Text to check with, one sentence per line. Default: generated ids.")
    ] = None,
    tgt: Annotated[
        Path | None,
        typer.Option(help="Reference translations of --src: adds BLEU and chrF of eager PyTorch and of each backend."),
    ] = None,
    save_reference: Annotated[
        Path | None, typer.Option(help="Write eager PyTorch's outputs to this file, for --reference.")
    ] = None,
    reference: Annotated[
        Path | None, typer.Option(help="File from --save-reference, in place of eager PyTorch and --src.")
    ] = None,
    beams: Annotated[int | None, typer.Option(help="Beam size. Default: 5.")] = None,
    n_best: Annotated[
        int | None, typer.Option(help="Best outputs of a beam that must agree, in order. Default: --beams.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the samples. Default: 0.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Longest output, in tokens. Default: 256, without --src 32.")
    ] = None,
    invariance: Annotated[
        int | None,
        typer.Option(help="Sentences to decode again in other batches. Default: 100, without --src 12."),
    ] = None,
    seconds: Annotated[
        int | None,
        typer.Option(
            help="Seconds for optional parts: more generated sentences, other beam sizes, late positions. Default: 60."
        ),
    ] = None,
    original: Annotated[
        bool, typer.Option("--original", help="Also compare an imported checkpoint with the original code.")
    ] = False,
    loosened: Annotated[
        bool,
        typer.Option(
            "--loosened", help="Accept limits of the recipe that are wider than the defaults of its precision."
        ),
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Also write the report to this HTML file.")] = None,
    shortlist: Shortlisted = False,
    threads: Threads = 0,
    json: Json = False,
) -> None:
    """Check that backends give the results of eager PyTorch: encoder outputs, scores of every step, and the tokens of
    greedy search, beam search and sampling. Also check that each gives the same tokens in other batches. Exit code 3 if
    it does not pass. docs/check.md has the exact rules.

    With --save-reference and without --backend, only the reference is written.
    """
    if html:
        from ..check.page import check_page
    if not reference:
        machine = "; or give --reference FILE, which check --save-reference FILE writes on a machine that has it"
        require("train", "torch", instead=machine)
    flags = {"beams": beams, "n_best": n_best, "seed": seed, "max_tokens": max_tokens, "invariance": invariance}
    flags["seconds"] = seconds
    options = {name: value for name, value in flags.items() if value is not None}
    if beams is not None:
        options.setdefault("n_best", beams)
    if reference and (src or save_reference or options):
        raise ConfigError("--reference brings its own sources and options: leave out --src, --save-reference and those")
    if reference and original:
        raise ConfigError("--original runs the checkpoint in PyTorch, which --reference replaces: leave out one")
    if tgt and not (src or reference):
        raise ConfigError("--tgt needs the sources it translates: add --src or --reference")
    for name, value in {"--tgt": tgt, "--html": html, "--original": original, "--loosened": loosened}.items():
        if value and save_reference and not backend:
            raise ConfigError(f"{name} needs a check, and --save-reference alone makes none: add --backend")
    _check_names(backend or [], [html, save_reference], [src, tgt, reference])
    from ..base.files import write_output
    from ..bundle.manifest import open_bundle
    from ..check import CheckRequest, run_check

    request = CheckRequest(
        bundle=open_bundle(bundle),
        backends=backend or [],
        variants=variant or [],
        device=device,
        checkpoint=checkpoint,
        src=src,
        tgt=tgt,
        save_reference=save_reference,
        reference=reference,
        options=options,
        loosened=loosened,
        shortlist=shortlist,
        threads=threads,
    )
    imported = _imported(request.bundle, checkpoint) if original else None
    with progress("check") as advance:
        report = run_check(request, advance)
    if report is None:
        emit({"reference": str(save_reference)}, json, f"{save_reference}: reference written")
        return
    again = None
    try:
        if html:
            write_output(html, check_page(report, str(bundle)))
        if imported:
            again = _with_original(imported, src)
    finally:  # a comparison that fails does not lose the report
        emit({**report.to_json(), **({"original": again.to_json()} if again else {})}, json, str(report))
    if again:
        note("\n".join([str(again), *again.failures]))
    if not report.passed or (again and not again.passed):
        raise typer.Exit(3)


def _imported(bundle: Bundle, checkpoint: Path | None) -> Checkpoint:
    """The imported checkpoint of a bundle, for --original. Raises TformerError if there is no original of it."""
    from ..importers.run import source_of
    from ..model.checkpoint import Checkpoint, open_reference

    imported = open_reference(bundle, checkpoint)
    if not isinstance(imported, Checkpoint):
        raise ConfigError("--original: a module of your own is its own original: leave it out")
    source_of(imported)
    return imported


def _with_original(imported: Checkpoint, src: Path | None) -> Comparison:
    """Compare a checkpoint with the code that it was imported from."""
    from ..base.lines import read_lines
    from ..importers.run import compare_again

    return compare_again(imported, read_lines(src) if src else [])


def _check_names(backends: list[str], written: Sequence[Path | None], read: Sequence[Path | None]) -> None:
    """Refuse unknown backends and files that cannot be written, before anything runs."""
    from ..base.files import check_writable
    from ..engines import check_backend

    for name in backends:
        check_backend(name)
    for i, path in enumerate(written):
        if path:
            check_writable(path, [*read, *written[:i]])
