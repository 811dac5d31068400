"""Measure what each precision does to a trained model, a line of JSON each: where the limits of recipes come from.

Half precision runs without a GPU: the graphs that plans are built from, every half tensor rounded where it is written,
sums in fp32.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from tformer_deploy.base.lines import read_lines
from tformer_deploy.bundle.manifest import Bundle, open_bundle
from tformer_deploy.bundle.plans import trt_variant
from tformer_deploy.bundle.recipe import Tolerance, narrowest
from tformer_deploy.check import CheckOptions, Gate, Reference, make_corpus
from tformer_deploy.check.parity import check
from tformer_deploy.check.recording import Run
from tformer_deploy.check.results import Outputs
from tformer_deploy.engines import make_engine
from tformer_deploy.engines.base import Engine
from tformer_deploy.engines.ort.device_search import DeviceSearchEngine
from tformer_deploy.export.build import HUGE, LargestValues, largest_on_text
from tformer_deploy.export.half import HALF_TYPES, LARGEST, Half, to_half
from tformer_deploy.export.save import load_graph
from tformer_deploy.train.metrics import corpus_bleu

EVERYTHING = Tolerance(1e9, 1e9, 1e9, ties=1.0, top1=0.0)
"""Passes; what is a tie is decided by the error that was measured."""


class RoundedEngine(DeviceSearchEngine):
    """The graphs of target `trt` in half precision, computed in fp32 and rounded."""

    def __init__(self, bundle: Bundle, variant: str, half: Half, ranges: LargestValues) -> None:
        super().__init__(bundle, 0, variant)
        self.precision, self.ranges = half, ranges

    def _changed(self, graph: str, path: Path) -> bytes:
        model = load_graph(path)
        islands = to_half(model, self.precision, self.ranges[graph])  # type: ignore[arg-type]
        largest = max(value for value in self.ranges[graph].values() if value < HUGE)
        print(f"  {self.precision} {graph}: {len(islands)} nodes stay fp32, largest value {largest:.4g}", flush=True)
        return bytes(rounded(model, self.precision).SerializeToString())  # type: ignore[arg-type]


def rounded(model: onnx.ModelProto, half: Half) -> onnx.ModelProto:
    """A typed graph in fp32, in which what was half is rounded to it wherever it is written."""
    kind, graph = HALF_TYPES[half][0], model.graph
    inferred = onnx.shape_inference.infer_shapes(model).graph
    values = (*inferred.value_info, *inferred.input, *inferred.output)
    halves = {value.name for value in values if value.type.tensor_type.elem_type == kind}
    for value in (*graph.input, *graph.output):
        if value.name in halves:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    for tensor in graph.initializer:
        if tensor.data_type == kind:
            array = numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    nodes: list[NodeProto] = []
    for node in graph.node:
        if node.op_type == "Cast" and node.attribute[0].i in (kind, TensorProto.FLOAT) and node.input[0] in halves:
            nodes.append(helper.make_node("Identity", node.input, node.output, node.name))
            continue
        if node.op_type == "Cast" and node.attribute[0].i == kind:
            nodes.append(helper.make_node("Identity", node.input, [f"{node.output[0]}_exact"], node.name))
            nodes += rounding(f"{node.output[0]}_exact", node.output[0], half)
            continue
        behind = []
        for i, name in enumerate(node.output):
            if name in halves:
                node.output[i] = f"{name}_exact"
                behind += rounding(f"{name}_exact", name, half)
        nodes += [node, *behind]
    copies = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:], graph.value_info[:]
    graph.node.extend(copies)
    return model


def rounding(exact: str, name: str, half: Half) -> list[NodeProto]:
    """To half and back."""
    to, middle = HALF_TYPES[half][0], f"{name}_half"
    return [
        helper.make_node("Cast", [exact], [middle], f"{name}_round", to=to),
        helper.make_node("Cast", [middle], [name], f"{name}_widen", to=TensorProto.FLOAT),
    ]


def main(arguments: list[str] | None = None) -> None:
    """Measure each engine."""
    parser = argparse.ArgumentParser(prog="benchmarks.limits", description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--src", type=Path)
    parser.add_argument("--tgt", type=Path)
    parser.add_argument("--calibrate", type=Path, help="text for the ranges of half precision")
    parser.add_argument("--lines", type=int, default=300)
    parser.add_argument("--engine", action="append", required=True, help="fp16, bf16 or an engine of tformer check")
    options = parser.parse_args(arguments)
    if not options.calibrate and (half := [name for name in options.engine if name in LARGEST]):
        parser.error(f"--engine {half[0]} needs the ranges of a text: give --calibrate")
    bundle = open_bundle(options.bundle)
    gate = Gate(bundle, options.checkpoint)
    recipe = narrowest([bundle.recipe, *bundle.variants.values()])
    corpus = make_corpus(bundle.config, recipe, bundle.tokenizers(), options.src)
    corpus.sources = corpus.sources[: options.lines]
    corpus.options = dataclasses.replace(CheckOptions() if options.src else corpus.options, invariance=8)
    reference = gate.reference(corpus)
    targets = [line for line in read_lines(options.tgt) if line][: options.lines] if options.tgt else []
    ranges: LargestValues = {}
    if options.calibrate:
        text = make_corpus(bundle.config, recipe, bundle.tokenizers(), options.calibrate).sources
        ranges = largest_on_text(bundle, trt_variant(bundle), text, 256)
    for name in options.engine:
        engine: Any
        if name in LARGEST:
            engine = RoundedEngine(bundle, trt_variant(bundle), name, ranges)
        else:
            engine = make_engine(name, bundle, options.checkpoint)
        print(json.dumps({"engine": name, **measured(engine, name, reference, bundle, targets)}), flush=True)


def measured(engine: Engine, name: str, reference: Reference, bundle: Bundle, targets: list[str]) -> dict[str, Any]:
    """The figures of one engine that limits are set from."""
    with engine:
        report, runs = check(engine, name, reference, EVERYTHING, set())
    entries = {each.side: each.largest for each in report.vocabulary}
    figures: dict[str, Any] = {
        "encoder": max(report.encoder_max, entries["source"]),
        "scores": max(report.scores_max, entries["target"]),
        "steps, best token equal, as good": [report.top1.steps, report.top1.equal, report.top1.near],
        "ties": counts(report.outputs),
        "ties of large sizes": counts(report.sizes),
        "ties with itself": counts(report.invariance),
        "apart": [[d.mode, d.step, d.margin] for d in report.divergences if not d.variant],
    }
    for mode in ("greedy", "beam") if targets else ():
        figures[f"bleu {mode}"] = [bleu(side[mode], bundle, targets) for side in (reference.observed.runs, runs)]
    return figures


def counts(rows: list[Outputs]) -> dict[str, list[int]]:
    """Sentences, ties, and differences that are no ties."""
    return {f"{row.variant} {row.mode}".strip(): [row.sentences, row.ties, row.failed] for row in rows}


def bleu(run: Run, bundle: Bundle, targets: list[str]) -> float:
    """Lower-cased BLEU of the first outputs."""
    tokenizers = bundle.tokenizers()
    made = [tokenizers.target_text(run.outputs[i][0].ids) for i in range(len(targets))]
    return round(corpus_bleu(made, targets, lowercase=True), 3)


if __name__ == "__main__":
    main()
