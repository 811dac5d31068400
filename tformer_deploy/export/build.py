"""Bundle to TensorRT plans: fix the sizes, choose what stays fp32 from measured ranges, compile, inspect, store."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import onnx
from onnx import helper

from ..base.errors import ConfigError, DataError, LimitError
from ..base.files import atomic_directory, scratch, write_json
from ..base.headers import within
from ..base.lines import read_lines
from ..base.notes import Progress, unseen
from ..bundle.contract import GRAPHS, cache_names
from ..bundle.manifest import Bundle, changing
from ..bundle.plans import FOLDER, HEADER, Profile, Stamp, file_hashes, plan_file, plans_header, trt_variant
from ..bundle.recipe import Axes
from ..decoding import DecodeOptions, decode
from ..engines.trt.api import PORTABLE, TensorRt, load_builder
from ..translate.batches import length_batches, make_batch
from .for_86 import write_for_86
from .half import Island, fix_sizes, to_half
from .plans_compared import WrongPlans, compare_plans
from .save import load_graph
from .trt_builder import BuildOptions, Plan, PlanPrecision, compile_plan

LargestValues = dict[str, dict[str, float]]
"""Graph -> tensor -> largest absolute value."""
CALIBRATED, BATCH_TOKENS = 256, 1024
"""Calibration limits: sentences of the text, and padded tokens of a batch."""
HUGE = 1e8
"""Larger values are attention masks."""


@dataclass(frozen=True)
class Built:
    """A plan, as the report describes it."""

    graph: str
    profile: str
    megabytes: float
    seconds: float
    layers: dict[str, dict[str, int]]
    """Layer kind -> type -> count."""
    weights: dict[str, int]
    """Type -> count of the weights that the finished plan names."""
    tensors: dict[str, int]
    """Type -> count of the tensors that its layers read and write, where TensorRT reports them."""
    scratch_megabytes: float | None
    """Scratch memory on the device, where TensorRT reports it."""


@dataclass
class BuildReport:
    """What was built, and from what."""

    directory: Path
    """Of the plans."""
    stamp: Stamp
    calibration: str = ""
    """The calibration text, and the number of its sentences that were decoded."""
    largest: dict[str, tuple[str, float]] = field(default_factory=dict)
    """Graph -> the tensor with the largest absolute value, and that value."""
    islands: list[Island] = field(default_factory=list)
    coverage: dict[str, float] = field(default_factory=dict)
    """Profile -> share of the text's sources that fit into it."""
    buffers: dict[str, float] = field(default_factory=dict)
    """Profile -> MB on the device for a batch: inputs, outputs and both sets of caches."""
    plans: list[Built] = field(default_factory=list)
    fast: bool = False
    """Built with the shortest search for kernels."""
    replaced: list[str] = field(default_factory=list)
    """Profiles whose earlier plans were removed."""
    compared: str = ""
    """With what, if the plans run here."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "directory": str(self.directory), "stamp": str(self.stamp)}

    def __str__(self) -> str:
        lines = [f"{self.stamp}{', built fast' if self.fast else ''}"]
        if self.calibration:
            lines.append(f"calibrated with {self.calibration}" + ("" if self.islands else ": nothing overflows"))
            lines += [f"  {graph}: largest {value:.4g}, {name}" for graph, (name, value) in self.largest.items()]
            lines += [
                f"  {i.graph}: {i.node} ({i.kind}) stays fp32, {i.tensor} reaches {i.largest:.4g}" for i in self.islands
            ]
        for profile, share in self.coverage.items():
            lines.append(f"profile {profile} takes {share:.1%} of the text's sources")
        for plan in self.plans:
            types = plan.layers.get("matrix_multiply", {})
            matmuls = ", ".join(f"{count} {kind}" for kind, count in types.items())
            scratch = "" if plan.scratch_megabytes is None else f", computes in {plan.scratch_megabytes:.1f} MB"
            lines.append(
                f"{plan.graph} {plan.profile}: {plan.megabytes:.1f} MB in {plan.seconds:.1f} s{scratch}; "
                f"matmuls: {matmuls}"
            )
        lines += [f"a batch of {profile} holds {size:.1f} MB on the device" for profile, size in self.buffers.items()]
        gone = "were there before and are gone: name that profile too to keep it"
        lines += [f"plans of {profile} {gone}" for profile in self.replaced]
        bundle, backend = self.directory.parents[2], f"trt:{self.stamp.precision}"
        lines += [self.compared] if self.compared else []
        lines.append(f"not checked yet: on their GPU, run tformer check {bundle} --backend {backend} --src FILE")
        return "\n".join([*lines, f"{self.directory}: plans written"])


def build(
    directory: Path,
    options: BuildOptions,
    profiles: Sequence[Profile] = (),
    calibrate: Path | None = None,
    src: Path | None = None,
    progress: Progress = unseen,
) -> BuildReport:
    """Compile both graphs of a bundle for every profile, in place of the plans with the same stamp.

    Half precision needs `calibrate`, text whose values decide what must stay fp32. Without profiles there are
    `usual_profiles`, for sources as long as those of `src`. Either text may stand for both. Raises TformerError, and
    leaves what was there, where a plan cannot be built as asked; WrongPlans, and leaves none, where plans give other
    outputs than their graphs, which is tried where they run.
    """
    with changing(directory) as bundle:
        return build_plans(bundle, options, profiles, calibrate, src, progress)


def build_plans(
    bundle: Bundle,
    options: BuildOptions,
    profiles: Sequence[Profile],
    calibrate: Path | None,
    src: Path | None,
    progress: Progress,
) -> BuildReport:
    """See `build`."""
    precision, variant = options.precision, trt_variant(bundle)
    calibrate = calibrate or (None if precision == "fp32" else src)
    if precision != "fp32" and calibrate is None:
        raise ConfigError(f"--precision {precision}: add --src FILE, text to see how large values get")
    axes = bundle.variants[variant].axes
    texts: dict[Path | None, list[list[int]]] = {
        path: read_sources(bundle, path, axes.src_len.max) for path in {src, calibrate} if path
    }
    lengths = [len(source) for source in texts.get(src or calibrate, [])]
    chosen = sorted(set(profiles or usual_profiles(axes, lengths)))
    for profile in chosen:
        profile.check(axes)
    tensorrt = load_builder(options.flavor)
    check_options(options, tensorrt)
    stamp = make_stamp(tensorrt, options)
    place = within(bundle.directory, Path(variant) / FOLDER / stamp.folder)
    report = BuildReport(place, stamp, fast=options.fast)
    before = {path.stem.partition("-")[2] for path in place.glob(f"{GRAPHS[1]}-*.plan")}
    report.replaced = sorted(before - set(map(str, chosen)))
    ranges: LargestValues = {}
    if calibrate:
        sources = texts[calibrate]
        progress(stage="calibration")
        ranges = largest_on_text(bundle, variant, sources, max(profile.capacity for profile in chosen))
        report.calibration = f"{min(len(sources), CALIBRATED)} sentences of {calibrate.name}"
        report.largest = largest_values(ranges)
    for profile in chosen if lengths else []:
        report.coverage[str(profile)] = sum(length <= profile.src_len for length in lengths) / len(lengths)
    plans = atomic_directory(place, True, "folder of plans", lambda old: (old / HEADER).is_file())
    with plans as folder:
        for profile in chosen:
            sizes: dict[str, int] = {}
            for graph in GRAPHS:
                progress(stage=f"{graph} {profile}")
                with scratch("tformer-build") as beside:
                    typed = beside / f"{graph}-{profile}.onnx"
                    source, largest = bundle.graph(graph, variant), ranges.get(graph, {})
                    found = type_graph(source, typed, profile, precision, largest, tensorrt.major)
                    report.islands += [island for island in found if island not in report.islands]
                    exact = sum(island.kind == "MatMul" for island in found)
                    plan = compile_plan(tensorrt, typed, options, exact)
                    sizes |= buffer_sizes(typed)
                (folder / plan_file(graph, profile)).write_bytes(plan.data)
                report.plans.append(reported(graph, profile, plan))
                progress(1)
            report.buffers[str(profile)] = sum(sizes.values()) / 1e6
        header = plans_header(bundle, variant, stamp, chosen)
        kept = {**report.to_json(), "directory": place.name, "replaced": []}  # the same wherever it was built
        write_json(folder / HEADER, {**header, "files": file_hashes(folder), "report": kept})
    try:
        report.compared = compare_plans(bundle.directory, stamp, chosen, progress)
    except WrongPlans:
        shutil.rmtree(place)
        raise
    return report


def check_options(options: BuildOptions, tensorrt: TensorRt) -> None:
    """Raise ConfigError for options that this TensorRT does not support."""
    if options.precision == "bf16" and tensorrt.major < 10:
        raise ConfigError(f"--precision bf16: {tensorrt.title} does not have it: take fp16 or fp32")
    if tensorrt.flavor == "rtx":
        refused = {
            "--version-compatible": (options.version_compatible, "comes without the lean runtime that it needs"),
            "--timing-cache": (options.timing_cache, "times nothing here, it compiles kernels where plans run"),
        }
        for name, (asked, why) in refused.items():
            if asked:
                raise ConfigError(f"{name}: {tensorrt.title} {why}: leave it out")


def make_stamp(tensorrt: TensorRt, options: BuildOptions) -> Stamp:
    """What plans with these options run on."""
    capability = tensorrt.capability()
    return Stamp(
        PORTABLE if options.hardware_compatible else capability,
        f"TensorRT {tensorrt.major}" if options.version_compatible else tensorrt.title,
        options.precision,
    )


def usual_profiles(axes: Axes, found: Sequence[int]) -> set[Profile]:
    """One sentence and the recipe's usual batch, at usual lengths, and one sentence of the longest.

    Lengths are the recipe's; of sources of the lengths `found`, that which 99 % do not exceed and the longest, each
    with twice as many target positions.
    """
    lengths = (axes.src_len.opt, axes.past_len.opt), (axes.src_len.max, axes.past_len.max + 1)
    if found:
        found = sorted(found)
        upper = [-(-length // 8) * 8 for length in (found[math.ceil(0.99 * len(found)) - 1], found[-1])]
        lengths = (upper[0], 2 * upper[0]), (upper[1], 2 * upper[1])
    usual, longest = (
        (min(source, axes.src_len.max), min(max(target, 1), axes.past_len.max + 1)) for source, target in lengths
    )
    beams = axes.beams.opt
    return {Profile(1, beams, *usual), Profile(axes.batch.opt, beams, *usual), Profile(1, beams, *longest)}


def largest_values(ranges: LargestValues) -> dict[str, tuple[str, float]]:
    """Of each graph: the tensor that got largest, and how large."""
    # Masked scores are left out: they are huge on purpose and stay fp32.
    shown = {graph: {name: x for name, x in found.items() if x < HUGE} for graph, found in ranges.items()}
    return {graph: max(found.items(), key=lambda item: item[1]) for graph, found in shown.items()}


def read_sources(bundle: Bundle, path: Path, longest: int) -> list[list[int]]:
    """Ids of the lines of a text. Raises DataError where it has none, or one that is too long."""
    tokenizers = bundle.tokenizers()
    found = [tokenizers.source_ids(line) for line in read_lines(path) if line]
    if not found:
        raise DataError(f"{path}: no line with text")
    most = max(map(len, found))
    if most > longest:
        raise DataError(
            f"{path}: a line has {most} tokens, more than the {longest} of the recipe: shorten or remove it"
        )
    return found


def largest_on_text(bundle: Bundle, variant: str, sources: Sequence[Sequence[int]], steps: int) -> LargestValues:
    """Decode the first sentences greedily in fp32 and record the largest absolute value of every tensor."""
    from ..engines.ort.ranges import RangeEngine

    lengths = [len(source) for source in sources[:CALIBRATED]]
    with RangeEngine(bundle, 0, variant) as engine:
        for batch in length_batches(lengths, BATCH_TOKENS, lambda longest: engine.limits.batch):
            options = DecodeOptions(max_tokens=min(steps, engine.limits.tgt_tokens))
            decode(engine, make_batch([sources[i] for i in batch], bundle.config.pad_id), options, strict=False)
        ranges = engine.largest
    for name, value in [item for found in ranges.values() for item in found.items()]:
        if not math.isfinite(value):
            raise LimitError(f"{name} is not finite on the calibration text, in fp32 already: the weights are unusable")
    past, present, cross = (cache_names(kind, bundle.config) for kind in ("past", "present", "cross"))
    step, encoder = ranges["decoder_step"], ranges["encoder"]
    step |= {old: step[new] for old, new in zip(past, present, strict=True)} | {name: encoder[name] for name in cross}
    return ranges


def type_graph(
    source: Path, out: Path, profile: Profile, precision: PlanPrecision, largest: dict[str, float], major: int
) -> list[Island]:
    """Write a graph with fixed sizes and the types of the precision, as that major version of TensorRT wants it."""
    model = load_graph(source)
    fix_sizes(model, profile.sizes)
    islands = [] if precision == "fp32" else to_half(model, precision, largest)
    if major < 10:
        write_for_86(model)
    onnx.save_model(model, out, save_as_external_data=True, location=f"{out.name}.data")
    onnx.checker.check_model(out, full_check=True)
    return islands


def buffer_sizes(graph: Path) -> dict[str, int]:
    """Bytes of every input and output of a graph with fixed sizes."""
    found = {}
    model = onnx.load(graph, load_external_data=False)
    for value in (*model.graph.input, *model.graph.output):
        tensor = value.type.tensor_type
        count = math.prod(dim.dim_value for dim in tensor.shape.dim)
        found[value.name] = count * helper.tensor_dtype_to_np_dtype(tensor.elem_type).itemsize
    return found


def reported(graph: str, profile: Profile, plan: Plan) -> Built:
    """Describe a plan for the report."""
    scratch = None if plan.scratch is None else plan.scratch / 1e6
    size = len(plan.data) / 1e6
    return Built(graph, str(profile), size, plan.seconds, plan.layers, plan.weights, plan.tensors, scratch)
