"""Checkpoint to another runtime's files: write, generate in that runtime, compare with eager PyTorch, keep or drop."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

from ... import __version__
from ...base.errors import ConfigError, MissingExtra, ParityError, extras, unknown
from ...base.files import atomic_directory, sha256, write_json
from ...base.headers import is_of
from ...base.notes import Progress, note, unseen
from ...base.settings import from_dict
from ...bundle.manifest import MANIFEST, open_bundle
from ...bundle.recipe import Tolerance, load_recipe
from ...bundle.text import Tokenizers, require_fit
from ...check import make_corpus
from ...decoding import DecodeOptions, Hypothesis, decode, over_defaults, score
from ...decoding.search import length_norm
from ...engines import STANDARD
from ...engines.base import Batch
from ...engines.eager import EagerEngine
from ...model.checkpoint import open_reference, open_source
from ...translate.batches import make_batch
from . import LAYOUTS
from .layout import Layout, SearchesItself, Source

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
    left_out: list[str] = field(default_factory=list)
    """Decoding options of the checkpoint that the runtime's search lacks, and that were not compared."""

    def __str__(self) -> str:
        """For people."""
        if self.unproven:
            return f"{self.layout}: NOT CHECKED: {self.unproven}"
        left_out = [f"  left out: {each}" for each in self.left_out]
        first = f"{self.layout}, in {self.runtime}, against eager PyTorch"
        return "\n".join([first, *map(str, self.proofs), *left_out])


def write_layout(
    run: Path, out: Path, name: str, src: Path | None = None, force: bool = False, progress: Progress = unseen
) -> LayoutReport:
    """Write a checkpoint in another runtime's layout, and compare that runtime's tokens with eager PyTorch's.

    `run`: a run folder, FILE.py:FUNCTION, or a bundle whose checkpoint is where it was. `src`: text to compare with.
    Raises ConfigError for what the layout cannot say, ParityError where tokens differ, and then nothing is written. A
    runtime that is not installed compares nothing, which the report and the folder say.
    """
    if name not in LAYOUTS:
        raise unknown("layout", name, LAYOUTS)
    with extras():
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
    recipe = load_recipe(STANDARD).for_model(source.config)
    corpus = make_corpus(source.config, recipe, source.tokenizers, src)
    sources = corpus.sources if src else between(corpus.sources, source.tokenizers, recipe.axes.src_len.max)
    searches = {beams: proving(source, beams, corpus.options.max_tokens) for beams in layout.BEAMS}
    if isinstance(layout, SearchesItself):
        nearest = {beams: layout.nearest(options) for beams, options in searches.items()}
        searches = {beams: options for beams, (options, _) in nearest.items()}
        report.left_out = list(dict.fromkeys(line for _, lines in nearest.values() for line in lines))
    with EagerEngine(source.checkpoint.load_model()) as eager:
        expected = {beams: outputs_of(eager, sources, options) for beams, options in searches.items()}
        for precision in layout.PRECISIONS:
            progress(stage=f"{layout.RUNTIME}, {precision}")
            try:
                with layout.open_runtime(source, folder, precision) as generate:
                    for beams, options in searches.items():
                        found = generate(sources, options)
                        exact = layout.PRECISIONS[precision]
                        proof = compare(eager, sources, options, expected[beams], found, exact)
                        report.proofs.append(dataclasses.replace(proof, precision=precision))
            except MissingExtra as error:
                report.unproven = str(error)
                note(f"warning: layout {name} is not checked: {error}")
                return report
    return report


def proving(source: Source, beams: int, most: int) -> DecodeOptions:
    """The checkpoint's decoding options with so many beams and one output of at most so many tokens."""
    tokens = min(most, source.options.max_tokens, source.config.max_positions)
    limits = {"max_tokens": tokens, "min_tokens": min(tokens, source.options.min_tokens)}
    return over_defaults(source.checkpoint.decoding, {"beams": beams, "n_best": 1, **limits})


def between(generated: Sequence[list[int]], tokenizers: Tokenizers, longest: int) -> list[list[int]]:
    """Generated sources of entries that text can have, at least one, between what the tokenizers put around them."""
    prefix, suffix = tokenizers.around
    most, size = longest - len(prefix) - len(suffix), tokenizers.source.size
    words = ([i for i in ids[:-1] if i < size][:most] for ids in generated)
    return [[*prefix, *ids, *suffix] for ids in words if ids]


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
            "versions": installed("torch", "onnx", report.runtime),
            "runtime": report.runtime,
            "checked": not report.unproven,
            **({"unproven": report.unproven} if report.unproven else {}),
            **({"left_out": report.left_out} if report.left_out else {}),
            "proofs": [summary(each) for each in report.proofs],
            "files": {path.relative_to(folder).as_posix(): sha256(path) for path in files},
        },
    )


def installed(*names: str) -> dict[str, str]:
    """Versions of those of some packages that are installed."""
    found = {}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def summary(proof: Proof) -> dict[str, Any]:
    """A proof as JSON, with the number of differing sentences."""
    return {**dataclasses.asdict(proof), "differ": len(proof.differ)}


def to_json(report: LayoutReport) -> dict[str, Any]:
    """A report as JSON."""
    return cast(dict[str, Any], json.loads(json.dumps(dataclasses.asdict(report))))
