"""Graphs that are damaged or a stranger's: one line, exit code 1, nothing read outside the bundle."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import GraphProto, ModelProto, TensorProto, helper

from tformer_deploy.base.errors import ArtifactError, ConfigError, EngineError, MissingExtra
from tformer_deploy.base.files import sha256
from tformer_deploy.base.headers import digest
from tformer_deploy.base.notes import LONGEST_REASON
from tformer_deploy.bench import ceiling
from tformer_deploy.bench.profile import read_trace
from tformer_deploy.bundle.manifest import open_bundle
from tformer_deploy.engines.ort.layers import open_copy
from tformer_deploy.engines.ort.library import check_library, reason
from tformer_deploy.engines.ort.standard import OrtEngine

from .command import failed_line, run_process
from .conftest import exported_once, write_lines
from .mutations import Mutation, behind, break_graph, constant

DAMAGED, NEWER = "it is damaged, or tformer did not make it", "update onnxruntime, or export with a lower opset"


@pytest.fixture(scope="module")
def several(run: Path) -> Path:
    """A bundle with graphs for several runtimes. Read only."""
    return exported_once(run, "several-bundle", ["fp32", "int8", "trt"], write_lines(run.parent / "several.txt"))


def changed(bundle: Path, out: Path, file: str, change: Callable[[bytes], bytes]) -> Path:
    """A copy of a bundle with one file changed and its hash made to fit."""
    if not out.exists():
        shutil.copytree(bundle, out)
    before = (out / file).read_bytes()
    after = change(before)
    assert after != before
    (out / file).write_bytes(after)
    manifest = json.loads((out / "manifest.json").read_text())
    manifest["files"][file] = sha256(out / file)
    if "sha256" in manifest:
        manifest["sha256"] = digest(manifest)
    (out / "manifest.json").write_text(json.dumps(manifest))
    return out


def refused(bundle: Path, *arguments: object) -> str:
    """The one line of a translation that fails."""
    done = run_process("translate", bundle, *arguments, stdin=b"w5 w6\n")
    line = failed_line(done)
    assert done.stdout == b"" and len(line) < len(str(bundle)) + LONGEST_REASON + 300 and line.isprintable()
    return line


def of_model(change: Callable[[ModelProto], object]) -> Callable[[bytes], bytes]:
    """A change of a graph's file by a change of the model in it."""

    def apply(content: bytes) -> bytes:
        model = onnx.load_model_from_string(content)
        change(model)
        return bytes(model.SerializeToString())

    return apply


def rename_output(model: ModelProto) -> None:
    behind(model.graph, "cross_k_0", helper.make_node("Identity", ["cross_k_0_before"], ["other"]))
    model.graph.output[0].name = "other"


def cut_heads(model: ModelProto) -> None:
    for name, value in (("from", [0]), ("to", [1]), ("axis", [1])):
        constant(model.graph, name, value, np.int64)
    cut = helper.make_node("Slice", ["cross_k_0_before", "from", "to", "axis"], ["cross_k_0"])
    behind(model.graph, "cross_k_0", cut)
    next(each for each in model.graph.output if each.name == "cross_k_0").type.tensor_type.shape.dim[1].dim_value = 1


def set_metadata(name: str, value: str) -> Callable[[ModelProto], None]:
    def change(model: ModelProto) -> None:
        next(each for each in model.metadata_props if each.key == name).value = value

    return change


def set_domain(model: ModelProto) -> None:
    model.graph.node[0].domain = "elsewhere"
    model.opset_import.append(helper.make_opsetid("elsewhere", 1))


def loop_for_ever(model: ModelProto) -> None:
    """A loop of 2^62 turns, which the library would begin while it loads the graph."""
    one = helper.make_tensor_value_info("going", TensorProto.BOOL, [])
    turn = helper.make_tensor_value_info("turn", TensorProto.INT64, [])
    out = helper.make_tensor_value_info("going_on", TensorProto.BOOL, [])
    body = helper.make_graph([helper.make_node("Identity", ["going"], ["going_on"])], "body", [turn, one], [out])
    constant(model.graph, "turns", 1 << 62, np.int64)
    model.graph.node.insert(0, helper.make_node("Loop", ["turns", ""], [], body=body))


def call_a_function(model: ModelProto) -> None:
    opset = [helper.make_opsetid("", 23)]
    model.functions.append(
        helper.make_function("own", "f", ["x"], ["y"], [helper.make_node("Identity", ["x"], ["y"])], opset)
    )


def long_key(content: bytes) -> bytes:
    """The field `graph` by a number of 33 bits, of which ONNX Runtime reads 32 and finds the graph."""
    model = onnx.load_model_from_string(content)
    graph = model.graph.SerializeToString()
    model.ClearField("graph")
    return bytes(model.SerializeToString() + varint(7 << 3 | 2 | 1 << 32) + varint(len(graph)) + graph)


def varint(value: int) -> bytes:
    *others, last = [value >> shift & 127 for shift in range(0, max(value.bit_length(), 1), 7)]
    return bytes([*(each | 128 for each in others), last])


STRANGE: dict[str, tuple[Callable[[bytes], bytes], tuple[str, ...]]] = {
    "garbage": (lambda _: bytes(range(256)) * 20, (DAMAGED, "Protobuf parsing failed", "export the bundle again")),
    "nothing": (lambda _: b"", (DAMAGED,)),
    "the half of it": (lambda content: content[: len(content) // 2], (DAMAGED, "Protobuf parsing failed")),
    "a name that is no text": (lambda content: content.replace(b"src_lengths", b"src_len\xffths"), (DAMAGED, "utf-8")),
    "metadata that is no text": (lambda content: content.replace(b"tformer.graph", b"tformer.gr\xffph"), (DAMAGED,)),
    "a loop": (of_model(loop_for_ever), ("has Loop, which tformer never exports",)),
    "a function": (of_model(call_a_function), ("has functions of its own, which tformer never exports",)),
    "a long key": (long_key, (DAMAGED, "Protobuf parsing failed", "the key of a field has more than 32 bits")),
    "a group": (lambda content: b"\x0b\x0c" + content, (DAMAGED, "a field of kind 3")),
    "an unknown operator": (
        of_model(lambda model: setattr(model.graph.node[0], "op_type", "Unheard")),
        ("No Op registered for Unheard", NEWER),
    ),
    "another's operator": (of_model(set_domain), ("elsewhere:Shape(-1) is not a registered function/op", NEWER)),
    "a later format": (of_model(lambda model: setattr(model, "ir_version", 99)), ("IR version: 99", NEWER)),
    "a later opset": (
        of_model(lambda model: setattr(model.opset_import[0], "version", 99)),
        ("onnx opset versions", NEWER),
    ),
    "an input from nowhere": (
        of_model(lambda model: model.graph.node[0].input.__setitem__(0, "nowhere")),
        (DAMAGED, "nowhere"),
    ),
    "escape codes and a long name": (
        of_model(lambda model: model.graph.node[0].input.__setitem__(0, "\x1b[31m" + "long" * 9999)),
        (DAMAGED, "?[31mlong", "…"),
    ),
    "an output of another name": (of_model(rename_output), ("encoder.onnx has no 'cross_k_0'", "export the bundle")),
    "another size": (
        of_model(cut_heads),
        ("encoder.onnx: 'cross_k_0' is tensor(float) of ['batch', 1, 'src_len', 8]",),
    ),
    "nested metadata": (of_model(set_metadata("tformer.model", "[" * 100_000)), ("manifest.json was edited",)),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_a_strange_graph_is_one_line(kind: str, several: Path, tmp_path: Path) -> None:
    change, words = STRANGE[kind]
    line = refused(changed(several, tmp_path / "strange", "encoder.onnx", change))
    for word in words:
        assert word in line
    if DAMAGED in line:
        assert NEWER not in line


GATHER = "Status Message: indices element out of data bounds"


def beyond_the_vocabulary(graph: GraphProto) -> None:
    constant(graph, "much", 1000, np.int32)
    behind(graph, "top_ids", helper.make_node("Add", ["top_ids_before", "much"], ["top_ids"]))


def too_few(graph: GraphProto) -> None:
    for name, value in (("from", [0]), ("to", [1]), ("axis", [2])):
        constant(graph, name, value, np.int64)
    behind(graph, "top_ids", helper.make_node("Slice", ["top_ids_before", "from", "to", "axis"], ["top_ids"]))


@pytest.mark.parametrize(
    ("mutate", "words"), [(beyond_the_vocabulary, GATHER), (too_few, "returns 'top_ids' of [1, 2, 1]: export")]
)
def test_a_graph_that_stops_is_one_line(mutate: Mutation, words: str, several: Path, tmp_path: Path) -> None:
    """The library's log, which would say it as well, is silent."""
    broken = break_graph(several, tmp_path / "broken", "decoder_step", mutate)
    assert words in refused(broken, "--beams", 2)


OUTSIDE: dict[str, tuple[Callable[[Path], str], str]] = {
    "above": (lambda folder: "../secret", "escapes model directory"),
    "above through a folder": (lambda folder: "below/../../secret", "escapes model directory"),
    "absolute": (lambda folder: str(folder.parent / "secret"), "Absolute path not allowed"),
    "a link": (lambda folder: link(folder, "../secret"), "escapes model directory"),
    "a link to a folder": (lambda folder: f"{link(folder, '..')}/secret", "escapes model directory"),
    "a device": (lambda folder: link(folder, "/dev/zero"), "escapes model directory"),
    "a pipe": (lambda folder: pipe(folder), "regular file"),
    "a pipe above": (lambda folder: f"../{pipe(folder.parent)}", "escapes model directory"),
    "a folder": (lambda folder: ".", "regular file"),
    "no name": (lambda folder: "", "location cannot be empty"),
    "memory": (lambda folder: "*/_ORT_MEM_ADDR_/*", "in-memory address marker"),
}
"""Where the weights lie, made beside a bundle, and what is said of it."""


def link(folder: Path, target: str) -> str:
    (folder / "link").symlink_to(target)
    return "link"


def pipe(folder: Path) -> str:
    os.mkfifo(folder / "pipe")
    return "pipe"


def weights_at(location: str) -> Callable[[ModelProto], None]:
    def change(model: ModelProto) -> None:
        tensors = [each for each in model.graph.initializer if each.data_location == TensorProto.EXTERNAL]
        for entry in [entry for tensor in tensors for entry in tensor.external_data if entry.key == "location"]:
            entry.value = location

    return change


def outside(bundle: Path, folder: Path, kind: str) -> Path:
    """A bundle with an encoder whose weights lie outside it, where there are some that fit."""
    out = Path(shutil.copytree(bundle, folder / "bundle"))
    shutil.copy(bundle / "weights.data", folder / "secret")
    (out / "below").mkdir()
    return changed(bundle, out, "encoder.onnx", of_model(weights_at(OUTSIDE[kind][0](out))))


@pytest.mark.parametrize("kind", OUTSIDE)
def test_weights_outside_the_bundle_are_not_read(kind: str, several: Path, tmp_path: Path) -> None:
    line = refused(outside(several, tmp_path, kind))
    assert DAMAGED in line and OUTSIDE[kind][1] in line


@pytest.mark.parametrize("kind", ["above", "absolute", "a link", "a pipe", "memory"])
def test_a_copy_reads_nothing_outside_the_bundle(kind: str, several: Path, tmp_path: Path) -> None:
    with OrtEngine(open_bundle(several)) as engine:
        engine.bundle = open_bundle(outside(several, tmp_path, kind))
        with pytest.raises(ArtifactError, match=re.escape(OUTSIDE[kind][1])):
            open_copy(engine, "encoder")


def test_a_graph_that_is_no_file_is_refused(several: Path, tmp_path: Path) -> None:
    """Nobody waits for a pipe."""
    for number, make in enumerate((os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir)):
        out = Path(shutil.copytree(several, tmp_path / str(number)))
        (out / "encoder.onnx").unlink()
        make(out / "encoder.onnx")
        assert "encoder.onnx" in refused(out)


def garbage(content: bytes) -> bytes:
    return b"garbage" * 99


@pytest.mark.parametrize("file", ["int8/encoder.onnx", "int8/decoder_step.onnx"])
def test_variants_say_it_too(file: str, several: Path, tmp_path: Path) -> None:
    line = refused(changed(several, tmp_path / "strange", file, garbage), "--variant", "int8")
    assert f"{file}: {DAMAGED}" in line


@pytest.mark.parametrize("change", [garbage, of_model(weights_at("../secret"))])
@pytest.mark.parametrize("file", ["trt/encoder.onnx", "trt/decoder_step.onnx"])
def test_build_says_it_too(file: str, change: Callable[[bytes], bytes], several: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")
    strange = changed(several, tmp_path / "strange", file, change)
    (strange / "secret").write_bytes((strange / "trt/weights.data").read_bytes())
    (tmp_path / "lines").write_text("w5 w6\n")
    line = failed_line(run_process("build", strange, "--src", tmp_path / "lines", "--profile", "1x1x8x8"))
    assert f"{file}: {DAMAGED}" in line
    assert not (strange / "trt/plans").exists()
    assert f"{file}: {DAMAGED}" in refused(strange, "--backend", "ort:trt")


def test_bench_says_it_too(several: Path, tmp_path: Path) -> None:
    strange = changed(several, tmp_path / "strange", "decoder_step.onnx", garbage)
    done = run_process(
        "bench", strange, "--backend", "ort", "--variant", "fp32", "--batch", 1, "--new-tokens", 2, "--rounds", 1
    )
    assert DAMAGED in failed_line(done)


def test_matrix_products_that_cannot_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "matmul_fp32.onnx").write_bytes(b"garbage" * 99)
    monkeypatch.setattr(ceiling, "files", lambda package: tmp_path)
    monkeypatch.setitem(sys.modules, "tformer_native", None)
    with pytest.raises(MissingExtra, match=r"matmul_fp32.onnx: it is damaged.*; tformer-native is not installed"):
        ceiling.matrix_rates(1)


def test_a_trace_that_was_cut_off(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text('[\n{"cat" : "Session","name" :"model_run","dur" :9,"ts" :0},\n{"cat" : "Nod')
    with pytest.raises(EngineError, match=r"trace.json is damaged: make room for temporary files"):
        read_trace("encoder", tmp_path / "trace.json", 0)


def test_an_old_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They write past the caches of a step in place, and some read any file that a graph names."""
    for version in ("1.24.0", "1.30.0", "1.9"):
        monkeypatch.setattr("onnxruntime.__version__", version)
        with pytest.raises(ConfigError, match=rf"onnxruntime {version} .*update it to 1.31.0 or later"):
            check_library()
    for version in ("1.31.0", "1.31.1", "2.0.0"):
        monkeypatch.setattr("onnxruntime.__version__", version)
        check_library()


def test_reasons_are_short() -> None:
    """Without the library's codes and the functions of its source."""
    places = "/onnxruntime_src/core/model.cc:256 onnxruntime::Model::Model(onnx::ModelProto&&, const int&) const "
    said = f"[ONNXRuntimeError] : 1 : FAIL : Load model from a/b.onnx failed:{places}No good.\n"
    assert reason(RuntimeError(said)) == "No good"
    assert reason(RuntimeError("Fail: tensorprotoutils.cc:434 GetData No\tgood\x1b[0m")) == "Fail: No good?[0m"
    assert len(reason(RuntimeError("x" * 10_000))) <= LONGEST_REASON
