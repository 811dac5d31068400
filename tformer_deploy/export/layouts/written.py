"""Checkpoint to another runtime's files: write, generate in that runtime, compare with eager PyTorch, keep or drop."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from ... import __version__
from ...base.errors import ConfigError, MissingExtra, ParityError
from ...base.files import atomic_directory, sha256, write_json
from ...base.headers import is_of
from ...base.notes import Progress, note, unseen
from ...base.settings import from_dict
from ...bundle.manifest import MANIFEST, open_bundle
from ...bundle.recipe import Tolerance, load_recipe
from ...bundle.text import require_fit
from ...check import make_corpus
from ...decoding import DecodeOptions, Hypothesis, decode, score
from ...decoding.search import length_norm
from ...engines import STANDARD
from ...engines.base import Batch
from ...engines.eager import EagerEngine
from ...model.checkpoint import open_reference, open_source
from ...translate.batches import make_batch
from . import LAYOUTS
from .layout import Layout, Source

HEADER, FORMAT = "tformer-layout.json", "tformer-layout"
TOLERANCE = Tolerance()
"""Of the recipe fp32."""
BATCH = 16
"""Sentences that eager decodes together."""


@dataclass
class Proof:
    """How a runtime's outputs compare with eager PyTorch's, for one precision and beam size."""

    precision: str
    beams: int
    sentences: int = 0
    equal: int = 0
    ties: int = 0
    """Other outputs that eager scores as high, within the tolerance of its recipe."""
    differ: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """A line for people."""
        how = f"beams {self.beams}" if self.beams > 1 else "greedy"
        counts = f"{self.equal} of {self.sentences} sentences equal, {self.ties} ties, {len(self.differ)} differ"
        return f"  {self.precision:<8} {how:<9} {counts}"


@dataclass
class LayoutReport:
    """What was written, and what proves it."""

    layout: str
    runtime: str
    proofs: list[Proof]
    unproven: str = ""
    """Why nothing was compared."""

    def __str__(self) -> str:
        """For people."""
        if self.unproven:
            return f"{self.layout}: NOT CHECKED: {self.unproven}"
        return "\n".join([f"{self.layout}, in {self.runtime}, against eager PyTorch", *map(str, self.proofs)])


def write_layout(
    run: Path, out: Path, name: str, src: Path | None = None, force: bool = False, progress: Progress = unseen
) -> LayoutReport:
    """Write a checkpoint in another runtime's layout, and compare that runtime's tokens with eager PyTorch's.

    `run`: a run folder, FILE.py:FUNCTION, or a bundle whose checkpoint is where it was. `src`: text to compare with.
    Raises ConfigError for what the layout cannot say, ParityError where tokens differ, and then nothing is written. A
    runtime that is not installed compares nothing, which the report and the folder say.
    """
    if name not in LAYOUTS:
        raise ConfigError(f"--layout {name}: must be one of {', '.join(LAYOUTS)}")
    layout = cast(Layout, import_module(f".{name.replace('-', '_')}", __package__))
    source = open_layout_source(run)
    if cannot := list(layout.refuse(source)):
        raise ConfigError(f"layout {name} cannot say {'; '.join(cannot)}: choose another layout, see docs/anywhere.md")
    with atomic_directory(out, force, "layout", lambda folder: is_of(folder, HEADER, FORMAT)) as directory:
        progress(stage="writing")
        layout.write(source, directory)
        report = prove(layout, name, source, directory, src, progress)
        if failed := [
            failure for each in report.proofs if layout.PRECISIONS[each.precision] for failure in failures(each)
        ]:
            raise ParityError(f"{out} not written, {layout.RUNTIME} differs: {'; '.join(failed[:3])}", report)
        write_header(directory, source, report)
    return report


def failures(proof: Proof) -> list[str]:
    """Why outputs that must equal eager's do not, one line each."""
    most = int(TOLERANCE.ties * proof.sentences)
    many = [f"{proof.ties} ties with {proof.beams} beams, at most {most} may be"] if proof.ties > most else []
    return [f"{proof.precision}: {line}" for line in [*proof.differ, *many]]


def open_layout_source(run: Path) -> Source:
    """The checkpoint of a run folder or of a bundle, or a module of the user's own."""
    checkpoint = open_reference(open_bundle(run)) if (run / MANIFEST).is_file() else open_source(run)
    require_fit(checkpoint.config, checkpoint.tokenizers, f"{run}: ")
    return Source(checkpoint, from_dict(DecodeOptions, checkpoint.decoding, "decoding"))


def prove(
    layout: Layout, name: str, source: Source, folder: Path, src: Path | None, progress: Progress = unseen
) -> LayoutReport:
    """Generate in the layout's runtime and compare."""
    report = LayoutReport(name, layout.RUNTIME, [])
    corpus = make_corpus(source.config, load_recipe(STANDARD).for_model(source.config), source.tokenizers, src)
    with EagerEngine(source.checkpoint.load_model()) as eager:
        expected = {
            beams: outputs_of(eager, corpus.sources, proving(source, beams, corpus.options.max_tokens))
            for beams in layout.BEAMS
        }
        for precision in layout.PRECISIONS:
            progress(stage=f"{layout.RUNTIME}, {precision}")
            try:
                with layout.open_runtime(source, folder, precision) as generate:
                    for beams in layout.BEAMS:
                        options = proving(source, beams, corpus.options.max_tokens)
                        found = generate(corpus.sources, options)
                        exact = layout.PRECISIONS[precision]
                        proof = compare(eager, corpus.sources, options, expected[beams], found, exact)
                        report.proofs.append(dataclasses.replace(proof, precision=precision))
            except MissingExtra as error:
                report.unproven = str(error)
                note(f"warning: layout {name} is not checked: {error}")
                return report
    return report


def proving(source: Source, beams: int, max_tokens: int) -> DecodeOptions:
    """The checkpoint's decoding options with so many beams and one output."""
    tokens = min(max_tokens, source.options.max_tokens)
    return dataclasses.replace(source.options, beams=beams, n_best=1, max_tokens=tokens)


def outputs_of(engine: EagerEngine, sources: Sequence[list[int]], options: DecodeOptions) -> list[Hypothesis]:
    """Eager's best output of each source."""
    found: list[Hypothesis] = []
    for batch in batches(engine.config.pad_id, sources):
        found += [each[0] for each in decode(engine, batch, options)]
    return found


def batches(pad: int, sources: Sequence[list[int]]) -> list[Batch]:
    """Sources in order, a few at a time."""
    parts = range(0, len(sources), BATCH)
    return [make_batch(list(sources[i : i + BATCH]), pad, range(i, min(i + BATCH, len(sources)))) for i in parts]


def compare(
    engine: EagerEngine,
    sources: Sequence[list[int]],
    options: DecodeOptions,
    expected: Sequence[Hypothesis],
    found: Sequence[list[int]],
    exact: bool,
) -> Proof:
    """Compare outputs; where they must be equal, one that eager ranks as high counts as a tie."""
    proof = Proof("", options.beams, len(sources))
    for i, (wanted, ids) in enumerate(zip(expected, found, strict=True)):
        if wanted.ids == ids:
            proof.equal += 1
            continue
        margin = margin_of(engine, sources[i], options, wanted, ids) if exact else float("inf")
        if margin <= 2 * TOLERANCE.scores:
            proof.ties += 1
        else:
            proof.differ.append(f"sentence {i + 1} with {options.beams} beams: eager has {wanted.ids}, not {ids}")
    return proof


def margin_of(
    engine: EagerEngine, source: list[int], options: DecodeOptions, wanted: Hypothesis, ids: list[int]
) -> float:
    """How far apart eager has two outputs: the tokens at their first difference, and for a beam their values."""
    end = [engine.config.eos_id]
    ours = [*wanted.ids, *(end if wanted.finished else [])]
    theirs = [*ids, *(end if len(ids) < options.max_tokens else [])]
    batch = make_batch([source, source], engine.config.pad_id, [0, 1])
    first, second = score(engine, batch, [ours, theirs])
    if options.beams == 1:
        step = next((t for t, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), -1)
        return abs(float(first[step] - second[step]))
    values = [float(each.sum()) / length_norm(len(each), options) for each in (first, second)]
    return abs(values[0] - values[1])


def write_header(folder: Path, source: Source, report: LayoutReport) -> None:
    """What made the folder, of which checkpoint, and what proved it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    write_json(
        folder / HEADER,
        {
            "format": FORMAT,
            "version": 1,
            "layout": report.layout,
            "tformer_deploy": __version__,
            "checkpoint": {"weights_sha256": source.checkpoint.weights_sha256},
            "versions": {name: version(name) for name in ("torch", "onnx")},
            "runtime": report.runtime,
            "checked": not report.unproven,
            **({"unproven": report.unproven} if report.unproven else {}),
            "proofs": [summary(each) for each in report.proofs],
            "files": {path.relative_to(folder).as_posix(): sha256(path) for path in files},
        },
    )


def summary(proof: Proof) -> dict[str, Any]:
    """A proof as JSON, with the number of differing sentences."""
    return {**dataclasses.asdict(proof), "differ": len(proof.differ)}


def to_json(report: LayoutReport) -> dict[str, Any]:
    """A report as JSON."""
    return cast(dict[str, Any], json.loads(json.dumps(dataclasses.asdict(report))))
