"""A quantized variant without its rounding: its own nodes or instructions over the checkpoint's weights.

Rounding hides the effect of small faults, such as a wrong number or a value read in the place of another. Without
rounding, a variant must be as close to eager as one in fp32. Needs onnx.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import GraphProto, NodeProto, helper, numpy_helper

from ..base.errors import ArtifactError, EngineError, LimitError
from ..base.files import sha256, write_json
from ..base.headers import HEADER_BYTES, parse_json, read_json
from ..bundle.contract import GRAPHS, PROGRAM, SLOTS_GRAPH, WEIGHTS, file_of
from ..bundle.manifest import MANIFEST, REPORT, Bundle
from ..bundle.origin import Origin, read_origin
from ..bundle.recipe import Recipe
from ..export.save import load_graph, origins_of, save_graphs
from .origins import Array, Bounds, Checkpoint, Made, named_tensors
from .report import EngineReport
from .rounding import Unrounded

if TYPE_CHECKING:
    from ..model.seq2seq import Seq2Seq

LANES, LINE = 16, 64
"""Outputs of a panel; where arrays of programs begin."""
READ = ("x", "y", "q", "k", "v", "gate", "residual")
"""Operands of instructions."""
UNROUNDED = "unrounded "
"""Before the names of constants that are floats again."""
PRODUCTS = {"MatMulIntegerToFloat": 6, "MatMulNBits": 5}
"""Quantized matmuls, and the input that is their bias."""


def compare_unrounded(
    report: EngineReport, bundle: Bundle, variant: str, model: Seq2Seq, run: Callable[[Bundle], EngineReport]
) -> None:
    """Check a variant without its rounding, and add the result to its report; `run` compares an engine with eager."""
    try:
        with unrounded(bundle, variant, model) as plain:
            found = run(plain)
    except OSError as error:  # a full disk
        report.unrounded = Unrounded(skipped=str(error))
        return
    except (ArtifactError, EngineError, LimitError) as error:
        found = EngineReport(report.engine, failures=[str(error)])
    equal, sentences = (sum(getattr(each, of) for each in found.outputs) for of in ("equal", "sentences"))
    report.unrounded = Unrounded(found.encoder_max, found.scores_max, equal, sentences)
    report.failures += [f"without its rounding: {failure}" for failure in found.failures]


@contextmanager
def unrounded(bundle: Bundle, variant: str, model: Seq2Seq) -> Iterator[Bundle]:
    """A temporary bundle of one variant over floats. Raises ArtifactError for a constant of unknown origin."""
    recipe, own = bundle.variants[variant], bundle.measured(variant)
    if recipe.cache_precision != "fp32":
        recipe = dataclasses.replace(recipe, cache_precision="fp32")
        own["recipe"] = dataclasses.asdict(recipe)
    files = bundle.manifest["files"]
    copied = {name: files[name] for name in files if "/" not in name and name not in (WEIGHTS, REPORT)}
    manifest = {**bundle.manifest, "variants": {variant: own}, "default": "", "files": copied}
    manifest.pop("shortlist", None)
    undo = Undo(Checkpoint(named_tensors(model), model.config, own.get("scales", {})), own.get("ranges", {}))
    with tempfile.TemporaryDirectory(prefix="tformer-check-") as folder:
        made = Path(folder)
        (made / variant).mkdir()
        for name in copied:
            shutil.copyfile(bundle.directory / name, made / name)
        if recipe.target == "native":
            undo.program(bundle.directory / variant, made / variant, recipe)
            names = [PROGRAM]
        else:
            graphs = [name for name in (*GRAPHS, SLOTS_GRAPH) if bundle.graph(name, variant).is_file()]
            models = {name: load_graph(bundle.graph(name, variant)) for name in graphs}
            for name, graph in models.items():
                FloatGraph(undo, graph.graph, origins_of(graph, bundle.graph(name, variant)))
            save_graphs(models, made / variant)
            names = [file_of(name, recipe) for name in graphs]
        new = {f"{variant}/{name}": sha256(made / variant / name) for name in (*names, WEIGHTS)}
        manifest["files"] = {**copied, **new}
        write_json(made / MANIFEST, manifest)
        yield Bundle(made, bundle.config, bundle.recipe, manifest, {variant: recipe}, "")


class Undo:
    """Takes the rounding out of graphs and programs."""

    def __init__(self, checkpoint: Checkpoint, bounds: Bounds) -> None:
        self.checkpoint, self.bounds = checkpoint, bounds

    def made(self, name: str, origin: Origin | None) -> Made:
        """What a constant is made from."""
        made = self.checkpoint.made(origin)
        if made is None:
            raise ArtifactError(f"{name} is of no tensor of the checkpoint")
        return made

    def positive(self, weight: Made) -> bool:
        """Whether a layer's input is never negative: its quantization then replaces the relu before it."""
        name = weight.names[0].removesuffix(".weight")
        return name in self.bounds and self.bounds[name][0] == 0

    def program(self, source: Path, out: Path, recipe: Recipe) -> None:
        """Write a program of floats to `out`."""
        about = read_json(source, PROGRAM, HEADER_BYTES)
        stated = parse_json(about["metadata"]["tformer.recipe"])
        about["metadata"]["tformer.recipe"] = json.dumps({**stated, "cache_precision": recipe.cache_precision})
        shutil.copyfile(source / WEIGHTS, out / WEIGHTS)
        with (out / WEIGHTS).open("ab") as file:
            for graph in about["graphs"].values():
                graph["code"] = FloatCode(self, about["arrays"], graph, file).code
        (out / PROGRAM).write_text(json.dumps(about))


class FloatGraph:
    """One graph over floats, in place: nothing is rounded."""

    def __init__(self, undo: Undo, graph: GraphProto, origins: Mapping[str, Origin]) -> None:
        self.undo, self.graph, self.origins = undo, graph, origins
        self.tensors = {tensor.name: tensor for tensor in graph.initializer}
        del graph.value_info[:]  # types of what was rounded
        for place, node in reversed([*enumerate(graph.node)]):
            if node.op_type in PRODUCTS:
                graph.node.remove(node)
                for new in reversed(self._product(node)):
                    graph.node.insert(place, new)
            elif node.op_type == "Gather" and self._form(node.input[0]) == "int8":
                # Its scales stay, so it becomes the weights divided by them.
                made = self._made(node.input[0])
                given = None if made.scales is None else made.scales[:, None]
                own = np.maximum(np.abs(made.array).max(1, keepdims=True) / np.float32(127), np.float32(1e-30))
                array = made.array / (own if given is None else given)
                self.tensors[node.input[0]].CopyFrom(numpy_helper.from_array(array, node.input[0]))
        for node in graph.node:
            if node.op_type == "QuantizeLinear":
                reader = next(each for each in graph.node if node.output[0] in each.input)
                weight = self._made(reader.input[1].removeprefix(UNROUNDED))
                node.op_type = "Relu" if undo.positive(weight) else "Identity"
                del node.input[1:]
                del node.attribute[:]
                for limit in self.graph.node:
                    if limit.op_type == "Min" and limit.output[0] == node.input[0]:
                        limit.op_type = "Identity"
                        del limit.input[1:]

    def _made(self, name: str) -> Made:
        return self.undo.made(name, self.origins.get(name))

    def _form(self, name: str) -> str:
        return self.origins[name].form if name in self.origins else ""

    def _product(self, node: NodeProto) -> list[NodeProto]:
        """A product of floats in the place of one of integers."""
        name, bias = node.input[1], node.input[PRODUCTS[node.op_type] :][:1]
        weight = self._made(name).array
        reads = next((each for each in self.graph.node if node.input[0] in each.output), None)
        source = next((each for each in self.graph.node if reads is not None and reads.input[0] in each.output), None)
        for shrink in source.input if source is not None and source.op_type == "Mul" else ():
            if self._form(shrink) == "shrink":
                weight = weight / numpy_helper.to_array(self.tensors[shrink])
        name = f"{UNROUNDED}{name}"
        if name not in {tensor.name for tensor in self.graph.initializer}:
            self.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(weight.T), name))
        out = node.output[0]
        product = helper.make_node("MatMul", [node.input[0], name], [f"{out} product"])
        added = [f"{out} product", *bias] if bias and bias[0] else [f"{out} product"]
        return [product, helper.make_node("Add" if len(added) == 2 else "Identity", added, [out])]


class FloatCode:
    """One graph's instructions over floats."""

    def __init__(self, undo: Undo, arrays: list[dict[str, Any]], graph: dict[str, Any], file: Any) -> None:
        self.undo, self.arrays, self.widths, self.file = undo, arrays, graph["widths"], file
        self.code: list[dict[str, Any]] = []
        self.same: dict[int, tuple[int, int]] = {}
        """A value that was rounded -> the one that it is now, and its first column there."""
        readers = {each["x"][0]: each["matrix"] for each in graph["code"] if "matrix" in each}
        for each in graph["code"]:
            self._add(dict(each), readers)

    def _add(self, each: dict[str, Any], readers: Mapping[int, Any]) -> None:
        for role in READ:
            if role in each and each[role][0] in self.same:
                value, first = self.same[each[role][0]]
                each[role] = [value, first + each[role][1], each[role][2]]
        if each["op"] == "embed" and "scales" in each:
            scales = self._made(each.pop("scales"))
            each["factor"] *= float(scales.factors[0])
            each["table"] = self._array(self._made(each["table"]).array)
        if "matrix" in each and each["matrix"]["kind"] != "fp32":
            each["matrix"] = self._matrix(each["matrix"])
            each.pop("step", None)
            each.pop("zero", None)
        rounded = each.pop("rounded", None)
        each.pop("rounding", None)
        if rounded is None:
            self.code.append(each)
            return
        relu = self.undo.positive(self._made(readers[rounded]["data"]))
        width = self.widths[rounded]
        if each["op"] != "round":
            if "out" not in each:
                self.widths.append(width)
                each["out"] = len(self.widths) - 1
            self.code.append(each)
        view = each["x"] if each["op"] == "round" else [each["out"], 0, width]
        if relu:
            self.code.append({"op": "activate", "x": view, "activation": "relu", "out": rounded})
        else:
            self.same[rounded] = view[0], view[1]

    def _made(self, number: int) -> Made:
        about = self.arrays[number]
        return self.undo.made(about["name"], read_origin(about["origin"]) if "origin" in about else None)

    def _matrix(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """The checkpoint's numbers in panels of 16 outputs."""
        weight = self._made(about["data"]).array
        padded = np.pad(weight, ((0, -len(weight) % LANES), (0, 0))).reshape(-1, LANES, weight.shape[1])
        data = self._array(padded.transpose(0, 2, 1))
        return {"kind": "fp32", "outputs": about["outputs"], "inputs": about["inputs"], "data": data}

    def _array(self, array: Array) -> int:
        self.file.write(bytes(-self.file.tell() % LINE))
        about = {"name": "", "dtype": "float32", "shape": list(array.shape), "offset": self.file.tell()}
        self.file.write(np.ascontiguousarray(array, np.float32).tobytes())
        self.arrays.append(about)
        return len(self.arrays) - 1
